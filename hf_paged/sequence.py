"""`Sequence`: one row of a cache as the scheduler sees it, tokens and how many of them are computed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Sequence:
    """A growing sequence of tokens whose keys and values live in the block pool.

    There are no phase flags: `num_computed_tokens < num_tokens` means there is work (a prefill, a decode step or the
    recomputation of an evicted prefix), and every kind of work is the same kind.

    Attributes:
        seq_id: Key of the sequence's block table in the `BlockManager`.
        token_ids: The ids of all its tokens, in cache order; `None` once one of them is unknown (a prompt given as
            embeddings, keys written by a forward that did not go through the engine). Unknown tokens can be neither
            hashed nor recomputed.
        num_tokens: Tokens of the sequence, computed or not.
        num_computed_tokens: Leading tokens whose keys and values are in the pool.
        position_offset: Position id of token `i` minus `i`, the same for the whole sequence; `None` when it is not
            (custom position ids), which also rules out hashing and recomputing.
        extra_key: What besides the tokens the keys and values depend on, the model's state and the position offset:
            part of the block hash.
    """

    seq_id: int
    token_ids: list[int] | None = field(default_factory=list)
    num_tokens: int = 0
    num_computed_tokens: int = 0
    position_offset: int | None = 0
    extra_key: tuple[Hashable, ...] = ()

    @property
    def is_reproducible(self) -> bool:
        """Whether the pool's content for this sequence is a function of known tokens and positions."""
        return self.token_ids is not None and self.position_offset is not None

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return self.num_tokens - self.num_computed_tokens

    def check_state(self, state: tuple[Hashable, ...]) -> None:
        """Raises `ValueError` if tokens are to be computed again in another state of the model than they were.

        Args:
            state: `ModelState.key()` of now.
        """
        if self.extra_key[:-1] != state:
            raise ValueError(
                "the model's weights, adapters, hooks or autocast changed since this PagedCache was filled, and its "
                "blocks were taken for other sequences meanwhile: what it held can't be computed again; reset() it"
            )

    def known_tokens(self) -> tuple[list[int], list[int]]:
        """Ids and position ids of all its tokens.

        Raises:
            ValueError: The sequence is not reproducible.
        """
        if self.token_ids is None or self.position_offset is None:
            raise ValueError(f"sequence {self.seq_id} has tokens or positions that only the pool knows")
        return self.token_ids, list(range(self.position_offset, self.position_offset + self.num_tokens))
