"""Runs a step on a real model: scheduled chunks in, one sampled token per finished chunk out.

Builds one flat batch, with everything attention needs computed once per step, and asks transformers
for the logits of the rows to sample only. Knows nothing of queues or HTTP; called by
`engine.Engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from chairlift_engine.kv_pool import KvPool
from chairlift_engine.models import LoadedModel
from chairlift_engine.paged_attention import DecodeRows, PagedStep, PromptChunk
from chairlift_engine.request import Request
from chairlift_engine.runner import Sampled, ScheduledChunk
from chairlift_engine.sampler import Draw, sample, token_logprobs

_Ints = np.ndarray[Any, np.dtype[np.int64]]


class TorchRunner:
    """Implements `runner.Runner`; owns the KV pool."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_tokens: int) -> None:
        self._model = loaded.model
        self._block_tokens = block_tokens
        self._row_multiple = loaded.row_multiple
        self._device = loaded.device
        self.pool = KvPool(loaded.layers, num_blocks, block_tokens, loaded.dtype, loaded.device)

    @torch.inference_mode()
    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[Sampled]:
        tokens, positions, slots = self._flatten(chunks)
        ends = np.cumsum([chunk.num_tokens for chunk in chunks])
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        scored = _scored_chunks(chunks, ends)
        rows = np.concatenate([ends[sampling] - 1, *(each.rows for each in scored)])
        logits = self._model(
            input_ids=self._tensor(tokens)[None],
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            logits_to_keep=self._tensor(self._padded(rows)),
            paged_step=self._paged_step(chunks, slots, ends),
        ).logits[0, : len(rows)]
        if scored:
            _score(scored, logits[len(sampling) :])
        requests = [chunks[i].request for i in sampling]
        draws = [Draw(r.sampling, r.num_output_tokens, r.token_ids) for r in requests]
        return sample(logits[: len(sampling)], draws)

    def _flatten(self, chunks: Sequence[ScheduledChunk]) -> tuple[_Ints, _Ints, _Ints]:
        """Token ids, positions and pool slots of all rows, padding included."""
        tokens, positions, slots = [], [], []
        for chunk in chunks:
            position = np.arange(chunk.start, chunk.end)
            blocks = np.asarray(chunk.request.block_ids)[position // self._block_tokens]
            tokens.append(np.asarray(chunk.request.token_ids[chunk.start : chunk.end]))
            positions.append(position)
            slots.append(blocks * self._block_tokens + position % self._block_tokens)
        return (
            self._padded(np.concatenate(tokens)),
            self._padded(np.concatenate(positions)),
            self._padded(np.concatenate(slots)),
        )

    def _paged_step(self, chunks: Sequence[ScheduledChunk], slots: _Ints, ends: _Ints) -> PagedStep:
        num_decodes = 0
        while num_decodes < len(chunks) and chunks[num_decodes].num_tokens == 1:
            num_decodes += 1
        prompt_chunks = [
            PromptChunk(
                start=int(end) - chunk.num_tokens,
                end=int(end),
                past=chunk.start,
                blocks=self._tensor(np.asarray(self._blocks(chunk))),
            )
            for chunk, end in zip(chunks[num_decodes:], ends[num_decodes:], strict=True)
        ]
        decodes = self._decode_rows(chunks[:num_decodes]) if num_decodes else None
        return PagedStep(self.pool, self._tensor(slots), decodes, prompt_chunks)

    def _decode_rows(self, chunks: Sequence[ScheduledChunk]) -> DecodeRows:
        blocks = [self._blocks(chunk) for chunk in chunks]
        tables = np.zeros((len(chunks), max(map(len, blocks))), dtype=np.int32)
        for row, ids in enumerate(blocks):
            tables[row, : len(ids)] = ids
        lengths = np.array([chunk.end for chunk in chunks], dtype=np.int32)
        return DecodeRows(self._tensor(tables), self._tensor(lengths))

    def _blocks(self, chunk: ScheduledChunk) -> list[int]:
        return chunk.request.block_ids[: -(-chunk.end // self._block_tokens)]

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)

    def _padded(self, rows: _Ints) -> _Ints:
        """Filled up with zeros: token 0 at position 0 into block 0, which nobody reads."""
        return np.pad(rows, (0, -len(rows) % self._row_multiple))


class _ScoredChunk(NamedTuple):
    """Rows of the step that tell the logprobs of a prompt's tokens from position `first` on."""

    request: Request
    first: int
    rows: _Ints


def _scored_chunks(chunks: Sequence[ScheduledChunk], ends: _Ints) -> list[_ScoredChunk]:
    """Each row speaks of the token after it. What is recomputed has been scored before."""
    scored: list[_ScoredChunk] = []
    for chunk, end in zip(chunks, ends, strict=True):
        request = chunk.request
        if request.sampling.num_prompt_logprobs is not None and request.num_output_tokens == 0:
            num_rows = min(chunk.end, request.num_prompt_tokens - 1) - chunk.start
            first_row = int(end) - chunk.num_tokens
            rows = np.arange(first_row, first_row + num_rows)
            scored.append(_ScoredChunk(request, chunk.start + 1, rows))
    return scored


def _score(scored: Sequence[_ScoredChunk], logits: Tensor) -> None:
    done = 0
    for request, first, rows in scored:
        tokens = request.token_ids[first : first + len(rows)]
        counts = [request.sampling.num_prompt_logprobs or 0] * len(rows)
        known = token_logprobs(logits[done : done + len(rows)], tokens, counts)
        request.prompt_logprobs[first : first + len(rows)] = known
        done += len(rows)
