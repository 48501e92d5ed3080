"""The convolutions and scans in C against float64, and their bits: the same however the tokens come."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_paged.kernels import cpu_scan
from hf_paged.kernels.cpu_scan import DELTA, MAX_KEYS, MAX_WIDTH, SELECTIVE, SUM, convolve, scan
from hf_paged.kernels.layers import InputError

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


@pytest.fixture(params=[1, 2], ids="{} threads".format, autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    assert not isinstance(cpu_scan.load(torch.float32), str)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def inputs(shape: tuple[int, int, int, int, int, str], dtype: torch.dtype, batch: int = 2) -> dict[str, Any]:
    """Arguments of a scan but for its state; queries, keys and values as views of one tensor, as mixers have them."""
    kind, key_heads, heads, keys, values, many = shape
    generator = torch.Generator().manual_seed(keys)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    sizes = key_heads * keys, key_heads * keys, heads * values
    query, key, value = random(batch, T, sum(sizes)).to(dtype).split(sizes, dim=-1)
    rates = -random(heads, values, keys).abs()
    decay = torch.exp(-random(batch, T, heads, keys if many == "each" else 1).abs())
    step = random(batch, T, heads, values if kind == SELECTIVE else 1).sigmoid()
    return {
        "query": query.unflatten(-1, (key_heads, keys)),
        "key": key.unflatten(-1, (key_heads, keys)),
        "value": value.unflatten(-1, (heads, values)),
        "decay": rates if kind == SELECTIVE else decay,
        "step": step,
        "skip": None if kind == DELTA else random(heads, values),
        "gate": random(batch, T, heads, values).to(dtype) if kind == SELECTIVE else None,
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


def part_of(given: dict[str, Any], rows: slice, tokens: slice) -> dict[str, Any]:
    return {
        name: value[rows, tokens] if isinstance(value, Tensor) and value.ndim == 4 else value
        for name, value in given.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scans(shape: tuple[int, int, int, int, int, str], dtype: torch.dtype) -> None:
    given, state = inputs(shape, dtype), state_for(shape)
    expected = truth(shape[0], given, state)
    output = scan(shape[0], state=state, **given)
    assert output.dtype is dtype and output.is_contiguous()
    assert error_of(output, expected[0]) < TOLERANCE[dtype] and error_of(state, expected[1]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_scans(shape: tuple[int, int, int, int, int, str], dtype: torch.dtype) -> None:
    """Would break: another formula for single tokens, sums in an order that follows the rows, threads or cuts."""
    given, state = inputs(shape, dtype), state_for(shape)
    expected = scan(shape[0], state=state, **given)
    for row in range(2):
        for cuts in ([0, T], [0, 1, T], [0, 7, 8, 15, T], list(range(T + 1))):
            own, rows = state_for(shape)[row : row + 1], slice(row, row + 1)
            parts = [
                scan(shape[0], state=own, **part_of(given, rows, slice(start, end)))
                for start, end in itertools.pairwise(cuts)
            ]
            assert torch.equal(torch.cat(parts, dim=1), expected[rows]) and torch.equal(own, state[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "width"), [(1, 1), (63, 4), (65, 3), (500, MAX_WIDTH)])
@pytest.mark.parametrize("is_silu", [False, True])
def test_convolutions(channels: int, width: int, is_silu: bool, dtype: torch.dtype) -> None:
    """Also the bits: of each token after a state, of any strides."""
    generator = torch.Generator().manual_seed(channels)
    states = torch.randn(2, T, channels, generator=generator).to(dtype).transpose(1, 2)
    weight = torch.randn(channels, width, generator=generator).to(dtype)
    for bias in (None, torch.randn(channels, generator=generator).to(dtype)):
        wide = None if bias is None else bias.double()
        expected = nn.functional.conv1d(
            states.double(), weight.double()[:, None], wide, padding=width - 1, groups=channels
        )[..., :T]
        output = convolve(states, weight, bias, is_silu)
        assert error_of(output, nn.functional.silu(expected) if is_silu else expected) < TOLERANCE[dtype]
        padded = nn.functional.pad(states, (width, 0)).contiguous()
        for t in range(0, T, 4):
            one = convolve(padded[:1, :, t : t + width + 1], weight, bias, is_silu)
            assert torch.equal(one[..., -1], output[:1, :, t])


def test_inputs_that_are_refused() -> None:
    shape = SHAPES[0]
    given, state = inputs(shape, torch.float32), state_for(shape)
    zeros = torch.zeros
    wrong = [
        {"query": given["query"].double()},
        {"value": given["value"][:, 1:]},
        {"decay": given["decay"].bfloat16()},
        {"step": given["step"][..., 0]},
        {"state": state.transpose(-1, -2)},
        {"skip": zeros(4, 9)},
        {"query": zeros(2, T, 2, MAX_KEYS + 1), "key": zeros(2, T, 2, MAX_KEYS + 1)},
    ]
    for change in wrong:
        with pytest.raises(InputError, match="scan takes"):
            scan(DELTA, **(given | {"state": state} | change))
    for weight in (zeros(3, MAX_WIDTH + 1), zeros(4, 2), zeros(3, 2).bfloat16()):
        with pytest.raises(InputError, match="convolve takes"):
            convolve(zeros(1, 3, 5), weight, None, False)
