"""`Batch`: one step as data, the same for every reader and whatever happens to its sequences later."""

from __future__ import annotations

import pickle
import random
from array import array
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.core.batch import Batch, BlockMoves, Chunk, GroupTables, lay_out
from hf_paged.core.sequence import GivenToken, Sequence, SequenceGroup


def sequence(seq_id: int, tokens: list[int] | None, num_tokens: int | None = None, **facts: Any) -> Sequence:
    num_tokens = len(tokens or ()) if num_tokens is None else num_tokens
    return Sequence(seq_id, SequenceGroup(seq_id), tokens, num_tokens, **facts)


def batch_of(*chunks: Chunk, tables: list[list[int]] | None = None, **facts: Any) -> Batch:
    tables = tables or [[row] for row, _ in enumerate(chunks)]
    facts = {"number": 1, "batch_key": None, "num_preempted": 0, "is_stalled": False} | facts
    return lay_out(list(chunks), [[array("i", table) for table in tables]], BlockMoves(new_blocks=[3]), **facts)


@pytest.mark.parametrize("has_prompt", [False, True])
def test_tokens_that_only_the_device_knows(has_prompt: bool) -> None:
    rows = [(sequence(1, [5, 6]), 1, 1), (sequence(2, [7, 8], 3, placeholder=4), 2, 1)]
    batch = batch_of(*rows, *([(sequence(3, [1, 2, 3]), 0, 2)] if has_prompt else []))
    rest = [1, 2] if has_prompt else []
    assert batch.token_ids.tolist() == [6, 0, *rest]
    assert batch.placeholders is not None and batch.placeholders.tolist() == [-1, 4, *(-1 for _ in rest)]
    assert batch.is_decode is not has_prompt


def random_row(rng: random.Random, seq_id: int) -> Chunk:
    """Mostly a decode, of a token that is known or not; or a chunk of a prompt, of plain or of given tokens."""
    num_tokens = rng.randint(1, 20)
    tokens = [rng.randrange(100) for _ in range(num_tokens)]
    own = sequence(seq_id, tokens, position_offset=rng.choice((0, 0, 3)), placeholder=seq_id)
    kind = rng.choice(("known", "known", "on the device", "on the device", "chunk", "given", "wanted"))
    start, count = num_tokens - 1, 1
    if kind == "on the device":
        del tokens[-1]
    elif kind == "chunk":
        start = rng.randrange(num_tokens)
        count = rng.randint(1, num_tokens - start)
    elif kind == "given":
        tokens[-1], own.given_end = GivenToken.at(rng.randrange(9), 5), num_tokens
    elif kind == "wanted":
        own.wanted = [start] * rng.randrange(3)
    return own, start, count


@pytest.mark.parametrize("seed", range(60))
def test_a_row_is_laid_out_as_it_is_alone(seed: int) -> None:
    """Would break: a token, position or logit that depends on what lies beside it."""
    rng = random.Random(seed)
    rows = [random_row(rng, seq_id) for seq_id in range(rng.randint(1, 5))]
    batch = batch_of(*rows)
    token_ids: list[int] = []
    positions: list[int] = []
    placeholders: list[int] = []
    logit_rows: list[int] = []
    for row in rows:
        alone = batch_of(row)
        logit_rows += [len(token_ids) + index for index in alone.logit_rows]
        token_ids += alone.token_ids
        positions += alone.positions
        placeholders += [-1] * alone.num_tokens if alone.placeholders is None else alone.placeholders
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == (token_ids, positions)
    assert batch.logit_rows.tolist() == logit_rows
    assert (batch.placeholders or array("q", [-1]) * batch.num_tokens).tolist() == placeholders


def test_tokens_given_as_embeddings_or_at_positions_of_their_own() -> None:
    given = [3, GivenToken.at(9, 20), GivenToken.embedded(7, "states", 0), GivenToken.embedded(8, "states", 1), 6]
    row = sequence(2, given, given_end=4, position_offset=1)
    batch = batch_of((sequence(1, [5]), 0, 1), (row, 0, 5), (row, 1, 1), (row, 4, 1))
    assert batch.token_ids.tolist() == [5, 3, 20, 0, 0, 6, 20, 6]
    assert batch.positions.tolist() == [0, 1, 9, 7, 8, 5, 9, 5]
    assert batch.embedded.tolist() == [3, 4]


@pytest.mark.parametrize("at", [0, 1])
def test_a_decode_at_a_position_of_its_own(at: int) -> None:
    """Would break: its number taken for an id, where rows of one token are laid out all at once."""
    rows = [(sequence(1, [5, 6]), 1, 1), (sequence(2, [GivenToken.at(9, 20)], given_end=1), 0, 1)]
    batch = batch_of(*(rows if at else rows[::-1]))
    assert batch.token_ids[at] == 20 and batch.positions[at] == 9 and batch.is_decode


