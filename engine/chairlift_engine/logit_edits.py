"""What a request's penalties, biases and minimum length change in its logits.

Stateless: the counts come from the request's tokens each time, so nothing has to be kept, moved or
restored over a preemption. Only rows that ask for an edit come here, all of them at once, and only
the entries that change are touched. Called by `sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chairlift_engine.request import SamplingParams

# Finite: where every token is banned the rest is still a distribution, not NaN.
BANNED = -1e30


class EditedRow(NamedTuple):
    """token_ids: prompt and output; position: how many of them are output."""

    params: SamplingParams
    position: int
    token_ids: Sequence[int]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.position

    @property
    def bans_stops(self) -> bool:
        return self.position < self.params.min_tokens and bool(self.params.stop_token_ids)


def edits(params: SamplingParams, position: int) -> bool:
    """Whether a row needs `edit` at this position."""
    return (
        params.has_penalties
        or bool(params.logit_bias)
        or (position < params.min_tokens and bool(params.stop_token_ids))
    )


def edit(logits: Tensor, rows: Sequence[EditedRow]) -> Tensor:
    """fp32 logits [rows, vocabulary]: penalties first, then biases, then bans.

    May write into the logits that it is given.
    """
    edited = logits.float()
    _penalise(edited, rows)
    _bias(edited, rows)
    for index, row in enumerate(rows):
        if row.bans_stops:
            edited[index, list(row.params.stop_token_ids)] = BANNED
    return edited


def _penalise(logits: Tensor, rows: Sequence[EditedRow]) -> None:
    touched = [
        _Touched.of(index, row) for index, row in enumerate(rows) if row.params.has_penalties
    ]
    if not touched:
        return

    def joined(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(logits.device)

    at = joined([t.rows for t in touched]), joined([t.token_ids for t in touched])
    values = logits[at]
    repetition = joined([t.repetition for t in touched])
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[at] = values - joined([t.subtracted for t in touched])


class _Touched(NamedTuple):
    """The distinct tokens of one row, and what happens to each."""

    rows: np.ndarray
    token_ids: np.ndarray
    repetition: np.ndarray
    subtracted: np.ndarray

    @classmethod
    def of(cls, index: int, row: EditedRow) -> _Touched:
        params = row.params
        # The prompt matters to the repetition penalty only, and may be long.
        first = 0 if params.repetition_penalty != 1 else row.num_prompt_tokens
        seen = np.asarray(row.token_ids[first:], dtype=np.int64)
        token_ids, where = np.unique(seen, return_inverse=True)
        output = where[row.num_prompt_tokens - first :]
        counts = np.bincount(output, minlength=len(token_ids)).astype(np.float32)
        return cls(
            np.full(len(token_ids), index),
            token_ids,
            np.full(len(token_ids), params.repetition_penalty, dtype=np.float32),
            params.frequency_penalty * counts + params.presence_penalty * np.sign(counts),
        )


def _bias(logits: Tensor, rows: Sequence[EditedRow]) -> None:
    biases = [
        (index, token_id, bias)
        for index, row in enumerate(rows)
        for token_id, bias in row.params.logit_bias
    ]
    if biases:
        at_rows, token_ids, values = zip(*biases, strict=True)
        at = torch.tensor(at_rows), torch.tensor(token_ids)
        added = torch.tensor(values, dtype=torch.float32, device=logits.device)
        logits.index_put_(tuple(i.to(logits.device) for i in at), added, accumulate=True)
