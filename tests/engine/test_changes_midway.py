"""Adapters and weights that change while requests run: these go on as stock would, and later ones are not misled."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import hf_paged
from helpers.waiting import in_background
from hf_paged import PagedCache

peft = pytest.importorskip("peft")

NAMES = ("one", "two")
TOKENS = {"pad_token_id": 0, "eos_token_id": None, "suppress_tokens": [0]}  # a prompt must not be padding
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLE: dict[str, Any] = {"do_sample": True, "top_k": 20}
SAMPLES = SAMPLE | {"num_return_sequences": 2}
LOOKUP = GREEDY | {"prompt_lookup_num_tokens": 3}
BEAMS = GREEDY | {"num_beams": 3}


def tuned() -> Any:
    """A small model with two LoRA adapters that make a difference; the first one is on."""
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(**settings), adapter_name="one")
        model.add_adapter("two", peft.LoraConfig(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.set_adapter("one")
    return model.eval()


class State:
    """All that a change may be of, to be copied to another model."""

    def __init__(self, model: Any) -> None:
        layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        self.names = list(layers[0].active_adapters)
        self.is_disabled = bool(layers[0].disable_adapters)
        self.is_merged = bool(layers[0].merged_adapters)
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def give(self, model: Any) -> None:
        if not self.is_merged:
            model.base_model.unmerge_adapter()
        model.base_model.enable_adapter_layers()
        model.base_model.set_adapter(self.names)
        if self.is_merged and not any(getattr(module, "merged", False) for module in model.modules()):
            model.base_model.merge_adapter()
        if self.is_disabled:
            model.base_model.disable_adapter_layers()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.weights[name])

    def give_later(self, model: Any, first: State) -> None:
        """As a call goes on that began in another state: with the adapters of then, while none are merged."""
        self.give(model)
        layers = model.base_model
        if self.is_merged and not self.is_disabled:
            return
        if self.is_merged:
            layers.unmerge_adapter()
        layers.enable_adapter_layers()
        layers.set_adapter(first.names)
        if first.is_disabled:
            layers.disable_adapter_layers()


class Changes:
    """Random ones, as users make them."""

    def __init__(self, model: Any, seed: int) -> None:
        self._model = model
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.made: list[str] = []

    def make(self) -> None:
        kind: Callable[[], None] = self._random.choice(
            [*[self.switch] * 8, *[self.turn_off] * 4, self.load, self.step, self.write, self.merge]
        )
        self.made.append(kind.__name__)
        kind()

    def switch(self) -> None:
        self._model.base_model.enable_adapter_layers()
        self._model.set_adapter(self._random.choice(NAMES))

    def turn_off(self) -> None:
        layers = self._model.base_model
        is_off = next(module for module in self._model.modules() if hasattr(module, "lora_A")).disable_adapters
        (layers.enable_adapter_layers if is_off else layers.disable_adapter_layers)()

    def load(self) -> None:
        name = self._random.choice(NAMES)
        weights = peft.get_peft_model_state_dict(self._model, adapter_name=name)
        new = {key: self._noise(value, 0.3) for key, value in weights.items()}
        peft.set_peft_model_state_dict(self._model, new, adapter_name=name)

    def step(self) -> None:
        name = self._random.choice(["lora_A", "lora_B", "norm", "embed"])
        with torch.no_grad():
            for key, parameter in self._model.named_parameters():
                if name in key:
                    parameter.add_(self._noise(parameter, 0.05))

    def write(self) -> None:
        """Which leaves no trace, but for what says so."""
        for key, parameter in self._model.named_parameters():
            if "mlp.up_proj" in key:
                parameter.data += self._noise(parameter, 0.05)
        self._model.get_base_model().paged.reset_prefix_cache()

    def merge(self) -> None:
        layers = self._model.base_model
        is_merged = any(getattr(module, "merged", False) for module in self._model.modules())
        (layers.unmerge_adapter if is_merged else layers.merge_adapter)()

    def _noise(self, like: Tensor, scale: float) -> Tensor:
        return torch.randn(like.shape, generator=self._generator) * scale


class At(LogitsProcessor):
    """Does something behind forwards, by their number: what is chosen from their logits is the next forward's."""

    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        self._actions = actions
        self._num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._num_calls += 1
        self._actions.get(self._num_calls, lambda: None)()
        return scores


