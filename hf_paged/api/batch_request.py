"""A request of transformers' batch API: settings as `submit()` takes them, outputs as that API gives them."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_paged.api.engine_of import engine_of
from hf_paged.engine.request import Request, TokenEvent

_CHILD = "__child#"  # in the id of a request's further sequences, behind its own


class _Given(GenerationConfig):
    """A config into which `generate()` takes nothing of the model's own: the batch API has none but the given one."""

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **settings: Any) -> Any:
        if allow_custom_entries:  # these are the model's own
            return {}
        return super().update(defaults_only, allow_custom_entries, **settings)


def request_of(name: str) -> str:
    """The id of the request that an output of this name belongs to."""
    return name.partition(_CHILD)[0]


def with_settings(config: GenerationConfig, settings: dict[str, Any], where: str) -> GenerationConfig:
    """A copy of a generation config with other settings.

    Raises:
        ValueError: Not a setting of a generation config; `where` says who was given it.
    """
    config = copy.deepcopy(config)
    unknown = config.update(**settings)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(
            f"{where} takes settings of a GenerationConfig, not {names}: "
            "model.paged.submit() and model.paged.generate() take all arguments of generate()"
        )
    return config


def check_prompt(prompt: Any) -> None:
    """Raises `ValueError` for what can't be a prompt; of other faults, a result tells."""
    try:
        iter(prompt)
    except TypeError:
        raise ValueError(f"a prompt must be a list of token ids, got {prompt!r:.80}") from None


def check_config(config: GenerationConfig, returns_logprobs: bool) -> None:
    """Raises `ValueError` for settings that the batch API can't serve."""
    if config.stop_strings:
        raise ValueError(
            "the batch API has no tokenizer, which stop_strings need: use model.paged.generate(prompts, "
            "stop_strings=..., tokenizer=...)"
        )
    if returns_logprobs and (config.num_beams or 1) > 1:
        raise ValueError(
            f"return_logprobs=True needs tokens that are drawn, which num_beams={config.num_beams} does not do: "
            "use model.paged.generate(prompts, logprobs=0)"
        )


@dataclass(slots=True, eq=False)
class BatchRequest:
    """One prompt.

    Attributes:
        request_id: Its id; further sequences are its children, `ID__child#0` on.
        batching: What its manager was told beside the config.
        adapter: As of `submit()`.
        created_time: As of `time.perf_counter`, like the next.
        start_time: When it was submitted; below 0 before.
        is_over: Its last output is there, or nothing wants one.
    """

    request_id: str
    prompt: Sequence[int]
    config: GenerationConfig
    batching: ContinuousBatchingConfig
    adapter: str | None = None
    is_streaming: bool = False
    has_timestamps: bool = False
    created_time: float = field(default_factory=time.perf_counter)
    start_time: float = -1
    handle: Request | None = None
    is_over: bool = False
    num_events: int = 0
    _tokens: list[list[int]] = field(init=False)
    _times: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        """Raises `ValueError` for no prompt, and for a setting that needs tokens to come one by one."""
        check_prompt(self.prompt)
        for name, is_asked in (("streaming", self.is_streaming), ("record_timestamps", self.has_timestamps)):
            if is_asked and (self.config.num_beams or 1) > 1:
                raise ValueError(
                    f"{name}=True is for tokens that come one by one: those of num_beams={self.config.num_beams} are "
                    "known at the end"
                )
        self._tokens = [[] for _ in self._names()]
        self._times = [[] for _ in self._names()]

    def submit_arguments(self, model: Any) -> dict[str, Any]:
        """The arguments for `submit()`, which this is about to be given to."""
        self.start_time = time.perf_counter()
        config = copy.copy(self.config)
        if config.max_new_tokens is None and config.max_length is None:
            config.max_new_tokens = max(1, engine_of(model).core.bound.max_context - len(self.prompt))
        if config.do_sample and config.top_k is None:
            config.top_k = 0  # which is 50 for `generate()`
        for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id"):
            if getattr(config, name) is None:
                setattr(config, name, getattr(model.generation_config, name))
        config.__class__ = _Given
        eos = config.eos_token_id
        given = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        # "None" would be taken from the model's own config.
        config.eos_token_id = [token for token in given if token >= 0] or [engine_of(model).vocab_size]
        arguments: dict[str, Any] = {"generation_config": config, "adapter": self.adapter}
        if not model.config.is_encoder_decoder:  # all of a prompt is text, what rows are padded with elsewhere included
            arguments["attention_mask"] = torch.ones(1, len(self.prompt), dtype=torch.int64)
        if self.batching.return_logprobs:
            arguments |= {"logprobs": 0, "logprobs_mode": "processed"}
        if not self.batching.allow_block_sharing:
            arguments["cache_salt"] = f"batch {id(self)} {self.start_time}"
        return arguments

    def take(self, events: list[TokenEvent]) -> list[GenerationOutput]:
        """Notes tokens that have come; returns a stream's outputs, one a token."""
        now = time.perf_counter()
        told = []
        for event in events:
            self._tokens[event.sequence].append(event.token_id)
            self._times[event.sequence].append(now)
            if self.is_streaming:
                told.append(self._output(event.sequence, self._tokens[event.sequence], RequestStatus.DECODING))
        self.num_events += len(events)
        return told

    def results(self, handle: Request) -> list[GenerationOutput]:
        """The last outputs of a request that has ended."""
        try:
            output = handle.result()
        except Exception as error:
            return self.failures(str(error))
        if output.finish_reason == "cancelled":
            return self.failures("the request was cancelled")
        results = []
        for index, tokens in enumerate(output.sequences):
            said = [] if output.logprobs is None else [each.logprob for each in output.logprobs[index]]
            results.append(self._output(index, tokens, RequestStatus.FINISHED, logprobs=said))
        return results

    def failures(self, error: str) -> list[GenerationOutput]:
        """Returns the results of a request that has failed, with the tokens that have come; `error` says why."""
        return [
            self._output(index, tokens, RequestStatus.FAILED, error=error) for index, tokens in enumerate(self._tokens)
        ]

    def _names(self) -> list[str]:
        num_children = (self.config.num_return_sequences or 1) - 1
        return [self.request_id, *(f"{self.request_id}{_CHILD}{i}" for i in range(num_children))]

    def _output(
        self,
        index: int,
        tokens: list[int],
        status: RequestStatus,
        *,
        error: str | None = None,
        logprobs: list[float] | None = None,
    ) -> GenerationOutput:
        end_time = -1 if status < RequestStatus.FINISHED else time.perf_counter()
        return GenerationOutput(
            request_id=self._names()[index],
            prompt_ids=list(self.prompt),
            generated_tokens=list(tokens),
            logprobs=logprobs or [],
            error=error,
            status=status,
            created_time=self.created_time,
            lifespan=(self.start_time, end_time),
            timestamps=list(self._times[index]) if self.has_timestamps else None,
        )
