from __future__ import annotations

import base64
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chairlift_cli.__main__ import main
from chairlift_cli.key_command import run_key_create
from chairlift_gateway.identity import Caller, parse_tenants
from chairlift_operator.quotas.key_secrets import SecretKeys, read_keys
from chairlift_protocol.wire import RequestClass


def test_a_made_key_is_its_tenants_and_older_ones_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": [], "of_tomorrow": 1}))
    made = []
    for arguments in (["acme"], ["acme", "--class", "batch"], ["zeta"]):
        assert main(["key", "create", *arguments, "-f", str(path)]) == 0
        made.append(capsys.readouterr().out.strip())
    content = path.read_bytes()
    keys = parse_tenants(content)
    assert [keys.find(key.encode()) for key in made] == [
        Caller("acme", RequestClass.INTERACTIVE),
        Caller("acme", RequestClass.BATCH),
        Caller("zeta", RequestClass.INTERACTIVE),
    ]
    assert not any(key.encode() in content for key in made)
    assert json.loads(content)["of_tomorrow"] == 1
    assert len(set(made)) == 3 and all(len(key) > 40 for key in made)


def test_keys_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path, num_keys = tmp_path / "tenants.json", 24
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: run_key_create("acme", "interactive", path), range(num_keys)))
    assert len(parse_tenants(path.read_bytes()).callers) == num_keys


def test_without_a_file_it_prints_what_belongs_into_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["key", "create", "acme"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    keys = parse_tenants(second.partition(": ")[2].encode())
    assert keys.find(first.removeprefix("key: ").encode()) is not None


@pytest.mark.parametrize(
    ("tenant", "content", "said"),
    [
        ("Acme", None, "a tenant's name is at most 63"),
        (
            "acme",
            "# Notes",
            "is no file of tenants (must be JSON: Expecting value: line 1 column 1 "
            "(char 0)): name another",
        ),
        ("acme", '{"tenants": 1}', "must be"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    tenant: str, content: str | None, said: str,
) -> None:  # fmt: skip
    path = tmp_path / "tenants.json"
    if content is not None:
        path.write_text(content)
    assert main(["key", "create", tenant, "-f", str(path)]) == 2
    assert said in capsys.readouterr().err
    assert (path.read_text() if path.exists() else None) == content


def test_a_secret_holds_the_key_as_the_operator_reads_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["key", "create", "acme", "--secret", "acme-keys"]) == 0
    secret = json.loads(capsys.readouterr().out)
    assert (secret["kind"], secret["metadata"]["name"]) == ("Secret", "acme-keys")
    text = secret["stringData"]["key"]
    data = {"key": base64.b64encode(text.encode()).decode()}  # as the API server keeps it
    read = read_keys("acme-keys", {**secret, "data": data})
    assert read == SecretKeys((hashlib.sha256(text.encode()).hexdigest(),))


@pytest.mark.parametrize(
    "name", ["", "Acme", "acme_keys", "acme.keys", "-acme", "acme-", "a/b", "a" * 64, "acme\n"]
)
def test_a_secret_gets_no_name_that_a_quota_could_not_name(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["key", "create", "acme", f"--secret={name}"])
    seen = capsys.readouterr()
    assert ended.value.code == 2 and not seen.out
    assert "argument --secret: must be 1 to 63 lower-case letters" in seen.err
