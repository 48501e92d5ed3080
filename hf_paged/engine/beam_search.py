"""`BeamSearchLoop`: transformers' beam search, watched for prompts whose result is decided while others go on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_paged.attention.cache import PagedCache
from hf_paged.kernels.transfers import to_host


class BeamSearchLoop:
    """Stands in for the model as the `self` of its `_beam_search`, and frees the beams of each prompt that is decided.

    A prompt is decided when no finished hypothesis of it can be replaced any more: its early-stop heuristic holds, or
    all its beams are finished under `early_stopping=True`. transformers masks every later candidate of such a prompt,
    so what its beams compute from then on is never looked at.
    """

    def __init__(self, model: Any, cache: PagedCache, retires: bool) -> None:
        """Watches one call; `retires` says whether decided prompts may leave the batch."""
        self._model = model
        self._cache = cache
        self._retires = retires
        self.beam_scores: Tensor | None = None  # [prompts, beams] of the finished hypotheses, best first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def _update_finished_beams(self, *args: Any, **kwargs: Any) -> Any:
        result = self._model._update_finished_beams(*args, **kwargs)
        self.beam_scores = result[1]
        return result

    def _beam_search_has_unfinished_sequences(
        self,
        is_early_stop_heuristic_unsatisfied: Tensor,
        is_sent_finished: Tensor,
        next_token_hits_stopping_criteria: Tensor,
        early_stopping: bool | str,
    ) -> Any:
        is_decided = ~is_early_stop_heuristic_unsatisfied[:, 0]
        if early_stopping is True:
            is_decided = is_decided | is_sent_finished.all(dim=1)
        # The loop reads its stopping condition on the host in this very call.
        decided = [prompt for prompt, is_over in enumerate(to_host([is_decided])[0].tolist()) if is_over]
        num_prompts, num_beams = is_sent_finished.shape
        if self._retires and len(decided) < num_prompts:
            self._cache.retire(prompt * num_beams + beam for prompt in decided for beam in range(num_beams))
        return self._model._beam_search_has_unfinished_sequences(
            is_early_stop_heuristic_unsatisfied, is_sent_finished, next_token_hits_stopping_criteria, early_stopping
        )
