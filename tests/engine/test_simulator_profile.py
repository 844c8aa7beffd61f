"""Simulator profiles: by name, as JSON, as a file that may change while it is served from."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from chairlift_engine.clock import VirtualClock
from chairlift_engine.request import Request, SamplingParams
from chairlift_engine.runner import ScheduledChunk
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import (
    Fault,
    FaultKind,
    Profile,
    ProfileError,
    ProfileFile,
    open_profile,
)

EVERYTHING = """
a_ms = 12.5
b_ms = 0.1
c_ms = 0.05
d_ms = 0
noise = 0
load_s = 2
[slow]
at_s = 60
factor = 3
[stall]
at_step = 500
duration_s = 5.0
[crash]
at_s = 90.5
[oom]
at_step = 40
"""


class EditedFile:
    """A profile that is rewritten in steps of a second, as its time stamps show it."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._edited_s = 0
        self.write(text)

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self._edited_s += 1
        os.utime(self.path, (self._edited_s, self._edited_s))


@pytest.fixture
def edited(tmp_path: Path) -> EditedFile:
    return EditedFile(tmp_path / "profile.toml", "a_ms = 10")


@pytest.mark.parametrize(
    ("text", "a_ms"), [("reference", 8.0), ("fast", 3.6), ("slow", 12.8), ('{"a_ms": 5}', 5.0)]
)
def test_a_profile_is_a_name_or_some_coefficients(text: str, a_ms: float) -> None:
    profile, file = open_profile(text)
    assert profile.a_ms == pytest.approx(a_ms)
    assert file is None


def test_a_file_holds_costs_and_faults(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(EVERYTHING)
    profile, file = open_profile(str(path))
    assert file is not None
    assert profile == Profile(
        a_ms=12.5,
        b_ms=0.1,
        c_ms=0.05,
        d_ms=0,
        noise=0,
        load_s=2,
        faults=(
            Fault(FaultKind.SLOW, at_s=60, factor=3),
            Fault(FaultKind.STALL, at_step=500, duration_s=5.0),
            Fault(FaultKind.CRASH, at_s=90.5),
            Fault(FaultKind.OOM, at_step=40),
        ),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quick", "use one of reference, fast, slow, a file whose name ends in .toml, or"),
        ("[1]", "use one of reference"),
        ('{"a": 5}', "unknown field 'a'; it takes a_ms, b_ms"),
        ('{"a_ms": -1}', "a_ms must be 0 or more, not -1"),
        ('{"a_ms": NaN}', "a_ms must be 0 or more, not nan"),
        ('{"a_ms": Infinity}', "a_ms must be 0 or more, not inf"),
        ('{"a_ms": true}', "a_ms must be 0 or more, not True"),
        ('{"crash": 5}', "crash must be a table of at_s, at_step"),
        ('{"crash": {"after": 5}}', "unknown field 'crash.after'; it takes at_s, at_step"),
        ('{"crash": {}}', "crash takes one of at_s and at_step"),
        ('{"oom": {"at_s": 1, "at_step": 2}}', "oom takes one of at_s and at_step"),
        ('{"slow": {"at_s": 1}}', "'slow.factor' is missing"),
        ('{"stall": {"at_s": "1", "duration_s": 1}}', "stall.at_s must be 0 or more, not '1'"),
    ],
)
def test_a_bad_profile_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Profile.parse(text)


@pytest.mark.parametrize(
    "text", [None, b"a_ms = ", b"\xff\xfe", b"b = 1", b"[stall]\nat_s = 1"], ids=repr
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(
    text: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "profile.toml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ProfileError, match=r"profile\.toml: "):
        open_profile(str(path))


def test_a_changed_file_counts_from_the_next_step_but_is_looked_at_once_a_second(
    edited: EditedFile,
) -> None:
    file = ProfileFile(edited.path)
    assert file.changed(0.0) is None
    edited.write("a_ms = 20")
    assert file.changed(0.9) is None
    assert file.changed(1.1) == Profile(a_ms=20)
    assert file.changed(9.0) is None


def test_a_broken_file_leaves_the_profile_in_force_and_is_reported_once(
    edited: EditedFile, caplog: pytest.LogCaptureFixture
) -> None:
    file = ProfileFile(edited.path)
    edited.write("a_ms = slow")
    with caplog.at_level(logging.WARNING):
        assert [file.changed(now_s) for now_s in (0.0, 2.0, 4.0)] == [None] * 3
        edited.path.unlink()
        assert [file.changed(now_s) for now_s in (6.0, 8.0)] == [None] * 2
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the profile in force stays"
    ] * 2
    edited.write("a_ms = 30")
    assert file.changed(10.0) == Profile(a_ms=30)


def test_a_runner_slows_down_when_its_file_says_so_and_suffers_no_fault_twice(
    edited: EditedFile,
) -> None:
    still = "b_ms = 0\nc_ms = 0\nd_ms = 0\nnoise = 0\n"
    stall = "[stall]\nat_step = 1\nduration_s = 1\n"
    edited.write(f"a_ms = 1000\n{still}{stall}")
    clock = VirtualClock()
    profile, file = open_profile(str(edited.path))
    runner = SimulatorRunner(profile, clock, file=file)
    chunk = ScheduledChunk(Request("r", [7] * 100, SamplingParams(1), 0.0), 0, 100)
    times_s = []
    for step in range(5):
        if step == 2:
            edited.write(f"a_ms = 500\n{still}{stall}")
        before_s = clock.now_s()
        runner.execute([chunk])
        times_s.append(clock.now_s() - before_s)
    assert times_s == pytest.approx([2.0, 1.0, 0.5, 0.5, 0.5])
