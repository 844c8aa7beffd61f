"""What a benchmark ends with: its figures in bench/results/NAME.json, its claims on the screen.

The claims are the last lines printed, one `claim NAME VALUE` each, for people and scripts alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parents[1] / "results"


def publish(
    name: str, claims: Mapping[str, float], figures: Mapping[str, Any], folder: Path = RESULTS
) -> Path:
    """Write both to NAME.json in the folder, then print where that is and the claims."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    result = {"claims": dict(claims), "figures": dict(figures)}
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"all figures: {path}")
    for claim, value in claims.items():
        print(f"claim {claim} {value:.4g}")
    return path
