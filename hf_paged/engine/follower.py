"""`Follower`: the engine's part on ranks above 0: it runs rank 0's steps, and decides nothing."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from hf_paged.core.errors import UnsupportedCallError
from hf_paged.core.interrupts import wait_interruptibly
from hf_paged.core.process import PROCESS, Lasting
from hf_paged.engine.executor import autocasting
from hf_paged.engine.kv_pool import KVPool
from hf_paged.memory.streams import on_steps_stream
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.runner import ModelRunner
from hf_paged.model.sharding import from_first_rank
from hf_paged.parallel.channel import FAREWELL_SECONDS, Alert, Channel, Kind, RankError

logger = logging.get_logger(__name__)

MOST_AHEAD = 10_000  # calls that rank 0 may have made and this rank has not


@dataclass(slots=True, eq=False)
class RemoteCall:
    """A call of rank 0's, or a forward that is no step.

    Attributes:
        number: Its place among rank 0's calls, and so among those of this rank.
        digest: Of what is asked for.
        text: The same in words.
        is_made: Whether this rank has made it, too.
        outcome: How it ended.
        done: Called with that, for a caller who doesn't wait.
    """

    number: int
    digest: bytes
    text: str
    is_made: bool = False
    outcome: bytes | RankError | None = None
    done: Callable[[bytes | RankError], None] | None = None


class Follower(Lasting):
    """Receives rank 0's messages on a thread of its own, for as long as the model is patched.

    The calls of this rank are those of rank 0 in the same order, made by one thread, or it makes none (`follow`). It
    waits for rank 0 to begin each; rank 0 doesn't wait. Only rank 0 can end one before its end.
    """

    def __init__(
        self, channel: Channel, pool: KVPool, model: BoundModel, runner: ModelRunner, look: Callable[[], Any]
    ) -> None:
        """Begins to listen; `look` notices what changed in the model, and is called when a call begins."""
        self.channel = channel
        self._pool = pool
        self._model = model
        self._runner = runner
        self._look = look
        self._patience = pool.config.rank_timeout
        self._condition = threading.Condition()
        self._calls: dict[int, RemoteCall] = {}  # that are not both made here and over
        self._num_calls = 0
        self._caller: threading.Thread | None = None
        self._follows = False
        self._end: RankError | None = None
        channel.watch(0, self._hear, self._lose)
        channel.start(self._receive, "hf_paged_follow")
        PROCESS.watch(self)

    # The thread that receives

    def handle(self, kind: Kind, payload: bytes) -> bool:
        """Does what a message says; returns whether more may come."""
        if kind == Kind.STEP:
            self._step(payload)
        elif kind == Kind.BEGIN:
            self._look()
            self._begin(RemoteCall(*pickle.loads(payload)))
        elif kind == Kind.END:
            self._finish(int.from_bytes(payload[:8], "little"), payload[8:])
        elif kind == Kind.FORWARD:
            self._wait_for_forward(RemoteCall(*pickle.loads(payload)))
        elif kind == Kind.RELEASE:
            self._pool.drop()
            self._runner.graphs.forget()
        else:
            self._close(RankError("rank 0 has ended (unpatch, or the end of its program)"))
            self.channel.alert(0, Alert.BYE)
            return False
        return True

    def _receive(self) -> None:
        try:
            is_going_on = True
            while is_going_on:
                is_going_on = self.handle(*self.channel.receive())
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")

    def _step(self, payload: bytes) -> None:
        batch, copies, embeddings, num_chosen, moves = pickle.loads(payload)
        device = self._model.placement[1]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        attention = self._pool.execute(copies)
        if batch.number:
            with on_steps_stream(device), autocasting(batch.batch_key):
                given, chosen = None if embeddings is None else embeddings.to(device), None
                if num_chosen is not None:
                    chosen = torch.empty(num_chosen, dtype=torch.int64, device=device)
                    from_first_rank(self._model.model, chosen)
                self._runner.follow(moves)
                self._runner.run(batch, attention, given, chosen)

    def _begin(self, call: RemoteCall) -> None:
        with self._condition:
            if self._follows:
                return
            if call.number > self._num_calls + MOST_AHEAD:
                raise RankError(f"rank 0 has made {MOST_AHEAD:,} calls that this rank has not: {CALLS}")
            self._calls[call.number] = call
            self._condition.notify_all()

    def _finish(self, number: int, outcome: bytes | RankError) -> None:
        with self._condition:
            call = self._calls.get(number)
            if call is None:
                return
            call.outcome = outcome
            if call.is_made:
                del self._calls[number]
            self._condition.notify_all()
        if call.done is not None:
            call.done(outcome)

    def _wait_for_forward(self, call: RemoteCall) -> None:
        """The caller's thread runs it, while this one waits."""
        self._begin(call)
        with self._condition:
            self._condition.wait_for(lambda: call.is_made or self._follows or self._end is not None, self._patience)
            if not call.is_made:
                raise RankError(f"rank 0 runs a forward of the model that this rank has not made: {CALLS}")
            self._condition.wait_for(lambda: call.outcome is not None or self._end is not None)

    # Ends

    def fail(self, text: str) -> RankError:
        """Says that this rank can't go on, and fails all that wait; returns their error."""
        error = RankError(f"the ranks of this model can't go on: rank {self.channel.index}: {text}")
        if self._end is None:
            logger.warning(f"hf_paged: {error}")
            try:
                self.channel.alert(0, Alert.FAULT, text)
            except Exception as lost:
                logger.info("hf_paged: rank 0 was not told: %s", lost)
        return self._close(error)

    def _close(self, error: RankError) -> RankError:
        with self._condition:
            self._end = self._end or error
            self._condition.notify_all()
            running = [call.number for call in self._calls.values() if call.outcome is None]
        for number in running:
            self._finish(number, RankError(f"the call was running when this happened: {self._end}"))
        return self._end

    def _hear(self, alert: Alert, text: str) -> None:
        if alert == Alert.FAULT:
            self._close(RankError(f"the ranks of this model can't go on: {text}"))

    def _lose(self, error: Exception) -> None:
        self._close(RankError(f"the ranks of this model can't go on: rank 0 is gone ({error})"))

    def _wait(self, is_there: Callable[[], bool], seconds: float | None = None) -> None:
        """Waits for something, or the end. The condition is held."""
        wait_interruptibly(lambda s: self._condition.wait_for(lambda: is_there() or self._end is not None, s), seconds)

    def follow(self) -> None:
        """Serves steps until rank 0 ends.

        Raises:
            RankError: Something went wrong.
        """
        with self._condition:
            self._take_thread()
            self._follows = True
            self._calls = {call.number: call for call in self._calls.values() if call.is_made}
            self._condition.notify_all()
        if self._end is None:
            self.channel.alert(0, Alert.FOLLOW)
        with self._condition:
            self._wait(lambda: False)
        if "rank 0 has ended" not in str(self._end):
            raise self._end or RankError()

    def part(self) -> None:
        """Waits for rank 0's end: until then it may have steps to run."""
        with self._condition:
            self._wait(lambda: False, self._patience)
        if self._end is not None:
            self.channel.join(FAREWELL_SECONDS)

    def start_anew(self) -> None:
        self._condition = threading.Condition()
        self._end = self._end or RankError("this process was forked from a rank of the model")

    # The thread that calls

    def _take_thread(self) -> None:
        caller, own = self._caller, threading.current_thread()
        if caller is not None and caller is not own and caller.is_alive():
            raise RuntimeError(f"another thread of this rank ({caller.name}) makes its calls: {CALLS}")
        self._caller = own

    def make(self, digest: bytes, text: str) -> RemoteCall:
        """This rank's next call: waits until rank 0 makes it.

        Raises:
            RuntimeError: Another thread makes this rank's calls.
            RankError: Rank 0 makes another call, or none, or is gone.
        """
        with self._condition:
            self._take_thread()
            self._num_calls += 1
            number = self._num_calls
            self._wait(lambda: number in self._calls, self._patience)
            call = self._calls.get(number)
            if call is not None and call.digest == digest:
                call.is_made = True
                if call.outcome is not None:
                    del self._calls[number]
                self._condition.notify_all()
                return call
        if self._end is not None:
            raise RankError(f"rank 0 has not made this call, {text}: {self._end}")
        made = f"none within {self._patience:g} s (rank_timeout)" if call is None else call.text
        raise self.fail(f"its call {number} is {text}, and rank 0's is {made}: {CALLS}")

    @contextmanager
    def forwarding(self, digest: bytes, text: str) -> Iterator[None]:
        """The length of a forward that is no step, at the same place among rank 0's steps."""
        call = self.make(digest, text)
        try:
            yield
        finally:
            self._finish(call.number, b"")

    def on_outcome(self, call: RemoteCall, done: Callable[[bytes | RankError], None]) -> None:
        """Has `done` called with how it ends, on any thread."""
        with self._condition:
            call.done = done
            outcome = call.outcome
        if outcome is not None:
            done(outcome)

    def outcome(self, call: RemoteCall) -> Any:
        """How a call has ended; waits for that."""
        with self._condition:
            self._wait(lambda: call.outcome is not None)
        if not isinstance(call.outcome, bytes):
            raise call.outcome or RankError(f"the call was running when this happened: {self._end}")
        return pickle.loads(call.outcome)


CALLS = (
    "every rank makes the same calls in the same order, from one thread; where rank 0 has several, the others call "
    "model.paged.follow()"
)


def only_on_first(name: str) -> UnsupportedCallError:
    """The error of a rank that is asked what rank 0 alone can answer."""
    return UnsupportedCallError(
        f"{name}() is for rank 0, which alone schedules: ask there (torch.distributed.get_rank() == 0)"
    )
