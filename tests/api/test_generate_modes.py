"""Every mode of `generate()` on a Llama: the same results as stock, under pools of every kind.

The modes are a table; a new one is a row. What each row must also show (sharing, leaving, chunks) is tested below it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    pipeline,
)

import hf_paged
from helpers.models import VOCAB, build, name_of, ragged_batch, random_ids, tiny_lm, tiny_tokenizer
from helpers.modes import DETAILS, EOS_OFTEN, MODES, NEW, SAMPLE, Mode, assistant, even_batch, one_prompt
from helpers.pairs import MakePair, Pair, assert_same
from helpers.user_code import PutRecorder, Recorder
from hf_paged.testing import compare_generations

POOLS: dict[str, dict[str, Any]] = {
    "blocks_of_1": {"block_size": 1, "num_blocks": 600, "max_num_batched_tokens": 256},
    "blocks_of_3_budget_3": {"block_size": 3, "max_num_batched_tokens": 3, "use_async_batching": True},
    "blocks_of_16_budget_2": {"block_size": 16, "max_num_batched_tokens": 2},
    "one_sequence_a_step": {"max_num_seqs": 1, "enable_prefix_caching": False, "use_async_batching": True},
}
OTHERS = [pool for pool in POOLS if pool != "blocks_of_3_budget_3"]


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        (name, pool)
        for number, name in enumerate(MODES)
        for pool in ("blocks_of_3_budget_3", OTHERS[number % len(OTHERS)])
    ],
)
def test_mode_matches_stock(make_pair: MakePair, name: str, pool: str) -> None:
    pair, mode = make_pair(**POOLS[pool]), MODES[name]
    mode.run(pair)
    assert pair.delta["num_steps"] > 0, "nothing ran over the pool"
    if mode.is_packed:
        budget = POOLS[pool].get("max_num_batched_tokens", 10**6)
        assert max(pair.seen) <= budget, "a forward was larger than the token budget"
        assert len(pair.seen) == pair.delta["num_steps"], "a forward ran that the engine did not drive"


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.is_packed])
def test_pool_too_small_for_the_batch(make_pair: MakePair, name: str) -> None:
    """One row fits, the batch doesn't. Would break: rows evicted and computed again, blocks shared meanwhile."""
    mode = MODES[name]
    batch = mode.batch()
    mask = batch.get("attention_mask")
    width = batch["input_ids"].shape[1] if "input_ids" in batch else 1
    prompt = width if mask is None else int(mask.sum(dim=1).max())
    new = mode.arguments.get("max_new_tokens", mode.arguments.get("max_length", width + NEW) - width)
    # The last token's keys are never needed, but those of candidates that are rejected are.
    spare = 2 if "prompt_lookup_num_tokens" in mode.arguments else -1
    pair = make_pair(block_size=2, num_blocks=-(-(prompt + new + spare) // 2), use_async_batching=True)
    mode.run(pair)
    num_rows = len(batch.get("input_ids", [0])) * mode.arguments.get("num_beams", 1)
    # Some rows end before others need their blocks, if those only skip the steps between.
    if num_rows > 1 and name not in ("no_time", "one_token", "eos_list", "sample_eos_often"):
        waited = pair.delta["num_preemptions"] + pair.delta["num_admission_stalls"]
        assert waited > 0, "everything fitted: the test is too easy"


PROMPT_TOKENS = 11 + 7 + 2  # of the ragged batch


@pytest.mark.parametrize("fan_out", [{"num_return_sequences": 6, "do_sample": True}, {"num_beams": 6}], ids=name_of)
def test_a_prompt_is_computed_and_stored_once_for_all_its_copies(make_pair: MakePair, fan_out: dict[str, Any]) -> None:
    pair = make_pair(block_size=4)
    pair.generate(**ragged_batch(), max_new_tokens=3, eos_token_id=None, **fan_out)
    assert pair.seen == [PROMPT_TOKENS, 18, 18], "a forward computed copies of a prompt, or padding"
    assert pair.delta["num_prefill_tokens"] == PROMPT_TOKENS - 3
    assert pair.delta["num_cow_copies"] > 0
    # Full blocks of the prompts, and each copy's own up to its 13, 9 or 4 tokens; without sharing it would be 48.
    assert pair.engine.stats().peak_blocks_in_use <= (2 + 1 + 0) + 6 * (2 + 2 + 1)


@pytest.mark.parametrize("name", ["eos_list", "sample_eos_often", "samples_eos_often"])
def test_finished_rows_leave_the_batch(make_pair: MakePair, name: str) -> None:
    pair = make_pair()
    _, found = MODES[name].run(pair)
    generated = found[:, 11:]
    is_eos = torch.isin(generated, torch.tensor(EOS_OFTEN))
    running = (is_eos.cumsum(dim=1) == 0).sum(dim=0).tolist()
    assert running[-2] < len(found), "no row ended early: the test is too easy"
    assert pair.seen == [PROMPT_TOKENS, *running[:-1]]


@pytest.mark.parametrize("early_stopping", [False, True])
def test_decided_prompts_of_a_beam_search_leave_the_batch(pair: Pair, early_stopping: bool) -> None:
    """Would break: not computing beams whose result can change no more, which stock does."""
    arguments = {"num_beams": 3, "eos_token_id": EOS_OFTEN, "early_stopping": early_stopping, "max_new_tokens": 20}
    pair.generate(**ragged_batch(), **arguments)
    assert pair.seen[0] == PROMPT_TOKENS and pair.seen[1] == 9
    assert (
        pair.seen[1:] == sorted(pair.seen[1:], reverse=True) and pair.seen[-1] < 9 and set(pair.seen[1:]) <= {3, 6, 9}
    )
    pair.generate(**ragged_batch(), **arguments, **DETAILS)
    assert set(pair.seen[1:]) == {9}, "the scores of all rows were asked for"


@pytest.mark.parametrize("name", ["details", "stateful_processor", "row_indexed_processor", "row_criterion"])
def test_rows_stay_where_user_code_sees_the_whole_batch(make_pair: MakePair, name: str) -> None:
    pair = make_pair()
    MODES[name].run(pair)
    assert set(pair.seen[1:]) == {3}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[("logits_processor", name) for name in ("eos_list", "samples_eos_often", "beams_eos_often", "prompt_lookup")],
        *[("logits_processor", name) for name in ("embeds", "guidance")],
        *[("streamer", name) for name in ("greedy", "eos_list", "samples_eos_often", "prompt_lookup")],
        *[("streamer", name) for name in ("prefill_chunks", "no_time")],
    ],
)
def test_user_code_is_given_what_stock_would_give_it(make_pair: MakePair, kind: str, name: str) -> None:
    """Would break: ids, scores or rows that a processor sees; a put too many, missing, or in another shape."""
    mode, seen = MODES[name], []

    def make(model: Any) -> dict[str, Any]:
        own = Recorder() if kind == "logits_processor" else PutRecorder()
        seen.append(own.seen)
        return (mode.make(model) if mode.make else {}) | {kind: [own] if kind == "logits_processor" else own}

    Mode(mode.arguments, make, mode.batch).run(make_pair())
    assert_same(*seen)
    assert len(seen[1]) >= (4 if kind == "logits_processor" else 3)


