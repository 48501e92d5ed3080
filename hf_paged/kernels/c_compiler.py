"""`library`: the package's C files, compiled once a machine with its own compiler, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 60
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
# By what torch found (and ATEN_CPU_CAPABILITY may lower); for others, the compiler's default.
INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": _AVX512,
    "AVX512_BF16": (
        *_AVX512,
        "-mavx512bf16",
    ),  # products of pairs; without them where a compiler is too old
}
# Each number is computed as it is written down, in whatever loop, vector or rest of a loop: the compiler may neither
# reorder sums nor contract products with them. And short loops that copy stay loops, not calls of memcpy.
_MATH = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_LOOPS = ("-fno-tree-loop-distribute-patterns",)


def instructions_of(dtype: torch.dtype) -> str | None:
    """A key of `INSTRUCTIONS` for kernels that multiply numbers of this type; `None`: what torch found."""
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "AVX512_BF16" if dtype is torch.bfloat16 and is_wide and torch.cpu._is_avx512_bf16_supported() else None


class CompileError(Exception):
    """There is no compiler, or it says no; the message is the end of a sentence about the kernels."""


def library(
    source: Path,
    functions: Iterable[str],
    options: tuple[str, ...] = (),
    instructions: str | None = None,
    **constants: int,
) -> ctypes.CDLL:
    """A C file as a loaded library. Compiles it where no earlier process has.

    Args:
        source: The file; headers beside it may be included.
        options: Of the compiler, beyond those of all files.
        instructions: A key of `INSTRUCTIONS`, or another word for the compiler's default; `None`: what torch found,
            as where the compiler doesn't know products of pairs.
        constants: Preprocessor constants.

    Raises:
        CompileError: It can't be compiled or loaded here. The first one of a process is also a warning.
    """
    try:
        own = INSTRUCTIONS.get(instructions or torch.backends.cpu.get_cpu_capability(), ())
        return _library(source, functions, (*own, *options), constants)
    except subprocess.CalledProcessError as error:
        if instructions == "AVX512_BF16":
            logger.info("hf_paged: %s is compiled without products of pairs: %s", source.name, error.stderr)
            return library(source, functions, options, None, **constants)
        reason = f"does not compile here: {(error.stderr or '').strip()[:300]}"
    except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired) as error:
        why = str(error) if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        reason = f"can't be compiled here ({why})"
    if not _warn_once.cache_info().currsize:
        _warn_once(source.name, reason)
    raise CompileError(reason)


def address_of(kernel: Any) -> int:
    """Where a function of a library lies, for calls of it from C."""
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    assert address is not None
    return address


@lru_cache
def _warn_once(name: str, reason: str) -> None:
    logger.warning("hf_paged: plain torch runs in place of the faster kernels in C: %s %s", name, reason)


def _library(
    source: Path, functions: Iterable[str], options: tuple[str, ...], constants: dict[str, int]
) -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "")) or [
        next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), "cc")
    ]
    flags = (
        *(() if any(word.startswith("-O") for word in compiler) else ("-O3",)),
        *("-std=gnu11", "-fPIC", "-fopenmp", *_MATH, *_LOOPS),
        *options,
        *(f"-D{name}={value}" for name, value in constants.items()),
    )
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = _digest(repr((texts, compiler, flags, platform.machine())).encode())
    folder = cache_folder()
    folders = [folder] if os.access(folder, os.W_OK) else [folder, _temporary_folder()]
    for path in (path for folder in folders for path in folder.glob(f"{source.stem}-{key}-*.so")):
        try:
            return _load(path, functions)
        except (OSError, AttributeError) as error:  # cut off, from another system, not ours
            logger.info("hf_paged: %s is made again: %s", path, error)
            if folders == [path.parent]:
                path.unlink(missing_ok=True)
    return _load(_compile(source, compiler, flags, folders[-1], key), functions)


def _load(path: Path, functions: Iterable[str]) -> ctypes.CDLL:
    """A library that is what its name says: a file that was cut off would end the process when it is read.

    Raises:
        OSError: It is something else, another user could have written it, or it does not load.
        AttributeError: It lacks a function.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        if not _is_private(os.fstat(file.fileno())) or _digest(file.read()) != path.stem.rpartition("-")[2]:
            raise OSError(f"{path.name} is not what was compiled, or others may write to it")
    loaded = ctypes.CDLL(str(path))
    for name in functions:
        getattr(loaded, name)
    return loaded


def _compile(source: Path, compiler: list[str], flags: tuple[str, ...], folder: Path, key: str) -> Path:
    """Path of the new library: `<source>-<key of how it is made>-<digest of its content>.so`."""
    with tempfile.TemporaryDirectory(dir=folder) as build:
        compiled, linked = Path(build, "cpu.o"), Path(build, "cpu.so")
        # Two steps: asked to link with -fopenmp, the compiler would bring an OpenMP runtime of its own.
        for arguments in (
            [*compiler, *flags, "-c", str(source), "-o", str(compiled)],
            [*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"],
        ):
            try:
                subprocess.run(
                    arguments, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS
                )
            except FileNotFoundError as error:
                remedy = "install gcc or clang, or name one in CC"
                raise FileNotFoundError(f"there is no C compiler {compiler[0]!r}: {remedy}") from error
        linked.chmod(0o700)
        path = folder / f"{source.stem}-{key}-{_digest(linked.read_bytes())}.so"
        os.replace(linked, path)  # whole at any moment, also while others compile
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _is_private(status: os.stat_result) -> bool:
    """Whether it is this user's, and no other may write to it: it is code."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cache_folder() -> Path:
    """The folder of compiled kernels; one for this process alone, if no other can be written."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (caches if caches.is_absolute() else Path.home() / ".cache") / "hf_paged"
        if not folder.is_absolute():
            raise RuntimeError(f"there is no home directory, but {os.environ.get('HOME')!r}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder.stat()):
            return folder
        logger.info("hf_paged: compiled kernels are not kept: others may write to %s", folder)
    except (OSError, RuntimeError, AttributeError) as error:  # no home; no user ids
        logger.info("hf_paged: compiled kernels are not kept: %s", error)
    return _temporary_folder()


def _temporary_folder() -> Path:
    return Path(_temporary_directory().name)


@lru_cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hf_paged")
