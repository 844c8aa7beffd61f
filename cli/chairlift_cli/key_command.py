"""`chairlift key create`: a new API key for a tenant, whose hash goes into a file of tenants, or
which itself goes into a Secret for a cluster.

The key itself is printed once and kept nowhere. A gateway takes a changed file without a restart.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from chairlift_cli.errors import CliError, writing
from chairlift_gateway.identity import TenantsError, parse_tenants
from chairlift_operator.quotas.key_secrets import KEYS_TYPE
from chairlift_protocol.quota import TENANT_PATTERN

TENANT_ANNOTATION: Final = "chairlift.dev/tenant"  # for people who look at the Secret
PREFIX: Final = "ck-"
NUM_BYTES: Final = 32


def run_key_create(
    tenant: str, request_class: str, path: Path | None, secret: str | None = None
) -> int:
    if not TENANT_PATTERN.fullmatch(tenant):
        raise CliError(
            f"a tenant's name is at most 63 of a-z, 0-9, '-', '.' and '_', not {tenant!r}"
        )
    key = PREFIX + secrets.token_urlsafe(NUM_BYTES)
    if secret is not None:
        print(json.dumps(_secret(secret, tenant, key), indent=1))
        return 0
    entry = {"sha256": hashlib.sha256(key.encode()).hexdigest(), "class": request_class}
    if path is None:
        listed = {"tenants": [{"tenant": tenant, "keys": [entry]}]}
        print(f"key: {key}\nfor a file of tenants: {json.dumps(listed)}")
        return 0
    with _alone_in(path):
        document = _read(path)
        _keys_of(document, tenant).append(entry)
        _replace(path, json.dumps(document, indent=1) + "\n")
    print(key)
    return 0


def _secret(name: str, tenant: str, key: str) -> dict[str, Any]:
    """As kubectl takes it. The class is said by the quota that names the Secret."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "annotations": {TENANT_ANNOTATION: tenant}},
        "type": KEYS_TYPE,
        "stringData": {"key": key},
    }


@contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """Keys made at the same time all get into the file: one after the other."""
    with writing(path):
        folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        parse_tenants(content)
    except FileNotFoundError:
        return {"tenants": []}
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from error
    except TenantsError as error:
        raise CliError(
            f"{path}: is no file of tenants ({error}): name another, which is made if there is none"
        ) from error
    document: dict[str, Any] = json.loads(content)
    return document


def _keys_of(document: dict[str, Any], tenant: str) -> list[Any]:
    tenants: list[dict[str, Any]] = document["tenants"]
    known = next((each for each in tenants if each["tenant"] == tenant), None)
    if known is None:
        known = {"tenant": tenant, "keys": []}
        tenants.append(known)
    keys: list[Any] = known["keys"]
    return keys


def _replace(path: Path, text: str) -> None:
    """Atomically: a gateway may read it at any moment."""
    fresh = path.with_name(path.name + ".new")
    with writing(path):
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
