"""PEFT's `adapter_names`, an adapter for each row: data of the engine's rows, or hooks on the call's thread only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

from torch import nn

from hf_paged.api.engine_of import ENGINE
from hf_paged.engine.call_context import within
from hf_paged.model.hooks import RowsHook, is_for_rows
from hf_paged.model.peft_layers import tuners_among

_BASE = "_hf_paged_tuner"  # the class that it was of
_REGISTER = "register_forward_pre_hook"


def guard_tuner(model: nn.Module) -> None:
    """Has calls of a `PeftModel` show their hooks to no other call, and take them off however they end."""
    tuner: Any = getattr(model, "base_model", None)
    if hasattr(tuner, "_enable_peft_forward_hooks") and not hasattr(tuner, _BASE):
        kind: Any = type(tuner)
        tuner.__class__ = _guarded_class(kind)


def release_tuner(model: nn.Module) -> None:
    """Undoes `guard_tuner`."""
    tuner: Any = getattr(model, "base_model", None)
    if hasattr(tuner, _BASE):
        tuner.__class__ = getattr(tuner, _BASE)


@cache
def _guarded_class(base: Any) -> Any:
    @contextmanager
    def enable(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        original = base._enable_peft_forward_hooks(self, *args, **kwargs)
        engine = self.model.__dict__.get(ENGINE)
        names, offsets = kwargs.get("adapter_names"), kwargs.get("alora_offsets")
        if engine is None or self.training or (names or offsets) is None:
            with original:
                yield
            return
        with ExitStack() as stack:
            adapters = None if names is None or offsets is not None else engine.core.adapters_named(names)
            if adapters is not None:
                hook = cache(partial(stack.enter_context, hooked(self, engine, original)))  # once is enough
                with within(adapters=(engine.core, adapters), runs_stock=hook):
                    yield
                return
            stack.enter_context(hooked(self, engine, original))
            yield

    @contextmanager
    def hooked(self: Any, engine: Any, original: Any) -> Iterator[None]:
        with ExitStack() as stack:
            with engine.exclusive():
                # This thread's from the first moment on: forwards of others, by stock, don't wait for their turn.
                tuners = tuners_among(self.modules())
                for tuner in tuners:
                    vars(tuner)[_REGISTER] = partial(_register, tuner)
                try:
                    original.__enter__()
                finally:
                    for tuner in tuners:
                        vars(tuner).pop(_REGISTER)
                stack.callback(original.__exit__, None, None, None)  # also if the call raises, when PEFT leaves them
            yield

    def reduce(self: Any, _: Any) -> Any:
        return _rebuild, (base,), self.__getstate__()

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    methods = {"_enable_peft_forward_hooks": enable, "__reduce_ex__": reduce}
    return type(base.__name__, (base,), {**names, **methods, _BASE: base})


def _register(module: nn.Module, hook: Any, **how: Any) -> Any:
    """`module.register_forward_pre_hook`, but what is for the rows of one call is for this thread only."""
    return nn.Module.register_forward_pre_hook(module, RowsHook(hook) if is_for_rows(hook) else hook, **how)


def _rebuild(base: Any) -> Any:
    return object.__new__(_guarded_class(base))
