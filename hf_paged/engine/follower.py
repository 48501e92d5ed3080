"""`Follower`: any other rank's end: it runs what rank 0 says, and decides nothing."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging

from hf_paged.core.errors import UnsupportedCallError
from hf_paged.core.interrupts import wait_interruptibly
from hf_paged.core.process import PROCESS, Lasting
from hf_paged.core.step_message import unpack
from hf_paged.engine.executor import autocasting
from hf_paged.engine.kv_pool import KVPool
from hf_paged.memory.streams import on_steps_stream
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.runner import ModelRunner
from hf_paged.parallel.channel import FAREWELL_SECONDS, Alert, Channel, Kind, RankError
from hf_paged.parallel.mail import Done, Expected, Mail, RemoteCall

logger = logging.get_logger(__name__)


class Follower(Lasting):
    """Receives rank 0's messages on a thread of its own, for as long as the model is patched.

    Attributes:
        mail: What rank 0 said of its calls.
        ended: Set when nothing comes any more.
    """

    is_first = False

    def __init__(
        self, channel: Channel, pool: KVPool, model: BoundModel, runner: ModelRunner, look: Callable[[], Any]
    ) -> None:
        """Begins to listen; `look` notices what changed in the model, and is called when a call begins."""
        self.channel = channel
        self.mail = Mail(pool.config.rank_timeout)
        self.ended = threading.Event()
        self._pool = pool
        self._model = model
        self._runner = runner
        self._look = look
        self._fault: BaseException | None = None
        self._lock = threading.Lock()
        self._housekeeper: threading.Thread | None = None
        self._given_up: queue.SimpleQueue[tuple[Expected, int | None]] = queue.SimpleQueue()
        channel.watch(0, self._hear, self._lose)
        channel.start(self._receive, "hf_paged_follow")
        PROCESS.watch(self)

    def handle(self, kind: Kind, payload: bytes) -> bool:
        """Does what a message says; returns whether more may come."""
        if kind == Kind.STEP:
            self._step(payload)
        elif kind == Kind.BEGIN:
            self._look()
            self.mail.begin(RemoteCall(*pickle.loads(payload)))
        elif kind == Kind.END:
            self.mail.end(int.from_bytes(payload[:8], "little"), payload[8:])
        elif kind == Kind.FORWARD:
            self.mail.give_turn(payload)
        elif kind == Kind.RELEASE:
            self._pool.drop()
        else:
            self.end(RankError("rank 0 has ended (unpatch, or the end of its program)"))
            self.channel.alert(0, Alert.BYE)
            return False
        return True

    def _receive(self) -> None:
        try:
            is_going_on = True
            while is_going_on:
                is_going_on = self.handle(*self.channel.receive())
        except BaseException as error:
            self.fail(error)

    def _step(self, payload: bytes) -> None:
        batch, copies, extra = unpack(payload)
        device = self._model.placement[1]
        if device.type == "cuda":
            torch.cuda.set_device(device)
        attention = self._pool.execute(copies)
        if batch.number:
            batch_key, embeddings = pickle.loads(extra)
            with on_steps_stream(device), autocasting(batch_key):
                given = None if embeddings is None else embeddings.to(device)
                self._runner.run(batch, attention, given)

    # Ends

    def fail(self, error: BaseException) -> None:
        """Says that this rank can't go on, and fails all that wait."""
        text = f"{type(error).__name__}: {error}"
        if not self.ended.is_set():
            logger.warning(f"hf_paged: rank {self.channel.index} can't go on: {text}")
            try:
                self.channel.alert(0, Alert.FAULT, text=text)
            except Exception as lost:
                logger.info("hf_paged: rank 0 was not told: %s", lost)
        self.end(RankError(f"the ranks of this model can't go on: rank {self.channel.index}: {text}"))

    def end(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self.mail.close(self._fault)
        self.ended.set()

    def _hear(self, alert: Alert, number: int, text: str) -> None:
        if alert == Alert.FAULT:
            self.end(RankError(f"the ranks of this model can't go on: {text}"))

    def _lose(self, error: Exception) -> None:
        self.end(RankError(f"the ranks of this model can't go on: rank 0 is gone ({error})"))

    def follow(self) -> None:
        """Serves steps until rank 0 ends; keeps no results: none are asked for here.

        Raises:
            RankError: Something went wrong.
        """
        self.mail.is_kept = False
        wait_interruptibly(self.ended.wait)
        self.check()

    def check(self) -> None:
        """Raises `RankError` if it ended otherwise than by rank 0's own will."""
        if self._fault is not None and "rank 0 has ended" not in str(self._fault):
            raise self._fault

    def part(self) -> None:
        """Waits for rank 0's end: until then it may have steps to run."""
        if wait_interruptibly(self.ended.wait, self._pool.config.rank_timeout):
            self.channel.join(FAREWELL_SECONDS)

    # Callers

    @contextmanager
    def calling(self, digest: bytes, text: str) -> Iterator[RemoteCall]:
        """The length of a call that rank 0 makes, too. Left with an exception before it is over, it ends there."""
        call = self.mail.claim(digest, text)
        try:
            yield call
        except BaseException:
            if call.outcome is None and not self.ended.is_set():
                self.channel.alert(0, Alert.CANCEL, call.number)
            raise

    def expect(self, digest: bytes, text: str, done: Done) -> Callable[..., None]:
        """See `Mail.expect`; returns what ends the call (given an index: one sample), also for a finalizer."""
        expected = self.mail.expect(digest, text, done)
        with self._lock:
            if self._housekeeper is None or not self._housekeeper.is_alive():
                self._housekeeper = threading.Thread(target=self._keep_house, name="hf_paged_calls", daemon=True)
                self._housekeeper.start()
        return lambda index=None: self._given_up.put((expected, index))

    def _keep_house(self) -> None:
        """While calls are expected: says which were given up here, and ends those that rank 0 doesn't make."""
        given_up: list[tuple[Expected, int | None]] = []
        while not self.ended.wait(0.02):
            while not self._given_up.empty():
                given_up.append(self._given_up.get())
            for expected, index in given_up:
                if expected.call is not None and expected.call.outcome is None:
                    self.channel.alert(0, Alert.CANCEL, expected.call.number, "" if index is None else str(index))
            given_up = [one for one in given_up if one[0].call is None]
            self.mail.fail_overdue()

    def outcome(self, call: RemoteCall) -> Any:
        return pickle.loads(self.mail.fetch(call))


def only_on_first(name: str) -> UnsupportedCallError:
    """The error of a rank that is asked what rank 0 alone can answer."""
    return UnsupportedCallError(
        f"{name}() is for rank 0, which alone schedules: ask there (torch.distributed.get_rank() == 0)"
    )
