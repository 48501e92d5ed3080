"""Decoder layers whose kernels are called from C: bit for bit the same, found by what their code does, given back."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaModel, LlamaRMSNorm

import hf_paged
from helpers.models import build, random_ids
from hf_paged import PagedCache
from hf_paged.attention.context import WantedTokens
from hf_paged.kernels import cpu_decoder, cpu_layers, cpu_linear
from hf_paged.kernels.cpu_decoder import PIECE, CPUDecoderLayer, DecoderSettings, Scratch
from hf_paged.kernels.cpu_stack import CPUDecoderStack
from hf_paged.kernels.layers import InputError, NormWeight
from hf_paged.model import layer_stacks, layers
from hf_paged.model.decoder_layers import CPULayer, DecoderLayer, _calculates, _code, find_decoder_layer
from hf_paged.model.layers import KINDS

F32, BF16 = torch.float32, torch.bfloat16
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = random_ids(2, 11)
TAKEN = ("llama", "mistral", "qwen2", "qwen2_windows", "qwen3", "gemma")
OTHERS = ("granite", "gemma2", "phi3", "olmo2", "stablelm", "mixtral", "starcoder2")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each layer computed in C adds its tokens to the list."""
    numbers: list[int] = []
    one, several = cpu_decoder.Behind.of, CPUDecoderStack.compute

    def alone(self: cpu_decoder.Behind, states: Tensor, *others: Any) -> Tensor:
        numbers.append(states.shape[1])
        return one(self, states, *others)

    def together(self: CPUDecoderStack, states: Tensor, *others: Any) -> Sequence[Tensor]:
        results = several(self, states, *others)
        numbers.extend([states.shape[1]] * len(results))
        return results

    monkeypatch.setattr(cpu_decoder.Behind, "of", alone)
    monkeypatch.setattr(CPUDecoderStack, "compute", together)
    return numbers


def patched(name: str, dtype: torch.dtype = F32) -> Any:
    return hf_paged.patch(build(name).to(dtype), num_blocks=64, max_num_seqs=8)


def layers_of(model: Any) -> list[Any]:
    return [layer for layer in model.paged.core.layers.found if isinstance(layer, DecoderLayer)]


def logits_of(model: Any) -> list[Tensor]:
    """Of a prompt, a decode step and a chunk behind them."""
    cache = PagedCache(model)
    with torch.no_grad():
        return [model(IDS[:, part], past_key_values=cache).logits for part in (slice(0, 7), slice(7, 8), slice(8, 11))]


