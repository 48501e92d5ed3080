"""Encoders of texts: what they make of a row is stock's within rounding, the same bits with neighbours or without."""

from __future__ import annotations

import threading
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.bart.modeling_bart import BartEncoderLayer

import hf_paged
from helpers.encoder_decoders import PACKED, build, sources
from helpers.models import VOCAB
from hf_paged.api.encodings import encoding
from hf_paged.attention.encoder_rows import EncoderRows

# Their attention is code of their own, whose matrix products depend on the batch's size.
OWN_ATTENTION = {"pegasus_x", "bigbird_pegasus", "longt5"}
TEXTS = [name for name in PACKED if "input_ids" in sources(name)]


@torch.no_grad()
def encode(model: Any, ids: Tensor, mask: Tensor, is_ours: bool = True) -> Tensor:
    encoder = model.get_encoder()
    if not is_ours:
        return encoder(input_ids=ids, attention_mask=mask).last_hidden_state  # type: ignore[no-any-return]
    with encoding(model, ids, mask):
        return encoder(input_ids=ids, attention_mask=mask).last_hidden_state  # type: ignore[no-any-return]


def assert_near(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-2 if expected.dtype is torch.bfloat16 else 1e-5
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TEXTS)
def test_rows_of_a_batch(name: str, dtype: torch.dtype) -> None:
    """Would break: padding is seen, a bias or a window is cut at the wrong columns, sums depend on neighbours."""
    model = hf_paged.patch(build(name).to(dtype))
    ids, mask = sources(name).values()
    shown = mask.bool()
    whole = [encode(model, ids, mask) for _ in range(2)]  # layers of one input are joined after the first
    assert torch.equal(*whole)
    assert_near(whole[0][shown], encode(model, ids, mask, is_ours=False)[shown])
    # Older versions' UMT5 runs padded, with stock's own encoder.
    if name not in OWN_ATTENTION and model.paged.traits.runs_packed:
        for row, length in enumerate(mask.sum(dim=1).tolist()):
            alone = encode(model, ids[row : row + 1, :length], mask[row : row + 1, :length])
            assert torch.equal(alone[0], whole[0][row, :length])


@pytest.mark.parametrize("name", ["bart", "t5", "t5gemma"])
def test_kinds_of_masks(name: str) -> None:
    """Would break: padding on the left moves positions; a mask with gaps, or of nothing, is taken for a run."""
    model = hf_paged.patch(build(name))
    ids, mask = sources(name).values()
    left = mask.flip(1)
    assert_near(encode(model, ids, left)[left.bool()], encode(model, ids, left, is_ours=False)[left.bool()])
    for gap in (mask.clone().index_fill_(1, torch.tensor([2]), 0), mask.clone().index_fill_(0, torch.tensor([1]), 0)):
        assert torch.equal(encode(model, ids, gap), encode(model, ids, gap, is_ours=False))


def test_hooks_and_training() -> None:
    """Would break: a hook sees packed states, or is not called; dropout of a model in training is left out."""
    model = hf_paged.patch(build("bart"))
    ids, mask = sources("bart").values()
    seen: list[torch.Size] = []
    layer = model.get_encoder().layers[0].fc1
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert torch.equal(encode(model, ids, mask), encode(model, ids, mask, is_ours=False))
    assert seen == [(*ids.shape, layer.out_features)] * 2
    handle.remove()
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = encode(model, ids, mask)
        torch.manual_seed(3)
        assert torch.equal(found, encode(model, ids, mask, is_ours=False))


def test_changed_layers() -> None:
    """Would break: a layer's old weights are multiplied, or an adapter that came later is left out."""
    model = hf_paged.patch(build("bart"))
    ids, mask = sources("bart").values()
    shown, before = mask.bool(), encode(model, ids, mask)
    with torch.no_grad():
        model.get_encoder().layers[1].fc2.weight.mul_(1.5)
    changed = encode(model, ids, mask)
    assert not torch.equal(before, changed)
    assert_near(changed[shown], encode(model, ids, mask, is_ours=False)[shown])
    config = peft.LoraConfig(target_modules=["fc1", "q_proj"], r=4, init_lora_weights=False)
    peft.get_peft_model(model, config).eval()
    adapted = encode(model, ids, mask)
    assert not torch.equal(adapted, changed)
    assert_near(adapted[shown], encode(model, ids, mask, is_ours=False)[shown])


