"""What is served and what is refused at load, each with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift_engine.kv_pool import LayerKv
from chairlift_engine.models import load_model, pick_dtype, prepare_model
from chairlift_engine.paged_attention import UnsupportedModel

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": [5, 7],
    "pad_token_id": None,
}


def built(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model


def llama(**fields: Any) -> transformers.PreTrainedModel:
    return built(transformers.LlamaConfig(**{**SIZES, **fields}))


def test_a_folder_becomes_a_model_and_the_facts_that_size_its_pool(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32", max_length=48, device="cpu")
    assert loaded.layers == (LayerKv(kv_heads=2, key_dim=8, value_dim=8),) * 2
    assert loaded.kv_bytes_per_token == 2 * 2 * (8 + 8) * 4
    assert loaded.eos_token_ids == {5, 7}
    assert loaded.model_length_tokens == 48
    assert loaded.dtype == torch.float32


@pytest.mark.parametrize(("asked", "got"), [(None, 64), (10, 10), (1000, 64)])
def test_the_shorter_of_positions_and_max_length_holds(asked: int | None, got: int) -> None:
    assert prepare_model(llama(), asked).model_length_tokens == got


@pytest.mark.parametrize(
    "config",
    [
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4),
        transformers.FalconConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
        ),
        transformers.MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=4),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_computes_attention_itself_is_refused(
    config: transformers.PretrainedConfig,
) -> None:
    with pytest.raises(UnsupportedModel, match="ForCausalLM computes attention itself"):
        prepare_model(built(config), 64)


def test_attention_sinks_are_refused_by_name() -> None:
    config = transformers.GptOssConfig(
        **{**SIZES, "eos_token_id": 5, "head_dim": 8, "num_local_experts": 2}, rope_parameters=None
    )
    with pytest.raises(UnsupportedModel, match="'s_aux'"):
        prepare_model(built(config))


def test_a_layer_that_keeps_its_own_attention_is_found_by_the_probe() -> None:
    model = llama()
    layer = model.model.layers[1].self_attn  # type: ignore[union-attr,index]
    layer.config = transformers.LlamaConfig(**SIZES)  # a setting that never reaches this layer
    layer.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedModel, match="2 layers 1 use paged attention"):
        prepare_model(model)


def test_masks_that_the_attention_function_never_sees_are_refused() -> None:
    model = llama()
    model.config.attention_chunk_size = 32
    with pytest.raises(UnsupportedModel, match="'attention_chunk_size'"):
        prepare_model(model)


def test_longrope_is_served_up_to_its_original_length() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    }
    fields = {**SIZES, "rope_parameters": rope, "original_max_position_embeddings": 32}
    model = built(transformers.Phi3Config(**{**fields, "eos_token_id": 5}))
    with pytest.raises(UnsupportedModel, match="maxLength: must be at most 32"):
        prepare_model(model)
    assert prepare_model(model, 32).model_length_tokens == 32


def test_dtypes_are_picked_by_name_and_auto_by_the_device() -> None:
    assert pick_dtype("bfloat16", CPU) == torch.bfloat16
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ValueError, match="model.dtype: must be auto or one of float32"):
        pick_dtype("int3", CPU)
