from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def pool_file(tmp_path: Path, pool_text: Callable[..., str]) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(pool_text())
    return path


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("maxLength", "maxLenght", "spec.model.maxLenght: is not a field here; did you mean"),
        ("min: 1, max: 32", "min: 40, max: 32", "spec.interactive.batchSize: min 40 is above"),
        ("kind: InferencePool", "kind: Pool", "kind: is 'Pool': this version takes InferencePool"),
        ("spec:", "spec: {", "not valid YAML"),
    ],
)
def test_a_bad_spec_is_refused_with_a_sentence_that_names_the_field(
    chairlift: Run, pool_file: Path, before: str, after: str, sentence: str
) -> None:
    pool_file.write_text(pool_file.read_text().replace(before, after))
    exit_code, stderr = chairlift("local", "-f", pool_file)
    assert exit_code == 2
    assert stderr.startswith(f"chairlift: {pool_file}: ") and sentence in stderr
    assert "Traceback" not in stderr


def test_a_bad_setting_a_missing_file_and_a_bad_journal_are_each_one_sentence(
    chairlift: Run, pool_file: Path, tmp_path: Path
) -> None:
    logs_taken, log_taken = tmp_path / "a", tmp_path / "b"
    (logs_taken / "gateway.log").mkdir(parents=True)
    (log_taken / "controller.log").mkdir(parents=True)
    for arguments, sentence in [
        (("-f", pool_file, "--set", "interactive.batchSize.max=none"), "chairlift: --set: spec."),
        (("-f", tmp_path / "no.yaml"), f"chairlift: cannot read {tmp_path}/no.yaml: No such file"),
        (("-f", pool_file, "--journal", tmp_path / "no" / "j"), "chairlift: --journal: cannot wri"),
        (("-f", pool_file, "--journal", "/dev/full"), "chairlift: --journal: cannot write /dev/f"),
        (("-f", pool_file, "--run-dir", logs_taken), f"chairlift: cannot write {logs_taken}/gate"),
        (("-f", pool_file, "--run-dir", log_taken), f"chairlift: cannot write {log_taken}/contr"),
        (
            ("-f", pool_file, "--set", "runtime={}", "--set", f"model.source=file:///{'a' * 300}"),
            "chairlift: model.source: cannot read file:///aaa",
        ),
    ]:
        exit_code, stderr = chairlift("local", "--port", "0", *arguments)
        assert (exit_code, stderr.startswith(sentence)) == (2, True), stderr
        assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize("key", ["\udcff", "a b", "", "é"])
def test_a_batch_key_that_no_header_can_carry_is_refused(
    chairlift: Run, pool_file: Path, key: str
) -> None:
    exit_code, stderr = chairlift("local", "-f", pool_file, "--batch-key", key)
    assert exit_code == 2
    sentence = "argument --batch-key: must be ASCII characters without blanks"
    assert stderr.splitlines()[-1] == f"chairlift local: error: {sentence}"


def test_a_port_in_use_is_named(chairlift: Run, pool_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        exit_code, stderr = chairlift("local", "-f", pool_file, "--port", str(port))
    assert exit_code == 2
    assert stderr == (
        f"chairlift: --port: 127.0.0.1:{port} is in use; choose another, or 0 for any free one\n"
    )


def test_a_missing_model_is_answered_with_the_command_that_gets_it(
    chairlift: Run, pool_file: Path
) -> None:
    exit_code, stderr = chairlift(
        "local", "-f", pool_file, "--set", "runtime={}", "--set", "model.source=cache://nothere"
    )
    assert exit_code == 2
    assert "run `chairlift model get nothere` first" in stderr


def test_an_engine_that_dies_while_loading_ends_the_run_with_its_last_lines(
    start_local: Callable[..., Any], pool_text: Callable[..., str]
) -> None:
    local = start_local(pool_text(load="60s"), keep_run_dir=False)
    local.wait_for_line("interactive-0: loading tiny")
    # By then it runs Python and has logged where it listens.
    ends_s = time.monotonic() + 20
    while not list(local.run_dir.glob("*/*.announce.json")) and time.monotonic() < ends_s:
        time.sleep(0.02)
    os.kill(local.children()["chairlift_engine"], signal.SIGKILL)
    assert local.end() == 1
    said = "\n".join(local.lines)
    assert "engine interactive-0 was ended by SIGKILL before it was ready" in said
    assert "  | " in said and "listening on" in said
    local.wait_for_no_children()
    assert list(local.run_dir.iterdir()) == []


def test_ctrl_c_while_the_model_loads_leaves_nothing(
    start_local: Callable[..., Any], pool_text: Callable[..., str]
) -> None:
    local = start_local(pool_text(load="60s"), keep_run_dir=False)
    local.wait_for_line("interactive-0: loading tiny")
    local.process.send_signal(signal.SIGINT)
    assert local.end() == 130
    assert local.children() == {} and list(local.run_dir.iterdir()) == []


def test_help_shows_an_example_for_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from chairlift_cli.__main__ import main

    for arguments in (["--help"], ["local", "--help"], ["model", "get", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert "example: chairlift " in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from chairlift_cli.__main__ import main

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"chairlift {version('chairlift')}\n"
