"""Tokens chosen for the rows of many calls at once, against transformers' own processors and `torch.multinomial`.

The oracle knows one call at a time: its whole batch, every step of it, a generator of its own.
"""

from __future__ import annotations

import copy
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as hf
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import EpsilonLogitsWarper, EtaLogitsWarper

import hf_paged
from helpers.models import VOCAB, build, random_ids
from hf_paged.sampling import random as draws_of_calls
from hf_paged.sampling.controls import GeneratedTokenPenalties, TokenBias
from hf_paged.sampling.processors import _Divisor, merged_processor, needs_ids, process, processor_kinds
from hf_paged.sampling.random import SamplingNoise
from hf_paged.sampling.sampler import RowSampler, SamplingBatch, sample_tokens
from hf_paged.sampling.token_table import TokenTable
from hf_paged.sampling.top_p import short_top_p

TABLE = TokenTable(torch.device("cpu"))

PROCESSORS: dict[str, Any] = {  # in the order of transformers
    "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
    "no_repeat_ngram_size": hf.NoRepeatNGramLogitsProcessor,
    "min_length": lambda length: hf.MinLengthLogitsProcessor(length, [1, 2]),
    "min_new_tokens": lambda counts: hf.MinNewTokensLengthLogitsProcessor(*counts, [1, 3]),
    "suppress_tokens": hf.SuppressTokensLogitsProcessor,
    "temperature": hf.TemperatureLogitsWarper,
    "top_k": hf.TopKLogitsWarper,
    "top_p": hf.TopPLogitsWarper,
    "min_p": hf.MinPLogitsWarper,
    "typical_p": hf.TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
    "eta_cutoff": EtaLogitsWarper,
}


OWN: dict[str, Any] = {  # in front of them; given the prompt's width, too
    "penalties": lambda values, width: GeneratedTokenPenalties(*values, width),
    "logit_bias": lambda bias, width: TokenBias(bias),
}


def processors_of(options: dict[str, Any], width: int = 3) -> list[Any]:
    own = [OWN[name](options[name], width) for name in OWN if options.get(name) is not None]
    return own + [PROCESSORS[name](options[name]) for name in PROCESSORS if options.get(name) is not None]


def make_logits(style: str, steps: int, rows: int, vocab: int, seed: int) -> Tensor:
    logits = torch.randn(steps, rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if style == "bfloat16":
        return logits.bfloat16()
    if style == "rounded":
        return logits.bfloat16().float()
    if style == "ties":
        return logits.round()
    if style == "forbidden":
        return logits.masked_fill(logits < 0, -float("inf")).index_fill(2, torch.tensor([0]), 1.0)
    return logits


@dataclass
class Call:
    """A sampling or greedy call with the logits that it will get."""

    processors: list[Any]
    logits: Tensor  # [steps, rows, vocab]
    seed: int | None
    width: int = 3
    prompts: Tensor = field(init=False)
    sampler: RowSampler = field(init=False)

    def __post_init__(self) -> None:
        noise = None
        if self.seed is not None:
            noise = SamplingNoise(torch.Generator().manual_seed(self.seed), self.logits.shape[1])
        rows, vocab = self.logits.shape[1:]
        self.prompts = (torch.arange(rows * self.width).view(rows, self.width) * 7 + (self.seed or 0)) % vocab
        table = TABLE if needs_ids(self.processors) else None
        table_rows = [] if table is None else table.add(self.prompts)
        kinds = processor_kinds(self.processors)
        self.sampler = RowSampler(self.processors, noise, kinds, None, table, table_rows, self.width)

    def expected(self) -> list[list[int]]:
        """As transformers' loop: the tokens of each step."""
        generator = torch.Generator() if self.seed is None else torch.Generator().manual_seed(self.seed)
        processors = hf.LogitsProcessorList(copy.deepcopy(self.processors))
        ids = self.prompts
        for logits in self.logits:
            scores = processors(ids, logits.to(torch.float32, copy=True))
            if self.seed is None:
                tokens = scores.argmax(dim=-1, keepdim=True)
            else:
                tokens = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)
            ids = torch.cat([ids, tokens], dim=1)
        return ids[:, self.width :].T.tolist()


