"""`Leader`: rank 0's end of what several ranks do together: it decides everything, and says it before it does it."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers.utils import logging

from hf_paged.core.batch import Batch, Copy
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.core.process import PROCESS, Lasting
from hf_paged.parallel.channel import FAREWELL_SECONDS, Alert, Channel, Kind, RankError

logger = logging.get_logger(__name__)


def sendable(error: BaseException) -> Exception:
    """Returns the error, or one that says the same and can be sent."""
    try:
        if isinstance(error, Exception):
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error) and str(copy) == str(error):
                return error
    except Exception:
        logger.debug("an error that can't be sent as it is", exc_info=True)
    return RuntimeError(f"on rank 0 this call ended with {type(error).__name__}: {error}")


class Leader(Lasting):
    """Tells the other ranks of steps, copies of blocks and calls, in the order in which they happen here.

    Attributes:
        is_followed: Whether another rank serves steps and makes no calls.
    """

    def __init__(self, channel: Channel, fail: Callable[[BaseException], None]) -> None:
        """`fail` is called, on any thread, when nothing can run any more."""
        self.channel = channel
        self._fault: RankError | None = None
        self._fail = fail
        self._numbers = itertools.count(1)
        self._is_stopped = False
        self.is_followed = False
        self._gone: dict[int, threading.Event] = {index: threading.Event() for index in channel.others}
        for index in channel.others:
            channel.watch(index, partial(self._hear, index), partial(self._lose, index))
        PROCESS.watch(self)

    # What is said

    def step(
        self,
        batch: Batch,
        copies: list[Copy],
        embeddings: Tensor | None = None,
        chosen: Tensor | None = None,
        moves: int | None = None,
    ) -> None:
        """Tells the other ranks of a step, and of what is done to blocks before it.

        Args:
            chosen: Tokens that only the device knows: theirs get them by `from_first_rank`, and hear how many.
            moves: See `ModelRunner.follow`.
        """
        num_chosen = None if chosen is None else len(chosen)
        given = None if embeddings is None else embeddings.cpu()
        self._send(Kind.STEP, pickle.dumps((batch, copies, given, num_chosen, moves)))

    def copies(self, copies: list[Copy]) -> None:
        self.step(Batch(), copies)

    def forward(self, digest: bytes, text: str) -> None:
        """A forward that is no step. The step lock is held, here and until it is over.

        Raises:
            UnsupportedCallError: Another rank makes no calls.
        """
        if self.is_followed:
            raise UnsupportedCallError(
                f"{text} outside of the engine's steps (without a PagedCache, or in a call that falls back to stock "
                "generate()) must run on all ranks at once, and others are in model.paged.follow()"
            )
        self._send(Kind.FORWARD, pickle.dumps((next(self._numbers), digest, text)))

    def release(self) -> None:
        self._send(Kind.RELEASE)

    def begin(self, digest: bytes, text: str) -> int:
        """Tells the other ranks that a call begins; returns its number, by which `end` says how it ended."""
        number = next(self._numbers)
        self._send(Kind.BEGIN, pickle.dumps((number, digest, text)))
        return number

    def end(self, number: int, outcome: Any) -> None:
        self._send(Kind.END, number.to_bytes(8, "little") + pickle.dumps(outcome))

    def _send(self, kind: Kind, payload: bytes = b"") -> None:
        self.check()
        try:
            self.channel.send(kind, payload)
        except Exception as error:
            raise self.fail(f"rank 0 can't reach the other ranks ({error})") from error

    # When it goes wrong

    def check(self) -> None:
        """Raises `RankError` if nothing can run any more."""
        if self._fault is not None:
            raise self._fault

    def fail(self, text: str) -> RankError:
        """Ends all runs, on all ranks; returns the error that says why."""
        if self._fault is None:
            self._fault = RankError(f"the ranks of this model can't go on: {text}")
            logger.warning(f"hf_paged: {self._fault}")
            for index in self.channel.others:
                if not self._gone[index].is_set():
                    threading.Thread(target=self._tell, args=(index, Alert.FAULT, text), daemon=True).start()
            self._fail(self._fault)
        return self._fault

    def _tell(self, index: int, alert: Alert, text: str = "") -> None:
        try:
            self.channel.alert(index, alert, text)
        except Exception as error:
            logger.info("hf_paged: rank %d was not told: %s", index, error)

    def _hear(self, index: int, alert: Alert, text: str) -> None:
        if alert == Alert.FAULT:
            self.fail(f"rank {index}: {text}")
        elif alert == Alert.FOLLOW:
            self.is_followed = True
        else:
            self._gone[index].set()

    def _lose(self, index: int, error: Exception) -> None:
        self._gone[index].set()
        if not self._is_stopped:
            self.fail(f"rank {index} is gone ({error})")

    def start_anew(self) -> None:
        self._is_stopped = True  # the parent tells them

    def part(self) -> None:
        """Says that nothing comes any more, and waits until the others have heard it."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._fault is None:
            try:
                self.channel.send(Kind.STOP)
            except Exception as error:
                logger.info("hf_paged: the other ranks were not told of the end: %s", error)
                return
            for event in self._gone.values():
                event.wait(FAREWELL_SECONDS)
            for index in self.channel.others:
                self._tell(index, Alert.BYE)
            self.channel.join(FAREWELL_SECONDS)
        self._fault = self._fault or RankError("rank 0 has ended (unpatch, or the end of its program)")
