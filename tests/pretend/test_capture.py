"""Recording CUDA graphs: what can't be recorded is not tried, and what fails all the same does no harm."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretend_cuda
import pytest
import torch
from torch import Tensor

import hf_paged
from helpers.models import build, random_ids
from helpers.waiting import join
from hf_paged.model import cuda_graph, graph_capture
from hf_paged.model.graph_capture import CUDARecording, capture_stream, first_wait
from hf_paged.model.step_inputs import Shape, StepInputs

CUDA = torch.device("cuda", 0)
GREEDY = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": None}


def patched(name: str = "llama", **settings: Any) -> tuple[Any, Any]:
    """Stock and patched."""
    stock = build(name, layers=1).to(CUDA)
    settings = {"block_size": 4, "num_blocks": 16, "max_num_seqs": 3} | settings
    return stock, hf_paged.patch(copy.deepcopy(stock), **settings)


def assert_same_tokens(stock: Any, model: Any, rows: int = 2, seed: int = 0) -> None:
    ids = random_ids(rows, 9, seed=seed).to(CUDA)
    assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]


@pytest.fixture(autouse=True)
def _propagates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph.logger, "propagate", True)


@pytest.fixture
def scratch() -> Tensor:
    return torch.zeros(4, device=CUDA)


# What can't be recorded


def test_weights_split_between_processes_are_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.model.bound_model.ranks_of", lambda model: [0, 1])
    for cuda_graphs, expected in ((None, ["patch with cuda_graphs=True"]), (True, [])):
        _, model = patched(cuda_graphs=cuda_graphs)
        found = [detour for detour in model.paged.explain() if detour.what == "graphs"]
        assert [detour.instead for detour in found] == expected
        assert all("split between processes" in detour.why for detour in found)


def test_a_step_that_waits_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """Experts in float32: torch reads on the host how many rows each one has."""
    stock, model = patched("mixtral")
    with pretend_cuda.watch() as seen:
        for _ in range(2):
            assert_same_tokens(stock, model)
    assert not seen.of("capture", "replay")
    said = warnings_of(caplog)
    assert len(said) == 1
    assert "waits for the device" in said[0] and "transformers/integrations/moe.py" in said[0]
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.rand(2, device=CUDA).isfinite().all()


def test_a_step_that_does_not_wait_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    stock, model = patched()
    with pretend_cuda.watch() as seen:
        assert_same_tokens(stock, model)
        assert len(seen.of("capture")) == 3 and len(seen.of("replay")) >= 3 + 2
        assert_same_tokens(stock, model, seed=1)
    assert len(seen.of("capture")) == 4 and len(seen.of("replay")) >= 4 + 2 * 2 + 1, "its prompts, too"
    assert not warnings_of(caplog)


@pytest.mark.parametrize("mode", ["default", "warn"])
def test_the_place_of_a_wait(mode: str, scratch: Tensor) -> None:
    """A wait of this thread. Other threads' are shown if they were before, as are other warnings."""

    def elsewhere() -> None:
        scratch.sum().item()

    def function() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        warnings.warn("something else", stacklevel=1)
        torch.unique(scratch)

    torch.cuda.set_sync_debug_mode(mode)
    try:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            place = first_wait(function)
    finally:
        assert torch.cuda.get_sync_debug_mode() == ("default", "warn").index(mode)
        torch.cuda.set_sync_debug_mode("default")
    assert place is not None and "test_capture.py:" in place and place.endswith("in function")
    texts = [str(one.message) for one in shown]
    assert "something else" in texts
    assert len(texts) == 1 + (mode == "warn")
    assert first_wait(lambda: scratch.add_(1)) is None


# A recording that fails


def _reads(scratch: Tensor) -> Any:
    return scratch.sum().item()


def _copies(scratch: Tensor) -> Any:
    return scratch.copy_(torch.zeros(4), non_blocking=True)


def _draws(scratch: Tensor) -> Any:
    return torch.rand(4, device=CUDA)


def _swallows(scratch: Tensor) -> Any:
    try:
        scratch.sum().item()
    except RuntimeError:
        return scratch


