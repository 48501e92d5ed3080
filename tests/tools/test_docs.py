"""The Markdown pages: what they link to and name is there, and their code runs."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import LogitsProcessor

import hf_paged
from examples import paged_from_scratch
from helpers.models import TINY_LM, tiny_lm, tiny_tokenizer

ROOT = Path(__file__).parents[2]
FOLDERS = ".", "docs", "demo", "benchmarks", "benchmarks/paper"
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(page, language, code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    if page != TUTORIAL  # its blocks go on from each other
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
@pytest.mark.parametrize(("page", "language", "code"), BLOCKS)
def test_code(page: Path, language: str, code: str, tmp_path: Path) -> None:
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
    if page.name == "howto.md":
        hf_paged.patch(model)
    if "lora_folder" in code:
        peft.get_peft_model(tiny_lm(), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    second = {"input_ids": torch.cat([said, inputs["input_ids"]], dim=1)}
    given = {
        "hf_paged": hf_paged, "torch": torch, "Thread": Thread, "Any": Any, "BaseLLM": BaseLLM,
        "MyProcessor": MyProcessor, "LLMResult": SimpleNamespace, "Generation": SimpleNamespace,
        "name": str(TINY_LM), "model": model, "other_model": tiny_lm(), "tokenizer": tokenizer, "s": None,
        "lora_folder": tmp_path, "inputs": inputs, "ids": inputs["input_ids"][0].tolist(), "first_turn": inputs,
        "with_second_turn": second, "batch": encode("The old king of", "The door"),
        "thousands_of_prompts": [[1, 5, 6], [1, 7]], "hundreds_of_prompts": ["The old king of", "The door"],
    }  # fmt: skip
    exec(code, given)


def test_the_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    """Would break: a cell that raises, or prints something else than the page shows; a notebook of an older page."""
    notebook = json.loads(TUTORIAL.with_suffix(".ipynb").read_text())
    assert notebook == runpy.run_path(str(ROOT / "docs" / "notebook.py"))["notebook"](TUTORIAL.read_text())
    given: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), given)
            shown = "".join(text for output in cell["outputs"] for text in output["text"])
            assert capsys.readouterr().out.strip() == shown.strip(), "".join(cell["source"])


def test_the_steps_from_scratch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["paged_from_scratch.py"])
    paged_from_scratch.main()
    [printed] = [code for kind, code in BLOCK.findall((ROOT / "docs/from_scratch.md").read_text()) if kind == "output"]
    assert capsys.readouterr().out.startswith(printed)


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    names = {*hf_paged.__all__, *hf_paged.server.__all__} - {"__version__", "testing"}
    assert names <= set(re.findall(r"^\.\. auto\w+:: (\w+)", page, re.MULTILINE))


def test_names_of_files_and_what_they_define() -> None:
    """Would break: a file, class, function or test that a page names and that has moved."""
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("paper.md", "from_scratch.md"))
    found = re.findall(r"`((?:hf_paged|benchmarks|tests)/[\w/]+\.\w+)`((?:,? `[\w.]+`)*)", pages)
    assert len(found) > 60
    for path, names in found:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE), f"{path} has no {name}"


def shown(text: ast.AST) -> str:
    """A string of the source as a program prints it, with … for what is put in."""
    if isinstance(text, ast.JoinedStr):
        return "".join(map(shown, text.values))
    return re.sub(r"%[srd]", "…", str(text.value)) if isinstance(text, ast.Constant) else "…"


def test_messages_are_those_of_the_source() -> None:
    """Would break: an error that was worded anew, and is still explained by its old words."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "hf_paged").rglob("*.py"))]
    texts = {shown(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)}
    messages = [code.strip() for kind, code in BLOCK.findall((ROOT / "docs/troubleshooting.md").read_text()) if kind]
    assert len(messages) > 30
    for message in messages:
        assert any(message in text for text in texts), message
