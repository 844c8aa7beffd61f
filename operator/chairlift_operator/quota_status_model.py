"""What a `TenantQuota`'s status holds: the CRD's schema follows from it, `kube.quota_status` fills
it in.

Counts are text, since each may be "Unknown": what is not known is not zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift_operator.spec_values import SPEC_CONFIG
from chairlift_operator.status_model import ConditionStatus

UNKNOWN: Final = "Unknown"


@dataclass(frozen=True, slots=True)
class ClassUseStatus:
    """used: tokens of the last minute. refused: requests of it. running: requests now."""

    __pydantic_config__ = SPEC_CONFIG
    used: str = UNKNOWN
    refused: str = UNKNOWN
    running: str = UNKNOWN


@dataclass(frozen=True, slots=True)
class TenantQuotaStatus:
    """Of both classes together, then of each."""

    __pydantic_config__ = SPEC_CONFIG
    observed_generation: int = 0
    ready: str = UNKNOWN
    limited: str = UNKNOWN
    used: str = UNKNOWN
    refused: str = UNKNOWN
    slot_share: str = UNKNOWN
    interactive: ClassUseStatus | None = None
    batch: ClassUseStatus | None = None
    conditions: tuple[ConditionStatus, ...] = ()
