"""Continuous batching: many callers in one pool at once, each getting the tokens that it would get alone.

The oracle is the stock model, one call after another; every call has a seed of its own. Each test asserts by the
engine's counters that what it is about really happened: preemption, swaps, hits, copies, steps that several shared.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, TextIteratorStreamer

import hf_paged
from helpers.models import VOCAB, build, name_of, ragged_batch, random_ids, tiny_tokenizer
from helpers.modes import BEAMS, MODES, NEW, SAMPLE, Mode, assistant
from helpers.pairs import MakePair, Pair, assert_same, new_cache
from helpers.requests import Gate
from helpers.user_code import Asker, NextToken
from helpers.waiting import PATIENCE, at_once, eventually, in_background
from hf_paged import PagedCache
from hf_paged.engine.call_context import call_context

CPU = torch.device("cpu")


class User:
    """A caller of a model, each time with another seed."""

    def __init__(self, model: Any, seed: int, enter: Callable[..., Any]) -> None:
        self.model = model
        self._seed = 1000 * seed
        self._enter = enter

    def generate(self, **arguments: Any) -> Any:
        """`model.generate()`, from a state of torch's global generator that only depends on user and turn."""
        self._seed += 1
        return self._enter(self._seed, self.model.generate, **arguments)

    def request(self, input_ids: Tensor, **arguments: Any) -> list[list[int]]:
        """The generated tokens of a request to the engine; on a stock model, of the `generate()` call that it is."""
        self._seed += 1
        if hasattr(self.model, "paged"):
            request = self._enter(self._seed, self.model.paged.submit, input_ids, **arguments)
            return request.result(PATIENCE).sequences
        return self._enter(self._seed, self.model.generate, input_ids, **arguments)[:, input_ids.shape[1] :].tolist()


def enter_alone(seed: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls at the state after `torch.manual_seed(seed)`, where no other caller calls at the same time."""
    torch.manual_seed(seed)
    return function(*args, **kwargs)


class _SeedLostError(Exception):
    """Before the call was entered, another one that ended has written its own final state."""


class Entrance:
    """Lets calls into one patched model one at a time, each at a state of the global generator of its own.

    The state at a call's entry is its seed. Calls that end write theirs back at any moment, so a call that
    finds another state at its entry than it has just set steps back and tries again.
    """

    def __init__(self, model: Any) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self.num_entered = 0
        cls = type(model)  # made by patch(), for this model alone
        original = cls._prepare_generation_config  # the first method that generate() calls

        def prepare(model: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = getattr(self._local, "state", None)
            if wanted is not None:  # None in a call inside a call
                if not torch.equal(call_context().states[CPU], wanted):
                    raise _SeedLostError
                self.num_entered += 1
                self._step_aside()
            return original(model, *args, **kwargs)

        cls._prepare_generation_config = prepare

    def enter(self, seed: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `generate()` or `submit()` at the state after `torch.manual_seed(seed)`."""
        for _ in range(100):
            self._lock.acquire()
            self._local.state = torch.manual_seed(seed).get_state()
            try:
                return function(*args, **kwargs)
            except _SeedLostError:
                continue
            finally:
                self._step_aside()
        raise AssertionError("a call never finds the state of the global generator that it was entered with")

    def _step_aside(self) -> None:
        if self._local.state is not None:
            self._local.state = None
            self._lock.release()


Job = Callable[[User], Any]
"""What one user does, and gets."""


def in_threads(actions: dict[str, Callable[[], Any]], pair: Pair | None = None, num_waiting: int = 0) -> dict[str, Any]:
    """Runs all at once, each on a thread of its own, and returns their results.

    Args:
        actions: What to run.
        pair: If given, no step runs before so many groups wait: all begin together.
        num_waiting: Groups.
    """
    with pair.engine.exclusive() if pair is not None else nullcontext():
        futures = {name: in_background(action) for name, action in actions.items()}
        if pair is not None:
            eventually(lambda: pair.engine.num_waiting >= num_waiting, "they don't all wait")
    results = {}
    for name, future in futures.items():
        try:
            results[name] = future.result(PATIENCE)
        except BaseException as error:
            raise AssertionError(f"{name} failed: {error!r}") from error
    return results


@functools.cache
def stock() -> Any:
    """The oracle of most tests here."""
    return build("llama")


@functools.cache
def alone(name: str, seed: int) -> Any:
    """What this job gets from the stock model."""
    return BAG[name](User(stock(), seed, enter_alone))


@contextmanager
def counted(pair: Pair) -> Iterator[dict[str, int]]:
    """Within it, nothing; afterwards, the dictionary has what was added to each of the engine's counters."""
    before = asdict(pair.engine.stats())
    delta: dict[str, int] = {}
    yield delta
    delta |= {name: value - before[name] for name, value in asdict(pair.engine.stats()).items()}


def mode(name: str, batch: Callable[[], dict[str, Any]] | None = None, **more: Any) -> Job:
    """A row of the table of modes, perhaps with other prompts, as a job."""
    row = MODES[name] if name in MODES else Mode()
    row = replace(row, arguments=row.arguments | more, batch=batch or row.batch)

    def job(user: User) -> Any:
        own = row.make(user.model) if row.make else {}
        return user.generate(**({"max_new_tokens": NEW} | row.batch() | row.arguments | own))

    return job


def chat(**arguments: Any) -> Job:
    """Three turns over a cache that the user holds."""

    def job(user: User) -> list[Tensor]:
        cache, ids, turns = new_cache(user.model), random_ids(1, 7, seed=11), []
        for turn in range(3):
            given = {"input_ids": ids, "past_key_values": cache, "attention_mask": torch.ones_like(ids)}
            ids = user.generate(**given, max_new_tokens=4, eos_token_id=None, **arguments)
            turns.append(ids)
            ids = torch.cat([ids, random_ids(1, 2, seed=20 + turn)], dim=1)
        return turns

    return job


def streaming(user: User) -> tuple[list[str], Any]:
    """The usual way to stream to a web client: `generate()` on a thread, its words read here."""
    streamer = TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=PATIENCE)
    arguments = {"input_ids": random_ids(1, 9, seed=12), "max_new_tokens": NEW, "streamer": streamer} | SAMPLE
    result = in_background(user.generate, **arguments)
    result.add_done_callback(lambda _: streamer.end() if result.exception() else None)  # who reads it waits no longer
    return "".join(streamer), result.result(PATIENCE)