@dataclass
class Asked:
    """A request, and what the model was: when it was submitted, at its beginning (0), and behind so many tokens."""

    prompt: list[int]
    options: dict[str, Any]
    seed: int
    handle: Any
    entry: State
    states: dict[int, State] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        events = self.handle.events_since()
        return sum(event.sequence == 0 for event in events)

    def expected(self, stock: Any) -> list[list[int]]:
        self.states.get(0, self.entry).give_later(stock, self.entry)
        states = {number: state for number, state in self.states.items() if number}
        later = {n: (lambda state=state: state.give_later(stock, self.entry)) for n, state in states.items()}
        options = {name: value for name, value in self.options.items() if name != "prompt_lookup_num_tokens"}
        torch.manual_seed(self.seed)
        rows = stock.generate(
            input_ids=torch.tensor([self.prompt]), logits_processor=LogitsProcessorList([At(later)]), **options
        )
        return rows[:, len(self.prompt) :].tolist()


class Run:
    """Random requests over one model, stepped by hand, with changes in between."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self._random = random.Random(seed)
        self._model = tuned()
        self._stock = copy.deepcopy(self._model)
        hf_paged.patch(self._model, block_size=4, **settings)
        self.engine = self._model.get_base_model().paged
        self.changes = Changes(self._model, seed)
        self._begun = [[self._random.randrange(1, 61) for _ in range(14)] for _ in range(3)]
        self._open: list[Asked] = []
        self.num_answers = 0

    def run(self, num_changes: int) -> None:
        self.engine.pause()
        for _ in range(num_changes):
            for _ in range(self._random.randrange(3)):
                if len(self._open) < 6:
                    self._ask()
            for _ in range(self._random.randrange(8)):
                self._step()
            self.changes.make()
            state = State(self._model)
            for asked in self._open:
                asked.states[asked.num_tokens] = state
        while self._open:
            self._step()
        self.engine.resume()

    def _ask(self) -> None:
        prompt = list(self._random.choice(self._begun))
        prompt = prompt[: self._random.randrange(5, len(prompt) + 1)]
        options = self._random.choice([GREEDY, GREEDY, SAMPLE, SAMPLES, LOOKUP]) | TOKENS
        options = options | {"max_new_tokens": self._random.randrange(4, 20)}
        seed = self._random.randrange(2**31)
        handle = self.engine.submit(prompt, seed=seed, **options)
        self._open.append(Asked(prompt, options, seed, handle, State(self._model)))

    def _step(self) -> None:
        self.engine.step()
        self.engine.check_invariants()
        for asked in self._open.copy():
            if asked.handle.is_done:
                self._open.remove(asked)
                found = asked.handle.result().sequences
                assert found == asked.expected(self._stock), (self.num_answers, self.changes.made)
                self.num_answers += 1
                # What it said is what another one goes on with.
                self._begun[self._random.randrange(len(self._begun))] = (asked.prompt + found[0])[:26]


SMALL = {"num_blocks": 24, "preemption": "swap"}
LARGE = {"num_blocks": 512}


SLOW = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.mark.parametrize("settings", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("seed", "num_changes"), [(1, 25), *(pytest.param(seed, 100, marks=SLOW) for seed in range(2, 7))]
)
def test_random_changes_leave_all_answers_as_stock_has_them(
    settings: dict[str, Any], seed: int, num_changes: int
) -> None:
    run = Run(seed, **settings)
    run.run(num_changes)
    stats = run.engine.stats()
    print(f"{run.num_answers} answers, {stats.prefix_cache_hit_tokens} tokens hit, {stats.num_swapped_out} swapped out")
    assert run.num_answers > num_changes / 2 and stats.prefix_cache_hit_tokens > num_changes / 2
    assert bool(stats.num_swapped_out) == (settings is SMALL)


PROMPT = list(range(3, 20))


class Both:
    """A patched model, and one that is not, which go through the same."""

    def __init__(self, **settings: Any) -> None:
        self.model = tuned()
        self.stock = copy.deepcopy(self.model)
        hf_paged.patch(self.model, **({"block_size": 4, "num_blocks": 256} | settings))
        self.engine = self.model.get_base_model().paged

    def switch(self, name: str) -> None:
        self.model.set_adapter(name)
        self.stock.set_adapter(name)

    def check(self, prompt: list[int]) -> int:
        """A later call has stock's tokens; returns how many tokens of its prompt were cached."""
        before = self.engine.stats().prefix_cache_hit_tokens
        found, expected = (
            model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=12, **GREEDY, **TOKENS).tolist()
            for model in (self.model, self.stock)
        )
        assert found == expected
        return self.engine.stats().prefix_cache_hit_tokens - before


