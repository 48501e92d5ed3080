"""Code of the tests' that passes for transformers' own."""

from __future__ import annotations

from types import FunctionType
from typing import Any, cast


def as_library_code(function: Any, module: str = "transformers.models") -> Any:
    """The same function, defined in a module of such a name, with the same functions within it."""
    own = cast("FunctionType", function)
    made = FunctionType(
        own.__code__, own.__globals__ | {"__name__": module}, own.__name__, own.__defaults__, own.__closure__
    )
    made.__kwdefaults__, made.__dict__, made.__module__ = own.__kwdefaults__, dict(own.__dict__), module
    return made
