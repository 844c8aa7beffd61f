"""Builds `paged_attention.cpp` for this machine and keeps the result in the user's cache folder.

Reading KV pages in place is what makes decode attention on a CPU cost as little as its memory
traffic; torch alone must gather them first. Without a C++ compiler the engine runs on torch alone:
slower, the same tokens. Knows nothing of models; `paged_attention` asks it once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from chairlift_engine.model_source import cache_root

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("paged_attention.cpp")
BUILD_TIMEOUT_S = 300
# -ffast-math only when compiling: at link time gcc would add code that makes the whole process
# flush subnormal numbers.
COMPILE_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-std=c++20", "-w")


@functools.cache
def cpu_ops() -> Any | None:
    """`torch.ops.chairlift`, built on first use; None, after one warning, where that fails."""
    try:
        library = cache_root() / "kernels" / f"paged_attention-{_fingerprint()}.so"
        if not library.exists():
            logger.info("compiling the paged attention kernel, once for this machine")
            _build(library)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning(
            "paged attention runs on torch alone, several times slower at decode: its C++ kernel "
            "could not be built or loaded (%s). Install a C++ compiler, or name one in CXX.",
            reason[0] if reason else type(error).__name__,
        )
        return None
    return torch.ops.chairlift


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _fingerprint() -> str:
    """Names what the binary depends on: a cache copied to another CPU must miss, not crash."""
    parts = (
        SOURCE.read_text(),
        _compiler(),
        *COMPILE_FLAGS,
        torch.__version__,
        platform.machine(),
        _cpu_features(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    # "flags" on x86, "Features" on Arm; the model too, for -march=native also tunes by it.
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build(library: Path) -> None:
    """Compile in a private folder and move the result into place: any number may build at once,
    and one that is killed leaves no lock behind. (torch's own extension builder waits for ever on
    such a lock, and wants ninja and setuptools.)"""
    library.parent.mkdir(parents=True, exist_ok=True)
    torch_dir = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, built = f"{folder}/kernel.o", f"{folder}/kernel.so"
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        include = ("-isystem", str(torch_dir / "include"))
        _run(*COMPILE_FLAGS, abi, *include, "-c", str(SOURCE), "-o", compiled)
        libraries = (f"-L{torch_dir / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-lm")
        _run("-shared", compiled, "-o", built, *libraries)
        os.replace(built, library)


def _run(*arguments: str) -> None:
    subprocess.run(
        [_compiler(), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