def assisted(user: User) -> Any:
    """A small model of the user's own proposes tokens."""
    arguments = {"input_ids": random_ids(1, 8, seed=13), "max_new_tokens": NEW}
    return user.generate(**arguments, assistant_model=assistant("similar", None))


def requests(**arguments: Any) -> Job:
    """Two requests to the engine, one after the other."""

    def job(user: User) -> list[list[list[int]]]:
        return [
            user.request(random_ids(1, length, seed=14), max_new_tokens=8, eos_token_id=None, **arguments)
            for length in (10, 6)
        ]

    return job


def ragged(seed: int, *lengths: int) -> Callable[[], dict[str, Tensor]]:
    """Left-padded prompts."""
    return functools.partial(ragged_batch, lengths, seed=seed)


BAG: dict[str, Job] = {
    "greedy": mode("greedy"),
    "eos_list": mode("eos_list", ragged(1, 9, 14, 1, 5)),
    "top_p": mode("top_p", ragged(2, 11, 7, 2)),
    "samples": mode("samples_eos_often", ragged(3, 10, 3)),
    "beams": mode("beams_returned", ragged(4, 12, 6)),
    "beam_sample": mode("beam_sample", ragged(5, 8, 8)),
    "prompt_lookup": mode("prompt_lookup_sampling"),
    "assisted": assisted,
    "penalties": mode("greedy", ragged(6, 11, 7, 2), repetition_penalty=1.6, no_repeat_ngram_size=2),
    "user_processor": mode("user_processor", ragged(7, 11, 7, 2)),
    "stateful_processor": mode("user_processors_sampling", ragged(8, 5, 10)),
    "stop_strings": mode("sample", tokenizer=tiny_tokenizer(), stop_strings=["e", "Q", "7)", "k"]),
    "chat": chat(),
    "chat_sampling": chat(**SAMPLE),
    "streaming": streaming,
    "grammar": mode("grammar_samples", ragged(9, 4, 11)),
    "requests": requests(do_sample=True, num_return_sequences=2),
    "beam_requests": requests(num_beams=3, do_sample=True, num_return_sequences=2),
}
SEEDS = {name: seed for seed, name in enumerate(BAG)}


def together(
    pair: Pair,
    names: Iterable[str],
    others: dict[str, Callable[[], Any]] | None = None,
    entrance: Entrance | None = None,
) -> dict[str, Any]:
    """Runs these jobs of the bag at once and asserts that each gets what it gets from the stock model, alone.

    Args:
        pair: Only its patched model is used.
        names: Jobs.
        others: What else to run beside them.
        entrance: The one that the others use.

    Returns:
        What the others returned.
    """
    entrance = entrance or Entrance(pair.paged)
    expected = {name: alone(name, SEEDS[name]) for name in names}
    actions = {name: functools.partial(BAG[name], User(pair.paged, SEEDS[name], entrance.enter)) for name in names}
    found = in_threads(actions | (others or {}))
    for name in names:
        assert_same(expected[name], found.pop(name), name)
    pair.engine.check_invariants()
    return found


