"""`LoopCall`: what one of transformers' decoding loops is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_paged.attention.cache import PagedCache
from hf_paged.model.cache_argument import CACHE_ARGUMENTS
from hf_paged.sampling.processors import are_row_wise


@dataclass(slots=True)
class LoopCall:
    """One of transformers' decoding loops, about to begin.

    Attributes:
        others: The loop's other arguments, `past_key_values` among them.
        is_assisted: It is the one that verifies candidates.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    others: dict[str, Any]
    is_assisted: bool = False

    @property
    def cache(self) -> PagedCache | None:
        """The call's cache, if it is a paged one."""
        caches = (self.others.get(name) for name in CACHE_ARGUMENTS)
        return next((cache for cache in caches if isinstance(cache, PagedCache)), None)

    @property
    def named(self) -> dict[str, Any]:
        return self.others | {
            "logits_processor": self.processors,
            "stopping_criteria": self.criteria,
            "generation_config": self.generation_config,
        }

    @property
    def is_row_wise(self) -> bool:
        """Whether each processor and criterion looks at one row at a time, and none is the caller's own."""
        return are_row_wise((*self.processors, *self.criteria))
