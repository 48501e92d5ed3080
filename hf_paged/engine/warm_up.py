"""Compiles kernels and records CUDA graphs before the first steps of a serving process need them."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from tqdm import tqdm

from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.core.interrupts import check_interrupt
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.step_loop import StepLoop, without_modes
from hf_paged.kernels import cpu_noise
from hf_paged.kernels.availability import draw_grid
from hf_paged.memory.streams import among_steps
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.cuda_graph import StepGraphs
from hf_paged.model.runner import ModelRunner
from hf_paged.sampling import kernel_rows

Lens = tuple[int, int]  # of a sequence: its new tokens, and its tokens in all


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a call of `warm_up()` did.

    Attributes:
        seconds: How long it took.
        backend: Whose kernels attend: "triton", "cpu" (in C, compiled at their first use on a machine) or "torch".
        num_kernels: Triton kernels that were compiled, or read from Triton's cache, by this call.
        num_graphs: Shapes of steps of which there is a CUDA graph now, as every batch size of decode steps.
        graph_bytes: Device memory of these.
        no_graphs: Why there are none; `None` if there are.
    """

    seconds: float
    backend: str
    num_kernels: int
    num_graphs: int
    graph_bytes: int
    no_graphs: str | None


def warm_up(
    pool: KVPool, model: BoundModel, runner: ModelRunner, loop: StepLoop, runs_packed: bool, touch: bool
) -> WarmUp:
    """Runs steps of no sequence's and records the graphs; what runs otherwise waits meanwhile.

    Tables, queues, counters and generators are not touched. All tokens are in the null block, which holds zeros
    again at the end.

    Args:
        runs_packed: Whether steps run over the pool: nothing is prepared for a model that doesn't.
        touch: See `Engine.warm_up`.

    Raises:
        RuntimeError: This thread is inside a step (in a hook of the model).
        ValueError: `cuda_graphs=True` or `compile_decode=True`, and there can be no graphs here.
        Exception: What the model raises.
    """
    started = time.perf_counter()
    graphs: StepGraphs | str = "calls of the model as it is now run by themselves, in their own shape"
    with loop.exclusive(), without_modes():
        attention = pool.attention
        kv_cache, device = attention.kv_cache, attention.kv_cache.device
        if touch:
            kv_cache.touch()
        with among_steps(device), torch.autocast(device.type, enabled=False):
            with _counting(attention) as kernels, kv_cache.lent_null_block():
                if runs_packed:
                    _run(pool, model, runner, attention)
                if runs_packed or model.why_unrecorded is not None:
                    graphs = runner.graphs.record(attention)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
    seconds, backend = time.perf_counter() - started, attention.backend.name
    if isinstance(graphs, str):
        return WarmUp(seconds, backend, len(kernels), 0, 0, graphs)
    return WarmUp(seconds, backend, len(kernels), len(graphs.shapes), graphs.num_bytes, None)


def _run(pool: KVPool, model: BoundModel, runner: ModelRunner, attention: PoolAttention) -> None:
    kv_cache = attention.kv_cache
    longest = min(model.max_context, kv_cache.num_blocks * kv_cache.block_size)
    batches = rehearsals(longest, pool.config.max_num_batched_tokens, pool.config.max_num_seqs)
    for lens in tqdm(batches, desc="hf_paged: warming up", delay=1, leave=False, disable=None):
        check_interrupt()
        logits = runner.packed.rehearse(attention, lens)
    attention.warm_up()
    if kv_cache.device.type == "cpu":
        cpu_noise.load()
    model.adapters.rehearse(model.model, *model.placement)
    if not isinstance(draw_grid(kv_cache.device), str):
        kernel_rows.rehearse(logits)


def _counting(attention: PoolAttention) -> AbstractContextManager[list[str]]:
    """Within it, collects the names of the kernels that Triton loads."""
    if attention.backend.name != "triton":
        return nullcontext([])
    from hf_paged.kernels.launch import loaded_kernels

    return loaded_kernels()


def rehearsals(longest: int, max_tokens: int, max_rows: int) -> list[list[Lens]]:
    """Steps that launch every kernel there is for a model: which one, follows from lengths.

    Returns:
        Decode steps of one sequence of every length (in powers of two: how it is split), of as many as there can be,
        and of two with tiles to share; prompts of every length (the tiles of queries); the latter behind a longer
        context, and beside a decoding sequence.
    """
    lengths = sorted({min(2**power, longest) for power in range(longest.bit_length() + 1)})
    chunks = [n for n in sorted({*lengths, min(longest, max_tokens)}) if 1 < n <= max_tokens]
    steps = [[(1, n)] for n in lengths]
    steps.append([(1, min(longest, 16))] * min(max_rows, max_tokens))
    steps.append([(1, min(longest, 128))] * min(max_rows, max_tokens, 2))
    steps += [[(n, n)] for n in chunks]
    if chunks:
        steps.append([(1, longest), (chunks[0], longest)])
    return steps