def chosen(batches: list[SamplingBatch], logits: Tensor) -> list[list[int]]:
    found = []
    for outcome in sample_tokens(batches, logits).read():
        if isinstance(outcome, Exception):
            raise outcome
        assert not any(outcome[1])
        found.append(outcome[0])
    return found


def run(calls: list[Call], seed: int = 0) -> list[list[list[int]]]:
    """All steps of all calls, through engine steps in which some of their rows meet, at different steps of theirs."""
    rng = random.Random(seed)
    positions = [[0] * call.logits.shape[1] for call in calls]
    found = [[[-7] * call.logits.shape[1] for _ in call.logits] for call in calls]
    while True:
        batches: list[SamplingBatch] = []
        owners: list[int] = []
        rows_of_logits: list[Tensor] = []
        for number, call in enumerate(calls):
            num_tokens = len(call.logits)
            open_rows = [row for row, at in enumerate(positions[number]) if at < num_tokens]
            if not open_rows:
                continue
            running = [row for row in open_rows if rng.random() < 0.7]
            oldest = min(positions[number][row] for row in open_rows)
            for token_index in sorted({positions[number][row] for row in running}):
                rows = [row for row in running if positions[number][row] == token_index]
                sources = []
                for row in rows:
                    if rng.random() < 0.3:  # logits that another call wants
                        rows_of_logits.append(torch.full_like(call.logits[0, 0], float("nan")))
                    sources.append(len(rows_of_logits))
                    rows_of_logits.append(call.logits[token_index, row])
                batches.append(SamplingBatch(call.sampler, rows, [token_index] * len(rows), sources, oldest))
                owners.append(number)
        if all(at == len(call.logits) for call, own in zip(calls, positions) for at in own):
            return found
        if not batches:
            continue
        logits = torch.stack(rows_of_logits)
        before = logits.clone()
        for number, batch, tokens in zip(owners, batches, chosen(batches, logits), strict=True):
            assert len(tokens) == len(batch.rows)
            for row, token in zip(batch.rows, tokens):
                found[number][batch.token_indices[0]][row] = token
                positions[number][row] += 1
        assert torch.equal(torch.nan_to_num(logits), torch.nan_to_num(before)), "the step's logits were written to"


def check(calls: list[Call], seed: int = 0) -> None:
    expected = [call.expected() for call in calls]
    assert run(calls, seed) == expected


# Against the oracle

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 4.0]),
        "no_repeat_ngram_size": st.sampled_from([1, 2]),
        "min_length": st.sampled_from([3, 4, 5, 9]),
        "temperature": st.sampled_from([0.1, 0.7, 1.3, 2.5]) | st.floats(0.05, 5),
        "top_k": st.sampled_from([1, 2, 3, 7, 1000]),
        "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 0.9999999]) | st.floats(0, 0.999),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]) | st.floats(0, 1),
        "typical_p": st.sampled_from([0.2, 0.9]),
        "epsilon_cutoff": st.sampled_from([1e-3, 0.1]),
        "eta_cutoff": st.sampled_from([1e-3, 0.1]),
        "suppress_tokens": st.sampled_from([[1], [1, 3]]),
        "penalties": st.sampled_from([(1.5, 0.0), (0.0, 0.7), (-2.0, 1.0)]),
        "logit_bias": st.sampled_from([{1: 5.0}, {0: -100.0, 4: 2.5}]),
    },
)
STYLES = st.sampled_from(["plain", "bfloat16", "rounded", "ties", "forbidden"])


@settings(max_examples=150, derandomize=True)
@given(
    options=st.lists(st.tuples(OPTIONS, st.booleans(), st.integers(1, 3)), min_size=1, max_size=4),
    style=STYLES,
    vocab=st.sampled_from([5, 40]),
    seed=st.integers(0, 10**6),
)
def test_any_calls_together(options: list[tuple[dict[str, Any], bool, int]], style: str, vocab: int, seed: int) -> None:
    calls = [
        Call(
            processors_of(own, i + 1),
            make_logits(style, 3, rows, vocab, seed + i),
            seed + i if does_sample else None,
            i + 1,
        )
        for i, (own, does_sample, rows) in enumerate(options)
    ]
    try:
        for call in calls:
            call.expected()
    except (RuntimeError, ValueError):
        reject()  # they forbid every token
    check(calls, seed)


