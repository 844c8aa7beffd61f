"""`chairlift simulate` and `chairlift replay` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift_cli.__main__ import main
from chairlift_engine.simulator_profile import Profile, open_profile

POOL = str(Path(__file__).parents[2] / "examples" / "fleet.yaml")
SHORT = [
    "simulate",
    "-f",
    POOL,
    "--rate",
    "4",
    "--duration",
    "40s",
    "--set",
    "model.maxLength=8192",
]


def simulate(tmp_path: Path, *more: str) -> int:
    return main([*SHORT, "--picture", str(tmp_path / "run.png"), *more])


def test_a_run_is_summed_up_and_drawn_and_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for _ in range(2):
        assert simulate(tmp_path, "--seed", "3", "--batch-clients", "2") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    for word in ("goodput", "replica-hours", "changes", "batch class", "limited", "1 to 1 ready"):
        assert word in outputs[0]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_what_no_engine_of_the_pool_can_take_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(tmp_path, "--set", "model.maxLength=1024") == 0
    assert "longer than the model takes" in capsys.readouterr().out


def test_its_journal_replays_to_the_letter_and_differs_under_another_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "run.jsonl"
    assert simulate(tmp_path, "--journal", str(journal)) == 0
    capsys.readouterr()
    assert main(["replay", str(journal)]) == 0
    *differences, last = capsys.readouterr().out.splitlines()
    assert differences == [] and " 0 decided differently" in last
    assert main(["explain", "--journal", str(journal)]) == 0
    *decisions, last = capsys.readouterr().out.splitlines()
    assert decisions[0].split(" interactive-")[0].endswith(" s")  # and not a date of 1970
    profile, _ = open_profile(last.removeprefix("Step times as learned, for simulate --profile: "))
    slow = Profile().scaled(1.6)  # the pool's own profile
    for tokens in ((20, 0, 20_000), (20, 400, 20_000)):
        assert profile.step_s(*tokens) == pytest.approx(slow.step_s(*tokens), rel=0.15)
    stricter = "interactive.slo.interTokenLatency.threshold=15ms"
    assert main(["replay", str(journal), "--set", stricter]) == 0
    *differences, last = capsys.readouterr().out.splitlines()
    assert differences and " 0 decided differently" not in last


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([*SHORT, "--trace", "nowhere.csv"], "nowhere.csv"),
        ([*SHORT, "--profile", "warp"], "warp"),
        ([*SHORT, "--picture", "/nowhere/run.png"], "/nowhere is no folder"),
        ([*SHORT, "--picture", "/"], "it is a folder; name a file"),
        (["replay", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_used_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_batch_clients_need_a_batch_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = str(Path(POOL).parent / "chat.yaml")
    picture = ["--picture", str(tmp_path / "run.png")]
    assert main(["simulate", "-f", chat, "--batch-clients", "1", *picture]) == 2
    assert "batch section" in capsys.readouterr().err


def test_a_trace_of_which_nothing_fits_says_what_to_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,9000,5\n1,9000,5\n")
    assert simulate(tmp_path, "--trace", str(trace)) == 2
    assert "raise model.maxLength" in capsys.readouterr().err
