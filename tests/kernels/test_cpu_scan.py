"""The convolutions and scans in C against float64, and their bits: the same however the tokens come."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.scan_cases import DTYPES, SHAPES, TOLERANCE, T, error_of, inputs, state_for, truth
from hf_paged.kernels import cpu_scan
from hf_paged.kernels.cpu_scan import DELTA, MAX_KEYS, MAX_WIDTH, convolve, scan
from hf_paged.kernels.layers import InputError


@pytest.fixture(params=[1, 2], ids="{} threads".format, autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    assert not isinstance(cpu_scan.load(torch.float32), str)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


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