@settings(max_examples=150, derandomize=True)
@given(data=st.data(), style=STYLES, seed=st.integers(0, 10**6))
def test_calls_of_one_kind_with_values_of_their_own(data: st.DataObject, style: str, seed: int) -> None:
    """The same processors, each call with other parameters: what merging is for."""
    strategies = {
        "repetition_penalty": st.floats(0.2, 5),
        "temperature": st.floats(0.05, 5),
        "top_k": st.integers(1, 60),
        "top_p": st.floats(0, 0.9999),
        "min_p": st.floats(0, 1),
        "min_length": st.integers(0, 9),
        "min_new_tokens": st.tuples(st.integers(0, 6), st.integers(0, 4)),
        "penalties": st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
        "logit_bias": st.dictionaries(st.integers(0, 39), st.floats(-100, 100), min_size=1, max_size=3),
    }
    names = data.draw(st.sets(st.sampled_from(sorted(strategies)), min_size=1))
    options = [{name: data.draw(strategies[name]) for name in names} for _ in range(data.draw(st.integers(2, 5)))]
    rows = [data.draw(st.integers(1, 3)) for _ in options]
    calls = [
        Call(processors_of(own, width), make_logits(style, 2, count, 40, seed + i), seed + i, width)
        for i, (own, count) in enumerate(zip(options, rows))
        for width in [data.draw(st.integers(1, 9))]
    ]
    assert len({call.sampler.kind for call in calls}) == 1
    # Bit for bit, and not only where a token happens to fall on the other side.
    scores = torch.cat([call.logits[0] for call in calls]).float()
    lengths = [call.width for call in calls for _ in range(len(call.prompts))]
    table_rows = [row for call in calls for row in call.sampler.table_rows]
    for own in zip(*(call.processors for call in calls), strict=True):
        merged = process(
            [[processor] for processor in own], rows, scores, partial(TABLE.read, table_rows, lengths), lambda: lengths
        )
        pieces = [one(c.prompts, part) for one, c, part in zip(own, calls, scores.split(rows), strict=True)]
        assert torch.equal(merged, torch.cat(pieces)), type(own[0]).__name__
        scores = merged
    check(calls, seed)


@pytest.mark.parametrize("style", ["plain", "rounded", "ties"])
def test_top_p_at_its_very_border(style: str) -> None:
    """`top_p` is what some token's cumulative probability is, and one rounding to each side of it."""
    logits = make_logits(style, 1, 6, 20, seed=3)
    cumulative = logits[0].sort(dim=-1)[0].softmax(dim=-1).cumsum(dim=-1)
    calls, scores = [], []
    for row in range(6):
        for kept in (cumulative[row, 4], cumulative[row, 12], cumulative[row, 18]):
            ulp = torch.nextafter(kept, kept + 1).double() - kept.double()
            for change in (-1.0, -0.3, 0.0, 0.3, 1.0):  # the threshold itself is rounded to float32
                value = float(1 - (kept.double() + change * ulp))
                calls.append(Call([hf.TopPLogitsWarper(value)], logits[:, row : row + 1], seed=len(calls)))
                scores.append(logits[0, row])
    merged = merged_processor([call.processors[0] for call in calls], [1] * len(calls), torch.stack(scores))
    found = merged(None, torch.stack(scores))
    expected = torch.cat([call.processors[0](None, call.logits[0]) for call in calls])
    assert torch.equal(found, expected)
    check(calls)


