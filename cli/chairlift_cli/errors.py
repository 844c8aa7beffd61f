"""What ends the command with a sentence for the person at the shell instead of a traceback."""

from __future__ import annotations

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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses becomes a sentence that names the path."""
    try:
        yield
    except OSError as error:
        raise CliError(f"cannot write {error.filename or path}: {error.strerror}") from error
