"""`Batch`: one step as plain data. The runner needs nothing else, on any rank."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from operator import add, attrgetter, sub
from typing import Any

from hf_paged.core.sequence import GivenToken, Sequence, Token

Chunk = tuple[Sequence, int, int]
"""A sequence, the first of its tokens that run in a step, and how many do."""


def _int64() -> array[int]:
    return array("q")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMoves:
    """What happens to blocks before a step, in the order of these fields.

    Attributes:
        swap_outs: Block pairs `(device, CPU)`.
        swap_ins: Block pairs `(CPU, device)`.
        block_copies: Copy-on-write pairs `(source, destination)`. A block may be the source of one and, freed by it,
            the destination of another: all sources are read first.
        new_blocks: Blocks newly given to sequences.
    """

    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)


Copy = tuple[str, list[tuple[int, int]] | list[int]]
"""The name of a field of `BlockMoves`, and its blocks."""


@dataclass(frozen=True, slots=True)
class GroupTables:
    """The block tables of a batch's rows, for layers that cache alike.

    Attributes:
        blocks: int32, the rows' blocks one row after another: copies, as they are for this step. Below 0: given back,
            since no query of this or a later step sees it.
        counts: int64 `[S]`, how many of them each row has.
    """

    blocks: array[int]
    counts: array[int]


@dataclass(frozen=True, slots=True)
class SourceTables:
    """Of a batch's rows what their encoder has read.

    Attributes:
        tables: One for each group of layers that attend to it; a row without a source has no blocks.
        lens: int64 `[S]`, tokens.
        fresh: int64, the rows whose source is still to be written, in this step; others may have the same.
    """

    tables: tuple[GroupTables, ...]
    lens: array[int]
    fresh: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(BlockMoves):
    """A step: S rows (sequences) of T tokens side by side, row after row. Never changed: steps overlap.

    Arrays hold int64 numbers unless they say otherwise, and can be read as numpy's or torch's without a copy.

    Attributes:
        number: Of the step, counted by the scheduler; 0: nothing runs.
        seq_ids: `[S]`.
        starts: `[S]`, index in its sequence of each row's first token.
        query_lens: `[S]`, tokens of each row, at least 1.
        token_ids: `[T]`, 0 where it is not known here.
        positions: `[T]` position ids.
        placeholders: `[T]`, for tokens that only the device knows their place among the tokens that the step before
            has chosen, else -1; `None`: there are none.
        axes: `[T * A]`, positions of all tokens on each of A axes, token by token, if those of any differ.
        embedded: `[E]`, the tokens of the batch that were given as embeddings, which come beside it as a tensor.
        spans: Runs of tokens that see each other, whichever comes first: a row, and of its sequence's tokens the first
            of the run and that behind the last.
        logit_rows: `[K]`, the tokens of the batch whose logits are wanted, row after row.
        logit_starts: `[S + 1]`, the first of each row's in `logit_rows`.
        tables: One for each group of layers that cache alike.
        state_blocks: `[S * k]` int32, the blocks of each row's state, k for each; empty without recurrent layers. A row
            that starts at 0 has none yet: its blocks hold nothing.
        adapters: `[S]`, the slot of what is added to the model for each row, -1: nothing; empty: for none.
        nums_at_once: `[S]`, of rows with a state, the index behind the last token that came together with others.
        sources: Of rows with an encoder, what it has read; `None`: there are none.
        batch_key: What the rows have in common; see `SequenceGroup`.
        num_preempted: Sequences preempted for this step.
        is_stalled: The first waiting group did not fit.
    """

    number: int = 0
    seq_ids: array[int] = field(default_factory=_int64)
    starts: array[int] = field(default_factory=_int64)
    query_lens: array[int] = field(default_factory=_int64)
    token_ids: array[int] = field(default_factory=_int64)
    positions: array[int] = field(default_factory=_int64)
    placeholders: array[int] | None = None
    axes: array[int] | None = None
    embedded: array[int] = field(default_factory=_int64)
    spans: tuple[tuple[int, int, int], ...] = ()
    logit_rows: array[int] = field(default_factory=_int64)
    logit_starts: array[int] = field(default_factory=lambda: array("q", [0]))
    tables: tuple[GroupTables, ...] = ()
    state_blocks: array[int] = field(default_factory=lambda: array("i"))
    nums_at_once: array[int] = field(default_factory=_int64)
    adapters: array[int] = field(default_factory=_int64)
    sources: SourceTables | None = None
    batch_key: Hashable = None
    num_preempted: int = 0
    is_stalled: bool = False

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.seq_ids)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether each row is one token, whose logits are wanted."""
        return len(self.token_ids) == len(self.seq_ids) and self.logit_rows == array("q", range(len(self.seq_ids)))

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        """The sequence, first token and number of tokens of each row."""
        return list(zip(self.seq_ids, self.starts, self.query_lens, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with bytes in place of arrays, which take several times as long: each rank gets each step."""
        tables = [table.blocks.tobytes() for table in self.tables]
        counts = self.tables[0].counts.tobytes() if tables else b""  # the same in all groups
        values = [value.tobytes() if isinstance(value, array) else value for value in _VALUES(self)]
        return _unpickled, (values, tables, counts)


_NAMES = [field.name for field in fields(Batch) if field.name != "tables"]
_VALUES = attrgetter(*_NAMES)


def _unpickled(values: list[Any], tables: list[bytes], counts: bytes) -> Batch:
    given: dict[str, Any] = {
        name: array("i" if name == "state_blocks" else "q", value) if isinstance(value, bytes) else value
        for name, value in zip(_NAMES, values, strict=True)
    }
    rows = array("q", counts)
    return Batch(tables=tuple([GroupTables(array("i", blocks), rows) for blocks in tables]), **given)


def lay_out(
    chunks: list[Chunk],
    tables: list[list[array[int]]],
    moves: BlockMoves,
    *,
    number: int,
    batch_key: Hashable,
    num_preempted: int,
    is_stalled: bool,
    states: array[int] | None = None,
) -> Batch:
    """The batch of these chunks.

    Args:
        chunks: What runs, in order, at least one.
        tables: Of each group of layers the chunks' block tables, as they are now; copied here.
        moves: Before the step.
        number: See `Batch`, as for the others.
        num_preempted: For this step.
        is_stalled: Whether something waits.
        states: Blocks of the chunks' states; `None`: they have none.
    """
    sequences, starts, query_lens = zip(*chunks, strict=True)
    num_decodes = len(chunks)
    if sum(query_lens) > num_decodes:
        num_decodes = next(row for row, num_tokens in enumerate(query_lens) if num_tokens > 1)
    tokens = _Tokens()
    # Decodes come first; most steps are nothing else.
    is_done = num_decodes > 0 and tokens.add_decodes(sequences[:num_decodes], starts[:num_decodes])
    if not is_done or num_decodes < len(chunks):
        tokens.add(chunks, num_decodes if is_done else 0)
    counts = array("q", [len(blocks) for blocks in tables[0]] if tables else [])  # the same in all groups
    return Batch(
        swap_outs=moves.swap_outs,
        swap_ins=moves.swap_ins,
        block_copies=moves.block_copies,
        new_blocks=moves.new_blocks,
        number=number,
        seq_ids=array("q", [sequence.seq_id for sequence in sequences]),
        starts=array("q", starts),
        query_lens=array("q", query_lens),
        token_ids=tokens.ids,
        positions=tokens.positions,
        placeholders=tokens.placeholders() if tokens.places else None,
        axes=tokens.axes() if tokens.odd else None,
        embedded=tokens.embedded,
        spans=tuple(tokens.spans),
        logit_rows=tokens.logit_rows,
        logit_starts=tokens.logit_starts,
        tables=tuple([GroupTables(array("i", b"".join(own)), counts) for own in tables]),
        state_blocks=array("i") if states is None else states,
        adapters=_slots(sequences),
        nums_at_once=array("q", [sequence.num_at_once for sequence in sequences] if states else []),
        batch_key=batch_key,
        num_preempted=num_preempted,
        is_stalled=is_stalled,
    )


def _slots(sequences: tuple[Sequence, ...]) -> array[int]:
    adapters = [sequence.adapter for sequence in sequences]
    if adapters.count(None) == len(adapters):
        return array("q")
    return array("q", [-1 if adapter is None else adapter.slot for adapter in adapters])


class _Tokens:
    """Collects a batch's tokens, and which logits are wanted."""

    def __init__(self) -> None:
        self.ids, self.positions, self.embedded = array("q"), array("q"), array("q")
        self.logit_rows, self.logit_starts = array("q"), array("q", [0])
        self.places: dict[int, int] = {}
        self.spans: list[tuple[int, int, int]] = []
        self.odd: dict[int, tuple[int, ...]] = {}  # positions that differ from axis to axis

    def add_decodes(self, sequences: tuple[Sequence, ...], starts: tuple[int, ...]) -> bool:
        """Adds rows of one token each, column by column, if all are wanted, plain and their sequences' last ones."""
        num = len(sequences)
        known = [sequence.token_ids for sequence in sequences]
        if not all(known) or [sequence.wanted for sequence in sequences].count(None) < num:
            return False
        if sum([sequence.num_tokens for sequence in sequences]) > sum(starts) + num:
            return False
        if max(map(sub, [sequence.given_end for sequence in sequences], starts)) > 0:  # perhaps a `GivenToken`
            return False
        places: dict[int, int] = {}
        try:
            ids: list[Any] = [tokens[start] for tokens, start in zip(known, starts, strict=True)]
        except IndexError:  # of some only the device knows the id
            places = {row: s.placeholder for row, s in enumerate(sequences) if s.has_placeholders}
            rows = zip(known, starts, strict=True)
            ids = [0 if row in places else tokens[start] for row, (tokens, start) in enumerate(rows)]
        offsets = [sequence.position_offset for sequence in sequences]
        self.ids, self.places = array("q", ids), places
        self.positions = array("q", list(map(add, offsets, starts)) if any(offsets) else starts)
        self.logit_starts = array("q", range(num + 1))
        self.logit_rows = self.logit_starts[:num]
        return True

    def add(self, chunks: list[Chunk], first_row: int) -> None:
        """The chunks from `first_row` on, one by one."""
        for row in range(first_row, len(chunks)):
            sequence, start, num_tokens = chunks[row]
            known: list[Any] = sequence.token_ids
            offset = sequence.position_offset
            first, end = len(self.ids), start + num_tokens
            if start < sequence.given_end:
                self._add_given(known[start:end], offset + start)
            else:
                self.positions.fromlist([*range(offset + start, offset + end)])
                if end <= len(known):
                    self.ids.fromlist(known[start:end])
                else:
                    assert num_tokens == 1, "only the last token may be unknown"
                    self.places[first] = sequence.placeholder
                    self.ids.append(0)
            if sequence.spans:
                # Its last token sees nothing behind itself.
                self.spans += [(row, *span) for span in sequence.spans if span[0] < end and start < span[1] - 1]
            if sequence.wanted is not None:
                self.logit_rows.extend([first + index - start for index in sequence.wanted if start <= index < end])
            elif end == sequence.num_tokens:
                self.logit_rows.append(first + num_tokens - 1)
            self.logit_starts.append(len(self.logit_rows))

    def _add_given(self, tokens: list[Token], first_position: int) -> None:
        for position, token in enumerate(tokens, first_position):
            if not isinstance(token, GivenToken):
                self.ids.append(token)
                self.positions.append(position)
                continue
            if token.embeddings is not None:
                self.embedded.append(len(self.ids))
            given = token.position
            if isinstance(given, tuple):
                self.odd[len(self.ids)] = given
                given = given[0]
            self.ids.append(token.token_id)
            self.positions.append(given)

    def axes(self) -> array[int]:
        number = len(next(iter(self.odd.values())))
        return array("q", [axis for i, p in enumerate(self.positions) for axis in self.odd.get(i, (p,) * number)])

    def placeholders(self) -> array[int]:
        placeholders = array("q", [-1]) * len(self.ids)
        for index, place in self.places.items():
            placeholders[index] = place
        return placeholders
