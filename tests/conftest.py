"""Hypothesis for all parts: no deadlines on shared machines; in CI the same examples every time."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("chairlift", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("chairlift")