# Settings of the pool, and what must have happened in it: at least so often; 0: never.
TIGHT = {"block_size": 4, "num_blocks": 12}
OVERLAPPING = {"use_async_batching": True}
POOLS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "roomy": (OVERLAPPING | {"num_blocks": 1024}, {"num_preemptions": 0, "num_cow_copies": 20}),
    "recompute": (TIGHT | {"preemption": "recompute"}, {"num_preemptions": 40, "num_swapped_out": 0}),
    "swap": (OVERLAPPING | TIGHT | {"preemption": "swap"}, {"num_preemptions": 40, "num_swapped_out": 10}),
    "auto": (TIGHT | {"preemption": "auto"}, {"num_preemptions": 40}),
    "blocks_of_1_budget_3": (
        {"block_size": 1, "num_blocks": 40, "max_num_batched_tokens": 3, "preemption": "swap"},
        {"num_swapped_out": 5, "prefix_cache_hit_tokens": 10},
    ),
    "blocks_of_3_budget_2": (
        OVERLAPPING | {"block_size": 3, "num_blocks": 14, "max_num_batched_tokens": 2, "preemption": "recompute"},
        {"num_preemptions": 10, "num_swapped_out": 0},
    ),
    "blocks_of_16_budget_256": (
        {"block_size": 16, "num_blocks": 6, "max_num_batched_tokens": 256, "preemption": "swap"},
        {"num_swapped_out": 10},
    ),
    "no_prefix_caching": (
        OVERLAPPING
        | TIGHT
        | {"enable_prefix_caching": False, "preemption": "recompute", "max_num_batched_tokens": 256},
        {"num_preemptions": 40, "prefix_cache_hit_tokens": 0},
    ),
    "one_sequence_a_step": (TIGHT | {"max_num_seqs": 1, "preemption": "swap"}, {"num_swapped_out": 5}),
    "three_sequences_a_step": (
        OVERLAPPING | {"block_size": 3, "num_blocks": 16, "max_num_seqs": 3, "max_num_batched_tokens": 3},
        {"num_preemptions": 5},
    ),
}


@pytest.mark.parametrize("pool", POOLS)
def test_a_mixed_bag_of_calls_at_once(make_pair: MakePair, pool: str) -> None:
    """Would break: any call whose tokens depend on who shares its steps, or on being preempted in whatever state."""
    settings, events = POOLS[pool]
    pair = make_pair(stock(), **settings)
    with counted(pair) as delta:
        together(pair, BAG)
    for name, count in events.items():
        assert (delta[name] >= count) if count else (delta[name] == 0), f"{name}: {delta[name]}"


def fits(pair: Pair, count: int, *, num_rows: int = 1, **arguments: Any) -> dict[str, int]:
    """What it costs the engine when so many equally long calls begin together and each must get stock's tokens."""
    calls = [{"input_ids": random_ids(1, 9, seed=50 + index), "max_new_tokens": NEW} for index in range(count)]
    expected = [pair.stock.generate(**call, **arguments, eos_token_id=None) for call in calls]
    generate = functools.partial(pair.paged.generate, **arguments, eos_token_id=None)
    actions = {str(index): functools.partial(generate, **call) for index, call in enumerate(calls)}
    with counted(pair) as delta:
        found = in_threads(actions, pair, num_waiting=count)
    for index, result in enumerate(expected):
        assert_same(result, found[str(index)], f"call {index}")
    return delta


@pytest.mark.parametrize("count", [4, 16])
def test_calls_that_the_engine_samples_share_every_step(make_pair: MakePair, count: int) -> None:
    """Would break: callers that run after each other, or a step of their own for prompts."""
    pair = make_pair(stock(), num_blocks=512)
    delta = fits(pair, count)
    assert delta["num_steps"] == NEW, "the steps of one call"
    assert pair.seen == [count * 9] + [count] * (NEW - 1)


