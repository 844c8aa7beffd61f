from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift_gateway import identity
from chairlift_gateway.identity import (
    Caller,
    Identification,
    TenantsError,
    TenantsFile,
    parse_tenants,
)
from chairlift_gateway.metrics import MAX_TENANTS
from chairlift_gateway.openai_errors import Refusal
from chairlift_protocol.wire import RequestClass

CHAT, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


@pytest.fixture
def write_tenants(tmp_path: Path) -> Callable[..., Path]:
    path = tmp_path / "tenants.json"

    def write(**keys: list[str]) -> Path:
        tenants = [
            {
                "tenant": tenant,
                "keys": [
                    {"sha256": digest(key), "class": "batch" if "batch" in key else "interactive"}
                    for key in own
                ],
            }
            for tenant, own in keys.items()
        ]
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"tenants": tenants}))
        os.replace(fresh, path)
        return path

    return write


def test_a_key_names_its_tenant_and_class(write_tenants: Any) -> None:
    path = write_tenants(acme=["one", "batch-two"], zeta=["three"])
    who = Identification(TenantsFile(path), serves_anonymous=False)
    assert who.caller(bearer("one"), is_batch_path=False) == Caller("acme", CHAT)
    assert who.caller(bearer("one"), is_batch_path=True) == Caller("acme", BATCH)
    assert who.caller(bearer("batch-two"), is_batch_path=False) == Caller("acme", BATCH)
    assert who.caller(bearer("three"), is_batch_path=False) == Caller("zeta", CHAT)


@pytest.mark.parametrize("serves_anonymous", [True, False])
def test_an_unknown_key_is_refused_even_where_no_key_is_needed(
    write_tenants: Any, serves_anonymous: bool
) -> None:
    who = Identification(TenantsFile(write_tenants(acme=["one"])), serves_anonymous)
    for key in ("two", digest("one")):
        with pytest.raises(Refusal, match="not known"):
            who.caller(bearer(key), is_batch_path=False)


def test_nobody_is_anonymous_where_that_is_served_and_refused_elsewhere(
    write_tenants: Any,
) -> None:
    tenants = TenantsFile(write_tenants(acme=["one"]))
    who = Identification(tenants, serves_anonymous=True)
    assert who.caller([], is_batch_path=False) == Caller("anonymous", CHAT)
    with pytest.raises(Refusal, match="Authorization: Bearer KEY"):
        Identification(tenants, serves_anonymous=False).caller([], is_batch_path=False)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (None, "No API key was given"),
        (b"one", "holds no Bearer key"),
        (b"Basic one", "holds no Bearer key"),
        (b"Bearer ", "holds no Bearer key"),
    ],
)
def test_a_key_that_is_not_sent_as_a_bearers_is_told_how(
    write_tenants: Any, header: bytes | None, said: str
) -> None:
    who = Identification(TenantsFile(write_tenants(acme=["one"])), serves_anonymous=False)
    headers = [] if header is None else [(b"authorization", header)]
    with pytest.raises(Refusal, match=f"{said}.*`Authorization: Bearer KEY`"):
        who.caller(headers, is_batch_path=False)


def test_without_a_file_of_tenants_any_key_is_nobodys() -> None:
    who = Identification(None, serves_anonymous=True, batch_key_digests=(digest("night"),))
    assert who.caller(bearer("any"), is_batch_path=False) == Caller("anonymous", CHAT)
    assert who.caller(bearer("night"), is_batch_path=False) == Caller("anonymous", BATCH)


def test_a_trusted_header_names_the_tenant(write_tenants: Any) -> None:
    tenants = TenantsFile(write_tenants(acme=["one"]))
    who = Identification(tenants, serves_anonymous=False, trusted_header=b"x-tenant")
    assert who.caller([(b"X-Tenant", b"zeta")], is_batch_path=False) == Caller("zeta", CHAT)
    assert who.caller(bearer("one"), is_batch_path=False) == Caller("acme", CHAT)
    for name in (b"", b"*", b"A", b"a" * 64, b"a/b", "ä".encode()):
        with pytest.raises(Refusal):
            who.caller([(b"x-tenant", name)], is_batch_path=False)


@pytest.mark.parametrize("second", [b"beta", b"zeta", b""])
def test_a_trusted_header_that_comes_twice_names_nobody(write_tenants: Any, second: bytes) -> None:
    tenants = TenantsFile(write_tenants(acme=["one"]))
    who = Identification(tenants, serves_anonymous=True, trusted_header=b"x-tenant")
    for headers in (
        [(b"x-tenant", b"zeta"), (b"X-Tenant", second)],
        [(b"x-tenant", b"zeta, beta")],
    ):
        with pytest.raises(Refusal) as refused:
            who.caller([*headers, *bearer("one")], is_batch_path=False)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    twice = [(b"x-tenant", b"zeta"), (b"x-tenant", second)]
    with pytest.raises(Refusal, match="sent more than once"):
        who.caller(twice, is_batch_path=True)


