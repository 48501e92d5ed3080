"""`BeamRecorder`: which beams a search explored, as transformers' own beam search shows them to a logits processor."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor

Path = tuple[int, ...]  # the tokens of a beam, prompt not included


class BeamRecorder(LogitsProcessor):
    """Changes nothing, writes down the beams that are alive at each step and the log-probabilities of their tokens.

    At each step a beam search hands its processors the live beams and the log-probabilities of every next token. A beam
    that is alive now was one token shorter a step ago: what that token added to its score stands in the scores of that
    step. They are kept for one step only.
    """

    def __init__(self, prompt_tokens: int, eos_token_ids: Sequence[int] = ()) -> None:
        """Records a search behind a prompt of so many tokens."""
        self._prompt_tokens = prompt_tokens
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()  # the search runs on a thread of its own
        self._scores: dict[Path, float] = {(): 0.0}  # of every beam that ever was: the sum of its log-probabilities
        self._ends: dict[Path, float] = {}  # the same of each beam, had it ended there: no later step shows that
        self._rows: dict[Path, int] = {}  # of the last step
        self._log_probs: Tensor | None = None  # of the last step, [beams, vocabulary]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Takes live beams `[beams, tokens]` and log-probabilities `[beams, vocabulary]`, returns the latter as is."""
        paths = [tuple(row) for row in input_ids[:, self._prompt_tokens :].tolist()]
        with self._lock:
            for path in paths:
                self._add(path)
            # At the first step all rows are the prompt: the first one of equals counts.
            self._rows = {path: row for row, path in reversed(list(enumerate(paths)))}
            for path, row in self._rows.items():
                for token in self._eos_token_ids:
                    self._ends[(*path, token)] = self._scores[path] + float(scores[row, token])
            self._log_probs = scores.detach().clone()
        return scores

    def _add(self, path: Path) -> None:
        """A beam, whose beginning was alive a step ago."""
        if path in self._scores or not path:
            return
        parent = path[:-1]
        if path in self._ends:
            self._scores[path] = self._ends[path]
        elif self._log_probs is not None and parent in self._rows:
            self._scores[path] = self._scores[parent] + float(self._log_probs[self._rows[parent], path[-1]])

    def nodes(self, decode: Any, returned: Sequence[Sequence[int]] = ()) -> list[dict[str, Any]]:
        """The tree so far.

        Args:
            decode: From token ids to text.
            returned: The beams that the search returned, best first, once it is done.

        Returns:
            `id`, `parent`, `token` (as text), `score` (sum of log-probabilities), `step` and `rank` (of a returned
            beam, from 1) of each node, parents first. Those without a parent follow the prompt.
        """
        with self._lock:
            for tokens in returned:
                for length in range(1, len(tokens) + 1):
                    self._add(tuple(tokens[:length]))
            scores = {path: score for path, score in self._scores.items() if path}
        ranks = {tuple(tokens): rank for rank, tokens in reversed(list(enumerate(returned, start=1)))}
        ids = {path: number for number, path in enumerate(sorted(scores, key=lambda path: (len(path), -scores[path])))}
        return [
            {
                "id": number,
                "parent": ids.get(path[:-1]),
                "token": decode([path[-1]]),
                "score": round(scores[path], 4),
                "step": len(path),
                "rank": ranks.get(path),
            }
            for path, number in ids.items()
        ]

    def beams(self) -> list[tuple[list[int], float]]:
        """The beams alive at the last step, best first, with their scores."""
        with self._lock:
            live = sorted(self._rows, key=lambda path: -self._scores.get(path, 0.0))
            return [(list(path), self._scores.get(path, 0.0)) for path in live]