@pytest.mark.parametrize("name", ["user_processor", "beams", "prompt_lookup"])
def test_loops_on_many_threads_share_most_steps(make_pair: MakePair, name: str) -> None:
    """Would break: a forward of one caller that waits for no other, so that 16 callers cost 16 times one's steps."""
    arguments: dict[str, Any] = {
        "user_processor": {"logits_processor": [NextToken()]},
        "beams": BEAMS,
        "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    }[name]
    num_steps = {
        count: fits(make_pair(stock(), num_blocks=512), count, **arguments)["num_steps"] for count in (1, 4, 16)
    }
    # Callers that are late, on a busy machine, miss a step and go on behind the others.
    assert max(num_steps.values()) <= 3 * num_steps[1], num_steps


def test_a_mixed_bag_needs_far_fewer_steps_than_its_calls_one_by_one(make_pair: MakePair) -> None:
    """Would break: kinds of calls (engine-driven, loops, requests, kept caches) that don't meet in one step."""
    pair = make_pair(stock(), num_blocks=1024, enable_prefix_caching=False)
    with counted(pair) as one_by_one:
        for name, job in BAG.items():
            assert_same(alone(name, SEEDS[name]), job(User(pair.paged, SEEDS[name], enter_alone)), name)
    pair.seen.clear()
    with counted(pair) as at_once:
        together(pair, BAG)
    assert at_once["num_steps"] <= one_by_one["num_steps"] / 3
    assert at_once["num_generated_tokens"] == one_by_one["num_generated_tokens"]
    assert max(pair.seen) > 40, "no step was shared"


def test_a_slow_user_never_stalls_the_others(make_pair: MakePair) -> None:
    """Would break: steps that wait for a processor, and hold up all other callers meanwhile."""
    pair = make_pair(stock())
    with Gate() as gate:
        slow = in_background(pair.paged.generate, random_ids(1, 9), max_new_tokens=4, **gate.arguments)
        assert gate.reached.wait(PATIENCE)
        together(pair, ["greedy", "user_processor", "beams", "prompt_lookup", "requests"])
    slow.result(PATIENCE)


LEAVING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "sample": SAMPLE,
    "user_processor": {"logits_processor": [NextToken()]},
    "beams": BEAMS | SAMPLE | {"repetition_penalty": 1.2},
}


@functools.cache
def to_leave(kind: str, length: int) -> tuple[dict[str, Any], list[int]]:
    """Arguments of a request, and what stock generates for it."""
    arguments = {"input_ids": random_ids(1, length), "max_new_tokens": 10, "eos_token_id": None} | LEAVING[kind]
    return arguments, enter_alone(7, stock().generate, **arguments)[0, length:].tolist()


def leavers(pair: Pair, entrance: Entrance, count: int, seed: int) -> dict[str, Callable[[], Any]]:
    """Two users who send requests and take them back at random moments, or drop them without a word."""

    def leave(seed: int) -> list[str]:
        choose = random.Random(seed)
        ends: list[str] = []
        for _ in range(count):
            kind = choose.choice(list(LEAVING))
            arguments, expected = to_leave(kind, choose.randrange(1, 16))
            request = entrance.enter(7, pair.engine.submit, **arguments)
            tokens: list[int] = []
            if kind == "beams":
                time.sleep(choose.random() * 0.01)
            else:
                tokens += itertools.islice(request, choose.randrange(10))
            if choose.random() < 0.3:
                ends.append("abandoned")
                del request
                continue
            request.cancel()
            output = request.result(PATIENCE)
            tokens = output.token_ids if len(output.token_ids) >= len(tokens) else tokens
            assert tokens == expected[: len(tokens)], f"{kind}: {tokens}, stock {expected}"
            ends.append(output.finish_reason)
        return ends

    for kind in LEAVING:
        for length in range(1, 16):
            to_leave(kind, length)  # now, on one thread
    return {f"leaver {index}": functools.partial(leave, 100 * seed + index) for index in range(2)}


def wait_until_idle(pair: Pair) -> None:
    """Returns when nothing is left of requests that were cancelled or dropped."""

    def is_idle() -> bool:
        gc.collect()
        stats = pair.engine.stats()
        tables = pair.engine.core.executor._tables.values()
        return stats.num_running == stats.num_waiting == stats.num_swapped == sum(t.num_rows for t in tables) == 0

    eventually(is_idle, "requests that were cancelled or dropped are still there")


