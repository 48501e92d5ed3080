"""`HF_PAGED_RECORD`: whatever ran, what was written of it leads a scheduler to the same steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import build, random_ids
from wrappers import asking, build_wrapper

import hf_paged
from hf_paged import PagedCache
from hf_paged.core.replay import replay


@pytest.mark.parametrize("settings", [{}, {"use_async_batching": True}, {"preemption": "swap", "swap_space_gib": 0.01}])
def test_what_ran_can_be_replayed(settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_RECORD", str(tmp_path / "recording"))
    stock = build("llama")
    model = hf_paged.patch(build("llama"), num_blocks=20, block_size=4, max_num_batched_tokens=16, **settings)
    engine = model.paged
    prompt = random_ids(1, 14)
    requests = [engine.submit(random_ids(1, 9, seed=n), max_new_tokens=24, do_sample=n % 2 == 1) for n in range(6)]
    options = {"max_new_tokens": 6, "do_sample": False}
    for more in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        assert torch.equal(model.generate(prompt, **options, **more), stock.generate(prompt, **options, **more))
    torch.manual_seed(0)
    model.generate(prompt, do_sample=True, num_return_sequences=3, max_new_tokens=8)
    cache = PagedCache(model)
    first = model.generate(prompt, past_key_values=cache, **options)
    model.generate(torch.cat([first, prompt], dim=1), past_key_values=cache, **options)
    cache.crop(-9)
    model(inputs_embeds=model.get_input_embeddings()(random_ids(1, 3)), past_key_values=cache)
    cache.reset()
    model(prompt, past_key_values=cache, output_hidden_states=True)  # a step in its caller's shape
    cache.reset()
    engine.reset_prefix_cache()
    for request in requests:
        request.result(30)
    stats = engine.stats()
    assert stats.num_preemptions and engine.core.manager.prefix.hit_tokens
    hf_paged.unpatch(model)
    lines = (tmp_path / "recording").read_text().splitlines()
    assert "prompts" in json.loads(lines[0])["header"]
    num_steps, difference = replay(lines)
    assert difference is None and num_steps >= stats.num_steps


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_pictures_can_be_replayed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: positions of several axes, tokens that see each other and their hashes in a recording."""
    monkeypatch.setenv("HF_PAGED_RECORD", str(tmp_path / "recording"))
    model = hf_paged.patch(build_wrapper(name), num_blocks=40, block_size=2, max_num_batched_tokens=3)
    for more in ({}, {"num_beams": 2}, {}):
        cache = PagedCache(model)
        first = model.generate(**asking(name), **more, past_key_values=cache, max_new_tokens=6, eos_token_id=None)
        ids = torch.cat([first, random_ids(len(first), 3)], dim=1)
        model.generate(ids[:1] if not more else ids, past_key_values=cache if not more else None, max_new_tokens=4)
        if name != "gemma3":  # whose windows have given back what it needs
            cache.crop(-3)
        del cache
    model.generate(**asking(name), max_new_tokens=6)
    assert model.paged.stats().prefix_cache_hit_tokens
    hf_paged.unpatch(model)
    num_steps, difference = replay((tmp_path / "recording").read_text().splitlines())
    assert difference is None and num_steps > 20
