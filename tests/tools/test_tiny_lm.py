"""The embedded model and its prompts: they load offline, they fit, and they are not broken."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

import hf_paged

ASSETS = Path(hf_paged.__file__).resolve().parent / "assets"
TINY_LM = ASSETS / "tiny_lm"
MAX_BYTES = 6_000_000

PARAGRAPH = (
    "The old gentleman had been walking for an hour before he was aware that the path had come to an end. He looked "
    "about him with some surprise, and then sat down upon a fallen tree to consider what was to be done. It was very "
    'quiet in the wood, and he was not at all certain of the way home. "I must have taken the wrong turning at the '
    'bridge," said he to himself; "but if I go back to it now, I shall be late for dinner, and my sister will never '
    'forgive me."'
)
"""Ordinary prose, written for this test, that the model has not seen."""


@pytest.fixture(scope="module", autouse=True)
def _offline() -> object:
    """Nothing in this file may ask a model hub for anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY_LM, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, local_files_only=True).eval()


def bits_per_byte(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """Bits that the model needs for each byte of the text."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
    nats = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
    return nats / math.log(2) / len(text.encode())


def test_plain_load_is_a_float32_llama(model: LlamaForCausalLM) -> None:
    assert isinstance(model, LlamaForCausalLM)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.num_attention_heads > model.config.num_key_value_heads > 1
    assert model.config.tie_word_embeddings


def test_directory_is_small_and_complete() -> None:
    names = {path.name for path in TINY_LM.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in TINY_LM.iterdir()) <= MAX_BYTES


def test_special_tokens(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("The")["input_ids"][0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize(
    "text",
    [
        PARAGRAPH,
        "  two  spaces\n\n\nand\ttabs , oddly  spaced .\n",
        "na\u00efve \u2014 \u201cquoted\u201d \U0001f41f \u65e5",
        "",
    ],
)
def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_model_knows_english(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    ordinary = bits_per_byte(model, tokenizer, PARAGRAPH)
    words = PARAGRAPH.split()
    scrambled = bits_per_byte(model, tokenizer, " ".join(words[::-1]))
    assert 0.8 < ordinary < 1.6  # a model of nothing needs 8, byte frequencies about 4.2
    assert scrambled > ordinary + 0.5


def test_prompts_are_many_and_of_all_lengths(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = (ASSETS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert all(list(record) == ["prompt"] for record in records)
    prompts = [record["prompt"] for record in records]
    assert 45 <= len(prompts) <= 60
    assert len(set(prompts)) == len(prompts)
    assert all(prompt == prompt.strip() != "" for prompt in prompts)
    lengths = sorted(len(ids) for ids in tokenizer(prompts)["input_ids"])
    assert lengths[-1] >= 100 * lengths[0]
    assert lengths[-1] + 256 <= model.config.max_position_embeddings
    for low, high, least in ((1, 8, 8), (8, 64, 15), (64, 300, 8), (300, 2048, 6)):
        assert sum(low <= length < high for length in lengths) >= least