@pytest.mark.parametrize("pool", ["recompute", "swap"])
def test_neighbours_that_leave_change_nothing_for_those_who_stay(make_pair: MakePair, pool: str) -> None:
    """Would break: tokens or blocks of others, when a row goes in any state (waiting, swapped, in a step)."""
    settings, events = POOLS[pool]
    pair = make_pair(stock(), **settings)
    entrance = Entrance(pair.paged)
    with counted(pair) as delta:
        found = together(pair, BAG, leavers(pair, entrance, 20, seed=1), entrance)
    ends = [end for ends in found.values() for end in ends]
    assert ends.count("cancelled") >= 8 and ends.count("abandoned") >= 4, ends
    for name, count in events.items():
        assert (delta[name] >= count) if count else (delta[name] == 0), f"{name}: {delta[name]}"
    wait_until_idle(pair)
    pair.assert_all_free()


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_prefix_hits_of_every_alignment(make_pair: MakePair, block_size: int) -> None:
    """Would break: a hit rounded up, one that covers the last token, or keys of a block that is not the prompt's."""
    pair = make_pair(stock(), block_size=block_size, num_blocks=512)
    first = random_ids(1, 3 * block_size + 2)
    short = {"max_new_tokens": 2, "eos_token_id": None}
    pair.generate(input_ids=first, **short)
    assert pair.delta["prefix_cache_hit_tokens"] == 0
    for shared in sorted({max(blocks * block_size + extra, 0) for blocks in range(4) for extra in (-1, 0, 1)}):
        for tail in (0, 1, 5):
            length = shared + tail
            if length == 0:
                continue
            prompt = random_ids(1, length, seed=1000 * shared + tail + 1)
            prompt[:, :shared] = first[:, :shared]
            if tail:
                prompt[:, shared] = 3 + (first[:, shared] + tail) % (
                    VOCAB - 3
                )  # neither the first's nor another tail's
            hit = min(shared, length - 1) // block_size * block_size
            pair.generate(input_ids=prompt, **short)
            assert pair.delta["prefix_cache_hit_tokens"] == hit, f"{shared} shared tokens, {tail} others"
            assert pair.delta["prefix_cache_query_tokens"] == (length if length > 1 else 0)
            assert pair.seen == [length - hit, 1], "what was hit was computed again"


@pytest.mark.parametrize("name", ["gemma3n", "llama"])
def test_embeddings_beside_ids(name: str) -> None:
    """Would break: a step without ids for layers that look them up; adapters of ids' rows; what is then cached."""
    peft = pytest.importorskip("peft")
    given, own = {"max_new_tokens": 6, "eos_token_id": None}, {"adapter": "two"} if name == "llama" else {}
    stock: Any = build(name)
    if own:
        lora = peft.LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False, lora_alpha=64)
        torch.manual_seed(0)
        stock = peft.get_peft_model(stock, lora, adapter_name="one")
        stock.add_adapter("two", lora)
        stock.eval().set_adapter("two")
    prompt, embeds = random_ids(1, 24), torch.randn(1, 4, stock.config.hidden_size)
    expected = stock.generate(input_ids=prompt, **given)[0, 24:].tolist()
    model = hf_paged.patch(copy.deepcopy(stock), num_blocks=256)
    if own:
        model.set_adapter("one")
        model = model.get_base_model()
    own |= {"logprobs": 0}
    alone = model.paged.submit(prompt, **given, **own).result(PATIENCE)
    assert alone.token_ids == expected
    model.paged.reset_prefix_cache()
    model.paged.pause()
    request = model.paged.submit(prompt, **given, **own)
    call = in_background(model.generate, inputs_embeds=embeds, **given)
    eventually(lambda: call.done() or model.paged.num_running + model.paged.num_waiting > 1, "the call never came")
    model.paged.resume()
    call.result(PATIENCE)
    for each in (request, model.paged.submit(prompt, **given, **own)):
        found = [token.logprob for token in each.result(PATIENCE).logprobs[0]]
        assert found == pytest.approx([token.logprob for token in alone.logprobs[0]], abs=1e-4)


@pytest.mark.parametrize("name", ["bloom", "gptj", "llama"])
def test_a_prefix_hit_beside_a_fresh_prompt(make_pair: MakePair, name: str) -> None:
    """Would break: rows that are as long as each other, of which one began in the cache."""
    pair = make_pair(name, block_size=4, num_blocks=64)
    for seed in range(3):
        first = random_ids(1, 4, seed=seed)
        pair.generate(input_ids=torch.cat([first, random_ids(1, 3, seed=9)], dim=1), max_new_tokens=2)
        prompts = random_ids(1, 16, seed=seed + 20), torch.cat([first, random_ids(1, 12, seed=seed + 30)], dim=1)
        pair.engine.pause()
        given = {"max_new_tokens": 6, "eos_token_id": None}
        requests = [pair.engine.submit(prompt, **given) for prompt in prompts]
        pair.engine.resume()
        found = [request.result(PATIENCE).token_ids for request in requests]
        assert found == [pair.stock.generate(prompt, **given)[0, 16:].tolist() for prompt in prompts]


@pytest.mark.parametrize("arguments", [{}, SAMPLE, BEAMS], ids=name_of)
@pytest.mark.parametrize(
    ("block_size", "overlaps"), [(1, False), (3, False), (4, False), (1, True), (3, True), (4, True), (16, True)]
)
def test_a_chat_finds_its_own_history(
    make_pair: MakePair, block_size: int, overlaps: bool, arguments: dict[str, Any]
) -> None:
    """Would break: hits on generated tokens, which are hashed when they are known, by whichever loop."""
    pair = make_pair(stock(), block_size=block_size, num_blocks=512, use_async_batching=overlaps)
    prompt, stored = random_ids(1, 7), 0
    for turn in range(3):
        given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        result, _ = pair.generate(**given, max_new_tokens=6, eos_token_id=None, **arguments, seed=turn)
        assert pair.delta["prefix_cache_hit_tokens"] == stored // block_size * block_size
        stored = result.shape[1] - 1  # of the last token there are no keys
        prompt = torch.cat([result, random_ids(1, 1 + turn, seed=turn)], dim=1)


