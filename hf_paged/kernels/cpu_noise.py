"""The kernel of `cpu_noise.c`: exponential noise as torch draws it, faster."""

from __future__ import annotations

from ctypes import CDLL, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hf_paged.kernels.c_compiler import CompileError, library

_SOURCE = Path(__file__).with_suffix(".c")
_TRIED = (1, 311, 700, 5000)  # numbers of a draw: within a round of the generator, up to its end, and beyond


def exponential(noise: Tensor, generator: torch.Generator) -> Tensor:
    """`noise.exponential_(1, generator=generator)`: the same numbers, and the generator stands where it would."""
    if noise.is_cpu and noise.dtype is torch.float32 and noise.is_contiguous() and (kernel := load()) is not None:
        _draw(kernel, noise, generator)
        return noise
    return noise.exponential_(1, generator=generator)


@lru_cache
def load() -> CDLL | None:
    """The kernel, if it compiles here and draws what torch does. Compiles where no earlier process has."""
    try:
        kernel = compiled()
    except CompileError:
        return None
    own, other = torch.Generator("cpu").manual_seed(0), torch.Generator("cpu").manual_seed(0)
    for count in _TRIED:
        found = torch.empty(count, dtype=torch.float32, device="cpu")
        _draw(kernel, found, own)
        expected = torch.empty_like(found).exponential_(1, generator=other)
        if not (torch.equal(found, expected) and torch.equal(own.get_state(), other.get_state())):
            return None  # another release of torch
    return kernel


def compiled(instructions: str | None = None, **constants: int) -> CDLL:
    """See `library`."""
    kernel = library(_SOURCE, ("hf_paged_exponential",), (), instructions, **constants)
    kernel.hf_paged_exponential.argtypes, kernel.hf_paged_exponential.restype = [c_void_p, c_void_p, c_int64], None
    return kernel


def _draw(kernel: CDLL, noise: Tensor, generator: torch.Generator) -> None:
    state = generator.get_state()
    kernel.hf_paged_exponential(state.data_ptr(), noise.data_ptr(), noise.numel())
    generator.set_state(state)
