"""The matrix product in C against float64, over all kinds of shapes and layouts, on each instruction set."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.kernel_cases import INSTRUCTIONS_HERE, random_tensor
from hf_paged.kernels import cpu_linear
from hf_paged.kernels.c_compiler import INSTRUCTIONS
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.kernels.layers import InputError

F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 1e-6, BF16: 4e-3}  # norm of the error over norm of the truth; bfloat16 rounds its results
NAN = float("nan")
PROT_NONE = 0
IS_SANITIZED = "-fsanitize" in os.environ.get("CC", "")
KERNELS = [
    pytest.param((dtype, name), id=f"{str(dtype).removeprefix('torch.')}-{name}")
    for dtype in (F32, BF16)
    for name in INSTRUCTIONS_HERE
    if dtype is BF16 or name != "AVX512_BF16"
]


def kernel_for(dtype: torch.dtype, instructions: str) -> CPULinear:
    loaded = cpu_linear.load(dtype, instructions)
    assert isinstance(loaded, CPULinear), loaded
    return loaded


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> CPULinear:
    return kernel_for(*request.param)


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-300))


def truth(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return states.double() @ weight.double().t() + (0.0 if bias is None else bias.double())


# Ways for a weight to lie: each is given `[columns, width]`, contiguous, and returns one with the same elements.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda weight: weight,
    "rows apart": lambda weight: torch.cat([weight, weight[:, :1] * NAN], dim=1)[:, :-1],
    "transposed": lambda weight: weight.t().contiguous().t(),
    "transposed, rows apart": lambda weight: torch.cat([weight, weight[:1] * NAN]).t().contiguous().t()[:-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes(kernel: CPULinear, layout: str) -> None:
    """Rows around a tile's, columns around a panel's, a few elements beyond a vector."""
    rng = random.Random(layout)
    shapes = [(rows, columns, width) for rows in (1, 3, 8) for columns in range(1, 14) for width in (1, 7, 33)]
    shapes += [(rng.randint(1, 40), rng.randint(1, 400), rng.randint(1, 600)) for _ in range(25)]
    shapes += [(rng.randint(64, 200), rng.randint(1, 400), rng.randint(1, 600)) for _ in range(10)]
    for rows, columns, width in shapes:
        states = random_tensor(rows, width, dtype=kernel.dtype, seed=rows)
        weight = random_tensor(columns, width, dtype=kernel.dtype, seed=columns)
        bias = random_tensor(columns, dtype=kernel.dtype, seed=3) if columns % 3 else None
        found = kernel.multiply(states, LAYOUTS[layout](weight), bias)
        assert found.shape == (rows, columns) and found.dtype is kernel.dtype
        assert error_of(found, truth(states, weight, bias)) <= TOLERANCE[kernel.dtype], (rows, columns, width)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_the_same_beside_any_others(kernel: CPULinear, layout: str, threads: int) -> None:
    """Bit for bit, however rows are split into calls: a request's tokens don't depend on what shares its steps."""
    rng = random.Random(layout)
    for columns, width in [(300, 512), (13, 1), (131, 333), (1, 2049), (7, 2048), (97, 1100), (5, 4099)]:
        weight = LAYOUTS[layout](random_tensor(columns, width, dtype=kernel.dtype, seed=columns))
        bias = random_tensor(columns, dtype=kernel.dtype, seed=3)
        states = random_tensor(75, width, dtype=kernel.dtype, seed=2)
        torch.set_num_threads(1)
        alone = torch.cat([kernel.multiply(row, weight, bias) for row in states.split(1)])
        torch.set_num_threads(threads)
        for count in (0, 1, 20):
            cuts = sorted(rng.sample([5, 64, 70] if count == 1 else range(1, len(states)), count))
            pieces = states.tensor_split(cuts)
            assert torch.equal(torch.cat([kernel.multiply(piece, weight, bias) for piece in pieces]), alone)


def test_columns_are_the_same_in_any_place(kernel: CPULinear) -> None:
    """What a part of a weight gives, as one that is shared out: bit for bit what the whole gives there."""
    for rows, (name, layout) in itertools.product((21, 70), LAYOUTS.items()):
        states = random_tensor(rows, 259, dtype=kernel.dtype, seed=2)
        weight = layout(random_tensor(340, 259, dtype=kernel.dtype, seed=1))
        whole = kernel.multiply(states, weight, None)
        for first, last in ((0, 1), (1, 14), (100, 140), (7, 330)):
            assert torch.equal(kernel.multiply(states, weight[first:last], None), whole[:, first:last]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_weights_in_one_pass(kernel: CPULinear, layout: str, threads: int) -> None:
    """Bit for bit what each gives alone, whatever their sizes and layouts, with a bias or without."""
    states = random_tensor(70, 513, dtype=kernel.dtype, seed=2)
    sizes = (700, 48, 1, 0, 96, 260)
    weights = [random_tensor(size, 513, dtype=kernel.dtype, seed=size) for size in sizes]
    weights[::2] = [LAYOUTS[layout](weight) for weight in weights[::2]]
    biases = [random_tensor(size, dtype=kernel.dtype, seed=1) if size % 8 else None for size in sizes]
    for rows in (1, 8, 11, 70, 0):
        found = kernel.multiply_all(states[:rows], list(zip(weights, biases, strict=True)))
        for one, weight, bias in zip(found, weights, biases, strict=True):
            assert torch.equal(one, kernel.multiply(states[:rows], weight, bias)) and one.is_contiguous()
    with pytest.raises(InputError, match=r"\[columns, 513\]"):
        kernel.multiply_all(states, [(weights[0], None), (torch.zeros(4, 4, dtype=kernel.dtype), None)])


def test_numbers_that_are_none(kernel: CPULinear) -> None:
    """They stay in their row and, of a weight, in their column, also in a vector that is not full."""
    for layout in LAYOUTS.values():
        for rows, width in ((9, 64), (9, 77), (65, 77)):
            states = random_tensor(rows, width, dtype=kernel.dtype, seed=1)
            weight = random_tensor(50, width, dtype=kernel.dtype, seed=2)
            clean = kernel.multiply(states, layout(weight), None)
            states[4, 7], weight[49, 3], weight[1, width - 1], weight[7, 60] = NAN, float("inf"), NAN, -float("inf")
            found = kernel.multiply(states, layout(weight), None)
            is_touched = torch.zeros(rows, 50, dtype=torch.bool)
            is_touched[4], is_touched[:, 49], is_touched[:, 1], is_touched[:, 7] = True, True, True, True
            assert torch.equal(found.isfinite(), ~is_touched)
            assert torch.equal(found[~is_touched], clean[~is_touched])


def at_the_end_of_a_page(tensor: Tensor, memory: mmap.mmap) -> Tensor:
    """A copy whose last element is the last that can be read."""
    first = len(memory) - mmap.PAGESIZE - tensor.numel() * tensor.element_size()
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=first).view(tensor.shape)
    return copy.copy_(tensor)


@pytest.mark.skipif(os.name != "posix" or IS_SANITIZED, reason="protects a page")
def test_nothing_is_read_beyond(kernel: CPULinear) -> None:
    """Of states, weight and bias: behind each lies a page that ends the process that reads it."""
    libc = ctypes.CDLL(None, use_errno=True)
    memories = [mmap.mmap(-1, 40 * mmap.PAGESIZE) for _ in range(3)]
    for memory in memories:
        end = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + len(memory) - mmap.PAGESIZE
        assert libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE) == 0
    for rows, columns, width in [(1, 1, 1), (3, 13, 7), (9, 50, 33), (5, 97, 31), (4, 6, 515), (66, 12, 33)]:
        shapes = (rows, width), (columns, width), (columns,)
        given = [random_tensor(*shape, dtype=kernel.dtype, seed=1) for shape in shapes]
        states, weight, bias = map(at_the_end_of_a_page, given, memories)
        assert error_of(kernel.multiply(states, weight, bias), truth(*given)) <= TOLERANCE[kernel.dtype]
        turned = at_the_end_of_a_page(given[1].t().contiguous(), memories[1]).t()
        assert error_of(kernel.multiply(states, turned, bias), truth(*given)) <= TOLERANCE[kernel.dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_states(kernel: CPULinear, layout: str) -> None:
    """Any; results are contiguous and have the states' leading dimensions."""
    plain = random_tensor(50, 32, dtype=kernel.dtype, seed=1)
    states = random_tensor(2, 3, 32, dtype=kernel.dtype, seed=2)
    given = {
        "plain": states,
        "every second": states.repeat_interleave(2, dim=-1)[..., ::2],
        "transposed": states.transpose(0, 1).contiguous().transpose(0, 1),
        "one row": states[0, 0],
        "none": states[:0],
    }
    for each in given.values():
        found = kernel.multiply(each, LAYOUTS[layout](plain), None)
        assert found.shape == (*each.shape[:-1], 50) and found.is_contiguous()
        assert error_of(found, truth(each, plain, None)) <= TOLERANCE[kernel.dtype]


