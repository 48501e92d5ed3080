"""The oracle of the suite: every call runs on a stock model and on a patched copy of it, and both must agree."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

import hf_paged
from helpers.models import watch_tokens
from hf_paged import PagedCache
from hf_paged.api import support
from hf_paged.engine.executor import StepExecutor

Make = Callable[[Any], dict[str, Any]]
MakePair = Callable[..., "Pair"]


class OverlappingExecutor(StepExecutor):
    """Steps overlap although the test watches the model through a hook: one that runs no steps of its own."""

    overlaps = True  # type: ignore[assignment]


class Trials:
    """Stands in for `support.probe`: what a trial of an architecture found, once for all tests that have its class and
    config. A trial takes as long as a test; those about the trial itself take the fixture `own_trial`.
    """

    def __init__(self) -> None:
        self.probe = support.probe
        self._found: dict[Any, Any] = {}

    def __call__(self, base: Any, config: Any) -> Any:
        key = base, type(config), config.to_json_string(use_diff=False), config._attn_implementation
        if key not in self._found:
            self._found[key] = self.probe(base, config)
        return self._found[key]


class Pair:
    """A stock model, and a patched copy of it in every state the stock one is in.

    Attributes:
        stock: The oracle.
        paged: The patched copy.
        delta: What the last call added to the engine's counters.
        seen: Tokens the first decoder layer of the patched model was given, a number a forward of the last call.
    """

    def __init__(self, stock: Any, **settings: Any) -> None:
        self.stock = stock
        self.paged = hf_paged.patch(copy.deepcopy(stock), **settings)
        if self.engine.config.use_async_batching:
            self.engine.core.executor.__class__ = OverlappingExecutor
        self.delta: dict[str, int] = {}
        self.seen = watch_tokens(self.paged)

    @property
    def engine(self) -> hf_paged.Engine:
        """The engine of the patched copy."""
        return self.paged.paged

    def both(self, call: Callable[[Any], Any], *, seed: int = 0, falls_back: bool = False) -> tuple[Any, Any]:
        """Runs `call(model)` on the stock model, then on the patched one, and asserts that nothing tells them apart.

        That is: the results, the state of torch's global generator afterwards, the patched model's silence, and the
        invariants of its pool.

        Args:
            call: What to do with each model.
            seed: Seed of torch's global generator before each.
            falls_back: The call is one that stock `generate()` has to run: exactly one warning says so.

        Returns:
            Both results, for further looks.
        """
        torch.manual_seed(seed)
        with logged_messages() as stock_messages:
            expected = call(self.stock)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        before = asdict(self.engine.stats())
        self.seen.clear()
        with logged_messages() as messages:
            found = call(self.paged)
        assert_same(expected, found)
        assert torch.equal(torch.get_rng_state(), state), "the global generator was left in another state"
        self.delta = {name: value - before[name] for name, value in asdict(self.engine.stats()).items()}
        ours = [message for message in messages if message[0] == "hf_paged"]
        assert len(ours) == falls_back, ours
        falls = [message for message in stock_messages if "is falling back to its reference" in message[1]]  # in a scan
        expected_messages = [message for message in stock_messages if message not in falls]
        assert [message for message in messages if message not in (*ours, *falls)] == expected_messages
        self.engine.check_invariants()
        return expected, found

    def generate(
        self, *, make: Make | None = None, seed: int = 0, falls_back: bool = False, **arguments: Any
    ) -> tuple[Any, Any]:
        """`both` for a `generate()` call.

        Args:
            make: Gives the arguments that each model needs its own of (caches, streamers, processors with a state).
            seed: As in `both`.
            falls_back: As in `both`.
            **arguments: What both can be given. Tensors among them must be left as they are, and all blocks free unless
                a `PagedCache` is given or returned.
        """
        given = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
        own_caches = []

        def call(model: Any) -> Any:
            own = make(model) if make is not None else {}
            own_caches.append(own.get("past_key_values"))
            return model.generate(**arguments, **own)

        expected, found = self.both(call, seed=seed, falls_back=falls_back)
        for name, value in given.items():
            assert torch.equal(arguments[name], value), f"generate() wrote into the caller's {name}"
        returned = found.get("past_key_values") if isinstance(found, ModelOutput) else None
        if not any(isinstance(cache, PagedCache) for cache in (*own_caches, returned)):
            self.assert_all_free()
        return expected, found

    def assert_all_free(self) -> None:
        """Asserts that no sequence holds a block."""
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks, f"{stats.num_blocks - stats.num_free_blocks} blocks leaked"
        assert stats.num_running == stats.kv_tokens_stored == stats.kv_slots_allocated == 0


def new_cache(model: Any) -> Cache:
    """The cache a user would make for this model: a `PagedCache` if it is patched."""
    if hasattr(model, "paged"):
        return PagedCache(model)
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@contextmanager
def logged_messages() -> Iterator[list[tuple[str, str]]]:
    """Within it, the list grows by each message to the user: who says it (a package, or a kind of warning), and what.

    `warning_once` starts anew.
    """
    messages: list[tuple[str, str]] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append((record.name.split(".")[0], record.getMessage()))  # type: ignore
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    loggers = [logging.getLogger("hf_paged"), logging.getLogger("transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", ResourceWarning)  # of what the garbage collector finds of earlier tests
            yield messages
    finally:
        messages += [(warning.category.__name__, str(warning.message)) for warning in caught]
        for logger in loggers:
            logger.removeHandler(handler)


def assert_same(expected: Any, found: Any, where: str = "result") -> None:
    """Asserts that two results are of one structure, with equal integers and floats that differ by rounding only."""
    if isinstance(expected, Cache):
        assert isinstance(found, Cache), where
        assert found.get_seq_length() == expected.get_seq_length(), where
    elif isinstance(expected, Tensor):
        assert isinstance(found, Tensor), where
        assert found.shape == expected.shape and found.dtype == expected.dtype, (
            f"{where}: {found.shape} {found.dtype}, stock {expected.shape} {expected.dtype}"
        )
        expected, found = expected.detach(), found.detach()
        if expected.is_floating_point():
            finite = expected[expected.isfinite()]
            size = float(finite.abs().max()) if finite.numel() else 1.0
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=1e-5 * size, equal_nan=True, msg=lambda text: f"{where}: {text}"
            )
        else:
            assert torch.equal(found, expected), f"{where}:\n{found}\nstock:\n{expected}"
    elif isinstance(expected, ModelOutput | dict):
        assert type(found) is type(expected) and list(found) == list(expected), f"{where}: {list(found)}"
        for name in expected:
            assert_same(expected[name], found[name], f"{where}.{name}")
    elif isinstance(expected, tuple | list):
        assert type(found) is type(expected) and len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(expected, found)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert found == expected, f"{where}: {found!r}, stock {expected!r}"


def assert_same_cache(expected: Cache, found: Cache, mask: Tensor | None = None) -> None:
    """Asserts that two caches hold the same keys and values in all layers.

    Args:
        expected: A `DynamicCache`; its sliding layers have kept only their window.
        found: The other.
        mask: `[batch, columns]`, 0 at padding, whose keys are never read.
    """
    assert found.get_seq_length() == expected.get_seq_length()
    num_layers = len(expected.layers)  # transformers 5.17 has none for those that only read others' keys
    assert all(layer.keys is None for layer in found.layers[num_layers:])
    for index, (stock, paged) in enumerate(zip(expected.layers, found.layers)):
        if stock.keys is None:
            assert paged.keys is None and paged.values is None, f"layer {index} stores nothing of its own"
            continue
        kept = stock.keys.shape[2]
        for kind in ("keys", "values"):
            one, other = getattr(stock, kind), getattr(paged, kind)[:, :, -kept:]
            if mask is not None:
                real = mask[:, None, : expected.get_seq_length(), None][:, :, -kept:] != 0
                one, other = one * real, other * real
            assert_same(one, other, f"layer {index} {kind}")
