"""A build hook: the README as package indexes show it, where relative links lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)\n*")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)]+)\)")


def absolute(text: str, base: str) -> str:
    """A Markdown text whose relative links are absolute; without a base URL plain text, and no pictures."""
    base = base.rstrip("/")
    text = _COMMENT.sub("", text)
    text = _PICTURE.sub(rf"![\1]({base}/raw/HEAD/\2)\n\n" if base else "", text)
    return _LINK.sub(rf"[\1]({base}/blob/HEAD/\2)" if base else r"\1", text)


class ReadmeHook(MetadataHookInterface):
    """Makes `readme` from README.md and `base-url`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, self.config["base-url"])}