def test_sizes_of_none(kernel: CPULinear) -> None:
    nothing = torch.empty(0, dtype=kernel.dtype)
    bias = random_tensor(3, dtype=kernel.dtype, seed=1)
    for rows in (2, 70):
        assert torch.equal(kernel.multiply(nothing.view(rows, 0), nothing.view(3, 0), bias), bias.expand(rows, 3))
        assert kernel.multiply(torch.ones(rows, 4, dtype=kernel.dtype), nothing.view(0, 4), None).shape == (rows, 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"states": torch.zeros(2, 31)},
        {"states": torch.zeros(())},
        {"states": torch.zeros(2, 32, dtype=torch.float64)},
        {"states": torch.zeros(2, 32, device="meta")},
        {"weight": torch.zeros(50, 31)},
        {"weight": torch.zeros(32)},
        {"weight": torch.zeros(50, 32, dtype=BF16)},
        {"weight": torch.zeros(50, 32, device="meta")},
        {"weight": torch.zeros(100, 64)[::2, ::2]},
        {"weight": torch.zeros(50, 32).to_sparse()},
        {"bias": torch.zeros(49)},
        {"bias": torch.zeros(100)[::2]},
        {"bias": torch.zeros(50, dtype=BF16)},
        {"bias": torch.zeros(50, device="meta")},
    ],
    ids=str,
)
def test_what_it_is_not_made_for(bad: dict[str, Tensor]) -> None:
    kernel = kernel_for(F32, "DEFAULT")
    given: dict[str, Any] = {"states": torch.ones(2, 32), "weight": torch.ones(50, 32), "bias": torch.ones(50)}
    assert (kernel.multiply(**given) == 33).all() and kernel.takes(given["weight"])
    with pytest.raises(InputError, match="multiply takes"):
        kernel.multiply(**{**given, **bad})


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another type; and bfloat16 where torch multiplies it by AMX, for any number of rows."""
    assert "float16" in str(cpu_linear.load(torch.float16))
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda found=has_amx: found)
        cpu_linear.load.cache_clear()
        assert ("AMX" in str(cpu_linear.load(BF16))) == has_amx
        assert isinstance(cpu_linear.load(F32), CPULinear)
    cpu_linear.load.cache_clear()


def test_instructions_have_names() -> None:
    assert {*INSTRUCTIONS_HERE} <= {"DEFAULT", *INSTRUCTIONS}
