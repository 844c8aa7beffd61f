"""A whole engine server over real sockets, with byte tokens and a runner that tests can hold."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from chairlift_engine.clock import MonotonicClock
from chairlift_engine.config import Capacity
from chairlift_engine.request import TokenLogprobs
from chairlift_engine.runner import Sampled, ScheduledChunk
from chairlift_engine.server.door import Bounds
from chairlift_engine.server.engine_server import EngineServer, LoadedModel, ServerSettings
from chairlift_engine.tokenizer import ByteTokenizer

MODEL = "echo"
WAIT_S = 10.0
NUM_BYTES = 256
BOUNDS = Bounds()


class EchoRunner:
    """Answers each prompt with its own tokens, then an end-of-sequence token.

    `hold` keeps steps from being computed until `release`, but for those of `allow`; `fail` breaks
    the next one for good, `next_error` is what it raises instead.
    """

    def __init__(self, eos_token_id: int) -> None:
        self._eos_token_id = eos_token_id
        self._changed = threading.Condition()
        self._num_allowed = math.inf
        self.in_step = threading.Event()
        self.num_begun = 0
        self.fail = False
        self.next_error: Exception | None = None
        self.computed: set[int] = set()  # by the length of the prompt

    def hold(self) -> None:
        with self._changed:
            self._num_allowed = 0
        self.in_step.clear()

    def allow(self, num_steps: float) -> None:
        with self._changed:
            self._num_allowed += num_steps
            self._changed.notify()

    def release(self) -> None:
        self.allow(math.inf)

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[Sampled]:
        self.num_begun += 1
        self.in_step.set()
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_allowed > 0, WAIT_S)
            self._num_allowed -= 1
        if self.fail:
            raise RuntimeError("the forward pass broke")
        if (error := self.next_error) is not None:
            self.next_error = None
            raise error
        self.computed.update(c.request.num_prompt_tokens for c in chunks)
        return [self._sampled(c) for c in chunks if c.samples]

    def _sampled(self, chunk: ScheduledChunk) -> Sampled:
        """The token, and with logprobs falling from -0.5 for it, for as many as are asked for."""
        token_id = self._token(chunk)
        num_logprobs = chunk.request.sampling.num_logprobs
        if num_logprobs is None:
            return Sampled(token_id)
        top = tuple(
            ((token_id + i) % ByteTokenizer.vocab_size, -0.5 - i) for i in range(num_logprobs)
        )
        return Sampled(token_id, TokenLogprobs(-0.5, top))

    def _token(self, chunk: ScheduledChunk) -> int:
        request = chunk.request
        prompt = [t for t in request.token_ids[: request.num_prompt_tokens] if t < NUM_BYTES]
        return [*prompt, self._eos_token_id][min(request.num_output_tokens, len(prompt))]


@dataclass
class RunningEngine:
    url: str
    admin_url: str
    server: EngineServer
    runner: EchoRunner
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    exit_codes: list[int]
    client: httpx2.Client
    admin: httpx2.Client
    capacity: Capacity

    @property
    def serving(self) -> Any:
        return self.server.replica.serving

    def free_list(self) -> frozenset[int]:
        """Which blocks are free between two steps."""
        read = self.serving.engine.request_snapshot(lambda s: s.residency.blocks.free_list())
        return read.result(WAIT_S)

    def complete(self, prompt: object = "abc", **fields: object) -> httpx2.Response:
        headers = fields.pop("headers", {})
        body = {"model": MODEL, "prompt": prompt, **fields}
        return self.client.post("/v1/completions", content=json.dumps(body), headers=headers)

    def chat(self, content: object = "hi", **fields: object) -> httpx2.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return self.client.post("/v1/chat/completions", content=json.dumps(body))

    def metric(self, sample: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(sample)).split()[-1])

    def stream_stepwise(self, path: str, **fields: object) -> list[str]:
        """A stream's events, with each step computed only when the last one's have arrived."""
        self.runner.hold()
        events: list[str] = []
        body = {"model": MODEL, "stream": True, **fields}
        self.runner.allow(1)
        with self.client.stream("POST", path, content=json.dumps(body)) as response:
            for line in response.iter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    self.runner.allow("assistant" not in line)
        self.runner.release()
        return events

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=WAIT_S)

    def open_raw(self, path: str, body: object, more_headers: str = "") -> socket.socket:
        """A connection that has sent its request and can be closed at any moment."""
        connection = self.connect()
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n"
        head += f"connection: close\r\n{more_headers}\r\n"
        connection.sendall(head.encode() + raw)
        return connection

    def stop(self) -> int:
        self.runner.release()
        self.loop.call_soon_threadsafe(self.server.stop)
        return self.join()

    def join(self) -> int:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.exit_codes[0]


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, "the condition never came true"
            time.sleep(0.002)

    return wait


StartEngine = Callable[..., RunningEngine]


@contextmanager
def running() -> Iterator[StartEngine]:
    started: list[RunningEngine] = []

    def start(
        load: Callable[[LoadedModel], LoadedModel] = lambda loaded: loaded,
        drain_s: float = WAIT_S,
        wait_ready: bool = True,
        bounds: Bounds = BOUNDS,
        **capacity: int,
    ) -> RunningEngine:
        engine = _start(load, drain_s, bounds, capacity)
        started.append(engine)
        while wait_ready and engine.client.get("/health/ready").status_code != 200:
            time.sleep(0.002)
        return engine

    yield start
    for engine in started:
        engine.client.close()
        engine.admin.close()
        if engine.thread.is_alive():
            engine.stop()


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    with running() as start:
        yield start


@pytest.fixture
def engine(start_engine: StartEngine) -> RunningEngine:
    return start_engine()


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[RunningEngine]:
    """One engine for many small questions, which it has to survive."""
    with running() as start:
        yield start()


def _start(
    load: Callable[[LoadedModel], LoadedModel],
    drain_s: float,
    bounds: Bounds,
    capacity: dict[str, int],
) -> RunningEngine:
    sizes = {
        "batch_size": 4,
        "step_tokens": 128,
        "num_blocks": 64,
        "block_tokens": 8,
        "model_length_tokens": 256,
        **capacity,
    }
    tokenizer = ByteTokenizer()
    runner = EchoRunner(min(tokenizer.eos_token_ids))
    loaded = LoadedModel(runner, tokenizer, Capacity(**sizes), tokenizer.eos_token_ids)
    settings = ServerSettings(
        MODEL,
        drain_s=drain_s,
        admin_token="admin secret",
        internal_token="internal secret",
        bounds=bounds,
    )
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    urls = [f"http://127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    exit_codes: list[int] = []
    made: list[tuple[EngineServer, asyncio.AbstractEventLoop]] = []
    bound = threading.Event()

    async def serve() -> None:
        server = EngineServer(settings, lambda: load(loaded), MonotonicClock())
        made.append((server, asyncio.get_running_loop()))
        exit_codes.append(await server.run(sockets[0], sockets[1], bound.set))

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert bound.wait(WAIT_S)
    server, loop = made[0]
    return RunningEngine(
        url=urls[0],
        admin_url=urls[1],
        server=server,
        runner=runner,
        thread=thread,
        loop=loop,
        exit_codes=exit_codes,
        client=httpx2.Client(base_url=urls[0], timeout=WAIT_S, trust_env=False),
        admin=httpx2.Client(
            base_url=urls[1],
            timeout=WAIT_S,
            trust_env=False,
            headers={"authorization": "Bearer admin secret"},
        ),
        capacity=loaded.capacity,
    )
