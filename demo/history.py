"""`History`: what the plots show, sampled four times a second, watched or not."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hf_paged import EngineStats

INTERVAL = 0.25
KEPT_SECONDS = 180
RATE_SECONDS = 1.0  # over which tokens are counted for tokens/s
SHARING_SECONDS = 10.0  # over which blocks and tokens are counted for blocks a token


@dataclass(frozen=True)
class Sample:
    """The engine at one moment.

    Attributes:
        time: When, in seconds since the epoch.
        tokens_per_second: Tokens generated for all visitors, over the last second.
        running: Sequences with blocks in the pool.
        waiting: Requests that hold none.
        swapped: Sequences whose blocks are in CPU memory.
        pool_use: Share of the pool's blocks that are held, 0 to 1.
        hit_rate: Share of the prompt tokens looked up so far that were found in the pool, 0 to 1; `None`: none was.
        blocks_per_token: Blocks taken for each token generated, over the last ten seconds; `None`: no token was.
    """

    time: float
    tokens_per_second: float
    running: int
    waiting: int
    swapped: int
    pool_use: float
    hit_rate: float | None
    blocks_per_token: float | None = None


class History:
    """The last minutes, as samples."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        """Starts sampling.

        Args:
            stats: Gauges and counters as of now.
        """
        self._stats = stats
        self._counts: deque[tuple[float, int, int]] = deque(maxlen=round(SHARING_SECONDS / INTERVAL) + 1)
        self.samples: deque[Sample] = deque(maxlen=round(KEPT_SECONDS / INTERVAL))
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="demo-history", daemon=True).start()

    @property
    def last(self) -> Sample | None:
        """The newest sample."""
        return self.samples[-1] if self.samples else None

    def close(self) -> None:
        """Ends sampling."""
        self._is_closed.set()

    def sample(self, stats: EngineStats, now: float) -> Sample:
        """Adds what is now."""
        if self._counts and stats.num_generated_tokens < self._counts[-1][1]:
            self._counts.clear()  # another pool, whose counters begin at 0
        self._counts.append((now, stats.num_generated_tokens, stats.num_blocks_allocated))
        (_, tokens_before, blocks_before), (end, tokens, blocks) = self._counts[0], self._counts[-1]
        start, before, _ = self._counts[max(0, len(self._counts) - 1 - round(RATE_SECONDS / INTERVAL))]
        new_tokens = tokens - tokens_before
        queried = stats.prefix_cache_query_tokens
        sample = Sample(
            time=now,
            tokens_per_second=(tokens - before) / (end - start) if end > start else 0.0,
            running=stats.num_running,
            waiting=stats.num_waiting,
            swapped=stats.num_swapped,
            pool_use=1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            hit_rate=stats.prefix_cache_hit_tokens / queried if queried else None,
            blocks_per_token=(blocks - blocks_before) / new_tokens if new_tokens else None,
        )
        self.samples.append(sample)
        return sample

    def _run(self) -> None:
        while not self._is_closed.wait(INTERVAL):
            try:
                stats = self._stats()
            except (AttributeError, RuntimeError):  # between two pools, or at the end
                continue
            self.sample(stats, time.time())