class Running(GradientCheckpointingLayer):
    """Sums columns up, by code of its own."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        return hidden_states.cumsum(dim=1)


class Told(BartEncoderLayer):
    """Adds what it is told of each place, by a name that nobody knows."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states + kwargs.pop("told", 0), attention_mask, **kwargs)


@pytest.mark.parametrize("kind", ["running", "told"])
@torch.no_grad()
def test_layers_that_see_columns(kind: str) -> None:
    """Would break: a layer is given packed tokens that sees its neighbours, or has a table by column beside them."""
    model = build("bart")
    layers = model.get_encoder().layers
    if kind == "running":
        layers[0] = Running().eval()
    else:
        layers[0].__class__ = Told
    hf_paged.patch(model)
    ids, mask = sources("bart").values()
    told = {} if kind == "running" else {"told": torch.randn(*ids.shape, 1, generator=torch.Generator().manual_seed(0))}
    expected = model.get_encoder()(input_ids=ids, attention_mask=mask, **told).last_hidden_state
    with encoding(model, ids, mask):
        found = model.get_encoder()(input_ids=ids, attention_mask=mask, **told).last_hidden_state
    assert_near(found[mask.bool()], expected[mask.bool()])


def test_states_that_are_written_to() -> None:
    """Would break: what was packed before a write is taken for what is there behind it."""
    rows = EncoderRows.of(torch.tensor([[1, 1, 0], [0, 1, 0]]))
    assert rows is not None
    states = torch.randn(2, 3, 4)
    assert rows.pack(states) is rows.pack(states)
    states.add_(1)
    assert torch.equal(rows.pack(states)[0], states[torch.tensor([[True, True, False], [False, True, False]])])


def test_what_stands_in_for_its_modules() -> None:
    """Would break: steps take over modules that encoders run beside them; a layer put in later is never found."""
    model = hf_paged.patch(build("bart"))
    batch, layers, own = sources("bart"), model.paged.core.layers, set(map(id, model.get_encoder().modules()))
    model.generate(**batch, max_new_tokens=2)
    assert layers.found and not own & {id(each.module) for each in layers.found}
    layer = model.get_encoder().layers[0]
    layer.fc1 = torch.nn.Linear(layer.fc1.in_features, layer.fc1.out_features).eval()
    for _ in range(2):
        model.generate(**batch, max_new_tokens=2)
    assert any(each.module is layer.fc1 for each in layers.of_encoder.found)


def test_beside_steps_and_other_encoders() -> None:
    """Would break: threads that encode take each other's rows, or a step's layers."""
    model = hf_paged.patch(build("t5"))
    batches = [
        torch.randint(5, VOCAB, (2, 3 + number), generator=torch.Generator().manual_seed(number)) for number in range(6)
    ]
    expected = [encode(model, ids, torch.ones_like(ids)) for ids in batches]
    found: dict[int, list[Tensor]] = {}

    def run(number: int) -> None:
        ids = batches[number]
        found[number] = [encode(model, ids, torch.ones_like(ids)) for _ in range(8)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(batches))]
    requests = [model.paged.submit(ids[0].tolist(), max_new_tokens=12) for ids in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(own, expected[number]) for number, each in found.items() for own in each)
    assert len(found) == len(batches) and all(request.result().token_ids for request in requests)


def test_a_source_of_a_batch_is_found_again() -> None:
    """Would break: the encoder's bits depend on the batch, so that the same text is another source when it is alone."""
    model = hf_paged.patch(build("bart"), block_size=16)
    batch = sources("bart")
    model.generate(**batch, max_new_tokens=4, do_sample=False)
    before = model.paged.stats().num_blocks_allocated
    for ids, mask in zip(*batch.values(), strict=True):
        model.paged.submit(ids[mask.bool()].tolist(), max_new_tokens=4).result()
    assert model.paged.stats().num_blocks_allocated - before == len(batch["input_ids"])  # the decoders' own
