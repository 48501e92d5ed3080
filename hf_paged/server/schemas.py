"""The fields of requests, as `fields` says what becomes of each; `null` means that a field is absent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hf_paged.server import fields
from hf_paged.server.fields import HONOURED, Table

MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 4096
Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]  # each is looked for with every token
TokenId = Annotated[int, Field(ge=0)]
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # any number of them: one that is wrong is enough
Some = Annotated[list[T], Field(fail_fast=True, max_length=1024)]
ANY_OBJECT = {"type": "object"}
LEAST_TEMPERATURE = 1e-4  # below, logits may overflow


def usable(temperature: float) -> float:
    """Refuses a temperature that logits, divided by it, may overflow with."""
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"0, or at least {LEAST_TEMPERATURE}")
    return temperature


def not_many(given: Any) -> Any:
    """Refuses a dictionary of many entries as a whole."""
    if type(given) is dict and len(given) > 1024:  # each that is wrong would be an error of its own
        raise ValueError(f"{len(given)} entries are more than 1024")
    return given


Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(usable)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _describe(schema: dict[str, Any], kind: type[Body]) -> None:
    """Adds to a JSON schema what its fields do, and those without effect."""
    known = schema.get("properties", {})
    honoured = [name for name, rule in kind.rules.items() if rule.fate == HONOURED]
    others = [name for name, rule in kind.rules.items() if rule.is_ever_taken]
    properties = schema["properties"] = {name: known.get(name, {}) for name in [*honoured, *known, *others]}
    for name in others:
        rule = kind.rules[name]
        properties[name] |= {"description": rule.sentence} if rule.sentence else {}
        properties[name] |= {} if rule.values is None else {"enum": list(rule.values)}


class Body(BaseModel):
    """A request, or a part of one.

    Attributes:
        rules: What becomes of fields; those that aren't here are honoured.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, json_schema_extra=_describe
    )
    rules: ClassVar[Table] = {}

    @model_validator(mode="before")
    @classmethod
    def _honoured(cls, given: Any) -> Any:
        """Leaves out the fields without effect, and refuses those that are not supported."""
        if type(given) is not dict:
            return given
        for name, rule in cls.rules.items():
            if given.get(name) is not None and not rule.takes(given[name]):
                raise PydanticCustomError("not_supported", "{name}: {why}", {"name": name, "why": rule.refusal})
        dropped = {name for name, rule in cls.rules.items() if rule.fate != HONOURED}
        if len(given) > len(cls.model_fields) + len(dropped):  # each unknown field would be an error of its own
            known = dropped.union(cls.names())
            unknown = next(name for name in given if name not in known)
            raise PydanticCustomError("unknown_field", "{name}: it is not known", {"name": unknown})
        return {name: value for name, value in given.items() if value is not None and name not in dropped}

    @classmethod
    def names(cls) -> Iterator[str]:
        """The fields that are honoured, by their names in requests."""
        return (field.alias or name for name, field in cls.model_fields.items())


class StreamOptions(Body):
    """Wishes for a stream besides its text."""

    rules = fields.STREAM_OPTIONS
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A schema by name; it is enforced whether or not it is `strict`."""

    name: str = Field(max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool = True


class ResponseFormat(Body):
    """The format of a text: any, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema: with type json_schema, and only there")
        return self


class StructuredOutputs(Body):
    """The structure that a text is to follow, one of these. `json_` is a schema.

    Attributes:
        regex: A regular expression that matches all of it.
        grammar: A grammar in Lark's syntax.
    """

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[Many[Text], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.json_, self.regex, self.grammar, self.choice)) != 1:
            raise ValueError("give one of json, regex, grammar, choice")
        return self


