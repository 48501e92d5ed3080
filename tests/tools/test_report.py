"""The accounting behind `hf-paged run`: lengths, divergence, and KV memory against counts made by hand."""

import io
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from rich.console import Console

from hf_paged.tools.report import (
    KVUsage,
    RunReport,
    comparison_table,
    first_divergence,
    format_bytes,
    generated_lengths,
    paged_kv_usage,
    stock_kv_usage,
)

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
BYTES_PER_SLOT = 2 * 2 * 8 * 4  # layers x (keys, values) x head_dim x float32


def test_generated_lengths_count_to_the_first_eos_and_with_it():
    new_tokens = torch.tensor([[5, 6, 7, 8], [5, 2, 0, 0], [2, 0, 0, 0], [5, 6, 7, 3]])
    assert generated_lengths(new_tokens, {2, 3}) == [4, 2, 1, 4]
    assert generated_lengths(new_tokens, ()) == [4, 4, 4, 4]
    assert generated_lengths(torch.empty(2, 0, dtype=torch.long), {2}) == [0, 0]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([[1, 2], [3]], [[1, 2], [3]], None),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], (1, 1)),
        ([[1, 2, 3]], [[1, 2]], (0, 2)),
        ([], [], None),
    ],
)
def test_first_divergence(ours, theirs, expected):
    assert first_divergence(ours, theirs) == expected


def test_first_divergence_refuses_different_numbers_of_prompts():
    with pytest.raises(ValueError, match="2 prompts with those of 1"):
        first_divergence([[1], [2]], [[1]])


def generate(model, attention_mask, **kwargs):
    input_ids = torch.randint(1, 32, attention_mask.shape) * attention_mask
    return model.generate(
        input_ids, attention_mask=attention_mask, do_sample=False, return_dict_in_generate=True, **kwargs
    ).past_key_values


def test_stock_usage_of_a_real_cache_counts_padding_as_waste():
    attention_mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    cache = generate(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), attention_mask, max_new_tokens=4)
    assert isinstance(cache, hf.DynamicCache)
    usage = stock_kv_usage(cache, attention_mask, [4, 4])
    # 5 + 4 tokens a row, of which the last has no K/V yet; the second row has 3 slots of padding.
    assert usage == KVUsage(2 * 8 * BYTES_PER_SLOT, (8 + 5) * BYTES_PER_SLOT)
    assert usage.waste == pytest.approx(3 / 16)


def test_stock_usage_counts_what_a_finished_row_is_fed_as_waste():
    attention_mask = torch.ones(2, 3, dtype=torch.long)
    cache = generate(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), attention_mask, max_new_tokens=6)
    # Had the second row ended with its second token: 3 + 2 real tokens of its 3 + 5 slots.
    assert stock_kv_usage(cache, attention_mask, [6, 2]).waste == pytest.approx(3 / 16)


def test_stock_usage_measures_the_slots_that_a_sliding_window_keeps():
    config = hf.MistralConfig(**SIZES, head_dim=8, sliding_window=4)
    attention_mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    cache = generate(hf.MistralForCausalLM(config), attention_mask, max_new_tokens=2)
    kept = cache.layers[0].keys.shape[-2]
    assert kept < 7
    usage = stock_kv_usage(cache, attention_mask, [2, 2])
    assert usage.allocated_bytes == 2 * kept * BYTES_PER_SLOT
    assert usage.filled_bytes == (kept + min(kept, 3)) * BYTES_PER_SLOT  # the second row: two of the prompt and one new


def engine(states=(), **stats):
    core = SimpleNamespace(traits=SimpleNamespace(states=states))
    return SimpleNamespace(bytes_per_block=1024, core=core, stats=lambda: SimpleNamespace(**stats))


def test_paged_usage_is_that_of_the_fullest_moment():
    usage = paged_kv_usage(engine(peak_blocks_in_use=5, peak_kv_tokens_stored=72, peak_kv_slots_allocated=80))
    assert usage == KVUsage(5 * 1024, round(5 * 1024 * 0.9))
    assert usage.waste == pytest.approx(0.1)


def test_usage_of_a_model_with_states_has_no_waste():
    usage = paged_kv_usage(engine(["conv"], peak_blocks_in_use=5, peak_kv_tokens_stored=9, peak_kv_slots_allocated=10))
    assert usage == KVUsage(5 * 1024, None)
    assert usage.waste is None
    model = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4))
    ids = torch.ones(2, 3, dtype=torch.long)
    cache = model(ids, use_cache=True).cache_params
    states = sum(layer.conv_states[0].nbytes + layer.recurrent_states[0].nbytes for layer in cache.layers)
    assert stock_kv_usage(cache, torch.ones_like(ids), [1, 1]) == KVUsage(states, None)


def test_paged_usage_of_an_unused_engine_is_nothing():
    usage = paged_kv_usage(engine(peak_blocks_in_use=0, peak_kv_tokens_stored=0, peak_kv_slots_allocated=0))
    assert usage == KVUsage(0, 0)
    assert usage.waste == 0


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (2**50, "1024.0 TiB")]
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def test_table_names_the_place_of_a_difference():
    stock = RunReport("stock", [[1, 2], [3, 4]], 0.5, KVUsage(2048, 1024))
    paged = RunReport("hf_paged", [[1, 2], [3, 9]], 0.25, KVUsage(1024, 1024), peak_blocks=3, num_blocks=1000)
    printed = io.StringIO()
    Console(width=100, file=printed).print(comparison_table(stock, paged))
    text = " ".join(printed.getvalue().split())
    assert "tokens identical no: prompt 1, token 1" in text
    assert "tokens / second 8 16" in text
    assert "of it wasted 50.0% 0.0%" in text
    assert "blocks used / total – 3 / 1,000" in text
