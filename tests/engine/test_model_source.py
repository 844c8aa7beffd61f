"""Model sources: which folder each names, and what to do when there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chairlift_engine.model_source import ModelSourceError, cache_root, resolve


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    return tmp_path


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_cache_is_the_users_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/chairlift")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_root() == Path.home() / ".cache/chairlift"
    monkeypatch.setenv("CHAIRLIFT_CACHE", "/y")
    assert cache_root() == Path("/y")


def test_a_cached_model_is_found_by_name(cache: Path) -> None:
    folder = model_in(cache / "models" / "smollm2-135m")
    assert resolve("cache://smollm2-135m") == folder


def test_a_file_source_is_the_folder_itself(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "m")
    assert resolve(f"file://{folder}") == folder


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("cache://nope", "run `chairlift model get nope` first"),
        ("cache://../etc", "must name a model by letters"),
        ("cache://", "must be hf://"),
        ("file://relative/path", "must hold an absolute path"),
        ("file:///nonexistent", "/nonexistent is no folder: name the folder of config.json"),
        ("file:///tmp", "/tmp holds no config.json: name the folder of config.json"),
        ("hf://no-owner", "must look like hf://owner/name"),
        ("hf://a/b@", "must look like hf://owner/name"),
        ("s3://bucket/x", "must be hf://owner/name"),
        ("smollm2", "must be hf://owner/name"),
    ],
)
def test_a_source_that_names_no_model_is_refused(cache: Path, source: str, sentence: str) -> None:
    with pytest.raises(ModelSourceError) as error:
        resolve(source)
    assert str(error.value).startswith("model.source: ")
    assert sentence in str(error.value)


def test_an_unreachable_hub_is_a_sentence(tmp_path: Path) -> None:
    # In a process of its own: the hub's address is read once, at import.
    code = "from chairlift_engine.model_source import resolve; resolve('hf://owner/name@v1')"
    environment = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "ModelSourceError: model.source: hf://owner/name@v1 could not be" in done.stderr
    assert "HF_ENDPOINT" in done.stderr
