"""`Channel`: what rank 0 tells the other ranks, in order, and short alerts between it and them at any moment.

Over groups of their own on gloo: what the model itself sends must not meet what steers it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

FRAME_BYTES = 96 * 1024  # of a message: a step of 256 rows with 64 blocks each fits
ALERT_BYTES = 2048
_HEADER = 2  # numbers in front of a message: its kind and its length
FAREWELL_SECONDS = 10.0  # in which the ranks take leave of each other
_NEVER = timedelta(days=365)  # an idle engine sends nothing, for as long as it likes


class Kind(IntEnum):
    """Kinds of messages."""

    STEP = 1  # copies of blocks, and maybe a step
    BEGIN = 2  # a call begins
    END = 3  # a call has ended: its result
    FORWARD = 4  # a forward of the model that is no step begins
    RELEASE = 5  # the pool's memory is given back
    STOP = 6  # nothing comes any more


class Alert(IntEnum):
    """Kinds of alerts."""

    FAULT = 1  # this rank can't go on
    FOLLOW = 2  # to rank 0: this rank makes no calls
    BYE = 3  # this rank's thread that receives messages has ended


class RankError(RuntimeError):
    """A rank is gone or out of step: nothing runs on any of them any more."""


class Channel:
    """Between the ranks of one model.

    Attributes:
        ranks: Their numbers in the job, rank 0 of the model first.
        index: Which of them this process is.
    """

    def __init__(self, ranks: list[int]) -> None:
        """All of the ranks make it at the same time."""
        self.ranks = ranks
        self.index = ranks.index(dist.get_rank())
        self._messages, self._alerts = (
            dist.new_group(ranks, backend="gloo", timeout=_NEVER, use_local_synchronization=True) for _ in range(2)
        )
        self._frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        self._bytes = self._frame.numpy()
        self._header = self._bytes[: 8 * _HEADER].view(np.int64)
        self._lock = threading.Lock()
        self._alert_lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.index == 0

    @property
    def others(self) -> list[int]:
        """Indices of the other ranks that this one exchanges alerts with."""
        return list(range(1, len(self.ranks))) if self.is_first else [0]

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, in their order. Called by all at the same time, before anything is sent."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self._messages)
        return values

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """From rank 0 to all others. One frame, and where that is too short a second message with the rest.

        Raises:
            RuntimeError: Of gloo: one of them is gone.
        """
        with self._lock:
            self._header[:] = kind, len(payload)
            room = FRAME_BYTES - 8 * _HEADER
            first = np.frombuffer(payload[:room], np.uint8)
            self._bytes[8 * _HEADER : 8 * _HEADER + len(first)] = first
            parts = [self._frame]
            if len(payload) > room:
                parts.append(torch.frombuffer(bytearray(payload[room:]), dtype=torch.uint8))
            sent = [self._messages.send([part], index, 0) for part in parts for index in range(1, len(self.ranks))]
            for work in sent:
                work.wait()

    def receive(self) -> tuple[Kind, bytes]:
        """The next message of rank 0; waits for it. Called by one thread.

        Raises:
            RuntimeError: Of gloo: rank 0 is gone.
        """
        _receive(self._messages, self._frame, 0)
        kind, length = self._header.tolist()
        payload = self._bytes[8 * _HEADER : 8 * _HEADER + length].tobytes()
        if len(payload) < length:
            rest = torch.empty(length - len(payload), dtype=torch.uint8, device="cpu")
            _receive(self._messages, rest, 0)
            payload += rest.numpy().tobytes()
        return Kind(kind), payload

    def alert(self, index: int, alert: Alert, text: str = "") -> None:
        """To another rank, from any thread. Raises `RuntimeError` of gloo."""
        frame = np.zeros(ALERT_BYTES, np.uint8)
        said = np.frombuffer(text.encode()[: ALERT_BYTES - 16], np.uint8)
        frame[:16].view(np.int64)[:] = alert, len(said)
        frame[16 : 16 + len(said)] = said
        with self._alert_lock:
            _send(self._alerts, torch.from_numpy(frame), index)

    def watch(self, index: int, heard: Callable[[Alert, str], None], lost: Callable[[Exception], None]) -> None:
        """Hears alerts of another rank, on a thread of its own, until it says `BYE` or is gone.

        Args:
            index: Of the other rank.
            heard: Called with each alert and its text.
            lost: Called where nothing can come any more.
        """

        def listen() -> None:
            frame = torch.zeros(ALERT_BYTES, dtype=torch.uint8, device="cpu")
            while True:
                try:
                    _receive(self._alerts, frame, index)
                except Exception as error:
                    lost(error)
                    return
                alert, length = frame[:16].numpy().view(np.int64).tolist()
                heard(Alert(alert), frame[16 : 16 + length].numpy().tobytes().decode(errors="replace"))
                if alert == Alert.BYE:
                    return

        self.start(listen, f"hf_paged_rank_{index}")

    def start(self, listen: Callable[[], None], name: str) -> None:
        """A thread that receives something, until it is told that nothing comes any more."""
        thread = threading.Thread(target=listen, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, seconds: float) -> None:
        """Waits for those threads: stopped in the midst of gloo's code, by the interpreter's end, they abort it."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


# Past torch.distributed's functions, whose registry a program may have emptied at its end (`destroy_process_group`).
def _send(group: Any, frame: torch.Tensor, index: int) -> None:
    group.send([frame], index, 0).wait()


def _receive(group: Any, frame: torch.Tensor, index: int) -> None:
    group.recv([frame], index, 0).wait()
