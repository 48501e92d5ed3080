"""Prompts: a conversation as token ids, those that come with the package, and openings to start with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import hf_paged

from .limits import RefusedError
from .loading import LoadedModel

PROMPTS_FILE = Path(hf_paged.__file__).parent / "assets" / "prompts.jsonl"

STORY_OPENINGS = (
    "It was late in the evening when the old man came to the door of the house, and",
    '"My dear Alice," said the Mouse, looking very grave, "you',
    "Mr. Holmes leaned back in his chair and looked at the letter for some time before he",
    "KING:\nMy lords, what news is this from",
)
CHAT_OPENINGS = (
    "Tell me a short story about a lighthouse keeper.",
    "Explain virtual memory to a ten-year-old.",
    "What could I cook from rice, eggs and spinach?",
    "Write four lines about rain on a roof.",
)


def openings(loaded: LoadedModel) -> tuple[str, ...]:
    """First messages to choose from."""
    return CHAT_OPENINGS if loaded.has_chat_template else STORY_OPENINGS


def encode(loaded: LoadedModel, text: str) -> list[int]:
    """A text that is to be continued, as token ids."""
    return list(loaded.tokenizer(text)["input_ids"])


def render(loaded: LoadedModel, messages: Sequence[dict[str, str]]) -> str:
    """A conversation, whose last message is the user's, as the text of a prompt.

    A model with a chat template gets it in that form. Any other gets the text of all messages: it goes on with the
    user's, and what the user says next begins a new paragraph.
    """
    if not loaded.has_chat_template:
        return conversation_text(messages)
    try:
        return str(loaded.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
    except Exception as error:  # jinja2's, raised by the template itself: roles in an order it does not like
        raise RefusedError(f"The model's chat template does not take this conversation: {error}") from error


def conversation_text(messages: Iterable[dict[str, str]]) -> str:
    """All messages as one text."""
    text = ""
    for message in messages:
        text += "\n\n" * (message["role"] == "user" and text != "") + message["content"]
    return text


def check_messages(history: Any) -> list[dict[str, str]]:
    """Messages as they come from an API client, as plain roles and texts."""
    if not isinstance(history, list):
        raise RefusedError("The history must be a list of messages, each with a role and a content.")
    messages = []
    for message in history:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise RefusedError('Each message of the history needs a role, "user" or "assistant", and a content.')
        messages.append({"role": message["role"], "content": _text(message.get("content"))})
    return messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise RefusedError("A message must be text: this demo takes no files.")


def embedded_prompts() -> list[str]:
    """The prompts that come with the package, from two tokens to over a thousand."""
    return [json.loads(line)["prompt"] for line in PROMPTS_FILE.read_text(encoding="utf-8").splitlines()]


def choose_prompts(prompts: Sequence[Sequence[int]], count: int, most_tokens: int) -> list[list[int]]:
    """`count` prompts of at most `most_tokens` tokens, spread evenly from the shortest to the longest, in mixed order.

    When there are fewer, they come again.

    Raises:
        RefusedError: Not one is that short.
    """
    fitting = sorted((list(prompt) for prompt in prompts if len(prompt) <= most_tokens), key=len)
    if not fitting:
        raise RefusedError(
            f"No prompt is as short as {most_tokens} tokens: make the pool larger, or ask for fewer tokens."
        )
    picked = [fitting[index * len(fitting) // count] for index in range(count)]
    stride = next(step for step in range(count // 2 + 1, 2 * count + 2) if math.gcd(step, count) == 1)
    return [picked[index * stride % count] for index in range(count)]