@pytest.mark.parametrize("seed", range(8))
def test_top_p_behind_top_k(seed: int) -> None:
    """Would break: sums in another order at the border, and equal scores of which others stay than in a whole sort."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(60):
        shape = draw.choice([1, 3]), draw.choice([1500, 2048, 3003, 5001])
        scores = torch.randn(shape, generator=generator) * draw.choice([0.1, 1, 5])
        is_rounded = draw.random() < 0.4
        scores = scores.round() if is_rounded else scores
        if draw.random() < 0.1:
            scores[0, 3] = draw.choice([float("nan"), float("inf")])
        scores = hf.TopKLogitsWarper(draw.randrange(1, 60))(None, scores)
        if draw.random() < 0.1:
            scores[0] = -float("inf")
        warper = hf.TopPLogitsWarper(draw.uniform(0.01, 0.99), min_tokens_to_keep=draw.choice([1, 4]))
        sums = scores.sort().values.softmax(dim=-1).cumsum(dim=-1)[0]
        if draw.random() < 0.5 and 0 < (border := 1 - float(sums[-draw.randrange(1, 60)])) < 1:
            warper.top_p = border
        given = Mock(wraps=warper, top_p=warper.top_p, filter_value=warper.filter_value)
        found = short_top_p(given, scores)
        assert torch.equal(found.view(torch.int32), warper(None, scores).view(torch.int32))
        assert is_rounded or given.call_args_list[0].args[1].shape[1] <= shape[1] / 8
    calls = [hf.TopPLogitsWarper(value) for value in (0.3, 0.6, 0.9)]
    scores = hf.TopKLogitsWarper(40)(None, torch.randn(3, 2000, generator=generator).round())
    expected = [warper(None, own[None])[0] for warper, own in zip(calls, scores, strict=True)]
    found = process([[warper] for warper in calls], [1] * 3, scores, lambda _: scores, list)
    assert torch.equal(found, torch.stack(expected))
    filler = hf.TopPLogitsWarper(0.5, filter_value=-7.0)
    assert torch.equal(process([[filler]], [3], scores, lambda _: scores, list), filler(None, scores))


def top_p_beside_its_processor(warper: Any, scores: Tensor) -> int:
    """Asserts that the shortcut gives the processor's bits; returns how often it called the processor."""
    settings = {name: getattr(warper, name) for name in ("top_p", "filter_value", "min_tokens_to_keep")}
    given = Mock(wraps=warper, **settings)
    expected = warper(None, scores)
    assert torch.equal(short_top_p(given, scores).view(torch.int32), expected.view(torch.int32))
    return given.call_count


