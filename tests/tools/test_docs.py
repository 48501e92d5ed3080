"""The Markdown pages: what they link to is there, and their code runs."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import hf_paged
from helpers.models import TINY_LM, tiny_lm, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for folder in (".", "docs", "demo", "benchmarks") for path in (ROOT / folder).glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(language, code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, (language, code) in enumerate(BLOCK.findall(page.read_text()))
]


def anchors(page: Path) -> set[str]:
    """The headings' anchors, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Would break: a page, a heading or a figure that was moved and is still linked to."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(found), f"{target}: no such heading"


class MyProcessor(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


class BaseLLM:
    """As much of LangChain's as the pages use."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields

    def batch(self, prompts: list[str]) -> Any:
        return self._generate(prompts)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_code(language: str, code: str) -> None:
    """Would break: a block that shows a call which transformers or hf_paged refuses, or a make target that is gone."""
    targets = re.findall(r"^([\w.-]+)(?: [\w. -]+)?:(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^make ([\w.-]+)", code, re.MULTILINE)) <= set(targets)
    if language != "python":
        return
    tokenizer = tiny_tokenizer()

    def encode(*texts: str) -> dict[str, Any]:
        return dict(tokenizer(list(texts), return_tensors="pt", padding=True))

    inputs = encode("The old king of")
    model = tiny_lm()
    said = model.generate(**inputs)
    second = {"input_ids": torch.cat([said, inputs["input_ids"]], dim=1)}
    given = {
        "hf_paged": hf_paged, "Thread": Thread, "Any": Any, "BaseLLM": BaseLLM, "MyProcessor": MyProcessor,
        "LLMResult": SimpleNamespace, "Generation": SimpleNamespace, "name": str(TINY_LM), "model": model,
        "other_model": tiny_lm(), "tokenizer": tokenizer, "s": None, "inputs": inputs,
        "ids": inputs["input_ids"][0].tolist(), "first_turn": inputs,
        "with_second_turn": second, "batch": encode("The old king of", "The door"),
        "thousands_of_prompts": [[1, 5, 6], [1, 7]], "hundreds_of_prompts": ["The old king of", "The door"],
    }  # fmt: skip
    exec(code, given)
