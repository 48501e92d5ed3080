"""`StepExecutor`: a scheduled step through the model, and what it computed to whoever waits for it."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hf_paged.core.block_manager import Offer
from hf_paged.core.scheduler import ScheduledChunk, SchedulerOutput
from hf_paged.engine.kv_pool import KVPool
from hf_paged.kernels.transfers import DeviceTimer, ToHost
from hf_paged.memory.kv_cache import KVCache
from hf_paged.memory.streams import on_steps_stream
from hf_paged.model.runner import ModelRunner, TokenInputs
from hf_paged.sampling.sampler import Choice, ChosenTokens, Outcome, choose_tokens
from hf_paged.sampling.token_table import TokenTable


class LogitsSink(Protocol):
    """Who waits for the pending tokens of sequences: a caller's forward, or rows that the engine samples."""

    def wants(self, row: int, start: int, num_tokens: int) -> np.ndarray | None:
        """Of a row's tokens `[start, start + num_tokens)`, those (counted from `start`) whose logits are wanted.

        `None`: of the last token, if the chunk reaches it.
        """

    def tokens(self, row: int, start: int, num_tokens: int) -> TokenInputs | None:
        """The tokens as tensors, where the sequence itself doesn't know them; else `None`."""

    def take(self, rows: list[int], logits: Tensor, starts: list[int]) -> list[Choice]:
        """Receives what it wanted: for each row, rows of `logits` `[R, vocab_size]` from one of `starts` on.

        The pool's lock is held. Without rows: a chunk was computed of which no logits are wanted.

        Returns:
            What is to be chosen from them for rows that the engine samples; then `expect_tokens` is called for each
            choice, and `take_tokens` when the host knows the tokens.
        """

    def expect_tokens(self, rows: list[int]) -> list[int]:
        """Told that tokens are being chosen for rows: those that go on can be scheduled again. The lock is held.

        Returns:
            For each row its sequence's id; -1 if it ends with this token.
        """

    def take_tokens(self, rows: list[int], outcome: Outcome) -> None:
        """Receives tokens chosen for rows (-1: its probabilities are none). The pool's lock is held.

        Raises:
            Exception: What the outcome is, if any of the rows still waits for it.
        """

    def fail(self, error: BaseException) -> None:
        """Ends with an error. The pool's lock is held."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step that the device may still be busy with.

    Attributes:
        number: Of the step.
        step: What runs.
        timer: Of the step.
        chosen: The tokens it chooses, or what choosing raised; `None`: none.
        takers: For each choice, who takes its tokens, and its rows.
        places: Where in the tokens that of each sequence is that goes on.
        offers: Blocks that it filled, to be shared if they are finite, and
        check: sums that tell, or what asking for them raised; `None`: there are no offers.
    """

    number: int
    step: SchedulerOutput
    timer: DeviceTimer
    chosen: ChosenTokens | Exception | None
    takers: list[tuple[LogitsSink, list[int]]]
    places: dict[int, int]
    offers: list[Offer]
    check: ToHost | Exception | None