@pytest.mark.parametrize("seed", range(6))
def test_top_p_of_many_words(seed: int) -> None:
    """Would break: another border, since sums are taken in another order; or other tokens of equal scores that stay."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_calls = {True: [], False: []}
    for _ in range(40):
        scores = torch.randn(draw.choice([1, 3]), draw.choice([8192, 20011]), generator=generator)
        scores *= draw.choice([0.1, 2, 4, 6])
        is_usual = bool(scores.std() > 3)
        if draw.random() < 0.2:
            scores, is_usual = scores.round(), False
        if draw.random() < 0.1:
            scores[0, 3], is_usual = draw.choice([float("nan"), float("inf"), -float("inf")]), False
        warper = hf.TopPLogitsWarper(draw.uniform(0.05, 0.95), min_tokens_to_keep=draw.choice([1, 4]))
        sums = scores.sort().values.softmax(dim=-1).cumsum(dim=-1)[0]
        if draw.random() < 0.3 and 0 < (border := 1 - float(sums[-draw.randrange(1, 60)])) < 1:
            warper.top_p, is_usual = border, False
        num_calls[is_usual].append(top_p_beside_its_processor(warper, scores))
    assert sum(num_calls[False]) > 0 and statistics.mean(num_calls[True]) < 0.5, "most are found without a sort"


def test_top_p_where_its_sums_are_worst() -> None:
    """150,000 equal scores that are added one by one, or rounded ones, and a border at every one of the likeliest."""
    shares = torch.cat([torch.full((150_000,), 0.6 / 150_000), torch.linspace(3e-4, 5e-4, 1000)])[None]
    rounded = (4 * torch.randn(1, 151_936, generator=torch.Generator().manual_seed(1))).bfloat16().float()
    for scores in (shares.log(), rounded):
        sums = scores.sort().values.softmax(dim=-1).cumsum(dim=-1)[0]
        for place, offset in itertools.product((2, 40, 333), (0.0, 1e-6, -1e-5, 4e-5, -8e-5)):
            if 0 < (top_p := 1 - float(sums[-place]) + offset) < 1:
                top_p_beside_its_processor(hf.TopPLogitsWarper(top_p), scores)
    top_p_beside_its_processor(hf.TopPLogitsWarper(0.5), 5 * torch.randn(2, 9000))
    half = (5 * torch.randn(2, 9000)).bfloat16()
    warper = hf.TopPLogitsWarper(0.5)
    assert torch.equal(short_top_p(warper, half), warper(None, half))


def test_top_p_of_many_words_and_calls() -> None:
    calls = [hf.TopPLogitsWarper(value) for value in (0.3, 0.6, 0.9)]
    scores = torch.randn(3, 9000) * 5
    scores[1] = 0.0  # any of them may stay
    expected = torch.cat([warper(None, own[None]) for warper, own in zip(calls, scores, strict=True)])
    assert torch.equal(process([[warper] for warper in calls], [1] * 3, scores, lambda _: scores, list), expected)


def test_calls_that_differ_in_what_is_not_merged() -> None:
    """Other fillers, other minima, other masses: never taken for one kind."""
    processors = [
        [hf.TopKLogitsWarper(2)],
        [hf.TopKLogitsWarper(2, filter_value=-5.0)],
        [hf.TopPLogitsWarper(0.1)],
        [hf.TopPLogitsWarper(0.1, min_tokens_to_keep=4)],
        [hf.MinPLogitsWarper(0.9)],
        [hf.MinPLogitsWarper(0.9, min_tokens_to_keep=3)],
        [hf.TypicalLogitsWarper(0.3)],
        [hf.TypicalLogitsWarper(0.9)],
        [EpsilonLogitsWarper(0.3)],
        [EpsilonLogitsWarper(0.01)],
        [EtaLogitsWarper(0.3)],
        [EtaLogitsWarper(0.01)],
        [hf.SuppressTokensLogitsProcessor([1, 2])],
        [hf.SuppressTokensLogitsProcessor([1])],
        [hf.LogitNormalization()],
        [hf.InfNanRemoveLogitsProcessor()],
        [hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(3)],
        [hf.TopKLogitsWarper(3), hf.TemperatureLogitsWarper(0.5)],
        [],
    ]
    calls = [Call(own, make_logits("plain", 8, 2, 12, seed), seed) for seed, own in enumerate(processors)]
    assert len({call.sampler.kind for call in calls}) == len(calls)
    check(calls)
    greedy = [Call(own, make_logits("plain", 8, 2, 12, seed), None) for seed, own in enumerate(processors)]
    assert not {call.sampler.kind for call in greedy} & {call.sampler.kind for call in calls}
    check(greedy + [Call(own, call.logits, call.seed) for own, call in zip(processors, calls)])


def test_one_processor_runs_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[Any, Callable[[int], float]] = {
        hf.RepetitionPenaltyLogitsProcessor: lambda i: 1.1 + i,
        hf.TemperatureLogitsWarper: lambda i: 0.5 + i / 7,
        hf.TopPLogitsWarper: lambda i: 0.5 + i / 20,
        hf.MinPLogitsWarper: lambda i: i / 50,
    }
    calls = [
        Call([kind(value(i)) for kind, value in kinds.items()], make_logits("plain", 1, 2, 40, i), i, width=i + 1)
        for i in range(8)
    ]
    expected = [call.expected()[0] for call in calls]
    counts: Counter[str] = Counter()
    for kind in kinds:

        def counted(self: Any, ids: Any, scores: Tensor, original: Any = kind.__call__) -> Tensor:
            counts[type(self).__name__] += 1
            return original(self, ids, scores)

        monkeypatch.setattr(kind, "__call__", counted)
    batches = [SamplingBatch(call.sampler, [0, 1], [0, 0], [2 * i, 2 * i + 1], 0) for i, call in enumerate(calls)]
    assert chosen(batches, torch.cat([call.logits[0] for call in calls])) == expected
    assert counts == {kind.__name__: 1 for kind in kinds}


def test_a_parameter_that_changes_on_the_way() -> None:
    """A caller's own warper object, cooled from step to step."""
    calls = [Call([hf.TemperatureLogitsWarper(1.0)], make_logits("plain", 4, 1, 40, i), i) for i in range(3)]
    expected = []
    for i, call in enumerate(calls):
        generator = torch.Generator().manual_seed(i)
        probs = [(logits / (0.2 + token_index * (1 + i))).softmax(-1) for token_index, logits in enumerate(call.logits)]
        expected.append([torch.multinomial(p, 1, generator=generator)[0].tolist() for p in probs])
    found: list[list[list[int]]] = [[], [], []]
    for token_index in range(4):
        for i, call in enumerate(calls):
            call.processors[0].temperature = 0.2 + token_index * (1 + i)
        batches = [SamplingBatch(call.sampler, [0], [token_index], [i], token_index) for i, call in enumerate(calls)]
        for i, tokens in enumerate(chosen(batches, torch.cat([call.logits[token_index] for call in calls]))):
            found[i].append(tokens)
    assert found == expected


