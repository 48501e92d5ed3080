"""Layers with a sliding window: what they hold, what they give back, and that no caller can tell."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import hf_paged
from helpers.models import MODELS, build, decoder_layers, random_ids
from helpers.pairs import MakePair, Pair, new_cache
from hf_paged.api import probe

SLIDING = [name for name, row in MODELS.items() if row.has_windows]
every_model = pytest.mark.parametrize("name", SLIDING)


def windows(pair: Pair) -> tuple[int | None, ...]:
    return pair.engine.core.kv_cache.groups.windows


def held(pair: Pair) -> list[list[int]]:
    groups = pair.engine.snapshot()["groups"]
    tables = [sequence["block_tables"] for group in groups for sequence in group["sequences"]]
    return [[sum(block >= 0 for block in table) for table in own] for own in tables]


def test_the_table_has_such_models() -> None:
    assert {"mistral", "gemma2", "gemma3", "gpt_oss", "starcoder2", "qwen2_windows"} <= set(SLIDING)


@every_model
@pytest.mark.parametrize(
    ("block_size", "chunk", "overlaps"), [(1, 64, True), (2, 5, False), (4, 7, True), (16, 64, False)]
)
def test_blocks_that_a_sequence_holds(
    make_pair: MakePair, name: str, block_size: int, chunk: int, overlaps: bool
) -> None:
    """Would break: windows that hold on to what no query sees any more, while a step runs or between two."""
    pair = make_pair(name, block_size=block_size, max_num_batched_tokens=chunk, use_async_batching=overlaps)
    most: list[int] = []
    num_rows = 0

    @hf_paged.packed_hook
    def look(*_: Any) -> None:
        nonlocal num_rows
        manager = pair.engine.core.manager
        for seq_id in manager.by_id:
            num_rows += 1
            for table, window in zip(manager.block_tables(seq_id), windows(pair), strict=True):
                if window is not None:
                    most.append(-(-(window - 1 + chunk) // block_size) + 1)
                    assert sum(block >= 0 for block in table) <= most[-1]

    if not overlaps:  # then blocks stay until those of the chunk before are known to be finite
        decoder_layers(pair.paged)[0].register_forward_pre_hook(look)
    pair.engine.pause()
    request = pair.engine.submit(random_ids(1, 21)[0], max_new_tokens=30, do_sample=False, eos_token_id=None)
    num_decodes = 0
    while (event := pair.engine.step()) is not None:
        # One step later, the blocks of the prompt's last chunk are settled.
        num_decodes = num_decodes + 1 if event["num_decode"] else 0
        if num_decodes > 2:
            for own in held(pair):
                for count, window in zip(own, windows(pair), strict=True):
                    assert window is None or count <= -(-window // block_size) + 2
    pair.engine.resume()
    assert num_decodes > 20 and (overlaps or num_rows > 20)
    expected = pair.stock.generate(random_ids(1, 21), max_new_tokens=30, do_sample=False, eos_token_id=None)
    assert request.result().token_ids == expected[0, 21:].tolist()


def test_what_fits_a_pool() -> None:
    """Would break: the gain. 204 tokens in blocks of 4 are 51 blocks, of which a window of 16 needs 5 or so."""
    config = MODELS["mistral"].config()
    config.sliding_window = 16
    stock = type(build("mistral"))(config).eval()
    model = hf_paged.patch(copy.deepcopy(stock), block_size=4, num_blocks=51, max_num_batched_tokens=24)
    prompts = random_ids(8, 180)
    given: dict[str, Any] = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    outputs = model.paged.generate(list(prompts), **given)
    stats = model.paged.stats()
    assert stats.num_preemptions == 0 and stats.num_steps < 8 * 180 / 24 + 25 + 8  # side by side, where one filled it
    assert stats.peak_blocks_in_use <= 7 * 5 + -(-(15 + 24) // 4) + 1
    expected = stock.generate(prompts, **given)
    assert [output.token_ids for output in outputs] == expected[:, 180:].tolist()
    assert model.paged.core.manager.most_blocks(204, 1) <= 5
    whole = hf_paged.patch(build("llama"), block_size=4, num_blocks=50)
    with pytest.raises(ValueError, match="needs 51 KV blocks of 4 tokens, the pool has 50"):
        whole.paged.submit(prompts[0], **given)


@every_model
@pytest.mark.parametrize(
    ("preemption", "arguments"),
    [("swap", {"do_sample": True, "num_return_sequences": 3}), ("recompute", {"num_beams": 3})],
    ids=str,
)
def test_preempted_rows(make_pair: MakePair, name: str, preemption: str, arguments: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"block_size": 2, "max_num_batched_tokens": 6, "preemption": preemption}
    num_blocks = make_pair(name, **settings).engine.core.manager.most_blocks(25, 6) + 6
    pair = make_pair(name, num_blocks=num_blocks, **settings)
    pair.generate(input_ids=random_ids(3, 12), max_new_tokens=14, **arguments)
    assert pair.delta["num_preemptions"] > 0


@every_model
@pytest.mark.parametrize("arguments", [{"prompt_lookup_num_tokens": 3}, {"assistant": True}], ids=str)
@pytest.mark.usefixtures("full_budget")
def test_candidates_taken_back(make_pair: MakePair, name: str, arguments: dict[str, Any]) -> None:
    """Would break: a crop to tokens whose windows were given back, or windows that are never given back any more."""
    pair, given = make_pair(name, block_size=1), dict(arguments)
    helper = build(name, seed=7) if given.pop("assistant", False) else None
    make = None if helper is None else lambda model: {"assistant_model": copy.deepcopy(helper)}
    ids = random_ids(1, 4).repeat(1, 4)
    most = 0

    @hf_paged.packed_hook
    def look(*_: Any) -> None:
        nonlocal most
        manager = pair.engine.core.manager
        for seq_id in manager.by_id:
            if manager.num_tokens(seq_id) > 20:  # behind the prompt
                for table, window in zip(manager.block_tables(seq_id), windows(pair), strict=True):
                    most = max(most, 0 if window is None else sum(block >= 0 for block in table) - window)

    decoder_layers(pair.paged)[0].register_forward_pre_hook(look)
    pair.generate(make=make, input_ids=ids, max_new_tokens=24, eos_token_id=None, **given)
    assert 0 < most <= 12, "nothing is given back after a crop"


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_patched_assistant(make_pair: MakePair, name: str, do_sample: bool) -> None:
    """Would break: a draft model whose windows are given back before its wrong drafts are taken back."""
    helper, pair = build(name, seed=50), make_pair(name)
    assistants = {id(pair.stock): copy.deepcopy(helper), id(pair.paged): hf_paged.patch(helper, block_size=4)}
    given = {"input_ids": random_ids(1, 12), "max_new_tokens": 20, "eos_token_id": None, "do_sample": do_sample}
    pair.generate(make=lambda model: {"assistant_model": assistants[id(model)]}, **given)
    helper.paged.check_invariants()
    stats = helper.paged.stats()
    assert stats.num_generated_tokens > 0 and stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_crop(make_pair: MakePair, name: str) -> None:
    """Would break: going on after a crop over keys that are gone, in silence, where stock raises."""
    pair, ids = make_pair(name, block_size=2), random_ids(2, 17)

    def call(model: Any) -> list[Any]:
        cache = new_cache(model)
        model(ids[:, :11], past_key_values=cache)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-9)
        assert cache.get_seq_length() == 11
        before = model(ids[:, 11:13], past_key_values=cache).logits
        cache.activate_past_recording()
        model(torch.cat([ids[:, 13:17], ids[:, :5]], dim=1), past_key_values=cache)
        cache.crop(-9)  # to what it was when the recording began
        again = model(ids[:, 13:16], past_key_values=cache).logits
        cache.crop(0)
        kept = [(layer.keys, layer.values) for layer in cache.layers]
        return [before, again, kept]

    pair.both(call)
    pair.assert_all_free()


def test_a_short_crop_needs_no_recording(make_pair: MakePair) -> None:
    pair, ids = make_pair("mistral", block_size=8), random_ids(1, 20)
    with torch.no_grad():
        cache = new_cache(pair.paged)
        pair.paged(ids[:, :15], past_key_values=cache)
        pair.paged(ids[:, 15:18], past_key_values=cache)
        cache.crop(-2)
        found = pair.paged(ids[:, 16:], past_key_values=cache).logits
        expected = pair.stock(ids).logits[:, 16:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@every_model
@pytest.mark.parametrize(
    "arguments", [{"output_hidden_states": True, "return_dict_in_generate": True}, {"embeds": True}], ids=str
)
def test_tokens_that_cannot_be_computed_again(make_pair: MakePair, name: str, arguments: dict[str, Any]) -> None:
    given, ids = dict(arguments), random_ids(2, 13)
    # Its last layer's hidden states differ in float32, by processor, by as much as a fault could make of them.
    dtype = torch.float64 if name == "gemma4" and "output_hidden_states" in given else torch.float32
    pair = make_pair(build(name, dtype=dtype), block_size=2, max_num_batched_tokens=5)
    if given.pop("embeds", False):
        given["inputs_embeds"] = pair.stock.get_input_embeddings()(ids).detach()
        if name == "gemma3n":  # whose layers look up ids, too
            with pytest.raises(hf_paged.UnsupportedCallError, match="look up token ids"):
                pair.paged(**given, past_key_values=new_cache(pair.paged))
            return
    else:
        given["input_ids"] = ids
    pair.generate(max_new_tokens=12, eos_token_id=None, **given)


@pytest.mark.parametrize("is_called", [False, True])
def test_a_failed_forward_takes_back_what_it_can(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, is_called: bool
) -> None:
    """Would break: a cache whose second turn failed behind its window: it is computed again."""
    pair, ids = make_pair("mistral", block_size=2, max_num_batched_tokens=4), random_ids(1, 40)
    cache, runner = new_cache(pair.paged), pair.engine.core.runner
    owner, name, last = (type(runner.padded), "run_called", 1) if is_called else (type(runner), "run", 5)
    with torch.no_grad():
        pair.paged(ids[:, :12], past_key_values=cache)
        run, calls = getattr(owner, name), []

        def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(self, *args, **kwargs)
            calls.append(1)
            if len(calls) == last:
                raise RuntimeError("on purpose")
            return result

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            with pytest.raises(RuntimeError, match="on purpose"):
                pair.paged(ids[:, 12:36], past_key_values=cache, output_hidden_states=is_called)
        pair.engine.check_invariants()
        assert not pair.engine.core.scheduler.queues.in_flight
        assert cache.get_seq_length() == 12
        found = pair.paged(ids[:, 12:16], past_key_values=cache).logits
        torch.testing.assert_close(found, pair.stock(ids[:, :16]).logits[:, 12:], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("own_trial")
def test_the_config_alone_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: keys given back that are still seen, in a layer that doesn't do what the config says."""
    monkeypatch.setattr(
        probe, "with_windows", lambda layers, config: tuple(replace(layer, window=3) for layer in layers)
    )
    assert hf_paged.is_supported(build("llama")).windows == (None, None)
    monkeypatch.undo()
    model = build("gemma2")
    model.model.layers[2].self_attn.sliding_window = None
    assert hf_paged.is_supported(model).windows == (6, None, None, None)
    model = build("mistral")
    model.config.max_position_embeddings = 6
    assert hf_paged.is_supported(model).windows == (None, None), "a window as long as the context gives nothing back"


def test_bytes_of_a_token() -> None:
    report = hf_paged.is_supported(build("gemma2"))
    assert report.windows == (6, None, 6, None)
    assert report.bytes_per_token(torch.float16) == 4 * 2 * 2 * 16 * 2
    assert hf_paged.is_supported(3).windows == () and hf_paged.is_supported(3).bytes_per_token(torch.float16) == 0


def test_a_window_that_grows_after_patch_is_refused(make_pair: MakePair) -> None:
    pair, ids = make_pair("mistral"), random_ids(1, 9)
    pair.generate(input_ids=ids, max_new_tokens=4)
    pair.engine.reset_prefix_cache()
    pair.paged.config.sliding_window = 3  # less is fine
    pair.stock.config.sliding_window = 3
    pair.generate(input_ids=ids, max_new_tokens=4)
    pair.paged.config.sliding_window = 7
    with pytest.raises(ValueError, match="layer 0 attends to the last 7 tokens, its cache keeps the last 6"):
        pair.paged.generate(ids, max_new_tokens=4)
    pair.assert_all_free()
