"""`find_rotary`: attention modules whose rotary embedding runs as one kernel in the engine's forwards."""

from __future__ import annotations

from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hf_paged.module_calls import ModuleCall

NAME = "apply_rotary_pos_emb"  # what the function is called in every model of transformers that has it
# Which elements are pairs, and whether products are rounded before they are added.
ROTARIES = ((False, True), (False, False), (True, True), (True, False))
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-4, torch.float16: 4e-5}
_HEADS = (3, 2)  # of the trial's queries and keys


class RotaryKernel(Protocol):
    """The operation; arguments as in `cpu_layers.CPULayers.rotary`."""

    def rotary(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rounds: bool
    ) -> tuple[Tensor, Tensor]:
        """Rotated query and key."""


class _Names(dict[str, Any]):
    """A module's globals, as they are at any moment, but for the names it holds itself."""

    def __init__(self, names: dict[str, Any], own: dict[str, Any]) -> None:
        super().__init__(own)
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names[name]


class _Rotary:
    """In the place of `apply_rotary_pos_emb(q, k, cos, sin, ...)`."""

    def __init__(self, names: dict[str, Any], kernels: RotaryKernel, interleaved: bool, rounds: bool) -> None:
        self._names = names
        self._kernels = kernels
        self._interleaved = interleaved
        self._rounds = rounds

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        """`[1, heads, tokens, dim]` queries and keys; everything else goes to the function itself."""
        if (
            args
            or kwargs
            or not (q.shape[0] == k.shape[0] == 1 and q.stride(-1) == k.stride(-1) == 1)
            or not (q.dtype is k.dtype is cos.dtype is sin.dtype and cos.is_contiguous() and sin.is_contiguous())
        ):
            return self._names[NAME](q, k, cos, sin, *args, **kwargs)
        query, key = self._kernels.rotary(
            q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0], self._interleaved, self._rounds
        )
        return query.transpose(0, 1)[None], key.transpose(0, 1)[None]


class _Attention(ModuleCall):
    """An attention module whose own code runs, with one of the names it uses standing for something else."""

    __slots__ = ("run",)

    def __init__(self, module: Any, rotary: _Rotary) -> None:
        super().__init__(module)
        forward = type(module).forward
        names = _Names(forward.__globals__, {NAME: rotary, "__builtins__": forward.__globals__["__builtins__"]})
        self.run = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        self.run.__kwdefaults__ = forward.__kwdefaults__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, *args, **kwargs)


def find_rotary(
    module: nn.Module, kernels: RotaryKernel, dtype: torch.dtype, device: torch.device
) -> ModuleCall | None:
    """A module whose forward calls `apply_rotary_pos_emb`, if that computes one of `ROTARIES`.

    Args:
        module: Any module.
        kernels: What is to compute it.
        dtype: Of the model.
        device: Of the model.
    """
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    if NAME not in forward.__code__.co_names or NAME not in forward.__globals__:
        return None
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    q, k = (random(1, 5, heads, 16).transpose(1, 2) for heads in _HEADS)
    cos, sin = random(1, 5, 16), random(1, 5, 16)
    try:
        truth = forward.__globals__[NAME](q, k, cos, sin)
    except (TypeError, RuntimeError, ValueError, IndexError):
        return None
    if not (isinstance(truth, tuple) and len(truth) == 2 and all(isinstance(part, Tensor) for part in truth)):
        return None
    for interleaved, rounds in ROTARIES:
        rotary = _Rotary(forward.__globals__, kernels, interleaved, rounds)
        if all(_agree(part, own) for part, own in zip(rotary(q, k, cos, sin), truth, strict=True)):
            return _Attention(module, rotary)
    return None


def _agree(result: Tensor, truth: Tensor) -> bool:
    if result.shape != truth.shape or result.dtype is not truth.dtype:
        return False
    return bool((result.float() - truth.float()).norm() <= _TOLERANCE[truth.dtype] * truth.float().norm())
