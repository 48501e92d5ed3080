"""Encoder-decoders: stock's tokens in every mode, and a source that is in the pool once, however many rows read it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor

import hf_paged
from helpers.encoder_decoders import (
    ALIKE,
    EOS,
    ONE_BY_ONE,
    PACKED,
    PAD,
    PADDED,
    START,
    build,
    sources,
    texts,
)
from helpers.models import VOCAB
from helpers.pairs import MakePair, Pair, assert_same
from helpers.waiting import PATIENCE, eventually, in_background
from hf_paged.api.support import look_at
from hf_paged.attention.backends.torch import TorchStep
from hf_paged.attention.padded_sources import PaddedSourceCache, PaddedSources

IS_OLD = Version(hf.__version__) < Version("5.18.dev0")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "eos_token_id": list(range(5, 15))},
}


@pytest.mark.parametrize("name", [*PACKED, *PADDED, *ALIKE, *ONE_BY_ONE])
def test_every_family(make_pair: MakePair, name: str) -> None:
    """Would break: a family of which a decoder places tokens, or reads sources, in a way of its own."""
    pair = make_pair(build(name))
    report = look_at(pair.stock)
    # In older transformers a prompt of UMT5's decoder sees what is behind it, and Switch's experts take any number.
    is_one_by_one = name in (("fsmt", "umt5") if IS_OLD else ONE_BY_ONE)
    is_packed = not is_one_by_one and name in (*PACKED, "switch_transformers")
    if IS_OLD and name == "nllb_moe":
        assert report.layout == "stock" and "draw" in report.why_padded
        return
    assert report.layout == ("packed" if is_packed else "padded") and bool(report.why_padded) != is_packed
    assert report.traits is not None and report.traits.one_by_one == is_one_by_one
    assert report.traits.needs_alike == (is_one_by_one or name in ALIKE)
    batch = sources(name)
    for mode in MODES.values():
        arguments = {"max_new_tokens": 8, "do_sample": False} | mode
        pair.generate(**batch, **arguments)
    assert pair.engine.stats().num_steps > 20


class _Odd(LogitsProcessor):
    """A user's own: nothing is known of it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.where(torch.arange(scores.shape[1]) % 2 == input_ids.shape[1] % 2, scores, scores - 5)


CALLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "decoder prompts": lambda _: {"decoder_input_ids": torch.tensor([[START, 7, 8], [START, 9, 9], [START, 5, 6]])},
    "forced tokens": lambda _: {"forced_bos_token_id": 12, "forced_eos_token_id": EOS},
    "encoder outputs": lambda model: {
        "encoder_outputs": model.get_encoder()(**sources("bart")),
        "input_ids": None,
    },
    "own processors": lambda _: {"logits_processor": [_Odd()]},
    "encoder processors": lambda _: {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.5},
    "group of samples": lambda _: {"do_sample": True, "num_return_sequences": 4, "temperature": 1.3},
    "beams that sample": lambda _: {"do_sample": True, "num_beams": 3},
    "constant length": lambda _: {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "guidance": lambda _: {"guidance_scale": 1.5},
    "no cache": lambda _: {"use_cache": False},
}


# Stock's T5 has no guidance: it can't be called without a source; stock's LED, only with one of its windows' length.
@pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for name in ("bart", "mvp") for call in CALLS]
    + [(name, call) for name in ("t5", "led") for call in CALLS if call != "guidance"],
)
def test_calls(make_pair: MakePair, name: str, call: str) -> None:
    """Would break: an argument of `generate()` that a decoder has and a language model has not."""
    pair = make_pair(build(name))
    batch, own = sources(name), CALLS[call]
    if call == "encoder outputs":
        batch = {"attention_mask": batch["attention_mask"]}
    arguments = {"max_new_tokens": 9, "do_sample": False}

    def run(model: Any) -> Any:
        return model.generate(**batch | arguments | own(model))

    pair.both(run, falls_back=call == "no cache")
    pair.assert_all_free()


