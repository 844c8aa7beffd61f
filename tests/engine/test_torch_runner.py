"""The runner under the real scheduler: greedy tokens are those of `generate` for each request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers

from chairlift_engine.clock import VirtualClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.models import LoadedModel, prepare_model
from chairlift_engine.request import Request, SamplingParams, TokenLogprobs
from chairlift_engine.runner import Sampled, ScheduledChunk
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
        self.logprobs: defaultdict[str, list[TokenLogprobs | None]] = defaultdict(list)

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[Sampled]:
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
            self.logprobs[event.request.id].append(event.logprobs)
            if event.finish_reason is not None:
                request = event.request
                self._finished[request.id] = request.token_ids[request.num_prompt_tokens :]


def request(name: str, prompt: list[int], **sampling: Any) -> Request:
    given = {"max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0.0, **sampling}
    # Some that the others may preempt.
    request_class = RequestClass.BATCH if name in ("3", "6", "8") else RequestClass.INTERACTIVE
    return Request(name, prompt, SamplingParams(**given), float(name), request_class)


def token_ids(sampled: Sequence[Sampled]) -> list[int]:
    return [one.token_id for one in sampled]


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
    assert ride.num_preemptions > 0
    assert ride.num_later_chunks > 0
    assert ride.num_mixed_steps > 0


def test_seeded_samples_repeat_in_other_company_and_after_preemption(
    prompts: list[list[int]], tiny_model: Callable[[str], transformers.PreTrainedModel]
) -> None:
    loaded = prepare_model(tiny_model("llama"))
    kinds: list[dict[str, Any]] = [
        {
            "presence_penalty": 1.0,
            "min_tokens": NUM_OUTPUT_TOKENS,
            "stop_token_ids": frozenset((7,)),
        },
        {"top_k": 20, "repetition_penalty": 1.2},
        {"top_p": 0.8, "frequency_penalty": 0.4},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "logit_bias": ((5, 3.0),)},
    ]

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
        each.token_ids += token_ids(alone.execute([ScheduledChunk(each, 0, each.num_tokens)]))
        while each.num_output_tokens < NUM_OUTPUT_TOKENS:
            chunk = ScheduledChunk(each, each.num_tokens - 1, 1)
            each.token_ids += token_ids(alone.execute([chunk]))
        assert each.token_ids[each.num_prompt_tokens :] == expected
    assert len({tuple(tokens) for tokens in together}) == len(prompts)


def test_every_token_has_its_logprobs_also_in_chunks_and_after_preemption(
    prompts: list[list[int]], tiny_model: Callable[[str], transformers.PreTrainedModel]
) -> None:
    asks = {"num_logprobs": 3, "num_prompt_logprobs": 2}
    ride = Ride(prepare_model(tiny_model("llama")), num_blocks=14)
    asked = [request(str(i), prompt, **asks) for i, prompt in enumerate(prompts)]
    outputs = ride.run(asked)
    assert ride.num_preemptions > 0 and ride.num_later_chunks > 0
    plain = tiny_model("llama")
    for each, output in zip(asked, outputs, strict=True):
        with torch.no_grad():
            expected = plain(torch.tensor([each.token_ids])).logits[0].log_softmax(-1)
        assert each.prompt_logprobs[0] is None
        found = [*each.prompt_logprobs[1:], *ride.logprobs[each.id]]
        assert len(found) == len(each.token_ids) - 1 and len(ride.logprobs[each.id]) == len(output)
        for position, logprobs in enumerate(found, 1):
            row, token = expected[position - 1], each.token_ids[position]
            assert logprobs is not None
            assert logprobs.logprob == pytest.approx(float(row[token]), abs=1e-4)
            count = 2 if position < each.num_prompt_tokens else 3
            assert [value for _, value in logprobs.top] == pytest.approx(
                row.topk(count).values.tolist(), abs=1e-4
            )


def test_a_step_that_samples_nothing_returns_nothing(
    prompts: list[list[int]], tiny_model: Callable[[str], transformers.PreTrainedModel]
) -> None:
    runner = TorchRunner(prepare_model(tiny_model("llama")), 16, 16)
    one = request("0", prompts[5])
    one.block_ids = list(range(1, 10))
    assert runner.execute([ScheduledChunk(one, 0, 32)]) == []
