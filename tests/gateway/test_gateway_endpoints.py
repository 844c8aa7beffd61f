from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift_gateway.choice import Replica
from chairlift_gateway.endpoints import EndpointsError, FileEndpoints, parse_endpoints
from chairlift_protocol.wire import RequestClass

ONE = SimpleNamespace(name="r0", url="http://127.0.0.1:8000")
TWO = SimpleNamespace(name="r1", url="http://127.0.0.1:8001")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "must be JSON"),
        (b"\xff", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[]", 'must be {"replicas": '),
        (b'{"replicas": {}}', 'must be {"replicas": '),
        (b'{"replicas": ["r0"]}', r"replicas[0].name: must be a text, not None"),
        (b'{"replicas": [{"name": ""}]}', "replicas[0].name: must be a text, not ''"),
        (b'{"replicas": [{"name": "a"}]}', "replicas[0].url: must be like http://"),
        (b'{"replicas": [{"name": "a", "url": "ftp://x"}]}', "not 'ftp://x'"),
        (b'{"replicas": [{"name": "a", "url": "http://x:99999"}]}', "not 'http://x:99999'"),
        (b'{"replicas": [{"name": "a", "url": "http://x?a=1"}]}', "not 'http://x?a=1'"),
        (
            b'{"replicas": [{"name": "a", "url": "http://x", "class": "bulk"}]}',
            "replicas[0].class: must be interactive or batch, not 'bulk'",
        ),
        (b'{"replicas": [{"name":"a","url":"http://x"},{"name":"a","url":"http://y"}]}', "twice"),
    ],
)
def test_a_bad_list_is_refused_by_a_sentence_that_names_the_field(
    content: bytes, sentence: str
) -> None:
    with pytest.raises(EndpointsError) as refusal:
        parse_endpoints(content)
    assert sentence in str(refusal.value)


def test_fields_of_a_newer_writer_are_left_alone() -> None:
    content = b'{"v": 2, "replicas": [{"name": "a", "url": "http://x:1/", "class": "batch"}]}'
    assert parse_endpoints(content) == (Replica("a", "http://x:1", RequestClass.BATCH),)


def test_a_replaced_file_is_read_again(write_endpoints: Callable[..., Path]) -> None:
    source = FileEndpoints(write_endpoints(ONE))
    assert [each.name for each in source.latest()] == ["r0"]
    write_endpoints(ONE, TWO)
    assert [each.name for each in source.latest()] == ["r0", "r1"]
    write_endpoints()
    assert source.latest() == ()


@pytest.mark.parametrize("spoil", [lambda p: p.write_text("{"), lambda p: p.unlink()])
def test_a_spoilt_file_keeps_the_last_good_list_and_is_said_once(
    write_endpoints: Callable[..., Path],
    spoil: Callable[[Path], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_endpoints(ONE)
    source = FileEndpoints(path)
    spoil(path)
    with caplog.at_level(logging.WARNING, "chairlift_gateway"):
        for _ in range(3):
            assert [each.name for each in source.latest()] == ["r0"]
    assert len(caplog.messages) == 1
    assert "keeping the last 1 replica(s)" in caplog.messages[0]
    write_endpoints(TWO)
    assert [each.name for each in source.latest()] == ["r1"]


def test_a_first_list_is_needed(tmp_path: Path) -> None:
    with pytest.raises(EndpointsError, match="cannot read .*: No such file"):
        FileEndpoints(tmp_path / "none.json")


@pytest.mark.anyio
async def test_a_watch_publishes_the_first_list_and_every_other_one(
    write_endpoints: Callable[..., Path], until: Callable[..., Any]
) -> None:
    source = FileEndpoints(write_endpoints(ONE))
    seen: list[tuple[Replica, ...]] = []
    watching = asyncio.create_task(source.watch(seen.append))
    await until(lambda: len(seen) > 0)
    assert [each.name for each in seen[0]] == ["r0"]
    write_endpoints(TWO)
    await until(lambda: [each.name for each in seen[-1]] == ["r1"])
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
