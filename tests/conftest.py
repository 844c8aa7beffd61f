"""For all parts: hypothesis has no deadlines on shared machines, and in CI the same examples every
time; child processes hear SIGINT, also when the tests run in the background of a shell."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

settings.register_profile("chairlift", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("chairlift")

# A shell starts its background jobs with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