def _raises(scratch: Tensor) -> Any:
    raise KeyError("a model's own")


FAILING = [(_reads, "_local_scalar"), (_copies, "pageable"), (_draws, "uniform_"), (_raises, "a model's own")]


@pytest.mark.parametrize(("function", "cause"), [*FAILING, (_swallows, "during capture")])
def test_a_failure_leaves_the_process_sound(function: Callable[[Tensor], Any], cause: str, scratch: Tensor) -> None:
    """Its cause is what is raised; then others draw, allocate and record as before."""
    gc.collect()
    stream, num_pools, num_destroyed = (
        capture_stream(CUDA),
        pretend_cuda.num_pools(),
        pretend_cuda.num_destroyed_in_capture(),
    )
    with pytest.raises((RuntimeError, KeyError), match=cause) as raised:
        CUDARecording(lambda: function(scratch), stream)
    if function is not _swallows:
        assert f"in {function.__name__}" in str(graph_capture.raised_at(raised.value))
    del raised
    gc.collect()
    assert pretend_cuda.num_pools() == num_pools and pretend_cuda.num_destroyed_in_capture() == num_destroyed
    assert not pretend_cuda.is_allocating_to_a_pool()
    assert not torch.cuda.is_current_stream_capturing() and torch.cuda.current_stream() != stream
    assert torch.rand(2, device=CUDA).isfinite().all()
    torch.cuda.synchronize()
    recording = CUDARecording(lambda: scratch + 1, stream)
    scratch.fill_(5)
    recording.replay()
    assert recording.output.tolist() == [6.0] * 4
    assert recording.num_bytes > 0


