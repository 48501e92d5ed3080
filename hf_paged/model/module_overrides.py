"""`ModuleOverride`: another way to compute one of the model's modules, in the engine's forwards only."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks as _GLOBAL_HOOKS
from torch.nn.modules.module import _global_forward_pre_hooks as _GLOBAL_PRE_HOOKS
from torch.utils.hooks import RemovableHandle
from transformers.utils import output_capturing
from transformers.utils.output_capturing import _active_collector

from hf_paged.kernels.layers import InputError, LayerKernels
from hf_paged.model.hooks import RowsHook

SharedT = TypeVar("SharedT")

# Where `module.compile()` leaves its result: called instead of the module, never copied nor pickled with it.
CALL = "_compiled_call_impl"
# Packages whose modules do nothing but compute. Those of the others, adapters and quantised layers, may keep tensors.
LIBRARY = ("torch", "transformers", "hf_paged")
KNOWN = (*LIBRARY, "peft", "bitsandbytes", "gptqmodel", "hqq", "torchao", "optimum.quanto", "kernels")


class ModuleOverride:
    """Stands in for a module, on one thread, inside `overriding`. By default one of a single input.

    Attributes:
        module: What it stands in for, and
        own: its class's forward, as long as that is still the same.
        thread_id: Whose forwards come here at the moment; on all other threads the module is as it was.
        is_needed: Whether forwards would be wrong without it: then it also stands in for a forward of the instance's
            own, which it calls.
    """

    is_needed: ClassVar[bool] = False

    __slots__ = ("module", "own", "thread_id")

    def __init__(self, module: Any) -> None:
        self.module = module
        self.own = type(module).forward
        self.thread_id: int | None = None

    def compute(self, states: Tensor) -> Tensor:
        """What the module would return.

        Raises:
            InputError: That can't be computed here; the module does it.
        """
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of the module's forward."""
        if len(args) == 1 and not kwargs:
            try:
                return self.compute(args[0])
            except InputError:
                pass
        return self.module._call_impl(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of the module's own call."""
        if threading.get_ident() == self.thread_id and not has_hooks(self.module):
            return self.forward(*args, **kwargs)
        return self.module._call_impl(*args, **kwargs)


class ChangedForward:
    """A class's forward that finds something else under some of the names it uses."""

    def __init__(self, own: FunctionType, changes: dict[str, Any]) -> None:
        self._own = own
        self.changes = changes
        # One function for good: what torch.compile makes of its code is kept among its names.
        self.run = FunctionType(own.__code__, {}, own.__name__, own.__defaults__, own.__closure__)
        self.look_up()

    def look_up(self) -> None:
        """Takes the other names from its file as they are now."""
        self.run.__globals__.update(self._own.__globals__ | self.changes)
        self.run.__kwdefaults__ = self._own.__kwdefaults__


class Survey:
    """What is found while a model's modules are looked at, children before their parents.

    Attributes:
        dtype: Of the model, and
        device: where it is.
        kernels: For what lies between its matrix products; `None`: there are none, or its layers are spread.
        found: By the modules' ids, what stands in for them.
        known: Of kinds of modules that were tried, what came of it.
        generator: Of what they are tried with.
        last: The attention of the layer that comes last.
        hooks: How many hooks this process had ever registered when `found` was last looked at for them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, kernels: LayerKernels | None) -> None:
        self.dtype, self.device, self.kernels = dtype, device, kernels
        self.found: dict[int, ModuleOverride] = {}
        self.known: dict[Any, Any] = {}
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.last: nn.Module | None = None
        self.hooks = -1

    @property
    def has_new_hooks(self) -> bool:
        """Whether hooks may look on of which `found` was not looked at for."""
        return self.hooks != RemovableHandle.next_id or bool(_active_collector.get())

    def of(self, kind: type[SharedT]) -> list[SharedT]:
        """The overrides of a class."""
        return [override for override in self.found.values() if isinstance(override, kind)]

    def shared(self, kind: type[SharedT]) -> SharedT:
        """The one object of a class that all overrides share."""
        one: SharedT | None = self.known.get(kind)
        if one is None:
            one = self.known[kind] = kind()
        return one


@contextmanager
def overriding(calls: Iterable[ModuleOverride]) -> Iterator[list[ModuleOverride]]:
    """Within it, forwards on this thread compute these modules the other way; gives those that are.

    Not those that have been given a forward of their own since, unless they are needed.
    """
    taken: list[ModuleOverride] = []
    thread_id = threading.get_ident()
    try:
        for call in calls:  # each step comes here, with all of a model's modules
            module = call.module
            table = module.__dict__
            if call.is_needed or ("forward" not in table and CALL not in table and type(module).forward is call.own):
                taken.append(call)
                call.thread_id = thread_id
                table[CALL] = call
        yield taken
    finally:
        _give_back(taken)


def _give_back(calls: Iterable[ModuleOverride]) -> None:
    for call in calls:
        call.module.__dict__.pop(CALL, None)
        call.thread_id = None


def give_back_all(model: nn.Module) -> None:
    """After a fork: the threads that would do it are not there, and a new one may have the id of one of them."""
    _give_back(own for module in model.modules() if isinstance(own := module.__dict__.get(CALL), ModuleOverride))


@contextmanager
def not_overriding(calls: Iterable[ModuleOverride]) -> Iterator[None]:
    """Within it this thread's forwards compute these modules as they are, also inside of one that doesn't."""
    thread_id = threading.get_ident()
    held = [call for call in calls if call.thread_id == thread_id]
    try:
        for call in held:
            call.thread_id = None
        yield
    finally:
        for call in held:
            call.thread_id = thread_id


def is_untouched(module: nn.Module) -> bool:
    """Whether it has no forward of its own (accelerate's hooks), is not compiled, and not computed our way now."""
    return "forward" not in module.__dict__ and CALL not in module.__dict__


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks look at its forwards, or change them.

    Not those that transformers leaves where it has once captured hidden states, while it captures none; nor those of
    PEFT for the rows of one call, which let steps pass.
    """
    before = module._forward_pre_hooks
    if _GLOBAL_HOOKS or _GLOBAL_PRE_HOOKS or (before and any(type(own) is not RowsHook for own in [*before.values()])):
        return True
    hooks = module._forward_hooks
    return bool(hooks) and not (not _active_collector.get() and all(map(_captures, hooks.values())))


def _captures(hook: Any) -> bool:
    return getattr(hook, "__globals__", {}).get("__name__") == output_capturing.__name__


def is_library_code(module: nn.Module, packages: tuple[str, ...] = LIBRARY) -> bool:
    """Whether its forward is one of these packages: to be called for a trial, it does nothing but compute."""
    return ("forward" not in vars(module) or has_exact_forward(module)) and is_of_library(type(module), packages)


def has_exact_forward(module: nn.Module) -> bool:
    """Whether its forward is one that exact training has put there, as of a float32 head behind other layers."""
    return str(getattr(vars(module).get("forward"), "__module__", "")).startswith("hf_paged.")


def is_of_library(kind: type[nn.Module], packages: tuple[str, ...] = LIBRARY) -> bool:
    """Whether the forward of a class is of these packages, with all that is wrapped around it but by `patch`.

    Looks at functions' globals: a wrapper may have taken on the name, and the module's, of what it wraps.
    """
    names = [kind.__module__]
    function: Any = kind.forward
    while function is not None:
        names.append(str(getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", "")))
        function = getattr(function, "__wrapped__", None)
    prefixes = tuple(f"{package}." for package in packages)
    return all(f"{name}.".startswith(prefixes) for name in names)
