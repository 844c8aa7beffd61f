"""The runner under the real scheduler: greedy tokens are those of `generate` for each request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
MODELS = {
    "llama": (transformers.LlamaConfig, SIZES),
    "qwen2": (transformers.Qwen2Config, SIZES),
    "mistral with a window": (transformers.MistralConfig, {**SIZES, "sliding_window": 24}),
    "gemma2 with window and softcap": (
        transformers.Gemma2Config,
        {**SIZES, "head_dim": 8, "sliding_window": 24, "attn_logit_softcapping": 2.0},
    ),
}


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
            config_class(**fields), attn_implementation="eager"
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


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
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
    again = [request(str(i), p) for i, p in enumerate(prompts)]  # some of it is cached by now
    assert ride.run(again) == expected
    assert sum(r.num_cached_tokens for r in again) > 0
    assert ride.num_preemptions > 0
    assert ride.num_later_chunks > 0
    assert ride.num_mixed_steps > 0


def test_greedy_tokens_of_prompts_that_begin_alike_equal_generate(
    prompts: list[list[int]], tiny_model: Callable[[str], transformers.PreTrainedModel]
) -> None:
    model = tiny_model("llama")
    long = prompts[5]
    alike = [long[:cut] + prompts[i] for i, cut in enumerate((64, 64, 100, 120, 16, 48))]
    alike += [long, long, long[:64], long[:65]]  # whole prompts, of a block multiple and one more
    expected = [alone(model, prompt) for prompt in alike]
    ride = Ride(prepare_model(model), num_blocks=30)
    requests = [request(str(i), prompt) for i, prompt in enumerate(alike)]
    assert ride.run(requests) == expected
    assert sum(r.num_cached_tokens >= 64 for r in requests) >= 4
    assert ride.num_mixed_steps > 0


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
