"""Forward hooks on inner modules: shown what stock shows them, unless they say that they treat all tokens alike."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.utils import ModelOutput

import hf_paged
from helpers.models import build, name_of, ragged_batch, random_ids
from helpers.pairs import MakePair, assert_same, logged_messages, new_cache
from helpers.user_code import NextToken
from helpers.waiting import PATIENCE, in_background
from hf_paged.api.loops import run_loop
from hf_paged.model.hooks import all_modules

EOS_OFTEN = {"eos_token_id": list(range(2, 30))}
NEW = {"max_new_tokens": 7}


class Watcher:
    """Hooks that address the last row and the last column, and note the shapes they are shown."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def _change(self, states: Tensor) -> Tensor:
        self.shapes.append(tuple(states.shape))
        states = states.clone()
        states[:, -1] *= 1.5
        states[-1] *= 0.9
        return states

    def output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook."""
        if isinstance(output, ModelOutput):
            self.shapes.append(tuple(output[0].shape))
            return None
        return (self._change(output[0]), *output[1:]) if isinstance(output, tuple) else self._change(output)

    def input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pre-hook with keyword arguments."""
        if args:
            return (self._change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._change(kwargs["hidden_states"])}


def hook(model: Any, kind: str) -> Watcher:
    watcher = Watcher()
    name, _, is_pre = kind.partition(":")
    if is_pre:
        model.get_submodule(name).register_forward_pre_hook(watcher.input, with_kwargs=True)
    else:
        model.get_submodule(name).register_forward_hook(watcher.output)
    return watcher


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "eos_often": EOS_OFTEN,
    "beams_eos_often": {"num_beams": 3, **EOS_OFTEN},
    "processor": {"logits_processor": [NextToken()], **EOS_OFTEN},
    "hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "falcon_rotary"])
def test_hooks_see_what_stock_shows_them(make_pair: MakePair, name: str, call: str) -> None:
    """Would break: hooks that are given the packed batch, one row for several samples, or no finished rows."""
    pair = make_pair(name)
    layer = next(path for path, module in pair.stock.named_modules() if type(module) is nn.ModuleList) + ".0"
    watchers = [hook(model, layer) for model in (pair.stock, pair.paged)]
    is_packed = pair.engine.traits.runs_packed
    pair.generate(**ragged_batch(), **CALLS[call], **NEW, falls_back=is_packed)
    assert watchers[0].shapes == watchers[1].shapes and len(watchers[0].shapes) > 2


@pytest.mark.parametrize(
    "kind",
    [
        "model.embed_tokens",
        "model.layers.1:pre",
        "model.layers.0.self_attn:pre",
        "model.layers.0.mlp.down_proj:pre",
        "model.layers.1.mlp",
        "model.layers.0.self_attn.k_proj",
        "model.norm",
        "lm_head",
        "model",
    ],
)
def test_hooks_of_all_modules(make_pair: MakePair, kind: str) -> None:
    """Would break: modules that are computed another way although they are watched."""
    pair = make_pair()
    watchers = [hook(model, kind) for model in (pair.stock, pair.paged)]
    pair.generate(**ragged_batch(), **NEW, falls_back=True)
    assert watchers[0].shapes == watchers[1].shapes


@pytest.mark.parametrize("is_hooked_first", [True, False])
def test_a_kept_cache(make_pair: MakePair, is_hooked_first: bool) -> None:
    """Would break: a cache whose first turn ran packed and whose second is padded, or the other way round."""
    pair = make_pair()
    models = (pair.stock, pair.paged)
    caches = [new_cache(model) for model in models]
    handles: list[Any] = []
    ids, mask = ragged_batch((9, 4)).values()
    for turn in range(2):
        if is_hooked_first is (turn == 0):
            handles = [model.model.layers[1].register_forward_hook(Watcher().output) for model in models]
        else:
            for handle in handles:
                handle.remove()
        expected, found = (
            model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5)
            for model, cache in zip(models, caches, strict=True)
        )
        assert torch.equal(expected, found)
        ids = torch.cat([found, random_ids(2, 2)], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, 7)], dim=1)
    caches.clear()


