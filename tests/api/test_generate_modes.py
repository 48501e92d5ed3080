"""Every mode of `generate()` on a Llama: the same results as stock, under pools of every kind.

The modes are a table; a new one is a row. What each row must also show (sharing, leaving, chunks) is tested below it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from conftest import Make, Pair, assert_same
from models import (
    EOS,
    PAD,
    VOCAB,
    build,
    name_of,
    ragged_batch,
    random_ids,
    tiny_lm,
    tiny_tokenizer,
)
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import hf_paged

NEW = 12
EOS_OFTEN = list(range(2, 30))
"""As end-of-sequence ids these end the rows of a batch early, and at different steps."""
SOME_EOS = list(range(2, 14))
"""With these, early_stopping and length_penalty decide which beams win."""

MakePair = Callable[..., Pair]


# User code


class NextToken(LogitsProcessor):
    """Stateless: favours a token that depends on the last one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = (input_ids[:, -1:] * 7 + 3) % VOCAB
        return scores.scatter_add(1, favoured, torch.full_like(scores[:, :1], 2.0))


class Countdown(LogitsProcessor):
    """Stateful: what it favours depends on how often it was called, and on what it was given before."""

    def __init__(self) -> None:
        self.calls = 0
        self.total = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        self.total += int(input_ids.sum())
        scores[:, (self.total + self.calls) % VOCAB] += 3.0  # in place, as users do
        return scores


class RowIndexed(LogitsProcessor):
    """Favours another token in each row of the batch it sees: wrong as soon as a row is missing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(scores.shape[0])
        scores[rows, (30 + 5 * rows + input_ids.shape[1]) % VOCAB] += 3.0
        return scores


class Recorder(LogitsProcessor):
    """Notes all it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.clone(), scores.clone()))
        return scores


class StopRows(StoppingCriteria):
    """Stops row `i` when it has `5 + 2 i` tokens behind a prompt of 11."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        limits = 11 + 5 + 2 * torch.arange(input_ids.shape[0])
        return input_ids.shape[1] >= limits


class StopAll(StoppingCriteria):
    """Stateful: stops everything at its sixth call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.full((input_ids.shape[0],), self.calls >= 6)


class PutRecorder(BaseStreamer):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append(value.clone())

    def end(self) -> None:
        self.calls.append("end")


def processors(*kinds: type[LogitsProcessor]) -> Make:
    """A fresh list of these processors for each model."""
    return lambda model: {"logits_processor": LogitsProcessorList(kind() for kind in kinds)}


def criteria(*kinds: type[StoppingCriteria]) -> Make:
    """A fresh list of these criteria for each model."""
    return lambda model: {"stopping_criteria": StoppingCriteriaList(kind() for kind in kinds)}


def allowed_tokens(row: int, input_ids: Tensor) -> list[int]:
    """A grammar that differs by row and by last token."""
    return list(range(3 + (row + int(input_ids[-1])) % 5, VOCAB, 2 + row % 3))


def embeds(model: Any, keep_ids: bool = False) -> dict[str, Any]:
    """The ragged batch as `inputs_embeds`."""
    ids = ragged_batch()["input_ids"]
    return {"inputs_embeds": model.get_input_embeddings()(ids).detach()} | ({"input_ids": ids} if keep_ids else {})


# Prompts


def one_prompt() -> dict[str, Tensor]:
    """A batch of one, with repetitions in it for prompt lookup."""
    return {"input_ids": random_ids(1, 5).repeat(1, 3)}


def even_batch() -> dict[str, Tensor]:
    """Prompts of one length."""
    return {"input_ids": random_ids(3, 11)}


def masked(*hidden: tuple[int, int]) -> dict[str, Tensor]:
    """Three prompts with these `(row, column)` places hidden, anywhere."""
    batch = {"input_ids": random_ids(3, 9), "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    for row, column in hidden:
        batch["attention_mask"][row, column] = 0
    return batch


def typed(ids: torch.dtype, mask: torch.dtype) -> dict[str, Tensor]:
    """The ragged batch in other types."""
    batch = ragged_batch()
    return {"input_ids": batch["input_ids"].to(ids), "attention_mask": batch["attention_mask"].to(mask)}


def only_mask() -> dict[str, Tensor]:
    """The mask of the ragged batch, for modes that bring their prompts themselves."""
    return {"attention_mask": ragged_batch()["attention_mask"]}


def padded_with_eos(with_mask: bool) -> dict[str, Any]:
    """The ragged batch, padded with the end-of-sequence id."""
    batch = ragged_batch()
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, EOS)
    return (batch if with_mask else {"input_ids": batch["input_ids"]}) | {"pad_token_id": EOS}


