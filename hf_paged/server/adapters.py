"""Adapters of PEFT's as models of their own: requests of one at a time, which share steps; the others wait."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from hf_paged import Engine


class Turns:
    """Lets requests in, of one name at a time.

    When the last one inside has left, all are let in that wait for the name that has waited longest. While others wait,
    those that come wait behind them, whatever is inside: each name's turn ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._name: str | None = None
        self._num_inside = 0
        self._waiting: deque[tuple[str | None, Future[None]]] = deque()

    async def enter(self, name: str | None) -> None:
        """Waits for the turn of a name; `leave` is to be called then. Cancelled meanwhile, it is as if never called."""
        future: Future[None] = Future()
        with self._lock:
            self._waiting.append((name, future))
            if not self._num_inside or (name == self._name and len(self._waiting) == 1):
                self._let_in()
        try:
            await asyncio.wrap_future(future)
        except BaseException:
            if not future.cancel():  # the turn has come
                self.leave()
            raise

    def leave(self) -> None:
        """One of those inside is done. From any thread; waits for nothing."""
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            name = self._waiting[0][0]
            those = [future for own, future in self._waiting if own == name and future.set_running_or_notify_cancel()]
            self._waiting = deque(each for each in self._waiting if each[0] != name)
            if those:
                self._name = name
                self._num_inside += len(those)
                for future in those:
                    future.set_result(None)
                return


class Adapters:
    """Switches the adapters of one model; its `turns` are those of requests, `None` that of the model without any."""

    def __init__(self, tuned: Any, engine: Engine, names: Sequence[str]) -> None:
        """Serves the adapters of a `PeftModel`.

        Raises:
            ValueError: It has no adapter of such a name, or one that isn't part of the model's layers.
        """
        known = getattr(tuned, "peft_config", {})
        for name in names:
            if name not in known:
                raise ValueError(f"the model has no adapter {name!r}, it has {', '.join(map(repr, known)) or 'none'}")
            if known[name].is_prompt_learning:
                raise ValueError(f"adapter {name!r} is a learned prompt, which can't be switched as layers are")
        self.names = tuple(names)
        self.turns = Turns()
        self._tuned = tuned
        self._engine = engine
        self._lock = threading.Lock()
        # Without wrappers of `modules_to_save`, which are switched with them, and have nothing that is merged.
        self._tuners: list[Any] = [m for m in tuned.modules() if hasattr(m, "merged") and hasattr(m, "merged_adapters")]

    def switch(self, name: str | None) -> None:
        """Has the model compute with an adapter, or with none. In its turn; waits for a step that runs."""
        with self._lock:
            if self._is_on(name):  # asked of the model: its owner may switch, too
                return
            layers = self._tuned.base_model
            with self._engine.exclusive():
                if any(layer.merged for layer in self._tuners):
                    layers.unmerge_adapter()
                if name is None:
                    layers.disable_adapter_layers()
                else:
                    layers.enable_adapter_layers()
                    self._tuned.set_adapter(name, inference_mode=True)

    def _is_on(self, name: str | None) -> bool:
        wanted = [] if name is None else [name]
        return all(
            not layer.merged and wanted == ([] if layer.disable_adapters else list(layer.active_adapters))
            for layer in self._tuners
        )
