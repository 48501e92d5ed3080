"""What the CPU benchmarks share as programs: arguments, the embedded model, a table on the screen, a JSON result."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from common import Report, versions
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

ASSETS = Path(hf_paged.__file__).parent / "assets"


def parser(description: str | None) -> argparse.ArgumentParser:
    """With `--out`, the folder of the result."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the result")
    return made


def quiet() -> None:
    """One thread of torch's, since the embedded model is too small for two, and no warnings between the figures."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def embedded_model(**tokenizer_options: Any) -> tuple[Any, Any]:
    """The tokenizer and the model that are part of the package."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny_lm", **tokenizer_options)
    return tokenizer, AutoModelForCausalLM.from_pretrained(ASSETS / "tiny_lm").eval()


def show(*items: Any) -> None:
    """Prints tables, as wide as the screen; 110 columns where there is none."""
    Console(highlight=False, width=None if sys.stdout.isatty() else 110).print(*items)


def show_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints a table of all columns that some row has, but `all`, which has the single measurements."""
    columns = [column for column in dict.fromkeys(name for row in rows for name in row) if column != "all"]
    table = Table(*columns, title=title)
    for row in rows:
        values = [row.get(column, "") for column in columns]
        table.add_row(*[f"{value:.3g}" if isinstance(value, float) else str(value) for value in values])
    show(table)


def save(path: Path, about: dict[str, Any], results: Any) -> None:
    """Writes a result: what it is about, what it was measured with, the figures."""
    Report(path, about | {"versions": versions(), "results": results}).save()
