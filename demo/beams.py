"""`BeamTree`: the beams of the engine's own search, put together from the snapshots after its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .hub import find_group

Path = tuple[int, ...]  # the tokens of a beam, prompt not included


class BeamTree:
    """All beams that were alive after some step. A beam is a sequence, and one that goes on twice is forked."""

    def __init__(self, label: str | None) -> None:
        """Of the search of the request with this label; `None`: of the only `generate()` call there is."""
        self.label = label
        self.scores: dict[Path, float | None] = {}  # of every beam that ever was, each behind the one it continues
        self.alive: dict[int, Path] = {}  # the beams of the last step, by sequence

    def see(self, snapshot: dict[str, Any]) -> None:
        """Takes the snapshot after the next step, with the events since the one before."""
        group = find_group(snapshot, self.label)
        if group is None:
            return
        parents = {event["sequence"]: event["parent"] for event in snapshot["events"] if event["kind"] == "shared"}
        alive = {}
        for sequence in group["sequences"]:
            number, length = sequence["id"], sequence["num_tokens"] - sequence["num_prompt_tokens"]
            before = self.alive.get(number, self.alive.get(parents.get(number, -1), ()))
            new = length - len(before)
            alive[number] = before + tuple(sequence["tail"][-new:] if new > 0 else ())
        self.alive = alive
        self.add(alive.values())

    def add(self, paths: Iterable[Sequence[int]]) -> None:
        """Adds beams, and what they continue."""
        for path in paths:
            for length in range(1, len(path) + 1):
                self.scores.setdefault(tuple(path[:length]), None)

    def branches(self) -> list[tuple[Path, int]]:
        """The beams that none continues, each with how many of its tokens belong to another one of these: together they
        have every token of the tree once.
        """
        parents = {path[:-1] for path in self.scores}
        found: list[tuple[Path, int]] = []
        seen: set[Path] = set()
        for path in self.scores:
            if path not in parents:
                shared = max((length for length in range(len(path)) if path[:length] in seen), default=0)
                seen.update(path[:length] for length in range(1, len(path) + 1))
                found.append((path, shared))
        return found

    def score(self, branches: Iterable[tuple[Path, int]], logprobs: Iterable[Sequence[float]]) -> None:
        """Takes how likely the tokens of `branches()` are, of each those that are its own."""
        for (path, shared), own in zip(branches, logprobs, strict=True):
            score = self.scores[path[:shared]] or 0.0 if shared else 0.0
            for length, logprob in enumerate(own, start=shared + 1):
                score += logprob
                self.scores[path[:length]] = score

    def nodes(self, decode: Callable[[list[int]], str], returned: Sequence[Sequence[int]] = ()) -> list[dict[str, Any]]:
        """The tree so far.

        Args:
            decode: From token ids to text.
            returned: The beams that the search returned, best first, once it is done.

        Returns:
            `id`, `parent`, `token` (as text), `score` (sum of log-probabilities, `None` before `score`), `step` and
            `rank` (of a returned beam, from 1) of each node, parents first. Those without a parent follow the prompt.
        """
        ranks = {tuple(tokens): rank for rank, tokens in reversed(list(enumerate(returned, start=1)))}
        ids = {path: number for number, path in enumerate(sorted(self.scores, key=len))}
        return [
            {
                "id": number,
                "parent": ids.get(path[:-1]),
                "token": decode([path[-1]]),
                "score": self.scores[path],
                "step": len(path),
                "rank": ranks.get(path),
            }
            for path, number in ids.items()
        ]
