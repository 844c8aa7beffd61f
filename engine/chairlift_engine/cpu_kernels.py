"""Builds the C++ kernels for this machine and keeps the result in the user's cache folder.

A small step on a CPU is bound by memory: `linear.cpp` reads packed weights once, and
`paged_attention.cpp` reads KV pages in place. Without a C++ compiler the engine runs on torch
alone: slower, the same tokens. Knows nothing of models; `packed_linear` and `kv_pool` ask it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from chairlift_engine.model_source import cache_root

logger = logging.getLogger(__name__)

BUILD_TIMEOUT_S = 300
COMPILE_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c++20", "-w")
# What each source is compiled with besides. Sums in linear.cpp must keep their order, and attention
# must be free to reorder its own. -ffast-math only when compiling: at link time gcc would add code
# that makes the whole process flush subnormal numbers.
SOURCES = {"linear.cpp": "-ffp-contract=fast", "paged_attention.cpp": "-ffast-math"}


@functools.cache
def cpu_ops() -> Any | None:
    """`torch.ops.chairlift`, built on first use; None, after one warning, where that fails."""
    try:
        library = cache_root() / "kernels" / f"chairlift-{_fingerprint()}.so"
        if not library.exists():
            logger.info("compiling the CPU kernels, once for this machine")
            _build(library)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        logger.warning(
            "the model runs on torch alone, several times slower at decode: the C++ kernels "
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
        *(Path(__file__).with_name(source).read_text() for source in SOURCES),
        _compiler(),
        *COMPILE_FLAGS,
        *SOURCES.values(),
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
        built = f"{folder}/kernels.so"
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        flags = (*COMPILE_FLAGS, abi, "-isystem", str(torch_dir / "include"), "-c")

        def compiled_from(source: str) -> str:
            path = str(Path(__file__).with_name(source))
            _run(*flags, SOURCES[source], path, "-o", f"{folder}/{source}.o")
            return f"{folder}/{source}.o"

        with ThreadPoolExecutor() as pool:
            compiled = list(pool.map(compiled_from, SOURCES))
        libraries = (f"-L{torch_dir / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-lm")
        _run("-shared", *compiled, "-o", built, *libraries)
        os.replace(built, library)


def _run(*arguments: str) -> None:
    subprocess.run(
        [_compiler(), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
