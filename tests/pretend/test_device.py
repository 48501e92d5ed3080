"""The pretended device itself: what it is there to find, it finds."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import cache

import pretend_cuda
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from helpers.waiting import join


def on_device(*numbers: float) -> Tensor:
    return torch.tensor(numbers, device="cuda")


@cache
def experts(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the matrices of two experts, and where each one's rows end."""
    ends = torch.tensor([2, 4], dtype=torch.int32, device="cuda")
    return torch.ones(4, 16, dtype=dtype, device="cuda"), torch.ones(2, 16, 16, dtype=dtype, device="cuda"), ends


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.sum() > 0),
    "cpu": lambda x: x.cpu(),
    "to_the_device": lambda x: torch.ones(3).to("cuda"),
    "made_of_numbers": lambda x: torch.tensor([1.0], device="cuda"),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "into_a_mask": lambda x: x.index_put_((x > 0,), x.clone()),
    "indices_on_the_host": lambda x: x[torch.tensor([0, 1])],
    "equal": lambda x: torch.equal(x, x + 1),
    "unique": lambda x: x.unique(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "device": lambda x: torch.cuda.synchronize(),
    "grouped_float32": lambda x: torch._grouped_mm(*experts(torch.float32)),
    "not_pinned": lambda x: torch.ones(3).to("cuda", non_blocking=True),
    "not_pinned_back": lambda x: torch.empty(3).copy_(x, non_blocking=True),
}
"""What makes the host wait."""

GOES_ON: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + 1).softmax(-1).argmax(),
    "views": lambda x: x[1:].view(2, 1).expand(2, 3).transpose(0, 1).contiguous(),
    "factories": lambda x: torch.zeros(3, device="cuda") + torch.arange(3, device="cuda"),
    "number": lambda x: x[0].fill_(2.0),
    "number_into_a_mask": lambda x: x.masked_fill_(x > 1, 2.0).index_put_((x > 1,), x[0]),
    "indices": lambda x: x[torch.arange(2, device="cuda")],
    "grouped_bfloat16": lambda x: torch._grouped_mm(*experts(torch.bfloat16)),
    "pinned": lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
    "pinned_back": lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 3, 1)] * 3),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_seen(name: str) -> None:
    """Would break: a wait inside a step goes unnoticed."""
    x = on_device(3.0, 1.0, 2.0)
    experts(torch.float32)
    with pretend_cuda.watch() as seen:
        WAITS[name](x)
    assert len(seen.waits) == 1, seen.events
    assert seen.waits[0].site.startswith("tests/pretend/test_device.py:")


@pytest.mark.parametrize("name", GOES_ON)
def test_what_does_not_wait_is_none(name: str) -> None:
    """Would break: false alarms."""
    x = on_device(3.0, 1.0, 2.0)
    experts(torch.bfloat16)
    with pretend_cuda.watch() as seen:
        result = GOES_ON[name](x)
    assert seen.waits == [] and isinstance(result, Tensor)


def test_tensors_as_on_the_cpu() -> None:
    """Would break: memory that views should share is copied, or the other way round."""
    x = on_device(1.0, 2.0, 3.0, 4.0)
    view = x.view(2, 2)[1]
    view += 10
    x.narrow(0, 0, 2).copy_(on_device(7.0, 8.0))
    other = copy.deepcopy(x)
    other.zero_()
    resized = torch.empty(0, device="cuda")
    torch.add(x, 1, out=resized)
    assert x.tolist() == [7.0, 8.0, 13.0, 14.0] and resized.tolist() == [8.0, 9.0, 14.0, 15.0]
    assert x.is_cuda and view.device == torch.device("cuda", 0) and not x.cpu().is_cuda
    with torch.inference_mode():
        assert not x[1:].is_inference() and (x + 1).is_inference()
    assert torch.empty(5, device="cuda").isnan().all(), "fresh memory holds something"


