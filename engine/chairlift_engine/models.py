"""Loads a causal language model from a folder and finds out what serving it takes.

Any architecture of transformers that calls the attention interface will do; one that does not is
refused here, because it would silently attend to the wrong tokens. Knows nothing of requests;
called by the engine's entry point, used by `torch_runner`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from chairlift_engine.kv_pool import LayerKv
from chairlift_engine.packed_linear import ROW_MULTIPLE, pack_linears
from chairlift_engine.paged_attention import ATTENTION_NAME, ShapeProbe, UnsupportedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the facts that size its KV pool.

    model_length_tokens: what its positions and `spec.model.maxLength` both allow.
    row_multiple: steps are filled up to it, so that a token's result does not depend on how many
    rows run beside it.
    """

    model: PreTrainedModel
    layers: tuple[LayerKv, ...]
    eos_token_ids: frozenset[int]
    model_length_tokens: int
    row_multiple: int

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_embeddings(self) -> int:
        """Token ids at or above it would break the forward pass."""
        size: int = self.model.config.get_text_config().vocab_size
        return size

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.num_elements for layer in self.layers) * self.dtype.itemsize


def load_model(
    source_dir: Path, dtype: str = "auto", max_length: int | None = None, device: str | None = None
) -> LoadedModel:
    """Raises UnsupportedModel, with a sentence, for a model that would produce wrong tokens."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        source_dir, dtype=pick_dtype(dtype, where)
    )
    nn.Module.to(model, where)
    return prepare_model(model, max_length)


def prepare_model(model: PreTrainedModel, max_length: int | None = None) -> LoadedModel:
    """Switch a model to paged attention, and prove by one forward that every layer uses it."""
    name, config = type(model).__name__, model.config.get_text_config()
    length_tokens = _model_length(config, max_length)
    _check_config(config, length_tokens)
    if not model._supports_attention_backend:
        raise UnsupportedModel(
            f"model: {name} computes attention itself, so its KV cannot be paged"
        )
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"model: {name} cannot compute logits for chosen rows only")
    model.train(False).requires_grad_(False)
    model.set_attn_implementation(ATTENTION_NAME)
    row_multiple = pack_linears(model) if model.device.type == "cpu" else ROW_MULTIPLE
    return LoadedModel(
        model=model,
        layers=_probe(model, name, config),
        eos_token_ids=_eos_token_ids(model),
        model_length_tokens=length_tokens,
        row_multiple=row_multiple,
    )


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # On CPUs, also those with bf16 arithmetic, fp32 steps were measured faster: the packed
        # linears read bf16 weights either way. docs/measurements.md has the figures.
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"model.dtype: must be auto or one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]


def _check_config(config: PretrainedConfig, length_tokens: int) -> None:
    """Refuse what a model does to its masks or positions without telling its attention function."""
    for field in ("attention_chunk_size", "use_bidirectional_attention"):
        if getattr(config, field, None):
            raise UnsupportedModel(f"model: its config.json sets {field!r}, which is not built")
    rope: Any = getattr(config, "rope_parameters", None) or {}
    for table in (rope, *(table for table in rope.values() if isinstance(table, dict))):
        if table.get("rope_type") != "longrope":
            continue
        # Beyond it the table of all changes with the longest request of the batch.
        original = table.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", 0
        )
        if length_tokens > original:
            raise UnsupportedModel(
                f"model.maxLength: must be at most {original} for this model, not {length_tokens}: "
                "its rotary embedding (longrope) would mix up requests of different lengths"
            )


def _probe(model: PreTrainedModel, name: str, config: PretrainedConfig) -> tuple[LayerKv, ...]:
    probe, tokens = ShapeProbe(), torch.zeros(1, 8, dtype=torch.long, device=model.device)
    positions = torch.arange(tokens.shape[1], device=model.device)[None]
    try:
        with torch.inference_mode():
            model(tokens, position_ids=positions, use_cache=False, paged_step=probe)
    except TypeError as error:
        raise UnsupportedModel(f"model: {name} takes no flat batch of requests: {error}") from error
    called = [call.layer for call in probe.calls]
    if called != list(range(config.num_hidden_layers)):
        raise UnsupportedModel(
            f"model: of {name}'s {config.num_hidden_layers} layers {len(set(called))} use paged "
            "attention; all must, once each and in order"
        )
    kinds = getattr(config, "layer_types", None) or ()
    for kind, call in zip(kinds, probe.calls, strict=True) if kinds else ():
        if (kind == "sliding_attention") != bool(call.window):
            raise UnsupportedModel(
                f"model: {name}'s layer {call.layer} is of type {kind!r}, but its attention was "
                f"called with a window of {call.window} tokens"
            )
    return tuple(call.kv for call in probe.calls)


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for config in (model.config, model.generation_config):
        given = getattr(config, "eos_token_id", None)
        ids.update([given] if isinstance(given, int) else given or ())
    return frozenset(ids)


def _model_length(config: PretrainedConfig, max_length: int | None) -> int:
    # The attribute map gives older configurations' names (n_positions, n_ctx) under this one.
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None and max_length is None:
        raise UnsupportedModel(
            "model.maxLength: must be given, the model's config.json names no limit"
        )
    return min(length for length in (longest, max_length) if length is not None)