def test_a_batch_larger_than_a_step(make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=5, max_num_seqs=2)
    for model in (pair.stock, pair.paged):
        hook(model, "model.layers.0")
    pair.generate(**ragged_batch(), **NEW, falls_back=True)


def test_requests_and_threads(make_pair: MakePair) -> None:
    pair = make_pair()
    for model in (pair.stock, pair.paged):
        hook(model, "model.layers.0")
    prompts = [random_ids(1, length, seed=length) for length in (3, 8, 5, 12)]
    expected = [pair.stock.generate(ids, **NEW) for ids in prompts]
    futures = [in_background(pair.paged.generate, ids, **NEW) for ids in prompts]
    results = pair.engine.generate([ids[0] for ids in prompts], **NEW)
    for index, text in enumerate(expected):
        assert torch.equal(futures[index].result(PATIENCE), text)
        assert results[index].token_ids == text[0, prompts[index].shape[1] :].tolist()


def test_scoring_over_a_paged_cache(make_pair: MakePair) -> None:
    pair = make_pair()
    watchers = [hook(model, "model.layers.0") for model in (pair.stock, pair.paged)]

    def call(model: Any) -> list[Tensor]:
        cache = new_cache(model)
        with torch.no_grad():
            return [model(random_ids(2, n, seed=n), past_key_values=cache).logits for n in (6, 1, 3)]

    pair.both(call, falls_back=True)
    assert watchers[0].shapes == watchers[1].shapes


def test_a_hook_added_and_removed(make_pair: MakePair) -> None:
    """Would break: the layout of the last call, and keys and values that a hook had changed."""
    pair = make_pair()
    batch = ragged_batch((11, 9, 8))

    def generate(is_hooked: bool, hits: bool) -> None:
        pair.generate(**batch, **NEW, falls_back=is_hooked)
        assert (pair.seen[0] == 33) is is_hooked
        assert (pair.delta["prefix_cache_hit_tokens"] > 0) is hits

    generate(is_hooked=False, hits=False)
    for _ in range(2):
        handles = [model.model.layers[1].register_forward_hook(Watcher().output) for model in (pair.stock, pair.paged)]
        generate(is_hooked=True, hits=False)
        for handle in handles:
            handle.remove()
        pair.seen.clear()
        pair.generate(**batch, **NEW)
        assert pair.delta["prefix_cache_hit_tokens"] > 0
    hooked = []
    for model in (pair.stock, pair.paged):
        hooked.append(copy.deepcopy(model.model.layers[1]))
        hooked[-1].register_forward_hook(Watcher().output)
    pair.generate(**batch, **NEW)
    for model, layer in zip((pair.stock, pair.paged), hooked, strict=True):
        model.model.layers[1] = layer
    generate(is_hooked=True, hits=False)


def test_hooks_on_all_modules_of_the_process(make_pair: MakePair) -> None:
    pair = make_pair()
    shapes: list[Any] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.Linear):
            shapes.append(tuple(output.shape))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        pair.stock.generate(**ragged_batch(), **NEW)
        expected = shapes.copy()
        shapes.clear()
        pair.paged.generate(**ragged_batch(), **NEW)
    finally:
        handle.remove()
    assert shapes == expected
    pair.generate(**ragged_batch(), **NEW)
    assert pair.seen[0] == 20


def test_one_warning_or_an_error(make_pair: MakePair) -> None:
    pair = make_pair()
    hook(pair.paged, "model.layers.0")
    with logged_messages() as messages:
        for _ in range(2):
            pair.paged.generate(**ragged_batch(), **NEW)
    assert len(messages) == 1 and "packed_hook" in messages[0][1]
    strict = make_pair(strict=True)
    handle = strict.paged.model.layers[0].register_forward_hook(Watcher().output)
    cache = hf_paged.PagedCache(strict.paged)
    for call in (
        lambda: strict.paged.generate(**ragged_batch(), **NEW),
        lambda: strict.paged.generate(**ragged_batch(), **NEW, past_key_values=cache),
        lambda: strict.engine.submit(random_ids(1, 5), **NEW),
        lambda: strict.paged(random_ids(1, 5), past_key_values=cache),
    ):
        with pytest.raises(hf_paged.UnsupportedCallError, match="packed_hook"):
            call()
    assert cache.get_seq_length() == 0
    handle.remove()
    strict.generate(**ragged_batch(), **NEW)


