"""`library`: the package's C files, compiled once a machine with its own compiler, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 60
# By what torch found (and ATEN_CPU_CAPABILITY may lower); for others, the compiler's default.
_INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}
# Sums may be reordered, which is what makes them vectors; infinities and NaN keep their meaning. Not -ffast-math: in a
# library it makes denormals zero in the whole process. And short loops that copy stay loops, not calls of memcpy.
_MATH = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math")
_LOOPS = ("-fno-tree-loop-distribute-patterns",)


class CompileError(Exception):
    """There is no compiler, or it says no; the message is the end of a sentence about the kernels."""


def library(source: Path, **constants: int) -> ctypes.CDLL:
    """A C file as a loaded library. Compiles it where no earlier process has.

    Args:
        source: The file; headers beside it may be included.
        constants: Preprocessor constants.

    Raises:
        CompileError: It can't be compiled or loaded here.
    """
    try:
        path = _compile(source, constants)
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # cut off by a full disk, or from another system
            path.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compile(source, constants)))
    except subprocess.CalledProcessError as error:
        raise CompileError(f"does not compile here: {(error.stderr or '').strip()[:300]}") from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"can't be compiled here ({type(error).__name__}: {error})") from error


def _compile(source: Path, constants: dict[str, int]) -> Path:
    """Path of the shared library."""
    compiler = shlex.split(os.environ.get("CC", "")) or [
        next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), "cc")
    ]
    flags = (
        *("-O3", "-std=gnu11", "-fPIC", "-fopenmp", *_MATH, *_LOOPS),
        *_INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ()),
        *(f"-D{name}={value}" for name, value in constants.items()),
    )
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256(repr((texts, compiler, flags, platform.machine())).encode()).hexdigest()[:20]
    folder = _cache_folder()
    path = folder / f"{source.stem}-{key}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as build:
        compiled, linked = Path(build, "cpu.o"), Path(build, "cpu.so")
        # Two steps: asked to link with -fopenmp, the compiler would bring an OpenMP runtime of its own.
        for command in (
            [*compiler, *flags, "-c", str(source), "-o", str(compiled)],
            [*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"],
        ):
            subprocess.run(
                command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS
            )
        os.replace(linked, path)  # whole at any moment, whoever compiles beside us
    return path


def _cache_folder() -> Path:
    """Where compiled kernels are kept; only for this process, if there is no such place."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hf_paged")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not what somebody else has put there: it is code.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except (OSError, RuntimeError, AttributeError) as error:  # no home; no user ids
        logger.info("hf_paged: compiled kernels are not kept: %s", error)
    return Path(_temporary_folder().name)


@lru_cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hf_paged")
