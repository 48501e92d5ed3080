"""The fields of requests that are chats, or parts of one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from hf_paged.server import fields
from hf_paged.server.schemas import MAX_TOP_LOGPROBS, Body, Many, SamplingBody, Some, not_many

MAX_MESSAGES = 2048
Effort = Annotated[str, Field(max_length=64)]
TemplateKwargs = Annotated[dict[str, Any], BeforeValidator(not_many)]


class ImageUrl(Body):
    """A picture, as a data URL."""

    rules = fields.PICTURE
    url: str
    detail: str = "auto"


class ContentPart(Body):
    """A part of a message: text, or a picture.

    Attributes:
        image_url: A picture; in `/v1/responses` (`input_image`) its URL alone, and
        detail: beside it how closely to look.
    """

    rules = fields.PART
    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    detail: str | None = None

    @property
    def picture(self) -> str | None:
        """Its URL, if it is one."""
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url

    @model_validator(mode="after")
    def _check(self) -> ContentPart:
        is_picture = self.type in ("image_url", "input_image")
        wanted, other = ("image_url", "text") if is_picture else ("text", "image_url")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"a part of type {self.type} has a field {wanted} and no {other}")
        if is_picture and isinstance(self.image_url, str) != (self.type == "input_image"):
            raise ValueError("image_url: an object with a url; with type input_image the URL itself")
        if self.detail is not None and self.type != "input_image":
            raise ValueError("detail: of a part of type input_image; else it is in image_url")
        return self


class FunctionCall(Body):
    """A function that the model has called; `arguments` are JSON."""

    rules = fields.FUNCTION_CALL
    name: str
    arguments: str


class ToolCall(Body):
    """A call of the model's in a message of its."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a chat."""

    rules = fields.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Some[ContentPart] | None = None
    name: str | None = None
    tool_calls: Some[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def num_characters(self) -> int:
        """The characters that are said and shown; a template's work counts as some."""
        parts = self.content if isinstance(self.content, list) else []
        said = len(self.content) if isinstance(self.content, str) else 0
        calls = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return 64 + said + calls + sum(len(part.picture or part.text or "") for part in parts)

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of the {self.role} has a content")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("tool_calls: only in a message of the assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id: in a message of a tool, and in no other")
        return self


class Function(Body):
    """A function that a model may call.

    Attributes:
        parameters: A JSON schema of its arguments, an object.
    """

    rules = fields.FUNCTION
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @model_validator(mode="after")
    def _check(self) -> Function:
        parameters: dict[str, Any] = {"type": "object"} if self.parameters is None else self.parameters
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        if parameters.get("type") != "object":
            raise ValueError('parameters: its type must be "object"')
        if not isinstance(properties, dict) or not isinstance(required, list) or set(map(type, required)) - {str}:
            raise ValueError("parameters: its properties must be an object, and what is required a list of their names")
        return self


class Tool(Body):
    """A tool that a model may use."""

    rules = fields.TOOL
    type: str
    function: Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """The function that is to be called."""

    rules = fields.TOOL
    type: str
    function: FunctionName


class ChatRequest(SamplingBody):
    """The body of `/v1/chat/completions`."""

    rules = fields.CHAT
    messages: Many[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool = True
    tools: Many[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    reasoning_effort: Effort | None = None

    @property
    def num_characters(self) -> int:
        offered = len(repr(self.tools)) + len(repr(self.chat_template_kwargs))
        return offered + sum(message.num_characters for message in self.messages)

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def is_forced(self) -> bool:
        """Whether its messages are calls, whatever the model would rather say."""
        return self.tool_choice not in ("none", "auto")

    @property
    def may_call_more(self) -> bool:
        """Whether several calls may be made: a function that is named is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, ToolChoice)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template besides messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools of which one must be called."""
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            return [tool for tool in self.tools if tool.function.name == choice.function.name]
        return self.tools

    @property
    def is_structured(self) -> bool:
        return self.is_forced or any(tool.function.strict for tool in self.offered_tools) or super().is_structured

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.is_forced and not self.callable_tools:
            problem = "there is no such tool among tools" if self.tools else "it forces a call, and there are no tools"
            raise ValueError(f"tool_choice: {problem}")
        if self.is_forced and self.structured_outputs is not None:
            raise ValueError("structured_outputs: not beside a tool_choice that forces calls")
        if len({tool.function.name for tool in self.tools}) < len(self.tools):
            raise ValueError("tools: two of them have one name")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: it is the older name of max_completion_tokens, and differs from it")
        return self


class TokenizeRequest(Body):
    """The body of `/tokenize`: a text, or a chat."""

    rules = fields.TOKENIZE
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either a prompt or messages")
        return self
