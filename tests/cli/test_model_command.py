from __future__ import annotations

from pathlib import Path

import pytest

from chairlift_cli.__main__ import main


def test_a_model_that_is_there_already_is_said_to_be_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert main(["model", "get", "smollm2-135m"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["smollm2-135m is in the cache already", str(folder)]


def test_an_unknown_model_is_answered_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path))
    assert main(["model", "get", "gpt-7"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("chairlift: ") and "smollm2-135m" in stderr
    assert len(stderr.splitlines()) == 1
