"""The Markdown pages: what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for folder in (".", "docs", "demo", "benchmarks") for path in (ROOT / folder).glob("*.md"))


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
