"""Pool files as a user gives them: read and checked, with all that is wrong said at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from chairlift_cli.errors import CliError
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import SpecError, parse_pool, with_overrides


def run_validate(files: Sequence[Path]) -> int:
    """Every file is looked at, whatever is wrong with those before it."""
    exit_code = 0
    for file in files:
        try:
            pool = read_pool(file, ())
        except CliError as error:
            print(f"chairlift: {error}", file=sys.stderr)
            exit_code = error.exit_code
        else:
            print(f"{file}: InferencePool {pool.name} is valid")
    return exit_code


def read_pool(path: Path, settings: Sequence[str]) -> InferencePool:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}; name an existing file") from error
    except UnicodeDecodeError as error:
        raise CliError(f"cannot read {path}: it is not UTF-8 text") from error
    try:
        pool = parse_pool(text)
    except SpecError as error:
        raise CliError(f"{path}: {_listed(error)}") from error
    try:
        return with_overrides(pool, settings)
    except SpecError as error:
        raise CliError(f"--set: {_listed(error)}") from error


def _listed(error: SpecError) -> str:
    if len(error.problems) == 1:
        return error.problems[0]
    return "".join(f"\n  - {problem}" for problem in error.problems)