def positioned(shift: int, step: int = 1) -> dict[str, Tensor]:
    """The ragged batch with position ids of its own: shifted, or with gaps."""
    batch = ragged_batch()
    positions = (batch["attention_mask"].cumsum(dim=1) - 1).clamp_min(0) * step + shift
    return batch | {"position_ids": positions}


# The table


@dataclass(frozen=True)
class Mode:
    """A row of the table.

    Attributes:
        arguments: Of `generate()`.
        make: Arguments that each model needs its own of.
        batch: Makes the prompts.
        is_packed: Whether every forward of the model is a packed batch of real tokens, within the token budget.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    make: Make | None = None
    batch: Callable[[], dict[str, Any]] = ragged_batch
    is_packed: bool = True

    def run(self, pair: Pair) -> tuple[Any, Any]:
        """Runs the mode on both models."""
        length: dict[str, Any] = {} if "max_length" in self.arguments else {"max_new_tokens": NEW}
        return pair.generate(make=self.make, **(self.batch() | length | self.arguments))


SAMPLE = {"do_sample": True}
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
BEAMS = {"num_beams": 3}

MODES: dict[str, Mode] = {
    "greedy": Mode(),
    "greedy_even": Mode(batch=even_batch),
    "greedy_one": Mode(batch=one_prompt),
    "one_token": Mode({"max_new_tokens": 1}),
    "equal_prompts": Mode(batch=lambda: {"input_ids": random_ids(1, 9).repeat(4, 1)}),
    "equal_prompts_samples": Mode(
        {"do_sample": True, "num_return_sequences": 2}, batch=lambda: {"input_ids": random_ids(1, 9).repeat(2, 1)}
    ),
    "mask_with_holes": Mode(batch=partial(masked, (0, 3), (2, 0), (2, 1), (2, 7)), is_packed=False),
    "row_without_tokens": Mode(batch=partial(masked, *((1, column) for column in range(9))), is_packed=False),
    "bool_mask": Mode(batch=partial(typed, torch.int64, torch.bool)),
    "float_mask": Mode(batch=partial(typed, torch.int64, torch.float32)),
    "int32_ids": Mode(batch=partial(typed, torch.int32, torch.int32)),
    "from_bos_alone": Mode(batch=dict),
    "very_ragged": Mode(batch=partial(ragged_batch, (29, 1, 2, 17, 1, 5))),
    "sample": Mode(SAMPLE | {"top_k": 0}),
    "temperature": Mode(SAMPLE | {"temperature": 0.7}),
    "top_k": Mode(SAMPLE | {"top_k": 7}),
    "top_p": Mode(SAMPLE | {"top_k": 0, "top_p": 0.8}),
    "min_p": Mode(SAMPLE | {"top_k": 0, "min_p": 0.05}),
    "typical_p": Mode(SAMPLE | {"top_k": 0, "typical_p": 0.7}),
    "epsilon_cutoff": Mode(SAMPLE | {"top_k": 0, "epsilon_cutoff": 0.01}),
    "eta_cutoff": Mode(SAMPLE | {"top_k": 0, "eta_cutoff": 0.01}),
    "top_h": Mode(SAMPLE | {"top_k": 0, "top_h": 0.6}),
    "sample_eos_often": Mode(SAMPLE | {"eos_token_id": EOS_OFTEN}),
    "samples": Mode(SAMPLE | {"num_return_sequences": 3}),
    "samples_eos_often": Mode(SAMPLE | {"num_return_sequences": 3, "eos_token_id": EOS_OFTEN}),
    "beams": Mode(BEAMS),
    "beams_one": Mode(BEAMS, batch=one_prompt),
    "beams_eos_often": Mode(BEAMS | {"eos_token_id": EOS_OFTEN}),
    "beams_early": Mode(BEAMS | {"early_stopping": True, "eos_token_id": SOME_EOS}),
    "beams_never_early": Mode(BEAMS | {"early_stopping": "never", "eos_token_id": SOME_EOS}),
    "beams_long": Mode(BEAMS | {"length_penalty": 3.0, "eos_token_id": SOME_EOS}),
    "beams_short": Mode(BEAMS | {"length_penalty": -2.0, "eos_token_id": SOME_EOS}),
    "beams_returned": Mode(BEAMS | DETAILS | {"num_return_sequences": 2}),
    "beams_processors": Mode(BEAMS | {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "min_new_tokens": 4}),
    "beams_grammar": Mode(BEAMS | {"prefix_allowed_tokens_fn": allowed_tokens}),
    "beam_sample": Mode(BEAMS | SAMPLE | {"top_k": 9, "temperature": 1.5}),
    "beam_samples": Mode(BEAMS | SAMPLE | DETAILS | {"num_return_sequences": 3, "eos_token_id": SOME_EOS}),
    "beams_hidden_states": Mode(BEAMS | DETAILS | {"output_hidden_states": True}, is_packed=False),
    "eos_list": Mode({"eos_token_id": EOS_OFTEN}),
    "no_eos": Mode({"eos_token_id": None, "pad_token_id": None}, batch=even_batch),
    "max_length": Mode({"max_length": 19}),
    "min_length": Mode({"min_length": 18, "eos_token_id": EOS_OFTEN}),
    "min_new_tokens": Mode({"min_new_tokens": 5, "eos_token_id": EOS_OFTEN}),
    "repetition_penalty": Mode({"repetition_penalty": 1.8}),
    "encoder_repetition_penalty": Mode({"encoder_repetition_penalty": 1.8}),
    "no_repeat_ngram": Mode({"no_repeat_ngram_size": 1}),
    "bad_words": Mode({"bad_words_ids": [[i] for i in range(10, 50)] + [[60, 61], [70, 71, 72]]}),
    "forced_bos": Mode({"forced_bos_token_id": 13}, batch=lambda: {"input_ids": random_ids(3, 1)}),
    "forced_eos": Mode({"forced_eos_token_id": [14, 2]}),
    "suppress_tokens": Mode({"suppress_tokens": list(range(20, 70))}),
    "begin_suppress_tokens": Mode({"begin_suppress_tokens": list(range(3, 60))}),
    "sequence_bias": Mode({"sequence_bias": [[[5], 3.0], [[7, 9], 3.0], [[11], -9.0]]}),
    "decay_length": Mode({"exponential_decay_length_penalty": (3, 1.6)}),
    "renormalize": Mode(SAMPLE | DETAILS | {"renormalize_logits": True, "remove_invalid_values": True}),
    "watermark": Mode({"watermarking_config": WatermarkingConfig(bias=2.5)}),
    "user_processor": Mode({"eos_token_id": EOS_OFTEN}, processors(NextToken)),
    "stateful_processor": Mode({"eos_token_id": EOS_OFTEN}, processors(Countdown)),
    "row_indexed_processor": Mode({"eos_token_id": EOS_OFTEN}, processors(RowIndexed)),
    "user_processors_sampling": Mode(SAMPLE | {"num_return_sequences": 2}, processors(NextToken, RowIndexed)),
    "user_processor_beams": Mode(BEAMS, processors(NextToken, RowIndexed, Countdown)),
    "row_criterion": Mode({}, criteria(StopRows)),
    "row_criterion_beams": Mode(BEAMS, criteria(StopRows)),
    "stateful_criterion": Mode({"eos_token_id": EOS_OFTEN}, criteria(StopAll)),
    "no_time": Mode({"max_time": 0.0}),
    "much_time": Mode({"max_time": 1e6}),
    "grammar": Mode({"prefix_allowed_tokens_fn": allowed_tokens, "eos_token_id": EOS_OFTEN}),
    "grammar_samples": Mode(SAMPLE | {"num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed_tokens}),
    # Its processor runs the model once more, without our cache.
    "guidance": Mode({"guidance_scale": 1.7}, is_packed=False),
    "negative_prompt": Mode({"guidance_scale": 1.7, "negative_prompt_ids": random_ids(3, 4, seed=5)}, is_packed=False),
    "negative_prompt_beams": Mode(
        BEAMS | {"guidance_scale": 1.7, "negative_prompt_ids": random_ids(3, 4, seed=5).repeat_interleave(3, 0)},
        batch=even_batch,
        is_packed=False,
    ),
    "details": Mode(DETAILS | {"eos_token_id": EOS_OFTEN}),
    "details_samples": Mode(SAMPLE | DETAILS | {"num_return_sequences": 2, "eos_token_id": EOS_OFTEN}),
    "hidden_states": Mode(DETAILS | {"output_hidden_states": True, "eos_token_id": EOS_OFTEN}, is_packed=False),
    # A chunk of nothing but padding in some rows.
    "prefill_chunks": Mode({"prefill_chunk_size": 4}, is_packed=False),
    "prefill_chunks_even": Mode({"prefill_chunk_size": 4}, batch=even_batch),
    "prefill_chunks_beams": Mode(BEAMS | {"prefill_chunk_size": 3}, batch=even_batch),
    "pad_is_eos": Mode(batch=partial(padded_with_eos, True)),
    "pad_is_eos_no_mask": Mode(batch=partial(padded_with_eos, False)),
    "pads_no_mask": Mode(batch=lambda: {"input_ids": ragged_batch()["input_ids"]}),
    "right_padded": Mode(batch=partial(ragged_batch, side="right"), is_packed=False),
    "embeds": Mode({}, embeds, batch=only_mask),
    "embeds_and_ids": Mode({}, partial(embeds, keep_ids=True), batch=only_mask),
    "embeds_beams": Mode(BEAMS, embeds, batch=only_mask),
    "embeds_samples": Mode(SAMPLE | {"num_return_sequences": 3}, embeds, batch=only_mask),
    "positions": Mode(batch=partial(positioned, 0)),
    "positions_shifted": Mode(batch=partial(positioned, 5)),
    "positions_with_gaps": Mode(batch=partial(positioned, 0, 3)),
    "config_object": Mode({"generation_config": GenerationConfig(max_new_tokens=9, do_sample=True, pad_token_id=PAD)}),
    "prompt_lookup": Mode({"prompt_lookup_num_tokens": 3}, batch=one_prompt),
    "prompt_lookup_sampling": Mode(SAMPLE | {"prompt_lookup_num_tokens": 4, "temperature": 0.4}, batch=one_prompt),
    "prompt_lookup_details": Mode(
        DETAILS | {"prompt_lookup_num_tokens": 3, "repetition_penalty": 0.7}, batch=one_prompt
    ),
}

POOLS: dict[str, dict[str, Any]] = {
    "blocks_of_1": {"block_size": 1, "num_blocks": 600, "max_num_batched_tokens": 256},
    "blocks_of_3_budget_3": {"block_size": 3, "max_num_batched_tokens": 3, "use_async_batching": True},
    "blocks_of_16_budget_2": {"block_size": 16, "max_num_batched_tokens": 2},
    "one_sequence_a_step": {
        **{"block_size": 4, "max_num_seqs": 1, "enable_prefix_caching": False},
        "use_async_batching": True,
    },
}
CORE_POOL = "blocks_of_3_budget_3"


def modes_and_pools() -> list[Any]:
    """Each mode with one pool on every transformers, with another one, by turns, in the normal run."""
    others = [pool for pool in POOLS if pool != CORE_POOL]
    cases = []
    for number, name in enumerate(MODES):
        cases.append(pytest.param(name, CORE_POOL, marks=pytest.mark.core))
        turn = others[number % len(others)]
        cases += [pytest.param(name, pool, marks=() if pool == turn else pytest.mark.slow) for pool in others]
    return cases


@pytest.mark.parametrize(("name", "pool"), modes_and_pools())
def test_mode_matches_stock(make_pair: MakePair, name: str, pool: str) -> None:
    """Would break: anything in this mode (tokens, scores, draws), or the token budget."""
    pair, mode = make_pair(**POOLS[pool]), MODES[name]
    mode.run(pair)
    assert pair.delta["num_steps"] > 0, "nothing ran over the pool"
    if mode.is_packed:
        budget = POOLS[pool].get("max_num_batched_tokens", 10**6)
        assert max(pair.seen) <= budget, "a forward was larger than the token budget"
        assert len(pair.seen) == pair.delta["num_steps"], "a forward ran that the engine did not drive"


@pytest.mark.core
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


# What the prompts and rows cost

PROMPT_TOKENS = 11 + 7 + 2  # of the ragged batch


@pytest.mark.core
@pytest.mark.parametrize("fan_out", [{"num_return_sequences": 6, "do_sample": True}, {"num_beams": 6}], ids=name_of)
def test_a_prompt_is_computed_and_stored_once_for_all_its_copies(make_pair: MakePair, fan_out: dict[str, Any]) -> None:
    """Would break: six times the prefill and the memory, as in stock."""
    pair = make_pair(block_size=4)
    pair.generate(**ragged_batch(), max_new_tokens=3, eos_token_id=None, **fan_out)
    assert pair.seen == [PROMPT_TOKENS, 18, 18], "a forward computed copies of a prompt, or padding"
    assert pair.delta["num_prefill_tokens"] == PROMPT_TOKENS - 3
    assert pair.delta["num_cow_copies"] > 0
    # Full blocks of the prompts, and each copy's own up to its 13, 9 or 4 tokens; without sharing it would be 48.
    assert pair.engine.stats().peak_blocks_in_use <= (2 + 1 + 0) + 6 * (2 + 2 + 1)


@pytest.mark.core
@pytest.mark.parametrize("name", ["eos_list", "sample_eos_often", "samples_eos_often"])
def test_finished_rows_leave_the_batch(make_pair: MakePair, name: str) -> None:
    """Would break: not computing pad tokens for finished rows, which stock does."""
    pair = make_pair()
    _, found = MODES[name].run(pair)
    generated = found[:, 11:]
    is_eos = torch.isin(generated, torch.tensor(EOS_OFTEN))
    running = (is_eos.cumsum(dim=1) == 0).sum(dim=0).tolist()
    assert running[-2] < len(found), "no row ended early: the test is too easy"
    assert pair.seen == [PROMPT_TOKENS, *running[:-1]]


@pytest.mark.core
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
    """Would break: scores of finished rows, and code that counts or indexes rows."""
    pair = make_pair()
    MODES[name].run(pair)
    assert set(pair.seen[1:]) == {3}


# What user code and callers get to see


@pytest.mark.core
@pytest.mark.parametrize(
    "name", ["eos_list", "samples_eos_often", "beams_eos_often", "prompt_lookup", "embeds", "guidance"]
)
def test_processors_are_called_with_what_stock_would_give_them(make_pair: MakePair, name: str) -> None:
    """Would break: padded ids, scores or the number of rows that a user's processor sees, or how often it is called."""
    mode, recorders = MODES[name], []

    def make(model: Any) -> dict[str, Any]:
        recorders.append(Recorder())
        return (mode.make(model) if mode.make else {}) | {"logits_processor": LogitsProcessorList([recorders[-1]])}

    Mode(mode.arguments, make, mode.batch).run(make_pair())
    stock, paged = recorders
    assert_same(stock.seen, paged.seen)
    assert len(paged.seen) > 3


