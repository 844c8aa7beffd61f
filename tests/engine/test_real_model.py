"""SmolLM2 through the whole engine: the same greedy tokens as `generate`, and a sensible answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from chairlift_engine.clock import MonotonicClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.model_source import ModelSourceError, resolve
from chairlift_engine.models import load_model
from chairlift_engine.request import FinishReason, Request, SamplingParams
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.tokenizer import HfTokenizer, IncrementalDetokenizer
from chairlift_engine.torch_runner import TorchRunner
from chairlift_protocol.policy import Generation, Policy, SloThresholds

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about mountains.",
    "List three colours. " + "Take your time and be careful. " * 20,
)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return resolve("cache://smollm2-135m")
    except ModelSourceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def outputs(folder: Path) -> Iterator[dict[str, Request]]:
    """Three questions answered together, prompts in chunks, blocks for two."""
    loaded = load_model(folder, dtype="float32", max_length=1024)
    tokenizer = HfTokenizer(folder)
    finished: dict[str, Request] = {}

    def take(report: StepReport) -> None:
        for event in report.tokens:
            if event.finish_reason is not None:
                finished[event.request.id] = event.request

    capacity = Capacity(8, 128, 24, 16, loaded.model_length_tokens)
    policy = Policy(Generation(0, 0), 8, 128, 64, 1.0, SloThresholds(1000, 100))
    runner = TorchRunner(loaded, capacity.num_blocks, capacity.block_tokens)
    engine = Engine(Scheduler(capacity, policy), runner, MonotonicClock(), take)
    sampling = SamplingParams(
        24, temperature=0, stop_token_ids=loaded.eos_token_ids | tokenizer.eos_token_ids
    )
    for number, question in enumerate(QUESTIONS):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        engine.request_add(Request(question, ids, sampling, float(number)))
    while len(finished) < len(QUESTIONS):
        engine.step()
    yield finished


def test_it_answers_a_question_it_knows(outputs: dict[str, Request], folder: Path) -> None:
    request = outputs[QUESTIONS[0]]
    detokenizer = IncrementalDetokenizer(HfTokenizer(folder))
    ids = request.token_ids[request.num_prompt_tokens :]
    text = "".join([*(detokenizer.feed(i) for i in ids), detokenizer.flush()])
    assert "Paris" in text
    assert request.token_ids[-1] in request.sampling.stop_token_ids or len(ids) == 24


def test_its_greedy_tokens_equal_generate(outputs: dict[str, Request], folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request in outputs.values():
        ids = torch.tensor([request.token_ids[: request.num_prompt_tokens]])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        assert out[0].tolist() == request.token_ids, FinishReason.STOP