# What looks at the tokens so far


class Mine(hf.TemperatureLogitsWarper):
    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        return scores.flip(-1)


def test_processors_that_look_where_tokens_are_or_are_unknown() -> None:
    """Rows of such a call meet no others, and the calls beside them are not changed by that."""
    ignoring = hf.RepetitionPenaltyLogitsProcessor(1.9, prompt_ignore_length=2)
    unmerged = [ignoring, Mine(0.5), hf.NoRepeatNGramLogitsProcessor(1)]
    calls = [
        Call([own, hf.TemperatureLogitsWarper(0.5)], make_logits("plain", 4, 2, 12, seed), seed)
        for seed, own in enumerate(unmerged)
    ]
    assert [call.sampler.kind for call in calls] == [None] * len(calls)
    assert all(needs_ids(call.processors) for call in calls)
    penalized = [
        Call([hf.RepetitionPenaltyLogitsProcessor(1.2 + seed)], make_logits("plain", 4, 2, 12, seed), seed, width)
        for seed, width in enumerate([1, 5, 3])
    ]
    assert len({call.sampler.kind for call in penalized}) == 1 and penalized[0].sampler.kind is not None
    assert not needs_ids([hf.TemperatureLogitsWarper(0.5)]) and not needs_ids([])
    check([call for pair in zip(calls, [*penalized, Call([], calls[0].logits, 9)]) for call in pair])