@pytest.mark.parametrize("name", TAKEN)
def test_tokens(name: str, calls: list[int]) -> None:
    """Those of stock `generate()`, from layers that are all computed in C behind their first step."""
    stock, model = build(name), patched(name)
    expected = stock.generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    layers = layers_of(model)
    assert len(layers) == model.config.num_hidden_layers and all(layer.is_same for layer in layers)
    calls.clear()
    model.paged.reset_prefix_cache()
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    assert len(calls) == len(layers) * GREEDY["max_new_tokens"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers(name: str, calls: list[int]) -> None:
    """Keep their own forwards."""
    stock, model = build(name), patched(name)
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
    assert not any(layer.is_same for layer in layers_of(model))
    calls.clear()
    model.generate(IDS, **GREEDY)
    assert not calls


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_bits(name: str, dtype: torch.dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernels called one by one, also where a step is computed in pieces."""
    if isinstance(cpu_linear.load(dtype), str):
        pytest.skip(f"the kernel {cpu_linear.load(dtype)}")
    monkeypatch.setattr(cpu_decoder, "PIECE", 4)
    monkeypatch.setattr(layer_stacks, "MOST", 4)  # no more than a piece
    model = patched(name, dtype)
    model.generate(IDS, **GREEDY)
    calls.clear()
    found = logits_of(model)
    assert set(calls) == {14, 2, 6}
    monkeypatch.setattr(layers, "KINDS", [find for find in KINDS if find is not find_decoder_layer])
    model.paged.reset_prefix_cache()
    calls.clear()
    assert all(torch.equal(one, other) for one, other in zip(found, logits_of(model), strict=True))
    assert not calls


@pytest.mark.parametrize("kind", [LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm])
def test_a_forward_that_is_wrapped(kind: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a user's code around transformers' own, left out once it has done nothing."""
    own, strength, count = kind.forward, [0.0], [0]

    @functools.wraps(own)
    def steered(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return own(self, *args, **kwargs) + strength[0]

    monkeypatch.setattr(kind, "forward", steered)
    stock, model = build("llama"), patched("llama")
    model.generate(IDS, **GREEDY)
    strength[0], counts, found = 0.5, [], []
    for one in (stock, model):
        count[0] = 0
        found.append(one.generate(IDS + 1, **GREEDY))
        counts.append(count[0])
    assert torch.equal(*found) and counts[0] == counts[1]


def test_hidden_states_that_were_asked_for(calls: list[int]) -> None:
    """Would break: layers that never come back to C (transformers leaves its hooks there), or that are not seen."""
    stock, model = build("llama"), patched("llama")
    for _ in range(2):
        with torch.no_grad():
            hidden = [one(IDS, output_hidden_states=True).hidden_states for one in (stock, model)]
        assert all(map(torch.equal, *hidden)) and model.model.layers[0]._forward_hooks
        calls.clear()
        model.paged.reset_prefix_cache()
        assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
        assert calls
        details = GREEDY | {"output_hidden_states": True, "return_dict_in_generate": True}
        steps = [one.generate(IDS, **details).hidden_states for one in (stock, model)]
        for one, other in zip(*steps, strict=True):
            assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one, other, strict=True))


def test_a_layer_that_computes_something_else(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is found out in its first step, which its own forward computes."""
    own = cpu_decoder.Heads.of

    def before(self: Any, *args: Tensor) -> tuple[Tensor, ...]:
        query, key, value = own(self, *args)
        return query, key + 1e-3, value

    monkeypatch.setattr(cpu_decoder.Heads, "of", before)
    stock, model = build("llama"), patched("llama")
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
    assert [layer.is_same for layer in layers_of(model)] == [False] * len(layers_of(model)) != []
    calls.clear()
    model.generate(IDS, **GREEDY)
    assert not calls


def test_code_that_calculates() -> None:
    """A factor on queries may be 1 wherever it is tried."""

    def scaled(self: Any, states: Tensor) -> Tensor:
        return self.q_proj(states) * self.scaling

    def plain(self: Any, states: Tensor) -> Tensor:
        return self.q_proj(states)

    def nested(self: Any, states: Tensor) -> Tensor:
        return (lambda: states)()

    assert _calculates(scaled.__code__) and not _calculates(plain.__code__)
    assert _code(plain) is plain.__code__ and _code(nested) is None


def hook_a_projection(model: Any) -> None:
    look = hf_paged.packed_hook(lambda module, args, output: 2 * output)
    model.model.layers[0].self_attn.k_proj.register_forward_hook(look)


def hook_a_layer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(hf_paged.packed_hook(lambda module, args, output: output.flip(-1)))


def replace_a_projection(model: Any) -> None:
    own = model.model.layers[0].self_attn
    own.o_proj = nn.Sequential(own.o_proj, nn.Tanh())


def replace_the_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def replace_a_norm(model: Any) -> None:
    model.model.layers[0].input_layernorm.weight = nn.Parameter(torch.linspace(-2, 2, model.config.hidden_size))


def move_a_norm(model: Any) -> None:
    weight = model.model.layers[1].post_attention_layernorm.weight
    weight.data = torch.linspace(-2, 2, len(weight))


def change_eps(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def change_scaling(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 2.0


def change_a_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-1.5)


def change_the_last_norm(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(-3.0)


def replace_a_forward(model: Any) -> None:
    norm = model.model.norm
    norm.forward = lambda states: 2.0 - type(norm).forward(norm, states)


def change_the_dtype(model: Any) -> None:
    model.double()


CHANGES = [
    hook_a_projection,
    hook_a_layer,
    replace_a_projection,
    replace_the_activation,
    replace_a_norm,
    move_a_norm,
    change_eps,
    change_scaling,
    change_a_weight,
    change_the_last_norm,
    replace_a_forward,
    change_the_dtype,
]


@pytest.mark.parametrize("is_in_c", [True, False], ids=["layers in C", "fused kernels"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: Callable[[Any], None], is_in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_in_c:
        monkeypatch.setattr(layers, "KINDS", [find for find in KINDS if find is not find_decoder_layer])
    stock, model = build("llama"), patched("llama")
    model.generate(IDS, **GREEDY)
    for one in (stock, model):
        change(one)
    model.paged.reset_prefix_cache()
    with torch.no_grad():
        expected, logits = stock(IDS).logits, model(IDS, past_key_values=PagedCache(model)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))


def test_weights_that_change_while_a_lone_caller_runs_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step may be the first of a call that came behind the change."""
    stock, model, ids = build("llama"), patched("llama"), random_ids(1, 9)
    model.generate(IDS, **GREEDY)
    loop = model.paged.core.worker.loop
    own, turns, requests = loop.turn, iter(range(100)), []

    def turn(*args: Any) -> None:
        if next(turns) == 2:
            for one in (stock, model):
                change_a_weight(one)
            thread = threading.Thread(target=lambda: requests.append(model.paged.submit(ids[0], **GREEDY)))
            thread.start()
            thread.join()
        own(*args)

    monkeypatch.setattr(loop, "turn", turn)
    model.generate(IDS, **GREEDY)
    expected = stock.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist()
    assert requests[0].result(60).token_ids == expected


def test_layers_that_another_thread_forgets_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right when they were found."""
    stock, model = build("llama"), patched("llama")
    own, numbers = layers._survey, []

    def found(*args: Any) -> Any:
        survey = own(*args)
        numbers.append(len(survey.found))
        thread = threading.Thread(target=model.paged.core.layers.forget)
        thread.start()
        thread.join()
        return survey

    monkeypatch.setattr(layers, "_survey", found)
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
    assert numbers and all(numbers)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_weights_that_move_within_a_step(name: str, calls: list[int]) -> None:
    """Would break: an address from before, read when its memory is another's."""
    stock, model = build(name), patched(name)
    model.generate(IDS, **GREEDY)
    moved: list[Tensor] = []

    def move(*_: Any) -> None:
        for parameter in model.model.layers[1].parameters():
            moved.append(parameter.data)
            parameter.data = parameter.data.clone()
            moved[-1].fill_(torch.nan)

    handle = model.model.embed_tokens.register_forward_hook(hf_paged.packed_hook(move))
    calls.clear()
    assert torch.equal(model.generate(IDS, **GREEDY), stock.generate(IDS, **GREEDY))
    handle.remove()
    assert moved and calls


@pytest.mark.parametrize("last", range(1, 7))
def test_a_step_that_ends_while_shapes_are_set(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: rows of a step before, read and written beyond what this one has."""
    stock, model = build("llama"), patched("llama")
    model.generate(IDS, **GREEDY)
    number = iter(range(1000))

    def some(arguments: list[Any]) -> Iterator[Any]:
        yield arguments[0]
        raise MemoryError("now")

    for kind in (cpu_decoder.Heads, cpu_decoder.Behind):

        def set_shape(self: Any, rows: int, threads: int, own: Any = kind.set_shape) -> None:
            whole = self._by_rows
            if self._shape != (rows, threads) and next(number) == last:
                self._by_rows = some(whole)
            try:
                own(self, rows, threads)
            finally:
                self._by_rows = whole

        monkeypatch.setattr(kind, "set_shape", set_shape)
    others = random_ids(3, 9)
    with pytest.raises(MemoryError, match="now"):
        model.generate(others, **GREEDY)
    for ids in (others, IDS[:1], IDS):
        assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))


@pytest.mark.parametrize("kind", ["dtype", "strides of a norm", "strides of a bias", "a short bias"])
def test_weights_that_kernels_would_read_beyond(kind: str) -> None:
    layers, linear = cpu_layers.load(F32), cpu_linear.load(F32)
    assert not isinstance(layers, str) and not isinstance(linear, str)
    vectors = {"dtype": torch.ones(64, dtype=BF16), "strides of a norm": torch.ones(1).expand(64)}
    biases = {"strides of a bias": torch.ones(1).expand(64), "a short bias": torch.ones(3)}

    def made(vector: Tensor, bias: Tensor | None) -> CPUDecoderLayer:
        shapes = (64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)
        weights = [(torch.ones(shape), bias if i == 0 else None) for i, shape in enumerate(shapes)]
        norm = NormWeight(vector, 1e-6, 0.0, True)
        settings = DecoderSettings(16, (norm, norm), None, *weights, (1.0, 0.0), False, True)
        return CPUDecoderLayer(layers, linear, settings, Scratch())

    made(torch.ones(64), torch.ones(64))
    with pytest.raises(InputError):
        made(vectors.get(kind, torch.ones(64)), biases.get(kind))


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens of each step whose last layer left some out, and how many were wanted."""
    numbers: list[tuple[int, int]] = []
    own = CPULayer._compute_some

    def noting(self: Any, step: Any, wanted: WantedTokens, states: Tensor, angles: Any) -> Tensor:
        numbers.append((states.shape[1], len(wanted.rows)))
        return own(self, step, wanted, states, angles)

    monkeypatch.setattr(CPULayer, "_compute_some", noting)
    return numbers


@pytest.mark.parametrize("name", TAKEN)
def test_the_last_layer_computes_only_what_is_wanted(name: str, cut: list[tuple[int, int]]) -> None:
    """Would break: keys and values left out, positions or tables of other tokens, rows put back elsewhere."""
    stock, model = build(name), patched(name)
    cut.clear()  # of the trial on a copy
    ids, others = random_ids(3, 40), random_ids(1, 33)
    for given, options in [
        *[(random_ids(3, 40, seed=seed), GREEDY) for seed in range(3)],
        (ids, GREEDY | {"num_beams": 3}),
        (torch.cat([ids[:1, :30], others], dim=1), GREEDY | {"num_return_sequences": 2, "num_beams": 2}),
    ]:
        assert torch.equal(model.generate(given, **options), stock.generate(given, **options))
    assert cut[:2] == [(120, 3), (120, 3)] and len(cut) > 2, "but for the first prompts, in which layers are tried"
    cache = PagedCache(model)
    prompt = torch.cat([others, ids[:1]], dim=1)
    with torch.no_grad():
        expected = stock(prompt).logits[:, -1]
        for part in (prompt[:, :50], prompt[:, 50:]):
            found = model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_chunks_beside_decoding_rows(cut: list[tuple[int, int]]) -> None:
    stock = build("qwen2_windows")
    model = hf_paged.patch(build("qwen2_windows"), num_blocks=64, max_num_batched_tokens=24)
    prompts = [random_ids(1, n)[0] for n in (40, 9, 61, 30)]
    model.generate(random_ids(2, 20), **GREEDY)
    model.paged.pause()  # they begin together
    requests = [model.paged.submit(prompt, **GREEDY) for prompt in prompts]
    model.paged.resume()
    for prompt, request in zip(prompts, requests, strict=True):
        expected = stock.generate(prompt[None], **GREEDY)[0, len(prompt) :].tolist()
        assert request.result(60).token_ids == expected
    assert any(wanted > 1 for _, wanted in cut)


def test_a_hook_behind_the_last_layer_sees_all_tokens(cut: list[tuple[int, int]]) -> None:
    model, ids, seen = patched("llama"), random_ids(1, 40), []
    cut.clear()
    for seed in (1, 2):
        model.generate(random_ids(1, 40, seed=seed), **GREEDY)
    assert cut
    cut.clear()
    hook = hf_paged.packed_hook(lambda module, args, output: seen.append(output.clone()))
    handle = model.model.norm.register_forward_hook(hook)
    model.generate(ids, **GREEDY)
    handle.remove()
    with torch.no_grad():
        expected = build("llama").model(ids).last_hidden_state
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)
    assert not cut


@pytest.mark.parametrize("is_before", [True, False], ids=["before patch", "between calls"])
def test_layers_in_another_order(is_before: bool, cut: list[tuple[int, int]]) -> None:
    """Would break: tokens left out by the layer of the last number, which others come behind."""
    stock = build("llama")

    def turn_round(model: Any) -> None:
        model.model.layers = nn.ModuleList(list(model.model.layers)[::-1])

    if is_before:
        turn_round(stock)
    model = hf_paged.patch(copy.deepcopy(stock), num_blocks=64)
    for seed in (1, 2):
        model.generate(random_ids(1, 40, seed=seed), **GREEDY)
    if not is_before:
        turn_round(stock)
        turn_round(model)
    cut.clear()
    for seed in range(3, 6):
        ids = random_ids(2, 40, seed=seed)
        assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))
    assert not cut


