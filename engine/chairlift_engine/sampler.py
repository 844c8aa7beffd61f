"""Picks the next token of each row of logits, without any state.

A draw depends on the row, its parameters, its seed and the position in its output, never on what
runs beside it or on earlier draws. So a seeded request repeats in any batch and after any
preemption. What a row does not ask for costs nothing. Called by `torch_runner`.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift_engine.logit_edits import EditedRow, edit, edits
from chairlift_engine.request import SamplingParams, TokenLogprobs
from chairlift_engine.runner import Sampled

# Rows whose fp32 log-softmax is held at once, for the logprobs of a long prompt.
LOGPROB_ROWS = 64
# Where only top_p cuts, so many of the likeliest tokens are tried before all are sorted.
NUCLEUS_CANDIDATES = 1024


class Draw(NamedTuple):
    """What decides one row's token. position counts the request's output tokens so far.

    token_ids: prompt and output, for the penalties.
    """

    params: SamplingParams
    position: int
    token_ids: Sequence[int] = ()

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0 or self.params.top_k == 1

    @property
    def uniform(self) -> float:
        """The row's random number in [0, 1)."""
        key = struct.pack("<qq", _signed_64(self.params.seed), self.position)
        (bits,) = struct.unpack("<Q", hashlib.blake2b(key, digest_size=8).digest())
        return float(bits >> 11) * 2.0**-53


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """One token per row of logits [rows, vocabulary]."""
    edited = [row for row, draw in enumerate(draws) if edits(draw.params, draw.position)]
    tokens = _pick_edited(logits, draws, edited) if edited else _pick(logits, draws)
    sampled = [Sampled(int(token)) for token in tokens.tolist()]
    if asked := [row for row, draw in enumerate(draws) if draw.params.num_logprobs is not None]:
        counts = [draws[row].params.num_logprobs or 0 for row in asked]
        known = token_logprobs(logits[asked], [sampled[row].token_id for row in asked], counts)
        for row, logprobs in zip(asked, known, strict=True):
            sampled[row] = Sampled(sampled[row].token_id, logprobs)
    return sampled


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Each row's token under the row's softmax, and as many of the likeliest as its count says."""
    found: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), LOGPROB_ROWS):
        rows = slice(first, first + LOGPROB_ROWS)
        logprobs = logits[rows].float().log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(token_ids[rows], device=logits.device)[:, None])
        values, ids = _likeliest(logprobs, min(max(counts[rows]), logprobs.shape[1]))
        # Over the rows of a step: three transfers, not one for each value.
        likeliest = zip(ids.tolist(), values.tolist(), strict=True)
        for (logprob,), count, (top_ids, top) in zip(
            own.tolist(), counts[rows], likeliest, strict=True
        ):
            pairs = tuple(zip(top_ids[:count], top[:count], strict=True))
            found.append(TokenLogprobs(logprob, pairs))
    return found


def _pick_edited(logits: Tensor, draws: Sequence[Draw], edited: Sequence[int]) -> Tensor:
    tokens = logits.new_zeros(len(draws), dtype=torch.long)
    if others := sorted(set(range(len(draws))).difference(edited)):
        tokens[others] = _pick(logits[others], [draws[row] for row in others])
    rows = [draws[row] for row in edited]
    tokens[edited] = _pick(edit(logits[edited], [EditedRow(*row) for row in rows]), rows)
    return tokens


def _pick(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    tokens = logits.argmax(-1)
    plain: list[int] = []
    cut: dict[int, list[int]] = defaultdict(list)
    for row, draw in enumerate(draws):
        if draw.is_greedy:
            continue
        if draw.params.top_k == 0 and draw.params.top_p >= 1:
            plain.append(row)
        else:
            cut[draw.params.top_k].append(row)
    if plain:
        picked = [draws[row] for row in plain]
        weights = _above_min_p(_scaled(logits[plain], picked).exp_(), picked)
        tokens[plain] = _invert(weights, picked)
    for top_k, rows in cut.items():
        tokens[rows] = _sample_cut(logits[rows], [draws[row] for row in rows], top_k)
    return tokens


def _scaled(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """fp32 logits over temperature, the largest at 0 so that no temperature overflows them."""
    temperatures = torch.tensor([d.params.temperature for d in draws], device=logits.device)
    logits = logits.float()
    return (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]


def _above_min_p(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Of unnormalised probabilities, the largest 1, those that min_p leaves."""
    if all(draw.params.min_p == 0 for draw in draws):
        return weights
    min_p = torch.tensor([d.params.min_p for d in draws], device=weights.device)
    return torch.where(weights >= min_p[:, None], weights, 0)


def _sample_cut(logits: Tensor, draws: Sequence[Draw], top_k: int) -> Tensor:
    """Rows that share top_k (0: none), each with its own top_p.

    How many candidates are looked at depends on the row alone, or equal logits could fall
    differently in another batch.
    """
    scaled = _scaled(logits, draws)
    vocabulary = scaled.shape[1]
    num_candidates = min(top_k or NUCLEUS_CANDIDATES, vocabulary)
    best, ids = _likeliest(scaled, num_candidates)
    weights = _above_min_p(best.exp(), draws)
    top_p = torch.tensor([d.params.top_p for d in draws], device=logits.device)[:, None]
    total = (weights if top_k else _above_min_p(scaled.exp(), draws)).sum(-1, keepdim=True)
    tokens = _sample_nucleus(weights, ids, top_p * total, draws)
    if not top_k and num_candidates < vocabulary:
        wide = (weights.sum(-1, keepdim=True) < top_p * total).squeeze(-1).nonzero().flatten()
        if len(wide):
            best, ids = _likeliest(scaled[wide], vocabulary)
            some = [draws[int(row)] for row in wide]
            tokens[wide] = _sample_nucleus(
                _above_min_p(best.exp(), some), ids, (top_p * total)[wide], some
            )
    return tokens


def _likeliest(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest `count` values per row in falling order, equal ones by token id."""
    if count == scaled.shape[1]:
        return torch.sort(scaled, dim=-1, descending=True, stable=True)
    values, ids = scaled.topk(count, sorted=False)
    ids, by_id = ids.sort(-1)
    values, by_value = torch.sort(values.gather(-1, by_id), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def _sample_nucleus(weights: Tensor, ids: Tensor, mass: Tensor, draws: Sequence[Draw]) -> Tensor:
    """From the fewest leading candidates that hold `mass`; at least the first."""
    before = weights.cumsum(-1) - weights
    before[:, 0] = -1
    kept = torch.where(before < mass, weights, 0)
    return ids.gather(-1, _invert(kept, draws)[:, None]).squeeze(-1)


def _invert(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The inverse CDF of unnormalised weights at each row's uniform number."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    uniforms = torch.tensor([[draw.uniform] for draw in draws], device=weights.device)
    # Rounding must not reach the total: the first sum beyond the target then has a weight > 0.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _signed_64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
