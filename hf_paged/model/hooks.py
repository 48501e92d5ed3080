"""Forward hooks on a model's inner modules, and which of them must see rows and columns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import _global_forward_hooks as _GLOBAL_HOOKS
from torch.nn.modules.module import _global_forward_pre_hooks as _GLOBAL_PRE_HOOKS
from torch.utils.hooks import RemovableHandle

HookT = TypeVar("HookT", bound=Callable[..., Any])

# Their hooks collect outputs, count, or prepare weights.
_LIBRARIES = ("torch", "transformers")
_PACKED = "hf_paged_packed"


def packed_hook(hook: HookT) -> HookT:
    """Says of a forward hook that it treats all tokens alike, and needs to see neither rows nor columns.

    Without it, calls run padded and by themselves while the hook is there, so that it is shown the `[batch, columns,
    ...]` of stock. Marked, it is given the tokens of all callers' rows side by side, `[1, tokens, ...]`, maybe some of
    a prompt, and the model keeps its continuous batch. What it computes must not change while it is registered, or
    `model.paged.reset_prefix_cache()` has to be called.

    Args:
        hook: For `register_forward_hook` or `register_forward_pre_hook`.

    Returns:
        The same object.
    """
    hook.__dict__[_PACKED] = True
    return hook


class RowsHook:
    """A hook for the rows of one call, which runs on this thread: forwards on other threads pass it by."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._thread_id = threading.get_ident()

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args) if self.is_mine else None

    @property
    def is_mine(self) -> bool:
        """Whether the call is the calling thread's."""
        return self._thread_id == threading.get_ident()


def is_for_rows(hook: Any) -> bool:
    """Whether it is PEFT's for the rows of one call, which no one else's may be shown to."""
    return isinstance(hook, partial) and not hook.keywords.keys().isdisjoint(("adapter_names", "alora_offsets"))


class HookWatch:
    """The forward hooks on a model and its inner modules, but for those by which transformers collects outputs.

    Attributes:
        numbers: Of all of them, unique in the process.
    """

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] = ()
        self._held: list[tuple[dict[int, Any], int]] = []
        self._needing: list[tuple[dict[int, Any], int]] = []
        self._for_rows: list[tuple[dict[int, Any], int]] = []
        self._next = -1

    def look(self, model: nn.Module, modules: list[nn.Module]) -> None:
        seen, needing = RemovableHandle.next_id, []
        tables: list[dict[int, Any]] = [_GLOBAL_PRE_HOOKS, _GLOBAL_HOOKS]
        for module in modules:
            if module._forward_hooks or module._forward_pre_hooks:
                tables += (module._forward_pre_hooks, module._forward_hooks)
        held, for_rows = [], []
        for hooks in tables:
            for number, hook in list(hooks.items()):
                if isinstance(hook, RowsHook):
                    needing.append((hooks, number))
                elif _package(hook) != "transformers":
                    held.append((hooks, number))
                    if is_for_rows(hook):
                        for_rows.append((hooks, number))
                    # Those of the model itself run in its callers' calls.
                    is_inside = hooks is not model._forward_hooks and hooks is not model._forward_pre_hooks
                    if is_inside and _needs_rows(hook):
                        needing.append((hooks, number))
        self.numbers, self._held, self._needing = tuple(number for _, number in held), held, needing
        self._for_rows = for_rows
        self._next = seen  # last: other threads look at the same time

    @property
    def is_outdated(self) -> bool:
        """Whether a hook was added to any module of the process since the last look, or one of the model's removed."""
        return self._next != RemovableHandle.next_id or (
            bool(self._held) and len(self._of(self._held)) < len(self._held)
        )

    @property
    def needs_rows(self) -> bool:
        """Whether one of a user's, which may address rows or columns, is still on an inner module."""
        if not self._needing:
            return False
        return any(not isinstance(hook, RowsHook) or hook.is_mine for hook in self._of(self._needing))

    @property
    def has_rows_of_mine(self) -> bool:
        """Whether there are any for the rows of a call that this thread makes."""
        return any(isinstance(hook, RowsHook) and hook.is_mine for hook in self._of(self._needing))

    @property
    def has_rows_of_others(self) -> bool:
        """Whether there are any for the rows of a call that is not known."""
        return bool(self._for_rows) and bool(self._of(self._for_rows))

    @staticmethod
    def _of(places: list[tuple[dict[int, Any], int]]) -> list[Any]:
        """The hooks that are still there."""
        return [hooks[number] for hooks, number in places if number in hooks]


def _function(hook: Any) -> Any:
    return getattr(hook, "func", hook)  # of a partial


def hook_name(hook: Any) -> str:
    """Module and name of a hook's function."""
    function = _function(hook)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', type(function).__name__)}"


def _package(hook: Any) -> str:
    return str(getattr(_function(hook), "__module__", "")).partition(".")[0]


def _needs_rows(hook: Any) -> bool:
    is_marked = getattr(hook, _PACKED, False) or getattr(_function(hook), _PACKED, False)
    return not is_marked and _package(hook) not in _LIBRARIES


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Each module once, the model first: those of `model.modules()`, in a third of its time."""
    modules: dict[nn.Module, None] = {model: None}
    level: list[nn.Module | None] = [model]
    while level:
        level = [part for module in level if module is not None for part in module._modules.values()]
        level = [part for part in level if part is not None and part not in modules]
        modules.update(dict.fromkeys(level))  # type: ignore[arg-type]
    return list(modules)
