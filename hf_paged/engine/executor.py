"""`StepExecutor`: takes a scheduled step through the model, and the results to its callers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.core.batch import Batch
from hf_paged.core.block_table import Offer
from hf_paged.core.event_log import StepRows
from hf_paged.core.sequence import GivenToken
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.leader import Leader
from hf_paged.engine.lone_rows import LoneRows
from hf_paged.engine.request import call_all
from hf_paged.engine.run import Run
from hf_paged.kernels.availability import draw_grid
from hf_paged.kernels.philox import DrawGrid
from hf_paged.kernels.transfers import DeviceTimer, ToHost
from hf_paged.memory.kv_cache import KVCache
from hf_paged.memory.streams import hand_out, on_steps_stream
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.padded_runner import CalledForward
from hf_paged.model.runner import ModelRunner
from hf_paged.model.sharding import from_first_rank
from hf_paged.sampling.beams import BeamBatch, SelectedBeams, select_beams
from hf_paged.sampling.sampler import Outcome, SampledTokens, SamplingBatch, sample_tokens
from hf_paged.sampling.token_table import TokenTable

_Part = tuple[SampledTokens | SelectedBeams | Exception, list[tuple[Run, list[int]]], LoneRows]


@dataclass(frozen=True, slots=True)
class _Takers:
    """Who takes what a step has computed.

    Attributes:
        runs: Each with those of its rows that have logits, and where in the batch these are.
        lone: Rows of calls that have one each.
    """

    runs: list[tuple[Run, list[int], list[int]]] = field(default_factory=list)
    lone: LoneRows = field(default_factory=LoneRows)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step that the device may still be busy with.

    Attributes:
        parts: Tokens it chooses and beams it selects, or what that raised, each with those who take them, batch by
            batch, and their rows; and the rows that the first tokens are for.
        offers: Blocks that it filled, to be shared if they are finite, and
        check: sums that tell, or what asking for them raised; `None`: there are no offers.
        is_decode: Whether the logits of all its tokens were wanted.
    """

    number: int
    rows: StepRows
    is_stalled: bool
    timer: DeviceTimer
    parts: list[_Part]
    offers: list[Offer]
    check: ToHost | Exception | None
    is_decode: bool


