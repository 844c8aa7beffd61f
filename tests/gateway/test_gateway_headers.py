from __future__ import annotations

import pytest

from chairlift_gateway.config import GatewayConfig
from chairlift_gateway.headers import (
    bearer_key,
    request_names,
    towards_client,
    towards_engine,
)
from chairlift_protocol.wire import IGNORED_FIELDS_HEADER, INTERNAL_HEADERS, LOAD_HEADER


def test_nothing_internal_and_nothing_between_hops_reaches_an_engine() -> None:
    stopped = [*INTERNAL_HEADERS, "X-Chairlift-Of-Tomorrow", "Authorization", "Host", "Cookie",
               "Connection", "Keep-Alive", "TE", "Transfer-Encoding", "Upgrade", "X-Hop",
               "Content-Length", "Accept-Encoding", "X-Request-ID"]  # fmt: skip
    sent = [(name.encode(), b"1") for name in stopped]
    sent += [(b"Connection", b"close, X-Hop"), (b"traceparent", b"00-a"), (b"Accept", b"*/*")]
    assert towards_engine(sent) == [(b"traceparent", b"00-a"), (b"accept", b"*/*")]


def test_a_client_learns_of_ignored_fields_but_not_of_load() -> None:
    answered = [
        (LOAD_HEADER.encode(), b"{}"),
        (IGNORED_FIELDS_HEADER.encode(), b"seed"),
        (b"Content-Type", b"text/plain"),
        (b"Server", b"engine"),
        (b"Connection", b"close"),
    ]
    expected = [(IGNORED_FIELDS_HEADER.encode(), b"seed"), (b"content-type", b"text/plain")]
    assert towards_client(answered) == expected


@pytest.mark.parametrize("given", [b"job-1", b"A" * 128, b"a.b_c-d"])
def test_a_sane_id_is_the_clients_to_keep_and_still_unique_within(given: bytes) -> None:
    first, second = request_names(given), request_names(given)
    assert first.for_client == second.for_client == given.decode()
    assert first.unique != second.unique
    assert first.unique.startswith(given.decode()[:100])
    assert len(first.unique) <= 128


@pytest.mark.parametrize("given", [None, b"", b"a b", b"A" * 129, b"x\n", "ä".encode(), b"a/b"])
def test_any_other_id_is_replaced(given: bytes | None) -> None:
    names = request_names(given)
    assert names.for_client == names.unique
    assert names.unique.startswith("req-")


@pytest.mark.parametrize(
    ("value", "key"),
    [(b"Bearer abc", b"abc"), (b"bearer  abc ", b"abc"), (b"Bearer ", None), (b"Basic abc", None)],
)
def test_a_key_is_what_follows_bearer(value: bytes, key: bytes | None) -> None:
    assert bearer_key([(b"Authorization", value)]) == key
    assert bearer_key([]) is None


def test_a_config_does_not_show_its_token(tmp_path: object) -> None:
    config = GatewayConfig(endpoints_path=tmp_path, internal_token="hush")  # type: ignore[arg-type]
    assert "hush" not in repr(config)