@pytest.mark.parametrize("pool", [{}, {"num_blocks": 24, "preemption": "recompute"}], ids=["roomy", "recompute"])
@pytest.mark.parametrize(
    "name", ["bart", "m2m_100", "t5", "speech_to_text", "vision_trocr_sinusoidal", "speecht5", "nllb_moe", "fsmt"]
)
def test_pad_tokens_in_mid_row(make_pair: MakePair, name: str, pool: dict[str, Any]) -> None:
    """Would break: a pad token that a row has chosen, taken for padding: the places of those behind it shift."""
    if IS_OLD and name == "nllb_moe":
        pytest.skip("it runs stock")
    pair = make_pair(build(name), **pool)
    bias = {(PAD,): 8.0, (EOS,): -100.0}
    settings = {"sequence_bias": bias, "no_repeat_ngram_size": 2, "num_beams": 2}
    expected, _ = pair.generate(**sources(name), max_new_tokens=14, **settings)
    assert (expected[:, 2:-2] == PAD).any() and (expected[:, -3:] != PAD).any()
    assert not pool or pair.engine.stats().num_preemptions > 0


def sixteen_calls() -> list[dict[str, Any]]:
    modes: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}]
    return [
        {"input_ids": text, "max_new_tokens": 8 + index % 5, "do_sample": False} | modes[index % 3]
        for index, text in enumerate(texts(16))
    ]


@cache
def stock_replies(name: str) -> list[Tensor]:
    model = build(name)
    return [model.generate(**call) for call in sixteen_calls()]


@pytest.mark.parametrize("settings", [
    {"num_blocks": 512},
    {"num_blocks": 20, "preemption": "recompute"},
    {"num_blocks": 20, "preemption": "swap"},
    {"num_blocks": 20, "preemption": "swap", "enable_prefix_caching": False},
    {"num_blocks": 512, "max_num_batched_tokens": 16},
], ids=["roomy", "recompute", "swap", "no prefixes", "small steps"])  # fmt: skip
@pytest.mark.parametrize("name", ["bart", "t5", "mvp", "led", "switch_transformers"])
def test_threads_and_small_pools(make_pair: MakePair, name: str, settings: dict[str, Any]) -> None:
    """Would break: a source that is lost, or another's, when rows make room for each other."""
    pair = make_pair(build(name), **{"block_size": 4, "swap_space_gib": 0.01} | settings)
    pair.engine.pause()  # they begin together, in this order: another may need no preemption
    futures = []
    for call in sixteen_calls():
        futures.append(in_background(pair.paged.generate, **call))
        eventually(lambda: pair.engine.num_waiting == len(futures), "they don't queue")
    pair.engine.resume()
    assert_same(stock_replies(name), [future.result(PATIENCE) for future in futures])
    stats = pair.engine.stats()
    assert (stats.num_preemptions > 0) == (settings["num_blocks"] == 20), stats
    assert (stats.num_swapped_out > 0) == (settings.get("preemption") == "swap"), stats
    pair.engine.check_invariants()
    pair.assert_all_free()


