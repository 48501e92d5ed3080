"""The least time that a decode step can take on a card: operation by operation, for what it reads or computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operation:
    """What has to be done, however it is done.

    Attributes:
        name: Of the operation.
        num_bytes: That are read: weights, or keys and values. What passes between operations is left out.
        flops: Multiplications and additions.
        times: In one step.
    """

    name: str
    num_bytes: int
    flops: int
    times: int


def decode_operations(config: Any, batch: int, context: int, itemsize: int) -> list[Operation]:
    """The operations of a step of `batch` sequences of `context` tokens: a model of Llama's shape, by its config."""
    hidden, heads, kv_heads, dim = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    layers = config.num_hidden_layers

    def product(name: str, weights: int, times: int) -> Operation:
        return Operation(name, weights * itemsize, 2 * weights * batch, times)

    kv_bytes = 2 * batch * context * kv_heads * dim * itemsize
    return [
        product("query, key, value", hidden * (heads + 2 * kv_heads) * dim, layers),
        Operation("attention", kv_bytes, 4 * batch * context * heads * dim, layers),
        product("output", heads * dim * hidden, layers),
        product("gate, up", 2 * hidden * config.intermediate_size, layers),
        product("down", config.intermediate_size * hidden, layers),
        product("logits", hidden * config.vocab_size, 1),
    ]


def roofline_ms(operations: Iterable[Operation], bytes_per_second: float, flops_per_second: float) -> float:
    """Milliseconds: operations run one after another, so each takes the longer of its two, and these are added up."""
    seconds = (op.times * max(op.num_bytes / bytes_per_second, op.flops / flops_per_second) for op in operations)
    return 1e3 * sum(seconds)
