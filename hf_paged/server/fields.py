"""Which fields of requests are honoured, which are without effect, and which are refused: the owner of that.

`docs/server_fields.md` is made of these tables, by `make server-fields`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FATES = HONOURED, WITHOUT_EFFECT, REFUSED = "honoured", "without effect", "not supported"


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a field.

    Attributes:
        fate: `HONOURED`; `WITHOUT_EFFECT`: any value is taken, and changes nothing; or `REFUSED`: a 400.
        note: What the field does, why it does nothing, or why it is refused.
        values: The values that are taken, where others are a 400; `None`: all of a field that isn't refused.
    """

    fate: str
    note: str
    values: tuple[Any, ...] | None = None

    @property
    def is_ever_taken(self) -> bool:
        return self.fate != REFUSED or self.values is not None

    def takes(self, value: Any) -> bool:
        """Whether the field may have this value, as far as these tables know."""
        if self.values is None:
            return self.fate != REFUSED
        return any(type(value) is type(each) and value == each for each in self.values)

    @property
    def refusal(self) -> str:
        """The error of a request with another value."""
        but = "" if self.values is None else f", except {' and '.join(map(json.dumps, self.values))}"
        return f"not supported{but}{self.note and ': '}{self.note}"

    @property
    def sentence(self) -> str:
        """The note, behind the fate of a field that isn't honoured, or of its other values."""
        fate = "others are not supported" if self.fate == REFUSED else self.fate
        return self.note if self.fate == HONOURED else f"{fate}: {self.note}"


Table = Mapping[str, Rule]


def honoured(note: str = "", *values: Any) -> Rule:
    return Rule(HONOURED, note, values or None)


def ignored(note: str) -> Rule:
    return Rule(WITHOUT_EFFECT, note)


def refused(note: str, *values: Any) -> Rule:
    """With `values`: those ask for nothing, and are taken."""
    return Rule(REFUSED, note, values or None)


NOTHING_STORED = "the server stores nothing"
CACHE = "the prefix cache works by itself; `cache_salt` keeps requests apart"
ONE_TIER = "there is one tier"
TEMPLATE = "goes to the chat template; without effect on one that does not read it"
TEMPLATE_KWARGS = "variables of the chat template; a name that the template does not read is a 400"
SAFETY = "nothing is screened; `user` is in the log"

STREAM_OPTIONS: Table = {
    "include_usage": honoured("a last event has the number of tokens"),
    "continuous_usage_stats": honoured("each event has the number of tokens so far"),
    "include_obfuscation": ignored("events are not padded"),
}

SAMPLING: Table = {
    "model": honoured("the served name, or an adapter's; absent: the model"),
    "stream": honoured("server-sent events"),
    "stream_options": honoured("only with `stream`"),
    "temperature": honoured("0: the likeliest token; else 0.0001 to 2"),
    "top_p": honoured(),
    "n": honoured("with `temperature: 0` all texts are equal"),
    "seed": honoured("the draws of `generate()` after `torch.manual_seed(seed)`"),
    "stop": honoured("at most 16 strings of at most 256 characters; no delta contains a part of one"),
    "presence_penalty": honoured(),
    "frequency_penalty": honoured(),
    "logit_bias": honoured("by token id"),
    "user": honoured("is in the log"),
    "response_format": honoured(
        "enforced by a grammar; a keyword of JSON schema that can't be enforced is a 400; a schema's `name`, "
        "`description` and `strict` change nothing"
    ),
    "top_k": honoured("as in `generate()`; 0 and -1: all tokens"),
    "min_p": honoured("as in `generate()`"),
    "repetition_penalty": honoured("as in `generate()`"),
    "min_tokens": honoured("tokens before any end; `stop` strings count from there on"),
    "ignore_eos": honoured("goes on behind an end of text"),
    "stop_token_ids": honoured("tokens that end a text as its end of text does"),
    "num_beams": honoured("a beam search, not streamed; with a `temperature` above 0 it samples"),
    "length_penalty": honoured("of a beam search"),
    "priority": honoured("as in `submit()`: the lower, the earlier; only with `--allow-priority`"),
    "cache_salt": honoured("cached prefixes are shared with requests of the same salt only"),
    "skip_special_tokens": honoured("`false` leaves special tokens in the text"),
    "structured_outputs": honoured("one of `json`, `regex`, `grammar` (Lark), `choice`"),
    "prompt_logprobs": honoured(
        "in vLLM's shape: for each token of the prompt (`null` for the first) its log-probability and rank, and those "
        "of the likeliest, at most 20. In each choice of a completion, at the top of a chat; not streamed, not with "
        "pictures"
    ),
}