def marked(model: Any) -> None:
    """A steering vector, the same for all tokens."""

    @hf_paged.packed_hook
    def steer(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] + 0.3, *output[1:]) if isinstance(output, tuple) else output + 0.3

    model.model.layers[0].register_forward_hook(steer)


def marked_partial(model: Any) -> None:
    """The same of a partial, whose function is marked."""

    @hf_paged.packed_hook
    def scale(module: nn.Module, args: Any, output: Any, by: float) -> Any:
        return by * output

    model.model.layers[0].mlp.register_forward_hook(functools.partial(scale, by=1.3))


def weight_normed(model: Any) -> None:
    """A pre-hook of torch's that makes the weight."""
    nn.utils.weight_norm(model.model.layers[0].mlp.up_proj)


def parametrized(model: Any) -> None:
    """No hook at all."""
    nn.utils.parametrizations.spectral_norm(model.model.layers[0].mlp.up_proj).eval()
    assert parametrize.is_parametrized(model.model.layers[0].mlp.up_proj)


def on_top(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: output)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "add", [marked, marked_partial, weight_normed, parametrized, on_top], ids=lambda add: add.__name__
)
def test_hooks_that_keep_the_packed_batch(make_pair: MakePair, add: Callable[[Any], None]) -> None:
    """Would break: the continuous batch of models with hooks that don't mind it."""
    pair = make_pair()
    for model in (pair.stock, pair.paged):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            add(model)
    for _ in range(2):
        pair.generate(**ragged_batch((11, 9, 8)), **NEW)
    assert pair.seen[0] < 28 and pair.delta["prefix_cache_hit_tokens"] > 0


def activated() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj"],
        alora_invocation_tokens=[5, 6],
        r=4,
        init_lora_weights=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(build("llama"), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.5)
    return model.eval()


@pytest.mark.parametrize("arguments", [{}, EOS_OFTEN, {"do_sample": True}], ids=name_of)
def test_activated_lora(make_pair: MakePair, arguments: dict[str, Any]) -> None:
    """Would break: the adapter's beginning in each row, counted from the end of the padded prompt."""
    pair = make_pair(activated(), max_num_batched_tokens=4)
    batch = ragged_batch((11, 9, 8, 6))
    for row, place in enumerate((-4, -6, -2)):  # none in the last row
        batch["input_ids"][row, place : place + 2 or None] = torch.tensor([5, 6])
    before, _ = pair.generate(**batch, **NEW, **arguments, falls_back=True)
    pair.generate(input_ids=batch["input_ids"][:1], **NEW, **arguments, falls_back=True)
    with pair.stock.disable_adapter():
        assert not torch.equal(pair.stock.generate(**batch, **NEW), before), "the adapter changes nothing"
    # Called without PEFT's wrapper nothing activates it, and the batch is packed.
    inner = pair.paged.get_base_model()
    assert_same(pair.stock.get_base_model().generate(**batch, **NEW), inner.generate(**batch, **NEW))


def with_a_head(model: Any) -> None:
    """As TRL's trainers do: another result where training asks for it."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused:
            if labels is not None:
                kwargs["labels"] = labels
            return original(*args, **kwargs)
        return self.base_model(*args, **kwargs).last_hidden_state[labels != -100]

    model.forward = MethodType(forward, model)


def wrapped_twice(model: Any) -> None:
    """A plain function around one with a head."""
    with_a_head(model)
    original = model.forward
    model.forward = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))


def partial(model: Any) -> None:
    model.forward = functools.partial(model.forward)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets an item for each call of a patched model that runs a loop of transformers'."""
    found: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        found.append(args)
        return run_loop(*args, **kwargs)

    monkeypatch.setattr("hf_paged.api.loops.run_loop", note)
    return found


