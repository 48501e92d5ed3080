"""`ServerSettings`: the settings of a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def name_of(path: str) -> str:
    """The name of a model by default: its own, or that of its folder."""
    folder = Path(os.path.expanduser(path))  # which, unlike Path's own, raises nothing
    return folder.resolve().name if path and folder.is_dir() else path


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        model_name: What requests call the model; `None`: its name, or that of its folder.
        api_keys: One of them is to come with each request, but for `/health` and `/ready`; none: no key is needed.
        max_body_bytes: The largest body of a request.
        max_body_values: Values in a body, such as token ids; an object counts as 16 more, and each of its fields as 4.
        max_grammar_bytes: The longest grammar, schema, regular expression or list of choices.
        grammar_timeout: Seconds that compiling one may take.
        max_prompt_tokens: The longest prompt; `None`: as long as the model and its pool take.
        max_answer_bytes: The largest answer, as it is estimated at the call: 100 bytes for each log-probability, 8 for
            each token, 4096 for each choice, and echoes. A text without a limit of its own ends there.
        max_waiting: Requests that may wait for room in the pool; beyond them the answer is 429.
        max_pictures: Pictures that a request may have.
        max_pixels: Pixels that a request's pictures may have together; one whose shorter side is below 512 counts as
            scaled up to that.
        max_pixels_at_work: Pixels of all requests before their first token; beyond them the answer is 429.
        max_audio_bytes: The largest body of a request with a sound in it.
        max_audio_seconds: The longest sound.
        max_audio_seconds_at_work: Of all sounds whose texts are being written; beyond them the answer is 429. `None`:
            four times the longest.
        request_timeout: Seconds after which a request is given up; `None`: never.
        body_timeout: Seconds that a request's body may take to arrive.
        max_head_bytes: The largest head of a request, under `limited_protocol`.
        head_timeout: Seconds that a head may take to arrive, likewise.
        allow_priority: Requests may have a `priority`, and overtake others.
        chat_template: A Jinja template in place of the tokenizer's own.
        adapters: Adapters of a `PeftModel`, or of `load_adapter`, each a model of its own name; `model_name` is the
            model without them.
        adapter_dir: A folder from which clients that have a key may load more adapters; `None`: they may not.
        max_adapters: As many may be known then.
        public_docs: `/docs` and `/openapi.json` are there although keys are needed.
        cors_origins: Origins whose pages may call; none: no page of another origin may.
    """

    model_name: str | None = None
    api_keys: Sequence[str] = ()
    max_body_bytes: int = 4 << 20
    max_body_values: int = 1 << 18
    max_grammar_bytes: int = 1 << 16
    grammar_timeout: float = 2.0
    max_prompt_tokens: int | None = None
    max_answer_bytes: int = 64 << 20
    max_waiting: int = 1024
    max_pictures: int = 10
    max_pixels: int = 33_500_000
    max_pixels_at_work: int = 134_000_000
    max_audio_bytes: int = 25 << 20
    max_audio_seconds: float = 900.0
    max_audio_seconds_at_work: float | None = None
    request_timeout: float | None = 600.0
    body_timeout: float = 30.0
    max_head_bytes: int = 64 << 10
    head_timeout: float = 15.0
    allow_priority: bool = False
    chat_template: str | None = None
    adapters: Sequence[str] = ()
    adapter_dir: str | Path | None = None
    max_adapters: int = 10_000
    public_docs: bool = False
    cors_origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.api_keys, str) or not all(self.api_keys):
            raise ValueError("api_keys must be a list of strings that aren't empty")
        if not all(key.isascii() and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ValueError("api_keys must be of printable ASCII without spaces around them: they travel in a header")
        names = [self.model_name, *self.adapters]
        if isinstance(self.adapters, str) or not all(self.adapters) or len(set(names)) < len(names):
            raise ValueError(f"adapters must be a list of names other than the model's, got {self.adapters!r}")
        if self.adapter_dir is not None and not (self.api_keys and Path(self.adapter_dir).is_dir()):
            raise ValueError(f"adapter_dir must be a folder, and needs api_keys: got {str(self.adapter_dir)!r}")
        timeouts = "request_timeout", "body_timeout", "head_timeout", "grammar_timeout"
        for name in (*timeouts, *(name for name in vars(self) if name.startswith("max_"))):
            value = getattr(self, name)
            if value is None and name in ("request_timeout", "max_prompt_tokens", "max_audio_seconds_at_work"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a number above 0, got {value!r}")
        if isinstance(self.cors_origins, str):
            raise ValueError(f"cors_origins must be a list of origins, got {self.cors_origins!r}")
        for name in ("max_pixels", "max_audio_seconds"):
            if (most := getattr(self, name)) > (getattr(self, f"{name}_at_work") or most):
                raise ValueError(f"{name}_at_work must be at least {name}, {most}")
