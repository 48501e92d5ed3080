"""The matrix product in C against float64, over all kinds of shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.kernel_cases import random_tensor
from hf_paged.kernels import cpu_linear
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.kernels.layers import InputError

F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 1e-6, BF16: 4e-3}  # norm of the error over norm of the truth; bfloat16 rounds its results
NAN = float("nan")


def kernel_for(dtype: torch.dtype) -> CPULinear:
    loaded = cpu_linear.load(dtype)
    assert isinstance(loaded, CPULinear), loaded
    return loaded


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-300))


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_shapes(dtype: torch.dtype, has_bias: bool, threads: int) -> None:
    """Rows around a tile's, columns around a panel's, on every instruction set; nothing is written beyond."""
    kernel = kernel_for(dtype)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 40):
        for columns in (1, 11, 12, 13, 23, 24, 25, 47, 48, 49, 97, 260):
            for width in (2, 6, 48, 258):
                states = random_tensor(rows, width, dtype=dtype, seed=rows)
                weight = random_tensor(columns, width, dtype=dtype, seed=columns)
                bias = random_tensor(columns, dtype=dtype, seed=3) if has_bias else None
                expected = states.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
                found = kernel.multiply(states, kernel.pack(weight), bias)
                assert found.shape == (rows, columns) and found.dtype is dtype
                assert error_of(found, expected) <= TOLERANCE[dtype], (rows, columns, width)


def test_an_odd_width() -> None:
    states, weight = random_tensor(3, 7, dtype=F32, seed=0), random_tensor(50, 7, dtype=F32, seed=1)
    kernel = kernel_for(F32)
    assert error_of(kernel.multiply(states, kernel.pack(weight), None), states.double() @ weight.double().t()) < 1e-6
    with pytest.raises(InputError, match="even width"):
        kernel_for(BF16).pack(weight.to(BF16))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_row_is_the_same_beside_any_others(dtype: torch.dtype, threads: int) -> None:
    """Bit for bit: a request's tokens don't depend on what shares its steps, as far as these products go."""
    kernel = kernel_for(dtype)
    weight = kernel.pack(random_tensor(700, 512, dtype=dtype, seed=1))
    states = random_tensor(37, 512, dtype=dtype, seed=2)
    whole = kernel.multiply(states, weight, None)
    for first, last in ((0, 1), (5, 6), (36, 37), (3, 7), (0, 36), (9, 20)):
        assert torch.equal(kernel.multiply(states[first:last], weight, None), whole[first:last])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_numbers_that_are_none(dtype: torch.dtype) -> None:
    """They stay in their row and, of a weight, in their column, also in a panel that is not full."""
    kernel = kernel_for(dtype)
    states, weight = random_tensor(9, 64, dtype=dtype, seed=1), random_tensor(50, 64, dtype=dtype, seed=2)
    clean = kernel.multiply(states, kernel.pack(weight), None)
    states[4, 7], weight[49, 3], weight[1, 63] = NAN, float("inf"), NAN
    found = kernel.multiply(states, kernel.pack(weight), None)
    is_touched = torch.zeros(9, 50, dtype=torch.bool)
    is_touched[4], is_touched[:, 49], is_touched[:, 1] = True, True, True
    assert torch.equal(found.isfinite(), ~is_touched)
    assert torch.equal(found[~is_touched], clean[~is_touched])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_strides(dtype: torch.dtype) -> None:
    """Any strides of states and of a weight; results are contiguous and have the states' leading dimensions."""
    kernel = kernel_for(dtype)
    plain = random_tensor(50, 32, dtype=dtype, seed=1)
    weights = {"plain": plain, "transposed": plain.t().contiguous().t(), "part": plain.repeat(1, 2)[:, :32]}
    states = random_tensor(2, 3, 32, dtype=dtype, seed=2)
    given = {
        "plain": states,
        "every second": states.repeat_interleave(2, dim=-1)[..., ::2],
        "transposed": states.transpose(0, 1).contiguous().transpose(0, 1),
        "one row": states[0, 0],
        "none": states[:0],
    }
    for weight in weights.values():
        packed = kernel.pack(weight)
        for each in given.values():
            found = kernel.multiply(each, packed, None)
            assert found.shape == (*each.shape[:-1], 50) and found.is_contiguous()
            assert error_of(found, each.double() @ plain.double().t()) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    "bad",
    [
        {"states": torch.zeros(2, 31)},
        {"states": torch.zeros(())},
        {"states": torch.zeros(2, 32, dtype=torch.float64)},
        {"states": torch.zeros(2, 32, device="meta")},
        {"bias": torch.zeros(49)},
        {"bias": torch.zeros(100)[::2]},
        {"bias": torch.zeros(50, dtype=BF16)},
        {"bias": torch.zeros(50, device="meta")},
    ],
    ids=str,
)
def test_what_it_is_not_made_for(bad: dict[str, Tensor]) -> None:
    kernel = kernel_for(F32)
    packed = kernel.pack(torch.ones(50, 32))
    given = {"states": torch.ones(2, 32), "bias": torch.ones(50)}
    assert (kernel.multiply(given["states"], packed, given["bias"]) == 33).all()
    with pytest.raises(InputError, match="multiply takes"):
        kernel.multiply(**{"weight": packed, **given, **bad})


def test_types_that_have_none() -> None:
    assert "float16" in str(cpu_linear.load(torch.float16))
    with pytest.raises(InputError):
        kernel_for(F32).pack(torch.zeros(4, 4, dtype=BF16))


@pytest.mark.parametrize("columns", [1, 5, 16, 32, 33, 64])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_weight_is_given_back(dtype: torch.dtype, columns: int) -> None:
    """Would break: one of a single panel, whose columns lie beside each other there, given back with those strides."""
    kernel = kernel_for(dtype)
    weight = random_tensor(columns, 64, dtype=dtype, seed=3)
    found = kernel.unpack(kernel.pack(weight))
    assert torch.equal(found, weight) and found.is_contiguous()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_several_weights_in_one_pass(dtype: torch.dtype, threads: int) -> None:
    """Bit for bit what each gives alone, whatever their sizes, with a bias or without."""
    kernel = kernel_for(dtype)
    states = random_tensor(11, 512, dtype=dtype, seed=2)
    sizes = (700, 48, 1, 0, 96, 260)
    weights = [kernel.pack(random_tensor(size, 512, dtype=dtype, seed=size)) for size in sizes]
    biases = [random_tensor(size, dtype=dtype, seed=1) if size % 8 else None for size in sizes]
    for rows in (1, 8, 11, 0):
        found = kernel.multiply_all(states[:rows], list(zip(weights, biases, strict=True)))
        for one, weight, bias in zip(found, weights, biases, strict=True):
            assert torch.equal(one, kernel.multiply(states[:rows], weight, bias)) and one.is_contiguous()
    with pytest.raises(InputError, match="width 512"):
        kernel.multiply_all(states, [(weights[0], None), (kernel.pack(torch.zeros(4, 4, dtype=dtype)), None)])