@pytest.mark.core
@pytest.mark.parametrize(
    "name", ["greedy", "eos_list", "samples_eos_often", "prompt_lookup", "prefill_chunks", "no_time"]
)
def test_streamers_get_the_same_puts_in_the_same_order(make_pair: MakePair, name: str) -> None:
    """Would break: a put too many, missing, or in another shape."""
    mode, streamers = MODES[name], []

    def make(model: Any) -> dict[str, Any]:
        streamers.append(PutRecorder())
        return {"streamer": streamers[-1]}

    Mode(mode.arguments, make, mode.batch).run(make_pair())
    stock, paged = streamers
    assert_same(stock.calls, paged.calls)
    assert paged.calls[-1] == "end" and len(paged.calls) >= 3


@pytest.mark.core
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


@pytest.mark.core
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


@pytest.mark.core
@pytest.mark.parametrize("name", ["greedy", "beams", "samples", "hidden_states", "right_padded", "guidance"])
def test_eager_attention(make_pair: MakePair, name: str) -> None:
    """Would break: models whose attention is not sdpa."""
    MODES[name].run(make_pair(build("llama", attention="eager")))


@pytest.mark.core
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
    """Generates with the model that it is called by."""

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


@pytest.mark.core
def test_custom_generate(pair: Pair) -> None:
    """Would break: users' own decoding methods, which should get paged memory too."""
    pair.generate(**even_batch(), custom_generate=own_loop)
    assert pair.seen == [33, 3, 3, 3, 3, 3] and pair.delta["num_steps"] == 6


