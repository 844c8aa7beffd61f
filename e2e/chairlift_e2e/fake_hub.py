"""Stands in for the Hugging Face hub: one model, `owner/model`, over the part of its API that the
real client asks. Standard library only, so that it runs in any pod:

    python3 fake_hub.py FOLDER PORT TOKEN
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """One model, `owner/model`, whose tag `v1` is COMMIT.

    token: who does not send it is refused. seen: path and Authorization of each request about
    models; what else the client asks is none of a model's.
    """

    def __init__(self, files: Mapping[str, bytes], host: str = "127.0.0.1", port: int = 0) -> None:
        self._files = files
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

        self.server = ThreadingHTTPServer((host, port), Handler)
        self.url = f"http://{host}:{self.server.server_port}"

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
                for name, body in self._files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        if (body := self._files.get(path.removeprefix(files))) is not None:
            return 200, {"ETag": f'"{_oid(body)}"', "X-Repo-Commit": COMMIT}, body
        is_known = path.startswith(info)
        return 404, {"X-Error-Code": "RevisionNotFound" if is_known else "RepoNotFound"}, b"{}"


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


if __name__ == "__main__":
    folder, port, token = sys.argv[1:]
    served = Hub({p.name: p.read_bytes() for p in Path(folder).iterdir()}, "0.0.0.0", int(port))
    served.token = token
    served.server.serve_forever()
