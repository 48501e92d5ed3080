"""From what a request holds to token ids."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hf_paged.server.errors import ApiError, bad_field
from hf_paged.server.schemas import CompletionRequest, Message

# For models without a template of their own: what was said, line by line.
PLAIN_TEMPLATE = """{{ bos_token or '' }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


class Prompts:
    """What turns texts and chats into token ids. Slow enough to be done on another thread than the event loop's."""

    def __init__(self, tokenizer: Any, vocab_size: int, chat_template: str | None) -> None:
        """Of one model.

        Args:
            tokenizer: Its tokenizer.
            vocab_size: Its token ids are below it.
            chat_template: In place of the tokenizer's own.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        own = getattr(tokenizer, "chat_template", None)
        self.has_template = chat_template is not None or own is not None
        self._template = chat_template or (None if own is not None else PLAIN_TEMPLATE)

    def of_completion(self, body: CompletionRequest) -> list[list[int]]:
        """The prompts of a completion: one, or several."""
        prompt = body.prompt
        if isinstance(prompt, str):
            return [self.of_text(prompt, "prompt")]
        if not prompt:
            raise bad_field("prompt", "it is empty")
        if isinstance(prompt[0], int):
            return [self._checked(prompt, "prompt")]  # type: ignore[arg-type]
        return [
            self.of_text(own, f"prompt.{number}") if isinstance(own, str) else self._checked(own, f"prompt.{number}")  # type: ignore[arg-type]
            for number, own in enumerate(prompt)
        ]

    def of_text(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens."""
        return self._checked(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], field)

    def of_chat(
        self, messages: list[Message], add_generation_prompt: bool = True, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """A chat's tokens, through the template."""
        chat = [self._plain(message, number) for number, message in enumerate(messages)]
        try:
            text = self._tokenizer.apply_chat_template(
                chat,
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # whatever the template's author had in mind
            raise bad_field("messages", f"the model's chat template does not take them: {error}") from error
        return self.of_text(text, "messages", add_special_tokens=False)

    def text_of(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        token_ids = self._checked(token_ids, "tokens", may_be_empty=True)
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _plain(self, message: Message, number: int) -> dict[str, Any]:
        plain: dict[str, Any] = message.model_dump(exclude_none=True)
        if isinstance(message.content, list):
            for place, part in enumerate(message.content):
                if part.type == "image_url":
                    where = f"messages.{number}.content.{place}.image_url"
                    raise bad_field(where, "this model takes no pictures here")
            plain["content"] = "".join(part.text or "" for part in message.content)
        for call in plain.get("tool_calls", ()):
            with suppress(ValueError):  # templates take them as what the JSON says
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return plain

    def _checked(self, token_ids: list[int], field: str, may_be_empty: bool = False) -> list[int]:
        if not token_ids and not may_be_empty:
            raise bad_field(field, "it has no tokens")
        if token_ids and max(token_ids) >= self._vocab_size:
            message = f"token id {max(token_ids)} is outside the model's vocabulary of {self._vocab_size}"
            raise ApiError(400, f"{field}: {message}", field)
        return token_ids
