"""Attention over a paged KV pool, as one function that transformers calls for every layer.

A step is a flat batch [1, tokens] of many requests. Its `PagedStep` travels through the model in
one forward keyword and says where each token's keys and values go and which pages each token
attends to: decode rows first, then prompt chunks, then padding. Knows nothing of requests or
scheduling; `torch_runner` builds the steps, `models` checks with a `ShapeProbe` that a model really
calls this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from chairlift_engine.kv_pool import KvPool, LayerKv, unit_stride

ATTENTION_NAME = "chairlift_paged"

# What models pass along that cannot change the result here: dropout is 0 in eval mode, positions
# are in the rotated queries and keys already, and the mask is the pages' own.
HARMLESS = frozenset(
    ("dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "return_dict")
)


class UnsupportedModel(ValueError):
    """The model cannot be served correctly; the message says why, in one sentence."""


class LayerCall(NamedTuple):
    """One layer's attention. q [tokens, heads, dim]; k, v [tokens, kv_heads, dim].

    window: each token sees the last `window` tokens, itself included; 0 sees all.
    softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int
    softcap: float


class Step(Protocol):
    def attend(self, call: LayerCall) -> Tensor:
        """[tokens, heads, value_dim]."""
        ...


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_step: Step | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    if attention_mask is not None:
        raise UnsupportedModel(
            "model: it brings an attention mask of its own, which paging ignores"
        )
    for name, given in others.items():
        if name not in HARMLESS and given is not None and given is not False:
            raise UnsupportedModel(
                f"model: its attention takes {name!r}, which paging does not know"
            )
    assert paged_step is not None, "every forward passes paged_step"
    out = paged_step.attend(
        LayerCall(
            layer=int(module.layer_idx),  # type: ignore[arg-type]
            q=query[0].transpose(0, 1),
            k=key[0].transpose(0, 1),
            v=value[0].transpose(0, 1),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window or 0,
            softcap=softcap or 0.0,
        )
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class ProbedCall(NamedTuple):
    layer: int
    kv: LayerKv
    window: int


class ShapeProbe:
    """A step that only records which layers call, and with what."""

    def __init__(self) -> None:
        self.calls: list[ProbedCall] = []

    def attend(self, call: LayerCall) -> Tensor:
        _, kv_heads, key_dim = call.k.shape
        kv = LayerKv(kv_heads, key_dim, call.v.shape[2])
        self.calls.append(ProbedCall(call.layer, kv, call.window))
        return call.q.new_zeros(call.q.shape[0], call.q.shape[1], call.v.shape[2])


class DecodeRows(NamedTuple):
    """The first rows of a step: one token each, attending to `lengths` tokens, itself included.

    tables [rows, max_blocks] int32, padded with 0; lengths [rows] int32.
    """

    tables: Tensor
    lengths: Tensor


class PromptChunk(NamedTuple):
    """Rows start..end are consecutive tokens of one request that has `past` tokens in its pages."""

    start: int
    end: int
    past: int
    blocks: Tensor  # [blocks] int64, covering past and chunk


class PagedStep:
    """One step over a pool.

    slots [tokens, padding included] int64: block * block_tokens + offset.
    """

    def __init__(
        self, pool: KvPool, slots: Tensor, decodes: DecodeRows | None, chunks: Sequence[PromptChunk]
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._decodes = decodes
        self._chunks = chunks
        self._num_decodes = 0 if decodes is None else len(decodes.lengths)
        self._num_tokens = chunks[-1].end if chunks else self._num_decodes
        # The same masks serve all layers with the same window.
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attend(self, call: LayerCall) -> Tensor:
        self._pool.write(call.layer, call.k, call.v, self._slots)
        tokens, heads, _ = call.q.shape
        out = call.q.new_empty(tokens, heads, call.v.shape[2])
        out[self._num_tokens :] = 0
        if self._decodes is not None:
            rows = call._replace(q=call.q[: self._num_decodes])
            if self._pool.ops is not None:
                self._decode_in_place(rows, self._decodes, out[: self._num_decodes])
            else:
                out[: self._num_decodes] = self._decode_gathered(rows, self._decodes)
        for index, chunk in enumerate(self._chunks):
            out[chunk.start : chunk.end] = self._prefill(call, index, chunk)
        return out

    def _decode_in_place(self, call: LayerCall, rows: DecodeRows, out: Tensor) -> None:
        pool = self._pool
        assert pool.ops is not None
        pool.ops.decode(
            unit_stride(call.q),
            pool.keys[call.layer],
            pool.values[call.layer],
            rows.tables,
            rows.lengths,
            out,
            call.scale,
            call.window,
            call.softcap,
        )

    def _decode_gathered(self, call: LayerCall, rows: DecodeRows) -> Tensor:
        k, v = self._pool.gather(call.layer, rows.tables.long())
        num_rows, heads, dim = call.q.shape
        # The query heads of one KV head become query positions: with a query length of 1, SDPA's
        # own grouping is ten times slower.
        q = call.q.reshape(num_rows, k.shape[1], -1, dim)
        mask = self._masks.get((-1, call.window))
        if mask is None:
            positions = torch.arange(k.shape[2], device=k.device)
            ends = rows.lengths[:, None].long()
            seen = positions < ends
            if call.window:
                seen &= positions >= ends - call.window
            mask = self._masks[-1, call.window] = _additive(seen, q.dtype)[:, None, None]
        return _attention(q, k, v, mask, call).reshape(num_rows, heads, -1)

    def _prefill(self, call: LayerCall, index: int, chunk: PromptChunk) -> Tensor:
        num_tokens, length = chunk.end - chunk.start, chunk.past + chunk.end - chunk.start
        rows = slice(chunk.start, chunk.end)
        if chunk.past:
            k, v = self._pool.gather(call.layer, chunk.blocks)
            k, v = k[:, :length], v[:, :length]
        else:
            k, v = call.k[rows].transpose(0, 1), call.v[rows].transpose(0, 1)
        kv_heads, dim = k.shape[0], call.q.shape[2]
        q = call.q[rows].reshape(num_tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)
        if num_tokens == 1:  # a prompt's last, short chunk: grouped as in _decode_gathered
            q = q.transpose(1, 2)
        k, v = (part.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for part in (k, v))
        mask = self._chunk_mask(call, index, chunk)
        out = _attention(q, k, v, mask, call, is_causal=mask is None and num_tokens > 1)
        if num_tokens == 1:
            out = out.transpose(1, 2)
        return out.permute(2, 0, 1, 3).reshape(num_tokens, call.q.shape[1], -1)

    def _chunk_mask(self, call: LayerCall, index: int, chunk: PromptChunk) -> Tensor | None:
        """[chunk tokens, past + chunk tokens], or None where SDPA's own causal rule is the same."""
        num_tokens = chunk.end - chunk.start
        length = chunk.past + num_tokens
        windowed = 0 < call.window < length
        if not windowed and (num_tokens == 1 or (chunk.past == 0 and not call.softcap)):
            return None
        mask = self._masks.get((index, call.window))
        if mask is None:
            shape = (num_tokens, length)
            seen = torch.ones(shape, dtype=torch.bool, device=call.q.device).tril(chunk.past)
            if windowed:
                seen = seen.triu(chunk.past - call.window + 1)
            mask = self._masks[index, call.window] = _additive(seen, call.q.dtype)
        return mask


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: LayerCall, is_causal: bool = False
) -> Tensor:
    if not call.softcap:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=call.scale
        )
    assert not is_causal
    scores = (q @ k.transpose(-1, -2)).float() * call.scale
    scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is not None:
        scores = scores + mask.float()
    return scores.softmax(-1).to(v.dtype) @ v


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