@pytest.mark.parametrize("second", [b"Bearer one", b"Bearer two", b"Basic one", b""])
@pytest.mark.parametrize("serves_anonymous", [True, False])
def test_two_keys_name_nobody(write_tenants: Any, second: bytes, serves_anonymous: bool) -> None:
    for tenants in (TenantsFile(write_tenants(acme=["one"], zeta=["two"])), None):
        who = Identification(tenants, serves_anonymous, trusted_header=b"x-tenant")
        with pytest.raises(Refusal, match="sent more than once") as refused:
            who.caller(
                [*bearer("one"), (b"Authorization", second), (b"x-tenant", b"acme")],
                is_batch_path=False,
            )
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_a_header_that_is_not_trusted_names_nobody(write_tenants: Any) -> None:
    who = Identification(TenantsFile(write_tenants(acme=["one"])), serves_anonymous=True)
    headers = [(b"x-tenant", b"zeta"), (b"x-tenant", b"beta"), (b"x-chairlift-tenant", b"zeta")]
    assert who.caller(headers, is_batch_path=False).tenant == "anonymous"


def test_keys_are_rotated_without_a_restart_and_a_bad_file_changes_nothing_and_is_said_once(
    write_tenants: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(identity, "REREAD_S", 0.0)
    path = write_tenants(acme=["old"])
    tenants = TenantsFile(path)
    write_tenants(acme=["old", "new"])
    assert tenants.keys.find(b"new") and tenants.keys.find(b"old")
    write_tenants(acme=["new"])
    assert tenants.keys.find(b"new") and not tenants.keys.find(b"old")
    path.write_text("{")
    assert tenants.keys.find(b"new")
    path.unlink()
    caplog.clear()
    for _ in range(3):
        assert tenants.keys.find(b"new")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], "must be"),
        ({"tenants": {}}, "must be"),
        ({"tenants": [{"tenant": "A", "keys": []}]}, r"tenants\[0\].tenant: must"),
        ({"tenants": [{"tenant": "*", "keys": []}]}, r"tenants\[0\].tenant: must"),
        ({"tenants": [{"tenant": "a"}]}, r"tenants\[0\].keys: must"),
        ({"tenants": [{"tenant": "a", "keys": ["x"]}]}, r"keys\[0\].sha256: must be 64"),
        (
            {"tenants": [{"tenant": "a", "keys": [{"sha256": "0" * 64, "class": "x"}]}]},
            r"keys\[0\].class: must be interactive or batch",
        ),
        (
            {"tenants": [{"tenant": t, "keys": [{"sha256": "0" * 64}]} for t in "ab"]},
            r"tenants\[1\]: a key of another tenant",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_where(document: Any, field: str) -> None:
    with pytest.raises(TenantsError, match=field):
        parse_tenants(json.dumps(document).encode())


@pytest.mark.anyio
async def test_one_tenant_drives_engine_and_metrics_and_a_clients_own_words_do_not(
    start_engine: Any, start_gateway: Any, write_tenants: Any
) -> None:
    engine = await start_engine()
    gateway = await start_gateway(
        engine, tenants_path=write_tenants(acme=["one"]), serves_anonymous=False,
        trusted_tenant_header=b"x-tenant",
    )  # fmt: skip
    forged = {"authorization": "Bearer one", "x-chairlift-tenant": "zeta"}
    async with gateway.post(headers=forged) as answer:
        assert answer.status == 200
    async with gateway.post(headers={"x-tenant": "beta"}) as answer:
        assert answer.status == 200
    sent = [request.headers for request in engine.requests]
    assert [headers["x-chairlift-tenant"] for headers in sent] == ["acme", "beta"]
    assert not any("x-tenant" in headers or "authorization" in headers for headers in sent)
    named = {key[2] for key in await gateway.samples() if "tenant_tokens" in key[0]}
    assert named == {"acme", "beta"}


@pytest.mark.anyio
async def test_who_is_not_known_gets_401_on_every_path_and_no_engine_hears_of_it(
    start_engine: Any, start_gateway: Any, write_tenants: Any
) -> None:
    engine = await start_engine()
    gateway = await start_gateway(
        engine, tenants_path=write_tenants(acme=["one"]), serves_anonymous=False
    )
    for path in ("/v1/completions", "/batch/v1/chat/completions", "/tokenize"):
        async with gateway.post(path) as answer:
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert (await answer.json())["error"]["code"] == "invalid_api_key"
    async with gateway.client.get(gateway.url + "/v1/models") as answer:
        assert answer.status == 401
    assert engine.requests == []
    await gateway.until_sample(1, "chairlift_gateway_responses_total", "batch", "401")


@pytest.mark.anyio
async def test_tenants_beyond_a_bound_share_one_series(
    start_engine: Any, start_gateway: Any
) -> None:
    gateway = await start_gateway(await start_engine(), trusted_tenant_header=b"x-tenant")
    for number in range(MAX_TENANTS + 20):
        async with gateway.post(headers={"x-tenant": f"t{number}"}) as answer:
            assert answer.status == 200
    named = {key[2] for key in await gateway.samples() if "tenant_tokens" in key[0]}
    assert len(named) == MAX_TENANTS + 1
    assert "other" in named
