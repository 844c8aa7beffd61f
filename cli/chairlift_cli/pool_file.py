"""Pool files as a user gives them: read and checked, with all that is wrong said at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from chairlift_cli.errors import CliError
from chairlift_operator.api_group import API_VERSION, KIND, QUOTA_KIND
from chairlift_operator.parsing import shown
from chairlift_operator.plain_yaml import NotYaml, read_yaml
from chairlift_operator.quota_parsing import parse_quota
from chairlift_operator.quota_spec import TenantQuota
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import SpecError, parse_pool, with_overrides
from chairlift_protocol.quota import DEFAULT_TENANT

# Where a TenantQuota is, by namespace, pool and tenant.
Places = dict[tuple[str, str, str], str]


def run_validate(files: Sequence[Path]) -> int:
    """Every file is looked at, whatever is wrong with those before it."""
    if not files:
        raise CliError("validate: name a file, such as pool.yaml")
    exit_code = 0
    places: Places = {}
    valid: list[tuple[Path, InferencePool | TenantQuota]] = []
    for file in files:
        try:
            valid += [(file, found) for found in _validated(file, places)]
        except CliError as error:
            print(f"chairlift: {error}", file=sys.stderr)
            exit_code = error.exit_code
    for file, found in valid:
        print(f"{file}: {found.kind} {found.metadata.name} is valid")
    for file, quota, doubt in _doubts(valid):
        print(f"{file}: TenantQuota {quota}: {doubt}", file=sys.stderr)
    for warning in left_unlimited(found for _, found in valid if isinstance(found, TenantQuota)):
        print(f"chairlift: warning: {warning}", file=sys.stderr)
    return exit_code


def _doubts(
    valid: Sequence[tuple[Path, InferencePool | TenantQuota]],
) -> Iterator[tuple[Path, str, str]]:
    """What may keep a valid quota from being in force; its pool may also lie in the cluster."""
    pools = {(p.namespace, p.name): p for _, p in valid if isinstance(p, InferencePool)}
    for file, quota in valid:
        if not isinstance(quota, TenantQuota):
            continue
        namespace, name = quota.metadata.namespace, quota.spec.pool_ref.name
        pool = pools.get((namespace, name))
        if pool is None:
            yield file, quota.name, (
                f"spec.poolRef names pool {name} in namespace {namespace}, which none of these "
                "files holds"
            )  # fmt: skip
        elif pool.spec.quotas is None:
            yield file, quota.name, f"not in force before pool {name} has spec.quotas.redis.url"


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


def _validated(path: Path, places: Places) -> Sequence[InferencePool | TenantQuota]:
    """Raise CliError."""
    text = read_text(path)
    try:
        documents = read_yaml(text)
    except NotYaml:
        documents = []  # said where it is read as what it should be
    first = next((each for each in documents if isinstance(each, dict)), {})
    if first.get("kind") == QUOTA_KIND:
        quotas = read_quotas(path, text)
        _check_tenants(path, quotas, places)
        return quotas
    if first and first.get("kind") != KIND and first.get("apiVersion") != API_VERSION:
        kind = f"its kind is {shown(first['kind'])}" if "kind" in first else "it names no kind"
        raise CliError(f"{path}: is no {KIND} or {QUOTA_KIND}: {kind}; name another file")
    return [read_pool(path, ())]


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