@pytest.fixture
def both() -> Both:
    return Both()


MODES = [GREEDY, SAMPLE, SAMPLES, BEAMS, SAMPLE | {"num_beams": 2}, LOOKUP]
MODE_NAMES = ["greedy", "sample", "samples", "beams", "drawn beams", "lookup"]


@pytest.mark.parametrize(
    ("mode", "has_own_code"),
    [(mode, False) for mode in MODES] + [(mode, True) for mode in (GREEDY, SAMPLES, BEAMS)],
    ids=[*MODE_NAMES, "greedy in a loop", "samples in a loop", "beams in a loop"],
)
def test_a_call_goes_on_as_stock_does(both: Both, mode: dict[str, Any], has_own_code: bool) -> None:
    """As if it were alone: behind six forwards another adapter is on, behind nine the first one again."""
    plain = {name: value for name, value in mode.items() if name != "prompt_lookup_num_tokens"}
    options = {"max_new_tokens": 20} | TOKENS

    def actions(model: Any) -> dict[int, Callable[[], None]]:
        return {6: lambda: model.set_adapter("two"), 9: lambda: model.set_adapter("one")}

    torch.manual_seed(1)
    expected = both.stock.generate(input_ids=torch.tensor([PROMPT]), **plain, **options)[:, len(PROMPT) :].tolist()
    torch.manual_seed(1)
    if has_own_code:
        own = [At(actions(both.model))]
        found = both.model.generate(input_ids=torch.tensor([PROMPT]), logits_processor=own, **plain, **options)
        found = found[:, len(PROMPT) :].tolist()
    else:
        both.engine.pause()
        request = both.engine.submit(PROMPT, seed=1, **mode, **options)
        num_tokens = 0
        done = actions(both.model)
        while not request.is_done:
            both.engine.step()
            both.engine.check_invariants()
            events = [event for event in request.events_since() if event.sequence == 0]
            num_tokens = len(events) if mode is LOOKUP else num_tokens + 1
            for number in [number for number in done if number <= num_tokens]:
                if mode is LOOKUP and number != num_tokens:
                    pytest.skip("a step went beyond")
                done.pop(number)()
        found = request.result().sequences
        both.engine.resume()
    assert found == expected
    hits = both.check(PROMPT + expected[0])
    assert hits >= len(PROMPT) // 4 * 4, "what was computed before the change is as good as ever"
    both.switch("two")
    assert both.check(PROMPT + expected[0]) == 0


def test_a_request_that_waits_has_the_adapter_of_its_submission(both: Both) -> None:
    both.switch("two")
    both.engine.pause()
    request = both.engine.submit(PROMPT, max_new_tokens=12, **GREEDY, **TOKENS)
    ids = torch.tensor([PROMPT])
    expected = both.stock.generate(input_ids=ids, max_new_tokens=12, **GREEDY, **TOKENS)[0, len(PROMPT) :].tolist()
    both.switch("one")
    both.engine.resume()
    assert request.result().token_ids == expected
    # It is cached as what it is: of "two".
    assert both.check(PROMPT + expected) == 0
    both.switch("two")
    assert both.check(PROMPT + expected) >= len(PROMPT)


