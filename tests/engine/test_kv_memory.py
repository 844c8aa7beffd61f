"""How many KV blocks are reserved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chairlift_engine.kv_memory import CPU_MOST_BYTES, available_memory_bytes, pick_num_blocks

CPU = torch.device("cpu")


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_explicit_tokens_are_rounded_down_to_blocks() -> None:
    assert pick_num_blocks(1000, 16, CPU, kv_tokens=100) == 6
    with pytest.raises(ValueError, match="kv_tokens: 15 is less than one block of 16"):
        pick_num_blocks(1000, 16, CPU, kv_tokens=15)


def test_a_cpu_default_is_modest_and_a_share_is_taken_as_given() -> None:
    assert 1 <= pick_num_blocks(1024, 16, CPU) <= CPU_MOST_BYTES // (1024 * 16)
    tenth = pick_num_blocks(1024, 16, CPU, memory_share=0.1)
    assert tenth == pytest.approx(available_memory_bytes() * 0.1 / (1024 * 16), rel=0.2)


def test_memory_that_holds_no_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="hold not one block"):
        pick_num_blocks(1 << 50, 16, CPU)


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 8 << 30),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 8 << 30),
        ({"memory.max": f"{3 << 30}\n", "memory.current": f"{1 << 30}\n"}, 2 << 30),
        ({"memory.max": f"{1 << 30}\n", "memory.current": f"{2 << 30}\n"}, 0),
        ({"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "60"}, 40),
    ],
)
def test_the_tighter_of_machine_and_cgroup_counts(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    meminfo = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 << 20} kB\n"}
    root = machine(tmp_path, meminfo | {f"sys/fs/cgroup/{k}": v for k, v in files.items()})
    assert available_memory_bytes(root) == available