class SamplingBody(Body):
    """The fields that all requests for text share; below the empty line, extensions of OpenAI's fields."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[Many[Stop], Field(max_length=16)] | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(not_many)] | None = None
    user: str | None = Field(None, max_length=512)
    response_format: ResponseFormat | None = None

    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: Some[TokenId] = Field(default_factory=list)
    num_beams: int = Field(1, ge=1, le=64)
    length_penalty: float | None = Field(None, ge=-100, le=100)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=512)
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def json_format(self) -> dict[str, Any] | None:
        """The schema of its texts, if they are to be JSON."""
        own = self.response_format
        if own is None or own.type == "text":
            return None
        return ANY_OBJECT if own.json_schema is None else own.json_schema.schema_

    @property
    def is_structured(self) -> bool:
        return self.json_format is not None or self.structured_outputs is not None

    @property
    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def counts_on(self) -> bool:
        """Whether each event of its stream is to say how many tokens there are."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def wanted_logprobs(self) -> int | None:
        """Likeliest tokens to be named with each; `None`: nothing is to be said of tokens."""
        return None

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most; `None`: what there is room for."""
        return None

    @property
    def limit_field(self) -> str:
        return "max_tokens"

    @property
    def wanted_of_prompt(self) -> int | None:
        """Likeliest tokens to be named with each of the prompt's; `None`: nothing is to be said of those."""
        return self.prompt_logprobs

    @property
    def num_prompts(self) -> int:
        """Prompts, each of which is a request of the engine's."""
        return 1

    @property
    def num_characters(self) -> int:
        """The length of all texts to be tokenized, pictures included."""
        return 0

    @property
    def num_samples(self) -> int:
        """Texts to be generated for each prompt."""
        return self.n

    @property
    def branches_field(self) -> str:
        """The field that says how many samples or beams a prompt has."""
        asked = {"num_beams": self.num_beams, "best_of": getattr(self, "best_of", None) or 0, "n": self.n}
        return max(asked, key=lambda name: asked[name])

    @model_validator(mode="after")
    def _check(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not with stream=true; echo with logprobs streams them")
        if self.is_structured:
            if self.structured_outputs is not None and self.response_format is not None:
                raise ValueError("structured_outputs: not beside response_format")
            for name, is_there in (
                ("num_beams", self.num_beams > 1),
                ("min_tokens", self.min_tokens > 0),
                ("ignore_eos", self.ignore_eos),
            ):
                if is_there:
                    raise ValueError(f"{name}: not beside a format that the text is to follow, which ends it")
        if self.num_beams > 1:
            if self.stream:
                raise ValueError("stream: the texts of a beam search (num_beams) are known at its end only")
            if self.n > self.num_beams:
                raise ValueError(f"n: {self.n} texts are more than num_beams={self.num_beams}")
        elif self.length_penalty is not None:
            raise ValueError("length_penalty: only with num_beams above 1")
        return self


def _few_prompts(given: Any) -> Any:
    if type(given) is list and len(given) > MAX_PROMPTS and type(given[0]) is not int:
        raise ValueError(f"{len(given)} prompts are more than {MAX_PROMPTS}")
    return given


class CompletionRequest(SamplingBody):
    """The body of `/v1/completions`."""

    rules = fields.COMPLETION
    prompt: Annotated[str | Many[TokenId] | Many[str] | Many[Many[TokenId]], BeforeValidator(_few_prompts)]
    max_tokens: int = Field(16, ge=0)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def scores_echo(self) -> bool:
        """Whether its logprobs are also those of the prompt's tokens."""
        return self.echo and self.logprobs is not None

    @property
    def wanted_of_prompt(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    @property
    def prompts(self) -> dict[str, str | list[int]]:
        """Each of its prompts, by where it is in the body."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return {"prompt": self.prompt}  # type: ignore[dict-item]
        return {f"prompt.{number}": own for number, own in enumerate(self.prompt)}  # type: ignore[misc]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_characters(self) -> int:
        return sum(len(prompt) for prompt in self.prompts.values() if isinstance(prompt, str))

    @property
    def num_samples(self) -> int:
        return self.best_of or self.n

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.best_of is not None:
            if self.best_of < self.n:
                raise ValueError(f"best_of: {self.best_of} is below n={self.n}")
            if self.stream and self.best_of > self.n:
                raise ValueError("best_of: which texts are the best is known at the end only, so not with stream=true")
            if self.num_beams > 1:
                raise ValueError("best_of: not beside num_beams, which chooses the best itself")
        if self.max_tokens == 0 and self.wanted_of_prompt is None:
            raise ValueError("max_tokens: 0 only with prompt_logprobs, or with echo and logprobs")
        return self


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    rules = fields.DETOKENIZE
    model: str | None = None
    tokens: Annotated[Many[TokenId], Field(max_length=1 << 17)]
