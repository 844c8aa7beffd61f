"""The continuous-batching engine: scheduler, paged KV, runners and the OpenAI-compatible server.

`scheduler`, `blocks`, `request` and `engine` import no torch (import-linter holds them to it); a
runner is handed in. Start reading at `engine.Engine.step`.
"""

from typing import Final

VERSION: Final = "0.1.0"  # as pyproject.toml says it: an image carries no package metadata
