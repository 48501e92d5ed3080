"""A request of transformers' batch API: settings as `submit()` takes them, outputs as that API gives them."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_paged.engine.request import Request, RequestOutput

# What `generate()` would take from the model's own generation config, and the batch API does not: it is given all.
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


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


def check_config(config: GenerationConfig, returns_logprobs: bool) -> None:
    """Raises `ValueError` for what the batch API has no place for."""
    if config.stop_strings:
        raise ValueError(
            "the batch API has no tokenizer, which stop_strings need: use model.paged.generate(prompts, "
            "stop_strings=..., tokenizer=...)"
        )
    if returns_logprobs and (config.num_beams or 1) > 1:
        raise ValueError(
            f"return_logprobs=True is of what tokens are drawn from, which num_beams={config.num_beams} does not do: "
            "use model.paged.generate(prompts, logprobs=0)"
        )


@dataclass(slots=True, eq=False)
class BatchRequest:
    """One prompt.

    Attributes:
        request_id: Its id; further sequences are its children, `ID__child#0` on.
        prompt: Token ids.
        config: With its own settings.
        is_streaming: An output a token, each with all tokens so far.
        has_timestamps: Whether it notes when each token came.
        created_time: As of `time.perf_counter`, like the next.
        start_time: When it was handed to the engine; below 0 before.
        timestamps: Of its tokens.
        handle: In the engine.
        is_dropped: Its caller wants no output any more.
        num_told: Tokens in the last output.
    """

    request_id: str
    prompt: Sequence[int]
    config: GenerationConfig
    is_streaming: bool = False
    has_timestamps: bool = False
    created_time: float = field(default_factory=time.perf_counter)
    start_time: float = -1
    timestamps: list[float] = field(default_factory=list)
    handle: Request | None = None
    is_dropped: bool = False
    num_told: int = 0

    def __post_init__(self) -> None:
        """Raises `ValueError` for a setting that needs one sequence whose tokens come one by one."""
        several = {"num_return_sequences": self.config.num_return_sequences, "num_beams": self.config.num_beams}
        asked = [name for name in ("is_streaming", "has_timestamps") if getattr(self, name)]
        if asked and (given := {name: value for name, value in several.items() if (value or 1) > 1}):
            names = {"is_streaming": "streaming=True", "has_timestamps": "record_timestamps=True"}
            raise ValueError(
                f"{names[asked[0]]} is for one sequence whose tokens come one by one, not with "
                + " and ".join(f"{name}={value}" for name, value in given.items())
            )

    def generate_arguments(self, max_context: int, vocab_size: int) -> dict[str, Any]:
        """What `submit()` is to be given.

        Args:
            max_context: Tokens of the model's longest sequence: without any other limit the request ends there.
            vocab_size: The first number that is no token.
        """
        config = copy.copy(self.config)
        config.do_sample = bool(config.do_sample)
        if config.do_sample:
            for name, value in _NEUTRAL.items():
                if getattr(config, name) is None:
                    setattr(config, name, value)
        if config.max_new_tokens is None and config.max_length is None:
            config.max_new_tokens = max(1, max_context - len(self.prompt))
        eos = config.eos_token_id
        given = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        # "None" would be taken from the model's own config.
        config.eos_token_id = [token for token in given if token >= 0] or [vocab_size]
        return {"generation_config": config}

    def so_far(self, tokens: list[int]) -> GenerationOutput | None:
        """The next output of a stream; `None` if there is no token that it hasn't told."""
        now = time.perf_counter()
        if self.has_timestamps:
            self.timestamps += [now] * (len(tokens) - len(self.timestamps))
        if not self.is_streaming or len(tokens) <= self.num_told:
            return None
        self.num_told = len(tokens)
        return self._output(self.request_id, list(tokens), RequestStatus.DECODING, end_time=-1)

    def outputs(self, output: RequestOutput) -> list[GenerationOutput]:
        """Its results."""
        results = []
        for index, (name, tokens) in enumerate(zip(self._names(), output.sequences, strict=True)):
            said = [] if output.logprobs is None else [each.logprob for each in output.logprobs[index]]
            results.append(self._output(name, tokens, RequestStatus.FINISHED, logprobs=said))
        return results

    def failures(self, error: str, tokens: list[int]) -> list[GenerationOutput]:
        """Its results when there are none.

        Args:
            error: Why.
            tokens: Generated before.
        """
        return [self._output(name, tokens, RequestStatus.FAILED, error=error) for name in self._names()]

    def _names(self) -> list[str]:
        """Of its results, the best one first."""
        num_children = (self.config.num_return_sequences or 1) - 1
        return [self.request_id, *(f"{self.request_id}__child#{i}" for i in range(num_children))]

    def _output(
        self,
        name: str,
        tokens: list[int],
        status: RequestStatus,
        *,
        error: str | None = None,
        logprobs: list[float] | None = None,
        end_time: float | None = None,
    ) -> GenerationOutput:
        return GenerationOutput(
            request_id=name,
            prompt_ids=list(self.prompt),
            generated_tokens=list(tokens),
            logprobs=logprobs or [],
            error=error,
            status=status,
            created_time=self.created_time,
            lifespan=(self.start_time, time.perf_counter() if end_time is None else end_time),
            timestamps=list(self.timestamps) if self.has_timestamps else None,
        )
