"""A `generate()` call that transformers has prepared, up to its decoding loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_paged.engine.sampled_request import SampleCall
from hf_paged.sampling.grammar import Grammar
from hf_paged.sampling.logprobs import LogprobsWanted
from hf_paged.sampling.random import GeneratorStates, default_generator


@dataclass(slots=True)
class LoopResult:
    """What one of transformers' loops returned.

    Attributes:
        sequences: `[rows, length]`, prompt included.
        scores: `[rows]` of beams, or `None`.
    """

    sequences: Tensor
    scores: Tensor | None = None


@dataclass(slots=True)
class PreparedCall:
    """What `model.generate()` prepared.

    Attributes:
        work: Rows for the engine to sample, or else transformers' loop, to be run on a thread; that takes a streamer
            or `None`.
        prompt: The prompt as prepared, `[rows, width]`, on the CPU if the preparation was there.
        generation_config: The prepared config, with its tensors where the prompt is.
        is_streamable: It has one row, and isn't a beam search.
        states: Of torch's global generators when the call was entered.
    """

    work: SampleCall | Callable[[Any], LoopResult]
    prompt: Tensor
    generation_config: Any
    is_streamable: bool
    states: GeneratorStates = field(default_factory=dict)

    def check_logprobs(self, logprobs: LogprobsWanted | None) -> None:
        """Raises `ValueError` for what can't be said of its tokens."""
        if logprobs is not None and logprobs.is_processed and not isinstance(self.work, SampleCall):
            raise ValueError(
                "logprobs_mode='processed' is of what the engine's own sampling draws from; beams, assisted decoding "
                "and processors of your own have logprobs_mode='raw'"
            )

    def follow(self, grammar: Grammar) -> None:
        """Its text is to follow a grammar.

        Raises:
            ValueError: It isn't the engine's own sampling that chooses the tokens.
        """
        work = self.work
        if not isinstance(work, SampleCall) or work.beams is not None or work.has_drafts:
            raise ValueError(
                "grammar is for what the engine's own sampling draws; not for beams, assisted decoding and processors "
                "of your own"
            )
        work.grammar = grammar

    def seed(self, seed: int) -> None:
        """Makes it draw as after `torch.manual_seed`."""
        if isinstance(self.work, SampleCall):
            if self.work.generator is not None:
                self.work.generator.manual_seed(seed)
            return
        for device in self.states:  # its loop begins there
            self.states[device] = torch.Generator(device).manual_seed(seed).get_state()

    def split_generators(self) -> None:
        """If it samples, reseeds the global generators from themselves.

        Its draws begin at the state found; those of the next call must not be the same numbers.
        """
        if self.generation_config is None or not self.generation_config.do_sample:
            return
        for device in self.states:
            generator = default_generator(device)
            # Not drawn from it: a number on a GPU would have to be waited for.
            state = hashlib.blake2b(bytes(generator.get_state().numpy()), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(state, "little") >> 2)
