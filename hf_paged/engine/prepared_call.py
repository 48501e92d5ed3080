"""A `generate()` call that transformers has prepared, up to its decoding loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_paged.attention.cache import PagedCache
from hf_paged.engine.beam_search import BeamSearchLoop
from hf_paged.engine.sampled_run import CallRows
from hf_paged.model.cache_argument import CACHE_ARGUMENTS
from hf_paged.model.host_call import HostCall
from hf_paged.sampling.controls import SamplingControls
from hf_paged.sampling.processors import are_row_wise
from hf_paged.sampling.random import GeneratorStates, own_states


@dataclass(slots=True)
class PreparedCall:
    """A call as transformers hands it to one of its decoding loops, and as it is to run.

    Attributes:
        input_ids: `[rows, width]`, the prompt, on the CPU if the preparation was there, as other tensors.
        others: The loop's other arguments, cache and streamer among them.
        loop: Name of transformers' method.
        host: The call's host copies, where it was prepared over these.
        is_submitted: It runs later, as a request.
        states: Of torch's global generators when the call was entered.
        rows: For the engine to sample; `None`: transformers' loop is to run.
        run: Runs that loop, to its end; given this call, which it must not hold, and a streamer or `None`.
        watch: What stands in for the model in a beam search.
        device: Where the caller has its tensors.
        num_blocks: What its rows need in the pool beside each other, and can't give back before the end.
        max_tokens: Tokens that a row of transformers' loop may come to, padding included.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    others: dict[str, Any]
    loop: str
    host: HostCall | None = None
    is_submitted: bool = False
    states: GeneratorStates = field(default_factory=dict)
    rows: CallRows | None = None
    run: Callable[[PreparedCall, Any], Any] | None = None
    watch: BeamSearchLoop | None = None
    num_blocks: int = 0
    max_tokens: int = 0
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.input_ids.device if self.host is None else self.host.device

    @property
    def cache(self) -> PagedCache | None:
        """The call's cache, if it is a paged one."""
        for name in CACHE_ARGUMENTS:
            if isinstance(cache := self.others.get(name), PagedCache):
                return cache
        return None

    def of_prompt(self, name: str) -> Any:
        """What is said of the prompt's columns, under this name or that of a decoder's; `None`: nothing."""
        return self.others.get(f"decoder_{name}" if "encoder_outputs" in self.others else name)

    @property
    def is_assisted(self) -> bool:
        """Whether candidates are verified."""
        return self.loop == "_assisted_decoding"

    @property
    def is_row_wise(self) -> bool:
        """Whether each processor and criterion looks at one row at a time, and none is the caller's own."""
        return are_row_wise((*self.processors, *self.criteria))

    @property
    def is_streamable(self) -> bool:
        """Whether it has one row, and is no beam search."""
        return len(self.input_ids) == 1 and (self.generation_config.num_beams or 1) == 1

    @property
    def has_events(self) -> bool:
        """Whether its tokens come one by one."""
        return self.is_streamable or (self.rows is not None and self.rows.beams is None)

    def control(self, controls: SamplingControls) -> None:
        """Sets what `submit()` says of its sampling.

        Raises:
            ValueError: It isn't the engine's own sampling that chooses the tokens, as some of that needs.
        """
        rows, logprobs = self.rows, controls.logprobs
        if logprobs is not None and logprobs.needs_scores and rows is None:
            raise ValueError(
                "logprobs_mode='processed' and return_support need rows that the engine samples; use "
                "logprobs_mode='raw' for beams, assisted decoding and processors of your own"
            )
        if controls.grammar is not None and (rows is None or rows.beams is not None or rows.has_drafts):
            raise ValueError(
                "grammar needs rows that the engine samples: it does not work with beams, assisted decoding and "
                "processors of your own"
            )
        if rows is not None:
            rows.grammar, rows.logprobs = controls.grammar, logprobs
        if controls.seed is None:
            if self.generation_config.do_sample:
                own_states(self.states)
        elif rows is None:  # its loop begins there
            self.states |= own_states(self.states, controls.seed)
        elif rows.generator is not None:
            rows.generator.manual_seed(controls.seed)