def test_a_number_divides_as_it_does_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a tensor over a Python number is a product with its reciprocal; on CPU a quotient."""
    column = torch.tensor([[0.7], [1.3]])
    divisor = _Divisor(column)
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(scores / divisor, torch.stack([scores[0] / 0.7, scores[1] / 1.3]))
    assert torch.equal(scores * divisor, torch.stack([scores[0] * 0.7, scores[1] * 1.3]))
    assert not torch.equal(scores / column, scores * column.reciprocal()), "the two are told apart by these numbers"


def test_nothing_is_read_back_while_tokens_are_chosen() -> None:
    """Tensors on the meta device have no values: asking for one raises."""
    processors = [
        processors_of({"repetition_penalty": 1.3, "temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1}),
        processors_of({"repetition_penalty": 1.7, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.2}),
        processors_of({"temperature": 0.7}),
        [],
    ]
    meta = torch.device("meta")
    table, ids = TokenTable(meta), torch.zeros(2, 9, dtype=torch.int64)

    def never(ids: Tensor, scores: Any) -> Tensor:
        return ids[:, -1] < 0

    batches = [
        SamplingBatch(
            RowSampler(own, None, processor_kinds(own), never, table, table.add(ids[:, : 4 + i]), 4 + i, meta),
            [0, 1],
            [0, 0],
            [2 * i, 2 * i + 1],
            0,
        )
        for i, own in enumerate(processors)
    ]
    found = sample_tokens(batches, torch.zeros(8, 40, device=meta))
    assert found.places == [0, 2, 4, 6] and found.tokens.shape == (8,)
    with pytest.raises(NotImplementedError):
        found.read()


# TokenTable


@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_token_table(data: st.DataObject) -> None:
    """Against lists: rows come, grow at their own pace, and go."""
    table = TokenTable(torch.device("cpu"))
    rows: dict[int, list[int]] = {}
    number = 0
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "write", "remove", "read"] if rows else ["add"]))
        some = sorted(data.draw(st.sets(st.sampled_from(sorted(rows)), min_size=1))) if rows else []
        if action == "add":
            count, width = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3, 70, 200]))
            prompts = torch.arange(number, number + count * width).view(count, width)
            number += count * width
            for row, prompt in zip(table.add(prompts), prompts.tolist(), strict=True):
                assert row not in rows
                rows[row] = prompt
        elif action == "write":
            tokens = torch.arange(number, number + len(some))
            number += len(some)
            table.write(some, [len(rows[row]) for row in some], tokens)
            for row, token in zip(some, tokens.tolist(), strict=True):
                rows[row].append(token)
        elif action == "remove":
            table.remove(some)
            for row in some:
                del rows[row]
        else:
            width = max(len(rows[row]) for row in some)
            expected = [rows[row] + rows[row][-1:] * (width - len(rows[row])) for row in some]
            assert table.read(some, [len(rows[row]) for row in some]).tolist() == expected
        assert table.num_rows == len(rows)


# NaN


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_rows_without_probabilities(number: float, options: dict[str, Any]) -> None:
    """-1 for them, the others as ever: in the same call, in one of the same kind, in another."""
    calls = [Call(processors_of(options), make_logits("plain", 1, 3, 40, i), i) for i in range(3)]
    calls.append(Call([], make_logits("plain", 1, 2, 40, 3), None))
    expected = [call.expected()[0] for call in calls]
    calls[1].logits[0, 1, 7] = number
    found = [tokens[0] for tokens in run(calls)]
    expected[1][1] = -1
    assert found == expected


def test_a_row_of_which_all_is_forbidden() -> None:
    calls = [Call([], make_logits("plain", 1, 1, 9, i), i) for i in range(2)]
    expected = [call.expected()[0] for call in calls]
    calls[0].logits[:] = -float("inf")
    assert [tokens[0] for tokens in run(calls)] == [[-1], expected[1]]


def test_greedy_takes_a_nan_as_torch_does() -> None:
    call = Call([], make_logits("plain", 1, 3, 9, 0), None)
    call.logits[0, 1, 4] = float("nan")
    assert run([call]) == [call.expected()]


# SamplingNoise


def test_rows_that_lag_behind_share_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: the whole batch's noise drawn again in each step for each row that began later."""
    like, lags = torch.empty(1, 20), [0, 1, 3]
    plain, noise = (SamplingNoise(torch.Generator().manual_seed(3), len(lags)) for _ in range(2))
    expected = [plain.rows(index, [0, 1, 2], like, index) for index in range(9)]
    draws = Mock(wraps=draws_of_calls.exponential)
    monkeypatch.setattr(draws_of_calls, "exponential", draws)
    for step in range(9):
        for row, lag in enumerate(lags):
            if step >= lag:
                found = noise.rows(step - lag, [row], like, max(step - 3, 0))
                assert torch.equal(found[0], expected[step - lag][row])
    assert draws.call_count == 9


# Whole models