class StepExecutor:
    """Runs steps in two halves: `launch` queues one on the device, `collect` hands out the tokens that it chose.

    Between the two, its sequences have a token that only the device knows, and the next step may be launched with
    it. Logits that callers want are handed to them by `launch`, as tensors that the device is still to fill.

    Attributes:
        model: The model as steps call it.
        in_flight: Steps that are launched, and whose tokens are not handed out.
        leader: Where the model is shared out between ranks: tells the others of each step.
        consumers: What waits for a sequence's uncomputed tokens, and as which row.
        num_prefill_tokens: The tokens computed beyond one a sequence and step.
        is_handing_out: The tokens of a step are on their way to their requests.
        step_listeners: Called when all of them are there, with the step lock held and not the pool's.
    """

    def __init__(
        self,
        pool: KVPool,
        model: BoundModel,
        runner: ModelRunner,
        look_at_weights: Callable[..., None],
        check_rows: Callable[[], None],
    ) -> None:
        """Serves one pool and one model.

        Args:
            pool: Tables and tensor.
            model: The model.
            runner: Runs its steps.
            look_at_weights: Finds out whether the model has changed, before a step is scheduled and before what it
                computed is shared. Called with the pool's lock held.
            check_rows: Raises if what a step of all callers' rows has computed is spoilt by hooks for one call's.
        """
        self._pool = pool
        self.model = model
        self._runner = runner
        self.look_at_weights = look_at_weights
        self._check_rows = check_rows
        self.in_flight: deque[_StepInFlight] = deque()
        self._tables: dict[torch.device, TokenTable] = {}
        self.consumers: dict[int, tuple[Run, int]] = {}
        self.leader: Leader | None = None
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.is_handing_out = False
        self.step_listeners: list[Callable[[], None]] = []

    @property
    def overlaps(self) -> bool:
        """Whether the next step starts before the last one is over.

        Not where a user's code runs in the model: rows that have ended would show it one token too many.
        """
        setting = self._pool.config.use_async_batching
        is_asked = self._pool.kv_device.type == "cuda" if setting is None else setting
        # Else a row would have run with its old keys before it can be known that they are to be computed again.
        return is_asked and self._pool.config.on_weight_change == "continue" and self.model.is_plain

    @property
    def draw_grid(self) -> DrawGrid | None:
        """How the device draws, if rows are sampled in one kernel there."""
        grid = draw_grid(self._pool.kv_device)
        return None if isinstance(grid, str) else grid

    def token_table(self, device: torch.device) -> TokenTable:
        """Where rows keep tokens for processors and criteria that look at them. The pool's lock is held."""
        return self._tables.setdefault(device, TokenTable(device))

    def launch(self, batch: Batch, called: CalledForward | None = None) -> Any:
        """Queues a step. Takes it back if the model raises. The step lock is held.

        Args:
            called: The caller's forward that it is, if it is one in its caller's shape.

        Returns:
            What the model's forward does, for that caller; else the logits, which are handed out here.
        """
        pool = self._pool
        try:
            attention = pool.attention
            device = attention.kv_cache.device
            with on_steps_stream(device), autocasting(batch.batch_key):
                embeddings = self._embeddings(batch) if batch.embedded else None
                sources = self._sources(batch)
                chosen = None if batch.placeholders is None else self._chosen_before()
                tell = None
                if self.leader is not None:
                    moves = self._runner.moves() if called is None else None
                    self._runner.follow(moves)
                    tell = partial(self.leader.step, batch, embeddings=embeddings, chosen=chosen, moves=moves)
                pool.execute_moves(batch, attention, tell)
                if self.leader is not None and chosen is not None:
                    from_first_rank(self.model.model, chosen)
                timer = DeviceTimer(device)
                if called is None:
                    self._check_rows()
                    output = self._runner.run(batch, attention, embeddings, chosen, sources)
                    self._check_rows()
                else:
                    output = self._runner.padded.run_called(batch, attention, called)
        except BaseException as error:
            if self.leader is not None:  # the others are in the midst of what this rank has left
                self.leader.fail(f"rank 0: {type(error).__name__}: {error}")
            with pool.lock:
                pool.scheduler.undo(batch)
            raise
        with pool.lock, on_steps_stream(device):
            scheduler = pool.scheduler
            chunks = scheduler.chunks(batch)
            rows, block_size = StepRows.of(chunks), pool.config.block_size
            filled = [sequence for sequence, start, count in chunks if (start + count) % block_size < count]
            if filled:
                self.look_at_weights()
            offers = scheduler.update(batch, is_checked=False)
            check = _check(attention.kv_cache, offers) if offers else None
            self.num_steps = pool.log.step = self.num_steps + 1
            self.num_prefill_tokens += len(batch.token_ids) - len(batch.seq_ids)
            pool.record_peak()
            takers = self._takers(batch) if called is None else _Takers()
        raised: BaseException | None = None
        if self.in_flight and any(run.chooses_by_tokens and rows for run, rows, _ in takers.runs):
            # The device is busy with this step's forward meanwhile: what a grammar allows is known before its end.
            raised = self._collect_all()
            with pool.lock:
                takers = self._takers(batch)  # rows may have ended, whose places in tables are another's then
        with pool.lock, on_steps_stream(device):
            parts = self._deliver(batch, takers, output)
            is_decode = len(batch.logit_rows) == len(batch.token_ids)
            step = _StepInFlight(self.num_steps, rows, batch.is_stalled, timer, parts, offers, check, is_decode)
            self.in_flight.append(step)
            timer.stop()
        try:
            if raised is not None:
                raise raised
        finally:
            del raised  # whose traceback holds this frame
        return output

    def _collect_all(self) -> BaseException | None:
        """Hands out all tokens that are on their way; what a listener raises is for later."""
        try:
            while self.in_flight:
                self.collect()
        except BaseException as error:
            return error
        return None

    def collect(self) -> None:
        """Hands out the tokens of the oldest step in flight, as soon as they are there. The step lock is held."""
        done = self.in_flight.popleft()
        is_finite = [False] * len(done.offers)
        seconds = 0.0
        failure: Exception | None = None
        try:
            if isinstance(done.check, ToHost):
                is_finite = done.check.wait().isfinite().tolist()
        except Exception as error:  # no row's in particular: out of memory, a kernel that failed
            failure = error
        outcomes: list[Outcome] = []
        errors: list[Exception | None] = []
        for part, takers, _ in done.parts:
            found = failure or part
            try:
                outcomes += [found] * len(takers) if isinstance(found, Exception) else found.read()
            except Exception as error:
                found = error
                outcomes += [error] * len(takers)
            errors.append(found if isinstance(found, Exception) else None)
        try:
            seconds = done.timer.seconds()
        except Exception as error:
            outcomes, errors = [error] * len(outcomes), [error] * len(errors)
        with self._pool.lock:
            if done.offers:  # before rows end, whose blocks are free then
                self._pool.scheduler.settle(done.offers, is_finite)
            self.is_handing_out = True
            for (part, _, lone), failed in zip(done.parts, errors, strict=True):
                if failed is not None:
                    lone.fail(failed)
                elif isinstance(part, SampledTokens):
                    lone.take_tokens(part.first, self._pool.scheduler)
            takers = [taker for _, takers, _ in done.parts for taker in takers]
            for (consumer, rows), outcome in zip(takers, outcomes, strict=True):
                try:
                    consumer.take_tokens(rows, outcome)
                except Exception as error:
                    consumer.fail(error)
            self.is_handing_out = False
            self._note(done, seconds)
            num_tokens, num_rows = done.rows.num_tokens, len(done.rows.columns[0])
            if not done.is_decode and num_tokens > 4 * num_rows:
                self._pool.cost.note_prefill(num_tokens, seconds)
        call_all(self.step_listeners)

    def _embeddings(self, batch: Batch) -> Tensor:
        """`[E, hidden_size]`, what the batch's tokens of `embedded` were given as; in slices, as it was given."""
        parts: list[Tensor] = []
        first: GivenToken | None = None
        count = 0
        for sequence, start, num_tokens in self._pool.scheduler.chunks(batch):
            for token in sequence.token_ids[start : start + num_tokens]:
                if not isinstance(token, GivenToken) or token.embeddings is None:
                    continue
                if first is None or token.embeddings is not first.embeddings or token.index != first.index + count:
                    if first is not None:
                        parts.append(first.embeddings[first.index : first.index + count])
                    first, count = token, 0
                count += 1
        assert first is not None
        parts.append(first.embeddings[first.index : first.index + count])
        width = max(part.shape[-1] for part in parts)  # some may have more than an embedding
        return torch.cat([nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts])

    def _sources(self, batch: Batch) -> Tensor | None:
        """`[sum of lengths, hidden_size]`, what encoders have made of the batch's fresh sources, one after another."""
        if batch.sources is None or not batch.sources.fresh:
            return None
        chunks = self._pool.scheduler.chunks(batch)
        read = [chunks[row][0].source for row in batch.sources.fresh]
        states = [source.states for source in read if source is not None]
        hand_out(states)  # made on a caller's stream
        return torch.cat(states)

    def _chosen_before(self) -> Tensor:
        """The tokens that the step before has chosen."""
        chosen = self.in_flight[-1].parts[0][0]  # what rows sample comes before what beams select
        assert isinstance(chosen, SampledTokens)
        return chosen.tokens

    def _takers(self, batch: Batch) -> _Takers:
        """Those whose rows a step has computed, but for rows that have ended since."""
        by_consumer: dict[int, tuple[Run, list[int], list[int]]] = {}
        lone = LoneRows()
        starts, consumers = batch.logit_starts.tolist(), self.consumers
        for place, seq_id in enumerate(batch.seq_ids):
            if seq_id not in consumers:
                continue
            consumer, row = consumers[seq_id]
            if consumer.lone is not None and starts[place + 1] == starts[place] + 1:
                lone.runs.append(consumer)
                lone.sources.append(starts[place])
                continue
            _, rows, places = by_consumer.setdefault(id(consumer), (consumer, [], []))
            if starts[place + 1] > starts[place]:
                rows.append(row)
                places.append(place)
        return _Takers(list(by_consumer.values()), lone)

    def _deliver(self, batch: Batch, step: _Takers, logits: Any) -> list[_Part]:
        """Hands callers their logits, has the tokens of the engine's rows chosen, and beams selected."""
        lone = step.lone
        batches: list[SamplingBatch] = []
        takers: list[tuple[Run, list[int]]] = []
        beams: list[BeamBatch] = []
        beam_takers: list[tuple[Run, list[int]]] = []
        for consumer, rows, places in step.runs:
            try:
                for own in consumer.take(batch, rows, places, logits):
                    if isinstance(own, SamplingBatch):
                        batches.append(own)
                        takers.append((consumer, own.rows))
                    else:
                        beams.append(own)
                        beam_takers.append((consumer, own.prompts))
            except Exception as error:
                consumer.fail(error)
        parts: list[_Part] = []
        if batches or lone.runs:
            try:
                chosen = sample_tokens(batches, logits, lone.choose(logits) if lone.runs else None)
                parts.append((chosen, takers, lone))
            except Exception as error:
                parts.append((error, takers, lone))
            else:
                lone.add_placeholders(self._pool.scheduler)
                for (consumer, rows), first in zip(takers, chosen.places, strict=True):
                    # Rows without a token wait, and fail when those of the step before are known: they may have ended
                    # with it.
                    if not isinstance(first, Exception):
                        consumer.add_placeholders(rows, first)
        if beams:
            try:
                parts.append((select_beams(beams, logits), beam_takers, LoneRows()))
            except Exception as error:
                parts.append((error, beam_takers, LoneRows()))
        return parts

    def _note(self, step: _StepInFlight, seconds: float) -> None:
        """Writes a step, with all that it led to, into the log. The pool's lock is held."""
        rows, queues = step.rows, self._pool.scheduler.queues
        self._pool.log.add_step(
            step.number,
            num_seqs=len(rows.columns[0]),
            num_tokens=rows.num_tokens,
            num_decode=rows.num_decode,
            num_prefill_tokens=rows.num_tokens - rows.num_decode,
            seconds=seconds,
            chunks=rows.columns,
            num_waiting=len(queues.waiting.groups),
            num_swapped=queues.num_to_swap_in,
            is_stalled=step.is_stalled,
            num_free_blocks=self._pool.manager.pool.num_free,
        )


def _check(kv_cache: KVCache, offers: list[Offer]) -> ToHost | Exception:
    try:
        return kv_cache.block_sums([offer.block_id for offer in offers], [offer.group for offer in offers])
    except Exception as error:  # out of memory: the step is over, only its blocks are not shared
        return error


def autocasting(batch_key: Any) -> AbstractContextManager[Any]:
    """The autocast state of the calls that this thread works for; it has none of its own."""
    device_type, enabled, dtype = batch_key
    if not enabled and not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype, enabled=enabled)


def autocast_state(device: torch.device) -> tuple[str, bool, torch.dtype]:
    """The calling thread's autocast state, hashable."""
    if not torch.amp.is_autocast_available(device.type):
        return "cpu", False, torch.bfloat16
    return device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
