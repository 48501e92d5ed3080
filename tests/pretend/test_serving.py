"""Requests of all lengths on the pretended device: nearly all steps are replays, and little of them is padding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hf_paged
from helpers.library_code import as_library_code
from helpers.models import VOCAB, build
from hf_paged.kernels import paged_decode, paged_prefill, reshape_and_cache, triton_adapters
from hf_paged.model import cuda_graph, layers
from hf_paged.model.step_inputs import HostStep, StepInputs

SETTINGS = {"block_size": 16, "num_blocks": 1000, "max_num_seqs": 32}


def lengths(num: int) -> list[tuple[int, int]]:
    """Of prompts and answers, spread as in ShareGPT's conversations: a few are many times as long as most."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(4.5, 1.0, num), 2, 900).astype(int)
    answers = np.clip(rng.lognormal(4.5, 0.8, num), 2, 400).astype(int)
    return list(zip(prompts.tolist(), answers.tolist(), strict=True))


class Quantised(nn.Linear):
    """Stands in for a layer of bitsandbytes: known code that is not torch's, over weights of another type."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device=linear.weight.device)
        self.weight.requires_grad_(False)
        self.register_buffer("scale", linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127)
        self.register_buffer("levels", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.levels.to(states.dtype) * self.scale)


def quantise(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj = Quantised(layer.mlp.down_proj)


def add_lora(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False), "one")
    model.eval()


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is skipped, which takes an interpreter minutes: a step's shape doesn't depend on it."""

    def skipped(call: Any, *_: Any) -> None:
        call.output.copy_(call.query)

    monkeypatch.setattr(paged_decode, "paged_decode", skipped)
    monkeypatch.setattr(paged_prefill, "paged_prefill", skipped)
    monkeypatch.setattr(reshape_and_cache, "reshape_and_cache", lambda *_: None)
    monkeypatch.setattr(layers, "layer_kernels", lambda *_: "are left out")
    monkeypatch.setattr(triton_adapters, "add", lambda *_: None)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quantised, "__module__", "bitsandbytes.nn.modules")
    monkeypatch.setattr(Quantised, "forward", as_library_code(Quantised.forward, "bitsandbytes.nn.modules"))


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, int, int]]]:
    """Of each replay whether all its rows decode, its tokens, and with padding."""
    found: list[tuple[bool, int, int]] = []
    fill = StepInputs.fill

    def noted(self: StepInputs, step: HostStep) -> None:
        assert step.is_decode == self.shape.is_decode, "a decode step in another's shape, or the reverse"
        found.append((step.is_decode, step.num_tokens, self.shape.tokens))
        fill(self, step)

    monkeypatch.setattr(StepInputs, "fill", noted)
    return found


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (None, {}),
        (None, {"prompt_lookup_num_tokens": 4}),
        (add_lora, {}),
        (quantise, {}),
    ],
    ids=["plain", "prompt_lookup", "lora", "quantised"],
)
def test_replays_and_padding(
    change: Callable[[Any], None] | None, arguments: dict[str, Any], filled: list[tuple[bool, int, int]]
) -> None:
    """As in a server: warmed up, with all requests at once, more than a step has rows for."""
    model = build("llama", layers=1).to("cuda")
    model.config.max_position_embeddings = 2048
    if change is not None:
        change(model)
    model = hf_paged.patch(model, warm_up=True, **SETTINGS)
    rng = np.random.default_rng(1)
    own = lengths(64)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length, _ in own]
    before = model.paged.stats()
    filled.clear()
    model.paged.pause()
    greedy = {"do_sample": False, "eos_token_id": None} | arguments
    requests = [
        model.paged.submit(prompt, max_new_tokens=num, **greedy) for prompt, (_, num) in zip(prompts, own, strict=True)
    ]
    model.paged.resume()
    for request in requests:
        request.result(600)
    after = model.paged.stats()
    num_steps = after.num_steps - before.num_steps
    num_replays = after.num_replayed_steps - before.num_replayed_steps
    tokens, padded = np.array([each[1:] for each in filled]).sum(axis=0)
    assert num_replays >= 0.95 * num_steps, "\n".join(map(str, model.paged.explain()))
    assert padded - tokens <= 0.3 * padded
    if arguments:
        assert after.num_draft_tokens and max(tokens for is_decode, tokens, _ in filled if not is_decode) > 16


@pytest.mark.parametrize("name", ["llama", "youtu", pytest.param("gemma2", marks=pytest.mark.slow)])  # latents, windows
def test_decodes_beside_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside rows that decode, replayed: stock's tokens, whatever an earlier replay has left."""
    monkeypatch.setattr(cuda_graph, "capture_sizes", lambda max_num_seqs: [max_num_seqs])  # to record takes longest
    stock = build(name, layers=1 + (name != "llama")).to("cuda")
    settings = {"block_size": 4, "num_blocks": 100, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    model = hf_paged.patch(copy.deepcopy(stock), **settings)
    rng = np.random.default_rng(2)
    prompts = [torch.from_numpy(rng.integers(3, VOCAB, (1, length))).to("cuda") for length in (5, 30, 9, 14, 3)]
    greedy = {"do_sample": False, "eos_token_id": None}
    expected = [
        stock.generate(prompt, max_new_tokens=4 + row, **greedy)[0, prompt.shape[1] :].tolist()
        for row, prompt in enumerate(prompts)
    ]
    model.generate(prompts[0], max_new_tokens=2, **greedy)  # from the first decode step on, others are recorded
    before = model.paged.stats()
    model.paged.pause()
    requests = [model.paged.submit(ids[0], max_new_tokens=4 + row, **greedy) for row, ids in enumerate(prompts)]
    model.paged.resume()
    assert [request.result(200).token_ids for request in requests] == expected
    after = model.paged.stats()
    assert after.num_steps - before.num_steps == after.num_replayed_steps - before.num_replayed_steps
    shapes = model.paged.core.runner.graphs.held.shapes
    assert {shape.tokens for shape in shapes if not shape.is_decode} == {16}
    assert not model.paged.core.kv_cache.tensor[-1].any(), "padding is written nowhere"
    model.paged.check_invariants()
