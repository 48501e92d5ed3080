"""`Mail`: what rank 0 said of its calls, for those that make the same calls here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hf_paged.core.interrupts import wait_interruptibly
from hf_paged.parallel.channel import RankError

Done = Callable[[bytes | BaseException], None]


@dataclass(slots=True, eq=False)
class Expected:
    """A call of this rank's whose caller doesn't wait.

    Attributes:
        digest: Of what is asked for.
        text: The same in words.
        done: Called with its outcome, or with what went wrong.
        call: Rank 0's, once that has begun.
        since: When it was made, in seconds of `time.monotonic`.
    """

    digest: bytes
    text: str
    done: Done
    call: RemoteCall | None = None
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class RemoteCall:
    """A call of rank 0's.

    Attributes:
        number: Among all of its calls.
        digest: Of what is asked for.
        text: The same in words.
        entry: Of the generators' states at its entry; empty: nothing is drawn.
        outcome: How it ended.
        done: Called with that, for a caller who doesn't wait.
        since: When it was last heard of, in seconds of `time.monotonic`.
    """

    number: int
    digest: bytes
    text: str
    entry: bytes
    outcome: bytes | None = None
    done: Done | None = None
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class _Turn:
    """A forward of rank 0's that is no step: the same here runs while rank 0's does."""

    digest: bytes
    is_taken: bool = False
    is_over: bool = False


class Mail:
    """Calls of rank 0 and callers of this rank, matched by what they ask for, first come first served among equals.

    Neither waits for the other to begin: rank 0's result is kept until its caller here comes, for `patience` seconds.

    Attributes:
        is_kept: Whether results are kept for callers at all.
    """

    def __init__(self, patience: float) -> None:
        """Nothing has come. `patience`: seconds that a caller waits for rank 0 to make the same call."""
        self._patience = patience
        self._condition = threading.Condition()
        self._calls: dict[int, RemoteCall] = {}  # that have begun, and are not both over and fetched
        self._waiting: list[RemoteCall] = []  # those that no caller here has made yet, in rank 0's order
        self._expected: list[Expected] = []
        self._turn: _Turn | None = None
        self._end: BaseException | None = None
        self.is_kept = True

    # The thread that receives

    def begin(self, call: RemoteCall) -> None:
        """A call has begun on rank 0."""
        with self._condition:
            overdue = time.monotonic() - self._patience
            for old in [old for old in self._waiting if old.outcome is not None and old.since < overdue]:
                self._waiting.remove(old)
            if not self.is_kept:
                return
            self._calls[call.number] = call
            expected = next((own for own in self._expected if own.digest == call.digest), None)
            if expected is None:
                self._waiting.append(call)
                self._condition.notify_all()
            else:
                self._expected.remove(expected)
                expected.call, call.done = call, expected.done

    def end(self, number: int, outcome: bytes) -> None:
        """It is over there."""
        with self._condition:
            call = self._calls.pop(number, None)
            if call is not None:
                call.outcome, call.since = outcome, time.monotonic()
                self._condition.notify_all()
        if call is not None and call.done is not None:
            call.done(outcome)

    def give_turn(self, digest: bytes) -> None:
        """A forward runs on rank 0: waits until the same has run here. Raises `RankError` if it doesn't come."""
        turn = _Turn(digest)
        with self._condition:
            self._turn = turn
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: turn.is_taken or self._end is not None, self._patience):
                raise RankError(
                    f"rank 0 runs a forward of the model that this rank has not made within {self._patience:g} s"
                )
            self._condition.wait_for(lambda: turn.is_over or self._end is not None)
            self._turn = None

    def close(self, error: BaseException) -> None:
        """Nothing comes any more: all that wait get the error, and all that come."""
        with self._condition:
            if self._end is None:
                self._end = error
            self._condition.notify_all()
            expected, self._expected = self._expected, []
            done = [call.done for call in self._calls.values() if call.done is not None]
        for call in expected:
            call.done(self._missing(call.text, True))
        for tell in done:
            tell(RankError(f"the call was running when this happened: {error}"))

    def fail_overdue(self) -> bool:
        """Calls that rank 0 has not made for too long get an error; returns whether others are still expected."""
        with self._condition:
            overdue = time.monotonic() - self._patience
            late = [own for own in self._expected if own.since < overdue]
            self._expected = [own for own in self._expected if own.since >= overdue]
            errors = [self._missing(own.text, False) for own in late]
        for own, error in zip(late, errors, strict=True):
            own.done(error)
        return bool(self._expected)

    # Callers

    def expect(self, digest: bytes, text: str, done: Done) -> Expected:
        """The same call of rank 0's, made or to be made, for a caller who doesn't wait: `done` is told its outcome."""
        expected = Expected(digest, text, done)
        with self._condition:
            end = self._end
            call = next((call for call in self._waiting if call.digest == digest), None)
            if call is not None:
                self._waiting.remove(call)
                expected.call, call.done = call, done
            elif end is None:
                self._expected.append(expected)
        if call is not None and call.outcome is not None:
            done(call.outcome)
        elif end is not None:
            done(self._missing(text, True))
        return expected

    def claim(self, digest: bytes, text: str) -> RemoteCall:
        """Waits for rank 0 to make this call.

        Raises:
            RankError: It doesn't, or is gone.
        """

        def look() -> bool:
            return self._end is not None or any(call.digest == digest for call in self._waiting)

        with self._condition:
            is_there = wait_interruptibly(lambda s: self._condition.wait_for(look, s), self._patience)
            found = next((call for call in self._waiting if call.digest == digest), None)
            if found is None:
                raise self._missing(text, is_there)
            self._waiting.remove(found)
            return found

    def _missing(self, text: str, is_over: bool) -> BaseException:
        made = "; ".join(call.text for call in self._waiting[:4]) or "none"
        why = str(self._end) if is_over else f"rank 0 has not made it within {self._patience:g} s (rank_timeout)"
        return RankError(
            f"all ranks have to make the same calls, and this one is made here alone: {text}: {why}. Calls of "
            f"rank 0 that were not made here: {made}"
        )

    def fetch(self, call: RemoteCall) -> bytes:
        """Waits for a call's outcome. Raises `RankError` if rank 0 is gone."""
        with self._condition:
            wait_interruptibly(
                lambda s: self._condition.wait_for(lambda: call.outcome is not None or self._end is not None, s)
            )
            if call.outcome is None:
                raise RankError(f"the call was running when this happened: {self._end}")
            return call.outcome

    def take_turn(self, digest: bytes, text: str) -> Callable[[], None]:
        """Waits until rank 0 runs the same forward; returns what is to be called when it is over here.

        Raises:
            RankError: It doesn't, or is gone.
        """

        def look() -> bool:
            turn = self._turn
            return self._end is not None or (turn is not None and not turn.is_taken and turn.digest == digest)

        with self._condition:
            is_there = wait_interruptibly(lambda s: self._condition.wait_for(look, s), self._patience)
            if not is_there or self._end is not None:
                raise self._missing(text, is_there)
            turn = self._turn
            assert turn is not None
            turn.is_taken = True

        def end() -> None:
            with self._condition:
                turn.is_over = True
                self._condition.notify_all()

        return end