def test_scratch_of_several_dtypes() -> None:
    """Would break: memory for bfloat16 that another layer writes float32 to."""
    scratch = Scratch()
    for dtype in (BF16, F32):
        memory, places = scratch.of([100, 30], dtype)
        ends = [place + width * PIECE * dtype.itemsize for place, width in zip(places, (100, 30), strict=True)]
        assert memory.data_ptr() <= places[0] <= ends[0] <= places[1] <= ends[1] <= memory.data_ptr() + memory.nbytes


def test_a_class_that_is_wrapped_later(cut: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: code put into a class between two calls, which is shown zeros for tokens that were left out."""
    stock, model, seen = build("llama"), patched("llama"), []
    for seed in (1, 2):
        model.generate(random_ids(1, 40, seed=seed), **GREEDY)
    assert cut
    own = LlamaModel.forward

    @functools.wraps(own)
    def watch(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        seen.append(output.last_hidden_state)
        return output

    monkeypatch.setattr(LlamaModel, "forward", watch)
    ids = random_ids(1, 40, seed=3)
    expected = stock.generate(ids, **GREEDY)
    seen.clear()
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert seen and all((states != 0).any(dim=-1).all() for states in seen)


@pytest.mark.parametrize("length", [1, 64, 70, 200])
def test_any_first_prompt_will_do(length: int) -> None:
    """Would break: heads taken for tokens, of which a trial looks at 64; a trial of a prompt's first ones alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 264, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99}
    config = LlamaConfig(num_attention_heads=66, num_key_value_heads=2, head_dim=4, **sizes)
    stock = LlamaForCausalLM(config).eval()
    model, ids = hf_paged.patch(copy.deepcopy(stock), num_blocks=64), random_ids(1, length)
    found = model.generate(ids, **GREEDY)
    assert torch.equal(found, stock.generate(ids, **GREEDY))
    assert [layer.is_same for layer in layers_of(model)] == [True, True]
    first, rows = layers_of(model)[0], list(range(length))
    rows = rows if length <= 64 else rows[:32] + rows[-32:]
    for truth in (torch.randn(1, length, 8), torch.randn(length, 66, 4)):
        some = truth[:, rows] if len(truth) == 1 < length or truth.shape[2] == 8 else truth[rows]
        assert first.agrees(truth, some) and not first.agrees(truth, some + 1)
