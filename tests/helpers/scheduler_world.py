"""Random requests through Scheduler and BlockManager, with memories and a "model" that notice every token gone wrong.

`World` plays the engine: requests arrive, steps run, finish, fail or run inside one another, callers give up. The model
that computes a token's K/V is a hash of the token, of its position and of what the *memory* holds for the token before
it, read through the block table. So a missed copy, a block given away too early, a stale prefix hit, a swap to the
wrong place or a chunk that does not continue where the last one ended shows as a sequence that does not read back what
it should hold.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from helpers.event_ledger import Ledger
from hf_paged.core.batch import Batch, BlockMoves, Chunk
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.scheduler import Scheduler
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus

MAX_ROWS = 10
MAX_LENGTH = 28
WAITING, RUNNING, SWAPPED = SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED
WINDOWS: list[tuple[int | None, ...]] = [
    (None,),
    (3,),
    (None,),
    (None, 4),
    (None,),
    (2, 6, None),
]  # of groups of layers


@dataclass(eq=False)
class Row:
    """A sequence and what must become of it.

    Attributes:
        inputs: Its tokens; one whose id was not told is a number of its own.
        values: Their K/V.
        has_logits: Whether the logits of its last token were handed out.
        target: Length at which it ends, if the engine samples it.
    """

    sequence: Sequence
    request: Request
    inputs: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    has_logits: bool = True
    target: int = 0

    def copy(self, sequence: Sequence) -> Row:
        return Row(sequence, self.request, self.inputs.copy(), self.values.copy(), self.has_logits, self.target)


@dataclass(eq=False)
class Request:
    """A caller's rows.

    Attributes:
        kind: "samples": rows that grow independently of each other; "beams": rows that grow together, each from any of
            them; "cache": rows of a cache, whose caller runs one forward after another.
        num_rows: How many rows the prompt is forked to.
        forwards: How many forwards more a caller will run.
    """

    kind: str
    num_rows: int = 1
    forwards: int = 0
    key: int = 0
    rows: list[Row] = field(default_factory=list)

    @property
    def groups(self) -> list[SequenceGroup]:
        return list({row.sequence.group.arrival: row.sequence.group for row in self.rows}.values())

    @property
    def is_between_forwards(self) -> bool:
        """Whether it is a cache between two forwards."""
        return self.kind == "cache" and all(row.has_logits for row in self.rows)


class WatchedScheduler(Scheduler):
    """Notes which groups are run row by row."""

    events: Counter[str]
    split: set[SequenceGroup]  # by the last `schedule`

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        run_part = self._rows.run_part

        def watched(step: Any, group: SequenceGroup) -> bool:
            num_before = len(step.chunks)
            self.split.add(group)
            is_running = run_part(step, group)
            num_rows = len(step.chunks) - num_before
            num_wanted = sum(sequence.num_wanted_tokens > 0 for sequence in group.sequences)
            self.events["one row of a group"] += 1 == num_rows < num_wanted
            self.events["some rows of a group"] += 1 < num_rows < num_wanted
            return is_running

        self._rows.run_part = watched  # type: ignore[method-assign]


@dataclass
class Before:
    """What `schedule` found."""

    status: dict[SequenceGroup, SequenceStatus]
    waiting: list[SequenceGroup]
    computed: dict[Row, int]
    fixed: dict[Row, list[int]]


class World:
    """Scheduler, manager and memories, and operations whose arguments are any small integers."""

    def __init__(
        self,
        rng: random.Random,
        num_blocks: int,
        block_size: int,
        budget: int,
        max_num_seqs: int,
        num_swap_blocks: int = 0,
        caching: bool = True,
        overlaps: bool = False,
        windows: tuple[int | None, ...] = (None,),
        scheduler: Callable[..., WatchedScheduler] = WatchedScheduler,
    ) -> None:
        self.rng = rng
        self.overlaps = overlaps
        # Of each step in flight: rows with tokens that the device has chosen, and with what (None: it was the last).
        self.expected: list[list[tuple[Row, int | None]]] = []
        num_blocks, num_swap_blocks = num_blocks * len(windows), num_swap_blocks * len(windows)
        self.manager = BlockManager(num_blocks, block_size, caching, num_swap_blocks, windows=windows)
        self.scheduler = scheduler(self.manager, budget, max_num_seqs, prefers_swap=lambda group: rng.random() < 0.5)
        self.events = self.scheduler.events = Counter()
        self.ledger = Ledger()
        self.pool = self.manager.pool
        self.block_size = block_size
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.max_length = min(MAX_LENGTH, num_blocks // len(windows) * block_size)
        self.requests: list[Request] = []
        self.rows: dict[Sequence, Row] = {}
        self.pinned: list[SequenceGroup] = []
        self.in_flight: dict[Row, list[int]] = {}  # rows of the step that is running, with their tables
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.cpu_slots: list[list[int | None]] = [[None] * block_size for _ in range(num_swap_blocks)]
        self.history: list[list[int]] = [[]]  # tokens of what was freed lately: prompts worth asking for again
        self.next_unknown = 1_000_000
        self.num_steps = 0
        self.steps_since_logits = 0

    # Operations. Each is complete: whatever the arguments, it does something that must be answered rightly.

    def submit(
        self,
        kind: str,
        source: int,
        cut: int,
        added: list[int],
        num_rows: int = 1,
        grows: int = 4,
        key: int = 0,
        priority: int = 0,
        batch_key: int = 0,
        has_no_ids: bool = False,
        keeps_logits: bool = True,
    ) -> Request | None:
        """A request arrives.

        Args:
            source, cut, added: Its prompt: the beginning of an earlier one, without its last `cut` tokens, and more.
            grows: Tokens (or forwards) to come.
            has_no_ids: The prompt is given as embeddings (only by callers).
            keeps_logits: Whether only the last token's logits are wanted: the prefix may come from the cache.
        """
        if len(self.rows) + num_rows > MAX_ROWS:
            return None
        known = [*self.history, *(row.inputs for row in self.rows.values())]
        beginning = known[source % len(known)]
        prompt = [token for token in beginning[: max(0, len(beginning) - cut)] if token < 1000] + added
        prompt = prompt[: self.max_length - 1] or added[:1]
        request = Request(kind, num_rows, grows, key)
        self.requests.append(request)
        one_group = kind != "cache" or bool(grows % 2)  # rows of a cache may be in one group, or each in its own
        group = None
        for index in range(num_rows if kind == "cache" else 1):
            if group is None or not one_group:
                group = self.scheduler.new_group(priority, batch_key, request)
            row = Row(self.scheduler.new_sequence(group), request)
            row.sequence.extra_key = (key,)
            row.target = min(len(prompt) + grows, self.max_length)
            request.rows.append(row)
            self.rows[row.sequence] = row
            self._extend(row, prompt[index:] or prompt, has_no_ids and kind == "cache")
            row.sequence.logits_from = row.sequence.num_tokens - 1 if keeps_logits else 0
        return request

    def forward(self, pick: int, added: list[int], has_no_ids: bool) -> None:
        """A caller's next forward over its cache."""
        request = self._pick_thinking(pick)
        if request is None:
            return
        for group in request.groups:
            if group.is_idle:
                self.scheduler.queues.renew(group)
                group.is_idle = False
                self.events["renewal"] += 1
        for row in request.rows:
            if len(row.inputs) + len(added) > self.max_length:
                self._end(request)
                return
            if not row.sequence.is_recomputable:
                self._slide(row)
        if has_no_ids and any(row.sequence.num_uncomputed_tokens for row in request.rows):
            has_no_ids = False  # the engine would have to bring them back first
        request.forwards -= 1
        for row in request.rows:
            self._extend(row, added, has_no_ids)
            row.sequence.logits_from = max(0, row.sequence.num_tokens - 1)

    def lay_aside(self, pick: int) -> None:
        """A caller keeps its cache for later."""
        request = self._pick_thinking(pick)
        for group in request.groups if request is not None else ():
            group.is_idle = True

    def crop(self, pick: int, cut: int) -> None:
        request = self._pick_thinking(pick)
        if request is None:
            return
        row = request.rows[cut % len(request.rows)]
        num_tokens = max(0, len(row.inputs) - cut)
        self.events[f"crop while {row.sequence.group.status}"] += num_tokens < len(row.inputs)
        if not self.scheduler.can_crop(row.sequence, num_tokens):
            self.events["crop refused"] += 1
            assert not row.sequence.is_recomputable
            with pytest.raises(ValueError, match="given back"):
                self.scheduler.crop(row.sequence, num_tokens)
            return
        is_kept = self.manager.can_crop(row.sequence.seq_id, num_tokens)
        self.scheduler.crop(row.sequence, num_tokens)
        assert is_kept or not row.sequence.num_computed_tokens
        self.events["crop beyond a window"] += not is_kept
        del row.inputs[num_tokens:], row.values[num_tokens:]

    def keep_past(self, pick: int) -> None:
        """A caller is to cut its rows back to where they are now."""
        request = self._pick_thinking(pick)
        for row in request.rows if request is not None else ():
            self.manager.keep_past(row.sequence.seq_id)

    def fork(self, pick: int) -> None:
        """A copy of a cache: its rows share the blocks and go their own ways."""
        request = self._pick_thinking(pick)
        if request is None or len(self.rows) + len(request.rows) > MAX_ROWS:
            return
        copy = Request("cache", request.num_rows, request.forwards, request.key)
        self.requests.append(copy)
        for row in request.rows:
            parent = row.sequence.group
            self.events[f"fork while {parent.status}"] += 1
            group = self.scheduler.new_group(parent.priority, parent.batch_key, copy)
            child = row.copy(self.scheduler.fork(row.sequence, group))
            child.request = copy
            copy.rows.append(child)
            self.rows[child.sequence] = child

    def reorder(self, pick: int) -> None:
        """`reorder_cache`: every row continues the first one."""
        request = self._pick_thinking(pick)
        if request is None or len({id(row.sequence.group) for row in request.rows}) > 1:
            return
        for row in request.rows[1:]:
            self._replace(row, request.rows[0])

    def pin(self, pick: int) -> None:
        """A caller reads keys and values: the group stays where it is meanwhile."""
        if len(self.pinned) < 2 and (groups := [g for g in self.scheduler.queues.groups if g.status is RUNNING]):
            group = groups[pick % len(groups)]
            group.num_pins += 1
            self.pinned.append(group)

    def unpin(self) -> None:
        if self.pinned:
            self.pinned.pop(0).num_pins -= 1

    def cancel(self, pick: int) -> None:
        """The caller that waits gives up, in whatever state the request is."""
        candidates = [r for r in self.requests if not self._is_in_flight(r)]
        if not candidates:
            return
        request = candidates[pick % len(candidates)]
        state = "idle" if request.is_between_forwards else str(request.rows[0].sequence.group.status)
        self.events[f"cancel while {state}"] += 1
        self._end(request)

    def drop_row(self, pick: int) -> None:
        """One of several rows ends before the others."""
        candidates = [r for r in self.requests if r.kind != "beams" and len(r.rows) > 1 and not self._is_in_flight(r)]
        if candidates:
            row = candidates[pick % len(candidates)].rows[pick // 2 % 2]
            self.events[f"row dropped while {row.sequence.group.status}"] += 1
            self._free(row)

    def give_up(self, pick: int) -> None:
        """A caller's forward is interrupted: no thread waits, and the scheduler isn't told before it is asked."""
        candidates = [
            r for r in self.requests if r.kind == "cache" and not r.is_between_forwards and not self._is_in_flight(r)
        ]
        if not candidates:
            return
        self._stop_waiting(candidates[pick % len(candidates)].rows)
        self.events["forward interrupted"] += 1

    def reset_prefix_cache(self) -> None:
        self.manager.prefix.reset()

    def make_room(self, num_blocks: int) -> None:
        """A caller needs blocks outside of a step."""
        self.settle()
        kept = [request for request in self.requests if request.is_between_forwards][:1]
        protected = [group for request in kept for group in request.groups]
        before = {row: self._table(row) for request in kept for row in request.rows}
        self._execute_copies(BlockMoves(swap_outs=self.scheduler.preemption.make_room(num_blocks, protected)))
        assert before == {row: self._table(row) for row in before}, "a protected group was preempted"
        if self.pool.num_free < num_blocks:
            assert not self._preemptible(protected), "some could have been preempted"

    def swap_in_now(self, pick: int) -> None:
        """A swapped cache is read."""
        self.settle()
        swapped = [g for g in self.scheduler.queues.groups if g.status is SWAPPED]
        if not swapped:
            return
        group = swapped[pick % len(swapped)]
        try:
            step = self.scheduler.preemption.swap_in_now(group)
        except OutOfBlocksError as error:
            assert error.group is group and group.status is SWAPPED
            self._execute_copies(BlockMoves(swap_outs=error.swap_outs))
        else:
            assert group.status is RUNNING
            self.events["swapped in at once"] += 1
            self._execute_copies(step)

    def add_unknown_tokens(self, pick: int, num_tokens: int) -> None:
        """A caller's forward that is a step by itself, of tokens that can't be computed again."""
        self.settle()
        request = self._pick_thinking(pick)
        if request is None or any(
            row.sequence.num_uncomputed_tokens
            or row.sequence.group.status is SWAPPED
            or len(row.inputs) + num_tokens > self.max_length
            for row in request.rows
        ):
            return
        sequences = [row.sequence for row in request.rows]
        known = [(sequence.token_ids, sequence.is_recomputable) for sequence in sequences]
        for sequence in sequences:
            sequence.token_ids = sequence.token_ids + [0] * num_tokens
            sequence.is_recomputable = False
            sequence.num_tokens += num_tokens
        try:
            batch = self.scheduler.schedule_together(sequences)
        except OutOfBlocksError as error:
            self._execute_copies(BlockMoves(swap_outs=error.swap_outs))
            for sequence, (token_ids, is_recomputable) in zip(sequences, known):
                sequence.token_ids, sequence.is_recomputable = token_ids, is_recomputable
                sequence.num_tokens -= num_tokens
            assert not self._preemptible(request.groups), "some could have been preempted"
            return
        self._execute_copies(batch)
        self.scheduler.update(batch)
        for row in request.rows:
            start = len(row.inputs)
            row.sequence.num_tokens -= num_tokens  # which follows
            del row.sequence.token_ids[-num_tokens:]
            self._extend(row, [0] * num_tokens, has_no_ids=True)
            self._stop_waiting([row])
            self._write_tokens(row, start, num_tokens)
        self.events["grown from outside"] += 1

    def release(self) -> None:
        """The pool's memory is given back, unless something in it can't be computed again."""
        self.settle()
        holders = [group for group in self.scheduler.queues.groups if group.status is not WAITING]
        fixed = [g for g in holders if g.num_pins or self.scheduler.queues.is_in_flight(g) or not g.is_recomputable]
        before = (self.pool.num_in_use, self.manager.swap.num_in_use)
        assert self.scheduler.preemption.preempt_all() == sum(len(group.sequences) for group in fixed)
        assert (self.pool.num_in_use, self.manager.swap.num_in_use) == (before if fixed else (0, 0))
        if not fixed:
            self.events["release of a filled pool"] += bool(holders)
            self.manager.prefix.reset()
            self.slots = [[None] * self.block_size for _ in self.slots]

    # A step

    def step(self, failing: bool = False, has_company: bool = False, max_tokens: int | None = None) -> bool:
        """What the engine's worker does; False if nothing could run.

        `failing`: it raises in the model; `has_company`: callers come and go while it runs.
        """
        step = self._schedule(max_tokens=max_tokens)
        if step is None:
            return True
        if not step.num_seqs:
            if self.settle():
                return True
            if not self.scheduler.queues.has_work:
                self._check_nothing_waits()
                return False
            step = self._schedule(forced=True, max_tokens=max_tokens)
            if step is None:
                return True
            assert step.num_seqs, "nothing runs although all may be preempted"
            self.events["forced"] += 1
        if failing:
            self._fail(step)
        else:
            self._run(step, has_company)
            self.settle(num_kept=1)
        return True

    def settle(self, num_kept: int = 0) -> bool:
        """The host gets to know tokens; some are ends that were not foreseen."""
        is_any = len(self.expected) > num_kept
        while len(self.expected) > num_kept:
            for row, token in self.expected.pop(0):
                sequence = row.sequence
                if sequence not in self.rows:
                    continue  # cancelled, or ended one step earlier
                if token is None or self.rng.random() < 0.1:
                    self.events["ended while it ran"] += token is not None and sequence.num_computed_tokens > len(
                        sequence.token_ids
                    )
                    self._free(row)
                    if not row.request.rows:
                        self.requests.remove(row.request)
                else:
                    self.scheduler.resolve_token(sequence, token)
        return is_any

    def _schedule(
        self, forced: bool = False, only: Request | None = None, max_tokens: int | None = None
    ) -> Batch | None:
        """The next step, its copies executed; `None`: a group does not fit and was failed."""
        before, self.scheduler.split = self._before(), set()
        preemptions, swapped_out = self.scheduler.preemption.num_preemptions, self.scheduler.preemption.num_swapped_out
        try:
            step = self.scheduler.schedule(forced=forced, only=only, max_tokens=max_tokens)
        except OutOfBlocksError as error:
            assert forced
            self._check_out_of_blocks(error, before)
            return None
        self.num_steps += 1
        swapped = self.scheduler.preemption.num_swapped_out - swapped_out
        assert step.num_preempted == self.scheduler.preemption.num_preemptions - preemptions
        self.events["preemption by swap"] += swapped
        self.events["preemption by recomputation"] += step.num_preempted - swapped
        self.events["group rescheduled"] += bool(step.num_preempted and step.num_seqs)
        self._check_step(step, before, forced, only, max_tokens)
        self._execute_copies(step)
        return step

    def _execute_copies(self, step: BlockMoves) -> None:
        slots, cpu_slots = self.slots, self.cpu_slots
        for source, destination in step.swap_outs:
            cpu_slots[destination] = slots[source].copy()
        for source, destination in step.swap_ins:
            slots[destination] = cpu_slots[source].copy()
        self.events["swap-in"] += len(step.swap_ins)
        if step.block_copies:
            destinations = [destination for _, destination in step.block_copies]
            assert len(set(destinations)) == len(destinations)
            self.events["copy-on-write"] += len(destinations)
            content = [slots[source].copy() for source, _ in step.block_copies]
            for destination, copied in zip(destinations, content):
                slots[destination] = copied
        for block_id in step.new_blocks:
            slots[block_id] = [0] * self.block_size

    def _run(self, step: Batch, has_company: bool = False) -> None:
        chunks = self._chunks(step)
        self._write(chunks)
        if has_company:
            self._meanwhile(step)
        for sequence, start, num_tokens in chunks:
            row, end = self.rows[sequence], start + num_tokens
            assert self._stored(row, end) == row.values[:end], "a chunk was overwritten in its own step"
        self.scheduler.update(step)
        for sequence, start, num_tokens in chunks:
            assert sequence.num_computed_tokens == start + num_tokens
            assert not self.scheduler.queues.is_in_flight(sequence.group)
        self._deliver(chunks)

    def _chunks(self, step: Batch) -> list[Chunk]:
        """What runs in a step, whose data says so, too."""
        chunks = self.scheduler.chunks(step) if step.num_seqs else []
        assert step.chunks == [(sequence.seq_id, start, n) for sequence, start, n in chunks]
        return chunks

    def _check_data(self, step: Batch, chunks: list[Chunk]) -> None:
        """The step's own copies say what sequences and tables do."""
        ids, logit_rows = [], []
        blocks: list[list[int]] = [[] for _ in step.tables]
        for row, (sequence, start, num_tokens) in enumerate(chunks):
            known, end = sequence.token_ids, start + num_tokens
            ids += known[start:end] if end <= len(known) else [0]
            place = len(ids) - 1
            assert list(step.positions[place + 1 - num_tokens : place + 1]) == list(range(start, end))
            if end > len(known):
                assert step.placeholders is not None and step.placeholders[place] == sequence.placeholder >= 0
            tables = self.manager.block_tables(sequence.seq_id)
            for own, table in zip(blocks, tables, strict=True):
                own += table
            assert all(group.counts[row] == len(tables[0]) for group in step.tables)
            if end == sequence.num_tokens:
                logit_rows.append(len(ids) - 1)
            assert step.logit_starts[row + 1] == len(logit_rows)
        assert step.token_ids.tolist() == ids and step.num_tokens == len(ids)
        assert step.logit_rows.tolist() == logit_rows
        assert not step.state_blocks and not step.nums_at_once, "these layers keep no states"
        assert [group.blocks.tolist() for group in step.tables] == blocks
        assert pickle.loads(pickle.dumps(step)) == step

    def _write(self, chunks: list[Chunk]) -> None:
        """Runs the model: all of a chunk's context is read from the memory."""
        for sequence, start, num_tokens in chunks:
            row = self.rows[sequence]
            assert self._stored(row, start) == row.values[:start], "the context of a chunk is wrong"
            assert self.manager.can_crop(sequence.seq_id, start), "what the chunk sees was given back"
            self._write_tokens(row, start, num_tokens)

    def _write_tokens(self, row: Row, start: int, num_tokens: int) -> None:
        size, slots, known = self.block_size, self.slots, row.sequence.token_ids
        tables = self.manager.block_tables(row.sequence.seq_id)
        previous = row.values[start - 1] if start else None
        for index in range(start, start + num_tokens):
            token = row.inputs[index] if index >= len(known) else known[index]
            previous = _value(previous, token, index, row.request.key)
            for table in tables:
                block_id = table[index // size]
                assert self.pool.is_plain(block_id), "a block that is shared or findable is written"
                slots[block_id][index % size] = previous

    def _meanwhile(self, outer: Batch) -> None:
        """While a step runs, callers come and go on other threads, which must take nothing from it."""
        groups = {sequence.group.arrival: sequence.group for sequence, _, _ in self._chunks(outer)}.values()
        rows = [self.rows[sequence] for group in groups for sequence in group.sequences]
        self.in_flight = {row: self._table(row) for row in rows}
        computed = {row: row.sequence.num_computed_tokens for row in rows}
        self.submit("cache", self.rng.randrange(8), 1, [0, 1, 1], batch_key=self.rng.randrange(2))
        for leave in (self.cancel, self.drop_row, self.give_up):
            leave(self.rng.randrange(8))
        self.events["callers beside a step"] += 1
        for row in rows:
            assert self.scheduler.queues.is_in_flight(row.sequence.group)
            assert self._table(row) == self.in_flight[row], "a running step lost its blocks"
            assert row.sequence.num_computed_tokens == computed[row]
        self.in_flight = {}

    def _fail(self, step: Batch) -> None:
        """A step raises after its copies and some of its writes; then its owners run by themselves."""
        chunks = self._chunks(step)
        self._write(chunks[::2])
        self.scheduler.undo(step)
        self.events["undo"] += 1
        self.settle()
        for sequence, start, _ in chunks:
            assert not self.scheduler.queues.is_in_flight(sequence.group)
            if sequence in self.rows:
                assert self.manager.num_tokens(sequence.seq_id) == start
                assert sequence.num_computed_tokens == start
        self.check()
        if len(chunks) < 2:
            return
        for owner in {id(sequence.group.owner): sequence.group.owner for sequence, _, _ in chunks}.values():
            assert isinstance(owner, Request)
            again = self._schedule(only=owner)
            if again is not None and again.num_seqs:
                self.events["step of one owner"] += 1
                self._run(again)
                self.settle()

    def _deliver(self, chunks: list[Chunk]) -> None:
        """Hands out logits, and the tokens that follow from them."""
        delivered: dict[Request, list[Row]] = {}
        for sequence, _, _ in chunks:
            row = self.rows[sequence]
            if sequence.num_computed_tokens == sequence.num_tokens and not row.has_logits:
                row.has_logits = True
                if row.request.kind != "samples":
                    sequence.is_wanted = False
                delivered.setdefault(row.request, []).append(row)
        if self.overlaps:
            self.expected.append([])
        self.steps_since_logits = 0 if delivered else self.steps_since_logits + 1
        # Recomputing every live token, one a step, is the most that may lie between two rows' logits.
        limit = 60 + 3 * sum(len(row.inputs) for row in self.rows.values())
        assert self.steps_since_logits <= limit, "livelock"
        for request, rows in delivered.items():
            if request.kind == "samples":
                self._grow_samples(request, rows)
            elif request.kind == "beams" and all(row.has_logits for row in request.rows):
                self._grow_beams(request)

    def _grow_samples(self, request: Request, rows: list[Row]) -> None:
        if len(request.rows) < request.num_rows:
            rows = [*rows, *(self._fork_row(rows[0]) for _ in range(request.num_rows - 1))]
            request.num_rows = 1
        for row in rows:
            if self.overlaps:
                self._expect(row)
            elif len(row.inputs) >= row.target:
                self._free(row)
            else:
                self._extend(row, [self.rng.randrange(2)])
        if not request.rows:
            self.requests.remove(request)

    def _expect(self, row: Row) -> None:
        """The device has chosen the row's next token; the host knows only whether there is to be another one."""
        sequence, token = row.sequence, self.rng.randrange(2)
        if len(row.inputs) >= row.target:
            sequence.is_wanted = False
            self.expected[-1].append((row, None))
            return
        row.values.append(_value(row.values[-1], token, len(row.inputs), row.request.key))
        row.inputs.append(token)
        row.has_logits = False
        self.scheduler.add_placeholder(sequence, len(self.expected[-1]))
        self.expected[-1].append((row, token))

    def _grow_beams(self, request: Request) -> None:
        if len(request.rows[0].inputs) >= request.rows[0].target:
            self._end(request)
            return
        parents = [self.rng.choice(request.rows) for _ in range(request.num_rows)]
        old = request.rows.copy()
        children = [self._fork_row(parent) for parent in parents]
        for row in old:
            self._free(row)
        for child in children:
            self._extend(child, [self.rng.randrange(2)])

    # What must hold

    def check(self) -> None:
        """The whole state, between steps."""
        self.manager.check_invariants()
        self.ledger.follow(self.manager)
        for row in self.rows.values():
            sequence = row.sequence
            assert sequence.num_tokens == len(row.inputs)
            known = sequence.token_ids
            assert known == row.inputs[: len(known)]
            assert len(known) == len(row.inputs) or sequence.has_placeholders
            if row not in self.in_flight:
                computed = sequence.num_computed_tokens
                assert self.manager.num_tokens(sequence.seq_id) == computed <= sequence.num_tokens
                assert self._stored(row, computed) == row.values[:computed], f"{sequence.seq_id} lost its content"
        resident = 0
        for group in self.scheduler.queues.groups:
            computed = [s for s in group.sequences if s.num_computed_tokens]
            is_swapped = {self.manager.by_id[s.seq_id].is_swapped for s in computed}
            match group.status:
                case SequenceStatus.WAITING:
                    assert not computed, "a waiting group holds blocks"
                case SequenceStatus.SWAPPED:
                    assert is_swapped == {True}, "a swapped group is not swapped as a whole"
                case SequenceStatus.RUNNING:
                    assert is_swapped <= {False}, "a running group is partly swapped"
                    resident += 0 if group.is_idle else len(group.sequences)
        assert self.scheduler.queues.num_running == resident
        assert self.scheduler.queues.num_waiting + self.scheduler.queues.num_swapped <= len(self.rows)
        assert self.scheduler.queues.in_flight == {row.sequence.group.arrival for row in self.in_flight}
        assert {s for group in self.scheduler.queues.groups for s in group.sequences} == set(self.rows)
        assert self.manager.swap.num_in_use <= self.pool.num_blocks
        assert 0 <= self.manager.prefix.hit_tokens <= self.manager.prefix.query_tokens

    def _before(self) -> Before:
        status = {group: group.status for group in self.scheduler.queues.groups}
        return Before(
            status,
            [group for group, where in status.items() if where is WAITING and group.has_work],
            {row: row.sequence.num_computed_tokens for row in self.rows.values()},
            {
                row: self._table(row)
                for group in self.pinned
                if group.status is RUNNING
                for row in map(self.rows.__getitem__, group.sequences)
            },
        )

    def _check_step(
        self, step: Batch, before: Before, forced: bool, only: Request | None, max_tokens: int | None
    ) -> None:
        chunks = self._chunks(step)
        if chunks:
            self._check_data(step, chunks)
        assert len(chunks) <= self.max_num_seqs
        assert step.num_tokens <= min(self.budget, max_tokens or self.budget)
        running = {sequence.group for sequence, _, _ in chunks}
        assert len({sequence for sequence, _, _ in chunks}) == len(chunks)
        assert len({group.batch_key for group in running}) <= 1
        assert only is None or all(group.owner is only for group in running)
        assert chunks or not step.swap_ins, "swapped in for nothing"
        for sequence, start, num_tokens in chunks:
            row = self.rows[sequence]
            assert row not in self.in_flight, "scheduled twice"
            assert sequence.is_wanted and sequence.group.status is RUNNING
            assert self.scheduler.queues.is_in_flight(sequence.group)
            assert start == sequence.num_computed_tokens
            assert 0 < num_tokens <= sequence.num_uncomputed_tokens
            assert self.manager.num_tokens(sequence.seq_id) == start + num_tokens
            if start > before.computed[row]:
                assert start <= sequence.logits_from, "logits that are wanted come from the cache"
                self.events["prefix hit"] += 1
        for row, table in before.fixed.items():
            if row.sequence.group in running:
                assert len(self._table(row)) >= len(table)
            else:
                assert self._table(row) == table, "a pinned group was preempted"
        for row, table in self.in_flight.items():
            assert self._table(row) == table, "a group of a running step was preempted"
        preempted = self._check_preempted(before, running)
        self.events["preemption of an idle group"] += any(group.is_idle for group in preempted)
        self.events["chunked prefill"] += any(start + n < sequence.num_tokens for sequence, start, n in chunks)
        if only is None:
            self._check_admitted(before, running, preempted, forced)
        # All rows of a group are scheduled unless the budget or the number of rows is spent.
        if chunks:
            is_spent = len(chunks) == self.max_num_seqs or step.num_tokens == min(
                self.budget, max_tokens or self.budget
            )
            chosen = {sequence for sequence, _, _ in chunks}
            for group in running - self.scheduler.split if not is_spent else ():
                left_out = [s for s in group.sequences if s.num_wanted_tokens and s not in chosen]
                assert not any(s.num_computed_tokens for s in left_out), "a row was left out"
                is_prefilling = any(n > 1 and sequence.group is group for sequence, _, n in chunks)
                assert is_prefilling or not left_out, "a row without computed tokens was left out"

    def _check_preempted(self, before: Before, running: set[SequenceGroup]) -> set[SequenceGroup]:
        """Who gave up blocks: whole groups, idle ones first, then the newest."""
        partly = {row.sequence.group for row, n in before.computed.items() if row.sequence.num_computed_tokens < n}
        preempted = partly - self.scheduler.split
        preempted |= {g for g, where in before.status.items() if where is RUNNING is not g.status}
        for group in preempted:
            # One that was swapped and does not fit as a whole any more begins anew.
            assert group.status is not RUNNING or before.status[group] is not RUNNING, "preempted in part"
            if before.status[group] is RUNNING:
                assert group.is_recomputable or group.status is SWAPPED, "what can't be computed again is lost"
        victims = [g for g in preempted if before.status[g] is RUNNING]
        if victims:
            others = [
                g
                for g in self._preemptible(running)
                if before.status[g] is RUNNING and g.is_recomputable and g not in preempted
            ]
            for victim in victims:
                for other in others:
                    assert (other.is_idle, other.order) < (victim.is_idle, victim.order), "not the newest was preempted"
        return preempted

    def _check_admitted(
        self, before: Before, running: set[SequenceGroup], preempted: set[SequenceGroup], forced: bool
    ) -> None:
        """Who came in: first those that ran, then the swapped, then the waiting; of each the first in line."""
        swapped = [g for g, where in before.status.items() if where is SWAPPED and g.has_work]
        for queue, where in ((swapped, SWAPPED), (before.waiting, WAITING)):
            latest = max((group.order for group in queue if group.status is RUNNING), default=None)
            left = [group for group in queue if group.status is where]
            assert latest is None or all(group.order > latest for group in left), "admitted past an older group"
        admitted = [g for g in before.waiting if g.status is RUNNING]
        returned = [g for g in swapped if g.status is RUNNING]
        if forced or not admitted + returned:
            return
        if admitted:
            assert all(g.status is RUNNING for g in swapped), "a waiting group was admitted before a swapped one"
        assert not any(not group.is_idle for group in preempted), "admitted at the cost of a running group"
        key = (admitted + returned)[0].batch_key
        outer = {row.sequence.group for row in self.in_flight}
        for group, where in before.status.items():
            if where is group.status is RUNNING and group.has_work and group.batch_key == key and group not in outer:
                assert group in running, "admitted although a running group has found no room"

    def _check_out_of_blocks(self, error: OutOfBlocksError, before: Before) -> None:
        self.events["out of blocks"] += 1
        group = error.group
        assert group in before.status and not self.scheduler.queues.is_in_flight(group)
        self._execute_copies(BlockMoves(swap_outs=error.swap_outs))
        for row, table in [*before.fixed.items(), *self.in_flight.items()]:
            assert self._table(row) == table, "a group to keep was preempted"
        assert not self._preemptible([group]), "something could have been preempted"
        assert error.needed > error.free == self.pool.num_free
        is_cut = any(self.manager.by_id[s.seq_id].keeps_from is not None for s in group.sequences)
        if group.is_recomputable and not group.num_pins and not is_cut:
            # Not even its first row fits, by itself, beside what can't be preempted.
            blocks = {
                block
                for row in self.rows.values()
                if row.sequence.group is not group and not self.manager.by_id[row.sequence.seq_id].is_swapped
                for block in self._table(row)
            }
            first = next(s for s in group.sequences if s.num_wanted_tokens)
            budget = self.budget if first.num_computed_tokens else MAX_LENGTH
            length = first.num_computed_tokens + min(first.num_wanted_tokens, budget)
            needed = self.manager.most_blocks(length, self.budget) + len(self.manager.block_tables(first.seq_id))
            assert self.pool.num_blocks - len(blocks) < needed, "one row alone would fit"
        before.status.pop(group)  # its rows may have lost their blocks to each other, in vain
        before.computed = {row: n for row, n in before.computed.items() if row.sequence.group is not group}
        self._check_preempted(before, {group})
        request = group.owner
        assert isinstance(request, Request)
        if self._is_in_flight(request):
            self._stop_waiting([row for row in request.rows if row.sequence.group is group])
        else:
            self._end(request)
        self.check()

    def _check_nothing_waits(self) -> None:
        for row in self.rows.values():
            assert row in self.in_flight or not row.sequence.num_wanted_tokens, "a row waits unknown to the scheduler"

    def _preemptible(self, protected: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """Groups that could give up blocks, seen from the tables."""
        kept = {*protected, *(row.sequence.group for row in self.in_flight)}
        kept |= {group for group in self.scheduler.queues.groups if group.has_placeholders}
        swap_pool = self.manager.swap_pool
        found = []
        for group in self.scheduler.queues.groups:
            blocks = {block for s in group.sequences for block in self.manager.held_blocks(s.seq_id)}
            if group.status is RUNNING and blocks and group not in kept and not group.num_pins:
                can_swap = swap_pool is not None and len(blocks) <= swap_pool.num_free
                if group.is_recomputable or can_swap:
                    found.append(group)
        return found

    def drain(self) -> None:
        """Everything finishes, and nothing stays."""
        while self.pinned:
            self.unpin()
        while self.requests:
            for request in list(self.requests):
                if request.is_between_forwards:
                    if request.forwards > 0:
                        self.forward(self.requests.index(request), [1, 0], False)
                    if request in self.requests and request.is_between_forwards:
                        self._end(request)
            if self.requests:
                assert self.step(), "requests wait and nothing runs"
        self.check()
        assert not self.rows and not list(self.scheduler.queues.groups)
        self.settle()
        queues = self.scheduler.queues
        assert not queues.has_work and not self.step()
        assert queues.num_waiting == queues.num_running == queues.num_swapped == 0
        assert self.pool.num_in_use == self.manager.swap.num_in_use == 0

    # Helpers

    def _is_in_flight(self, request: Request) -> bool:
        return any(self.scheduler.queues.is_in_flight(row.sequence.group) for row in request.rows)

    def _pick_thinking(self, pick: int) -> Request | None:
        """The request at this place if it is a cache whose caller thinks, or the next one that is."""
        thinking = [
            request for request in self.requests if request.is_between_forwards and not self._is_in_flight(request)
        ]
        if not thinking:
            return None
        if pick < len(self.requests) and self.requests[pick] in thinking:
            return self.requests[pick]
        return thinking[pick % len(thinking)]

    def _extend(self, row: Row, tokens: list[int], has_no_ids: bool = False) -> None:
        """New tokens of a sequence that is waited for; without ids, they can't be computed again."""
        sequence = row.sequence
        if has_no_ids:
            self.next_unknown += 100
            tokens = [self.next_unknown + i for i in range(len(tokens))]
            sequence.is_recomputable = False
        sequence.token_ids += tokens
        for token in tokens:
            row.values.append(_value(row.values[-1] if row.values else None, token, len(row.inputs), row.request.key))
            row.inputs.append(token)
        sequence.num_tokens += len(tokens)
        sequence.logits_from = sequence.num_tokens - 1
        sequence.is_wanted = True
        row.has_logits = False
        self.scheduler.queues.wake(sequence.group)

    def _stop_waiting(self, rows: list[Row]) -> None:
        for row in rows:
            row.sequence.is_wanted = False
            row.has_logits = True

    def _fork_row(self, parent: Row) -> Row:
        self.events["fork"] += 1
        child = parent.copy(self.scheduler.fork(parent.sequence))
        parent.request.rows.append(child)
        self.rows[child.sequence] = child
        return child

    def _replace(self, row: Row, parent: Row) -> None:
        self._fork_row(parent)
        self._free(row)

    def _free(self, row: Row) -> None:
        group = row.sequence.group
        self.scheduler.free(row.sequence)
        del self.rows[row.sequence]
        row.request.rows.remove(row)
        self.history = [*self.history[-4:], row.inputs]
        if not group.sequences and group in self.pinned:
            self.pinned.remove(group)

    def _end(self, request: Request) -> None:
        for row in request.rows.copy():
            self._free(row)
        self.requests.remove(request)

    def _slide(self, row: Row) -> None:
        if not row.sequence.num_uncomputed_tokens and row.sequence.group.status is RUNNING:
            self.scheduler.slide(row.sequence)

    def _table(self, row: Row) -> list[int]:
        return self.manager.held_blocks(row.sequence.seq_id)

    def _stored(self, row: Row, num_tokens: int) -> list[int | None]:
        """What the blocks of the first group hold that is wrong, or of the last; behind the windows it was right."""
        table = self.manager.by_id[row.sequence.seq_id]
        slots = self.cpu_slots if table.is_swapped else self.slots
        content: list[int | None] = []
        for blocks, num_gone in zip(table.groups, table.num_gone, strict=True):
            content = [*row.values[: num_gone * self.block_size]]
            for block_id in blocks[num_gone : -(-num_tokens // self.block_size)]:
                content += slots[block_id]
            del content[num_tokens:]
            if content != row.values[:num_tokens]:
                break
        return content


def _value(before: int | None, token: int, position: int, key: int) -> int:
    return hash((before, token, position, key))


WEIGHTS = {
    "step": 80,
    "submit": 9,
    "forward": 10,
    "cancel": 2,
    "drop_row": 1,
    "give_up": 1,
    "lay_aside": 4,
    "crop": 2,
    "keep_past": 0.3,
    "fork": 1,
    "reorder": 0.7,
    "pin": 0.8,
    "unpin": 1.2,
    "make_room": 0.5,
    "swap_in_now": 1,
    "add_unknown_tokens": 0.7,
    "release": 0.5,
    "reset_prefix_cache": 0.1,
}


def random_call(world: World, rng: random.Random, weights: dict[str, float] = WEIGHTS) -> None:
    def tokens() -> list[int]:
        return [rng.randrange(2) for _ in range(rng.choice((1, 1, 1, 2, 4, 9)))]

    pick = rng.randrange(8)
    match rng.choices(list(weights), list(weights.values()))[0]:
        case "step":
            world.step(rng.random() < 0.02, rng.random() < 0.03, rng.choice((None,) * 9 + (1,)))
        case "submit":
            world.submit(
                rng.choice(("samples", "samples", "beams", "cache")),
                source=rng.randrange(12),
                cut=rng.randrange(6),
                added=tokens(),
                num_rows=rng.choice((1, 1, 2, 3)),
                grows=rng.randint(1, 14),
                key=rng.random() < 0.1,
                priority=rng.choice((0,) * 8 + (-1, 1)),
                batch_key=int(rng.random() < 0.15),
                has_no_ids=rng.random() < 0.3,
                keeps_logits=rng.random() < 0.9,
            )
        case "forward":
            world.forward(pick, tokens(), rng.random() < 0.05)
        case "cancel":
            world.cancel(pick)
        case "drop_row":
            world.drop_row(pick)
        case "give_up":
            world.give_up(pick)
        case "lay_aside":
            world.lay_aside(pick)
        case "crop":
            world.crop(pick, rng.choice((1, 1, 2, 3, 6, 100)))
        case "keep_past":
            world.keep_past(pick)
        case "fork":
            world.fork(pick)
        case "reorder":
            world.reorder(pick)
        case "pin":
            world.pin(pick)
        case "unpin":
            world.unpin()
        case "make_room":
            world.make_room(rng.randrange(1 + world.pool.num_blocks))
        case "swap_in_now":
            world.swap_in_now(pick)
        case "add_unknown_tokens":
            world.add_unknown_tokens(pick, rng.randint(1, 4))
        case "release":
            world.release()
        case "reset_prefix_cache":
            world.reset_prefix_cache()


def random_world(kind: int, rng: random.Random) -> World:
    num_blocks = rng.choice((rng.randint(1, 8), rng.randint(6, 20), rng.randint(6, 20), rng.randint(20, 40)))
    return World(
        rng,
        num_blocks,
        block_size=rng.randint(1, 4),
        budget=rng.randint(1, 7),
        max_num_seqs=rng.randint(1, 7),
        num_swap_blocks=num_blocks * rng.choice((0, 1, 2, 2)) // 2,
        caching=kind % 10 != 9,
        overlaps=kind % 2 == 1,
        windows=WINDOWS[kind // 2 % len(WINDOWS)],
    )
