"""Scans for tests of the kernels: shapes, inputs, and what comes of them in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.kernels.cpu_scan import DELTA, SELECTIVE, SUM

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # norm of the error over that of the truth
T = 21
# Kind, key heads, heads, K, V, decays and steps a head: sizes around a vector's, a block's and several blocks'.
SHAPES = [
    (DELTA, 2, 4, 16, 8, "one"),
    (DELTA, 1, 3, 33, 65, "each"),
    (DELTA, 2, 2, 128, 128, "one"),
    (SUM, 1, 4, 5, 3, "one"),
    (SUM, 2, 4, 128, 64, "one"),
    (SELECTIVE, 1, 1, 16, 200, "each"),
    (SELECTIVE, 1, 1, 3, 64, "each"),
]


def inputs(
    shape: tuple[int, int, int, int, int, str], dtype: torch.dtype, batch: int = 2, tokens: int = T
) -> dict[str, Any]:
    """Arguments of a scan but for its state; queries, keys and values as views of one tensor, as mixers have them."""
    kind, key_heads, heads, keys, values, many = shape
    generator = torch.Generator().manual_seed(keys)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    sizes = key_heads * keys, key_heads * keys, heads * values
    query, key, value = random(batch, tokens, sum(sizes)).to(dtype).split(sizes, dim=-1)
    rates = -random(heads, values, keys).abs()
    decay = torch.exp(-random(batch, tokens, heads, keys if many == "each" else 1).abs())
    step = random(batch, tokens, heads, values if kind == SELECTIVE else 1).sigmoid()
    return {
        "query": query.unflatten(-1, (key_heads, keys)),
        "key": key.unflatten(-1, (key_heads, keys)),
        "value": value.unflatten(-1, (heads, values)),
        "decay": rates if kind == SELECTIVE else decay,
        "step": step,
        "skip": None if kind == DELTA else random(heads, values),
        "gate": random(batch, tokens, heads, values).to(dtype) if kind == SELECTIVE else None,
        "is_normed": kind == DELTA,
    }


def state_for(shape: tuple[int, int, int, int, int, str], batch: int = 2) -> Tensor:
    """`[batch, heads, K, V]`, within rows of more numbers."""
    _, _, heads, keys, values, _ = shape
    numbers = torch.randn(batch, heads * keys * values + 3, generator=torch.Generator().manual_seed(1))
    return numbers[:, :-3].unflatten(-1, (heads, values, keys)).transpose(-1, -2)


def truth(kind: int, given: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, decay, step, skip, gate = (
        None if given[name] is None else given[name].double()
        for name in ("query", "key", "value", "decay", "step", "skip", "gate")
    )
    heads, state = value.shape[2], state.double()
    query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
    if given["is_normed"]:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        query = query / query.shape[-1] ** 0.5
    outputs = []
    for t in range(value.shape[1]):
        rates = decay.transpose(1, 2) if kind == SELECTIVE else None
        state = state * ((step[:, t, :, None] * rates).exp() if kind == SELECTIVE else decay[:, t, ..., None])
        found = (state * key[:, t, ..., None]).sum(2) if kind == DELTA else 0
        state = state + key[:, t, ..., None] * ((value[:, t] - found) * step[:, t])[:, :, None]
        outputs.append((state * query[:, t, ..., None]).sum(2) + (0 if skip is None else skip * value[:, t]))
    output = torch.stack(outputs, dim=1)
    return output if gate is None else output * nn.functional.silu(gate), state


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())
