"""Everything at once over sockets; then no block, slot, stream or connection may be lost."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from chairlift_engine.clock import MonotonicClock
from chairlift_engine.config import Capacity
from chairlift_engine.server.engine_server import LoadedModel
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import Profile

ALL = {"batch_size": 16, "step_tokens": 256, "batch_class_share": 1.0, "scheduling": "continuous"}


@dataclass
class Storm:
    """Mixed requests against one engine while its policy changes under them."""

    engine: Any
    num_requests: int
    num_at_once: int
    max_output: int = 24
    seed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_policies: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            gate, done = asyncio.Semaphore(self.num_at_once), asyncio.Event()
            changing = asyncio.create_task(self._change_policies(session, done))
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.num_requests):
                    await gate.acquire()
                    tasks.create_task(self._one(session)).add_done_callback(
                        lambda _: gate.release()
                    )
                done.set()  # the last policy lets everything run, or batch work would wait
            await changing

    async def _change_policies(self, session: aiohttp.ClientSession, done: asyncio.Event) -> None:
        while not done.is_set():
            await self._set_policy(
                session,
                {
                    "batch_size": self._rng.choice([1, 3, 8, 16]),
                    "step_tokens": self._rng.choice([16, 48, 256]),
                    "batch_class_share": self._rng.choice([0.0, 0.3, 1.0]),
                    "scheduling": self._rng.choice(["continuous", "continuous", "static"]),
                },
            )
            await asyncio.sleep(0.03)
            if self.num_policies % 4 == 0:  # so that what a hard policy holds up gets through
                await self._set_policy(session, ALL)
                await asyncio.sleep(0.03)
        await self._set_policy(session, ALL)

    async def _set_policy(self, session: aiohttp.ClientSession, values: dict[str, Any]) -> None:
        self.num_policies += 1
        policy = {
            "generation": [1, self.num_policies],
            "chunk_tokens": values["step_tokens"],
            "slo": {"ttft_ms": 500, "itl_ms": 50},
            **values,
        }
        headers = {"authorization": "Bearer admin secret"}
        url = f"{self.engine.admin_url}/admin/policy"
        async with session.patch(url, json=policy, headers=headers) as response:
            assert response.status == 200, await response.text()

    async def _one(self, session: aiohttp.ClientSession) -> None:
        rng, max_tokens = self._rng, self._rng.randint(1, self.max_output)
        body = {
            "model": "echo",
            "prompt": [97 + rng.randrange(26) for _ in range(rng.choice([1, 7, 16, 60]))],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": rng.random() < 0.6,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        headers = {
            "x-chairlift-internal-token": "internal secret",
            "x-chairlift-class": rng.choice(["interactive", "batch"]),
        }
        leaves = rng.random() < 0.25
        asking = asyncio.ensure_future(self._ask(session, body, headers))
        if leaves:
            await asyncio.wait({asking}, timeout=rng.choice([0.0, 0.002, 0.02, 0.1]))
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                self.outcomes["left"] += 1
                return
        status, num_tokens, reason = await asking
        self.outcomes[f"{status} {reason}"] += 1
        if (status, num_tokens, reason) != (200, max_tokens, "length"):
            self.wrong.append(f"{status}, {num_tokens} of {max_tokens} tokens, {reason}")

    async def _ask(
        self, session: aiohttp.ClientSession, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, int, str]:
        url = f"{self.engine.url}/v1/completions"
        async with session.post(url, json=body, headers=headers) as response:
            text = (await response.read()).decode()
        if not body["stream"]:
            answer = json.loads(text)
            choice = answer.get("choices", [{}])[0]
            num_tokens = answer.get("usage", {}).get("completion_tokens", -1)
            return response.status, num_tokens, choice.get("finish_reason") or text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        if lines[-1:] != ["[DONE]"]:
            return response.status, -1, text[-200:]
        events = [json.loads(line) for line in lines[:-1]]
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        return response.status, events[-1]["usage"]["completion_tokens"], reasons[0]


def _assert_nothing_is_lost(engine: Any, eventually: Callable[[Callable[[], bool]], None]) -> None:
    eventually(lambda: engine.server.replica.num_in_flight == 0)
    eventually(lambda: engine.serving.bridge.num_open == 0)

    def state(scheduler: Any) -> Any:
        residency = scheduler.residency
        waiting = sum(map(len, residency.waiting.values()))
        gauges = residency.gauges()
        return (
            residency.blocks.free_list(), len(residency.running), waiting,
            residency.num_requests, gauges.waiting_prefill_tokens,
        )  # fmt: skip

    num_blocks = engine.serving.capacity.num_blocks
    everything = (frozenset(range(1, num_blocks + 1)), 0, 0, 0, 0)
    read = engine.serving.engine.request_snapshot
    eventually(lambda: read(state).result(10) == everything)
    engine.client.close()
    engine.admin.close()
    servers = engine.server._servers
    eventually(lambda: all(not server.server_state.connections for server in servers))


def _with_runner(make: Callable[[Capacity], Any], **sizes: int) -> Callable[..., LoadedModel]:
    def load(loaded: LoadedModel) -> LoadedModel:
        capacity = dataclasses.replace(loaded.capacity, **sizes)
        return dataclasses.replace(loaded, capacity=capacity, runner=make(capacity))

    return load


SIZES = {"batch_size": 16, "step_tokens": 256, "num_blocks": 40, "block_tokens": 16}


def test_two_thousand_mixed_requests_leave_nothing_behind(start_engine, eventually) -> None:
    profile = Profile(a_ms=0.5, b_ms=0.01, c_ms=0.002, d_ms=0.0)
    load = _with_runner(lambda _: SimulatorRunner(profile, MonotonicClock()), **SIZES)
    engine = start_engine(load)
    storm = Storm(engine, num_requests=2000, num_at_once=60)
    storm.run()
    assert not storm.wrong, storm.wrong[:3]
    assert sum(storm.outcomes.values()) == 2000
    assert storm.outcomes["left"] > 100 and storm.num_policies > 20
    _assert_nothing_is_lost(engine, eventually)


def test_two_hundred_mixed_requests_on_a_real_model_leave_nothing_behind(
    start_engine, eventually
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from chairlift_engine.models import prepare_model
    from chairlift_engine.torch_runner import TorchRunner

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    loaded_model = prepare_model(model)
    load = _with_runner(
        lambda capacity: TorchRunner(loaded_model, capacity.num_blocks, capacity.block_tokens),
        **SIZES,
    )
    engine = start_engine(load)
    storm = Storm(engine, num_requests=220, num_at_once=24, max_output=12, seed=1)
    storm.run()
    assert not storm.wrong, storm.wrong[:3]
    assert sum(storm.outcomes.values()) == 220
    _assert_nothing_is_lost(engine, eventually)
