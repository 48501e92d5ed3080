"""Convolutions and scans in Triton's interpreter, or on a GPU, over states in pages, against float64 of each row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.kernel_cases import random_tensor, repaired_interpreter, same_bits
from helpers.scan_cases import DTYPES, SHAPES, TOLERANCE, error_of, inputs, truth

pytest.importorskip("triton")  # an extra, and not on every platform
from hf_paged.kernels import launch, triton_scan
from hf_paged.kernels.cpu_scan import DELTA, MAX_WIDTH, SUM
from hf_paged.kernels.layers import InputError
from hf_paged.kernels.paged_state import PagedState, StateRows

LENS = [1, 1, 9, 1, 0, 5, 3]  # new tokens of the rows, and how many are before them
BEFORE = [4, 9, 0, 0, 7, 0, 2]
AT_ONCE = torch.tensor([5, 3, 9, 0, 0, 2, 3])  # tokens that came together; a row's first one counts in any case
PADDING = 1
TOKENS = sum(LENS) + PADDING


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a test's tensors are made."""
    if launch.is_interpreting() != (request.param == "cpu") or not (
        request.param == "cpu" or torch.cuda.is_available()
    ):
        pytest.skip("needs TRITON_INTERPRET=1 on a CPU; it unset, and a CUDA device, on a GPU")
    with repaired_interpreter() if request.param == "cpu" else nullcontext():
        yield request.param


def rows_for(lens: list[int], before: list[int], pages: int) -> StateRows:
    """Each row's pages anywhere in the pool."""
    counts, old = torch.tensor(lens), torch.tensor(before)
    order = torch.randperm(len(lens) * pages, generator=torch.Generator().manual_seed(1)) + 1
    start_loc = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    is_decode = all(n == 1 for n in lens)
    lens_of_rows = (old + counts).int(), start_loc, AT_ONCE[: len(lens)].int()
    return StateRows(order.view(len(lens), pages), *lens_of_rows, is_decode, False, not is_decode)


class Pool:
    """States of rows in pages of `page` numbers, from `offset` on; all others are NaN."""

    def __init__(self, rows: StateRows, states: Tensor, page: int, offset: int) -> None:
        self.rows, self.offset, self.shape = rows, offset, tuple(states.shape[1:])
        self.pages = torch.full((rows.pages.numel() + 2, page), float("nan"), dtype=states.dtype)
        self.of_rows = torch.full((len(states), rows.pages.shape[1] * page), float("nan"), dtype=states.dtype)
        self.of_rows[:, offset : offset + states[0].numel()] = states.flatten(1)
        self.of_rows[rows.seq_lens == rows.start_loc.diff()] = float("nan")  # what was there before them
        self.pages[rows.pages] = self.of_rows.unflatten(1, (-1, page))

    @property
    def state(self) -> PagedState:
        strides = torch.empty(self.shape).stride()
        return PagedState(self.rows, self.pages, self.offset, (len(self.rows.pages), *self.shape), strides)

    def read(self) -> Tensor:
        """The states that are there now; nothing else has changed."""
        own, size = self.pages[self.rows.pages].flatten(1), self.of_rows.clone()
        place = slice(self.offset, self.offset + torch.empty(self.shape).numel())
        size[:, place] = own[:, place]
        assert same_bits(size, own) and self.pages[[0, -1]].isnan().all(), "written beside the state"
        return own[:, place].unflatten(1, self.shape)


Run = Callable[..., Tensor]


