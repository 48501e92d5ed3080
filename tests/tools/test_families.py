"""`hf-paged models`: what the installed transformers knows, tried family by family."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from hf_paged.tools import families as module
from hf_paged.tools.cli import app
from hf_paged.tools.families import families, family_names


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["models", *args], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.mark.parametrize(
    ("name", "how", "size"),
    [
        ("llama", "packed", 32 * 2 * 32 * 128 * 2),
        ("falcon", "padded", 32 * 2 * 64 * 2),
        ("cwm", "packed", 64 * 2 * 8 * 128 * 2),  # its config takes no number for none
        ("modernbert-decoder", "packed", 22 * 2 * 12 * 64 * 2),
        ("biogpt", "packed", 24 * 2 * 16 * 64 * 2),
        ("opt", "packed", 12 * 2 * 12 * 64 * 2),
        ("bart", "packed", 98_304),  # it places tokens by their column
        ("roberta", "stock", 0),  # a token's keys follow from those behind it
        ("moshi", "packed", 32 * 2 * 32 * 128 * 2),  # a window as long as its context
        ("emu3", "packed", 32 * 2 * 8 * 128 * 2),  # the text config inside another one
    ],
)
def test_taken(name: str, how: str, size: int) -> None:
    """Would break: a family refused for faults of the trial's own, or counted by the tiny copy's size."""
    (family,) = families([name])
    assert (family.report.layout, family.report.bytes_per_token(torch.bfloat16), family.reason) == (how, size, "")


def test_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a table that stops at the first family that can't be made."""
    monkeypatch.setitem(module.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "no_such", "NoSuchForCausalLM")
    found = {family.name: family for family in families(["llama", "rwkv", "no_such"])}
    assert [bool(family.report) for family in found.values()] == [True, False, False]
    assert "recurrent" in found["rwkv"].reason and "NoSuchForCausalLM" in found["no_such"].reason
    assert all("\n" not in family.reason for family in found.values())
    assert found["rwkv"].report.layout == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit", "ViTModel has no language-model head"),
        ("clipseg_text_model", "transformers names no class of models for it"),
    ],
)
def test_no_decoder(name: str, reason: str) -> None:
    """Would break: a family that transformers knows, said to be unknown."""
    (family,) = families([name])
    assert family.report.layout == "" and family.reason.startswith(reason)
    assert name not in family_names()


def test_names_are_all_that_there_are() -> None:
    names = family_names()
    assert len(names) > 200 and names["llama"] == "LlamaForCausalLM" and names["llava"].startswith("Llava")
    with pytest.raises(ValueError, match="knows no family lama"):
        next(iter(families(["lama"])))


@pytest.mark.parametrize("markdown", [False, True])
def test_command(markdown: bool) -> None:
    result = invoke("llama", "t5", "rwkv", *(["--markdown"] if markdown else []))
    assert result.exit_code == 0, result.output
    line = r"llama[\s|]+packed[\s|]+yes[\s|]+524,288"
    assert re.search(line, result.output) and "recurrent" in result.output
    assert re.search(r"t5[\s|]+packed[\s|]+yes[\s|]+24,576", result.output)
    assert f"2 of 3 are taken, with transformers {transformers.__version__}" in result.output
    assert (result.output.lstrip().startswith("| family")) == markdown


def test_command_with_a_wrong_name() -> None:
    result = invoke("t5", "lama")
    assert result.exit_code == 2 and result.output.strip().endswith("knows no family lama")
