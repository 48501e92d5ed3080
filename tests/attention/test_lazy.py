"""`lazy`: an attribute made at its first use, with no lock that a fork could inherit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from helpers.waiting import join
from hf_paged.attention.lazy import lazy


class Step:
    def __init__(self, make: Callable[[], int]) -> None:
        self._make = make

    @lazy
    def value(self) -> int:
        return self._make()


def test_made_once_and_without_waiting_for_others() -> None:
    """Would break: threads that wait for one another, and forks that hang for ever (`functools` before Python 3.12)."""
    begun, go_on = threading.Event(), threading.Event()
    made: list[int] = []

    def slow() -> int:
        begun.set()
        assert go_on.wait(20)
        return 1

    thread = threading.Thread(target=lambda: made.append(Step(slow).value))
    thread.start()
    assert begun.wait(20)
    numbers = iter(range(2, 9))
    other = Step(lambda: next(numbers))
    reader = threading.Thread(target=lambda: made.extend((other.value, other.value)))
    reader.start()
    join(reader)
    go_on.set()
    join(thread)
    assert made == [2, 2, 1]