@pytest.mark.parametrize("name", ["bart", "mvp", "led"])
def test_a_source_is_there_once(make_pair: MakePair, name: str) -> None:
    """Would break: keys and values of a source for each beam, or for each row that reads the same."""
    pair = make_pair(build(name), block_size=16)
    lengths = (33, 16, 7)
    batch = sources(name, lengths)
    rows = {name: torch.cat([value, value[:1]]) for name, value in batch.items()}  # the last reads what the first does
    pair.generate(**rows, num_beams=5, max_new_tokens=3, do_sample=False)
    assert pair.engine.stats().peak_blocks_in_use == 4 * 5 + sum(-(-length // 16) for length in lengths)
    before = pair.engine.stats().num_blocks_allocated
    pair.paged.generate(**batch, max_new_tokens=2, do_sample=False)
    assert pair.engine.stats().num_blocks_allocated - before == 3  # the sources were found


@pytest.mark.parametrize("name", ["bart", "mvp", "led"])
def test_kept_caches(make_pair: MakePair, name: str) -> None:
    """Would break: a second turn of a decoder that has lost its source, or a cache that says other things of itself."""
    pair = make_pair(build(name))
    batch = sources(name)
    encoded = pair.stock.get_encoder()(**batch)
    start = torch.full((3, 1), START)

    def turns(model: Any) -> Any:
        own, cross = DynamicCache(config=model.config), DynamicCache()
        cache = hf_paged.PagedCache(model) if hasattr(model, "paged") else EncoderDecoderCache(own, cross)
        told = {"encoder_outputs": encoded, "attention_mask": batch["attention_mask"], "past_key_values": cache}
        first = model.generate(decoder_input_ids=start, max_new_tokens=5, do_sample=False, **told)
        second = model.generate(
            decoder_input_ids=torch.cat([first, start + 5], dim=1), max_new_tokens=5, do_sample=False, **told
        )
        logits = model(decoder_input_ids=start + 7, **told).logits
        layer, source = cache.self_attention_cache.layers[1], cache.cross_attention_cache.layers[1]
        seen = batch["attention_mask"][:, None, :, None]
        return first, second, logits, layer.keys, layer.values, source.keys * seen, source.values * seen

    pair.both(turns)


def test_forward(make_pair: MakePair) -> None:
    """Would break: a forward over a `PagedCache` that needs `generate()` around it, or runs the encoder again."""
    pair = make_pair(build("t5"))
    batch = sources("t5")
    ids = torch.randint(5, VOCAB, (3, 6), generator=torch.Generator().manual_seed(1))

    def run(model: Any) -> Any:
        cache = (
            hf_paged.PagedCache(model)
            if hasattr(model, "paged")
            else EncoderDecoderCache(DynamicCache(), DynamicCache())
        )
        first = model(**batch, decoder_input_ids=ids[:, :4], past_key_values=cache).logits
        told = {"attention_mask": batch["attention_mask"], "past_key_values": cache, "use_cache": True}
        outputs = (torch.zeros(3, 16, 64),)  # which nothing reads any more
        return first, model(decoder_input_ids=ids[:, 4:], encoder_outputs=outputs, **told).logits

    pair.both(run)


def test_what_sees_inside(make_pair: MakePair) -> None:
    """Would break: a hook on an inner module, or a loss, that makes a forward of a shape which no source has."""
    pair, batch, seen = make_pair(build("bart")), sources("bart"), []
    handles = [
        model.get_decoder().layers[0].register_forward_hook(lambda *_: seen.append(0))
        for model in (pair.stock, pair.paged)
    ]
    pair.generate(**batch, max_new_tokens=4, do_sample=False, falls_back=True)
    assert len(seen) == 8
    for handle in handles:
        handle.remove()
    with pytest.raises(hf_paged.UnsupportedCallError, match="an encoder"):
        ids = torch.full((3, 2), 7)
        pair.paged(**batch, decoder_input_ids=ids, labels=ids, past_key_values=hf_paged.PagedCache(pair.paged))
    pair.assert_all_free()
    pair.generate(**batch, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("name", ["bart", "mvp"])
def test_a_failed_step_leaves_no_source(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Would break: sources that were never written, found by the next call of the same input."""
    pair = make_pair(build(name))
    batch, runner = sources(name), pair.engine.core.runner
    layout = runner.packed if pair.engine.traits.runs_packed else runner.padded
    run = type(layout).run
    is_broken = True

    def broken(*args: Any, **kwargs: Any) -> Any:
        if is_broken:
            raise RuntimeError("no luck")
        return run(*args, **kwargs)

    monkeypatch.setattr(type(layout), "run", broken)
    with pytest.raises(RuntimeError, match="no luck"):
        pair.paged.generate(**batch, max_new_tokens=4, do_sample=False)
    pair.assert_all_free()
    is_broken = False
    pair.generate(**batch, max_new_tokens=6, do_sample=False, num_beams=2)


@pytest.mark.parametrize("name", ["m2m_100", "mvp", "t5"])
def test_steps_change_nothing(make_pair: MakePair, name: str) -> None:
    """Would break: another thread that begins a call during a step, and takes the model for another from then on."""
    core = make_pair(build(name)).engine.core
    before = core.weights_key()
    with core.bound._told_past.scope():
        assert core.weights_key() == before
    assert core.weights_key() == before


def test_changed_weights(make_pair: MakePair) -> None:
    """Would break: keys that older weights made of a source, found for the same input."""
    pair = make_pair(build("bart"))
    batch = sources("bart")
    pair.generate(**batch, max_new_tokens=5, do_sample=False)
    for model in (pair.stock, pair.paged):
        with torch.no_grad():
            for layer in model.get_decoder().layers:
                layer.encoder_attn.k_proj.weight.mul_(-1)
    pair.generate(**batch, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("name", ["mvp", "led", "speecht5", "switch_transformers"])
def test_submitted(make_pair: MakePair, name: str) -> None:
    """Would break: requests in the background of a model that runs padded, at lengths that differ in each step."""
    pair = make_pair(build(name))
    (given,) = sources(name).keys() - {"attention_mask"}
    rows = [{given: sources(name, (length,))[given]} for length in (16, 5, 11, 5, 8, 16)]
    settings = [{"max_new_tokens": 5 + index, "do_sample": False} for index in range(len(rows))]
    expected = [pair.stock.generate(**row, **own)[0, 1:].tolist() for row, own in zip(rows, settings, strict=True)]
    requests = [pair.engine.submit(**row, **own) for row, own in zip(rows, settings, strict=True)]
    assert [request.result().token_ids for request in requests] == expected
    assert pair.engine.stats().num_steps < 40  # they share steps


def test_prompts_one_by_one(make_pair: MakePair) -> None:
    """Would break: a decoder's prompt that stock computes whole, and otherwise than token by token."""
    pair = make_pair(build("fsmt"))
    told = {"decoder_input_ids": torch.tensor([[START, 7, 8], [START, 9, 9], [START, 5, 6]])}
    pair.generate(**sources("fsmt"), **told, max_new_tokens=6, do_sample=False, falls_back=True)
    with pytest.raises(hf_paged.UnsupportedCallError, match="one by one"):
        pair.paged(**sources("fsmt"), **told, past_key_values=hf_paged.PagedCache(pair.paged))


def test_padded_decoder_prompts(make_pair: MakePair) -> None:
    """Would break: padding before a decoder's prompt, whose columns count in some decoders and not in others."""
    ids = torch.tensor([[PAD, PAD, START, 8], [PAD, START, 9, 9], [START, 5, 6, 7]])
    told = {"decoder_input_ids": ids, "decoder_attention_mask": (ids != PAD).long()}
    pair = make_pair(build("bart"))
    pair.generate(**sources("bart"), **told, max_new_tokens=6, do_sample=False, falls_back=True)
    whisper = make_pair(build("whisper"))
    whisper.generate(**sources("whisper"), **told, max_new_tokens=6, do_sample=False)
    assert whisper.engine.stats().num_steps > 0


@pytest.mark.parametrize("name", ["bart", "t5", "mvp", "led"])
def test_lora(name: str) -> None:
    """Would break: adapters behind keys and values of sources, which are no tokens of a step; one adapter's sources
    for another's rows."""
    peft = pytest.importorskip("peft")
    targets = ["q", "v"] if name == "t5" else ["q_proj", "v_proj"]
    lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, lora_alpha=64)
    torch.manual_seed(0)
    stock = peft.get_peft_model(build(name), lora, adapter_name="one")
    stock.add_adapter("two", lora)
    model = hf_paged.patch(copy.deepcopy(stock.eval()), num_blocks=128, block_size=4)
    ids, texts = torch.randint(5, VOCAB, (2, 9)), set()
    for adapter in ("one", "two", None, "one"):
        found = []
        for each in (stock, model):
            each.set_adapter(adapter or "one")
            with each.disable_adapter() if adapter is None else nullcontext():
                found.append(each.generate(input_ids=ids, max_new_tokens=8, do_sample=False))
        assert torch.equal(*found)
        texts.add(tuple(found[0].flatten().tolist()))
    assert len(texts) == 3, "the adapters change nothing"
    engine = model.get_base_model().paged
    assert engine.stats().num_steps > 20
    with pytest.raises(ValueError, match="an encoder runs in its callers' calls"):
        engine.submit(ids[:1], adapter="two")
    with pytest.raises(ValueError, match="not for a model with an encoder"):
        engine.load_adapter("three", "folder")


def test_refusals(make_pair: MakePair) -> None:
    """Would break: a source that never fits, found out when the encoder has run and others wait behind it."""
    pair: Pair = make_pair(build("bart"), num_blocks=6)
    text = torch.full((1, 40), 7)
    with pytest.raises(ValueError, match="behind a source of 40 and up to 4 new ones needs 11 KV blocks of 4 tokens"):
        pair.paged.generate(text, max_new_tokens=4)
    with pytest.raises(ValueError, match="row 1 has no source"):
        pair.paged.generate(torch.full((2, 4), 7), attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    pair.generate(input_ids=text[:, :9], max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("name", ["Bart", "Whisper"])
def test_halves(make_pair: MakePair, name: str) -> None:
    """Would break: a decoder alone that takes no position ids: padding counts in the places of its tokens."""
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 64,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
    }
    places = {"max_target_positions": 64} if name == "Whisper" else {"max_position_embeddings": 64}
    sizes["decoder_attention_heads"] = 4
    config = getattr(hf, f"{name}Config")(**sizes, **places, pad_token_id=PAD, bos_token_id=0, eos_token_id=EOS)
    torch.manual_seed(0)
    model = getattr(hf, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    pair = make_pair(model)
    assert hf_paged.is_supported(model).layout == "packed"
    ids = torch.randint(5, VOCAB, (3, 9), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(9) >= torch.tensor([[0], [4], [7]])).long()
    batch = {"input_ids": torch.where(mask > 0, ids, PAD), "attention_mask": mask}
    for mode in MODES.values():
        pair.generate(**batch, **{"max_new_tokens": 8, "do_sample": False} | mode)
    assert pair.engine.stats().num_steps > 20


def test_past_the_patched_class(make_pair: MakePair) -> None:
    """Would break: a call of transformers' own `generate`, by its class, has no states to draw from."""
    pair = make_pair(build("bart"))
    arguments = {**sources("bart"), "max_new_tokens": 6, "do_sample": True}

    def call(model: Any) -> Any:
        torch.manual_seed(7)
        return [hf.GenerationMixin.generate(model, **arguments).tolist() for _ in range(2)]

    expected = call(pair.stock)
    assert call(pair.paged) == expected and expected[0] != expected[1]


def test_few_positions() -> None:
    """Would break: padding's id in the shrunken copy is behind the end of a short table of positions."""
    config = copy.deepcopy(build("m2m_100").config)
    config.max_position_embeddings = 50
    assert hf_paged.is_supported(hf.M2M100ForConditionalGeneration(config).eval()).layout == "packed"


def test_padded_sources_are_written_once(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: each forward of a step makes and writes all of its fresh sources again."""
    pair, written = make_pair(build("led")), []
    own = PaddedSourceCache.update

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        written.append(args[2])
        return own(self, *args, **kwargs)

    monkeypatch.setattr(PaddedSourceCache, "update", update)
    prompts = [[START], [START, 7, 8, 9]]  # of two lengths, which this model computes apart
    pair.engine.pause()
    requests = [
        pair.engine.submit(text[0].tolist(), decoder_input_ids=prompt, max_new_tokens=3)
        for text, prompt in zip(texts(2), prompts, strict=True)
    ]
    pair.engine.resume()
    assert all(len(request.result(PATIENCE).token_ids) == 3 for request in requests)
    assert written == [0, 1]  # by layer
    fresh = PaddedSources([np.zeros((2, 1), np.int64)], np.ones(2, np.int64), torch.zeros(2, 4))
    assert fresh.of(np.array([1]), is_first=True).fresh is fresh.fresh
    assert fresh.of(np.array([1]), is_first=False).fresh is None


@pytest.mark.parametrize("name", PACKED)
def test_steps_attend_by_the_kernel(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Would break: a step that writes more of sources than it has tokens attends by torch, for ages, to other bits."""
    pair = make_pair(build(name))
    if not pair.engine.traits.runs_packed:
        assert IS_OLD and name == "umt5"
        return

    def attend(*args: Any) -> None:
        raise AssertionError("by torch")

    monkeypatch.setattr(TorchStep, "_attend", attend)
    pair.generate(**sources(name), max_new_tokens=8, do_sample=False)
    pair.generate(**sources(name), max_new_tokens=8, do_sample=False, num_beams=3)