SETTINGS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "suppress_tokens": [5, 9, 12]},
    {"do_sample": False, "repetition_penalty": 1.5},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5, "temperature": 0.9},
    {"top_k": 0},
    {"top_k": 1000},
    {"top_p": 0.2},
    {"top_p": 0.95, "top_k": 12},
    {"top_p": 0.95, "top_k": 30},
    {"min_p": 0.1},
    {"min_p": 0.5},
    {"typical_p": 0.5},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.05},
    {"eta_cutoff": 0.3},
    {"renormalize_logits": True, "remove_invalid_values": True},
    {"repetition_penalty": 1.7, "temperature": 2.0},
    {"no_repeat_ngram_size": 2, "top_k": 3},
    {"bad_words_ids": [[7], [8, 9]]},
    {"num_return_sequences": 3, "temperature": 1.3},
    {"num_return_sequences": 2, "top_p": 0.7},
    {"num_return_sequences": 2, "eos_token_id": list(range(3, 40)), "pad_token_id": 0},
    {"temperature": 0.6, "eos_token_id": list(range(3, 50)), "pad_token_id": 0},
]


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [(torch.float32, {}), (torch.float32, {"num_blocks": 24, "max_num_batched_tokens": 16}), (torch.bfloat16, {})],
    ids=["roomy", "tight", "bfloat16"],
)
def test_requests_of_many_kinds_at_once(dtype: torch.dtype, limits: dict[str, int]) -> None:
    stock = build("llama", dtype=dtype)
    model = hf_paged.patch(copy.deepcopy(stock), **({"block_size": 4, "num_blocks": 256} | limits))
    arguments = [{"do_sample": True, "max_new_tokens": 8, "eos_token_id": None} | own for own in SETTINGS]
    prompts = [random_ids(1, 3 + i % 5, seed=i) for i in range(len(SETTINGS))]
    expected = []
    for seed, (ids, own) in enumerate(zip(prompts, arguments)):
        torch.manual_seed(seed)
        expected.append(stock.generate(ids, **own)[:, ids.shape[1] :].tolist())
    with model.paged.core.worker.loop.exclusive():
        requests = []
        for seed, (ids, own) in enumerate(zip(prompts, arguments)):
            torch.manual_seed(seed)
            requests.append(model.paged.submit(ids, **own))
    found = [request.result(60).sequences for request in requests]
    differing = [own for own, one, other in zip(SETTINGS, expected, found) if one != other]
    if dtype == torch.float32:
        assert not differing
    else:  # products are rounded by how many rows are multiplied at once
        assert len(differing) <= len(SETTINGS) // 4, differing
    stats = model.paged.stats()
    if limits:
        assert stats.num_preemptions > 0
    else:
        assert stats.num_steps < 8 * 4, "the requests did not meet"
    model.paged.check_invariants()
    assert stats.num_free_blocks == stats.num_blocks


BAD = 5  # a token whose embedding is NaN


@pytest.mark.parametrize(
    "own",
    [
        {"temperature": 0.7},
        {"top_k": 4, "top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.8},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.01},
        {"renormalize_logits": True},
        {"repetition_penalty": 1.3},
        {"num_return_sequences": 2},
    ],
    ids=str,
)
def test_only_the_request_with_nan_fails(own: dict[str, Any]) -> None:
    """Beside it run requests of the very same settings, of others, and greedy ones."""
    stock = build("llama")
    with torch.no_grad():
        stock.model.embed_tokens.weight[BAD] = float("nan")
        stock.lm_head.weight[BAD] = -stock.lm_head.weight.abs().max()  # which is never generated
    model = hf_paged.patch(copy.deepcopy(stock), block_size=4, num_blocks=64)
    prompt = [token for token in random_ids(1, 12)[0].tolist() if token != BAD][:7]
    others = [own, {"temperature": 1.2}, {"do_sample": False}, own | {"temperature": 0.4}]
    others = [{"do_sample": True, "max_new_tokens": 5, "eos_token_id": None, "bad_words_ids": None} | o for o in others]
    for request in others:
        request["suppress_tokens"] = [BAD]
    expected = []
    for arguments in others:
        torch.manual_seed(3)
        expected.append(stock.generate(torch.tensor([prompt]), **arguments)[:, len(prompt) :].tolist())
    with pytest.raises((RuntimeError, ValueError)):
        stock.generate(torch.tensor([[*prompt, BAD, prompt[0]]]), **others[0])
    with model.paged.core.worker.loop.exclusive():
        requests = []
        for number, arguments in enumerate(others):
            if number == 2:
                bad = model.paged.submit([*prompt, BAD, prompt[0]], **others[0])
            torch.manual_seed(3)
            requests.append(model.paged.submit(prompt, **arguments))
    with pytest.raises((RuntimeError, ValueError)):
        bad.result(30)
    assert [request.result(30).sequences for request in requests] == expected
    assert max(max(row) for row in expected[2]) < VOCAB
    model.paged.check_invariants()
    stats = model.paged.stats()
    assert stats.num_free_blocks == stats.num_blocks
