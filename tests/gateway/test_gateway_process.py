from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from chairlift_gateway.__main__ import listen, main
from chairlift_gateway.config import ConfigError, GatewayConfig, parse_config
from chairlift_gateway.front_door import MAX_HEAD_BYTES

DONE = b"data: [DONE]\n\n"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("pool-token\n")
    return path


@pytest.fixture
def arguments(write_endpoints: Callable[..., Path], token_file: Path) -> list[str]:
    return ["--endpoints-file", str(write_endpoints()), "--internal-token-file", str(token_file)]


@dataclass
class Process:
    process: asyncio.subprocess.Process
    url: str


@asynccontextmanager
async def running(arguments: list[str]) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "chairlift_gateway", "--port", "0", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert "listening on http://127.0.0.1:" in line
        yield Process(process, line.split()[-1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def test_no_token_waits_for_the_client_to_acknowledge_the_one_before(
    arguments: list[str],
) -> None:
    with listen(parse_config(["--port", "0", *arguments])) as listener:
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def until_refused(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except (ConnectionRefusedError, ConnectionResetError):  # the latter as it closes
                return
            writer.close()
            await asyncio.sleep(0.02)


@pytest.mark.anyio
async def test_after_sigterm_a_stream_finishes_and_the_process_ends_with_0(
    start_engine: Any, write_endpoints: Any, arguments: list[str], sse: Any, token: Any
) -> None:
    may_end = asyncio.Event()

    async def gated(request: web.Request) -> web.StreamResponse:
        response = await sse(request)
        await response.write(token("a"))
        await may_end.wait()
        await response.write(token("b") + DONE)
        return response

    write_endpoints(await start_engine(gated))
    async with running(arguments) as gateway, aiohttp.ClientSession() as client:
        async with client.post(gateway.url + "/v1/completions", data=b"{}") as answer:
            assert await answer.content.readany() == token("a")
            gateway.process.send_signal(signal.SIGTERM)
            await until_refused(gateway.url)
            may_end.set()
            assert await answer.read() == token("b") + DONE
        assert await asyncio.wait_for(gateway.process.wait(), 5) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("is_impatient", [True, False])
async def test_a_stream_that_outlives_the_drain_gets_an_error_and_the_process_ends_with_0(
    start_engine: Any, endless: Any, write_endpoints: Any, arguments: list[str], token: Any,
    is_impatient: bool,
) -> None:  # fmt: skip
    """By the drain's own end, or by a second signal."""

    engine = await start_engine(endless)
    write_endpoints(engine)
    drain_s = "60" if is_impatient else "0.2"
    async with (
        running([*arguments, "--drain-s", drain_s]) as gateway,
        aiohttp.ClientSession() as client,
    ):
        async with client.post(gateway.url + "/v1/completions", data=b"{}") as answer:
            assert await answer.content.readany() == token("a")
            gateway.process.send_signal(signal.SIGINT)
            if is_impatient:
                await until_refused(gateway.url)
                gateway.process.send_signal(signal.SIGINT)
            assert b"gateway_shutting_down" in await answer.read()
        await asyncio.wait_for(engine.left.wait(), 5)
        assert await asyncio.wait_for(gateway.process.wait(), 5) == 0


@pytest.mark.anyio
async def test_after_a_second_signal_nobody_is_waited_for_who_does_not_take_what_he_is_told(
    arguments: list[str],
) -> None:
    async with running([*arguments, "--drain-s", "60"]) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\n"
                     b"Content-Length: 9\r\n\r\n")  # fmt: skip
        assert b" 100 " in await reader.readline()
        gateway.process.send_signal(signal.SIGTERM)
        await until_refused(gateway.url)
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.process.wait(), 5) == 0
        assert b"gateway_shutting_down" in await reader.read()
        writer.close()


@pytest.mark.anyio
async def test_the_process_bounds_what_a_connection_may_send(arguments: list[str]) -> None:
    async with running(arguments) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 431")
        writer.close()


@pytest.mark.anyio
async def test_the_process_may_have_as_many_connections_as_the_system_lets_it(
    arguments: list[str],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        async with running(arguments) as gateway:
            assert resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_busy_port_is_one_sentence_and_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*arguments, "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"chairlift-gateway: --port: cannot listen on 127.0.0.1 port {port}: "
        "Address already in use; choose a free one, or 0 to have one picked\n"
    )


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--port", "70000"], "argument --port: must be a whole number from 0 to 65535"),
        (["--port", "1e3"], "argument --port: must be a whole number"),
        (["--hold-s", "-1"], "argument --hold-s: must be seconds from 0 to 86400, not '-1'"),
        (["--hold-s", "nan"], "argument --hold-s: must be seconds"),
        (["--drain-s", "soon"], "argument --drain-s: must be seconds"),
        (["--hold-max", "x"], "argument --hold-max: must be a whole number"),
        (["--max-body-bytes", "0"], "argument --max-body-bytes: must be a whole number from 1"),
        (["--batch-key-sha256", "key"], "argument --batch-key-sha256: must be the 64 hex digits"),
        (["--log-level", "loud"], "argument --log-level: invalid choice"),
        (["--host", "no such host"], "--port: cannot listen on no such host port 8080"),
        (["--endpoints-file", "/none"], "--endpoints-file: cannot read /none: No such file"),
        (["--endpoints-file", "/dev/null"], "--endpoints-file: /dev/null: must be JSON"),
        (["--internal-token-file", "/none"], "--internal-token-file: cannot read /none: No such"),
        (["--internal-token-file", "/dev/null"], "--internal-token-file: /dev/null must hold one"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--tenants-file", "/none"], "--tenants-file: cannot read /none: No such file"),
        (["--tenants-file", "/dev/null"], "--tenants-file: /dev/null: must be JSON"),
        (["--trusted-tenant-header", "a b"], "argument --trusted-tenant-header: must be a header"),
        (["--quota-redis", "redis://r"], "--quota-redis: needs --quota-pool"),
        (["--quota-redis", "r:6379", "--quota-pool", "a/b"], "--quota-redis: must be like redis:"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_sentence_and_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], more: list[str], sentence: str
) -> None:
    assert main([*arguments, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("chairlift-gateway: " + sentence)
    assert err.count("\n") == 1


def test_what_is_not_given_has_the_default_of_the_config(arguments: list[str]) -> None:
    parsed = parse_config(arguments)
    expected = GatewayConfig(endpoints_path=Path(arguments[1]), internal_token="pool-token")
    assert parsed == expected


def test_token_and_a_source_of_replicas_must_be_named(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="required: --internal-token-file"):
        parse_config(arguments[:2])
    with pytest.raises(ConfigError, match="--endpoints-file --kubernetes-pool is required"):
        parse_config(arguments[2:])
    with pytest.raises(ConfigError, match="not allowed with argument --endpoints-file"):
        parse_config([*arguments, "--kubernetes-pool", "team/chat"])


def test_batch_keys_are_known_by_their_digest(arguments: list[str]) -> None:
    digest = hashlib.sha256(b"one").hexdigest()
    config = parse_config([*arguments, "--batch-key-sha256", digest.upper()])
    assert config.batch_key_digests == (digest,)


@pytest.mark.parametrize(
    ("more", "is_served"),
    [
        ([], True),
        (["--tenants-file", "t"], False),
        (["--trusted-tenant-header", "X-Tenant"], False),
        (["--tenants-file", "t", "--anonymous", "serve"], True),
        (["--anonymous", "refuse"], False),
    ],
)
def test_who_tells_tenants_apart_serves_nobody_else_unless_told_to(
    arguments: list[str], more: list[str], is_served: bool
) -> None:
    assert parse_config([*arguments, *more]).serves_anonymous is is_served


def test_quotas_are_those_of_the_pool_that_is_watched_or_named(arguments: list[str]) -> None:
    redis = ["--quota-redis", "rediss://redis:6379/0"]
    config = parse_config([*arguments, *redis, "--quota-pool", "team/chat"])
    assert config.redis is not None and config.redis.is_encrypted
    assert config.quota_pool == "team/chat"
    config = parse_config([*arguments[2:], *redis, "--kubernetes-pool", "team/chat"])
    assert config.quota_pool == "team/chat"


def test_tenants_on_kubernetes_are_those_of_the_pools_namespace(arguments: list[str]) -> None:
    watched = ["--kubernetes-tenants", "chat-tenants"]
    config = parse_config([*arguments[2:], *watched, "--kubernetes-pool", "team/chat"])
    assert config.kubernetes_tenants == "chat-tenants" and not config.serves_anonymous
    with pytest.raises(ConfigError, match="--kubernetes-tenants: needs --kubernetes-pool"):
        parse_config([*arguments, *watched])
    with pytest.raises(ConfigError, match="not allowed with argument"):
        parse_config([*arguments, *watched, "--tenants-file", "t"])
