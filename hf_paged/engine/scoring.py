"""How likely the tokens of a text are: forwards over it, a slice of rows at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_paged.attention.cache import PagedCache
from hf_paged.sampling.logprobs import Logprobs, TokenLogprobs

SLICE = 256  # rows of logits at a time: of a long text all of them would take gigabytes
MAX_ROWS = 4 * SLICE  # of all texts that are looked at together


class LogitRows:
    """Rows of logits that may be there at one time, over all threads that look at some."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._condition = threading.Condition()
        self._free = max_rows

    @contextmanager
    def taken(self, num_rows: int) -> Iterator[None]:
        """Waits until so many more rows may be there."""
        with self._condition:
            self._condition.wait_for(lambda: self._free >= num_rows)
            self._free -= num_rows
        try:
            yield
        finally:
            with self._condition:
                self._free += num_rows
                self._condition.notify_all()


@torch.no_grad()
def token_logprobs(
    model: Any, tokens: list[int], first: int, num_top: int, rows: LogitRows | None = None
) -> list[TokenLogprobs]:
    """How likely each token of a text was, from one on, by the model's own logits. Steps are shared as always.

    Args:
        first: Index of the first token to be looked at, 1 at least. What the prefix cache has of those before the one
            in front of it is not computed again.
    """
    bound = model.paged.core.bound
    ids = torch.tensor([tokens], dtype=torch.int64, device=bound.placement[1])
    cache, rows = PagedCache(model), rows or LogitRows()
    going_on = {bound.cache_argument: cache, "use_cache": True}
    found: list[TokenLogprobs] = []
    if 1 < first < len(tokens):
        last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        model(ids[:, : first - 1], **going_on, **last)
    for start in range(first - 1, len(tokens) - 1, SLICE):
        end = min(start + SLICE, len(tokens) - 1)
        with rows.taken(end - start):
            logits = model(ids[:, start:end], **going_on).logits[0]
            found += Logprobs(logits.float(), ids[0, start + 1 : end + 1], num_top, is_ranked=True).read()
            del logits
    cache.reset()
    return found
