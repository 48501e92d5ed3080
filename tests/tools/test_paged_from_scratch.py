"""`examples/paged_from_scratch.py` explains the engine without its code, so its tokens have to be the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_paged
from examples import paged_from_scratch
from examples.paged_from_scratch import Engine
from helpers.models import tiny_lm, tiny_tokenizer

EOS = 2


def generate(engine: Engine, num_branches: int = 1) -> list[dict[str, int]]:
    """All prompts of the example, the last of them when the others run. Returns what ran in each step."""
    prompts = [(name, tiny_tokenizer()(text).input_ids) for name, text in paged_from_scratch.PROMPTS.items()]
    *first, last = prompts
    for name, prompt in first:
        engine.submit(name, prompt, 24, num_branches)
    steps = []
    for step in engine.steps():
        steps.append(step)
        if len(steps) == 3:
            engine.submit(*last, 24, num_branches)
    assert engine.tables.pool.ref_counts == [0] * len(engine.tables.pool.ref_counts)
    assert len(engine.tables.pool.free_blocks) == len(engine.tables.pool.ref_counts)
    return steps


@pytest.mark.parametrize(("num_blocks", "block_size"), [(16, 16), (22, 4), (60, 1)])
def test_greedy_tokens_are_those_of_stock_and_of_the_engine(num_blocks: int, block_size: int) -> None:
    scratch = Engine(tiny_lm(), num_blocks, block_size, EOS)
    steps = generate(scratch)
    assert (scratch.scheduler.num_preemptions > 0) == (block_size < 16)
    assert len(steps[3]) > 1, "the last prompt did not share its first step with others"

    stock, model = tiny_lm(), hf_paged.patch(tiny_lm(), num_blocks=64)
    for name, text in paged_from_scratch.PROMPTS.items():
        prompt = tiny_tokenizer()(text, return_tensors="pt").input_ids
        expected = stock.generate(prompt, max_new_tokens=24, do_sample=False)
        assert scratch.results[name] == expected[0].tolist()
        assert torch.equal(model.generate(prompt, max_new_tokens=24, do_sample=False), expected)


@pytest.mark.parametrize("num_blocks", [26, 200])
def test_branches_share_the_prompt_and_continue_as_if_alone(num_blocks: int) -> None:
    scratch = Engine(tiny_lm(), num_blocks, 4, EOS)
    generate(scratch, num_branches=3)
    assert scratch.num_copies > 0
    assert (scratch.scheduler.num_preemptions > 0) == (num_blocks == 26)

    stock = tiny_lm()
    for name, text in paged_from_scratch.PROMPTS.items():
        prompt = tiny_tokenizer()(text, return_tensors="pt").input_ids
        best = stock(prompt).logits[0, -1].topk(3).indices
        for branch, token_id in zip((name, f"{name}2", f"{name}3"), best, strict=True):
            begun = torch.cat([prompt, token_id.view(1, 1)], dim=1)
            expected = stock.generate(begun, max_new_tokens=23, do_sample=False)
            assert scratch.results[branch] == expected[0].tolist()


def test_a_request_that_never_fits_is_refused() -> None:
    engine = Engine(tiny_lm(), num_blocks=4, block_size=4, eos_token_id=EOS)
    engine.submit("fits", [1] * 8, max_new_tokens=8)
    with pytest.raises(ValueError, match="17 tokens; the pool has 16 slots"):
        engine.submit("larger", [1] * 8, max_new_tokens=9)
    list(engine.steps())
    assert list(engine.results) == ["fits"]


def test_it_does_without_the_package() -> None:
    assert "import hf_paged" not in Path(paged_from_scratch.__file__).read_text()