def test_which_logits_are_wanted() -> None:
    """In the caller's order, as far as the chunk holds them; without a wish the last token's."""
    first = sequence(1, [1, 2, 3, 4], wanted=[3, 1, 1, 0])
    batch = batch_of((sequence(0, [9], wanted=[]), 0, 1), (first, 1, 3), (sequence(2, [1, 2]), 0, 2))
    assert batch.logit_rows.tolist() == [3, 1, 1, 5]
    assert batch.logit_starts.tolist() == [0, 0, 3, 4]


def test_it_stays_what_it_was() -> None:
    own, table = sequence(1, [1, 2]), array("i", [5])
    batch = lay_out([(own, 1, 1)], [[table]], BlockMoves(), number=1, batch_key="k", num_preempted=0, is_stalled=False)
    before = repr(batch)
    assert own.token_ids is not None
    own.token_ids[1], table[0] = 70, 71
    assert batch.token_ids.tolist() == [2] and batch.tables[0].blocks.tolist() == [5] and repr(batch) == before
    with pytest.raises(FrozenInstanceError):
        batch.number = 2  # type: ignore[misc]


def test_it_travels_whole() -> None:
    rows = [(sequence(i, list(range(300)), 300), 299, 1) for i in range(64)]
    batch = batch_of(*rows, batch_key=("cpu", False), num_preempted=2)
    packed = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
    assert pickle.loads(packed) == batch
    assert len(packed) < 64 * 8 * 10 + 1500, "numbers, no objects"


_NUMBERS = st.integers(-(2**63), 2**63 - 1)
_BLOCKS = st.integers(-1, 2**31 - 1)
_PAIRS = st.lists(st.tuples(_BLOCKS, _BLOCKS), max_size=3)


def _arrays(kind: str = "q") -> st.SearchStrategy[array[int]]:
    return st.lists(_BLOCKS if kind == "i" else _NUMBERS, max_size=9).map(lambda values: array(kind, values))


@st.composite
def batches(draw: Any) -> Batch:
    counts = draw(st.lists(st.integers(0, 4), max_size=4))
    blocks = st.lists(_BLOCKS, min_size=sum(counts), max_size=sum(counts)).map(lambda values: array("i", values))
    tables = draw(st.lists(blocks, max_size=3))
    names = ("seq_ids", "starts", "query_lens", "token_ids", "positions", "embedded", "logit_rows", "logit_starts")
    return Batch(
        number=draw(_NUMBERS),
        is_stalled=draw(st.booleans()),
        placeholders=draw(st.none() | _arrays()),
        axes=draw(st.none() | _arrays()),
        spans=tuple(draw(st.lists(st.tuples(_NUMBERS, _NUMBERS, _NUMBERS), max_size=3))),
        tables=tuple(GroupTables(own, array("q", counts)) for own in tables),
        state_blocks=draw(_arrays("i")),
        nums_at_once=draw(_arrays()),
        block_copies=draw(_PAIRS),
        new_blocks=draw(st.lists(_BLOCKS, max_size=3)),
        **{name: draw(_arrays()) for name in names},
    )


@given(batch=batches())
def test_it_comes_out_as_it_went_in(batch: Batch) -> None:
    found = pickle.loads(pickle.dumps(batch))
    assert found == batch and repr(found) == repr(batch), "of the same types, too"


def test_given_tokens_are_told_apart_by_all_they_were_given() -> None:
    """Would break: a prefix hit between tokens of other ids, positions, embeddings or runs; none between equal ones."""
    tokens = [GivenToken.at(place, number) for place in (0, 1, 2**31 - 1, (1, 2, 3), (1, 2, 4)) for number in (0, 1, 5)]
    tokens += [GivenToken.embedded(0, "states", 0), GivenToken.embedded(0, "states", 0)]
    tokens += [GivenToken.embedded(place, "states", 0, content) for place in (3, (3, 4)) for content in (b"a", b"b")]
    tokens += [GivenToken.within(whole, 0, 5, 0) for whole in (b"one", b"other")]
    assert len(set(tokens)) == len(tokens)
    assert GivenToken.embedded((3, 4), "other states", 7, b"a") == tokens[19]
    assert GivenToken.at(7, 5) == GivenToken.at(7, 5)


def test_chunks_do_not_cut_runs_of_tokens_that_see_each_other() -> None:
    """Would break: a picture in two steps, or a scheduler that never gets to it."""
    row = sequence(1, list(range(12)), spans=((3, 7), (7, 9)))
    row.is_wanted = True
    found = []
    while row.num_computed_tokens < 12:
        found.append(row.chunk(2))
        row.num_computed_tokens += found[-1]
    assert found == [2, 1, 4, 2, 2, 1]
    row.num_computed_tokens = 0
    assert row.chunk(5) == 3 and row.chunk(8) == 7 and row.chunk(9) == 9


def test_positions_of_several_axes_reach_the_batch() -> None:
    """Would break: tokens with one position beside such with several."""
    rows = [(sequence(1, [5, 6]), 1, 1), (sequence(2, [GivenToken.at((4, 5, 6), 9), 8], given_end=1), 0, 2)]
    batch = batch_of(*rows)
    assert list(batch.axes) == [1, 1, 1, 4, 5, 6, 1, 1, 1]
    assert list(batch.positions) == [1, 4, 1]
    assert batch_of(*rows[:1]).axes is None
