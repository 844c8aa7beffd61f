"""What Kubernetes calls a pool."""

from __future__ import annotations

from typing import Final

GROUP: Final = "chairlift.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferencePool"
PLURAL: Final = "inferencepools"