def test_results_are_ordinary_tensors(pair: Pair) -> None:
    """Would break: inference tensors handed out, which can be neither written nor used in training."""
    _, plain = pair.generate(**ragged_batch(), max_new_tokens=3)
    _, found = pair.generate(**ragged_batch(), max_new_tokens=3, output_hidden_states=True, **DETAILS)
    weight = torch.ones(VOCAB, requires_grad=True)
    for tensor in (plain, found.sequences, found.scores[0], found.logits[1], found.hidden_states[0][1]):
        assert not tensor.is_inference() and not tensor.requires_grad
        tensor += 1
    (found.logits[0] * weight).sum().backward()
    assert weight.grad is not None
    del found
    pair.generate(**ragged_batch(), max_new_tokens=3)  # what a caller writes into results reaches no other call


@pytest.mark.parametrize("first", [torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    "second", [torch.inference_mode, torch.enable_grad, torch.no_grad], ids=lambda mode: mode.__name__
)
def test_grad_modes_may_change_between_calls(make_pair: MakePair, first: Any, second: Any) -> None:
    """Would break: a pool allocated as an inference tensor, which later calls can't write."""
    pair = make_pair()
    for mode in (first, second):
        with mode():
            pair.generate(**ragged_batch(), max_new_tokens=4)
            assert torch.is_grad_enabled() == (mode is torch.enable_grad)


@pytest.mark.parametrize("name", ["greedy", "beams", "samples", "hidden_states", "right_padded", "guidance"])
def test_eager_attention(make_pair: MakePair, name: str) -> None:
    MODES[name].run(make_pair(build("llama", attention="eager")))


def test_autocast(pair: Pair) -> None:
    """Would break: generation under autocast, or blocks filled there and served to calls without it."""
    arguments = ragged_batch((20, 13, 9)) | DETAILS | {"max_new_tokens": 4}
    logits = []
    for model in (pair.stock, pair.paged):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits.append(torch.stack(model.generate(**arguments).logits))
    torch.testing.assert_close(*logits, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps * 4.0)
    expected, _ = pair.generate(**arguments)
    assert pair.delta["prefix_cache_hit_tokens"] == 0
    assert not torch.equal(torch.stack(expected.logits), logits[0]), "autocast changed nothing: the test is too easy"


class Reentrant(LogitsProcessor):
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        beams = self.model.generate(random_ids(1, 5), max_new_tokens=3, num_beams=2)
        return scores + 0.1 * beams.float().mean() * input_ids[:, -1:] / VOCAB


def test_generate_inside_a_processor(pair: Pair) -> None:
    """Would break: user code that uses the model itself: a deadlock, or one call's state in the other."""
    pair.generate(make=lambda model: {"logits_processor": [Reentrant(model)]}, **ragged_batch(), max_new_tokens=4)


def own_loop(model: Any, input_ids: Tensor, generation_config: GenerationConfig, **kwargs: Any) -> Tensor:
    """A user's decoding method: greedy, over the cache that `generate()` prepared."""
    cache = kwargs["past_key_values"]
    for _ in range(6):
        logits = model(input_ids[:, cache.get_seq_length() :], past_key_values=cache).logits
        input_ids = torch.cat([input_ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    return input_ids


def test_custom_generate(pair: Pair) -> None:
    pair.generate(**even_batch(), custom_generate=own_loop)
    assert pair.seen == [33, 3, 3, 3, 3, 3] and pair.delta["num_steps"] == 6


def test_draws_behind_a_call_inside(text_pair: Pair) -> None:
    """Would break: the same draws again, for a call that transformers prepares by another one."""
    found = []
    given = tiny_tokenizer()("He said (t", return_tensors="pt") | {"tokenizer": tiny_tokenizer()}
    for model in (text_pair.stock, text_pair.paged):
        model.generation_config.do_sample = True
        torch.manual_seed(0)
        found.append(model.generate(**given, token_healing=True, max_new_tokens=20))
    assert torch.equal(*found)


ASSISTED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("similar", {}),
    "other": ("other", {}),
    "sampling": ("similar", SAMPLE | {"temperature": 0.5}),
    "sampling_other": ("other", SAMPLE),
    "eos_often": ("similar", {"eos_token_id": EOS_OFTEN}),
    "processors": ("similar", {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),
    "details": ("similar", DETAILS),
}


@pytest.mark.parametrize("is_assistant_patched", [False, True], ids=["stock_assistant", "patched_assistant"])
@pytest.mark.parametrize("name", ASSISTED)
def test_assisted_decoding(make_pair: MakePair, name: str, is_assistant_patched: bool) -> None:
    """Would break: rollback of rejected candidates (`crop`) in the model's pool or the assistant's."""
    kind, arguments = ASSISTED[name]
    settings = {"block_size": 3, "num_blocks": 64} if is_assistant_patched else None
    pair, helpers = make_pair(block_size=2), []

    def make(model: Any) -> dict[str, Any]:
        helpers.append(assistant(kind, settings if model is pair.paged else None))
        return {"assistant_model": helpers[-1]}

    expected, found = pair.generate(make=make, **one_prompt(), max_new_tokens=NEW, **arguments)
    new = (found if isinstance(found, Tensor) else found.sequences).shape[1] - 15
    if name in ("greedy", "sampling", "details"):
        assert len(pair.seen) < new, "no candidate was accepted: the test is too easy"
    if is_assistant_patched:
        engine = helpers[1].paged
        engine.check_invariants()
        assert engine.stats().num_steps > 0 and engine.stats().num_free_blocks == 64


@pytest.mark.parametrize("arguments", [{}, SAMPLE], ids=["greedy", "sampling"])
def test_a_model_that_assists_itself(pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: two caches that grow in one pool in turn; blocks that only lower layers filled, served to all."""
    given = one_prompt() | {"max_new_tokens": NEW} | arguments
    for make in (lambda model: {"assistant_model": model}, lambda _: {"assistant_early_exit": 1}, lambda _: {}):
        pair.generate(make=make, **given)


PROMPTS = ["The old man looked at the sea", "Once", "It was a dark night, and the rain"]


@pytest.fixture
def text_pair(make_pair: MakePair) -> Pair:
    """A `Pair` of the embedded trained model."""
    return make_pair(tiny_lm(), block_size=8)


def tokenized(count: int = 3) -> dict[str, Tensor]:
    """Left-padded prompts of the embedded model."""
    return dict(tiny_tokenizer()(PROMPTS[:count], return_tensors="pt", padding=True, padding_side="left"))


@pytest.mark.parametrize("arguments", [{}, SAMPLE | {"num_return_sequences": 2}, {"num_beams": 2}], ids=name_of)
def test_stop_strings(text_pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: rows that end at a string which begins inside a token."""
    stop = {"stop_strings": ["e,", "d the", "he was"], "tokenizer": tiny_tokenizer()}
    _, found = text_pair.generate(**tokenized(), max_new_tokens=24, **stop, **arguments)
    assert text_pair.seen[0] == tokenized()["attention_mask"].sum(), "padding was computed"
    _, without = text_pair.generate(**tokenized(), max_new_tokens=24, **arguments)
    assert found.shape != without.shape or not torch.equal(found, without), "nothing stopped: the test is too easy"


@pytest.mark.parametrize(
    "arguments", [{"do_sample": False}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 2}], ids=name_of
)
def test_text_generation_pipeline(text_pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: what the pipeline asks of a model's class, name or config."""

    def call(model: Any) -> Any:
        tokenizer = copy.deepcopy(tiny_tokenizer())
        tokenizer.padding_side = "left"
        return pipeline("text-generation", model=model, tokenizer=tokenizer)(
            PROMPTS, batch_size=3, max_new_tokens=10, **arguments
        )

    text_pair.both(call)
    assert text_pair.delta["num_steps"] > 0
    text_pair.assert_all_free()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_differs_at_near_ties_only(dtype: torch.dtype, name: str) -> None:
    """Would break: attention or storage in a type that loses more than the model's own arithmetic."""
    stock = build(name, dtype=dtype)
    paged = hf_paged.patch(copy.deepcopy(stock), block_size=4, num_blocks=256)
    batch, new = ragged_batch(), {"max_new_tokens": 24, "eos_token_id": None}
    tolerance = 4 * torch.finfo(dtype).eps * 4.0  # of logits around 4; the median gap of the two best ones is 0.3
    for arguments in (DETAILS, DETAILS | {"prefill_chunk_size": 3}, DETAILS | {"output_hidden_states": True}):
        expected, found = (model.generate(**batch, **new, **arguments) for model in (stock, paged))
        judged = {"attention_mask": batch["attention_mask"], "threshold": tolerance} | new
        comparison = compare_generations(stock, batch["input_ids"], expected, found, **judged)
        assert comparison, comparison.summary
        if torch.equal(expected.sequences, found.sequences):
            for one, other in zip(expected.logits, found.logits):
                torch.testing.assert_close(other, one, rtol=0, atol=tolerance)
