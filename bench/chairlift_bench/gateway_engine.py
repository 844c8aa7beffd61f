"""An engine's side of HTTP without an engine: streams of events in step, for `bench_gateway`.

As an engine does, it writes one event to every stream at each step. How many a request gets is its
`max_tokens`. Started as `python -m chairlift_bench.gateway_engine STEP_MS`; it prints its port.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Final

from chairlift_protocol.load import Load
from chairlift_protocol.wire import LOAD_HEADER, USAGE_COMMENT, USAGE_HEADER

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS: Final = re.compile(rb'"max_tokens": *(\d+)')
_ASKS_USAGE: Final = USAGE_HEADER.encode()
_LOAD: Final = Load(8, 0, 0, 100_000, 0.0, (1, 1), False).to_header()
_HEAD: Final = (
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    f"{LOAD_HEADER}: {_LOAD}\r\ntransfer-encoding: chunked\r\n\r\n"
).encode()


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(event), event)


EVENT: Final = _chunk(
    b'data: {"id":"cmpl-2f6b7c0c5b6e4f0d","object":"text_completion","created":1764460800,'
    b'"model":"smollm2-135m","choices":[{"index":0,"text":" snow","logprobs":null,'
    b'"finish_reason":null}],"usage":null}\n\n'
)
_LAST: Final = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Connection(asyncio.Protocol):
    """num_left: events of the answer under way."""

    def __init__(self, open_streams: set[_Connection]) -> None:
        self._open = open_streams
        self._buffer = b""
        self._num_left = self._num_in_all = 0
        self._tells_usage = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._buffer, 0, end)
        end += 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < end:
            return
        request, self._buffer = self._buffer[:end], self._buffer[end:]
        wanted = _MAX_TOKENS.search(request)
        self._num_left = self._num_in_all = int(wanted[1]) if wanted else 1
        self._tells_usage = _ASKS_USAGE in request
        self._transport.write(_HEAD + self._usage(0))
        self._open.add(self)
        self.step()

    def step(self) -> None:
        self._num_left -= 1
        if self._num_left > 0:
            self._transport.write(EVENT)
            return
        self._transport.write(EVENT + self._usage(self._num_in_all) + _LAST)
        self._open.discard(self)

    def _usage(self, num_tokens: int) -> bytes:
        if not self._tells_usage:
            return b""
        told = b'{"prompt_tokens":7,"completion_tokens":%d}\n\n' % num_tokens
        return _chunk(USAGE_COMMENT + told)


async def serve(step_s: float) -> None:
    open_streams: set[_Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(open_streams), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    next_s = loop.time()
    while True:
        next_s = max(next_s + step_s, loop.time())
        await asyncio.sleep(next_s - loop.time())
        for stream in list(open_streams):
            stream.step()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]) / 1000))
