"""From what a request holds to token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json
from transformers.utils.chat_template_utils import _get_template_variables

from hf_paged.server.chat_schemas import ContentPart, Message
from hf_paged.server.errors import ApiError, bad_field
from hf_paged.server.pictures import Pictures, Pixels
from hf_paged.server.schemas import CompletionRequest
from hf_paged.server.settings import ServerSettings

OURS = {"messages", "tools", "add_generation_prompt"}  # variables of a template that other fields set
# For models without a template of their own: what was said, line by line.
PLAIN_TEMPLATE = """{{ bos_token or '' }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        inputs: What `submit` takes beside them, of pictures.
        pixels: Of its pictures; they count until the model has begun with the text.
        is_source: An encoder reads it, and the text doesn't go on with it.
    """

    token_ids: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)
    pixels: Pixels = field(default_factory=lambda: Pixels(0))
    is_source: bool = False


class Prompts:
    """Turns texts and chats into token ids. It is slow, and so done on another thread than the event loop's."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        settings: ServerSettings,
        processor: Any,
        model: Any,
        max_characters: Callable[[], int],
    ) -> None:
        """Serves one model.

        Args:
            vocab_size: Its token ids are below it.
            settings: Of the server; its chat template is in place of the tokenizer's or processor's own.
            processor: What prepares pictures for the model, if it takes any.
            max_characters: Says how long a text may be.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_characters = max_characters
        chat_template = settings.chat_template
        own = getattr(processor, "chat_template", None)
        sees = processor is not None and (chat_template is not None or own is not None)
        self._pictures = Pictures(processor, model, settings) if sees else None
        own = own if sees else getattr(tokenizer, "chat_template", None)
        self._reads_only = model.config.is_encoder_decoder  # and writes another text
        self.has_template = chat_template is not None or own is not None
        self._template = chat_template or (None if own is not None else PLAIN_TEMPLATE)
        self._templates = self._template or own  # a template, or several by their names

    def of_completion(self, body: CompletionRequest) -> list[Prompt]:
        """The prompts of a completion: one, or several."""
        if body.prompt == []:
            raise bad_field("prompt", "it is empty")
        return [
            Prompt(
                self.of_text(own, field) if isinstance(own, str) else self._checked(own, field),
                is_source=self._reads_only,
            )
            for field, own in body.prompts.items()
        ]

    def of_text(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        most = self._max_characters()
        if len(text) > most:
            message = (
                f"{field}: {len(text)} characters are more than the limit of {most} for the tokens there is room for"
            )
            raise ApiError(400, message, field, "context_length_exceeded")
        return self._checked(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], field)

    def of_chat(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> Prompt:
        """A chat's tokens, through the template with these variables, and its pictures."""
        if self._reads_only and not self.has_template:
            raise bad_field("messages", "this model has no chat template: /v1/completions takes the text that it reads")
        if self._pictures is not None:
            self._pictures.check_number(
                [
                    f"messages.{number}.content.{place}.image_url"
                    for number, message in enumerate(messages)
                    if isinstance(message.content, list)
                    for place, part in enumerate(message.content)
                    if part.picture is not None
                ]
            )
        chat = [self._plain(message, f"messages.{number}") for number, message in enumerate(messages)]
        given = {"tools": tools, "chat_template": self._template, "add_generation_prompt": add_generation_prompt}
        try:
            given |= self._read(variables, tools is not None) if variables else {}
            if self._pictures is not None:
                token_ids, inputs, pixels = self._pictures.chat(chat, **given)
                return Prompt(self._checked(token_ids, "messages"), inputs, pixels)
            text = self._tokenizer.apply_chat_template(chat, tokenize=False, **given)
        except ApiError:
            raise
        except Exception as error:  # whatever the template's author had in mind, a mark of a picture in what was said
            raise bad_field("messages", f"the model's chat template does not take them: {error}") from error
        return Prompt(self.of_text(text, "messages", add_special_tokens=False), is_source=self._reads_only)

    def _read(self, variables: dict[str, Any], has_tools: bool) -> dict[str, Any]:
        """Those variables that the template reads; others would be settings of the tokenizer's or processor's."""
        template = self._templates
        if isinstance(template, dict):  # as transformers chooses
            template = template["tool_use" if has_tools and "tool_use" in template else "default"]
        known = _get_template_variables(template) - OURS
        for name in variables:
            if name not in known and name != "reasoning_effort":
                raise bad_field(f"chat_template_kwargs.{name:.100}", "the model's chat template does not read it")
        return {name: value for name, value in variables.items() if name in known}

    def text_of(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        token_ids = self._checked(token_ids, "tokens", may_be_empty=True)
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _plain(self, message: Message, field: str) -> dict[str, Any]:
        """A message as templates take it."""
        plain: dict[str, Any] = message.model_dump(exclude_none=True)
        content = message.content
        if content is not None:
            parts = [ContentPart(type="text", text=content)] if isinstance(content, str) else content
            said = [self._part(part, f"{field}.content.{place}") for place, part in enumerate(parts)]
            # Templates of models that see take a list of parts, others a text.
            plain["content"] = "".join(part["text"] for part in said) if self._pictures is None else said
        for number, call in enumerate(plain.get("tool_calls", ())):
            try:  # templates take them as what the JSON says, and text that is none as it is
                call["function"]["arguments"] = from_json(call["function"]["arguments"])
            except ValueError as error:
                if "recursion" in str(error):
                    raise bad_field(f"{field}.tool_calls.{number}.function.arguments", str(error)) from None
        return plain

    def _part(self, part: ContentPart, field: str) -> dict[str, Any]:
        if part.picture is None:
            return {"type": "text", "text": part.text}
        if self._pictures is None:
            raise bad_field(f"{field}.image_url", "this server has no processor of pictures with a chat template")
        return {"type": "image", "image": self._pictures.open(part.picture, f"{field}.image_url")}

    def _checked(self, token_ids: list[int], field: str, may_be_empty: bool = False) -> list[int]:
        if not token_ids and not may_be_empty:
            raise bad_field(field, "it has no tokens")
        if token_ids and max(token_ids) >= self._vocab_size:
            message = f"token id {max(token_ids)} is outside the model's vocabulary of {self._vocab_size}"
            raise ApiError(400, f"{field}: {message}", field)
        return token_ids
