"""The census: every specialisation of the Triton kernels that serving launches, a line each in `kernel_census.jsonl`.

Triton compiles a kernel once for each key of a launch: the types of its arguments, the constants among them, which
integers are 1 or multiples of 16, which pointers are aligned to 16 bytes, and the options. Its own binder makes the key
here, where no GPU is, so nothing about it is known twice. `kernel_soak.py` finds the keys, and writes the file;
`compile_kernels.py` compiles them.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

WRITTEN = Path(__file__).with_suffix(".jsonl")
PACKAGE = "hf_paged.kernels."
ALIGNED = ":16"  # behind the type of an integer or a pointer: a multiple of 16, or of 16 bytes
ANY_NVIDIA = GPUTarget("cuda", 90, 32)  # all make the same keys


@dataclass(frozen=True, order=True)
class Specialisation:
    """A kernel as Triton compiles it.

    Attributes:
        kernel: Its module in `hf_paged.kernels` and its name: "paged_decode._decode_kernel".
        arguments: What is passed at each launch: names and types, such as "*bf16:16", "i32", "i32:16".
        constants: What is compiled in: names, and values as JSON; an absent tensor is null, an integer that Triton made
            a constant of is 1.
        options: As `num_warps`.
    """

    kernel: str
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """Without module and suffix: "decode"."""
        return self.kernel.rsplit(".", 1)[1].strip("_").removesuffix("_kernel")

    def source(self, target: GPUTarget) -> tuple[ASTSource, dict[str, int]]:
        """What `triton.compile` takes, for a target, and the options."""
        kernel = kernel_of(self.kernel)
        backend = make_backend(target)
        types, values = dict(self.arguments), dict(self.constants)
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(kernel.params):
            if parameter.name in values:
                signature[parameter.name] = "constexpr"
                constants[(index,)] = json.loads(values[parameter.name])
            else:
                kind = types[parameter.name]
                signature[parameter.name] = kind.removesuffix(ALIGNED)
                attributes[(index,)] = backend.parse_attr("D" if kind.endswith(ALIGNED) else "")
        return ASTSource(kernel, signature, constants, attributes), dict(self.options)


def kernel_of(name: str) -> Any:
    """The kernel of a `Specialisation`'s name."""
    module, function = name.rsplit(".", 1)
    return getattr(importlib.import_module(PACKAGE + module), function)


@cache
def _binder(kernel: Any) -> Callable[..., tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]]]:
    # Where Triton interprets, its binder can be had all the same.
    compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(compiled.signature, compiled.params, make_backend(ANY_NVIDIA))


def specialise(kernel: Any, *values: Any, **named: Any) -> Specialisation:
    """What Triton compiles for a launch with these arguments."""
    bound, found, options = _binder(kernel)(*values, **named)
    arguments, constants = [], []
    for name, (kind, detail) in zip(bound, found):
        if kind == "constexpr":
            constants.append((name, json.dumps(detail)))
        else:
            arguments.append((name, kind + (ALIGNED if detail == "D" else "")))
    name = f"{kernel.fn.__module__.removeprefix(PACKAGE)}.{kernel.fn.__name__}"
    return Specialisation(name, tuple(arguments), tuple(constants), tuple(sorted(options.items())))


@contextmanager
def record() -> Iterator[dict[Specialisation, int]]:
    """Within it, on all threads, launches of the package's kernels compute nothing: how many of which, is counted."""
    found: dict[Specialisation, int] = {}
    lock = threading.Lock()

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *values: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            if not self.fn.__module__.startswith(PACKAGE):
                return original(self, *values, grid=grid, warmup=warmup, **named)
            key = specialise(self, *values, **named)
            with lock:
                found[key] = found.get(key, 0) + 1
            return None

        return run

    with (
        mock.patch.object(JITFunction, "run", instead(JITFunction.run)),
        mock.patch.object(InterpretedFunction, "run", instead(InterpretedFunction.run)),
    ):
        yield found


@dataclass(frozen=True, order=True)
class Cell:
    """What is soaked at a time: a model on a GPU with a pool of some type."""

    model: str
    gpu: str
    pool: str

    def __str__(self) -> str:
        return f"{self.model} {self.gpu} {self.pool}"


Census = dict[Specialisation, set[Cell]]  # and who launches it


def read() -> Census:
    """What is written down."""
    census: Census = {}
    for line in WRITTEN.read_text().splitlines():
        row = json.loads(line)
        constants = tuple((name, json.dumps(value)) for name, value in row["constants"].items())
        key = Specialisation(row["kernel"], tuple(row["arguments"].items()), constants, tuple(row["options"].items()))
        census[key] = {Cell(model, *place.split()) for model, places in row["cells"].items() for place in places}
    return census


def write(census: Census) -> None:
    """A line a specialisation, in an order that changes little from one census to the next."""
    lines = []
    for key in sorted(census):
        cells: dict[str, list[str]] = {}
        for cell in sorted(census[key]):
            cells.setdefault(cell.model, []).append(f"{cell.gpu} {cell.pool}")
        row = {
            "kernel": key.kernel,
            "constants": {name: json.loads(value) for name, value in key.constants},
            "arguments": dict(key.arguments),
            "options": dict(key.options),
            "cells": cells,
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    WRITTEN.write_text("".join(lines))


def differences(found: Census, written: Census, cells: Iterable[Cell]) -> list[str]:
    """What is launched and not written down, or written down and not launched, for these cells."""
    lines = []
    for sign, some, others in (("launched, not written down", found, written), ("not launched", written, found)):
        for key in sorted(some):
            where = (some[key] & set(cells)) - others.get(key, set())
            if where:
                lines.append(f"{sign}: {', '.join(map(str, sorted(where)))}: {key}")
    return lines
