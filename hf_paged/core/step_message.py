"""A step as bytes: what rank 0 sends to the other ranks of a tensor-parallel model, which run it and decide nothing."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from hf_paged.core.batch import Batch, GroupTables

COPIES = ("swap_outs", "swap_ins", "block_copies", "new_blocks")
"""The fields of `BlockMoves`, in the order of their numbers here."""

Copy = tuple[str, list[tuple[int, int]] | list[int]]
"""One of `COPIES`, and its blocks."""

_ALWAYS = (
    "seq_ids",
    "starts",
    "query_lens",
    "token_ids",
    "positions",
    "embedded",
    "logit_rows",
    "logit_starts",
    "nums_at_once",
)
_MAYBE = ("placeholders", "axes")
_ABSENT = -1


class StepMessage(NamedTuple):
    """What a rank has to do.

    Attributes:
        batch: The step, without what it does to blocks and without its key; number 0: none.
        copies: What is done to blocks before, in this order.
        extra: What else belongs to the step: bytes of the sender's.
    """

    batch: Batch
    copies: list[Copy]
    extra: bytes


def pack(batch: Batch, copies: list[Copy], extra: bytes = b"") -> bytes:
    """The message; see `StepMessage`. What the batch does to blocks is left out: it is in `copies`.

    In front a count of 64-bit words, and those: numbers, and the length of each array behind them.
    """
    head = array("q", [batch.number, batch.num_preempted, batch.is_stalled, len(copies), len(batch.tables), len(extra)])
    parts: list[bytes] = []

    def add(values: array[int] | None) -> None:
        head.append(_ABSENT if values is None else len(values))
        if values:
            parts.append(values.tobytes())

    for name in (*_ALWAYS, *_MAYBE):
        add(getattr(batch, name))
    add(array("q", [number for span in batch.spans for number in span]))
    for name, blocks in copies:
        head.append(COPIES.index(name))
        add(array("q", blocks if name == "new_blocks" else [block for pair in blocks for block in pair]))  # type: ignore[union-attr, arg-type]
    add(batch.tables[0].counts if batch.tables else None)  # the same in all groups
    for table in batch.tables:
        add(table.blocks)
    add(batch.state_blocks)
    return b"".join([len(head).to_bytes(8, "little"), head.tobytes(), *parts, extra])


def unpack(message: bytes | memoryview) -> StepMessage:
    """What was packed.

    Raises:
        ValueError: It is of another length than it says.
    """
    view = memoryview(message)
    reader = _Reader(view)
    (num_head,) = reader.numbers("q", 1)
    head = iter(reader.numbers("q", num_head))
    number, num_preempted, is_stalled, num_copies, num_groups, num_extra = (next(head) for _ in range(6))

    def take(kind: str = "q") -> array[int] | None:
        length = next(head)
        return None if length == _ABSENT else reader.numbers(kind, length)

    fields = {name: take() for name in (*_ALWAYS, *_MAYBE)}
    spans = take() or array("q")
    copies: list[Copy] = []
    for _ in range(num_copies):
        name, blocks = COPIES[next(head)], (take() or array("q")).tolist()
        copies.append((name, blocks if name == "new_blocks" else list(zip(blocks[::2], blocks[1::2], strict=True))))
    counts = take() or array("q")
    tables = tuple(GroupTables(take("i") or array("i"), counts) for _ in range(num_groups))
    state_blocks = take("i") or array("i")
    extra = reader.rest()
    if len(extra) != num_extra:
        raise ValueError(f"a message has {len(extra)} bytes at its end, where it says {num_extra}")
    batch = Batch(
        number=number,
        num_preempted=num_preempted,
        is_stalled=bool(is_stalled),
        spans=tuple(zip(spans[::3], spans[1::3], spans[2::3], strict=True)),
        tables=tables,
        state_blocks=state_blocks,
        **fields,  # type: ignore[arg-type]
    )
    return StepMessage(batch, copies, extra)


class _Reader:
    """Takes arrays from the front of some bytes."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def numbers(self, kind: str, length: int) -> array[int]:
        values: array[int] = array(kind)
        size = length * values.itemsize
        if length < 0 or size > len(self._view):
            raise ValueError(f"a message ends {size - len(self._view)} bytes before an array of {length} numbers does")
        values.frombytes(self._view[:size])
        self._view = self._view[size:]
        return values

    def rest(self) -> bytes:
        return bytes(self._view)
