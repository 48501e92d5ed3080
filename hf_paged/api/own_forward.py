"""Finds out whether a forward that a user has put on a model's instance does nothing but call the class's.

Such a wrapper (TRL's trainers add one, for a head of their own while they train) makes no difference in generation, so
the engine's steps need not call it. It is found by a trial in each call, for what it does may depend on any state: with
placeholders for all arguments, so that what it decides by a shape or a value gives itself away. Only a function that
holds nothing it could count or collect in is tried: how often it was called makes no difference.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import torch
from transformers import PreTrainedConfig

from hf_paged.api.engine_of import engine_of

_CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, PreTrainedConfig)
_CODE = (type, ModuleType, BuiltinFunctionType)
_WRITES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL")
_WRITES_OUTSIDE = ("STORE_DEREF", "DELETE_DEREF")  # or to a variable that the function shares with one inside of it


def hands_on(model: Any) -> bool:
    """Whether the forward on a patched model's instance only calls its class's, as things are now, when it generates.

    Args:
        model: Patched; with a forward of its own.
    """
    forward, trial = vars(model)["forward"], TriedCall(model)
    forward = getattr(forward, "stands_in_for", forward)  # of exact training, which passes on what that would
    try:
        if not _holds_nothing(forward, engine_of(model).core.bound.model, set()):
            return False
        result = forward(**object.__getattribute__(trial, "given"))
    except (Exception, _Looked):
        return False
    arrivals: list[Any] = object.__getattribute__(trial, "arrivals")
    return arrivals == [_surroundings(model)] and result is object.__getattribute__(trial, "result")


class _Looked(BaseException):
    """The tried code looked at a placeholder. Not an `Exception`, so that this code doesn't catch it."""


class _Placeholder:
    """Stands for a tensor."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise _Looked

    def _look(self, *args: Any) -> NoReturn:
        raise _Looked

    __bool__ = __eq__ = __hash__ = __repr__ = __format__ = _look  # type: ignore[assignment]


class TriedCall(_Placeholder):
    """Stands for the cache in a trial, by which the class's forward knows the call."""

    def __init__(self, model: Any) -> None:
        """A call as transformers' loops make it."""
        bound = engine_of(model).core.bound
        names = {"input_ids": True, "attention_mask": True}
        names |= {"position_ids": bound.takes_positions, "logits_to_keep": bound.chooses_logits}
        given: dict[str, Any] = {name: _Placeholder() for name, is_taken in names.items() if is_taken}
        given |= {bound.cache_argument: self, "use_cache": True, "return_dict": True}
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "result", _Placeholder())
        object.__setattr__(self, "arrivals", [])

    def arrive(self, model: Any, given: dict[str, Any]) -> Any:
        """The class's forward, called with these arguments; to be called as a function of the class."""
        expected: dict[str, Any] = object.__getattribute__(self, "given")
        given = {name: value for name, value in given.items() if value is not None}
        is_same = given.keys() == expected.keys() and all(given[name] is value for name, value in expected.items())
        object.__getattribute__(self, "arrivals").append(_surroundings(model) if is_same else None)
        return object.__getattribute__(self, "result")


def _surroundings(model: Any) -> Any:
    """The settings that a forward is computed in, and that code around it may have changed."""
    return engine_of(model).core.batch_key(), torch.get_default_dtype(), model.training


def _holds_nothing(value: Any, model: Any, seen: set[FunctionType]) -> bool:
    """Whether a function, or what it can name, is neither written to by it nor of a kind that could keep anything."""
    if value is model or value is type(model).forward or isinstance(value, (*_CONSTANTS, *_CODE)):
        return True
    parts: tuple[Any, ...]
    if isinstance(value, tuple):
        parts = value
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        parts = (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        if value in seen:
            return True
        seen.add(value)
        found = _names(value.__code__)
        if found is None:
            return False
        parts = (
            *(cell.cell_contents for cell in value.__closure__ or ()),
            *(table[name] for table in (value.__globals__, vars(model)) for name in found if name in table),
        )
    else:
        return False
    return all(_holds_nothing(part, model, seen) for part in parts)


@functools.lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[str, ...] | None:
    """Names of globals and attributes in the code; `None`: it writes to something that outlasts its call."""
    for part in _codes(code):
        for step in dis.get_instructions(part):
            if step.opname in _WRITES or (step.opname in _WRITES_OUTSIDE and step.argval in part.co_freevars):
                return None
    return tuple({name for part in _codes(code) for name in part.co_names})


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
