"""Pool files as a user gives them: read and checked, with all that is wrong said at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from chairlift_cli.errors import CliError
from chairlift_operator.api_group import KIND, QUOTA_KIND
from chairlift_operator.plain_yaml import NotYaml, read_yaml
from chairlift_operator.quota_parsing import parse_quota
from chairlift_operator.quota_spec import TenantQuota
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import SpecError, parse_pool, with_overrides
from chairlift_protocol.quota import DEFAULT_TENANT


def run_validate(files: Sequence[Path]) -> int:
    """Every file is looked at, whatever is wrong with those before it."""
    exit_code = 0
    quotas: list[TenantQuota] = []
    for file in files:
        try:
            for name in _validated(file, quotas):
                print(f"{file}: {name} is valid")
        except CliError as error:
            print(f"chairlift: {error}", file=sys.stderr)
            exit_code = error.exit_code
    for warning in left_unlimited(quotas):
        print(f"chairlift: warning: {warning}", file=sys.stderr)
    return exit_code


def left_unlimited(quotas: Iterable[TenantQuota]) -> list[str]:
    """A sentence for each pool that limits some tenants and says nothing of all others."""
    tenants: dict[tuple[str, str], set[str]] = {}
    for quota in quotas:
        pool = (quota.metadata.namespace, quota.spec.pool_ref.name)
        tenants.setdefault(pool, set()).add(quota.spec.tenant)
    return [
        f"pool {pool}: known tenants that have no TenantQuota are not limited; to limit them, add "
        "one for tenant '*', without limits if that is meant"
        for (_, pool), named in tenants.items()
        if DEFAULT_TENANT not in named
    ]


def read_quotas(path: Path) -> list[TenantQuota]:
    """Every TenantQuota of a file; raise CliError."""
    try:
        documents = [document for document in read_yaml(_text(path)) if document is not None]
        if not all(isinstance(document, dict) for document in documents):
            raise CliError(f"{path}: holds what is no object: give TenantQuotas")
    except NotYaml as error:
        raise CliError(f"{path}: {error.where}not valid YAML: {error}.") from error
    return [_quota(path, number, len(documents), each) for number, each in enumerate(documents, 1)]


def _quota(path: Path, number: int, num_documents: int, document: dict[str, Any]) -> TenantQuota:
    """Raise CliError, which says which one of several it is."""
    try:
        return parse_quota(document)
    except SpecError as error:
        which = f"document {number} of {num_documents}: " if num_documents > 1 else ""
        raise CliError(f"{path}: {which}{_listed(error)}") from error


def _validated(path: Path, quotas: list[TenantQuota]) -> list[str]:
    """Kind and name of each object, of which those are added to `quotas`; raise CliError."""
    try:
        documents = read_yaml(_text(path))
    except NotYaml:
        documents = []  # said where it is read as what it should be
    kinds = [document.get("kind") for document in documents if isinstance(document, dict)]
    if kinds[:1] == [QUOTA_KIND]:
        read = read_quotas(path)
        quotas += read
        return [f"{QUOTA_KIND} {quota.name}" for quota in read]
    return [f"{KIND} {read_pool(path, ()).name}"]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}; name an existing file") from error
    except UnicodeDecodeError as error:
        raise CliError(f"cannot read {path}: it is not UTF-8 text") from error


def read_pool(path: Path, settings: Sequence[str]) -> InferencePool:
    text = _text(path)
    try:
        pool = parse_pool(text)
    except SpecError as error:
        raise CliError(f"{path}: {_listed(error)}") from error
    try:
        return with_overrides(pool, settings)
    except SpecError as error:
        raise CliError(f"--set: {_listed(error)}") from error


def _listed(error: SpecError) -> str:
    if len(error.problems) == 1:
        return error.problems[0]
    return "".join(f"\n  - {problem}" for problem in error.problems)
