"""`PackedParameter`: a weight whose only memory is its packed copy, until something asks for its elements."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
# What is asked of a parameter without its elements. Everything else brings them back.
_METADATA = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("dtype", "device", "shape", "ndim", "layout", "grad", "grad_fn", "requires_grad", "is_leaf")
        ),
        *(getattr(Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized")),
        *(getattr(Tensor, name).__get__ for name in ("itemsize", "nbytes")),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference, Tensor.__hash__, Tensor.requires_grad_),
    }
)


class PackedParameter(nn.Parameter):
    """What an ordinary parameter is while its elements lie elsewhere: the same object, by its class another.

    Whatever reads or writes elements (a forward that is not the engine's, `state_dict`, `.to()`, an optimizer, a copy,
    pickling) first makes it an ordinary parameter again. Its own memory is one NaN, which is what is seen by the two
    calls that torch lets nothing into: `torch.utils.dlpack.to_dlpack` (`torch.from_dlpack` is right) and
    `Tensor._make_subclass`. `nn.Parameter(it)` is refused by torch the first time: it is to be given `it.detach()`.
    """

    unpack: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _METADATA:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, PackedParameter):
                    restore(leaf)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        restore(self)
        return self.__deepcopy__(memo)  # of its class from now on

    def __reduce_ex__(self, protocol: Any) -> Any:
        restore(self)
        return self.__reduce_ex__(protocol)


def replace(parameter: nn.Parameter, unpack: Callable[[], Tensor]) -> None:
    """Frees a parameter's memory.

    Args:
        parameter: An ordinary one.
        unpack: Makes its elements, of its shape and dtype, as they are now.
    """
    with _LOCK, torch._C.DisableTorchFunctionSubclass():
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        parameter.__dict__["unpack"] = unpack
        parameter.__class__ = PackedParameter
        parameter.data = nothing.expand(parameter.shape)


@torch.inference_mode(False)
@torch.no_grad()
def restore(parameter: nn.Parameter) -> None:
    """Gives it memory and elements, bit for bit, and its class. An ordinary one stays as it is."""
    with _LOCK, torch._C.DisableTorchFunctionSubclass():
        if isinstance(parameter, PackedParameter):
            parameter.data = parameter.unpack()
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            del parameter.__dict__["unpack"]


def state(tensor: Tensor) -> tuple[Hashable, ...]:
    """What tells a tensor from another, or from itself when it was written to: version, address, shape, strides."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride()


class Replacements:
    """Knows parameters that were replaced or restored for those that they were before: no element changed by it."""

    def __init__(self) -> None:
        """Knows none yet."""
        # By id: the parameter, its state before, and its states since then that mean the same.
        self._known: dict[int, tuple[weakref.ref[Tensor], tuple[Hashable, ...], list[tuple[Hashable, ...]]]] = {}

    def replace(self, parameter: nn.Parameter, unpack: Callable[[], Tensor]) -> None:
        """See `replace`."""
        before, (version, *_) = self.state(parameter), state(parameter)
        since: list[tuple[Hashable, ...]] = []

        def unpacked() -> Tensor:
            dense = unpack()
            since.append((version, *state(dense)[1:]))
            return dense

        replace(parameter, unpacked)
        with torch._C.DisableTorchFunctionSubclass():
            since.append(state(parameter))
        self._known[id(parameter)] = weakref.ref(parameter), before, since

    def __bool__(self) -> bool:
        return bool(self._known)

    def state(self, tensor: Tensor) -> tuple[Hashable, ...]:
        """See `state`."""
        with torch._C.DisableTorchFunctionSubclass():
            now = state(tensor)
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor and now in known[2] else now
