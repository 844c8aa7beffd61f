"""Pool files as a user gives them: read and checked, with all that is wrong said at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chairlift_cli.errors import CliError
from chairlift_operator.api_group import KIND, QUOTA_KIND
from chairlift_operator.plain_yaml import NotYaml, read_yaml
from chairlift_operator.quota_parsing import parse_quota
from chairlift_operator.quota_spec import TenantQuota
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import SpecError, parse_pool, with_overrides

# Where a TenantQuota is, by namespace, pool and tenant.
Places = dict[tuple[str, str, str], str]


def run_validate(files: Sequence[Path]) -> int:
    """Every file is looked at, whatever is wrong with those before it."""
    exit_code = 0
    places: Places = {}
    for file in files:
        try:
            for name in _validated(file, places):
                print(f"{file}: {name} is valid")
        except CliError as error:
            print(f"chairlift: {error}", file=sys.stderr)
            exit_code = error.exit_code
    return exit_code


def read_quotas(path: Path, text: str) -> list[TenantQuota]:
    """Every TenantQuota of a file that holds this text; raise CliError."""
    try:
        documents = [document for document in read_yaml(text) if document is not None]
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
        raise CliError(f"{path}: {which}{_listed(error.problems)}") from error


def _validated(path: Path, places: Places) -> list[str]:
    """Kind and name of each object; raise CliError."""
    text = read_text(path)
    try:
        documents = read_yaml(text)
    except NotYaml:
        documents = []  # said where it is read as what it should be
    kinds = [document.get("kind") for document in documents if isinstance(document, dict)]
    if kinds[:1] != [QUOTA_KIND]:
        return [f"{KIND} {read_pool(path, ()).name}"]
    quotas = read_quotas(path, text)
    _check_tenants(path, quotas, places)
    return [f"{QUOTA_KIND} {quota.name}" for quota in quotas]


def _check_tenants(path: Path, quotas: Sequence[TenantQuota], places: Places) -> None:
    """Raise CliError where two quotas are for one tenant of one pool: the operator follows one."""
    twice = []
    for quota in quotas:
        pool, tenant = quota.spec.pool_ref.name, quota.spec.tenant
        here = f"{QUOTA_KIND} {quota.name} of {path}"
        there = places.setdefault((quota.metadata.namespace, pool, tenant), here)
        if there is not here:
            twice.append(
                f"{here} and {there} are both for tenant {tenant} of pool {pool}: "
                "merge the two, or name another tenant"
            )
    if twice:
        raise CliError(_listed(twice))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}; name an existing file") from error
    except UnicodeDecodeError as error:
        raise CliError(f"cannot read {path}: it is not UTF-8 text") from error


def read_pool(path: Path, settings: Sequence[str]) -> InferencePool:
    text = read_text(path)
    try:
        pool = parse_pool(text)
    except SpecError as error:
        raise CliError(f"{path}: {_listed(error.problems)}") from error
    try:
        return with_overrides(pool, settings)
    except SpecError as error:
        raise CliError(f"--set: {_listed(error.problems)}") from error


def _listed(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "".join(f"\n  - {problem}" for problem in problems)
