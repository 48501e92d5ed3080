"""`BlockTable`: the blocks of one sequence, group by group of layers."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

assert array("i").itemsize == 4, "block tables are int32"  # another size is allowed, no platform of ours has it

ExtraKey = tuple[Hashable, ...]

GONE = -1  # in a table: a block behind the window, given back
PREFIX_CACHE = -1  # as `BlockTable.borrowed_from`
NO_EPOCH = -1  # as `BlockTable.cache_epoch`


class Offer(NamedTuple):
    """A block that a sequence has filled, and the hash of what it should hold."""

    seq_id: int
    position: int
    block_id: int
    block_hash: bytes
    group: int = 0


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence.

    Attributes:
        groups: of each group of layers the block ids (int32), position order; always just enough of them for
            `num_tokens`. The first ones may be `GONE`.
        num_gone: of each group, how many of them are.
        blocks: the first group's; of most models it is the only one, of some there is none.
        state: blocks that hold what its recurrent layers keep of all its tokens together, or the keys and values of its
            source, group after group; empty without such layers, and for a sequence without tokens.
        source: tokens of its source, and what its blocks are found by; None: it has none.
        num_tokens: tokens that the sequence has slots for.
        num_read: the next query is this token's: what lies behind its window is never read again.
        keeps_from: until a `crop` goes by this query instead, so that the sequence can be cut back to it.
        extra_key: what its K/V depends on beside its tokens; None until the first `PrefixCache.commit` or `match`.
        block_hashes: hashes of its leading full blocks, as far as they were asked for.
        num_committed: how many of them its blocks were registered under, or offered to be.
        num_settled: how many of these offers are answered.
        cache_epoch: the pool's `cache_epoch` when the sequence's first tokens came in; `NO_EPOCH`: its blocks don't
            hold what their hashes say.
        matched: tokens asked for and found by the `PrefixCache.match` it began with.
        is_swapped: the blocks are those of the CPU pool.
        own_end: up to so many tokens it may be written: its last blocks and its state are its own, and not found by
            what they hold. 0: to be looked at, when it grows.
        borrowed_from: where an empty sequence got what it begins with: a sequence's id, or `PREFIX_CACHE`; None once
            the log says so. Until it grows the beginning may be taken back, as if nothing had been.
    """

    groups: list[array[int]]
    num_gone: list[int]
    num_tokens: int = 0
    num_read: int = 0
    keeps_from: int | None = None
    extra_key: ExtraKey | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    num_settled: int = 0
    cache_epoch: int = 0
    matched: tuple[int, int] = (0, 0)
    is_swapped: bool = False
    own_end: int = 0
    borrowed_from: int | None = None
    state: array[int] = field(default_factory=lambda: array("i"))
    source: tuple[int, bytes] | None = None
    blocks: array[int] = field(init=False)

    @classmethod
    def empty(cls, num_groups: int) -> BlockTable:
        """The table of a sequence without tokens."""
        return cls([array("i") for _ in range(num_groups)], [0] * num_groups)

    def __post_init__(self) -> None:
        self.blocks = self.groups[0] if self.groups else array("i")

    def everything(self) -> list[int]:
        """All blocks: of its tokens, and of its state."""
        return self.held() + self.state.tolist() if self.state else self.held()

    def held(self, start: int = 0) -> list[int]:
        """The blocks of all groups from position `start` on, those of one position beside each other."""
        if len(self.groups) == 1:
            return self.groups[0][max(start, self.num_gone[0]) :].tolist()
        columns = zip(*(blocks[start:] for blocks in self.groups), strict=True)
        return [block for column in columns for block in column if block != GONE]

    def cut(self, num_blocks: int) -> list[int]:
        """Takes out what lies behind the first `num_blocks` positions; with the last token also the state."""
        released = self.held(num_blocks) if num_blocks else self.everything()
        self.own_end = 0
        if not num_blocks:
            self.state = array("i")
        for group, blocks in enumerate(self.groups):
            del blocks[num_blocks:]
            self.num_gone[group] = min(self.num_gone[group], num_blocks)
        return released

    def give_up(self, group: int, end: int) -> list[int]:
        """Takes out a group's blocks before position `end`, whose places stay."""
        blocks, start = self.groups[group], self.num_gone[group]
        released = blocks[start:end].tolist()
        blocks[start:end] = array("i", [GONE]) * (end - start)
        self.num_gone[group] = end
        return released

    def carries(self, offer: Offer) -> bool:
        """Whether the block still has this very hash; a table that was cut and has grown again has a new one."""
        hashes = self.block_hashes
        return offer.position < len(hashes) and hashes[offer.position] is offer.block_hash

    def copy(self) -> BlockTable:
        """Returns an independent table over the same blocks."""
        return replace(
            self,
            groups=[blocks[:] for blocks in self.groups],
            num_gone=self.num_gone.copy(),
            state=self.state[:],
            block_hashes=self.block_hashes.copy(),
            num_settled=self.num_committed,  # its parent holds the blocks until they are checked
            matched=(0, 0),
            own_end=0,
            borrowed_from=None,
        )


def group_key(block_hash: bytes, group: int) -> bytes:
    """The key under which the prefix cache finds a group's block with this content."""
    return block_hash if group == 0 else block_hash + group.to_bytes(2)
