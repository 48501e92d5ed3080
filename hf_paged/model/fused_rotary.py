"""`find_rotary`: attention modules whose rotary embedding runs as one kernel in the engine's forwards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.kernels.layers import InputError, LayerKernels
from hf_paged.model.exact_operations import operations_for
from hf_paged.model.fused_layers import agrees, attempt, kernels_for
from hf_paged.model.module_overrides import ChangedForward, ModuleOverride, Survey

NAME = "apply_rotary_pos_emb"  # what the function is called in every model of transformers that has it
# Which elements are pairs, and whether products are rounded before they are added.
ROTARIES = ((False, True), (False, False), (True, True), (True, False))
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-4, torch.float16: 4e-5}
_HEADS = (3, 2)  # of the trial's queries and keys


class _Rotary:
    """In the place of `apply_rotary_pos_emb(q, k, cos, sin, ...)`; its attributes are its arguments."""

    def __init__(
        self, names: dict[str, Any], kernels: LayerKernels, interleaved: bool, rounds: bool, takes_part: bool
    ) -> None:
        """`interleaved` says which elements are pairs, `rounds` whether products are rounded before they are added, and
        `takes_part` whether the function leaves what exceeds the width of `cos` as it is, instead of raising.
        """
        self._names = names
        self._kernels = kernels
        self.interleaved = interleaved
        self.rounds = rounds
        self.takes_part = takes_part

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`[1, heads, tokens, dim]` queries and keys, cos and sin; everything else goes to the function itself."""
        if len(args) == 4 and not kwargs:
            q, k, cos, sin = args
            if self.takes_part or cos.shape[-1:] == q.shape[-1:]:
                try:
                    return self._kernels.rotary(q, k, cos, sin, self.interleaved, self.rounds)
                except InputError:
                    pass
        return self._names[NAME](*args, **kwargs)


class RotaryAttention(ModuleOverride):
    __slots__ = ("changed", "operations")

    def __init__(self, module: Any, changed: ChangedForward, operations: AbstractContextManager[Any]) -> None:
        super().__init__(module)
        self.changed = changed
        self.operations = operations

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.operations:
            return self.changed.run(self.module, *args, **kwargs)


def find_rotary(module: nn.Module, survey: Survey) -> RotaryAttention | None:
    """For a module whose forward calls `apply_rotary_pos_emb`, if that computes one of `ROTARIES`."""
    if (kernels := kernels_for(module, survey)) is None:
        return None
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    if NAME not in forward.__code__.co_names or NAME not in forward.__globals__:
        return None
    if forward not in survey.known:
        rotary = _same_rotary(forward.__globals__, kernels, survey.dtype, survey.device)
        survey.known[forward] = None if rotary is None else ChangedForward(forward, {NAME: rotary})
    changed = survey.known[forward]
    return None if changed is None else RotaryAttention(module, changed, operations_for(module, survey))


def _same_rotary(
    names: dict[str, Any], kernels: LayerKernels, dtype: torch.dtype, device: torch.device
) -> _Rotary | None:
    """What computes the same as the function of that name on queries and keys of a trial."""
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    q, k = (random(1, 5, heads, 16).transpose(1, 2) for heads in _HEADS)
    whole, part = ((random(1, 5, width), random(1, 5, width)) for width in (16, 8))

    def is_same(rotary: _Rotary, cos: Tensor, sin: Tensor) -> bool:
        found, own = rotary(q, k, cos, sin), attempt(names[NAME], q, k, cos, sin)
        is_pair = isinstance(own, tuple) and len(own) == 2 and all(isinstance(one, Tensor) for one in own)
        return is_pair and all(agrees(*pair, _TOLERANCE[dtype]) for pair in zip(found, own, strict=True))

    for interleaved, rounds in ROTARIES:
        rotary = _Rotary(names, kernels, interleaved, rounds, takes_part=True)
        if is_same(rotary, *whole):
            return _Rotary(names, kernels, interleaved, rounds, takes_part=is_same(rotary, *part))
    return None
