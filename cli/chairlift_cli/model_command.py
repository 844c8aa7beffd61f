"""`chairlift model get`: puts a model into the cache and says where it is.

The download is `model_get`'s; this only speaks to the terminal. The demo calls it too.
"""

from __future__ import annotations

from chairlift_cli.model_get import get_model
from chairlift_engine.model_source import cache_root


def _report(line: str) -> None:
    print(line, flush=True)


def run_model_get(name: str) -> int:
    folder = get_model(name, cache_root(), _report)
    print(folder, flush=True)
    return 0
