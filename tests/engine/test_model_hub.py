"""Models of a hub: the real client against a stand-in server on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle that runs code",
}
SCRIPT = (
    "import sys; from chairlift_engine.model_source import resolve; print(resolve(sys.argv[1]))"
)


class Hub:
    """One model, `owner/model`, whose tag `v1` is COMMIT.

    token: who does not send it is refused. seen: path and Authorization of each request about
    models; what else the client asks is none of a model's.
    """

    def __init__(self) -> None:
        self.token: str | None = None
        self.seen: list[tuple[str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, True)

            def do_HEAD(self) -> None:
                hub.answer(self, False)

            def log_message(self, *args: Any) -> None:
                return None

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        sent = request.headers.get("Authorization")
        path = request.path.partition("?")[0]
        if "owner" in path:
            self.seen.append((path, sent))
        status, headers, body = self._found(path, sent)
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body)

    def _found(self, path: str, sent: str | None) -> tuple[int, dict[str, str], bytes]:
        info, files = "/api/models/owner/model", f"/owner/model/resolve/{COMMIT}/"
        if self.token is not None and sent != f"Bearer {self.token}":
            return 401, {"X-Error-Code": "GatedRepo"}, b"{}"
        if path in (f"{info}/revision/v1", f"{info}/revision/main"):
            return 200, {}, json.dumps({"id": "owner/model", "sha": COMMIT}).encode()
        if path == f"{info}/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": _oid(body)}
                for name, body in FILES.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        if (body := FILES.get(path.removeprefix(files))) is not None:
            return 200, {"ETag": f'"{_oid(body)}"', "X-Repo-Commit": COMMIT}, body
        is_known = path.startswith(info)
        return 404, {"X-Error-Code": "RevisionNotFound" if is_known else "RepoNotFound"}, b"{}"


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()
    thread.join()


def resolve(source: str, home: Path, url: str, **environment: str) -> tuple[str, str]:
    """The folder, and the last line of what failed; as an engine's container sets it up.

    In a process of its own: the hub's address is read once, at import.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, source],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "HF_HOME": str(home / "hub"),
            "HF_ENDPOINT": url,
            "PYTHONPATH": ":".join(sys.path),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip(), (done.stderr.strip().splitlines() or [""])[-1]


def test_a_tag_is_pinned_to_its_commit_and_only_what_runs_no_code_is_fetched(
    hub: Hub, tmp_path: Path
) -> None:
    folder, error = resolve("hf://owner/model@v1", tmp_path, hub.url, HF_TOKEN="secret")
    assert folder.endswith(f"/snapshots/{COMMIT}"), error
    found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert found == {n: b for n, b in FILES.items() if n != "pytorch_model.bin"}
    assert {token for _, token in hub.seen} == {"Bearer secret"}


def test_a_second_start_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    first, _ = resolve("hf://owner/model@v1", tmp_path, hub.url)
    num_asked = len(hub.seen)
    assert resolve("hf://owner/model@v1", tmp_path, "http://127.0.0.1:9")[0] == first
    assert resolve("hf://owner/model@v1", tmp_path, hub.url)[0] == first
    later = [path for path, _ in hub.seen[num_asked:]]
    assert later == ["/api/models/owner/model/revision/v1"]  # whether the tag has moved; no file


def test_a_gated_model_says_which_field_wants_a_token(hub: Hub, tmp_path: Path) -> None:
    hub.token = "right"
    for environment in ({}, {"HF_TOKEN": "wrong"}):
        _, error = resolve("hf://owner/model@v1", tmp_path, hub.url, **environment)
        assert "model.source: hf://owner/model@v1 is gated" in error
        assert "model.huggingFace.tokenSecret" in error and "wrong" not in error
    folder, error = resolve("hf://owner/model@v1", tmp_path, hub.url, HF_TOKEN="right")
    assert folder, error


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("hf://owner/other", "model.source: hf://owner/other is not there, or not for this token"),
        ("hf://owner/model@v9", "model.source: hf://owner/model@v9 has no revision v9"),
    ],
)
def test_what_the_hub_does_not_have_is_named(
    hub: Hub, tmp_path: Path, source: str, sentence: str
) -> None:
    assert sentence in resolve(source, tmp_path, hub.url)[1]
