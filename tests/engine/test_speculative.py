"""Drafts that the engine verifies: the tokens without them, whatever shares their steps; alone, stock's draws too."""

from __future__ import annotations

import copy
import random
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2LMHeadModel,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TopPLogitsWarper,
)
from transformers.generation import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_paged
from helpers.models import PAD, VOCAB, build, name_of, ragged_batch, random_ids, tiny_lm, tiny_tokenizer
from helpers.pairs import MakePair, Pair, logged_messages
from helpers.requests import POOLS, settle
from helpers.waiting import PATIENCE, at_once, in_background
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.engine.draft_budget import PAUSE, RowBudget
from hf_paged.engine.sampled_run import CallRows, SampledRun
from hf_paged.sampling.lookup import LookupRules, LookupSettings, PromptLookup
from hf_paged.sampling.random import NoiseAhead, SamplingNoise, StepNoise

LOOKUP = {"prompt_lookup_num_tokens": 3}
SOME_EOS = list(range(2, 14))
REPEATS = {"repetition_penalty": 0.6}  # text that repeats itself: drafts are right


@pytest.fixture
def speculated(monkeypatch: pytest.MonkeyPatch) -> list[SampledRun]:
    """The calls whose drafts the engine has verified."""
    found: list[SampledRun] = []
    original = SampledRun.__init__

    def noting(self: SampledRun, call: CallRows, *args: Any) -> None:
        original(self, call, *args)
        if call.has_drafts:
            found.append(self)

    monkeypatch.setattr(SampledRun, "__init__", noting)
    return found


@pytest.fixture
def any_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have now more and now fewer drafts, or none for a while, whatever pays."""
    rng = random.Random(1)

    def most(budget: RowBudget, num_tokens: int, _: int) -> int:
        count = max(rng.randint(0, budget.limit), rng.randint(0, budget.limit))
        budget.resume_at = 0 if count else num_tokens + rng.choice([0, 0, 3])
        return count

    monkeypatch.setattr(RowBudget, "most", most)
    monkeypatch.setattr(RowBudget, "note", lambda *_: None)


def repeating(length: int, seed: int = 0) -> Tensor:
    return random_ids(1, 5, seed=seed).repeat(1, -(-length // 5))[:, :length]


def draft_model(model: Any = None) -> Any:
    draft = hf_paged.patch(copy.deepcopy(model) if model is not None else build("llama", layers=1, seed=9))
    draft.generation_config.num_assistant_tokens = 4
    return draft


SETTINGS: dict[str, dict[str, Any]] = {
    "best": {},
    "best_repeating": REPEATS,
    "best_ends": {"eos_token_id": SOME_EOS, "min_new_tokens": 3},
    "drawn": {"do_sample": True},
    "drawn_sharply": {"do_sample": True, "temperature": 0.3, "top_k": 0},
    # The first tokens of the vocabulary are no drafts: transformers asks its processors about equal scores.
    "drawn_from_the_top": {"do_sample": True, "top_p": 0.6, "temperature": 0.4},
    "drawn_repeating": {"do_sample": True, "temperature": 0.5, "top_k": 0} | REPEATS,
    "drawn_ends": {"do_sample": True, "temperature": 0.3, "eos_token_id": SOME_EOS, "min_new_tokens": 4},
    "drawn_without_repeats": {"do_sample": True, "no_repeat_ngram_size": 3, "temperature": 0.4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_alone(make_pair: MakePair, speculated: list[SampledRun], name: str) -> None:
    """Would break: another draft than stock's, which draws for each; a draft forbidden there, allowed here."""
    num_calls = 0
    pair = make_pair()
    for num_tokens, ngram, new in ((1, None, 1), (3, 2, 2), (3, 1, 30), (8, 3, 30)):
        given = {"prompt_lookup_num_tokens": num_tokens, "max_matching_ngram_size": ngram, "max_new_tokens": new}
        given = {"pad_token_id": PAD, "input_ids": repeating(14), "eos_token_id": None} | given
        pair.generate(**given | SETTINGS[name])
        num_calls += 1
    assert len(speculated) == num_calls


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", ["best_repeating", "drawn_repeating"])
@pytest.mark.usefixtures("any_budget")
def test_alone_in_any_pool(make_pair: MakePair, pool: str, name: str) -> None:
    """Would break: drafts whose logits come in several steps, which are cut off with blocks or with part of one."""
    pair = make_pair(**POOLS[pool])
    pair.generate(input_ids=repeating(14), max_new_tokens=40, pad_token_id=PAD, **LOOKUP, **SETTINGS[name])
    assert pair.delta["num_accepted_tokens"] > 4, "the test is too easy"


