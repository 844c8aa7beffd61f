"""`chairlift local`: checks what the user gave before any process starts, then hands over.

Knows files and terminals; `supervisor` knows processes.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from chairlift_cli.errors import CliError
from chairlift_cli.supervisor import LocalOptions, serve
from chairlift_cli.view import LineView, LiveView, View
from chairlift_engine import model_source
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import SpecError, parse_pool, with_overrides


def run_local(args: argparse.Namespace) -> int:
    pool = read_pool(args.file, args.settings)
    check_model(pool)
    console = Console()
    live = console.is_terminal and not args.no_live
    view: View = LiveView(pool, console) if live else LineView()
    options = LocalOptions(
        port=args.port,
        batch_key=args.batch_key,
        run_dir=args.run_dir,
        journal_file=args.journal,
    )
    asked_by = asyncio.run(serve(pool, options, view))
    return 128 + signal.SIGINT if asked_by == signal.SIGINT else 0


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


def check_model(pool: InferencePool) -> None:
    """Say at once that a model is not here; an engine would say so only after loading torch."""
    source = pool.spec.model.source
    if pool.spec.runtime.engine == "simulator" or source.startswith("hf://"):
        return
    try:
        model_source.resolve(source)
    except model_source.ModelSourceError as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"model.source: cannot read {source}: {error.strerror}") from error


def _listed(error: SpecError) -> str:
    if len(error.problems) == 1:
        return error.problems[0]
    return "".join(f"\n  - {problem}" for problem in error.problems)