def test_a_recording_that_fails_in_a_step(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's warnings don't tell of: said once, with the cause and its place; no request notices."""
    stock, model = patched()
    original = cuda_graph.StepGraphs._record_shape

    def uncontiguous(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = self._forward
        monkeypatch.setattr(self, "_forward", lambda *own: forward(*own) + torch.ones(1).to(CUDA, non_blocking=True))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cuda_graph.StepGraphs, "_record_shape", uncontiguous)
    for _ in range(2):
        assert_same_tokens(stock, model)
    said = warnings_of(caplog)
    assert len(said) == 1 and "pageable" in said[0] and "test_capture.py" in said[0]
    assert torch.rand(2, device=CUDA).isfinite().all()
    assert not pretend_cuda.is_allocating_to_a_pool()


# Beside others


def test_sampling_is_submitted_while_steps_are_recorded() -> None:
    """On torch 2.11 a draw from the default generator raises while any thread records."""
    stock, model = patched(max_num_seqs=8)
    prompt = random_ids(1, 5)[0].tolist()
    with pretend_cuda.watch() as seen:
        requests = [model.paged.submit(prompt, **GREEDY | {"max_new_tokens": 12})]
        deadline = time.monotonic() + 60
        while not seen.of("capture") and time.monotonic() < deadline:
            time.sleep(0.001)
        requests += [model.paged.submit(prompt, do_sample=True, max_new_tokens=2) for _ in range(2)]
        for request in requests:
            request.result(60)
    assert not seen.of("draw")
    expected = stock.generate(torch.tensor([prompt], device=CUDA), **GREEDY | {"max_new_tokens": 12})
    assert requests[0].result().token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("what", ["record", "look for waits"])
def test_two_threads_at_once(what: str, scratch: Tensor) -> None:
    """Two models on one device: the stream that graphs are recorded on, and torch's warnings, are the process's."""
    entered, results = threading.Event(), []
    shown, stream = warnings.showwarning, capture_stream(CUDA)

    def slowly() -> Tensor:
        entered.set()
        time.sleep(0.2)
        return scratch + 1

    def run(number: int) -> None:
        if what == "record":
            results.append(CUDARecording(slowly, stream))
        else:
            results.append(first_wait(slowly if number == 0 else lambda: (slowly(), scratch.sum().item())))

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
        assert entered.wait(20)
    join(*threads)
    assert torch.cuda.get_sync_debug_mode() == 0 and warnings.showwarning is shown
    assert len(results) == 2
    if what == "record":
        for recording in results:
            recording.output.zero_()
            recording.replay()
            assert recording.output.tolist() == [1.0] * 4
    else:
        assert results[0] is None and "test_capture.py" in results[1]


def test_one_stream() -> None:
    """cuBLAS keeps memory for each stream that it was used on."""
    stock, model = patched(max_num_seqs=2)
    with pretend_cuda.watch() as seen:
        assert_same_tokens(stock, model)
        model.paged.release()
        assert_same_tokens(stock, model)
    streams = [event.stream for event in seen.of("capture")]
    assert len(streams) == 4 and len(set(streams)) == 1


# Memory


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_out_of_memory(share: float, caplog: pytest.LogCaptureFixture) -> None:
    """What does not fit runs eagerly; it is tried and said once."""
    gc.collect()  # nothing of other tests is to be freed while memory is counted
    stock, model = patched()
    assert_same_tokens(stock, model)
    graphs = model.paged.core.runner.graphs.held
    assert graphs.sizes == [1, 2, 3]
    largest = graphs._recordings[Shape(3, 3, 3)].num_bytes
    model.paged.release()
    attempts: list[int] = []
    emptied: list[int] = []  # before which attempt
    original = cuda_graph.CUDARecording

    def limited(*args: Any) -> Any:
        attempts.append(torch.cuda.memory_allocated())
        with pretend_cuda.memory_limit(int(share * largest)):
            return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "CUDARecording", limited)
        patch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(attempts)))
        for rows in (3, 2, 3):
            assert_same_tokens(stock, model, rows)
    assert len(attempts) == 3 and attempts[1] <= attempts[0], "what the failed one computed is free"
    assert emptied == ([1, 2, 3] if share == 0 else [1, 2]), "until one has memory that the others share"
    said = warnings_of(caplog)
    assert len(said) == 1 and "no memory left" in said[0] and ("more than 2 rows" in said[0]) == (share > 0)
    graphs = model.paged.core.runner.graphs.held
    assert graphs.sizes == ([] if share == 0 else [1, 2])
    assert (graphs.reason is None) == (share > 0)
    model.paged.check_invariants()


# The replay check


def test_a_wrong_replay_turns_graphs_off(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right on padding (no context) and wrong on the step's own rows: the check has to look at those."""
    stock, model = patched()
    seen_lens: list[list[int]] = []
    original, fill = CUDARecording.replay, StepInputs.fill
    made: list[StepInputs] = []

    def filled(self: StepInputs, step: Any) -> None:
        made.append(self)
        fill(self, step)

    monkeypatch.setattr(StepInputs, "fill", filled)

    def wrong(self: Any) -> None:
        original(self)
        lens = made[-1]._mirror.device["lens"]
        seen_lens.append(lens.tolist())
        self.output.add_((lens > 4)[:, None].float())

    monkeypatch.setattr(CUDARecording, "replay", wrong)
    for _ in range(2):
        assert_same_tokens(stock, model)
    assert seen_lens == [[10, 10, 1]]
    said = warnings_of(caplog)
    assert len(said) == 1 and "computes other logits" in said[0] and "cuda_graphs=False" in said[0]


def test_a_replay_that_does_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step wrote before must not pass for the replay's."""
    stock, model = patched()
    monkeypatch.setattr(CUDARecording, "replay", lambda self: None)
    assert_same_tokens(stock, model)
    assert len(warnings_of(caplog)) == 1


def test_the_benchmarks_timer(scratch: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be recorded is timed call by call, and the process goes on."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from common import Timer

    timer = Timer(CUDA, cold_bytes=0, num_samples=3)
    assert timer.time(lambda number: scratch.add_(number), bytes_a_call=1).timed == "graph"
    assert timer.time(lambda number: scratch.sum().item(), bytes_a_call=1).timed == "events"
    assert not pretend_cuda.is_allocating_to_a_pool()
    assert torch.rand(2, device=CUDA).isfinite().all()
