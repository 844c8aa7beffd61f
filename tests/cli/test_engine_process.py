"""The engine is started as the pool's spec says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chairlift_cli.engine_process import EngineProcess
from chairlift_cli.run_dir import RunDir
from chairlift_engine.command_line import parser
from chairlift_operator.spec_parsing import parse_pool


def test_tenants_find_each_others_prompts_only_where_the_pool_says_so(
    tmp_path: Path, pool_text: Callable[..., str]
) -> None:
    for runtime, shared in (("", False), ("    sharePrefixes: true\n", True)):
        text = pool_text().replace("  runtime:\n", "  runtime:\n" + runtime)
        engine = EngineProcess("engine-0", parse_pool(text), RunDir(tmp_path))
        options = parser().parse_args(engine._command()[5:])
        assert options.share_prefixes == ("yes" if shared else "no")
