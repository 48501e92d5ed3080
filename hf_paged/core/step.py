"""`Step`: collects the chunks of a step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from hf_paged.core.batch import BlockMoves, Chunk
from hf_paged.core.sequence import SequenceGroup


@dataclass(slots=True)
class Step:
    budget: int
    num_seqs: int
    only: object
    forced: bool
    holds: bool = False
    prompt_budget: int | None = None  # tokens of all that comes behind the decodes; `None`: what is left
    batch_key: Hashable = None
    has_key: bool = False
    skipped_key: tuple[Hashable] | None = None
    is_short: bool = False  # a running group found no room: none is admitted
    needs_tokens: bool = False  # whose victim's tokens are not known yet: no newer group runs, so that they will be
    writes_sources: bool = False
    hashes: set[bytes] = field(default_factory=set)  # of the prompt blocks that this step computes
    chunks: list[Chunk] = field(default_factory=list)
    moves: BlockMoves = field(default_factory=BlockMoves)

    def end_decodes(self) -> None:
        """What comes now are prompts."""
        if self.prompt_budget is not None:
            self.budget = min(self.budget, self.prompt_budget)

    @property
    def is_open(self) -> bool:
        """Whether decodes may join whose batch key is its own, whichever their owner."""
        return self.only is None and not self.needs_tokens

    @property
    def is_full(self) -> bool:
        return self.budget == 0 or self.num_seqs == 0

    def admits(self, group: SequenceGroup) -> bool:
        """Whether the group may share this step."""
        if self.only is not None and group.owner is not self.only:
            return False
        if self.has_key and group.batch_key != self.batch_key:
            self.skipped_key = self.skipped_key or (group.batch_key,)
            return False
        return True
