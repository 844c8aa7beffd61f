"""The runner under the real scheduler: greedy tokens are those of `generate` for each request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from chairlift_engine.clock import VirtualClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.models import LoadedModel, prepare_model
from chairlift_engine.request import Request, SamplingParams
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.torch_runner import TorchRunner
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_protocol.wire import RequestClass

PROMPT_TOKENS = (3, 17, 40, 75, 5, 130, 1, 16, 33, 9)
NUM_OUTPUT_TOKENS = 20
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral with a window": (transformers.MistralConfig, {"sliding_window": 24}),
    "gemma2 with window and softcap": (
        transformers.Gemma2Config,
        {"head_dim": 8, "sliding_window": 24, "attn_logit_softcapping": 2.0},
    ),
    "gemma3 with window": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 8,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": (transformers.Phi3Config, {}),
    "olmo2": (transformers.Olmo2Config, {}),
    "granite": (transformers.GraniteConfig, {"attention_multiplier": 0.2}),
    "smollm3 with a layer without rotary": (
        transformers.SmolLM3Config,
        {"no_rope_layers": [1, 0], "use_sliding_window": False},
    ),
    "gpt-neox": (transformers.GPTNeoXConfig, {"rotary_pct": 0.5}),
    "gpt2": (transformers.GPT2Config, {}),
    "opt": (transformers.OPTConfig, {"ffn_dim": 128}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
TORCH_PATHS = ("llama", "mistral with a window", "gemma2 with window and softcap")
# Without mixtral: when its router is in doubt another expert answers, and no logit says so.
BF16_MODELS = ("llama", "qwen3", "gemma2 with window and softcap", "gpt-neox", "opt")
# In bf16 two tokens may change places whose logits, given the same text before, differ by less than
# this share of the largest logit: four steps of bf16's 8 bits.
BF16_EPSILON = 4 / 256


class Ride:
    """An engine with this model, and what its steps were seen to do."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, batch_size: int = 8) -> None:
        capacity = Capacity(batch_size, 64, num_blocks, 16, loaded.model_length_tokens)
        policy = Policy(Generation(0, 0), batch_size, 64, 32, 1.0, SloThresholds(1000, 100))
        self._runner = TorchRunner(loaded, num_blocks, 16)
        self.scheduler = Scheduler(capacity, policy)
        self._engine = Engine(self.scheduler, self, VirtualClock(), self._take)
        self.num_mixed_steps = self.num_later_chunks = self.num_preemptions = 0
        self._finished: dict[str, list[int]] = {}

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        decodes = [chunk for chunk in chunks if chunk.request.is_decoding]
        self.num_mixed_steps += 0 < len(decodes) < len(chunks)
        self.num_later_chunks += sum(c.start > 0 for c in chunks if not c.request.is_decoding)
        return self._runner.execute(chunks)

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Output tokens in the order of the requests. Batch work gets a start of three steps."""
        self._finished.clear()
        for request in requests:
            if request.request_class is RequestClass.BATCH:
                self._engine.request_add(request)
        for _ in range(3):
            self._engine.step()
        for request in requests:
            if request.request_class is RequestClass.INTERACTIVE:
                self._engine.request_add(request)
        while len(self._finished) < len(requests):
            self._engine.step()
        assert self.scheduler.residency.blocks.num_used == 0
        return [self._finished[request.id] for request in requests]

    def _take(self, report: StepReport) -> None:
        if report.sums is not None:
            self.num_preemptions += report.num_preemptions
        for event in report.tokens:
            if event.finish_reason is not None:
                request = event.request
                self._finished[request.id] = request.token_ids[request.num_prompt_tokens :]


def request(name: str, prompt: list[int], **sampling: Any) -> Request:
    given = {"max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0.0, **sampling}
    # Some that the others may preempt.
    request_class = RequestClass.BATCH if name in ("3", "6", "8") else RequestClass.INTERACTIVE
    return Request(name, prompt, SamplingParams(**given), float(name), request_class)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], transformers.PreTrainedModel]:
    def build(kind: str) -> transformers.PreTrainedModel:
        config_class, fields = MODELS[kind]
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config_class(**{**SIZES, **fields}), attn_implementation="eager"
        )
        with torch.no_grad():  # random weights as they come repeat one token for ever
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)
        built: transformers.PreTrainedModel = model.eval()
        return built

    return build


def alone(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_OUTPUT_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def assert_rode_hard(ride: Ride) -> None:
    """That a run exercised what its test is about."""
    assert ride.num_preemptions > 0
    assert ride.num_later_chunks > 0
    assert ride.num_mixed_steps > 0


@pytest.mark.parametrize(
    ("kind", "by_kernel"),
    [
        *((kind, True) for kind in MODELS),
        *((kind, False) for kind in MODELS if kind in TORCH_PATHS),
    ],
)
def test_greedy_tokens_equal_generate_whatever_else_is_in_the_batch(
    kind: str,
    by_kernel: bool,
    prompts: list[list[int]],
    tiny_model: Callable[[str], transformers.PreTrainedModel],
) -> None:
    model = tiny_model(kind)
    expected = [alone(model, prompt) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 5
    ride = Ride(prepare_model(model), num_blocks=14)
    if not by_kernel:
        ride._runner.pool.ops = None
    assert ride.run([request(str(i), p) for i, p in enumerate(prompts)]) == expected
    assert_rode_hard(ride)


@pytest.mark.parametrize("kind", BF16_MODELS)
def test_in_bf16_tokens_differ_from_generate_only_where_two_logits_are_nearly_equal(
    kind: str,
    prompts: list[list[int]],
    tiny_model: Callable[[str], transformers.PreTrainedModel],
) -> None:
    reference = tiny_model(kind).bfloat16()
    expected = [alone(reference, prompt) for prompt in prompts]
    ride = Ride(prepare_model(tiny_model(kind).bfloat16()), num_blocks=14)
    got = ride.run([request(str(i), p) for i, p in enumerate(prompts)])
    num_alike = 0
    for prompt, ours, theirs in zip(prompts, got, expected, strict=True):
        pairs = zip(ours, theirs, strict=True)
        same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        num_alike += len(same)
        if len(same) < NUM_OUTPUT_TOKENS:
            assert doubt(reference, prompt + theirs[: len(same)]) < BF16_EPSILON
    assert num_alike > 0.5 * NUM_OUTPUT_TOKENS * len(prompts)
    assert_rode_hard(ride)


@torch.inference_mode()
def doubt(model: transformers.PreTrainedModel, tokens: list[int]) -> float:
    """How near the second-best next token is to the best, as a share of the largest logit."""
    logits = model(torch.tensor([tokens])).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return float((best - second) / logits.abs().max())


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
def test_padding_rows_write_to_the_trash_block_alone_and_change_no_token(
    by_kernel: bool,
    prompts: list[list[int]],
    tiny_model: Callable[[str], transformers.PreTrainedModel],
) -> None:
    loaded = prepare_model(tiny_model("llama"))
    tokens = []
    for row_multiple in (1, 8):
        runner = TorchRunner(replace(loaded, row_multiple=row_multiple), 16, 16)
        if not by_kernel:
            runner.pool.ops = None
        one = request("0", prompts[2])
        one.block_ids = [5, 9, 11, 2]
        for start in (0, 32, 40, 41, 42):  # a chunk, the rest of the prompt, decodes
            end = 32 if start == 0 else one.num_tokens
            one.token_ids += runner.execute([ScheduledChunk(one, start, end - start)])
        tokens.append(one.token_ids[one.num_prompt_tokens :])
        for pages in (*runner.pool.keys, *runner.pool.values):
            assert pages.isfinite().all()
            written = pages.flatten(1).ne(0).any(1).nonzero().flatten().tolist()
            assert set(written) - {0} == {5, 9, 11}  # block 2 is held for later
    assert tokens[0] == tokens[1]


def test_seeded_samples_repeat_in_other_company_and_after_preemption(
    prompts: list[list[int]], tiny_model: Callable[[str], transformers.PreTrainedModel]
) -> None:
    loaded = prepare_model(tiny_model("llama"))
    kinds: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}]

    def requests() -> list[Request]:
        return [
            request(str(i), prompt, temperature=0.9, seed=i, **kinds[i % 4])
            for i, prompt in enumerate(prompts)
        ]

    crowded, roomy = Ride(loaded, num_blocks=14), Ride(loaded, num_blocks=64)
    together = crowded.run(requests())
    assert crowded.num_preemptions > 0
    assert roomy.run(requests()) == together
    alone = TorchRunner(loaded, 16, 16)
    for each, expected in zip(requests(), together, strict=True):
        each.block_ids = list(range(1, 11))
        each.token_ids += alone.execute([ScheduledChunk(each, 0, each.num_tokens)])
        while each.num_output_tokens < NUM_OUTPUT_TOKENS:
            each.token_ids += alone.execute([ScheduledChunk(each, each.num_tokens - 1, 1)])
        assert each.token_ids[each.num_prompt_tokens :] == expected
    assert len({tuple(tokens) for tokens in together}) == len(prompts)


def test_a_step_that_samples_nothing_returns_nothing(
    prompts: list[list[int]], tiny_model: Callable[[str], transformers.PreTrainedModel]
) -> None:
    runner = TorchRunner(prepare_model(tiny_model("llama")), 16, 16)
    one = request("0", prompts[5])
    one.block_ids = list(range(1, 10))
    assert runner.execute([ScheduledChunk(one, 0, 32)]) == []
