"""The attention over pages: the C++ kernel and the torch fallback against plain attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from chairlift_engine.cpu_kernels import cpu_ops
from chairlift_engine.kv_pool import KvPool, LayerKv
from chairlift_engine.paged_attention import (
    DecodeRows,
    LayerCall,
    PagedStep,
    PromptChunk,
    ShapeProbe,
    UnsupportedModel,
    paged_attention,
)

BLOCK_TOKENS = 4
CPU = torch.device("cpu")
# (query heads, KV heads, key dim, value dim)
SHAPES = [(4, 4, 16, 16), (6, 2, 64, 64), (8, 1, 20, 12), (3, 3, 80, 128)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, call: LayerCall, past: int) -> Tensor:
    """[tokens, heads, dim] queries at positions past.. over all keys, written as on paper."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    query_at = torch.arange(past, past + len(q))[:, None]
    key_at = torch.arange(len(k))[None]
    hidden = key_at > query_at
    if call.window:
        hidden |= key_at <= query_at - call.window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class Sequences:
    """Requests with random keys and values, whose pages are dealt out in a random order."""

    def __init__(
        self, shape: tuple[int, int, int, int], lengths: list[int], dtype: torch.dtype
    ) -> None:
        torch.manual_seed(7)
        heads, kv_heads, key_dim, value_dim = shape
        self.lengths = lengths
        self.q = [torch.randn(n, heads, key_dim).to(dtype) for n in lengths]
        self.k = [torch.randn(n, kv_heads, key_dim).to(dtype) for n in lengths]
        self.v = [torch.randn(n, kv_heads, value_dim).to(dtype) for n in lengths]
        needed = [-(-n // BLOCK_TOKENS) for n in lengths]
        self.blocks = list((torch.randperm(sum(needed)) + 1).split(needed))
        self.pool = KvPool(
            [LayerKv(kv_heads, key_dim, value_dim)], sum(needed), BLOCK_TOKENS, dtype, CPU
        )

    def slots(self, index: int) -> Tensor:
        at = torch.arange(self.lengths[index])
        return self.blocks[index][at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS

    def step(self, tails: list[int], num_decodes: int, padding: int) -> tuple[PagedStep, Tensor]:
        """A step that computes the last `tails` tokens of each; what is before them is written."""
        slots, chunks, start = [], [], 0
        for index, tail in enumerate(tails):
            past = self.lengths[index] - tail
            own = self.slots(index)
            self.pool.write(0, self.k[index][:past], self.v[index][:past], own[:past])
            slots.append(own[past:])
            if index >= num_decodes:
                chunks.append(PromptChunk(start, start + tail, past, self.blocks[index]))
            start += tail
        slots.append(torch.zeros(padding, dtype=torch.long))
        tables = nn.utils.rnn.pad_sequence(self.blocks[:num_decodes], batch_first=True)
        lengths = torch.tensor(self.lengths[:num_decodes], dtype=torch.int32)
        decodes = DecodeRows(tables.int(), lengths)
        return PagedStep(self.pool, torch.cat(slots), decodes, chunks), torch.cat(slots)

    def rows(self, parts: list[Tensor], tails: list[int], padding: int) -> Tensor:
        rows = torch.cat([part[len(part) - n :] for part, n in zip(parts, tails, strict=True)])
        return torch.cat([rows, torch.ones(padding, *rows.shape[1:], dtype=rows.dtype)])


@pytest.fixture(params=["kernel", "torch"])
def by_kernel(request: pytest.FixtureRequest) -> bool:
    if request.param == "kernel" and cpu_ops() is None:
        pytest.skip("no C++ compiler here")
    return bool(request.param == "kernel")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 3.0), (5, 3.0)])
def test_ragged_decodes_chunks_and_padding_match_plain_attention(
    by_kernel: bool,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    window: int,
    softcap: float,
) -> None:
    # Decodes, a whole prompt, one that starts inside a page, one that ends in a single token.
    lengths, tails, padding = [1, 4, 5, 23, 9, 14, 9], [1, 1, 1, 1, 9, 7, 1], 3
    given = Sequences(shape, lengths, dtype)
    if not by_kernel:
        given.pool.ops = None
    step, _ = given.step(tails, num_decodes=4, padding=padding)
    q, k, v = (given.rows(part, tails, padding) for part in (given.q, given.k, given.v))
    call = LayerCall(0, q, k, v, shape[2] ** -0.5, window, softcap)
    got = step.attend(call).double()
    expected = torch.cat(
        [
            plain_attention(queries[n - tail :], keys, values, call, n - tail)
            for queries, keys, values, n, tail in zip(
                given.q, given.k, given.v, lengths, tails, strict=True
            )
        ]
    )
    assert (got[: sum(tails)] - expected).abs().max() < TOLERANCE[dtype]
    assert got[sum(tails) :].abs().max() == 0  # padding must stay finite in every layer


def test_queries_may_come_in_any_memory_order(by_kernel: bool) -> None:
    given = Sequences(SHAPES[1], [6, 11], torch.float32)
    if not by_kernel:
        given.pool.ops = None
    tails = [1, 1]
    step, _ = given.step(tails, num_decodes=2, padding=0)
    q, k, v = (given.rows(part, tails, 0) for part in (given.q, given.k, given.v))
    straight = step.attend(LayerCall(0, q, k, v, 0.125, 0, 0.0))
    turned = [part.permute(2, 1, 0).contiguous().permute(2, 1, 0) for part in (q, k, v)]
    heads_first = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, k, v)]
    for other in (turned, heads_first):
        again = step.attend(LayerCall(0, *other, 0.125, 0, 0.0))
        torch.testing.assert_close(again, straight)


def test_only_the_given_slots_change() -> None:
    given = Sequences(SHAPES[0], [8, 8], torch.float32)
    before = [pages.clone() for pages in given.pool.keys]
    slots = given.slots(0)
    given.pool.write(0, given.k[0], given.v[0], slots)
    changed = (given.pool.keys[0] != before[0]).any(-1).any(1).flatten().nonzero().flatten()
    assert sorted(changed.tolist()) == sorted(slots.tolist())


def refused(**extra: object) -> str:
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    rows = torch.zeros(1, 2, 3, 4)
    mask = extra.pop("attention_mask", None)
    with pytest.raises(UnsupportedModel) as error:
        paged_attention(module, rows, rows, rows, mask, paged_step=ShapeProbe(), **extra)  # type: ignore[arg-type]
    return str(error.value)


def test_what_would_change_the_result_is_refused_by_name() -> None:
    assert "'s_aux'" in refused(s_aux=torch.zeros(2))
    assert "'position_bias'" in refused(position_bias=torch.zeros(1))
    assert "mask" in refused(attention_mask=torch.zeros(1, 1, 3, 3))