class StepExecutor:
    """Runs steps in two halves: `launch` queues one on the device, `collect` hands out the tokens that it chose.

    Between the two, its sequences have a token that only the device knows, and the next step may be launched with it.
    Logits that callers want are handed to them by `launch`, as tensors that the device is still to fill.

    Attributes:
        sinks: Who waits for a sequence's pending tokens, and as which row.
        num_steps: Model steps run.
        num_prefill_tokens: Tokens computed beyond one a sequence and step.
    """

    def __init__(self, pool: KVPool, runner: ModelRunner) -> None:
        """Of one pool and one model."""
        self._pool = pool
        self._runner = runner
        self._in_flight: deque[_StepInFlight] = deque()
        self._tables: dict[torch.device, TokenTable] = {}
        self.sinks: dict[int, tuple[LogitsSink, int]] = {}
        self.num_steps = 0
        self.num_prefill_tokens = 0

    @property
    def num_in_flight(self) -> int:
        """Steps launched and not collected."""
        return len(self._in_flight)

    @property
    def overlaps(self) -> bool:
        """Whether a step is to be launched before the one before is over.

        Not where a user's code runs in the model: rows that have ended would show it one token too many.
        """
        setting = self._pool.config.use_async_batching
        return (self._pool.kv_device.type == "cuda" if setting is None else setting) and self._runner.is_plain

    def token_table(self, device: torch.device) -> TokenTable:
        """Where rows keep tokens for processors and criteria that look at them. The pool's lock is held."""
        return self._tables.setdefault(device, TokenTable(device))

    def check_outside(self) -> None:
        """See `ModelRunner.check_outside`."""
        self._runner.check_outside()

    def prepared(self) -> AbstractContextManager[None]:
        """See `ModelRunner.prepared`."""
        return self._runner.prepared()

    def launch(self, step: SchedulerOutput) -> None:
        """Queues a step. Takes it back if anything raises. The step lock is held."""
        pool = self._pool
        try:
            device = self._runner.placement[1]
            with on_steps_stream(device), _autocast(step.chunks[0].sequence.group.batch_key):
                kv_cache = pool.execute_copies(step)
                timer = DeviceTimer(device)
                inputs, logit_rows, targets = self._lay_out(step, device)
                # A model that can choose rows still computes at least one.
                asked = np.asarray(logit_rows or [0], dtype=np.int64)
                logits = self._runner.run(step, pool.manager, kv_cache, inputs, asked)
        except BaseException:
            with pool.lock:
                pool.scheduler.undo(step)
            raise
        with pool.lock, on_steps_stream(device):
            offers = pool.scheduler.update(step, is_checked=False)
            check = _check(kv_cache, offers) if offers else None
            self.count_step(step.chunks)
            chosen, takers, places = self._deliver(step, logits, targets)
            self._in_flight.append(_StepInFlight(self.num_steps, step, timer, chosen, takers, places, offers, check))
            timer.stop()

    def collect(self) -> None:
        """Hands out the tokens of the oldest step in flight, as soon as they are there. The step lock is held."""
        done = self._in_flight.popleft()
        outcomes: list[Outcome] = []
        is_finite = [False] * len(done.offers)
        seconds = 0.0
        try:
            if isinstance(done.check, ToHost):
                is_finite = done.check.wait().isfinite().tolist()
            if isinstance(done.chosen, Exception):
                raise done.chosen
            if done.chosen is not None:
                outcomes = done.chosen.read()
            seconds = done.timer.seconds()
        except Exception as error:  # nobody's in particular: out of memory, a kernel that failed
            outcomes = [error] * len(done.takers)
        with self._pool.lock:
            # Before rows end, whose blocks are free then.
            self._pool.scheduler.settle(done.offers, is_finite)
            for (sink, rows), outcome in zip(done.takers, outcomes, strict=True):
                try:
                    sink.take_tokens(rows, outcome)
                except Exception as error:
                    sink.fail(error)
            chunks = done.step.chunks
            self.note_step(done.number, chunks, seconds, done.step.is_stalled)
            num_tokens = sum([chunk.num_tokens for chunk in chunks])
            if num_tokens > 4 * len(chunks):
                self._pool.cost.note_prefill(num_tokens, seconds)

    def _lay_out(
        self, step: SchedulerOutput, device: torch.device
    ) -> tuple[TokenInputs, list[int], list[tuple[LogitsSink, int, int]]]:
        """The flat batch, the rows of it whose logits are wanted, and who wants how many of them for which row."""
        ids: list[int] = []
        positions: list[int] = []
        places: dict[int, int] = {}  # of the ids that only the device knows, where in the last step's tokens they are
        given: list[TokenInputs] = []
        logit_rows: list[int] = []
        targets: list[tuple[LogitsSink, int, int]] = []
        flat_start = 0
        last = self._in_flight[-1] if self._in_flight else None

        def known() -> TokenInputs:
            made = TokenInputs(torch.tensor(ids, device="cpu"), None, torch.tensor(positions, device="cpu"))
            if places:
                assert last is not None and isinstance(last.chosen, ChosenTokens)
                sources = np.full(len(ids), -1)
                sources[list(places)] = list(places.values())
                made.chosen = last.chosen.tokens, sources
            ids.clear()
            positions.clear()
            places.clear()
            return made

        # One pass of plain Python over the chunks: ids and positions of most live on the host.
        for sequence, start, num_tokens in step.chunks:
            sink, row = self.sinks[sequence.seq_id]
            if sequence.token_ids is not None and sequence.position_offset is not None:
                first = sequence.position_offset + start
                positions += range(first, first + num_tokens)
                if start + num_tokens <= len(sequence.token_ids):
                    ids += sequence.token_ids[start : start + num_tokens]
                else:
                    assert num_tokens == 1 and last is not None
                    places[len(ids)] = last.places[sequence.seq_id]
                    ids.append(0)
            else:
                tensors = sink.tokens(row, start, num_tokens)
                assert tensors is not None, "tokens that neither the sequence nor its caller knows"
                if ids:
                    given.append(known().to(device))
                given.append(tensors)
            wanted = sink.wants(row, start, num_tokens)
            if wanted is not None:
                logit_rows += (flat_start + wanted).tolist()
                if wanted.size:
                    targets.append((sink, row, wanted.size))
            elif start + num_tokens == sequence.num_tokens:
                logit_rows.append(flat_start + num_tokens - 1)
                targets.append((sink, row, 1))
            flat_start += num_tokens
        if ids:
            given.append(known().to(device) if given else known())
        return (given[0] if len(given) == 1 else TokenInputs.cat(given)), logit_rows, targets

    def _deliver(
        self, step: SchedulerOutput, logits: Tensor, targets: list[tuple[LogitsSink, int, int]]
    ) -> tuple[ChosenTokens | Exception | None, list[tuple[LogitsSink, list[int]]], dict[int, int]]:
        """Hands callers their logits, and has the tokens of the engine's rows chosen.

        Returns:
            `chosen`, `takers` and `places` of the step in flight.
        """
        by_sink: dict[int, tuple[LogitsSink, list[int], list[int]]] = {}
        start = 0
        for sink, row, count in targets:
            _, rows, starts = by_sink.setdefault(id(sink), (sink, [], []))
            rows.append(row)
            starts.append(start)
            start += count
        for sequence, _, _ in step.chunks:
            sink, _ = self.sinks[sequence.seq_id]
            by_sink.setdefault(id(sink), (sink, [], []))  # a chunk of which no logits are wanted
        choices: list[Choice] = []
        takers: list[tuple[LogitsSink, list[int]]] = []
        for sink, rows, starts in by_sink.values():
            try:
                own = sink.take(rows, logits, starts)
                choices += own
                takers += [(sink, choice.rows) for choice in own]
            except Exception as error:
                sink.fail(error)
        if not choices:
            return None, [], {}
        places: dict[int, int] = {}
        try:
            chosen = choose_tokens(choices, logits)
        except Exception as error:
            return error, takers, {}
        for (sink, rows), place in zip(takers, chosen.places, strict=True):
            # Rows without a token wait, and fail when those of the step before are known: they may have ended with it.
            if not isinstance(place, Exception):
                places.update(zip(sink.expect_tokens(rows), range(place, place + len(rows)), strict=True))
        return chosen, takers, places

    def count_step(self, chunks: list[ScheduledChunk]) -> None:
        """Books a model step that computed these chunks. The pool's lock is held."""
        self.num_steps += 1
        self.num_prefill_tokens += sum([chunk.num_tokens for chunk in chunks]) - len(chunks)
        self._pool.record_peak()
        self._pool.log.step = self.num_steps

    def note_step(self, number: int, chunks: list[ScheduledChunk], seconds: float, is_stalled: bool = False) -> None:
        """Puts a step that was counted, with all that it led to, into the log. The pool's lock is held.

        Args:
            number: What `num_steps` was then.
            chunks: What was computed.
            seconds: How long it took.
            is_stalled: The first waiting group did not fit.
        """
        scheduler = self._pool.scheduler
        sequences, starts, counts = zip(*chunks, strict=True) if chunks else ((), (), ())
        num_tokens = sum(counts)
        num_decode = sum([n == 1 and start >= s.num_prompt_tokens for s, start, n in zip(sequences, starts, counts)])
        self._pool.log.add_step(
            number,
            num_seqs=len(chunks),
            num_tokens=num_tokens,
            num_decode=num_decode,
            num_prefill_tokens=num_tokens - num_decode,
            seconds=seconds,
            # Column by column: half the time, and no object for each chunk.
            chunks=[[s.group.arrival for s in sequences], [s.seq_id for s in sequences], starts, counts],
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_to_swap_in,
            is_stalled=is_stalled,
            num_free_blocks=self._pool.manager.pool.num_free,
        )


def _check(kv_cache: KVCache, offers: list[Offer]) -> ToHost | Exception:
    try:
        return kv_cache.block_sums([offer.block_id for offer in offers])
    except Exception as error:  # out of memory: the step is over, only its blocks are not shared
        return error


def _autocast(batch_key: Any) -> AbstractContextManager[Any]:
    """The autocast state of the calls that this step is for; the worker's thread has none of its own."""
    device_type, enabled, dtype = batch_key[0]
    if not enabled and not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype, enabled=enabled)


def autocast_state(device: torch.device) -> tuple[str, bool, torch.dtype]:
    """The calling thread's, hashable."""
    if not torch.amp.is_autocast_available(device.type):
        return "cpu", False, torch.bfloat16
    return device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
