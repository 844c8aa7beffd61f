"""Becomes another command that the kernel ends when its parent dies, even by kill -9.

Run by path, never imported by what it becomes: `python -I -S die_with_parent.py PARENT SIGNAL
COMMAND...`. A process of its own rather than a preexec_fn, which may deadlock in a parent that has
threads. Only Linux has the call; elsewhere the command runs unbound.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def bound(command: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command line that runs `command` so; the caller becomes the parent."""
    shim = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death_signal))]
    return [*shim, *command]


def main() -> None:
    parent, death_signal, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # it died before the call above could have told
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
