"""`Sequence` and `SequenceGroup`: what the scheduler schedules, tokens and how many of them are computed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class SequenceStatus(StrEnum):
    """Where the keys and values of a group are."""

    WAITING = "waiting"  # nowhere: not started, or preempted by recomputation
    RUNNING = "running"  # in the block pool
    SWAPPED = "swapped"  # in CPU memory


@dataclass(frozen=True, slots=True)
class GivenToken:
    """A token that an id and its sequence's offset don't tell: one given as an embedding, or at a position of its own.

    Attributes:
        digest: Of all that it was given as: what it is compared by, and part of the block hash.
        token_id: Its id; 0 for an embedding.
        position: Its position id; one of each axis where they differ.
        embeddings: `[tokens, hidden_size]`, a tensor; `None`: it has an id.
        index: Which of them it is.
    """

    digest: bytes
    token_id: int = field(compare=False)
    position: int | tuple[int, ...] = field(compare=False)
    embeddings: Any = field(default=None, compare=False)
    index: int = field(default=0, compare=False)

    @classmethod
    def at(cls, position: int | tuple[int, ...], token_id: int) -> GivenToken:
        """One with an id."""
        return cls(hashlib.sha256(repr((position, token_id)).encode()).digest(), token_id, position)

    @classmethod
    def embedded(cls, position: int | tuple[int, ...], embeddings: Any, index: int, content: Any = None) -> GivenToken:
        """One of some embeddings; equal to those of the same content and position, without a content to itself alone.

        Args:
            position: Its position id, or those of each axis.
            index: Which of them it is.
            content: The bytes of its embedding.
        """
        digest = hashlib.sha256(repr(position).encode())
        digest.update(os.urandom(32) if content is None else content)
        return cls(digest.digest(), 0, position, embeddings, index)

    @classmethod
    def within(cls, whole: bytes, place: int, token: Token, position: int) -> GivenToken:
        """A token as one of several that see each other.

        Args:
            whole: A digest of them all.
            place: Which of them it is.
            token: What it would be alone.
        """
        digest = hashlib.sha256(whole + place.to_bytes(4)).digest()
        return replace(token, digest=digest) if isinstance(token, GivenToken) else cls(digest, token, position)


Token = int | GivenToken


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What an encoder has read for a sequence: its decoder attends to all of it, from the first token on.

    Attributes:
        states: `[num_tokens, hidden_size]`, a tensor: what the encoder has made of what its mask shows.
        digest: Of these states: equal ones are stored once.
    """

    states: Any
    num_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """What a sequence begins with that is not all ids.

    Attributes:
        token_ids: Ids and `GivenToken`s.
        position_offset: See `Sequence`.
        spans: See `Sequence`.
    """

    token_ids: list[Token]
    position_offset: int
    spans: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class Sequence:
    """A growing sequence of tokens whose keys and values live in the block pool.

    There are no phase flags: `num_computed_tokens < num_tokens` means there is work (a prefill, a decode step or the
    recomputation of an evicted prefix), and every kind of work is the same kind.

    Attributes:
        seq_id: Key of the sequence's block table in the `BlockManager`.
        group: The sequences it is scheduled with.
        token_ids: All its tokens, in cache order, ids or `GivenToken`s. Fewer than `num_tokens` while the last are
            expected: chosen on the device, and on their way to the host.
        num_tokens: Tokens of the sequence, computed or not.
        num_computed_tokens: Leading tokens whose keys and values are in the pool (or in CPU memory, while swapped).
        num_prompt_tokens: Of these, the prompt of the call that it belongs to (0: not known yet).
        num_at_once: Index behind the last token that came together with others; those behind it came one by one.
        num_cached_tokens: Tokens that the prefix cache had of it when it was last admitted.
        logits_from: Index of the first token whose logits are waited for: what lies before it may come from the
            prefix cache.
        is_wanted: Whether its uncomputed tokens are waited for; if not, they stay uncomputed. Taken back when the
            logits are out, wherever they are used only together with a sibling's: else the sequence, preempted for its
            sibling, is computed again at the sibling's expense, for ever.
        position_offset: Position id of token `i` minus `i`, of all tokens but `GivenToken`s.
        extra_key: What besides the tokens the keys and values depend on, the model's state, the position offset and a
            cache salt: part of the block hash.
        adapter: What is added to the model for it, with a `slot` and a `key`, the last part of `extra_key`; `None`:
            nothing.
        source: What an encoder has read for it, whose digest is part of `extra_key`; `None`: nothing.
        given_end: Index behind its last `GivenToken`, or more.
        is_recomputable: Its keys and values are a function of known tokens and the model as it is. If not, some would
            come out otherwise now: of older weights, another adapter, a mask with holes, or rotary frequencies that
            depended on the longest row of their step. They can't be hashed nor computed again.
        spans: First token, and that behind the last, of each run of tokens that see each other, whichever comes first
            (those of a picture, of some models): they are computed in one step.
        wanted: Indices of its tokens whose logits are wanted, in the order of the caller's; `None`: of the last one.
        placeholder: Of a token that only the device knows: its place among those that the last step has chosen.
        num_drafts: How many of its tokens, the last ones, are guesses that may be taken back.
    """

    seq_id: int
    group: SequenceGroup
    token_ids: list[Token] = field(default_factory=list)
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_at_once: int = 0
    num_cached_tokens: int = 0
    logits_from: int = 0
    is_wanted: bool = False
    position_offset: int = 0
    extra_key: tuple[Hashable, ...] = ()
    adapter: Any = None
    source: Source | None = None
    given_end: int = 0
    is_recomputable: bool = True
    spans: tuple[tuple[int, int], ...] = ()
    wanted: list[int] | None = None
    placeholder: int = -1
    num_drafts: int = 0

    @property
    def has_placeholders(self) -> bool:
        """Whether some of its tokens are known only to the device yet."""
        return len(self.token_ids) < self.num_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_wanted_tokens(self) -> int:
        """Uncomputed tokens that are waited for."""
        return self.num_tokens - self.num_computed_tokens if self.is_wanted else 0

    @property
    def has_begun(self) -> bool:
        """Whether anything of it was computed."""
        return self.num_computed_tokens > 0 or self.num_tokens > self.num_prompt_tokens

    def chunk(self, budget: int) -> int:
        """How many of its wanted tokens run in a step that has room for `budget`: no run is cut, be it larger."""
        num_tokens = min(self.num_wanted_tokens, budget)
        end = self.num_computed_tokens + num_tokens
        for start, stop in self.spans:
            if start < end < stop:
                return (start if start > self.num_computed_tokens else stop) - self.num_computed_tokens
        return num_tokens

    def span_start(self, num_tokens: int) -> int:
        """The first token of the run that would be cut behind so many tokens; so many, if none would be."""
        return next((start for start, stop in self.spans if start < num_tokens < stop), num_tokens)

    def is_of(self, state: tuple[Hashable, ...]) -> bool:
        """Whether it was begun in this state of the model, and of what is added to it."""
        is_same = self.adapter is None or self.extra_key[-1] == self.adapter.key
        return is_same and self.extra_key[: len(state)] == state

    def renew(self, state: tuple[Hashable, ...]) -> None:
        """Makes it one of this state; nothing of it is computed."""
        others = self.extra_key[len(state) :]
        self.extra_key = (*state, *others) if self.adapter is None else (*state, *others[:-1], self.adapter.key)

    def check_state(self, state: tuple[Hashable, ...] | None, adapter: Any) -> None:
        """Raises `ValueError` if tokens are to be computed again in another state of the model than they were.

        Args:
            state: `WeightsVersion.key()` of now; `None`: that is the same.
            adapter: What is added to the model for it now.
        """
        if adapter is not self.adapter or (state is not None and not self.is_of(state)):
            raise ValueError(
                "the model's weights, adapters, hooks or autocast changed since this PagedCache was filled, and other "
                "sequences have taken its blocks: its contents can't be computed again; reset() it"
            )


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one prompt (samples, beams), admitted, preempted and resumed together.

    Attributes:
        arrival: Number of the group in order of arrival.
        priority: The lower, the earlier; groups of one priority are served in order of arrival.
        sequences: The live ones.
        status: Where their keys and values are.
        is_idle: No call is generating with it, only a `PagedCache` holds it: the first to make room.
        is_split: Too large for the pool as a whole: as many of its sequences run as fit.
        num_pins: How often it is pinned, for a group needed in the pool is not preempted.
        batch_key: Groups of different keys (autocast) don't share a step.
        owner: The call it belongs to: what fails when a step of it alone fails.
        request_id: The request it belongs to; `None`: a plain `generate()` call, or a kept `PagedCache`.
        max_tokens: Tokens that each of its sequences may come to, prompt included; 0: not known.
        order: Its key in all queues, which `Policy.order` made of what is above when the group was the newest.
    """

    arrival: int
    priority: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    is_idle: bool = False
    is_split: bool = False
    num_pins: int = 0
    batch_key: Hashable = None
    owner: object = None
    request_id: str | None = None
    max_tokens: int = 0
    order: tuple[int, ...] = ()

    @property
    def has_work(self) -> bool:
        """Whether uncomputed tokens of it are waited for."""
        return any(s.is_wanted and s.num_tokens > s.num_computed_tokens for s in self.sequences)

    @property
    def has_placeholders(self) -> bool:
        """Whether tokens of it are known to the device only."""
        return any(sequence.has_placeholders for sequence in self.sequences)

    @property
    def is_recomputable(self) -> bool:
        """Whether all of it can be computed again."""
        return all(sequence.is_recomputable for sequence in self.sequences)
