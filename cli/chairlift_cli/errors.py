"""What ends the command with a sentence for the person at the shell instead of a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

USAGE_EXIT_CODE: Final = 2  # the caller has to change something
FAILURE_EXIT_CODE: Final = 1  # something that should have worked did not


class CliError(Exception):
    """`str()` is one or more clear sentences; `exit_code` follows argparse: 2 for bad input."""

    def __init__(self, message: str, exit_code: int = USAGE_EXIT_CODE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check_writable(path: Path) -> None:
    """Raise CliError for a file that could not be written, before what it is for is done."""
    if path.is_dir():
        raise CliError(f"cannot write {path}: it is a folder; name a file")
    if not path.parent.is_dir():
        raise CliError(f"cannot write {path}: {path.parent} is no folder; name an existing one")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CliError(f"cannot write {path}: it is not allowed; name another")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses becomes a sentence that names the path."""
    try:
        yield
    except OSError as error:
        raise CliError(f"cannot write {error.filename or path}: {error.strerror}") from error
