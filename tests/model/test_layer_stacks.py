"""Decoder layers that one call takes few rows through: the same bits, and only where nothing is between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_paged
from helpers.models import build, random_ids
from hf_paged.attention.backends.cpu import CPUStep
from hf_paged.kernels import cpu_linear
from hf_paged.kernels.cpu_stack import CPUDecoderStack
from hf_paged.model import layer_stacks
from hf_paged.model.decoder_layers import CPULayer

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = random_ids(2, 11).clamp(min=8)
LAYERS = 4


@pytest.fixture(autouse=True)
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows of each call, and its layers."""
    found: list[tuple[int, int]] = []
    own = CPUDecoderStack.compute

    def compute(self: CPUDecoderStack, states: Tensor, *others: Any) -> Sequence[Tensor]:
        results = own(self, states, *others)
        found.append((states.shape[1], len(results)))
        return results

    monkeypatch.setattr(CPUDecoderStack, "compute", compute)
    return found


def built(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    return build(name, layers=LAYERS, dtype=dtype)


def patched(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    return hf_paged.patch(built(name, dtype), num_blocks=128, max_num_seqs=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma"])
def test_bits(name: str, dtype: torch.dtype, stacks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As layer by layer, also where rows share what they begin with, and where a prompt comes in between."""
    if isinstance(cpu_linear.load(dtype), str):
        pytest.skip(f"the kernel {cpu_linear.load(dtype)}")
    own, numbers = CPUStep.calls, set()

    def calls(self: CPUStep, *args: Any) -> Any:
        found = own(self, *args)
        numbers.add(len(found))
        return found

    monkeypatch.setattr(CPUStep, "calls", calls)
    ids = torch.cat([random_ids(1, 140).expand(14, -1), random_ids(14, 3)], dim=1)
    found = []
    for most in (layer_stacks.MOST, 0):
        monkeypatch.setattr(layer_stacks, "MOST", most)
        model = patched(name, dtype)
        engine = model.paged
        model.generate(ids[:1], **GREEDY)  # what all begin with
        engine.pause()
        requests = [engine.submit(row, **GREEDY, logprobs=2) for row in ids]
        for _ in range(4):
            engine.step()
        stacks.clear()
        requests.append(engine.submit(IDS[0], **GREEDY, logprobs=2))
        engine.resume()
        requests[-1].result(60)
        assert {number for _, number in stacks} == ({LAYERS} if most else set())
        assert not most or {14 + 11, 14 + 1} <= {rows for rows, _ in stacks}
        requests.append(engine.submit(random_ids(3, 40)[2], **GREEDY, logprobs=2))
        found.append([(own.token_ids, own.logprobs) for own in (request.result(60) for request in requests)])
        assert not most or (40, LAYERS - 1) in stacks, "the last layer computes one token only"
        engine.check_invariants()
    assert numbers == {2, 3}, "keys are written, and all is attended to by one kernel, or what is shared by another"
    assert found[0] == found[1]


class Between(nn.ModuleList):
    """Layers with code around the third that passes for the library's own: with a user's there are no stacks."""

    __module__ = "transformers.models"

    def __init__(self, layers: nn.ModuleList, code: Callable[..., Tensor]) -> None:
        super().__init__(layers)
        self.code = code

    def __getitem__(self, index: Any) -> Any:
        first, second, third, *others = self._modules.values()
        if self.code is ends:
            return [first, second]
        return [first, second, lambda states, **kwargs: self.code(third, states, **kwargs), *others]


def nothing(layer: Any, states: Tensor, **kwargs: Any) -> Tensor:
    return layer(states, **kwargs)  # type: ignore[no-any-return]


def in_place(layer: Any, states: Tensor, **kwargs: Any) -> Tensor:
    return layer(states.mul_(-1.5), **kwargs)  # type: ignore[no-any-return]


def elsewhere(layer: Any, states: Tensor, **kwargs: Any) -> Tensor:
    return layer(states * -1.5, **kwargs)  # type: ignore[no-any-return]


def behind(layer: Any, states: Tensor, **kwargs: Any) -> Tensor:
    return layer(states, **kwargs).mul_(-1.5)  # type: ignore[no-any-return]


def other_angles(layer: Any, states: Tensor, **kwargs: Any) -> Tensor:
    cos, sin = kwargs.pop("position_embeddings")
    return layer(states, position_embeddings=(cos, -sin), **kwargs)  # type: ignore[no-any-return]


def skipped(layer: Any, states: Tensor, **kwargs: Any) -> Tensor:
    return states


def ends(layer: Any, states: Tensor, **kwargs: Any) -> Tensor:
    """All layers behind the second are left out."""
    raise NotImplementedError


def layers_of(model: Any) -> list[CPULayer]:
    return [layer for layer in model.paged.core.layers.found if isinstance(layer, CPULayer)]


def by_generate(model: Any, ids: Tensor) -> list[list[int]]:
    """On this thread, which prepares the model once for all steps."""
    return model.generate(ids, **GREEDY)[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def by_submit(model: Any, ids: Tensor) -> list[list[int]]:
    """On the worker's, which does so for each."""
    model.paged.pause()  # they begin together
    requests = [model.paged.submit(row, **GREEDY) for row in ids]
    model.paged.resume()
    return [request.result(60).token_ids for request in requests]


@pytest.mark.parametrize("road", [by_generate, by_submit])
@pytest.mark.parametrize("code", [nothing, in_place, elsewhere, behind, other_angles, skipped, ends])
@pytest.mark.parametrize("first", [nothing, in_place])
def test_code_between_layers(
    first: Any, code: Any, road: Any, stacks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which does something else once it has been watched, and the first thing again in the end."""
    stock, model = built(), patched()
    for one in (stock, model):
        one.model.layers = Between(one.model.layers, first)
    survey, sizes, in_vain, own_fits = None, [], [], layer_stacks.Ahead.fits

    def fits(self: layer_stacks.Ahead, *given: Any) -> bool:
        if not (found := own_fits(self, *given)):
            in_vain.append(number)
        return found

    monkeypatch.setattr(layer_stacks.Ahead, "fits", fits)
    for number, now in enumerate((first, first, code, code, first, first)):
        ids = IDS - number  # no prefix that was computed by other code
        for one in (stock, model):
            one.model.layers.code = now
        stacks.clear()
        assert road(model, ids) == by_generate(stock, ids)
        assert not layers_of(model)[0].survey.shared(layer_stacks.LayerStacks).ahead
        sizes.append([size for _, size in stacks])
        found = layers_of(model)[0].survey
        assert survey in (None, found), "what was found is not forgotten in between"
        survey = found
    whole = [LAYERS] if first is nothing else [2, 2]
    assert sizes[1][-len(whole) :] == whole
    assert sizes[5], "those between which nothing is, are computed together again"
    if code not in (nothing, first):
        assert sizes[2].count(LAYERS) + sizes[3].count(LAYERS) <= 1, "given up once nothing takes it"
        assert in_vain.count(2) + in_vain.count(3) <= 2, "in a prompt, and in a decode step behind it"


@pytest.mark.parametrize("order", [[0, 3, 1, 2], [3, 0, 1, 2], [0, 1, 3, 2]])
def test_layers_in_another_order(order: list[int], stacks: list[tuple[int, int]]) -> None:
    """The layer of the last number is not the last one, and computes all tokens."""
    stock, other = built(), built()
    for one in (stock, other):
        one.model.layers = nn.ModuleList([one.model.layers[place] for place in order])
    model = hf_paged.patch(other, num_blocks=128, max_num_seqs=16)
    for number in range(3):
        assert by_generate(model, IDS - number) == by_generate(stock, IDS - number)
    assert stacks


def test_a_users_code_between_layers(stacks: list[tuple[int, int]]) -> None:
    """May do anything, to weights and angles, too."""

    def code(layer: Any, states: Tensor, **kwargs: Any) -> Tensor:
        weight = layer.mlp.up_proj.weight
        weight.data = -weight.data
        kwargs["position_embeddings"][1].neg_()
        return layer(states, **kwargs)  # type: ignore[no-any-return]

    stock, model = built(), patched()
    for one in (stock, model):
        one.model.layers = type("Users", (Between,), {"__module__": "users"})(one.model.layers, code)
    for number in range(3):
        assert torch.equal(model.generate(IDS - number, **GREEDY), stock.generate(IDS - number, **GREEDY))
    assert not stacks


def test_hooks_that_move_weights_of_a_layer_behind(stacks: list[tuple[int, int]]) -> None:
    """Would break: addresses from the beginning of the forward; or those of a while, once the weights are back."""
    stock, model = built(), patched()
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
    assert stacks
    stacks.clear()
    handles, others = [], []
    for one in (stock, model):
        weights = [parameter for parameter in one.model.layers[2].parameters() if parameter.ndim == 2]
        own = [weight.data for weight in weights]
        other = [-weight.data.flip(0).contiguous() for weight in weights]
        others += other

        def put(values: list[Tensor], weights: list[nn.Parameter] = weights) -> Any:
            def hook(*_: Any) -> None:
                for weight, value in zip(weights, values, strict=True):
                    weight.data = value

            return hf_paged.packed_hook(hook)

        layers = one.model.layers
        handles += [layers[1].register_forward_hook(put(other)), layers[3].register_forward_hook(put(own))]
    assert torch.equal(model.generate(IDS - 1, **GREEDY), stock.generate(IDS - 1, **GREEDY))
    assert not stacks
    for handle in handles:
        handle.remove()
    for tensor in others:
        tensor.fill_(torch.nan)
    for number in (2, 3):
        assert torch.equal(model.generate(IDS - number, **GREEDY), stock.generate(IDS - number, **GREEDY))
    assert stacks


def test_exact_training_first(stacks: list[tuple[int, int]]) -> None:
    """Its layers are called with copies: what it watched would be no stack, and what it computed for nothing."""
    model = patched()
    with hf_paged.exact_training(model):
        stacks.clear()  # of the trial of a small copy
        for number in range(4):
            model(IDS - number).logits.sum().backward()
    assert not stacks
    by_generate(model, IDS)
    assert {size for _, size in stacks} == {LAYERS}


def test_a_trial_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: layers that go on with addresses of before."""
    stock, model = built(), patched()
    model.generate(IDS, **GREEDY)
    for one in (stock, model):
        for parameter in one.model.layers.parameters():
            parameter.data = parameter.data.flip(0).clone()
    own, number = CPULayer.compute_parts, iter(range(100))

    def compute(*args: Any) -> Any:
        if next(number) == 2:
            raise MemoryError("now")
        return own(*args)

    monkeypatch.setattr(CPULayer, "compute_parts", compute)
    with pytest.raises(MemoryError, match="now"):
        model.generate(IDS, **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))


def test_layers_of_several_shapes(stacks: list[tuple[int, int]]) -> None:
    """Are taken one by one where they differ."""
    models = built(), built()
    for one in models:
        mlp = one.model.layers[1].mlp
        for name, shape in (("gate_proj", (112, 64)), ("up_proj", (112, 64)), ("down_proj", (64, 112))):
            torch.manual_seed(len(name))
            setattr(mlp, name, nn.Linear(*reversed(shape), bias=False))
    stock, model = models[0], hf_paged.patch(models[1], num_blocks=64)
    for _ in range(2):
        assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
    assert not stacks


def test_an_activation_that_changes_between_two_steps(stacks: list[tuple[int, int]]) -> None:
    """Would break: a layer that takes what was computed ahead, by what its first one looked at alone."""

    def generate(model: Any, number: int) -> list[list[int]]:
        mlp, own = model.model.layers[2].mlp, model.model.layers[2].mlp.act_fn

        def processor(ids: Tensor, scores: Tensor) -> Tensor:
            mlp.act_fn = nn.Tanh() if ids.shape[1] - IDS.shape[1] > 2 else own
            return scores

        found = model.generate(IDS - number, **GREEDY, logits_processor=[processor])
        mlp.act_fn = own
        return found.tolist()  # type: ignore[no-any-return]

    stock, model = built(), patched()
    for number in range(2):
        assert generate(model, number) == generate(stock, number)
    assert stacks
