"""`ROW`: what the sampling kernel is told of a row, in words of 32 bits."""

from __future__ import annotations

import numpy as np

ROW = np.dtype(
    [
        ("source", "i4"),  # its row of the logits
        ("is_drawn", "i4"),  # or its likeliest token is taken
        ("scale", "f4"),  # 1 / temperature
        ("top_k", "i4"),  # 0: all
        ("cut", "f4"),  # 1 - top_p; below 0: there is none
        ("min_p", "f4"),  # 0: none
        ("seed", "u8"),
        ("round", "u8"),  # where the generator stands: a fourth of torch's offset
        ("threads", "i4"),  # that draw
        ("first", "i4"),  # number that is drawn for it
        ("mask", "i4"),  # its row of the masks; below 0: all tokens are allowed
        ("edited", "i4"),  # its row of the workspace, where its logits are changed; below 0: they are not
        ("table", "i4"),  # its row of the tokens; below 0: it has none
        ("length", "i4"),  # tokens that it has there
        ("start", "i4"),  # the first of them that was generated
        ("penalty", "f4"),  # of what is there at all
        ("inverse", "f4"),  # 1 / penalty
        ("presence", "f4"),
        ("frequency", "f4"),
        ("bias", "i4"),  # the first of its biases
        ("biases", "i4"),  # how many it has
        ("unused", "i4"),  # a row begins at a multiple of 16 bytes
    ]
)  # fmt: skip

OFFSETS: list[int] = [ROW.fields[name][1] for name in ROW.names]  # type: ignore[index,union-attr]  # of the fields


def plain_rows(count: int) -> np.ndarray:
    """`[count]` of `ROW`, which take the likeliest token."""
    rows = np.zeros(count, ROW)
    for name in ("scale", "penalty", "inverse", "threads"):
        rows[name] = 1
    for name in ("cut", "mask", "edited", "table"):
        rows[name] = -1
    return rows
