"""Which rows of a step share their first blocks, by tables alone; and whole calls whose rows do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import random_ids
from helpers.pairs import Pair
from hf_paged.attention import shared_prefix
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.shared_prefix import shared_prefixes
from hf_paged.kernels import cpu

SIZE, NULL = 16, 999
LEAST = shared_prefix.LEAST_TOKENS // SIZE  # blocks


def tables_of(rows: list[list[int]]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [NULL] * (width - len(row)) for row in rows])


def runs_of(rows: list[list[int]], lens: list[int]) -> list[tuple[list[int], int]]:
    """Sequences and shared tokens of each run of several."""
    found = shared_prefixes(tables_of(rows), np.array(lens), SIZE, NULL)
    if found is None:
        return []
    ends = found.starts + found.counts
    runs = [(found.order[start:end].tolist(), int(n)) for start, end, n in zip(found.starts, ends, found.tokens)]
    assert sorted(i for row, _ in runs for i in row) == list(range(len(rows))), "a row is missing, or there twice"
    assert all(tokens == 0 for row, tokens in runs if len(row) == 1)
    return [(row, tokens) for row, tokens in runs if len(row) > 1]


FAMILIES = st.lists(  # prompts with some samples each: blocks of a common beginning, of the prompt, samples' own tokens
    st.tuples(st.integers(0, 8), st.integers(0, 8), st.lists(st.integers(1, 3 * SIZE), min_size=1, max_size=6)),
    min_size=1,
    max_size=5,
)


@given(families=FAMILIES, data=st.data())
@settings(max_examples=200)
def test_rows_of_a_run_have_the_same_blocks(families: list[tuple[int, int, list[int]]], data: st.DataObject) -> None:
    rows, lens = [], []
    free = iter(range(100, NULL))
    for common, own, samples in families:
        prompt = list(range(common)) + [next(free) for _ in range(own)]
        for tokens in samples:
            rows.append(prompt + [next(free) for _ in range(-(-tokens // SIZE))])
            lens.append(len(prompt) * SIZE + tokens)
    mixed = data.draw(st.permutations(range(len(rows))))
    rows, lens = [rows[i] for i in mixed], [lens[i] for i in mixed]
    for members, tokens in runs_of(rows, lens):
        assert tokens >= shared_prefix.LEAST_TOKENS
        num_blocks = -(-tokens // SIZE)
        assert len({tuple(rows[i][:num_blocks]) for i in members}) == 1
        assert tokens <= min(lens[i] for i in members)


def test_samples_of_two_prompts_with_one_beginning() -> None:
    """By what their neighbours share: samples read the prompt together, and prompts no shorter beginning of theirs."""
    short, long = list(range(LEAST)), list(range(10 * LEAST))
    samples = [[*short, 100 + prompt, *range(200 + 20 * prompt, 212 + 20 * prompt), 300 + 10 * prompt + i]
               for prompt in range(2) for i in range(3)]  # fmt: skip
    lens = [len(row) * SIZE for row in samples]
    own = (LEAST + 13) * SIZE
    assert runs_of(samples, lens) == [([0, 1, 2], own), ([3, 4, 5], own)]
    prompts = [[*long, 300 + i] for i in range(4)]
    assert runs_of(prompts, [len(row) * SIZE for row in prompts]) == [([0, 1, 2, 3], 10 * LEAST * SIZE)]


def test_what_is_not_worth_it_or_is_nobodys() -> None:
    assert runs_of([[1, 2], [3, 4]], [32, 32]) == []
    few = list(range(LEAST - 1))
    assert runs_of([[*few, 101], [*few, 102]], [LEAST * SIZE] * 2) == []
    gone = [NULL] * 2 * LEAST  # behind windows
    assert runs_of([[*gone, 1], [*gone, 2]], [(2 * LEAST + 1) * SIZE] * 2) == []
    assert runs_of([[*gone, 1, 2], [*gone, 1, 3]], [(2 * LEAST + 2) * SIZE] * 2) == [([0, 1], (2 * LEAST + 1) * SIZE)]


def test_rows_of_one_sequence() -> None:
    """Drafts: each sees one token more, and the first sees fewer than they share blocks for."""
    row, end = list(range(2 * LEAST)), 2 * LEAST * SIZE - 3
    assert runs_of([row, row, row], [end - 2, end - 1, end]) == [([0, 1, 2], end - 2)]


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), least=st.integers(1, 5), most=st.integers(2, 5))
@settings(max_examples=100)
def test_items_are_all_sequences(counts: list[int], least: int, most: int) -> None:
    starts = np.cumsum([0, *counts[:-1]])
    tokens = np.where(np.array(counts) > 1, 64, 0)
    runs = shared_prefix.SharedPrefixes(np.arange(sum(counts)), starts, np.array(counts), tokens)
    items = runs.items(least, most)
    if items is None:
        assert all(count < max(least, 2) for count in counts)
        return
    assert items[:, 0].tolist() == np.cumsum([0, *items[:-1, 1]]).tolist() and items[:, 1].sum() == sum(counts)
    assert items[:, 1].max() <= most
    for first, count, shared in items.tolist():
        run = int(np.searchsorted(starts, first, side="right")) - 1
        assert first + count <= starts[run] + counts[run], "an item of two runs"
        assert shared == (64 if count > 1 else 0)
        assert count == 1 or counts[run] >= least


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_samples_of_a_long_prompt(make_pair: Callable[..., Pair], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's tokens, from a prompt that was read once a step."""
    read_together = []
    rows = cpu.StepCalls.rows

    def noting(self: cpu.StepCalls, *args: Any) -> cpu.Rows:
        read_together.append(isinstance(args[-1], cpu.Together))
        return rows(self, *args)

    monkeypatch.setattr(cpu.StepCalls, "rows", noting)
    monkeypatch.setattr(shared_prefix, "LEAST_TOKENS", 4)
    pair = make_pair(name, block_size=4)
    ids = random_ids(1, 21)
    pair.generate(input_ids=ids, do_sample=True, num_return_sequences=13, max_new_tokens=8, eos_token_id=None)
    assert any(read_together)


SAMPLES, BEAMS = {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}


@pytest.mark.parametrize(("name", "mode"), [("llama", BEAMS), ("gemma2", SAMPLES), ("gpt_oss", SAMPLES)])
def test_samples_and_beams_by_the_triton_kernels(
    make_pair: Callable[..., Pair], name: str, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same; layers with a window read by themselves."""
    shared_decode = pytest.importorskip("hf_paged.kernels.shared_decode")  # Triton need not be there
    if not pytest.importorskip("hf_paged.kernels.launch").is_interpreting():
        pytest.skip("kernels are compiled here; TRITON_INTERPRET=1 runs them on CPU")
    read_together = []
    decode = shared_decode.shared_decode

    def noting(call: Any, *lists: Any) -> None:
        read_together.append(call.window)
        decode(call, *lists)

    monkeypatch.setattr(shared_decode, "shared_decode", noting)
    monkeypatch.setattr(shared_prefix, "LEAST_TOKENS", 4)
    monkeypatch.setattr(AttentionMetadata, "least_saved", -math.inf)
    pair = make_pair(name, block_size=4, attention_backend="triton")
    pair.generate(input_ids=random_ids(1, 37), max_new_tokens=4, eos_token_id=None, **mode)
    assert len(read_together) >= 3 and not any(read_together)
