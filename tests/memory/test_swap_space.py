"""Blocks to CPU memory and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.memory import swap_space
from hf_paged.memory.swap_space import SwapSpace, runs

PAIRS = st.tuples(
    st.lists(st.integers(0, 12), unique=True, max_size=13), st.lists(st.integers(0, 12), unique=True, max_size=13)
).map(lambda ids: list(zip(*ids)))


@given(PAIRS)
def test_runs_are_the_pairs(pairs: list[tuple[int, int]]) -> None:
    """Would break: blocks forgotten, moved elsewhere, or moved one by one though they lie side by side."""
    pieces = list(runs(pairs))
    assert sorted((s + i, d + i) for s, d, length in pieces for i in range(length)) == sorted(pairs)
    ends = {(s + length, d + length) for s, d, length in pieces}
    assert not ends & {(s, d) for s, d, _ in pieces}


@given(PAIRS, PAIRS, st.integers(1, 14))
def test_blocks_come_back(out: list[tuple[int, int]], back: list[tuple[int, int]], piece_blocks: int) -> None:
    """Would break: a block's content, or that of one that was not asked for; memory of pieces that nothing is in."""
    pool = torch.randn(13, 2, 3)
    before = pool.clone()
    space = SwapSpace(pool, 13, piece_blocks * pool[0].nbytes)
    space.swap_out(out)
    assert torch.equal(pool, before)
    held = {destination: before[source] for source, destination in out}
    pieces = [range(13)[start : start + piece_blocks] for start in range(0, 13, piece_blocks)]
    assert space.num_bytes == pool[0].nbytes * sum(len(piece) for piece in pieces if held.keys() & {*piece})
    pool.fill_(float("nan"))
    back = [(source, destination) for source, destination in back if source in held]
    space.swap_in(back)
    expected = torch.full_like(pool, float("nan"))
    for source, destination in back:
        expected[destination] = held[source]
    assert torch.equal(pool.nan_to_num(-1), expected.nan_to_num(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_bit_of_any_dtype(dtype: torch.dtype) -> None:
    """Would break: codes that a conversion on the way would change (NaN, subnormals)."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(4, 128)
    pool = codes.clone().view(dtype)
    space = SwapSpace(pool, 4)
    space.swap_out([(0, 2), (1, 3), (3, 0)])
    pool.view(torch.uint8).zero_()
    space.swap_in([(2, 0), (3, 1), (0, 3)])
    codes[2] = 0
    assert torch.equal(pool.view(torch.uint8), codes)


def test_copies_are_measured_once() -> None:
    """Would break: the choice between swapping and recomputing, which lives on these figures."""
    space = SwapSpace(torch.zeros(4, 8), 4)
    space.swap_out([(0, 0), (2, 1)])
    space.swap_in([(1, 0)])
    finished = space.finished()
    assert [blocks for blocks, _ in finished] == [2, 1] and all(seconds > 0 for _, seconds in finished)
    assert space.finished() == []


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Would break: the content of swapped blocks, lost with the error; or the user's knowledge of why it is slow."""
    make = torch.empty

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("pin_memory"):
            raise RuntimeError("cannot pin")
        return make(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    memory = swap_space._allocate((2, 3), torch.float32, is_pinned=True)
    assert memory.shape == (2, 3) and memory.dtype == torch.float32
    assert "no pinned memory" in caplog.text and "cannot pin" in caplog.text