def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        on_device(1.0, 2.0) + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.embedding(torch.tensor([0]), on_device(1.0, 2.0).view(2, 1))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())


def test_a_copy_arrives_when_it_was_waited_for() -> None:
    host = torch.zeros(2, pin_memory=True)
    host.copy_(on_device(1.0, 2.0), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert host.isnan().all(), "read too early, it looks right"
    event.synchronize()
    assert host.tolist() == [1.0, 2.0]


def test_pinned_memory_written_too_early_is_seen() -> None:
    for early in (False, True):
        host = torch.ones(2).pin_memory()
        with pretend_cuda.watch() as seen:
            host.to("cuda", non_blocking=True)
            if not early:
                torch.cuda.synchronize()
            host[0] = 5
            torch.cuda.synchronize()
        assert len(seen.of("race")) == early


def test_one_seed_draws_the_same_again() -> None:
    torch.manual_seed(5)
    drawn = torch.rand(3, device="cuda")
    with pretend_cuda.watch() as seen:
        torch.rand(1, device="cuda", generator=torch.Generator("cuda"))
        assert not seen.of("draw")
        torch.rand(1, device="cuda")
    assert len(seen.of("draw")) == 1
    torch.manual_seed(5)
    assert torch.equal(drawn.cpu(), torch.rand(3, device="cuda").cpu())


def test_sync_debug_mode() -> None:
    x = on_device(1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.item()
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="synchronizing"):
            x.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Graphs


@pytest.fixture
def stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def capture(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    result = function()
    graph.capture_end()
    return graph, result


@triton.jit
def _double(x, y, N: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    tl.store(y + tl.arange(0, N), tl.load(x + tl.arange(0, N)) * 2)


@pytest.mark.usefixtures("stream")
def test_a_replay_computes_from_its_inputs() -> None:
    """Would break: operations, kernels, views or results that are lost or out of order in a graph."""
    x, doubled = on_device(1.0, 2.0), torch.zeros(2, device="cuda")
    _double[(1,)](x, doubled, N=2)

    def step() -> Tensor:
        y = x + 1
        _double[(1,)](y, doubled, N=2)
        y[:1].mul_(3)
        return torch.cat([y, doubled]).view(2, 2).t()

    graph, result = capture(step)
    x.copy_(on_device(5.0, 7.0))
    graph.replay()
    assert result.tolist() == [[18.0, 12.0], [8.0, 16.0]]


@pytest.mark.usefixtures("stream")
def test_a_replay_finds_nothing_of_the_one_before() -> None:
    x = on_device(1.0, 2.0)
    kept: list[Tensor] = []

    def step() -> Tensor:
        kept.append(torch.empty(2, device="cuda"))  # never written
        return kept[0] + x

    graph, result = capture(step)
    kept[0].fill_(0.0)
    graph.replay()
    assert result.isnan().all()


@pytest.mark.usefixtures("stream")
def test_a_graph_that_reads_freed_memory_is_refused() -> None:
    inputs = [on_device(1.0, 2.0)]
    graph, _ = capture(lambda: inputs[0] + 1)
    graph.replay()
    inputs.clear()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


ILLEGAL: dict[str, Callable[[Tensor], object]] = {
    "read": lambda x: x[0].item(),
    "pageable": lambda x: torch.ones(3).to("cuda", non_blocking=True),
    "blocking": lambda x: torch.ones(3).pin_memory().to("cuda"),
    "draw": lambda x: torch.rand(2, device="cuda"),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "compile": lambda x: _double[(1,)](x, torch.empty(4, device="cuda"), N=4),
}


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("name", ILLEGAL)
def test_what_a_capture_must_not_do(name: str) -> None:
    """And what it leaves: torch raises before it has ended the allocation, and the default generator stays flagged."""
    x = torch.ones(4, device="cuda")
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    graph.capture_begin(pool=pool)
    with pytest.raises(RuntimeError):
        ILLEGAL[name](x)
    with pytest.raises(RuntimeError, match="previous error"):
        graph.capture_end()
    assert pretend_cuda.is_allocating_to_a_pool()
    with pytest.raises(RuntimeError, match="outside graph capture"):
        torch.rand(2, device="cuda")
    torch._C._cuda_endAllocateToPool(0, pool)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="not currently recording"):
        torch._C._cuda_endAllocateToPool(0, pool)  # type: ignore[attr-defined]
    capture(lambda: x + 1)
    assert not pretend_cuda.is_allocating_to_a_pool()
    torch.rand(2, device="cuda")


@pytest.mark.usefixtures("stream")
def test_a_pool_ends_with_its_last_graph() -> None:
    """As torch's does: graphs share one as long as there is one, and its handle can't be used again afterwards."""
    x, pool = torch.ones(4, device="cuda"), torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    for graph in graphs[:2]:
        graph.capture_begin(pool=pool)
        x.add_(1)
        graph.capture_end()
    for graph in graphs[:2]:
        graph.reset()
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        graphs[2].capture_begin(pool=pool)
    assert not pretend_cuda.is_allocating_to_a_pool()


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("name", ["draw", "synchronize", "read"])
def test_beside_another_thread_that_captures(name: str) -> None:
    """A draw and a wait for the whole device fail there, too; a wait for a stream of one's own does not."""
    x = torch.ones(4, device="cuda")
    errors: list[BaseException | None] = []

    def other() -> None:
        try:
            ILLEGAL[name](x)
            errors.append(None)
        except RuntimeError as error:
            errors.append(error)

    def step() -> Tensor:
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        join(thread)
        return x + 1

    capture(step)
    assert (errors[0] is None) == (name == "read")


# Two devices


def test_a_device_is_obeyed() -> None:
    """Would break: what is asked of one device is another one's, and no error says so."""
    x, other = torch.ones(4, device="cuda:1"), torch.ones(4, device="cuda")
    assert (x + 1).device == x.device == torch.device("cuda", 1) and other.device.index == 0
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device == x.device
        assert torch.cuda.current_stream().device == x.device and (other + 1).device == other.device
        with torch.cuda.device(-1):
            assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == stream
        assert torch.cuda.current_stream("cuda:0") == torch.cuda.default_stream("cuda:0")
    assert torch.cuda.current_stream("cuda:1") == torch.cuda.default_stream("cuda:1")
    assert torch.equal(x.to("cuda:0"), other) and other.copy_(x).device.index == 0
    torch.cuda.reset_peak_memory_stats(1)
    before = torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)
    held = torch.empty(1024, device="cuda:1")
    assert (torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)) == (before[0], before[1] + held.nbytes)


WRONG: dict[str, Callable[[Tensor, Tensor], object]] = {
    "addition": lambda x, y: x + y,
    "one_number": lambda x, y: x + y[0],
    "lookup": lambda x, y: x[y.long()],
    "draw": lambda x, y: torch.rand(3, device="cuda:1", generator=torch.Generator("cuda:0")),
    "kernel": lambda x, y: _double[(1,)](x, torch.empty_like(x), N=4),
    "kernel_of_two": lambda x, y: _double[(1,)](y, torch.empty_like(x), N=4),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_wrong_device_raises(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"same device|is launched on cuda:0|generator device"):
        WRONG[name](torch.ones(4, device="cuda:1"), torch.ones(4, device="cuda:0"))


def test_one_device_is_not_waited_for_by_waiting_for_the_other() -> None:
    host, event = torch.zeros(2, pin_memory=True), torch.cuda.Event()
    host.copy_(torch.ones(2, device="cuda:1"), non_blocking=True)
    event.record()  # where nothing is
    event.synchronize()
    assert host.isnan().all()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream("cuda:1"))
    event.synchronize()
    assert host.tolist() == [1.0, 1.0]
