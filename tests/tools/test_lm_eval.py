"""The evaluation harness itself, on small tasks: its model over a paged pool says the same as its own `hf` model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.models import TINY_LM, tiny_tokenizer

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hf_paged.tools.lm_eval_model import PagedLM

TEXTS = [
    "Once upon a time there was a king who lived in a castle by the sea.",
    "The dog",
    "Two friends went to the market and bought bread, and one said to the other:\nWhat shall we do now?",
    "It was a dark night.",
    "She opened the door. " * 12,
]
CHOICES = [" and", " was happy", ".\n", " The end of the"]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(TINY_LM).eval()

    stock = HFLM(pretrained=load(), tokenizer=tiny_tokenizer(), max_length=64)
    paged = PagedLM(pretrained=load(), tokenizer=tiny_tokenizer(), max_length=64, num_blocks=512, max_num_seqs=8)
    return stock, paged


def tasks(folder: Path) -> list[dict[str, Any]]:
    data = folder / "data.jsonl"
    rows = [{"text": text, "choices": CHOICES, "answer": i % len(CHOICES)} for i, text in enumerate(TEXTS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    generated = {
        "task": "generated",
        "output_type": "generate_until",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n", ". "], "max_gen_toks": 20, "do_sample": False},
    }
    chosen = {
        "task": "chosen",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    rolling = {
        "task": "rolling",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    return [common | task for task in (generated, chosen, rolling)]


def test_tasks(models: tuple[Any, Any], tmp_path: Path) -> None:
    """Would break: other numbers, in any of the three kinds of tasks."""
    found = []
    for model in models:
        found.append(simple_evaluate(model=model, tasks=tasks(tmp_path), bootstrap_iters=0, log_samples=True))
    stock, paged = (result["results"] for result in found)
    assert stock.keys() == paged.keys() == {"generated", "chosen", "rolling"}
    for name, numbers in stock.items():
        for metric, value in numbers.items():
            if isinstance(value, float) and metric != "sample_len":
                assert paged[name][metric] == pytest.approx(value, rel=1e-4), (name, metric)
    for name, samples in found[0]["samples"].items():
        for own, other in zip(samples, found[1]["samples"][name], strict=True):
            for answer, expected in zip(other["filtered_resps"], own["filtered_resps"], strict=True):
                if name == "generated":
                    assert answer == expected
                elif name == "chosen":
                    assert answer[0] == pytest.approx(expected[0], abs=1e-3) and answer[1] == expected[1]


def test_texts_leave_when_they_end(models: tuple[Any, Any]) -> None:
    """Would break: tokens behind the end of a text; a batch of the `hf` model goes on to its last row's end."""
    _, paged = models
    settings = {"until": ["\n", " "], "max_gen_toks": 40, "do_sample": False}
    requests = [Instance("generate_until", {}, (text[:40], dict(settings)), index) for index, text in enumerate(TEXTS)]
    before = paged.engine.stats().num_generated_tokens
    texts = paged.generate_until(requests, disable_tqdm=True)
    assert not any("\n" in text or " " in text for text in texts)
    assert paged.engine.stats().num_generated_tokens - before < len(TEXTS) * 20


def test_contexts_are_computed_once(models: tuple[Any, Any]) -> None:
    """Would break: a context computed again for each of its continuations."""
    _, paged = models
    context, ends = list(range(5, 45)), [[i, i + 1] for i in range(6, 14)]
    paged.engine.reset_prefix_cache()
    before = paged.engine.stats().prefix_cache_hit_tokens
    answers = paged._loglikelihood_tokens([(None, context, end) for end in ends], disable_tqdm=True)
    assert paged.engine.stats().prefix_cache_hit_tokens - before >= 32 * (len(ends) - 1)
    with torch.no_grad():
        for end, (total, is_greedy) in zip(ends, answers, strict=True):
            logits = paged.model(torch.tensor([context + end])).logits[0, 39:-1].log_softmax(-1)
            assert total == pytest.approx(float(logits.gather(1, torch.tensor(end)[:, None]).sum()), abs=1e-3)
            assert is_greedy == (logits.argmax(-1).tolist() == end)
    stats = paged.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    paged.engine.check_invariants()


def test_refused() -> None:
    with pytest.raises(ValueError, match="takes decoder-only models"):
        PagedLM(pretrained=AutoModelForCausalLM.from_pretrained(TINY_LM), tokenizer=tiny_tokenizer(), backend="seq2seq")
    with pytest.raises(ValueError, match="block_size"):
        PagedLM(pretrained=AutoModelForCausalLM.from_pretrained(TINY_LM), tokenizer=tiny_tokenizer(), block_size=-1)