COMPLETION: Table = {
    "prompt": honoured("texts or token ids, one or several"),
    "max_tokens": honoured("0 only for log-probabilities of the prompt"),
    "best_of": honoured("the `n` likeliest of so many texts; not streamed"),
    "echo": honoured("with `logprobs` also log-probabilities of the prompt's tokens, `null` for the first"),
    "logprobs": honoured("at most 20"),
    **SAMPLING,
    "suffix": refused("texts go on at their end only", ""),
}

CHAT: Table = {
    "messages": honoured("text, pictures as data URLs, calls of functions"),
    "max_completion_tokens": honoured("absent: as many as there is room for"),
    "max_tokens": honoured("the older name of `max_completion_tokens`"),
    "logprobs": honoured(),
    "top_logprobs": honoured("at most 20, only with `logprobs`"),
    "tools": honoured("functions"),
    "tool_choice": honoured("`required` is at least one call, and a named function exactly one, by a grammar"),
    "parallel_tool_calls": honoured("`false`: at most one call"),
    "add_generation_prompt": honoured("`false`: the prompt ends behind the last message"),
    "chat_template_kwargs": honoured(TEMPLATE_KWARGS),
    "reasoning_effort": honoured(TEMPLATE),
    **SAMPLING,
    "metadata": ignored(NOTHING_STORED),
    "store": ignored(NOTHING_STORED),
    "service_tier": ignored(ONE_TIER),
    "prediction": ignored("the texts are the same without it"),
    "prompt_cache_key": ignored(CACHE),
    "prompt_cache_retention": ignored(CACHE),
    "prompt_cache_options": ignored(CACHE),
    "safety_identifier": ignored(SAFETY),
    "modalities": refused("texts only", ["text"]),
    "verbosity": refused("ask for it in a message", "medium"),
    "audio": refused("texts only"),
    "functions": refused("use `tools`", []),
    "function_call": refused("use `tool_choice`"),
    "moderation": refused("nothing is screened"),
    "web_search_options": refused("there are no hosted tools"),
}

OF_CHAT = ("model", "temperature", "top_p", "stream", "tools", "tool_choice", "parallel_tool_calls",
           "chat_template_kwargs", "ignore_eos", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention",
           "prompt_cache_options", "safety_identifier")  # fmt: skip
RESPONSE: Table = {
    "input": honoured("a text, or messages, calls of functions and their outputs; pictures as data URLs"),
    "instructions": honoured("a system message before the input"),
    "max_output_tokens": honoured("absent: as many as there is room for"),
    "text": honoured("`format` is enforced by a grammar"),
    "reasoning": honoured("`effort` goes to the chat template"),
    "truncation": honoured("nothing is ever cut: an input that does not fit is a 400 with `auto`, too"),
    **{name: CHAT[name] for name in OF_CHAT},
    "metadata": honoured("the answer repeats it"),
    "store": ignored(f"{NOTHING_STORED}; the answer says `false`"),
    "stream_options": ignored("`include_obfuscation` is its only field: events are not padded"),
    "max_tool_calls": ignored("it counts calls of hosted tools, and there are none"),
    "include": refused("there is nothing else to include", [], ["reasoning.encrypted_content"]),
    "background": refused("a response is made while its client waits", False),
    "top_logprobs": refused("use `/v1/chat/completions`", 0),
    "previous_response_id": refused(f"{NOTHING_STORED}: send the earlier items as `input`"),
    "conversation": refused(f"{NOTHING_STORED}: send the earlier items as `input`"),
    "prompt": refused(f"{NOTHING_STORED}: send `instructions` and `input`"),
    "background_options": refused("a response is made while its client waits"),
    "context_management": refused("nothing is ever compacted", []),
    "image": refused("pictures are not compressed"),
    "moderation": refused("nothing is screened"),
    "access_programs": refused("there are none"),
}

TOKENIZE: Table = {
    "model": SAMPLING["model"],
    "prompt": honoured("a text"),
    "messages": honoured("or a chat"),
    "add_special_tokens": honoured("of a text"),
    "add_generation_prompt": CHAT["add_generation_prompt"],
}

DETOKENIZE: Table = {"model": SAMPLING["model"], "tokens": honoured("token ids")}

TRANSLATION: Table = {
    "file": honoured("wav, flac, mp3, ogg"),
    "model": SAMPLING["model"],
    "prompt": honoured("a text that goes before, in style and spelling; of Whisper"),
    "response_format": honoured("", "json", "text", "verbose_json", "srt", "vtt"),
    "temperature": honoured("0 to 1; 0: the likeliest text, and 0.2, 0.4, ... where that one is poor (Whisper)"),
}
TRANSCRIPTION: Table = {
    **TRANSLATION,
    "language": honoured("of Whisper; absent: it is detected"),
    "timestamp_granularities": honoured("only `segment`, with `verbose_json`"),
    "stream": refused("texts are known at their end", "false"),
    "chunking_strategy": refused("long sounds are taken segment by segment"),
    "include": refused("there is nothing else to include"),
    "keywords": refused("use `prompt`"),
    "languages": refused("use `language`"),
    "known_speaker_names": refused("speakers are not told apart"),
    "known_speaker_references": refused("speakers are not told apart"),
}

