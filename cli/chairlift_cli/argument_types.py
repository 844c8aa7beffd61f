"""Values on the command line, each refused in one sentence. `__main__` names them by argument."""

from __future__ import annotations

import argparse


def duration(text: str) -> float:
    from chairlift_operator.spec_values import parse_duration  # with it comes pydantic

    try:
        duration_s = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from error
    if duration_s <= 0:
        raise argparse.ArgumentTypeError("must be above 0s")
    return duration_s


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def key(text: str) -> str:
    """As an HTTP header can carry it."""
    if not text or not all("!" <= character <= "~" for character in text):
        raise argparse.ArgumentTypeError("must be ASCII characters without blanks")
    return text


def secret_name(text: str) -> str:
    """As a TenantQuota can name it; Kubernetes would take more."""
    from chairlift_operator.spec_values import NAME_DEMAND, NAME_PATTERN

    if not NAME_PATTERN.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{NAME_DEMAND}, not {text!r}")
    return text


def port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 65535, not {text!r}")
    return int(text)
