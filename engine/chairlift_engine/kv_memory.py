"""How many KV blocks fit: from an explicit number of tokens, else from the memory that is free.

Call it after the model is loaded, so that its weights are no longer counted as free.
"""

from __future__ import annotations

from pathlib import Path

import torch

# A laptop's user wants the rest of the memory back; on a GPU nothing else lives there.
CPU_SHARE, CPU_MOST_BYTES = 0.25, 2 << 30
CUDA_SHARE = 0.85


def pick_num_blocks(
    bytes_per_token: int,
    block_tokens: int,
    device: torch.device,
    kv_tokens: int | None = None,
    memory_share: float | None = None,
) -> int:
    """Usable blocks. kv_tokens wins; memory_share is a fraction of what is free now."""
    if kv_tokens is not None:
        num_blocks = kv_tokens // block_tokens
        reason = f"kv_tokens: {kv_tokens} is less than one block of {block_tokens} tokens"
    else:
        budget = _kv_budget_bytes(device, memory_share)
        num_blocks = budget // (bytes_per_token * block_tokens)
        reason = f"memory: {budget >> 20} MiB for KV hold not one block of {block_tokens} tokens"
    if num_blocks < 1:
        raise ValueError(reason)
    return num_blocks


def _kv_budget_bytes(device: torch.device, share: float | None) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * (share or CUDA_SHARE))
    if share is not None:
        return int(available_memory_bytes() * share)
    return min(int(available_memory_bytes() * CPU_SHARE), CPU_MOST_BYTES)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: the machine's free memory, or a cgroup's remainder."""
    left = [_meminfo_available_bytes(root / "proc/meminfo")]
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            left.append(int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # no cgroup of this version, or "max"
            continue
    return max(0, min(left))


def _meminfo_available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{meminfo}: no MemAvailable; give kv_tokens")
