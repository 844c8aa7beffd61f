"""From YAML text or a mapping to a `TenantQuota`; for the operator's watch and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from chairlift_operator.api_group import QUOTA_KIND
from chairlift_operator.parsing import Form
from chairlift_operator.quota_spec import TenantQuota

_FORM: Final = Form(QUOTA_KIND, TenantQuota)


def parse_quota(source: str | Mapping[str, Any]) -> TenantQuota:
    """Raise SpecError."""
    return _FORM.parse(source)


def quota_to_mapping(quota: TenantQuota) -> dict[str, Any]:
    """The quota as its YAML would be, every default spelled out."""
    return _FORM.to_mapping(quota)
