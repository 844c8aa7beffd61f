"""The private folder of one local run: tokens, the gateway's list of replicas, logs, journal.

Readable by its owner only, because the tokens in it are the only guard of the admin port. Knows no
processes; `supervisor` creates it and removes it with the last process gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from chairlift_cli.errors import CliError
from chairlift_operator.engine_client import ReplicaEndpoint


class RunDir:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.admin_token_file = path / "admin-token"
        self.internal_token_file = path / "internal-token"
        self.endpoints_file = path / "endpoints.json"
        self.journal_file = path / "journal.jsonl"
        self.admin_token = self._new_token(self.admin_token_file)
        self._new_token(self.internal_token_file)
        self.write_endpoints([])

    def announce_file(self, name: str) -> Path:
        return self.path / f"{name}.announce.json"

    def policy_file(self, name: str) -> Path:
        return self.path / f"{name}.policy.json"

    def log_file(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def write_endpoints(self, endpoints: Sequence[ReplicaEndpoint]) -> None:
        """What the gateway may use from now on, each with its class; replaced atomically."""
        replicas = [
            {"name": e.name, "url": e.public_url, "class": e.request_class.value} for e in endpoints
        ]
        scratch = self.endpoints_file.with_suffix(".new")
        scratch.write_text(json.dumps({"replicas": replicas}) + "\n")
        os.replace(scratch, self.endpoints_file)

    @staticmethod
    def _new_token(path: Path) -> str:
        token = secrets.token_urlsafe(32)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
        return token


@contextmanager
def open_run_dir(given: Path | None) -> Iterator[RunDir]:
    """A folder the user named is kept; one of our own goes when the run ends."""
    if given is None:
        path = Path(tempfile.mkdtemp(prefix="chairlift-"))
        try:
            yield RunDir(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return
    with ExitStack() as closing:
        try:
            given.mkdir(mode=0o700, parents=True, exist_ok=True)
            closing.enter_context(_locked(given / "lock"))
            run_dir = RunDir(given.absolute())
        except BlockingIOError as error:
            raise CliError(
                f"--run-dir: another run uses {given}; end it, or name another folder"
            ) from error
        except OSError as error:
            raise CliError(
                f"--run-dir: cannot write to {given}: {error.strerror}; name a folder of your own"
            ) from error
        yield run_dir


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The kernel frees it with the process, however that ends. BlockingIOError while held."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