@pytest.mark.parametrize("name", ["best_repeating", "drawn_repeating"])
@pytest.mark.usefixtures("full_budget")
def test_preempted_amid_its_drafts(make_pair: MakePair, speculated: list[SampledRun], name: str) -> None:
    """Would break: a row computed again for logits that it has been given, which then belong to other drafts."""
    pair = make_pair(max_num_batched_tokens=2, enable_prefix_caching=False)
    given = {"input_ids": repeating(10), "max_new_tokens": 16, "eos_token_id": None} | LOOKUP | SETTINGS[name]
    torch.manual_seed(3)
    expected = pair.stock.generate(**given)[0, 10:].tolist()
    pair.engine.pause()
    seed = {"seed": 3} if "do_sample" in given else {}
    request = pair.engine.submit(**given, **seed)
    seen: set[int] = set()
    while pair.engine.step() is not None:
        for row in speculated[0].rows:
            num_tokens = len(row.tokens)
            if row.finish_reason is None and row.num_chosen > num_tokens and num_tokens not in seen:
                seen.add(num_tokens)
                with pair.engine.core.transaction():
                    assert pair.engine.core.pool.scheduler.preemption.preempt_all() == 0
    assert request.result(PATIENCE).token_ids == expected
    assert len(seen) > 2, "the test is too easy"
    pair.engine.resume()


BATCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ends": {"eos_token_id": SOME_EOS},
    "fewer_ends": {"eos_token_id": SOME_EOS, "min_new_tokens": 6},
    "no_repeats": {"no_repeat_ngram_size": 4},
    "without_padding": {"lengths": (15, 15, 15)} | REPEATS,
}


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma2", "mistral"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches(make_pair: MakePair, speculated: list[SampledRun], model: str, name: str) -> None:
    """Would break: a row's draft taken for another's; stock raises, so the tokens are those without drafts."""
    given = dict(BATCHES[name])
    batch = ragged_batch(given.pop("lengths", (21, 14, 9, 2)))
    for row, tokens in enumerate(batch["input_ids"]):
        tokens[-9:] = tokens[-3:].repeat(3) if row != 3 else tokens[-9:]
    pair = make_pair(model, block_size=2)
    given |= {"max_new_tokens": 30, "pad_token_id": PAD}
    expected = pair.stock.generate(**batch, **given)
    assert torch.equal(pair.paged.generate(**batch, **given, **LOOKUP), expected)
    assert len(speculated) == 1
    assert pair.engine.check_invariants() is None


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "assistant_model"])
def test_what_a_batch_does_without(pair: Pair, speculated: list[SampledRun], name: str) -> None:
    """Would break: an error about batches from stock's loop, or silence about drafts that are left out."""
    given = ragged_batch() | {"max_new_tokens": 6, "pad_token_id": PAD}
    more = {"return_dict_in_generate": True, "output_scores": True}
    expected, _ = pair.generate(**given, **more)
    with logged_messages() as messages:
        drafts = LOOKUP if name in LOOKUP else {name: draft_model()}
        found = pair.paged.generate(**given, **more, **drafts)
    assert any(f"runs without {name}" in text for _, text in messages), messages
    assert torch.equal(found.sequences, expected.sequences)
    assert not speculated