class Switching(torch.nn.Module):
    """Another thread switches the adapters while a step runs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._switch = [lambda: model.set_adapter("two")]

    def forward(self, x: Tensor) -> Tensor:
        in_background(self._switch[0]).result(60)
        return x


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_a_change_of_weights_within_a_step_counts_as_one_before_its_end(both: Both, is_taken_back: bool) -> None:
    """Another thread may change the model while a step runs: nobody knows what that step computed."""
    weight = both.model.get_base_model().model.layers[0].mlp.up_proj.weight

    def change(factor: float) -> None:
        with torch.no_grad():
            weight.mul_(factor)

    class Acting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actions: list[Callable[[], None]] = []  # a list is no number, which would be a change, too

        def forward(self, x: Tensor) -> Tensor:
            while self.actions:
                in_background(self.actions.pop()).result(60)
            return x

    first, second = Acting(), Acting()
    for layer, acting in zip(both.model.get_base_model().model.layers, (first, second), strict=True):
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, acting)
    assert both.check(PROMPT[::-1]) == 0 < both.check(PROMPT[::-1])
    if is_taken_back:
        first.actions.append(lambda: change(2.0))
        second.actions.append(lambda: change(0.5))
    else:
        first.actions.append(lambda: change(2.0))
    both.engine.submit(PROMPT, max_new_tokens=1, **GREEDY, **TOKENS).result()
    assert not first.actions and not second.actions
    if not is_taken_back:
        change(0.5)
    assert both.check(PROMPT) == 0


def test_another_adapter_within_a_step_is_for_later_calls(both: Both) -> None:
    for layer in both.model.get_base_model().model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, Switching(both.model))
    assert both.check(PROMPT) == 0
    both.switch("one")
    assert both.check(PROMPT) == len(PROMPT) // 4 * 4


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_kept_cache_goes_on_as_stock_does(is_preempted: bool) -> None:
    both = Both(num_blocks=10, preemption="swap") if is_preempted else Both()
    caches = PagedCache(both.model.get_base_model()), DynamicCache()
    logits: list[Tensor] = []
    for model, cache in zip((both.model, both.stock), caches, strict=True):
        model.set_adapter("one")
        with torch.no_grad():
            model(torch.tensor([PROMPT]), past_key_values=cache)
            for name in ("two", "two", "one"):
                model.set_adapter(name)
                if is_preempted and model is both.model:
                    both.stock.set_adapter(name)
                    both.check(PROMPT[::-1] + PROMPT[:10])
                logits.append(model(torch.tensor([[5]]), past_key_values=cache).logits)
    for own, expected in zip(logits[:3], logits[3:], strict=True):
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
    caches[0].reset()
    both.switch("one")
    both.check([*PROMPT, 5, 5, 5, 9])


def test_prompts_that_are_scored_while_the_model_changes(both: Both) -> None:
    """Several prompts, of which the model is looked at once: those that begin behind the change are of the new one."""
    prompts = [[*PROMPT, token] for token in range(20, 24)]
    both.engine.pause()
    requests = [both.engine.submit_score(prompt) for prompt in prompts[:2]]
    both.engine.step()
    both.switch("two")
    both.engine.resume()
    for request in requests:
        request.result()
    for prompt in prompts:
        both.check(prompt)
    both.switch("one")
    for prompt in prompts:
        both.check(prompt)


def test_a_row_that_was_dropped_before_the_change_says_so(caplog: pytest.LogCaptureFixture) -> None:
    both = Both(num_blocks=18, preemption="recompute")
    both.engine.pause()
    prompts = [PROMPT, PROMPT[::-1]]
    requests = [both.engine.submit(prompt, max_new_tokens=30, **GREEDY, **TOKENS) for prompt in prompts]
    while not both.engine.stats().num_preemptions:
        both.engine.step()
    for model in (both.model, both.stock):
        with torch.no_grad():
            model.get_base_model().model.norm.weight.mul_(1.5)
    both.engine.resume()
    tokens = [request.result().token_ids for request in requests]
    assert "were preempted" in caplog.text
    for prompt, own in zip(prompts, tokens, strict=True):
        both.check(prompt + own)
