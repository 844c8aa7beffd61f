"""What Kubernetes calls a pool, and a quota."""

from __future__ import annotations

from typing import Final

GROUP: Final = "chairlift.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferencePool"
PLURAL: Final = "inferencepools"
QUOTA_KIND: Final = "TenantQuota"
QUOTA_PLURAL: Final = "tenantquotas"
