"""How the API server is reached: a service account's files in a pod, else the kubeconfig.

Kopf logs in by the same. Only plain credentials are understood (tokens, certificates): an operator
runs in a cluster.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf


@dataclass(frozen=True, slots=True)
class Access:
    """token: as it was when read; service accounts' tokens are renewed, so it is read again."""

    server: str
    tls: ssl.SSLContext
    token: str | None


def connection(settings: kopf.OperatorSettings | None = None) -> kopf.ConnectionInfo:
    """LoginError when there is neither a service account nor a kubeconfig."""
    settings = settings or kopf.OperatorSettings()
    known = kopf.login_with_service_account(settings=settings)
    known = known or kopf.login_with_kubeconfig(settings=settings)
    if known is None:
        raise kopf.LoginError("neither a service account nor a kubeconfig: set KUBECONFIG")
    return known


def read_access() -> Access:
    info = connection()
    tls = ssl.create_default_context(cafile=_path(info.ca_path), cadata=_decoded(info.ca_data))
    if info.insecure:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    if info.certificate_path:
        tls.load_cert_chain(_path(info.certificate_path) or "", _path(info.private_key_path))
    elif info.certificate_data:
        _load_inline(tls, info.certificate_data, info.private_key_data)
    return Access(str(info.server).rstrip("/"), tls, info.token)


def _load_inline(tls: ssl.SSLContext, certificate: Any, key: Any) -> None:
    """ssl reads certificates from files only."""
    with tempfile.TemporaryDirectory() as folder:
        certificate_file, key_file = Path(folder, "certificate"), Path(folder, "key")
        certificate_file.write_text(_decoded(certificate) or "")
        key_file.write_text(_decoded(key) or "")
        tls.load_cert_chain(certificate_file, key_file)


def _path(path: Any) -> str | None:
    return os.fsdecode(path) if path else None


def _decoded(data: Any) -> str | None:
    return base64.b64decode(data).decode() if data else None