# Assisted decoding


def assistant(kind: str, patch_settings: dict[str, Any] | None) -> Any:
    """A fresh assistant (each keeps count of how well it does): one that is often right, or one that never is."""
    if kind == "other":
        model = build("llama", layers=1, seed=9)
    else:
        model = build("llama")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    return model if patch_settings is None else hf_paged.patch(model, **patch_settings)


ASSISTED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("similar", {}),
    "other": ("other", {}),
    "sampling": ("similar", SAMPLE | {"temperature": 0.5}),
    "sampling_other": ("other", SAMPLE),
    "eos_often": ("similar", {"eos_token_id": EOS_OFTEN}),
    "processors": ("similar", {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}),
    "details": ("similar", DETAILS),
}


@pytest.mark.core
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


@pytest.mark.core
@pytest.mark.parametrize("arguments", [{}, SAMPLE], ids=["greedy", "sampling"])
def test_a_model_that_assists_itself(pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: two caches that grow in one pool in turn, with every candidate accepted."""
    pair.generate(make=lambda model: {"assistant_model": model}, **one_prompt(), max_new_tokens=NEW, **arguments)
    pair.assert_all_free()


@pytest.mark.core
@pytest.mark.parametrize("arguments", [{}, SAMPLE], ids=["greedy", "sampling"])
def test_a_model_that_assists_itself_with_fewer_layers(pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: blocks that a shortened model filled in its lower layers only, served to the whole one."""
    pair.generate(**one_prompt(), max_new_tokens=NEW, assistant_early_exit=1, **arguments)
    pair.generate(**one_prompt(), max_new_tokens=NEW)


# The trained model: text in and out

PROMPTS = ["The old man looked at the sea", "Once", "It was a dark night, and the rain"]


@pytest.fixture
def text_pair(make_pair: MakePair) -> Pair:
    """A `Pair` of the embedded trained model."""
    return make_pair(tiny_lm(), block_size=8)


def tokenized(count: int = 3) -> dict[str, Tensor]:
    """Left-padded prompts of the embedded model."""
    return dict(tiny_tokenizer()(PROMPTS[:count], return_tensors="pt", padding=True, padding_side="left"))


@pytest.mark.core
@pytest.mark.parametrize("arguments", [{}, SAMPLE | {"num_return_sequences": 2}, {"num_beams": 2}], ids=name_of)
def test_stop_strings(text_pair: Pair, arguments: dict[str, Any]) -> None:
    """Would break: rows that end at a string which begins inside a token."""
    stop = {"stop_strings": ["e,", "d the", "he was"], "tokenizer": tiny_tokenizer()}
    _, found = text_pair.generate(**tokenized(), max_new_tokens=24, **stop, **arguments)
    _, without = text_pair.generate(**tokenized(), max_new_tokens=24, **arguments)
    assert found.shape != without.shape or not torch.equal(found, without), "nothing stopped: the test is too easy"


@pytest.mark.core
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


# Half precision


def assert_first_choices(stock: Any, batch: dict[str, Tensor], sequences: Tensor, tolerance: float) -> None:
    """Judges every generated token by the stock model's logits, teacher-forced, without a cache.

    So a divergence from stock's own tokens is a near tie, and what follows it is judged as well.
    """
    width, length = batch["input_ids"].shape[1], sequences.shape[1]
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, length - width), value=1)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = stock(sequences, attention_mask=mask, position_ids=positions).logits.float()[:, width - 1 : -1]
    behind = logits.amax(dim=-1) - logits.gather(2, sequences[:, width:, None])[..., 0]
    assert float(behind.max()) <= tolerance, f"a token is {float(behind.max()):.3f} below stock's first choice"


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
        for result in (expected, found):
            assert_first_choices(stock, batch, result.sequences, tolerance)
        if torch.equal(expected.sequences, found.sequences):
            for one, other in zip(expected.logits, found.logits):
                torch.testing.assert_close(other, one, rtol=0, atol=tolerance)
    wrong = expected.sequences.clone()
    wrong[1, -3] = (wrong[1, -3] + 1) % VOCAB
    with pytest.raises(AssertionError, match="below stock's first choice"):
        assert_first_choices(stock, batch, wrong, tolerance)
