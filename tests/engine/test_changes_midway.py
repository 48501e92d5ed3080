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
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged import PagedCache

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.timeout(120)

NAMES = ("one", "two")
TOKENS = {"pad_token_id": 0, "eos_token_id": None}
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


class Shown(BaseStreamer):
    """The same for a streamer, which is shown the prompt first."""

    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        self._actions = actions
        self._num_calls = -1

    def put(self, value: Tensor) -> None:
        self._num_calls += 1
        self._actions.get(self._num_calls, lambda: None)()

    def end(self) -> None:
        pass


@dataclass
class Asked:
    """A request, and what the model was: at its beginning (0), and behind so many of its tokens."""

    prompt: list[int]
    options: dict[str, Any]
    seed: int
    handle: Any
    states: dict[int, State] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        events = self.handle.events_since()
        return sum(event.sequence == 0 for event in events)

    def expected(self, stock: Any) -> list[list[int]]:
        self.states[0].give(stock)
        later = {number: (lambda state=state: state.give(stock)) for number, state in self.states.items() if number}
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
        self._open.append(Asked(prompt, options, seed, handle, {0: State(self._model)}))

    def _step(self) -> None:
        self.engine.step()
        self.engine.check_invariants()
        for asked in self._open.copy():
            if asked.handle.is_done:
                self._open.remove(asked)
                found = asked.handle.result().sequences
                assert found == asked.expected(self._stock), (self.num_answers, self.changes.made)
                self.num_answers += 1
                # What it said is what another one goes on with, but for the token that pads.
                self._begun[self._random.randrange(len(self._begun))] = list(filter(None, asked.prompt + found[0]))[:26]


SMALL = {"num_blocks": 24, "preemption": "swap"}
LARGE = {"num_blocks": 512}


@pytest.mark.parametrize("settings", [SMALL, LARGE], ids=["small", "large"])
def test_random_changes_leave_all_answers_as_stock_has_them(settings: dict[str, Any]) -> None:
    check_random_changes(25, 1, settings)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("settings", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("seed", range(2, 7))
def test_a_thousand_random_changes(settings: dict[str, Any], seed: int) -> None:
    check_random_changes(100, seed, settings)


def check_random_changes(num_changes: int, seed: int, settings: dict[str, Any]) -> None:
    run = Run(seed, **settings)
    run.run(num_changes)
    stats = run.engine.stats()
    print(f"{run.num_answers} answers, {stats.prefix_cache_hit_tokens} tokens hit, {stats.num_swapped_out} swapped out")
    assert run.num_answers > num_changes / 2 and stats.prefix_cache_hit_tokens > num_changes / 2
    assert bool(stats.num_swapped_out) == (settings is SMALL)
