"""Models of a hub: the real client against a stand-in server on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift_e2e.fake_hub import COMMIT, Hub

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle that runs code",
}
SCRIPT = (
    "import sys; from chairlift_engine.model_source import resolve; print(resolve(sys.argv[1]))"
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(FILES)
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
