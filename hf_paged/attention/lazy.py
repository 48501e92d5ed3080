"""`lazy`: an attribute that is made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class lazy(cached_property[T]):
    """`functools.cached_property` without the lock that it has in Python 3.11, one for all instances of a class.

    A step's attributes are read by the thread that runs it. With that lock, engines on several threads would wait for
    one another, and a process forked while one of them makes such an attribute could never make it again.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()