@pytest.mark.parametrize("add", [with_a_head, wrapped_twice, partial], ids=lambda add: add.__name__)
def test_forwards_that_hand_on_their_call(make_pair: MakePair, loops: list[Any], add: Callable[[Any], None]) -> None:
    """Would break: the engine's own rows and beams under a wrapper that does nothing in generation."""
    pair = make_pair()
    for model in (pair.stock, pair.paged):
        add(model)
    for call in ("greedy", "samples", "beams"):
        pair.generate(**ragged_batch(), **CALLS[call], **NEW)
    ids = random_ids(1, 9)
    handle = pair.engine.submit(ids, **NEW)
    assert handle.result().token_ids == pair.stock.generate(ids, **NEW)[0, 9:].tolist()
    model = hf_paged.patch(build("llama"), num_blocks=64)  # without the hook that a pair counts tokens with
    add(model)
    model.generate(ids, **NEW)
    assert not loops and model.paged.core.bound.is_plain


def rolled_ids(original: Any, self: Any, *args: Any, input_ids: Any = None, **kwargs: Any) -> Any:
    """Changes an input."""
    return original(*args, input_ids=input_ids + 1, **kwargs)


def rolled_logits(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Changes the result, in the last column of the batch."""
    output = original(*args, **kwargs)
    output.logits[:, -1] = output.logits[:, -1].roll(1, dims=-1)
    return output


def longer_than_one(original: Any, self: Any, *args: Any, input_ids: Any = None, **kwargs: Any) -> Any:
    """Looks at a shape, and swallows what goes wrong there."""
    by = 0
    with contextlib.suppress(Exception):
        by = int(input_ids.shape[1] > 1)
    output = original(*args, input_ids=input_ids, **kwargs)
    output.logits = output.logits.roll(by, dims=-1)
    return output


def computed_in_bfloat16(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Changes what is around the call."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return original(*args, **kwargs)


def numbered(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Counts its calls, and goes by their number."""
    self.num_calls = vars(self).get("num_calls", 0) + 1
    output = original(*args, **kwargs)
    output.logits = output.logits.roll(int(self.num_calls == 3), dims=-1)
    return output


def noted(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Collects something in what it finds on the model."""
    self.notes.append(len(self.notes))
    return original(*args, **kwargs)


def switched(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Changes the result or not, by the model's config."""
    output = original(*args, **kwargs)
    if self.config.is_switched:
        output["logits"] = output.logits.roll(1, dims=-1)
    return output


def put_on(model: Any, function: Callable[..., Any]) -> None:
    original = model.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    model.forward = MethodType(forward, model)


@pytest.mark.parametrize(
    "function",
    [rolled_ids, rolled_logits, longer_than_one, computed_in_bfloat16, numbered, noted],
    ids=lambda function: function.__name__,
)
def test_forwards_that_do_more(make_pair: MakePair, loops: list[Any], function: Callable[..., Any]) -> None:
    pair = make_pair()
    for model in (pair.stock, pair.paged):
        model.notes = []
        put_on(model, function)
    pair.generate(**ragged_batch(), **NEW)
    assert len(loops) == 1
    assert pair.stock.notes == pair.paged.notes
    assert vars(pair.stock).get("num_calls") == vars(pair.paged).get("num_calls")


def test_a_forward_whose_effect_depends(make_pair: MakePair, loops: list[Any]) -> None:
    """Would break: what was found out in an earlier call, taken for what the forward does now."""
    pair = make_pair()
    for model in (pair.stock, pair.paged):
        put_on(model, switched)
    for is_switched in (False, True, False):
        pair.stock.config.is_switched = pair.paged.config.is_switched = is_switched
        loops.clear()
        pair.generate(**ragged_batch(), **NEW)
        assert len(loops) == is_switched


def test_all_modules_are_those_of_torch() -> None:
    """Would break: modules that are shared, or missing (`None`)."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    model.append(model[0][0])
    model.register_module("missing", None)
    modules = all_modules(model)
    assert len(modules) == len(set(modules)) and set(modules) == set(model.modules()) and modules[0] is model
