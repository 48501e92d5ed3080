"""`ModelState`: what keys and values depend on in the model itself, as a key for the prefix cache."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks as _GLOBAL_HOOKS
from torch.nn.modules.module import _global_forward_pre_hooks as _GLOBAL_PRE_HOOKS
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hf_paged.errors import UnsupportedModelError
from hf_paged.module_calls import is_library_code
from hf_paged.packed_linears import PackedLinears


class ModelState:
    """Notices that a model's weights, adapters or hooks changed since it was last asked.

    In-place writes (`load_state_dict`, most optimizers) move a tensor's version counter; fused optimizers don't, so
    steps of any optimizer that holds one of the model's parameters are noted as well; replaced parameters and
    `.data = ...` show in identity and address. Writes into `.data` leave no trace but in the values, which are compared
    where somebody holds copies of them; elsewhere call `engine.reset_prefix_cache()` after them.

    Attributes:
        num_moves: How often weights were found elsewhere in memory than before, or of another shape.
    """

    def __init__(self, model: nn.Module, linears: PackedLinears | None = None) -> None:
        """Of `model`; `linears` hold copies of its weights, which are dropped when they change."""
        self._model = weakref.ref(model)
        self._linears = linears
        self._is_plain: tuple[int, bool] | None = None  # and how many hooks the process had seen by then
        self._tensors: list[weakref.ref[Tensor]] = []
        self._versions: Sequence[tuple[object, ...]] = []
        self._code: list[tuple[type, int]] = []
        self._epoch = 0
        self.num_moves = 0
        self._was_stepped = False
        _watch_optimizers()
        with _STATES_LOCK:
            _STATES.add(self)

    def key(self) -> tuple[Hashable, ...]:
        """The current state: a weights epoch that never returns to an earlier value, adapters, hooks, autocast.

        Raises:
            UnsupportedModelError: The weights have been shared out between processes since `patch`.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("the patched model no longer exists")
        tensors = list(chain(model.parameters(), model.buffers()))
        versions = [(0 if t.is_inference() else t._version, t.data_ptr(), t.shape, t.stride()) for t in tensors]
        # Modules of another class, and forwards of an instance's own; not what was written over a class's forward.
        code = [(type(module), id(vars(module).get("forward"))) for module in model.modules()]
        is_same = (
            not self._was_stepped
            and versions == self._versions
            and code == self._code
            # Identity, not id(): a new parameter may lie where an old one was.
            and all(seen() is tensor for seen, tensor in zip(self._tensors, tensors, strict=True))
            and not (self._linears is not None and self._linears.is_outdated())
        )
        if not is_same:
            reason = why_not_whole(model)
            if reason is not None:
                raise UnsupportedModelError(type(model).__name__, (reason,))
            self._epoch += 1
            if [version[1:] for version in versions] != [version[1:] for version in self._versions]:
                self.num_moves += 1
            self._tensors, self._versions = [weakref.ref(t) for t in tensors], versions
            self._code = code
            self._was_stepped = False
            if self._linears is not None:
                self._linears.forget()
        device = tensors[0].device.type if tensors else "cpu"
        is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        autocast = torch.get_autocast_dtype(device) if is_autocast else None
        self._is_plain = None
        return (self._epoch, _active_adapters(model), _forward_hooks(model), autocast)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but torch's and transformers' own code runs in the model's forward.

        Modules are looked at when the state was asked for since, or a hook was registered anywhere.
        """
        num_hooks = RemovableHandle.next_id
        if self._is_plain is None or self._is_plain[0] != num_hooks:
            model = self._model()
            is_plain = model is not None and not _GLOBAL_HOOKS and not _GLOBAL_PRE_HOOKS and not _forward_hooks(model)
            self._is_plain = (num_hooks, is_plain and model is not None and all(map(is_library_code, model.modules())))
        return self._is_plain[1]

    def note_step(self, optimizer: Optimizer) -> None:
        """Called after every step of every optimizer in the process."""
        model = self._model()
        if model is not None and not self._was_stepped:
            own = {id(parameter) for parameter in model.parameters()}
            self._was_stepped = any(id(p) in own for group in optimizer.param_groups for p in group["params"])


_STATES: weakref.WeakSet[ModelState] = weakref.WeakSet()
_STATES_LOCK = threading.Lock()


@lru_cache
def _watch_optimizers() -> None:
    """One hook for the process, never removed: torch iterates over its hooks while a finalizer might remove one."""
    register_optimizer_step_post_hook(_note_step)  # type: ignore[no-untyped-call]


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with _STATES_LOCK:
        states = list(_STATES)
    for state in states:
        state.note_step(optimizer)


def why_not_whole(model: nn.Module) -> str | None:
    """Why this process holds, or computes, only a share of the model; `None`: all of it is here."""
    mesh = getattr(model, "_device_mesh", None)  # of transformers: tensor, expert, pipeline and data parallel
    if mesh is not None and mesh.size() > 1:
        return f"it is spread over {mesh.size()} processes (tp_plan, DistributedConfig)"
    for part in chain(model.modules(), model.parameters(), model.buffers()):
        # FSDP's wrappers, and the DTensors of everything else. By name: a build of torch may lack the classes.
        is_shared = type(part).__module__.startswith(
            "torch.distributed.fsdp" if isinstance(part, nn.Module) else "torch.distributed."
        )
        if is_shared or hasattr(part, "ds_id"):  # DeepSpeed's ZeRO-3 marks its parameters
            return f"its weights are shared out between processes ({type(part).__name__})"
    return None


def _forward_hooks(model: nn.Module) -> tuple[int, ...]:
    """Ids of all forward hooks, unique in the process: what one adds to a hidden state must not outlive it.

    Those that transformers installs to collect outputs only look.
    """
    return tuple(
        number
        for module in model.modules()
        for number, hook in (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
        if not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("transformers.")
    )


def _active_adapters(model: nn.Module) -> Hashable:
    """Of PEFT's tuner layers, by their attributes: which adapters are active, merged or disabled, and their scaling."""
    return tuple(
        (
            tuple(module.active_adapters),
            tuple(module.merged_adapters),
            bool(module.disable_adapters),
            repr(getattr(module, "scaling", None)),
        )
        for module in cast("Iterable[Any]", model.modules())
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters")
    )
