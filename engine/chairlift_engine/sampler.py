"""Picks the next token of each row of logits, without any state.

A draw depends on the row, its parameters, its seed and the position in its output, never on what
runs beside it or on earlier draws. So a seeded request repeats in any batch and after any
preemption. Called by `torch_runner`.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chairlift_engine.request import SamplingParams

# Where only top_p cuts, so many of the likeliest tokens are tried before all are sorted.
NUCLEUS_CANDIDATES = 1024


class Draw(NamedTuple):
    """What decides one row's token. position counts the request's output tokens so far."""

    params: SamplingParams
    position: int

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0 or self.params.top_k == 1

    @property
    def uniform(self) -> float:
        """The row's random number in [0, 1)."""
        key = struct.pack("<qq", _signed_64(self.params.seed), self.position)
        (bits,) = struct.unpack("<Q", hashlib.blake2b(key, digest_size=8).digest())
        return float(bits >> 11) * 2.0**-53


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of logits [rows, vocabulary]."""
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
        weights = _scaled(logits[plain], picked).exp_()
        tokens[plain] = _invert(weights, picked)
    for top_k, rows in cut.items():
        tokens[rows] = _sample_cut(logits[rows], [draws[row] for row in rows], top_k)
    return [int(token) for token in tokens.tolist()]


def _scaled(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """fp32 logits over temperature, the largest at 0 so that no temperature overflows them."""
    temperatures = torch.tensor([d.params.temperature for d in draws], device=logits.device)
    logits = logits.float()
    return (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]


def _sample_cut(logits: Tensor, draws: Sequence[Draw], top_k: int) -> Tensor:
    """Rows that share top_k (0: none), each with its own top_p.

    How many candidates are looked at depends on the row alone, or equal logits could fall
    differently in another batch.
    """
    scaled = _scaled(logits, draws)
    vocabulary = scaled.shape[1]
    num_candidates = min(top_k or NUCLEUS_CANDIDATES, vocabulary)
    best, ids = _likeliest(scaled, num_candidates)
    weights = best.exp()
    top_p = torch.tensor([d.params.top_p for d in draws], device=logits.device)[:, None]
    total = weights.sum(-1, keepdim=True) if top_k else scaled.exp().sum(-1, keepdim=True)
    tokens = _sample_nucleus(weights, ids, top_p * total, draws)
    if not top_k and num_candidates < vocabulary:
        wide = (weights.sum(-1, keepdim=True) < top_p * total).squeeze(-1).nonzero().flatten()
        if len(wide):
            best, ids = _likeliest(scaled[wide], vocabulary)
            some = [draws[int(row)] for row in wide]
            tokens[wide] = _sample_nucleus(best.exp(), ids, (top_p * total)[wide], some)
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