# Parts of requests. What isn't here is honoured, if a schema has it.
TEXT: Table = {"verbosity": CHAT["verbosity"]}
REASONING: Table = {
    "effort": CHAT["reasoning_effort"],
    "summary": ignored("reasoning is part of the text"),
    "generate_summary": ignored("reasoning is part of the text"),
    "context": ignored("there are no reasoning items"),
    "mode": refused("there is one", "standard"),
}
FUNCTION_CALL: Table = {"parsed_arguments": ignored("of an answer that is sent back")}
MESSAGE: Table = {
    "parsed": ignored("of an answer that is sent back"),
    "annotations": ignored("of an answer that is sent back"),
    "refusal": refused("send it as content"),
    "audio": refused("texts only"),
    "function_call": refused("use `tool_calls`"),
}
PICTURE: Table = {"detail": honoured("pictures keep their size", "auto")}
PART: Table = {
    "type": honoured("", "text", "input_text", "output_text", "image_url", "input_image"),
    **PICTURE,
    "annotations": ignored("of an answer that is sent back"),
    "logprobs": ignored("of an answer that is sent back"),
    "prompt_cache_breakpoint": ignored(CACHE),
    "file_id": refused(NOTHING_STORED),
}
TOOL: Table = {"type": honoured("there are no hosted and no custom tools", "function")}
FUNCTION: Table = {
    "strict": honoured(
        "arguments follow the schema, by a grammar; without effect where a tokenizer's own schema reads calls"
    ),
}
RESPONSE_FUNCTION: Table = {
    **TOOL,
    **FUNCTION,
    "async": refused("calls are made by the client", False),
    "allowed_callers": refused("the model is the only caller", ["direct"]),
    "defer_loading": refused("all functions are in the prompt", False),
    "output_schema": ignored("the model is not told of it"),
}
OF_ANSWERS = ignored("of an item that is sent back")
INPUT_MESSAGE: Table = {
    "type": honoured("", "message"),
    "id": OF_ANSWERS,
    "status": OF_ANSWERS,
    "phase": OF_ANSWERS,
}
INPUT_CALL: Table = {
    "id": OF_ANSWERS,
    "status": OF_ANSWERS,
    "namespace": OF_ANSWERS,
    "caller": OF_ANSWERS,
    "async": refused("calls are made by the client", False),
}
INPUT_OUTPUT: Table = {**INPUT_CALL, "name": ignored("the call has it")}

TABLES: Mapping[str, Table] = {  # as the page has them
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/audio/transcriptions": TRANSCRIPTION,
    "/v1/audio/translations": TRANSLATION,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "`stream_options`": STREAM_OPTIONS,
    "`text` (`/v1/responses`)": TEXT,
    "`reasoning` (`/v1/responses`)": REASONING,
    "Messages of a chat": MESSAGE,
    "Parts of a message's content": PART,
    "Calls in a message's `tool_calls`": FUNCTION_CALL,
    "Functions in `tools`": RESPONSE_FUNCTION,
    "Messages in `input` (`/v1/responses`)": INPUT_MESSAGE,
    "Calls in `input` (`/v1/responses`)": INPUT_CALL,
    "Outputs of calls in `input` (`/v1/responses`)": INPUT_OUTPUT,
}

HEAD = """# Fields of requests

<!-- Made by `make server-fields` from hf_paged/server/fields.py. -->

The server honours a field, lists it here as without effect, or answers with a 400 that names it and says "not
supported". A field that is not here is a 400, too. `null` means that a field is absent.
"""


def page() -> str:
    """`docs/server_fields.md`."""
    return "\n".join([HEAD, *(line for name, table in TABLES.items() for line in _section(name, table))])


def _section(name: str, table: Table) -> Iterator[str]:
    yield from (f"## {name}", "", "| field | what becomes of it | |", "|---|---|---|")
    for field, rule in sorted(table.items(), key=lambda row: FATES.index(row[1].fate)):
        taken = "" if rule.values is None else ", ".join(f"`{json.dumps(value)}`" for value in rule.values)
        but = {HONOURED: f"{taken}; others are not supported", REFUSED: f"but for {taken}"}[rule.fate] if taken else ""
        fate = rule.fate + (f" ({but})" if rule.fate == REFUSED and but else "")
        note = "; ".join(filter(None, [but if rule.fate == HONOURED else "", rule.note]))
        yield f"| `{field}` | {fate} | {note} |"
    yield ""
