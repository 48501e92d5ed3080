"""Writes docs/tutorial.ipynb: the tutorial as a notebook.

python docs/notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")
# A block of Python, and what it prints.
_CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a Markdown page: its blocks of Python are cells, with the text behind each as its output."""
    cells: list[dict[str, Any]] = []

    def add(cell_type: str, source: str, **more: Any) -> None:
        if source.strip():
            lines = source.strip("\n").splitlines(keepends=True)
            cells.append({"cell_type": cell_type, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines} | more)

    end = 0
    for found in _CODE.finditer(page):
        code, printed = found.groups()
        add("markdown", page[end : found.start()])
        texts = [] if printed is None else printed.splitlines(keepends=True)
        outputs = [{"name": "stdout", "output_type": "stream", "text": texts}] if texts else []
        add("code", code, execution_count=None, outputs=outputs)
        end = found.end()
    add("markdown", page[end:])
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(notebook(PAGE.read_text()), indent=1) + "\n")
