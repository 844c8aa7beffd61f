"""The paged KV memory itself: one tensor of keys and one of values per layer.

Which request owns which block is `blocks`' business; who attends to what is `paged_attention`'s.
Block ids come from there and from `torch_runner`, which owns the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chairlift_engine.cpu_kernels import cpu_ops


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The size of one token's keys and values in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class KvPool:
    """Keys and values of every layer: [num_blocks + 1, kv_heads, block_tokens, dim] each.

    Block 0 takes the writes of padding. Zeroed, because masked positions are still multiplied and
    0 * NaN is NaN.
    """

    def __init__(
        self,
        layers: Sequence[LayerKv],
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        self.device = device
        # None on a GPU, and where there is no compiler.
        self.ops = cpu_ops() if device.type == "cpu" else None

        def pages(layer: LayerKv, dim: int) -> Tensor:
            shape = (num_blocks + 1, layer.kv_heads, block_tokens, dim)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.keys = [pages(layer, layer.key_dim) for layer in layers]
        self.values = [pages(layer, layer.value_dim) for layer in layers]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        keys, values = self.keys[layer], self.values[layer]
        if self.ops is not None:
            self.ops.write_kv(unit_stride(k), unit_stride(v), keys, values, slots)
            return
        blocks, offsets = slots // self.block_tokens, slots % self.block_tokens
        keys[blocks, :, offsets] = k
        values[blocks, :, offsets] = v

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Pages in order as [*rows, kv_heads, tokens, dim]; blocks is [*rows, blocks]."""
        gathered = []
        for pages in (self.keys[layer], self.values[layer]):
            paged = pages[blocks].transpose(-4, -3)
            gathered.append(paged.reshape(*paged.shape[:-3], -1, paged.shape[-1]))
        return gathered[0], gathered[1]


def unit_stride(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()
