"""`docs/life_of_a_token.md`: a real call passes the stops in the order of the page."""

from __future__ import annotations

import ast
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import hf_paged
from helpers.models import build, ragged_batch

ROOT = Path(hf_paged.__file__).parents[1]
PAGE = Path(__file__).parents[2] / "docs" / "life_of_a_token.md"
STOPS = re.findall(r"^(\d+)\. `([\w/]+\.py)` `([\w.]+)`: ", PAGE.read_text(), re.MULTILINE)


def functions(tree: ast.AST, outer: str = "") -> set[str]:
    """The functions of a file: by name, with their class; inside of functions without what is around them."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found |= {outer + node.name} | functions(node)
        elif isinstance(node, ast.ClassDef):
            found |= functions(node, f"{outer}{node.name}.")
    return found


def test_stops_exist() -> None:
    assert [int(number) for number, _, _ in STOPS] == list(range(1, 16))
    for _, file, name in STOPS:
        assert name in functions(ast.parse((ROOT / file).read_text())), f"{file} has no function {name}"


def test_a_call_passes_them_in_order() -> None:
    model = hf_paged.patch(build("gpt2"), num_blocks=16)
    called: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT / "hf_paged")):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            called.append((file, code.co_qualname.rpartition("<locals>.")[2]))

    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        model.generate(**ragged_batch((5,)), max_new_tokens=2, do_sample=False)
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    rest = iter(called)
    for number, file, name in STOPS:
        assert (file, name) in rest, f"stop {number} of {PAGE.name}: {name} was not called behind the stop before it"