@pytest.fixture
def run(device: str) -> Run:
    """Calls a kernel's function with what it is given on the device; what it makes of it, states too, is on the CPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, PagedState):
            own = value.rows
            rows = replace(
                own, **{name: moved(getattr(own, name)) for name in ("pages", "seq_lens", "start_loc", "nums_at_once")}
            )
            return replace(value, rows=rows, pool=moved(value.pool))
        return value.to(device) if isinstance(value, Tensor) else value

    def run(function: Callable[..., Tensor], *args: Any, **given: Any) -> Tensor:
        states = [value for value in (*args, *given.values()) if isinstance(value, PagedState)]
        own_args, own = list(map(moved, args)), {name: moved(value) for name, value in given.items()}
        output = function(*own_args, **own).to("cpu")
        for state, there in zip(
            states, [x for x in (*own_args, *own.values()) if isinstance(x, PagedState)], strict=True
        ):
            state.pool.copy_(there.pool)
        return output

    return run


@pytest.mark.parametrize("page", [64, 50_000], ids="pages of {}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[3] < 100], ids=str)
def test_scans(shape: tuple[int, int, int, int, int, str], dtype: torch.dtype, page: int, run: Run) -> None:
    """Would break: a row that reads another's state, one that begins with what its pages held, a state not written."""
    kind, _, heads, keys, values, _ = shape
    given = inputs(shape, dtype, batch=1, tokens=TOKENS)
    before = random_tensor(len(LENS), heads, values, keys, dtype=torch.float32)
    offset, size = 6, heads * values * keys
    rows = rows_for(LENS, BEFORE, -(-(offset + size) // page))
    pool, limits = Pool(rows, before, page, offset), (0.3, 0.6) if kind == SUM else None
    if kind == SUM:  # decays by a rate a head
        rate = -random_tensor(heads, dtype=torch.float32).abs()
    own = given | ({"decay": rate, "limits": limits} if kind == SUM else {})
    output = run(triton_scan.scan, kind, state=pool.state.mT, **own)
    assert output.shape == given["value"].shape and output.dtype is dtype
    found = pool.read()
    for row, (start, end) in enumerate(itertools.pairwise(rows.start_loc.tolist())):
        if start == end:
            assert torch.equal(found[row], before[row])
            continue
        old = before[row : row + 1].transpose(-1, -2) * (BEFORE[row] > 0)
        if kind == SUM:
            step, places = given["step"][:, start:end], torch.arange(end - start) + BEFORE[row]
            together = (places < AT_ONCE[row].clamp(min=1))[:, None, None]
            step = torch.where(together, step.clamp(*limits), step)
            given["step"][:, start:end], given["decay"][:, start:end] = step, (step * rate[:, None]).exp()
        expected = truth(kind, _tokens(given, start, end), old)
        assert error_of(output[:, start:end], expected[0]) < TOLERANCE[dtype], row
        assert error_of(found[row].transpose(-1, -2), expected[1][0]) < TOLERANCE[torch.float32], row
    assert not output[:, TOKENS - PADDING :].any()


def _tokens(given: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    return {
        name: value[:, start:end] if isinstance(value, Tensor) and value.ndim == 4 else value
        for name, value in given.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_one_row(dtype: torch.dtype, run: Run) -> None:
    """The bits of a prompt don't know where it was cut."""
    shape = SHAPES[1]
    kind, _, heads, keys, values, _ = shape
    given = inputs(shape, dtype, batch=1)
    results = []
    for cuts in ([0, 21], [0, 1, 21], [0, 7, 8, 15, 21]):
        parts, pages = [], None
        for start, end in itertools.pairwise(cuts):
            rows = rows_for([end - start], [start], 5)
            pool = Pool(rows, torch.zeros(1, heads, keys, values), 2048, 3)
            pool.pages = pool.pages if pages is None else pages
            parts.append(run(triton_scan.scan, kind, state=pool.state, **_tokens(given, start, end)))
            pages = pool.pages
        results.append((torch.cat(parts, dim=1), pages))
    for output, pages in results[1:]:
        assert torch.equal(output, results[0][0]) and same_bits(pages, results[0][1])


@pytest.mark.parametrize("page", [32, 4096], ids="pages of {}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("channels", "width", "held", "steps", "is_silu"),
    [
        (70, 4, 4, (LENS, BEFORE), True),
        (70, 4, 3, (LENS, BEFORE), False),
        (9, 3, MAX_WIDTH, (LENS, BEFORE), False),
        (200, 4, 4, ([1, 1, 1], [5, 0, 1]), True),
        (33, 1, 1, ([40, 17], [0, 3]), False),
    ],
)
def test_convolutions(
    channels: int, width: int, held: int, steps: tuple[list[int], list[int]], is_silu: bool, dtype: torch.dtype,
    page: int, run: Run,
) -> None:  # fmt: skip
    """Each row behind its own tokens, of which the last stay as the state; with fewer of them, behind zeros."""
    (lens, before), offset = steps, 5
    total = sum(lens)
    states = random_tensor(total, channels, dtype=dtype, seed=1)
    weight, bias = random_tensor(channels, width, dtype=dtype, seed=2), random_tensor(channels, dtype=dtype, seed=3)
    old = random_tensor(len(lens), channels, held, dtype=dtype, seed=4)
    rows = rows_for(lens, before, -(-(offset + channels * held) // page))
    for own_bias in (None, bias):
        pool = Pool(rows, old, page, offset)
        output = run(triton_scan.convolve, states.t()[None], weight, own_bias, is_silu, pool.state)
        found = pool.read()
        for row, (start, end) in enumerate(itertools.pairwise(rows.start_loc.tolist())):
            if start == end:
                assert torch.equal(found[row], old[row])
                continue
            whole = torch.cat([old[row] * (before[row] > 0), states[start:end].t()], dim=1)
            assert torch.equal(found[row], whole[:, -held:]), row
            wide = nn.functional.pad(whole.double(), (width, 0))[None]
            expected = nn.functional.conv1d(
                wide, weight.double()[:, None], None if own_bias is None else bias.double(), groups=channels
            )[0, :, -(end - start) :]
            expected = nn.functional.silu(expected) if is_silu else expected
            assert error_of(output[0, :, start:end], expected) < TOLERANCE[dtype], row


def test_inputs_that_are_refused() -> None:
    shape = SHAPES[0]
    given, rows = inputs(shape, torch.float32, batch=1), rows_for([21], [0], 2)
    state = Pool(rows, torch.zeros(1, 4, 16, 8), 512, 0).state
    for change in (
        {"query": given["query"].double()},
        {"value": given["value"][:, 1:]},
        {"decay": given["decay"].bfloat16()},
        {"step": given["step"][..., 0]},
        {"state": state.mT},
        {"skip": torch.zeros(4, 9)},
    ):
        with pytest.raises(InputError, match="scan takes"):
            triton_scan.scan(DELTA, **(given | {"state": state} | change))
    held = Pool(rows, torch.zeros(1, 3, 2), 512, 0).state
    for weight in (torch.zeros(3, MAX_WIDTH + 1), torch.zeros(4, 2), torch.zeros(3, 2).bfloat16(), torch.zeros(3, 4)):
        with pytest.raises(InputError, match="convolve takes"):
            triton_scan.convolve(torch.zeros(1, 3, 5), weight, None, False, held)
