from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from chairlift_cli.errors import CliError
from chairlift_cli.run_dir import open_run_dir
from chairlift_operator.engine_client import ReplicaEndpoint
from chairlift_protocol.wire import RequestClass

URL = "http://127.0.0.1:1234"
ENDPOINT = ReplicaEndpoint("batch-0", URL, URL, "secret", RequestClass.BATCH)


def test_a_run_folder_of_our_own_is_private_and_goes_at_the_end() -> None:
    with open_run_dir(None) as run_dir:
        path = run_dir.path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        for token_file in (run_dir.admin_token_file, run_dir.internal_token_file):
            assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert run_dir.admin_token_file.read_text() != run_dir.internal_token_file.read_text()
    assert not path.exists()


def test_it_goes_also_when_the_run_fails() -> None:
    with pytest.raises(RuntimeError), open_run_dir(None) as run_dir:
        path = run_dir.path
        raise RuntimeError
    assert not path.exists()


def test_a_folder_the_user_named_is_kept_and_gets_new_tokens(tmp_path: Path) -> None:
    named = tmp_path / "a" / "b"
    with open_run_dir(named) as first:
        token = first.admin_token
    with open_run_dir(named) as second:
        assert second.admin_token != token
    assert (named / "endpoints.json").exists()
    assert stat.S_IMODE(named.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CliError, match="--run-dir: cannot write to"),
        open_run_dir(tmp_path / "file" / "dir"),
    ):
        pass


def test_endpoints_start_empty_and_are_replaced_whole() -> None:
    with open_run_dir(None) as run_dir:
        assert json.loads(run_dir.endpoints_file.read_text()) == {"replicas": []}
        before = run_dir.endpoints_file.stat().st_ino
        run_dir.write_endpoints([ENDPOINT])
        assert run_dir.endpoints_file.stat().st_ino != before
        assert json.loads(run_dir.endpoints_file.read_text()) == {
            "replicas": [{"name": "batch-0", "url": "http://127.0.0.1:1234", "class": "batch"}]
        }


def test_a_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    with open_run_dir(tmp_path) as first:
        with pytest.raises(CliError, match="--run-dir: another run uses"), open_run_dir(tmp_path):
            pass
        assert first.admin_token_file.read_text().strip() == first.admin_token
    with open_run_dir(tmp_path):
        pass