def test_drafts_for_a_batch_of_a_model_that_is_not_patched(pair: Pair) -> None:
    """Would break: transformers' error, that says nothing of what would work."""
    with pytest.raises(ValueError, match=r"batch_size = 1 \(got \d\), or with a patched model.*hf_paged\.patch"):
        pair.paged.generate(**ragged_batch(), max_new_tokens=6, assistant_model=build("llama", layers=1))
    pair.assert_all_free()


DRAWN: dict[str, dict[str, Any]] = {
    "sharply": {"temperature": 0.3, "top_k": 0},
    "from_the_top": {"top_p": 0.6, "temperature": 0.4, "eos_token_id": SOME_EOS},
    "repeating": {"temperature": 0.5, "top_k": 0, "lengths": (15, 15, 15)} | REPEATS,
    "without_repeats": {"no_repeat_ngram_size": 3, "temperature": 0.4},
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("pool", ["roomy", "recompute", "few_tokens"])
@pytest.mark.parametrize("source", ["lookup", "the_same", "another"])
@pytest.mark.usefixtures("any_budget")
def test_drawn_batches(make_pair: MakePair, pool: str, source: str, name: str) -> None:
    """Would break: draws that depend on how many drafts there were, and so on time and on what else runs."""
    pair = make_pair(**POOLS[pool])
    given = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": PAD, "eos_token_id": None} | DRAWN[name]
    given |= ragged_batch(given.pop("lengths", (21, 14, 9, 2)))
    for tokens in given["input_ids"]:
        tokens[-9:] = tokens[-3:].repeat(3)
    torch.manual_seed(5)
    expected = pair.stock.generate(**given)
    state = torch.get_rng_state()
    drafts: dict[str, Any] = LOOKUP
    if source != "lookup":
        drafts = {"assistant_model": draft_model(pair.stock if source == "the_same" else None)}
    torch.manual_seed(5)
    assert torch.equal(pair.paged.generate(**given, **drafts), expected)
    assert torch.equal(torch.get_rng_state(), state)
    stats = pair.engine.stats()
    assert stats.num_draft_tokens > 10, "the test is too easy"
    if source == "the_same" and name in ("sharply", "repeating"):  # others end, or keep to what was there before
        assert stats.num_accepted_tokens >= 0.9 * stats.num_draft_tokens
    settle(pair)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.usefixtures("any_budget")
def test_beside_each_other(make_pair: MakePair, speculated: list[SampledRun], pool: str) -> None:
    """Would break: rows preempted between their logits and their tokens, drafts of one step taken for the next's."""
    pair = make_pair(**POOLS[pool])
    jobs: list[dict[str, Any]] = []
    for index in range(10):
        given = {"input_ids": repeating(5 + 2 * (index % 5), seed=index), "max_new_tokens": 4 + 2 * index}
        given |= {"eos_token_id": [[2, 3], SOME_EOS, None][index % 3], "pad_token_id": PAD}
        given |= REPEATS if index % 2 else {"no_repeat_ngram_size": 5} if index % 4 else {}
        jobs.append(given)
    expected = [pair.stock.generate(**given)[0, given["input_ids"].shape[1] :].tolist() for given in jobs]
    pair.engine.pause()
    requests = [pair.engine.submit(**given, **({} if index % 5 == 4 else LOOKUP)) for index, given in enumerate(jobs)]
    pair.engine.resume()
    assert [request.result(PATIENCE).token_ids for request in requests] == expected
    assert len(speculated) == 8
    if pool in ("recompute", "swap"):
        assert pair.engine.stats().num_preemptions > 0, "the test is too easy"
    settle(pair)


@pytest.mark.parametrize("arguments", [{}, {"seed": 3, "do_sample": True, "temperature": 0.3}], ids=name_of)
def test_requests(pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: tokens of a step streamed out of order, logprobs of drafts that were wrong."""
    given = {"max_new_tokens": 30, "eos_token_id": None, **REPEATS, **LOOKUP} | arguments
    generated = {name: value for name, value in given.items() if name != "seed"}
    torch.manual_seed(3)
    expected = pair.stock.generate(repeating(14), **generated, pad_token_id=PAD)[0, 14:].tolist()
    request = pair.engine.submit(repeating(14)[0], **given, logprobs=2, logprobs_mode="processed", pad_token_id=PAD)
    assert list(request) == expected
    output = request.result()
    assert output.token_ids == expected and output.finish_reason == "length"
    assert output.logprobs is not None and [said.token_id for said in output.logprobs[0]] == expected
    settle(pair)


def test_a_model_of_few_positions(make_pair: MakePair) -> None:
    """Would break: a draft at a position that the model's table doesn't have, which stock tries."""
    pair = make_pair("gpt2", num_blocks=400)
    room = int(pair.stock.config.n_positions)
    ids = repeating(room - 6)
    given = {"max_length": room, "eos_token_id": None, "pad_token_id": PAD} | REPEATS
    expected = pair.stock.generate(ids, **given)
    assert torch.equal(pair.paged.generate(ids, **given, **LOOKUP), expected)


@pytest.mark.parametrize("arguments", [{"prompt_lookup_num_tokens": 0}, {**LOOKUP, "max_matching_ngram_size": -1}])
def test_settings_that_are_none(pair: Pair, arguments: dict[str, int]) -> None:
    for rows in (1, 2):
        with pytest.raises(ValueError, match="Invalid max_matching_ngram_size or num_output_tokens"):
            pair.paged.generate(random_ids(rows, 5), max_new_tokens=5, **arguments)
    with pytest.raises(ValueError, match="num_return_sequences has to be 1"):
        pair.paged.generate(random_ids(1, 5), do_sample=True, num_return_sequences=2, max_new_tokens=5, **LOOKUP)


@pytest.mark.parametrize("kind", ["the_same", "another", "one_that_fails"])
def test_a_draft_model(make_pair: MakePair, speculated: list[SampledRun], kind: str) -> None:
    pair = make_pair()
    draft = draft_model(pair.stock if kind == "the_same" else None)
    given = ragged_batch((21, 14, 9, 2)) | {"max_new_tokens": 30, "pad_token_id": PAD, "eos_token_id": SOME_EOS}
    given["min_new_tokens"] = 9
    expected = pair.stock.generate(**given)
    if kind == "one_that_fails":

        def boom(*_: Any) -> None:
            raise OSError("boom")

        draft.model.layers[0].register_forward_pre_hook(hf_paged.packed_hook(boom))
        with pytest.raises(OSError, match="boom"):
            pair.paged.generate(**given, assistant_model=draft)
    else:
        assert torch.equal(pair.paged.generate(**given, assistant_model=draft), expected)
        stats = pair.engine.stats()
        assert stats.num_draft_tokens > 0
        if kind == "the_same":
            assert stats.num_accepted_tokens >= 0.8 * stats.num_draft_tokens
    assert torch.equal(pair.paged.generate(**given), expected)
    assert len(speculated) == 1
    settle(pair)
    assert draft.paged.stats().num_running == 0


def test_draft_models_of_two_models(make_pair: MakePair) -> None:
    """Would break: callers whose steps wait for a draft model that other callers are busy with."""
    pair = make_pair()
    draft = hf_paged.patch(build("llama", layers=1, seed=9), block_size=2)
    given = ragged_batch((11, 7, 2)) | {"max_new_tokens": 12, "pad_token_id": PAD}
    expected = [model.generate(**given).tolist() for model in (pair.stock, draft)]
    calls = [partial(pair.paged.generate, assistant_model=draft), draft.generate] * 3
    assert at_once(lambda call: call(**given).tolist(), calls, seconds=3 * PATIENCE) == expected * 3


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("source", ["lookup", "model"])
def test_stop_strings_of_several_tokens(source: str, is_drawn: bool, any_budget: None) -> None:
    """Would break: criteria that look at the end of a row, and see what lies behind a shorter one's."""
    tokenizer, stock = copy.deepcopy(tiny_tokenizer()), tiny_lm()
    prompts = ["Once upon a time, there was a", "The little girl", "Tom and Sam went to the park", "One day"]
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    given = dict(tokenizer(prompts, return_tensors="pt", padding=True))
    given |= {"max_new_tokens": 40, "do_sample": is_drawn, "temperature": 0.2, "tokenizer": tokenizer}
    stops = [" the the", " to to", ",,", "e "] if is_drawn else [" the the"]
    model, draft_model = hf_paged.patch(tiny_lm()), hf_paged.patch(tiny_lm())
    drafts: Any = LOOKUP if source == "lookup" else {"assistant_model": draft_model}
    for stop in stops:
        torch.manual_seed(3)
        expected, state = stock.generate(**given, stop_strings=[stop]), torch.get_rng_state()
        torch.manual_seed(3)
        assert model.generate(**given, stop_strings=[stop], **drafts).equal(expected)
        assert torch.get_rng_state().equal(state)
    assert model.paged.stats().num_draft_tokens


@pytest.mark.parametrize("lacks", ["positions", "blocks"])
def test_an_assistant_that_does_not_reach_as_far(lacks: str, pair: Pair) -> None:
    """Would break: a call that fails where it can do without drafts."""
    if lacks == "blocks":
        assistant = hf_paged.patch(build("llama", layers=1), num_blocks=9, block_size=2)
    else:
        config = copy.deepcopy(build("gpt2").config)
        config.n_positions = 24
        assistant = hf_paged.patch(GPT2LMHeadModel(config).eval())
    given = ragged_batch((11, 7, 2)) | {"max_new_tokens": 30, "pad_token_id": PAD, "eos_token_id": None}
    expected = pair.stock.generate(**given)
    assert pair.paged.generate(**given, assistant_model=assistant).equal(expected)
    assert pair.paged.paged.stats().num_draft_tokens and assistant.paged.stats().num_generated_tokens
    assistant.paged.check_invariants()


def test_models_that_assist_each_other_at_the_same_moment(pair: Pair) -> None:
    """Would break: a look at the other one's calls that comes before its call is among them."""
    models = pair.paged, hf_paged.patch(build("llama", layers=1, seed=9))
    given = ragged_batch((11, 7, 2)) | {"max_new_tokens": 40, "pad_token_id": PAD, "eos_token_id": None}
    for _ in range(6):
        barrier = threading.Barrier(2)

        def ask(model: Any, other: Any) -> None:
            barrier.wait()  # noqa: B023
            model.generate(**given, assistant_model=other)

        futures = [in_background(ask, *both) for both in (models, models[::-1])]
        errors = [error for future in futures if (error := future.exception(PATIENCE)) is not None]
        assert len(errors) < 2
        assert all(isinstance(e, UnsupportedCallError) and "is itself assisted" in str(e) for e in errors)
    for model in models:
        model.paged.check_invariants()
        assert model.paged.generate([[5, 6, 7]], max_new_tokens=2), "it waits for ever"


def simulate(budget: RowBudget, right: float, rows: int, num_tokens: int = 0) -> tuple[float, int]:
    """Tokens a step of a row whose drafts are right so often, and how many it has."""
    rng, steps, end = random.Random(4), 400, num_tokens
    for _ in range(steps):
        count = budget.most(end, rows)
        accepted = next((n for n in range(count) if rng.random() >= right), count)
        end += accepted + 1
        if count:
            budget.note(count, accepted, end, rows)
    return (end - num_tokens) / steps, end


@pytest.mark.parametrize("rows", [1, 8])
def test_budgets(rows: int) -> None:
    """Would break: drafts that don't pay, none where they would, no way back from none."""
    assert simulate(RowBudget(5), 0.9, rows)[0] > (3 if rows == 1 else 2)
    budget = RowBudget(5)
    per_step, num_tokens = simulate(budget, 0.0, rows)
    assert per_step == 1
    num_drafts = sum(budget.most(num_tokens + ahead, rows) > 0 for ahead in range(PAUSE))
    assert num_drafts < PAUSE, "a row rests whose drafts are wrong"
    assert simulate(budget, 0.9, rows, num_tokens)[0] > (2.5 if rows == 1 else 1.5), "and comes back"
    assert simulate(RowBudget(5), 0.9, 1000)[0] < 1.1, "in a large step a draft costs as much as a row"


@pytest.mark.parametrize("knows_both", [True, False])
def test_a_call_waits_for_its_slowest_row(pair: Pair, monkeypatch: pytest.MonkeyPatch, knows_both: bool) -> None:
    """Would break: right drafts all along beside a row that has none, or too few where all rows have some."""
    ids = random_ids(2, 9)
    settings: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None}
    expected = pair.stock.generate(ids, **settings)
    lookups: list[PromptLookup] = []

    def drafts(self: PromptLookup, generated: list[int]) -> list[int]:
        if self not in lookups:
            lookups.append(self)  # the first row's comes first
        row, first = lookups.index(self), ids.shape[1] + len(generated)
        return expected[row, first : first + 3].tolist() if knows_both or row == 0 else []

    monkeypatch.setattr(PromptLookup, "drafts", drafts)
    assert torch.equal(pair.paged.generate(ids, prompt_lookup_num_tokens=3, **settings), expected)
    num_drafts = pair.engine.stats().num_draft_tokens
    assert num_drafts > 48 if knows_both else 0 < num_drafts < 12


PROCESSORS: list[list[Any]] = [
    [],
    [TopPLogitsWarper(0.5)],
    [RepetitionPenaltyLogitsProcessor(0.7), TopPLogitsWarper(0.1)],
    [NoRepeatNGramLogitsProcessor(3), MinNewTokensLengthLogitsProcessor(4, 9, [2, 3], device="cpu")],
]


@pytest.mark.parametrize("processors", PROCESSORS, ids=lambda own: str(len(own)))
def test_lookup(processors: list[Any]) -> None:
    """Would break: any rule of stock's search: the first place, shorter runs, ends, forbidden drafts, the length."""
    rng = random.Random(len(processors))
    num_found = 0
    for _ in range(300):
        length, alphabet = rng.randint(1, 30), rng.randint(1, 6)
        ids = [rng.randrange(alphabet) * 7 + 2 for _ in range(length)]
        num_tokens, ngram, more = rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 6)
        eos = tuple({rng.randrange(alphabet) * 7 + 2} if rng.random() < 0.3 else ())
        settings = LookupSettings(num_tokens, ngram, length + more, VOCAB, eos)
        rules = LookupRules(settings, processors, torch.device("cpu"))
        cut = rng.randint(1, length)
        lookup = PromptLookup(settings, ids[:cut], rules if processors else None)
        lookup.drafts(ids[cut : (cut + length) // 2])
        stock = PromptLookupCandidateGenerator(
            eos_token_id=torch.tensor(eos) if eos else None,
            num_output_tokens=num_tokens,
            max_matching_ngram_size=ngram,
            max_length=length + more,
            logits_processor=LogitsProcessorList(processors),
            vocab_size=VOCAB,
        )
        expected = stock.get_candidates(torch.tensor([ids]))[0][0, length:].tolist()
        assert lookup.drafts(ids[cut:]) == expected
        num_found += bool(expected)
    assert num_found > 30


def test_noise_of_a_step() -> None:
    """Would break: numbers drawn anew when they are asked for again, or other ones than torch.multinomial's."""
    probs = torch.rand(4, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    generator = torch.Generator().manual_seed(3)
    noise = StepNoise(generator)
    noise.expect(7, 4)
    found = noise.at([7, 8, 9, 10], [0] * 4, probs)
    assert torch.equal(noise.at([9], [0], probs), found[2:3])
    expected = torch.Generator().manual_seed(3)
    tokens = torch.multinomial(probs, 1, generator=expected)[:, 0]
    assert torch.equal((probs / found).argmax(-1), tokens)
    assert torch.equal(generator.get_state(), expected.get_state())


def test_noise_of_rows_ahead() -> None:
    """Would break: a row's noise that depends on when it is asked for, or on what other rows ask for."""
    like = torch.empty(3, 20)
    plain, noise = (SamplingNoise(torch.Generator().manual_seed(3), 3, num_kept=2) for _ in range(2))
    expected = [plain.rows(index, [0, 1, 2], like, 0) for index in range(9)]
    rng = random.Random(1)
    for _ in range(30):
        first = [rng.randrange(3) for _ in range(3)]
        noise.at([0, 1, 2], [0, 0, 0], like)
        ahead = NoiseAhead(noise, [2, 0, 1], first)
        for index in range(6):
            found = ahead.at([index] * 3, [0, 2, 1], like)
            wanted = [expected[first[own] + index][row] for own, row in ((0, 2), (2, 1), (1, 0))]
            assert torch.equal(found, torch.stack(wanted))


def test_drafts_of_one_noise() -> None:
    """Would break: tokens of another distribution than the model's, where drafts come from one of another."""
    generator = torch.Generator().manual_seed(2)
    count = 40_000
    right, wrong = (torch.rand(5, generator=generator).softmax(-1) for _ in range(2))
    noise = SamplingNoise(generator, count)
    rows, none = list(range(count)), [0] * count
    drafts = (wrong / NoiseAhead(noise, rows, none).at(none, rows, wrong)).argmax(-1)
    tokens = (right / noise.at(none, rows, right)).argmax(-1)
    for own, probs in ((drafts, wrong), (tokens, right)):
        expected = count * probs
        chi_square = ((own.bincount(minlength=5) - expected) ** 2 / expected).sum()
        assert chi_square < 18.5  # of 4 degrees of freedom, once in 1,000
    apart = 0.5 * (right - wrong).abs().sum().item()
    accepted = (drafts == tokens).float().mean().item()
    assert accepted > (1 - apart) / (1 + apart) - 0.01


def test_a_row_goes_on_like_one_that_has_ended() -> None:
    """Would break: drafts that change a token; the last row of a group, without drafts where its siblings had text."""
    settings = LookupSettings(3, 2, 100, VOCAB, ())
    lookup = PromptLookup(settings, [5, 6, 7])
    assert lookup.drafts([8, 9]) == []
    lookup.learn([7, 8, 9, 10, 11, 12, 13])
    assert lookup.drafts([8, 9]) == [10, 11, 12] and lookup.drafts([8, 9, 12]) == [13]
    assert lookup.drafts([8, 9, 12, 6]) == [7, 8, 9]  # its own come first

    model = hf_paged.patch(tiny_lm(), num_blocks=256)
    ids = torch.arange(40, 52)[None].repeat(6, 1)
    arguments: dict[str, Any] = {"do_sample": True, "temperature": 0.2, "top_k": 0, "max_new_tokens": 40}
    arguments |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
    accepted = []
    torch.manual_seed(0)
    plain = model.generate(ids, **arguments)
    ends = plain[:, ids.shape[1] + 5 :].flatten().bincount().argsort(descending=True)[3:6].tolist()
    for is_told in (False, True):
        found = []
        with pytest.MonkeyPatch.context() as patch:
            if not is_told:
                patch.setattr(PromptLookup, "learn", lambda *_: None)
            for lookups in ({}, {"prompt_lookup_num_tokens": 4}):
                torch.manual_seed(0)
                before = model.paged.stats()
                found.append(model.generate(ids, **arguments | lookups | {"eos_token_id": ends}))
                accepted.append(model.paged.stats().num_accepted_tokens - before.num_accepted_tokens)
        assert torch.equal(*found)
    assert accepted[3] >= accepted[1] > 0 == accepted[0]
