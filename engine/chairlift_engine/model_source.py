"""Where a model's files are: turns `spec.model.source` into a local folder.

Reads no weights and imports no torch. Called by the engine's entry point, by local mode and by
`chairlift model get`, which fills the cache.
"""

from __future__ import annotations

import os
import re
from http import HTTPStatus
from pathlib import Path

CACHE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# Weights as safetensors only: pickles run code, and the other formats are the same weights again.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


class ModelSourceError(ValueError):
    """The source names no model that can be read; the message says what to change."""


def cache_root() -> Path:
    """$CHAIRLIFT_CACHE, else the platform's cache folder."""
    if given := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "chairlift"


def cached_model_dir(name: str) -> Path:
    """Where a model of this name lies in the cache, present or not."""
    if not CACHE_NAME.fullmatch(name):
        raise ModelSourceError(
            f"model.source: 'cache://{name}' must name a model by letters, digits, '.', '_' and '-'"
        )
    return cache_root() / "models" / name


def resolve(source: str) -> Path:
    """The folder that holds config.json, tokenizer and weights. May download (hf://)."""
    scheme, separator, rest = source.partition("://")
    if separator and rest:
        match scheme:
            case "cache":
                return _from_cache(rest)
            case "file":
                return _from_file(rest)
            case "hf":
                return _from_hub(rest)
    raise ModelSourceError(
        f"model.source: must be hf://owner/name[@revision], file:///path or cache://name, "
        f"not {source!r}"
    )


def _from_cache(name: str) -> Path:
    folder = cached_model_dir(name)
    if not (folder / "config.json").is_file():
        raise ModelSourceError(
            f"model.source: {folder} does not exist; run `chairlift model get {name}` first"
        )
    return folder


def _from_file(path: str) -> Path:
    folder = Path(path)
    if not folder.is_absolute():
        raise ModelSourceError(f"model.source: 'file://{path}' must hold an absolute path")
    if not (folder / "config.json").is_file():
        why = "holds no config.json" if folder.is_dir() else "is no folder"
        raise ModelSourceError(
            f"model.source: {folder} {why}: name the folder of config.json, tokenizer and weights"
        )
    return folder


def _from_hub(reference: str) -> Path:
    match = HUB_ID.fullmatch(reference)
    if match is None:
        raise ModelSourceError(
            f"model.source: 'hf://{reference}' must look like hf://owner/name or "
            "hf://owner/name@revision"
        )
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            match["id"], revision=match["revision"], allow_patterns=list(HUB_FILES)
        )
    except OSError as error:  # the hub's own are of this kind
        why = _hub_refusal(error, match["revision"] or "main")
        raise ModelSourceError(f"model.source: hf://{reference} {why}") from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelSourceError(f"model.source: hf://{reference} holds no config.json")
    return Path(folder)


def _hub_refusal(error: OSError, revision: str) -> str:
    from huggingface_hub import errors

    token = "HF_TOKEN (of a pool: model.huggingFace.tokenSecret)"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision}: name a branch, a tag or a commit that it has"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated: accept its terms, and set {token} to one that may read it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"is not there, or not for this token: check the id, and {token} if it is private"
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"is refused with {status}: set {token} to one that may read it"
    said = type(error).__name__ if status is None else f"{type(error).__name__}, {status}"
    return (
        f"could not be downloaded ({said}); check that the hub can be reached, and HF_ENDPOINT "
        "(of a pool: model.huggingFace.endpoint) behind a mirror"
    )