@pytest.mark.parametrize("system", [40, 42])
@pytest.mark.parametrize("kind", ["requests", "threads", "beams"])
def test_a_shared_system_prompt_is_computed_and_stored_once(make_pair: MakePair, kind: str, system: int) -> None:
    """16 users at once. Would break: the same prompt prefilled side by side, or stored 16 times."""
    pair = make_pair(stock(), num_blocks=1024)
    prompts = [
        torch.cat([random_ids(1, system, seed=1), random_ids(1, 3, seed=60 + user)], dim=1) for user in range(16)
    ]
    arguments = {"max_new_tokens": 6, "eos_token_id": None} | (BEAMS if kind == "beams" else {})
    generate = functools.partial(pair.paged.generate, **arguments)
    with counted(pair) as delta:
        if kind == "requests":
            with pair.engine.core.worker.loop.exclusive():  # all are there before the first step
                submitted = [pair.engine.submit(prompt, **arguments) for prompt in prompts]
            found = [request.result(PATIENCE).prompt_token_ids + request.result().token_ids for request in submitted]
        else:
            actions = {str(user): functools.partial(generate, prompt) for user, prompt in enumerate(prompts)}
            results = in_threads(actions, pair, num_waiting=16)
            found = [results[str(user)][0].tolist() for user in range(16)]
    assert found == [pair.stock.generate(prompt, **arguments)[0].tolist() for prompt in prompts]
    blocks, rest = divmod(system, 4)
    assert delta["prefix_cache_hit_tokens"] == 15 * 4 * blocks
    assert delta["num_prefill_tokens"] == system + 3 - 1 + 15 * (rest + 3 - 1)
    rows = 16 * (3 if kind == "beams" else 1)
    assert pair.engine.stats().peak_blocks_in_use <= blocks + rows * -(-(rest + 3 + 5) // 4) + rows  # and copies
    assert pair.engine.stats().peak_blocks_in_use < 16 * blocks


class Watch(LogitsProcessor):
    """Notes at each step of a fan-out of three how many tokens its group has, and in how many distinct blocks."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.blocks: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for group in self._engine.snapshot()["groups"]:
            sequences = group["sequences"]
            if len(sequences) == 3 and group["status"] == "running":
                self.blocks[input_ids.shape[1]] = len({block for s in sequences for block in s["block_table"]})
        return scores


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("arguments", [BEAMS, SAMPLE | {"num_return_sequences": 3}], ids=name_of)
def test_a_group_shares_its_blocks_as_before_when_it_comes_back(
    make_pair: MakePair, arguments: dict[str, Any], preemption: str
) -> None:
    """Would break: three copies of the prompt after a swap, or computed three times after a preemption."""
    prompt = {"input_ids": random_ids(1, 25)}
    arguments = arguments | {"max_new_tokens": 10, "eos_token_id": None}
    roomy = make_pair(stock(), num_blocks=256)
    alone_watch = Watch(roomy.engine)
    enter_alone(1, roomy.paged.generate, **prompt, **arguments, logits_processor=[alone_watch])
    # At its longest the group takes 6 shared blocks and 9 of its own; the older request begins with 5 and ends with 13.
    # Without the prefix cache, which would make up for blocks that the group itself forgot that it shares.
    pair = make_pair(stock(), num_blocks=17, preemption=preemption, enable_prefix_caching=False)
    watch, entrance = Watch(pair.engine), Entrance(pair.paged)
    older = {"input_ids": random_ids(1, 20, seed=1), "max_new_tokens": 30, "eos_token_id": None}
    expected = enter_alone(1, pair.stock.generate, **prompt, **arguments)

    with counted(pair) as delta:
        with pair.engine.exclusive():
            request = pair.engine.submit(**older)
            given = prompt | arguments | {"logits_processor": [watch]}
            future = in_background(entrance.enter, 1, pair.paged.generate, **given)
            eventually(lambda: pair.engine.num_waiting == 2, "they don't wait")
        found = future.result(PATIENCE)
        assert request.result(PATIENCE).token_ids == pair.stock.generate(**older)[0, 20:].tolist()
    assert_same(expected, found)
    assert delta["num_preemptions"] >= 3, "the group was never preempted"
    assert (delta["num_swapped_out"] >= 3) == (preemption == "swap")
    assert len(watch.blocks) >= 7 and max(watch.blocks) == max(alone_watch.blocks)
    for length, blocks in watch.blocks.items():
        assert blocks <= alone_watch.blocks[length], f"at {length} tokens, alone: {alone_watch.blocks}"


@pytest.mark.parametrize("arguments", [{}, SAMPLE, SAMPLE | {"num_return_sequences": 2}], ids=name_of)
def test_a_batch_larger_than_the_pool_finishes_row_by_row(make_pair: MakePair, arguments: dict[str, Any]) -> None:
    """Would break: rows that take each other's blocks at every step, each time to be computed from its beginning."""
    pair = make_pair(stock(), num_blocks=12, preemption="recompute", enable_prefix_caching=False)
    batch = {"input_ids": random_ids(16, 8)}
    pair.generate(**batch, max_new_tokens=NEW, eos_token_id=None, **arguments)
    num_rows = 16 * arguments.get("num_return_sequences", 1)
    assert pair.delta["num_preemptions"] + pair.delta["num_admission_stalls"] > 10
    # 16 rows of 19 tokens; computed again at each of their steps, it would be some 2,000.
    assert pair.delta["num_prefill_tokens"] <= 16 * 19, "rows were computed more than once on average"
    assert pair.delta["num_steps"] <= num_rows * NEW / 2, "rows ran alone"


@pytest.mark.parametrize(("samples", "max_steps", "max_recomputed"), [(50, 28, 130), (200, 110, 300)])
def test_more_samples_than_the_pool_holds(
    make_pair: MakePair, samples: int, max_steps: int, max_recomputed: int
) -> None:
    """Would break: samples that run one by one, or take turns and are computed again and again."""
    pair = make_pair(build("llama", layers=1), num_blocks=64)
    new = 12
    pair.generate(
        input_ids=random_ids(1, 9), do_sample=True, num_return_sequences=samples, max_new_tokens=new, eos_token_id=None
    )
    # Each token but a row's last is computed; a row has 3 blocks of its own in the end, of 62 beside the prompt's.
    recomputed = sum(pair.seen) - 9 - samples * (new - 1)
    assert recomputed <= max_recomputed, recomputed
    assert pair.delta["num_steps"] <= max_steps, pair.delta["num_steps"]
    assert pair.delta["num_preemptions"] <= 1.2 * samples, pair.delta["num_preemptions"]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_padded_batches_wait_for_each_other(make_pair: MakePair, name: str, preemption: str) -> None:
    """Would break: calls whose rows are in the pool all at once, each of which fits, and that raise when they meet."""
    pair = make_pair(name, num_blocks=30, preemption=preemption)
    details = {"output_hidden_states": True, "return_dict_in_generate": True}
    given: list[dict[str, Any]] = [
        ragged_batch((20, 11, 9, 7), seed=0),
        ragged_batch((20, 11, 9, 7), seed=1) | {"prefill_chunk_size": 8},
        ragged_batch((9, 4), seed=2) | {"num_beams": 3, "prefill_chunk_size": 4},
        ragged_batch((20, 5), seed=3),
    ]
    given = [each | {"max_new_tokens": 8, "eos_token_id": None} | details for each in given]
    nested: list[Tensor] = []  # calls inside of one that has the pool to itself

    def ask(_: Tensor) -> None:
        nested.append(pair.paged.generate(random_ids(1, 5), max_new_tokens=2, eos_token_id=None))

    owns = [{}, {}, {}, {"logits_processor": [Asker(ask)]}]
    found = at_once(lambda both: pair.paged.generate(**both[0], **both[1]), zip(given, owns))
    for index, each in enumerate(given):
        assert torch.equal(found[index].sequences, pair.stock.generate(**each).sequences), index
    assert nested[0].shape == (1, 7)
    with pytest.raises(hf_paged.OutOfBlocksError, match=r"blocks are needed at once, the pool has 30"):
        pair.paged.generate(**ragged_batch((20,) * 7), max_new_tokens=8, **details)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_what_cannot_be_computed_again_fails_no_other(make_pair: MakePair, preemption: str) -> None:
    """Would break: a neighbour that finds no room beside a call whose blocks can't be taken, but will be free soon."""
    # Of the 9 blocks the call takes up to 6, and some of the others need 5 or 6.
    pair = make_pair(stock(), num_blocks=9, preemption=preemption)
    ids = random_ids(1, 12)
    arguments = {"max_new_tokens": NEW, "eos_token_id": None}

    def think(input_ids: Tensor, scores: Tensor) -> Tensor:
        time.sleep(0.02)  # longer than steps wait for any caller
        return scores

    def embeds(user: User) -> Tensor:
        given = user.model.get_input_embeddings()(ids).detach()
        return user.generate(inputs_embeds=given, logits_processor=[think], **arguments)

    expected = embeds(User(stock(), 90, enter_alone))
    entrance = Entrance(pair.paged)
    others = {"embeds": functools.partial(embeds, User(pair.paged, 90, entrance.enter))}
    found = together(pair, ["greedy", "eos_list", "beams", "samples", "user_processor", "requests"], others, entrance)
    assert_same(expected, found["embeds"])
    assert pair.engine.stats().num_preemptions > 10


def test_what_cannot_be_computed_again_goes_first_where_only_one_fits(make_pair: MakePair) -> None:
    """Would break: two that stand in each other's way, of which the older one, though it can be preempted, fails."""
    pair = make_pair(stock(), num_blocks=9, preemption="recompute")
    prompt, ids = random_ids(1, 10, seed=1), random_ids(1, 12)
    embeds = {"inputs_embeds": stock().get_input_embeddings()(ids).detach()}
    length = {"max_new_tokens": 12, "eos_token_id": None}
    with counted(pair) as delta:
        with pair.engine.exclusive():  # both begin together, and are in the pool when it is full
            older = pair.engine.submit(prompt, **length)
            newer = in_background(pair.paged.generate, **embeds, **length)
            eventually(lambda: pair.engine.num_waiting == 2, "they don't wait")
        found = newer.result(PATIENCE)
        assert older.result(PATIENCE).token_ids == pair.stock.generate(prompt, **length)[0, 10:].tolist()
    assert_same(pair.stock.generate(**embeds, **length), found)
    assert delta["num_preemptions"] == 1


def test_a_call_gives_its_blocks_back_before_it_counts_as_gone(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would break: who finds no room in the moment between the end of a call and the return of its blocks."""
    pair = make_pair(stock(), num_blocks=9, preemption="recompute")
    given = stock().get_input_embeddings()(random_ids(1, 12)).detach()
    prompt, length = random_ids(1, 10, seed=1), {"max_new_tokens": 12, "eos_token_id": None}
    reset = PagedCache.reset

    def slow_reset(cache: PagedCache) -> None:
        time.sleep(0.3)
        reset(cache)

    monkeypatch.setattr(PagedCache, "reset", slow_reset)
    # User code keeps it a call of its own, whose prompt of embeddings can't be computed again.
    call = in_background(pair.paged.generate, inputs_embeds=given, logits_processor=[NextToken()], **length)
    eventually(lambda: pair.engine.stats().num_steps >= 8, "it doesn't run")
    found = pair.engine.submit(prompt, **length).result(PATIENCE)
    call.result(PATIENCE)
    assert found.token_ids == pair.stock.generate(prompt, **length)[0, 10:].tolist()


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(n, marks=pytest.mark.slow) for n in range(1000, 1400))])
def test_random_mixes(make_pair: MakePair, seed: int) -> None:
    """Would break: a combination of calls, settings and users who leave that was not thought of."""
    choose = random.Random(seed)
    block_size = choose.choice([1, 2, 3, 4, 8, 16])
    settings = {
        "block_size": block_size,
        # The longest call stores 29 tokens.
        "num_blocks": -(-29 // block_size) + choose.choice([0, 1, 3, 8, 64]),
        "max_num_batched_tokens": choose.choice([2, 3, 7, 16, 256]),
        "max_num_seqs": choose.choice([1, 3, 8, 256]),
        "preemption": choose.choice(["auto", "recompute", "swap"]),
        "enable_prefix_caching": choose.random() < 0.7,
        "use_async_batching": choose.random() < 0.5,
    }
    names = sorted(choose.sample(list(BAG), choose.randrange(2, 9)))
    pair = make_pair(stock(), **settings)
    entrance = Entrance(pair.paged)
    others = leavers(pair, entrance, choose.randrange(1, 6), seed) if choose.random() < 0.5 else {}
    try:
        together(pair, names, others, entrance)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {names} and {list(others)} with {settings}") from error
    wait_until_idle(pair)
    pair.assert_all_free()


@pytest.mark.slow
def test_a_row_of_12000_tokens() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 12_288}
    config = LlamaConfig(**sizes, initializer_range=0.3, eos_token_id=None)  # tokens that don't only repeat
    pair = Pair(LlamaForCausalLM(config).eval(), num_blocks=750, preemption="recompute")
    pair.generate(input_ids=random_ids(1, 11_936), max_new_tokens=65, do_sample=False)
    assert pair.engine.stats().peak_blocks_in_use == 750  # all but the last token's keys: 12,000
    pair.assert_all_free()
