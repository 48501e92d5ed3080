"""The Triton kernels on a GPU: microseconds, share of what the memory and the matrix units can do, and what would be best.

    PYTHONPATH=. python benchmarks/gpu_kernels.py --out benchmarks/results          # all, some four minutes
    PYTHONPATH=. python benchmarks/gpu_kernels.py --only decode prefill --quick     # one point a family
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_kernels.py --quick --device cpu    # that it runs at all

The shape is that of Llama-3.1-8B: 32 query heads, 8 kv heads, head dim 128, 32 layers, bfloat16, blocks of 16 tokens
from all over a pool that fills a large part of the card. Limits are measured on the same card: a large copy (bytes read
and written), a large matrix product. A layer's attention is a call; calls in turn go through all layers, and through as
many sets of blocks as it takes for the L2 cache to be cold. Timed is a CUDA graph of many calls (`common.Timer`).

Each family is first compared with the float64 reference, and left out if it is wrong. Measuring happens in a child
process: a crash costs one family, and what was measured is in the JSON file at any moment.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from common import Report, Row, Timer, device_facts, markdown_table, rms_ratio, show, versions
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from tqdm import tqdm

from hf_paged.attention_metadata import AttentionMetadata
from hf_paged.kernels import launch, ops, reference
from hf_paged.kernels import paged_decode as decode
from hf_paged.kernels import paged_prefill as prefill
from hf_paged.kv_cache import KVCache, KVGeometry

MAX_RMS = 5e-3
CRASHED = 3  # exit status of a child whose device no longer answers
GIB = 2**30
DTYPE = torch.bfloat16
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Scale:
    """The shapes that are measured; `(sequences, tokens of each)` where nothing else is said."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    memory: int = 60 * GIB  # of the pool
    fp8_memory: int = 10 * GIB
    cold: int = GIB // 2  # bytes read before the first of them is read again
    matmul: int = 8192
    samples: int = 15
    decodes: tuple[tuple[int, int], ...] = tuple(
        (batch, context)
        for context in (128, 1024, 4096, 16384, 32768)
        for batch in (1, 8, 32, 128, 256)
        if batch * context <= 4 * 2**20
    )
    ragged: tuple[int, ...] = (32768, *(128 + 28 * i for i in range(31)), 1024)[:32]
    split_cases: tuple[tuple[int, int], ...] = ((1, 32768), (8, 16384), (8, 4096), (32, 4096))
    splits: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
    tile_cases: tuple[tuple[int, int], ...] = ((1, 32768), (8, 16384), (32, 4096))
    tile_prefill: int = 8192
    tiles: tuple[tuple[int, int, int], ...] = tuple(itertools.product((32, 64, 128), (4, 8), (2, 3, 4, 5)))
    prefills: tuple[tuple[int, int, int], ...] = (  # sequences, new tokens of each, tokens before them
        (1, 512, 0),
        (1, 2048, 0),
        (1, 8192, 0),
        (4, 2048, 0),
        (1, 2048, 8192),
    )
    mixed: tuple[int, int, int] = (64, 2048, 2048)  # decodes, their tokens, tokens of the chunk
    fp8_cases: tuple[tuple[int, int], ...] = ((32, 4096), (8, 16384))
    writes: tuple[int, ...] = (1, 32, 256, 2048, 8192)
    copies: tuple[int, ...] = (1, 16, 256)
    small_pool: int = 1024  # blocks, for what torch's indexing is measured beside
    layout_cases: tuple[tuple[int, int], ...] = ((32, 4096), (128, 1024))
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    swap_blocks: int = 64
    host_calls: int = 200
    flex_decodes: tuple[tuple[int, int], ...] = ((32, 4096), (8, 16384))
    check_tokens: int = 1024  # bounds the lengths of what is compared with the reference


FULL = Scale()
QUICK = replace(
    FULL,
    memory=8 * GIB,
    fp8_memory=4 * GIB,
    samples=5,
    decodes=((32, 4096),),
    split_cases=((8, 4096),),
    splits=(1, 4),
    tile_cases=((32, 4096),),
    tiles=((64, 4, 3),),
    tile_prefill=2048,
    prefills=((1, 2048, 0),),
    fp8_cases=((32, 4096),),
    writes=(2048,),
    copies=(16,),
    layout_cases=((32, 4096),),
    block_sizes=(16,),
    flex_decodes=((32, 4096),),
)
TINY = Scale(
    heads=4,
    kv_heads=2,
    head_dim=16,
    layers=2,
    memory=2**19,
    fp8_memory=2**18,
    cold=2**12,
    matmul=64,
    samples=1,
    decodes=((2, 32),),
    ragged=(64, 20, 7),
    split_cases=((2, 160),),
    splits=(1, 3),
    tile_cases=((2, 48),),
    tiles=((32, 4, 3),),
    tile_prefill=40,
    prefills=((2, 40, 0), (1, 20, 24)),
    mixed=(2, 40, 24),
    fp8_cases=((2, 48),),
    writes=(5,),
    copies=(2,),
    small_pool=16,
    layout_cases=((2, 40),),
    block_sizes=(16, 32),
    swap_blocks=4,
    host_calls=1,
    flex_decodes=((2, 32),),
    check_tokens=40,
)
# For compute-sanitizer: the heads that are measured, little of everything else.
SANITIZED = replace(TINY, heads=8, head_dim=128, memory=2**23, fp8_memory=2**22, check_tokens=160)


class WrongError(Exception):
    """A kernel's result is not the reference's."""


class Memory:
    """One large piece of random numbers, which every pool and every contiguous tensor is a view of."""

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device, scale: Scale) -> None:
        self._scale = scale
        self.dtype = dtype
        self.flat = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        for part in self.flat.split(2**27):
            part.copy_(torch.randn(part.numel(), dtype=DTYPE, device=device))

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in one layer."""
        return 2 * self._scale.kv_heads * self._scale.head_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.flat.numel() * self.dtype.itemsize

    def pool(self, num_blocks: int, layers: int, block_size: int = 16, is_layer_major: bool = False) -> Tensor:
        """A pool; its strides say whether a block's layers or a layer's blocks lie side by side."""
        block = (2, self._scale.kv_heads, block_size, self._scale.head_dim)
        flat = self.flat[: num_blocks * layers * math.prod(block)]
        if is_layer_major:
            return flat.view(layers, num_blocks, *block).transpose(0, 1)
        return flat.view(num_blocks, layers, *block)

    def contiguous(self, batch: int, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[batch, kv_heads, num_tokens, head_dim]`, several of them in different places."""
        shape = (batch, self._scale.kv_heads, num_tokens, self._scale.head_dim)
        size = math.prod(shape)
        places = self.flat[: self.flat.numel() // (2 * size) * 2 * size].view(-1, 2, *shape)
        return [(place[0], place[1]) for place in places[:256]]


class Bench:
    """What all families need.

    Attributes:
        scale: The shapes.
        device: Where to measure.
        timer: Times calls.
        memory: What pools are made of.
        partials: Scratch of the kernels.
        limits: `copy_gb_s` and `matmul_tflop_s` of this device, once they are measured.
    """

    def __init__(self, scale: Scale, device: torch.device, limits: dict[str, float]) -> None:
        torch.manual_seed(0)
        self.scale = scale
        self.device = device
        self.limits = limits
        self.timer = Timer(device, scale.cold, scale.samples)
        self.partials = ops.Partials()
        num_bytes = scale.memory
        if device.type == "cuda":
            num_bytes = min(num_bytes, int(0.7 * torch.cuda.mem_get_info(device)[0]))
        self.memory = Memory(num_bytes, DTYPE, device, scale)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self.device)

    def bandwidth(self, us: float, num_bytes: int) -> Row:
        """GB/s, and how much of what a copy reaches that is."""
        gb_s = num_bytes / us / 1e3
        copy = self.limits.get("copy_gb_s")
        return {"gb_s": gb_s, "share": gb_s / copy if copy else None}


@dataclass(frozen=True)
class Point:
    """One row to be: what is measured, and how."""

    case: str
    measure: Callable[[], Row]


Points = Iterator[Point]


class Step:
    """A step over a pool: called with a number it runs the attention of one layer, with each number another one.

    The blocks are drawn from all over the memory, and once all layers have been read, other ones are.
    """

    def __init__(
        self,
        bench: Bench,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        block_size: int = 16,
        is_layer_major: bool = False,
        memory: Memory | None = None,
        **options: Any,
    ) -> None:
        """Lays a step out.

        Args:
            bench: The device and the shapes.
            query_lens: New tokens of each sequence.
            seq_lens: All tokens of each.
            block_size: Tokens of a block.
            is_layer_major: Layout of the pool.
            memory: Where the pool lies; None: the bench's.
            **options: For `paged_attention`, the kernel's and the reference's.
        """
        scale = bench.scale
        self.memory = memory or bench.memory
        self._bench, self._options = bench, options
        self.query_lens, self.seq_lens = list(query_lens), list(seq_lens)
        needed = sum(-(-n // block_size) for n in seq_lens)
        self.layers = scale.layers
        while (capacity := self.memory.num_bytes // (self.layers * block_size * self.memory.token_bytes)) <= needed:
            if self.layers == 1:
                raise ValueError(f"{sum(seq_lens)} tokens don't fit into {self.memory.num_bytes / GIB:.0f} GiB")
            self.layers //= 2
        self.kv_bytes = sum(seq_lens) * self.memory.token_bytes
        num_sets = -(-scale.cold // (self.layers * self.kv_bytes))
        num_sets = max(1, min(num_sets, (capacity - 1) // needed))
        self.pool = self.memory.pool(capacity, self.layers, block_size, is_layer_major)
        shuffled = np.random.default_rng(0).permutation(capacity)
        null_block, owned = int(shuffled[-1]), shuffled[:-1]
        self._sets = [self._metadata(owned[i * needed : (i + 1) * needed], null_block) for i in range(num_sets)]
        self.query = bench.random(sum(query_lens), scale.heads, scale.head_dim)
        is_fp8 = self.memory.dtype == E4M3
        self._kv_scales = torch.ones(self.layers, 2, scale.kv_heads, device=bench.device) if is_fp8 else None

    def _metadata(self, blocks: np.ndarray, null_block: int) -> AttentionMetadata:
        block_size = self.memory_block_size
        ends = np.cumsum([-(-n // block_size) for n in self.seq_lens])
        tables = np.split(blocks, ends[:-1])
        return AttentionMetadata.build(
            tables, self.query_lens, self.seq_lens, block_size, null_block, self._bench.device
        )

    @property
    def memory_block_size(self) -> int:
        return self.pool.shape[4]

    @property
    def flops(self) -> int:
        """Multiplications and additions for what queries really see."""
        seen = sum(n * (s - n) + n * (n + 1) // 2 for n, s in zip(self.query_lens, self.seq_lens))
        return 4 * self._bench.scale.head_dim * self._bench.scale.heads * seen

    @property
    def softmax_scale(self) -> float:
        return self._bench.scale.head_dim**-0.5

    def all_to_prefill(self) -> Step:
        """From now on decoding sequences go through the prefill kernel as well."""
        for metadata in self._sets:
            metadata.num_decodes = 0
        return self

    def __call__(self, number: int, num_splits: int | None = None) -> Tensor:
        return ops.paged_attention(
            self.query,
            self.pool,
            number % self.layers,
            self._sets[number // self.layers % len(self._sets)],
            self.softmax_scale,
            **self._options,
            kv_scales=self._kv_scales,
            partials=self._bench.partials,
            num_splits=num_splits,
        )

    def chosen_splits(self) -> int:
        """Programs that a decoding sequence is split between if nobody says."""
        seen = []
        launcher = decode.paged_decode

        def note(call: launch.LayerAttention, num_sequences: int, num_splits: int) -> None:
            seen.append(num_splits)
            launcher(call, num_sequences, num_splits)

        with mock.patch.object(decode, "paged_decode", note):
            self(0)
        return seen[0]

    def check(self, picked: Sequence[int], num_splits: int | None = None) -> float:
        """RMS ratio of the result to the float64 reference's, for the picked sequences.

        Raises:
            WrongError: It is above `MAX_RMS`.
        """
        metadata, block_size = self._sets[0], self.memory_block_size
        starts = np.concatenate(([0], np.cumsum(self.query_lens)))
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in picked]).to(self._bench.device)
        lens = [self.seq_lens[i] for i in picked]
        tables = [metadata.block_tables[i, : -(-n // block_size)].long() for i, n in zip(picked, lens)]
        states = reference.elements(self.pool)[torch.cat(tables), 0].view(self.memory.dtype).double().unsqueeze(1)
        ends = np.cumsum([len(table) for table in tables])
        own = AttentionMetadata.build(
            np.split(np.arange(ends[-1]), ends[:-1]),
            [self.query_lens[i] for i in picked],
            lens,
            block_size,
            int(ends[-1]),
            self._bench.device,
        )
        states = torch.cat([states, torch.zeros_like(states[:1])])
        options = {name: v.double() if isinstance(v, Tensor) else v for name, v in self._options.items()}
        query = self.query[rows].double()
        expected = reference.paged_attention(query, states, 0, own, self.softmax_scale, **options)
        return require(rms_ratio(self(0, num_splits)[rows], expected))


def require(rms: float) -> float:
    """The error, if it is one of rounding."""
    if not rms <= MAX_RMS:
        raise WrongError(f"RMS error {rms:.2g} of the reference, at most {MAX_RMS:g} is rounding")
    return rms


def decoding(bench: Bench, batch: int, context: int, **settings: Any) -> Step:
    return Step(bench, [1] * batch, [context] * batch, **settings)


# ------------------------------------------------------------------------------------------------------------- limits


def limit_points(bench: Bench) -> Points:
    def copy() -> Row:
        half = bench.memory.flat.numel() // 2
        half = min(half, 2 * GIB)  # 4 GiB
        source, to = bench.memory.flat[:half], bench.memory.flat[half : 2 * half]
        num_bytes = 2 * half * DTYPE.itemsize
        times = bench.timer.time(lambda _: to.copy_(source), num_bytes)
        bench.limits["copy_gb_s"] = num_bytes / times.us / 1e3
        return times.row() | bench.bandwidth(times.us, num_bytes)

    def matmul() -> Row:
        n = bench.scale.matmul
        a, b, c = (bench.random(n, n) for _ in range(3))
        times = bench.timer.time(lambda _: torch.matmul(a, b, out=c), 6 * n * n, sample_us=2e4)
        bench.limits["matmul_tflop_s"] = 2 * n**3 / times.us / 1e6
        return times.row() | {"tflop_s": bench.limits["matmul_tflop_s"]}

    yield Point("copy of 4 GiB", copy)
    yield Point(f"bf16 matmul of {bench.scale.matmul}", matmul)


# --------------------------------------------------------------------------------------- torch's attention, contiguous


def sdpa_calls(bench: Bench, batch: int, query_len: int, seq_len: int) -> dict[str, Callable[[int], Tensor]]:
    """`scaled_dot_product_attention` over contiguous keys and values, in every way that may be fast, by name."""
    scale = bench.scale
    group = scale.heads // scale.kv_heads
    query = bench.random(batch, scale.heads, query_len, scale.head_dim)
    places = bench.memory.contiguous(batch, seq_len)
    is_decode = query_len == 1
    # A kv head's queries as the rows of one head: for one new token nothing is masked, so they may share it.
    packed = query.view(batch, scale.kv_heads, group, scale.head_dim) if is_decode else query
    options: dict[str, Any] = {"is_causal": not is_decode}
    if not is_decode and query_len < seq_len:
        options = {"attn_mask": causal_lower_right(query_len, seq_len)}

    @functools.cache
    def expanded() -> tuple[Tensor, Tensor]:
        key, value = places[0]
        return key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)

    def grouped(backend: SDPBackend, number: int) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, *places[number % len(places)], enable_gqa=True, **options)

    def plain(backend: SDPBackend, number: int) -> Tensor:
        key, value = places[number % len(places)] if is_decode else expanded()
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(packed, key, value, **options)

    if bench.device.type != "cuda":
        return {"math, grouped": partial(grouped, SDPBackend.MATH), "math": partial(plain, SDPBackend.MATH)}
    kind = "packed" if is_decode else "expanded"
    return {
        "flash": partial(grouped, SDPBackend.FLASH_ATTENTION),
        f"flash, {kind}": partial(plain, SDPBackend.FLASH_ATTENTION),
        "cudnn": partial(grouped, SDPBackend.CUDNN_ATTENTION),
        f"efficient, {kind}": partial(plain, SDPBackend.EFFICIENT_ATTENTION),
    }


def time_sdpa(bench: Bench, batch: int, query_len: int, seq_len: int, num_bytes: int) -> Row:
    """The fastest way, and all that work; empty if none does."""
    found: dict[str, float] = {}
    for name, call in sdpa_calls(bench, batch, query_len, seq_len).items():
        try:
            found[name] = bench.timer.time(call, num_bytes, sample_us=1000.0).us
        except RuntimeError:  # "no available kernel" among them
            bench.timer.synchronize()  # raises if the device is gone
    if not found:
        return {}
    best = min(found, key=found.__getitem__)
    return {"sdpa_us": found[best], "sdpa": best, "sdpa_all_us": found}


# ------------------------------------------------------------------------------------------------------------- decode


def check_decode(bench: Bench) -> float:
    batch, context = bench.scale.decodes[-1] if len(bench.scale.decodes) == 1 else (32, 4096)
    step = decoding(bench, batch, context - 5)  # a last block that is not full
    return max(step.check([0, batch - 1], num_splits) for num_splits in (None, 1, 3))


def time_step(bench: Bench, step: Step, num_splits: int | None = None) -> Row:
    times = bench.timer.time(lambda i: step(i, num_splits), step.kv_bytes)
    return times.row() | bench.bandwidth(times.us, step.kv_bytes)


def decode_points(bench: Bench) -> Points:
    def measure(batch: int, context: int) -> Row:
        step = decoding(bench, batch, context)
        row = {"batch": batch, "context": context, "splits": step.chosen_splits()} | time_step(bench, step)
        row |= time_sdpa(bench, batch, 1, context, step.kv_bytes)
        return row | ({"times_sdpa": row["sdpa_us"] / row["us"]} if "sdpa_us" in row else {})

    for batch, context in bench.scale.decodes:
        yield Point(f"{batch} x {context}", partial(measure, batch, context))


def ragged_points(bench: Bench) -> Points:
    lens = bench.scale.ragged
    make = functools.cache(lambda: Step(bench, [1] * len(lens), lens))
    for num_splits in (None, *(n for n in bench.scale.splits if n in (1, 3, 4, 8, 16, 32, 64, 128))):

        def measure(num_splits: int | None = num_splits) -> Row:
            splits = num_splits or make().chosen_splits()
            return {"splits": splits, "is_chosen": not num_splits} | time_step(bench, make(), num_splits)

        yield Point(f"{lens[0]} beside {len(lens) - 1} of {min(lens)} to {max(lens[1:])}", measure)


def check_ragged(bench: Bench) -> float:
    lens = [max(1, min(n, bench.scale.check_tokens)) for n in bench.scale.ragged]
    return Step(bench, [1] * len(lens), lens).check(range(len(lens)))


def split_points(bench: Bench) -> Points:
    for batch, context in bench.scale.split_cases:
        make = functools.cache(partial(decoding, bench, batch, context))
        for num_splits in bench.scale.splits:

            def measure(num_splits: int = num_splits, make: Callable[[], Step] = make) -> Row:
                step = make()
                row = {"splits": num_splits, "is_chosen": num_splits == step.chosen_splits()}
                return row | time_step(bench, step, num_splits)

            yield Point(f"{batch} x {context}", measure)


# ------------------------------------------------------------------------------------------------------------ prefill


def check_prefill(bench: Bench) -> float:
    n = bench.scale.check_tokens
    return Step(bench, [n * 3 // 10, 1, n // 13 + 1], [n * 3 // 10, n, n * 11 // 10]).check([0, 1, 2])


def time_prefill(bench: Bench, step: Step) -> Row:
    times = bench.timer.time(step, step.kv_bytes)
    return times.row() | {"tflop_s": step.flops / times.us / 1e6}


def prefill_points(bench: Bench) -> Points:
    def measure(batch: int, new: int, before: int) -> Row:
        step = Step(bench, [new] * batch, [before + new] * batch)
        row = {"batch": batch, "tokens": new, "before": before} | time_prefill(bench, step)
        row |= time_sdpa(bench, batch, new, before + new, step.kv_bytes)
        if "sdpa_us" in row:
            row |= {"sdpa_tflop_s": step.flops / row["sdpa_us"] / 1e6, "times_sdpa": row["sdpa_us"] / row["us"]}
        return row

    for batch, new, before in bench.scale.prefills:
        yield Point(f"{batch} x {new}" + (f" behind {before}" if before else ""), partial(measure, batch, new, before))


def mixed_steps(bench: Bench, decodes: int, context: int, chunk: int) -> dict[str, Callable[[], Step]]:
    both = partial(Step, bench, [1] * decodes + [chunk], [context] * decodes + [chunk])
    return {
        "decode kernel, then prefill kernel": both,
        "all through the prefill kernel": lambda: both().all_to_prefill(),
        "the decodes alone": partial(decoding, bench, decodes, context),
        "the chunk alone": partial(Step, bench, [chunk], [chunk]),
    }


def check_mixed(bench: Bench) -> float:
    decodes, context, chunk = bench.scale.mixed
    steps = mixed_steps(bench, decodes, context, min(chunk, bench.scale.check_tokens))
    return max(make().check([0, decodes - 1, decodes]) for make in list(steps.values())[:2])


def mixed_points(bench: Bench) -> Points:
    def measure(make: Callable[[], Step]) -> Row:
        step = make()
        return bench.timer.time(step, step.kv_bytes).row()

    decodes, context, chunk = bench.scale.mixed
    for name, make in mixed_steps(bench, decodes, context, chunk).items():
        yield Point(f"{decodes} decodes at {context} and a chunk of {chunk}: {name}", partial(measure, make))


# -------------------------------------------------------------------------------------------------------------- tiles


def untouched(_: launch.LayerAttention, tiling: launch.Tiling) -> launch.Tiling:
    return tiling


def with_tile(module: Any, tile: launch.Tiling | None, run: Callable[[], Any]) -> Any:
    """Runs something with the tile that `module.tiling` would choose, or with this one."""
    if tile is None:
        return run()
    # `fit` takes stages away that the device has no shared memory for: here that is an error to be seen.
    fit = mock.patch.object(launch.LayerAttention, "fit", untouched, create=True)
    with fit, mock.patch.object(module, "tiling", lambda *_: tile):
        return run()


def tile_points(bench: Bench) -> Points:
    n = bench.scale.tile_prefill
    cases = {
        f"{batch} x {context}": partial(decoding, bench, batch, context) for batch, context in bench.scale.tile_cases
    }
    cases[f"prefill of {n}"] = partial(Step, bench, [n], [n])
    for case, create in cases.items():
        make = functools.cache(create)
        module = prefill if case.startswith("prefill") else decode
        expected = functools.cache(lambda make=make: make()(0))
        row_counts = (128, 64) if module is prefill else (16,)
        shapes = [(rows, *tile) for rows, tile in itertools.product(row_counts, bench.scale.tiles)]
        # Fewer rows: only what stands a chance.
        shapes = [s for s in shapes if s[0] != 64 or (s[1] >= 64 and s[3] in (2, 3))]
        for tile in (None, *(launch.Tiling(*shape) for shape in shapes)):

            def measure(
                tile: launch.Tiling | None = tile, module: Any = module, make: Any = make, expected: Any = expected
            ) -> Row:
                step, truth = make(), expected()
                row: Row = {"tile": " ".join(map(str, tile)) if tile else "chosen"}
                row["rms"] = require(rms_ratio(with_tile(module, tile, lambda: step(0)), truth))
                times = with_tile(module, tile, lambda: bench.timer.time(step, step.kv_bytes, sample_us=1000.0))
                return row | times.row()

            yield Point(case, measure)


# ---------------------------------------------------------------------------------------------------------------- fp8


def fp8_memory(bench: Bench) -> Memory:
    return Memory(bench.scale.fp8_memory, E4M3, bench.device, bench.scale)


def by_hand(run: Callable[[], Any]) -> Any:
    """Runs something on a device that can't convert e4m3 by itself."""
    device = launch.Device.of
    with mock.patch.object(launch.Device, "of", staticmethod(lambda d: replace(device(d), has_native_fp8=False))):
        return run()


def check_fp8(bench: Bench) -> float:
    step = decoding(bench, 2, bench.scale.check_tokens - 3, memory=fp8_memory(bench))
    return max(run(lambda: step.check([0, 1], n)) for run in (by_hand, lambda f: f()) for n in (1, 3))


def fp8_points(bench: Bench) -> Points:
    memory = functools.cache(partial(fp8_memory, bench))
    for batch, context in bench.scale.fp8_cases:
        for name in ("native", "by hand", "bf16"):

            def measure(name: str = name, batch: int = batch, context: int = context) -> Row:
                settings = {} if name == "bf16" else {"memory": memory()}
                step = decoding(bench, batch, context, **settings)
                run = partial(time_step, bench, step)
                return {"conversion": name} | (by_hand(run) if name == "by hand" else run())

            yield Point(f"{batch} x {context}", measure)


# ------------------------------------------------------------------------------------------------- cache write, copies


def check_write(bench: Bench) -> float:
    scale = bench.scale
    pool = bench.memory.pool(8, scale.layers).clone()
    expected = pool.clone()
    slots = torch.randperm(8 * 16, device=bench.device)[:37]
    key, value = (bench.random(37, scale.kv_heads, scale.head_dim) for _ in range(2))
    ops.reshape_and_cache(key, value, pool, 1, slots)
    reference.reshape_and_cache(key, value, expected, 1, slots)
    if not torch.equal(pool, expected):
        raise WrongError(f"{int((pool != expected).sum())} numbers of the pool differ from the reference's")
    return 0.0


def write_points(bench: Bench) -> Points:
    scale = bench.scale

    def measure(num_tokens: int, write: Callable[..., None]) -> Row:
        pool = bench.memory.pool(scale.small_pool, scale.layers)
        # What was just decoded goes to a place of its own each, a prompt fills blocks.
        run = 1 if num_tokens <= 256 else 16
        firsts = torch.randperm(scale.small_pool * 16 // run, device=bench.device)[: -(-num_tokens // run)] * run
        slots = (firsts[:, None] + torch.arange(run, device=bench.device)).flatten()[:num_tokens].contiguous()
        num_bytes = 2 * num_tokens * bench.memory.token_bytes  # read and written
        num_places = max(1, min(256, -(-scale.cold // num_bytes)))
        key, value = (bench.random(num_places, num_tokens, scale.kv_heads, scale.head_dim) for _ in range(2))

        def call(i: int) -> None:
            write(key[i % num_places], value[i % num_places], pool, i % scale.layers, slots)

        times = bench.timer.time(call, num_bytes)
        row = {"tokens": num_tokens, "by": "triton" if write is ops.reshape_and_cache else "torch"}
        return row | times.row() | bench.bandwidth(times.us, num_bytes)

    for num_tokens in scale.writes:
        for write in (ops.reshape_and_cache, reference.reshape_and_cache):
            yield Point(f"{num_tokens} tokens", partial(measure, num_tokens, write))


def check_copy(bench: Bench) -> float:
    pool = bench.memory.pool(bench.scale.small_pool, bench.scale.layers)[:8].clone()
    expected = pool.clone()
    sources, destinations = torch.randperm(8, device=bench.device).view(2, 4)
    ops.copy_blocks(pool, sources, destinations)
    reference.copy_blocks(expected, sources, destinations)
    if not torch.equal(pool, expected):
        raise WrongError("blocks differ from the reference's")
    return 0.0


def copy_points(bench: Bench) -> Points:
    scale = bench.scale

    def measure(num_pairs: int, copy: Callable[..., None]) -> Row:
        pool = bench.memory.pool(scale.small_pool, scale.layers)
        num_sets = scale.small_pool // (2 * num_pairs)
        ids = torch.randperm(scale.small_pool, device=bench.device)[: num_sets * 2 * num_pairs]
        ids = ids.view(num_sets, 2, num_pairs)
        num_bytes = 2 * num_pairs * pool[0].numel() * DTYPE.itemsize

        def call(i: int) -> None:
            copy(pool, ids[i % num_sets, 0], ids[i % num_sets, 1])

        times = bench.timer.time(call, num_bytes)
        row = {"blocks": num_pairs, "by": "triton" if copy is ops.copy_blocks else "torch"}
        return row | times.row() | bench.bandwidth(times.us, num_bytes)

    for num_pairs in scale.copies:
        for copy in (ops.copy_blocks, reference.copy_blocks):
            yield Point(f"{num_pairs} blocks", partial(measure, num_pairs, copy))


# ------------------------------------------------------------------------------------------------------- pool layouts


def layouts(bench: Bench) -> list[tuple[str, dict[str, Any]]]:
    found = [(f"block-major, blocks of {size}", {"block_size": size}) for size in bench.scale.block_sizes]
    return [*found, ("layer-major, blocks of 16", {"is_layer_major": True})]


def check_layouts(bench: Bench) -> float:
    n = bench.scale.check_tokens - 3
    return max(decoding(bench, 2, n, **settings).check([0, 1]) for _, settings in layouts(bench))


def layout_points(bench: Bench) -> Points:
    def measure(batch: int, context: int, name: str, settings: dict[str, Any]) -> Row:
        return {"layout": name} | time_step(bench, decoding(bench, batch, context, **settings))

    for (batch, context), (name, settings) in itertools.product(bench.scale.layout_cases, layouts(bench)):
        yield Point(f"{batch} x {context}", partial(measure, batch, context, name, settings))


# --------------------------------------------------------------------------------------------------------------- swap


def swap_points(bench: Bench) -> Points:
    """Blocks to CPU memory and back, by the host's clock until they are there."""
    n, scale = bench.scale.swap_blocks, bench.scale
    is_cuda = bench.device.type == "cuda"

    @functools.cache
    def place() -> tuple[Tensor, Tensor, Tensor, list[int]]:
        pool = bench.memory.pool(min(scale.small_pool, 8 * n), scale.layers)
        host = torch.empty((n, *pool.shape[1:]), dtype=DTYPE, pin_memory=is_cuda).zero_()
        ids = torch.randperm(pool.shape[0], device=bench.device)[:n]
        return pool, host, ids, ids.tolist()

    def one_copy(is_out: bool) -> None:
        pool, host, _, _ = place()
        to, source = (host, pool[:n]) if is_out else (pool[:n], host)
        to.copy_(source, non_blocking=True)

    def copy_each(is_out: bool) -> None:
        pool, host, _, ids = place()
        for i, block in enumerate(ids):
            to, source = (host[i], pool[block]) if is_out else (pool[block], host[i])
            to.copy_(source, non_blocking=True)

    def gathered(is_out: bool) -> None:
        pool, host, ids, _ = place()
        if is_out:
            host.copy_(pool.index_select(0, ids), non_blocking=True)
        else:
            pool.index_copy_(0, ids, host.to(pool.device, non_blocking=True))

    @functools.cache
    def kv_cache() -> KVCache:
        geometry = KVGeometry(scale.layers, scale.kv_heads, scale.head_dim, DTYPE)
        return KVCache(geometry, 4 * n, 16, bench.device)

    def by_kv_cache(is_out: bool) -> None:
        ids = np.random.default_rng(0).permutation(4 * n)[:n].tolist()
        if is_out:
            kv_cache().swap_out(list(zip(ids, range(n))), n)
        else:
            kv_cache().swap_in(list(zip(range(n), ids)))

    def measure(move: Callable[[bool], None], is_out: bool) -> Row:
        times = bench.timer.wall(partial(move, is_out))
        num_bytes = n * 16 * scale.layers * bench.memory.token_bytes
        return {"way": "out" if is_out else "in"} | times.row() | {"gb_s": num_bytes / times.us / 1e3}

    ways = {
        "a contiguous run, one copy": one_copy,
        "scattered, a copy each": copy_each,
        "scattered, gathered first": gathered,
        "scattered, by KVCache": by_kv_cache,
    }
    for (name, move), is_out in itertools.product(ways.items(), (True, False)):
        yield Point(f"{n} blocks, {name}", partial(measure, move, is_out))


# -------------------------------------------------------------------------------------------------------- launch cost


def launch_points(bench: Bench) -> Points:
    """What a call costs the host, whatever the device does meanwhile."""
    scale = bench.scale
    batch, context = 8, min(1024, scale.check_tokens)
    make = functools.cache(partial(decoding, bench, batch, context))
    slots = torch.arange(batch, device=bench.device)
    key = bench.random(batch, scale.kv_heads, scale.head_dim)
    pool = bench.memory.pool(16, scale.layers)
    query = bench.random(batch, scale.heads, 1, scale.head_dim)
    calls: dict[str, Callable[[int], Any]] = {
        "paged_attention, one launch": lambda i: make()(i % scale.layers, 1),
        "paged_attention, split": lambda i: make()(i % scale.layers, 3),
        "reshape_and_cache": lambda i: ops.reshape_and_cache(key, key, pool, i % scale.layers, slots),
        "copy_blocks": lambda i: ops.copy_blocks(pool, slots[:2], slots[2:4]),
        "torch's scaled_dot_product_attention": lambda i: F.scaled_dot_product_attention(query, query, query),
        "torch's add": lambda i: torch.add(key, key),
    }
    for name, call in calls.items():
        yield Point(name, lambda call=call: bench.timer.host(call, scale.host_calls).row())


# ------------------------------------------------------------------------------------------------------ FlexAttention


def flex_points(bench: Bench) -> Points:
    """Compiled FlexAttention over contiguous keys and values; compiling is not in the times."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # no worker processes that could outlive this one
    scale = bench.scale
    flex = torch.compile(flex_attention, dynamic=False) if bench.device.type == "cuda" else flex_attention

    def measure(batch: int, query_len: int, seq_len: int) -> Row:
        query = bench.random(batch, scale.heads, query_len, scale.head_dim)
        places = bench.memory.contiguous(batch, seq_len)
        mask = None
        if query_len > 1:
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, query_len, seq_len, str(bench.device))

        def call(i: int) -> Any:
            return flex(query, *places[i % len(places)], block_mask=mask, enable_gqa=True)

        started = time.perf_counter()
        call(0)
        bench.timer.synchronize()
        row = {"first_call_s": time.perf_counter() - started}
        return row | bench.timer.time(call, batch * seq_len * bench.memory.token_bytes).row()

    for batch, context in scale.flex_decodes:
        yield Point(f"{batch} x {context}", partial(measure, batch, 1, context))
    n = scale.tile_prefill
    yield Point(f"prefill of {n}", partial(measure, 1, n, n))


# ---------------------------------------------------------------------------------------------------------- sanitizer


def sanitizer_points(bench: Bench) -> Points:
    """Every kernel once, small: for compute-sanitizer to watch."""
    small = Bench(SANITIZED, bench.device, {})
    n, heads = SANITIZED.check_tokens, SANITIZED.heads
    sinks, slopes = (torch.rand(heads, device=bench.device) for _ in range(2))
    features = {"sliding_window": 21, "softcap": 5.0, "sinks": sinks, "alibi_slopes": slopes}
    query_lens, seq_lens = [1, 1, 1, n // 3, 9], [n - 3, 1, n // 2, n // 3, n]
    checks: dict[str, Callable[[], float]] = {
        f"{name}, {splits} split(s)": lambda options=options, splits=splits: Step(
            small, query_lens, seq_lens, **options
        ).check(range(5), splits)
        for name, options in (("attention", {}), ("window, softcap, sinks, ALiBi", features))
        for splits in (1, 3)
    }
    checks |= {
        "layouts": lambda: check_layouts(small),
        "fp8": lambda: check_fp8(small),
        "cache write": lambda: check_write(small),
        "block copy": lambda: check_copy(small),
    }
    for name, check in checks.items():
        yield Point(name, lambda check=check: {"rms": check()})


# ------------------------------------------------------------------------------------------------------------ running


@dataclass(frozen=True)
class Family:
    """Points that are compared with the reference together, before any is measured."""

    name: str
    points: Callable[[Bench], Points]
    check: Callable[[Bench], float] | None = None
    pivot: tuple[str, str] | None = None  # columns of rows and of columns, for a table of microseconds
    is_default: bool = True


# What matters most first: the time limit cuts off the end.
FAMILIES = (
    Family("limits", limit_points),
    Family("decode", decode_points, check_decode),
    Family("prefill", prefill_points, check_prefill),
    Family("write", write_points, check_write),
    Family("copy", copy_points, check_copy),
    Family("ragged", ragged_points, check_ragged),
    Family("splits", split_points, check_decode, pivot=("splits", "case")),
    Family("mixed", mixed_points, check_mixed),
    Family("fp8", fp8_points, check_fp8),
    Family("layouts", layout_points, check_layouts),
    Family("swap", swap_points),
    Family("launch", launch_points, check_decode),
    Family("tiles", tile_points, check_decode, pivot=("tile", "case")),
    Family("flex", flex_points),
    Family("sanitizer", sanitizer_points, is_default=False),
)


@dataclass
class Run:
    """Measures families one by one, saves after every row.

    Attributes:
        bench: What they need.
        report: Where rows go.
        deadline: `time.monotonic()` after which the rest is skipped.
        is_alive: Whether the device still answers.
    """

    bench: Bench
    report: Report
    deadline: float
    is_alive: bool = field(default=True, init=False)

    def family(self, family: Family) -> None:
        """Measures one, whatever happens in it."""
        started = time.monotonic()
        state = self.report.data["families"][family.name] = {"status": "running"}
        self.report.save()
        try:
            if time.monotonic() > self.deadline:
                state["status"] = "skipped: time limit"
                return
            if family.check:
                state["rms"] = family.check(self.bench)
            state["status"] = self._points(family)
        except Exception as error:  # the other families go on
            state["status"] = f"failed: {type(error).__name__}: {first_line(error)}"
            self._look()
        finally:
            state["seconds"] = round(time.monotonic() - started, 1)
            self.report.save()
        tqdm.write(f"{family.name}: {state['status']}, {state['seconds']} s", file=sys.stdout)
        sys.stdout.flush()

    def _points(self, family: Family) -> str:
        points = list(family.points(self.bench))
        for number, point in enumerate(tqdm(points, desc=family.name, leave=False, disable=not sys.stderr.isatty())):
            if time.monotonic() > self.deadline:
                return f"skipped: {len(points) - number} of {len(points)} points, time limit"
            row = {"family": family.name, "case": point.case}
            try:
                row |= point.measure()
            except Exception as error:  # out of resources, or a library's
                row["error"] = f"{type(error).__name__}: {first_line(error)}"
                self._look()
            self.report.data["rows"].append(row)
            self.report.save()
            if not self.is_alive:
                return f"failed: the device stopped answering at {point.case}: {row['error']}"
        return "done"

    def _look(self) -> None:
        """After an error: whether the device is still there, and its memory."""
        gc.collect()
        try:
            self.bench.timer.synchronize()
            if self.bench.device.type == "cuda":
                torch.cuda.empty_cache()
        except Exception:
            self.is_alive = False


def first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:300]


def measure(args: argparse.Namespace, report: Report) -> int:
    """Measures what the report does not have yet; 0, or `CRASHED` if the device is gone and something is left to do."""
    deadline = time.monotonic() + args.time_limit
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    device = torch.device(args.device)
    scale = TINY if device.type == "cpu" else QUICK if args.quick else FULL
    for state in report.data["families"].values():
        if state["status"] == "running":
            state["status"] = "failed: the process ended in it"
    if args.only == ["sanitizer"]:
        scale = SANITIZED
    run = Run(Bench(scale, device, report.data["limits"]), report, deadline)
    report.data["device"] = device_facts(device)
    gc.freeze()  # each capture of a graph collects garbage: not what is there for good
    for family in FAMILIES:
        if family.name in args.only and family.name not in report.data["families"]:
            run.family(family)
            if not run.is_alive:
                return CRASHED
    return 0


def supervise(args: argparse.Namespace, argv: Sequence[str], report: Report) -> None:
    """Measures in a child process, in another one if it dies: with the families that none has begun."""
    deadline = time.monotonic() + args.time_limit
    begun = -1
    while begun < len(report.data["families"]) and (left := deadline - time.monotonic()) > 0:
        begun = len(report.data["families"])
        command = [sys.executable, __file__, *argv, "--child", "--time-limit", str(left)]
        try:
            status = subprocess.run(command, timeout=left + 45).returncode
        except subprocess.TimeoutExpired:
            print("the measuring process did not end in time and was killed", flush=True)
            status = None
        report.data = Report.load(report.path).data
        if not status:
            break
        print(f"the measuring process ended with status {status}; going on with what is left", flush=True)
    for state in report.data["families"].values():
        if state["status"] == "running":
            state["status"] = "failed: the process ended in it"


# ------------------------------------------------------------------------------------------------------------- report


def worst(rows: list[Row], name: str) -> tuple[float, str] | None:
    """The smallest of a column, and its case."""
    found = [(row[name], row["case"]) for row in rows if row.get(name) is not None]
    return min(found) if found else None


def bars(report: Report) -> list[Row]:
    """What the kernels should reach, and whether they do; `None`: not measured."""

    def at_least(what: str, limit: float, rows: list[Row], name: str) -> None:
        found = worst(rows, name)
        is_share = name == "share"
        wanted = f"{limit:.0%} of a copy" if is_share else f"{limit:.0f} TFLOP/s"
        text = "not measured"
        if found:
            text = (f"{found[0]:.1%}" if is_share else f"{found[0]:.0f}") + (f" at {found[1]}" if len(rows) > 1 else "")
        results.append({"bar": what, "wanted": wanted, "measured": text, "passed": found and found[0] >= limit})

    def at_most(what: str, limit: float | None, us: float | None) -> None:
        is_known = limit is not None and us is not None
        results.append(
            {
                "bar": what,
                "wanted": "not measured" if limit is None else f"{limit:.1f} us",
                "measured": "not measured" if us is None else f"{us:.1f} us",
                "passed": us <= limit if is_known else None,
            }
        )

    results: list[Row] = []
    decodes = {(row["batch"], row["context"]): row for row in report.rows("decode")}
    large = [row for (batch, _), row in decodes.items() if batch >= 32]
    at_least("decode, batch 32 and above, 4k and above", 0.9, [r for r in large if r["context"] >= 4096], "share")
    at_least("decode, batch 32 and above, 1k", 0.7, [r for r in large if r["context"] == 1024], "share")
    at_most("decode, 8 x 16k: best published 132.7 us, and 5 %", 132.7 * 1.05, decodes.get((8, 16384), {}).get("us"))
    single = decodes.get((1, 32768), {})
    flash = [us for name, us in single.get("sdpa_all_us", {}).items() if name.startswith("flash")]
    at_most("decode, 1 x 32k: contiguous flash SDPA", min(flash, default=None), single.get("us"))
    prefills = [r for r in report.rows("prefill") if r["tokens"] == 8192 and not r["before"]]
    at_least("prefill of 8k", 400, prefills, "tflop_s")
    by_triton = [r for family in ("write", "copy") for r in report.rows(family) if r["by"] == "triton"]
    at_least("cache write, 8192 tokens", 0.8, [r for r in by_triton if r.get("tokens") == 8192], "share")
    at_least("block copy, 256 blocks", 0.8, [r for r in by_triton if r.get("blocks") == 256], "share")
    return results


def table(rows: list[Row]) -> str:
    """All columns that some row has, in the order they appear; no nested ones."""
    columns = list(dict.fromkeys(name for row in rows for name, v in row.items() if not isinstance(v, dict)))
    columns = [name for name in columns if name != "family"]
    return markdown_table(columns, [[show(name, row.get(name)) for name in columns] for row in rows])


def pivot_table(rows: list[Row], down: str, across: str) -> str:
    """Microseconds over two columns: the best of each column bold, what the launcher chooses by itself with an asterisk."""
    heads, names = (list(dict.fromkeys(row[key] for row in rows if key in row)) for key in (across, down))
    cells = {(row[down], row[across]): row for row in rows if "us" in row}
    best = {head: min((row["us"] for (_, h), row in cells.items() if h == head), default=0) for head in heads}

    def cell(name: Any, head: Any) -> str:
        row = cells.get((name, head))
        if row is None:
            return "-"
        text = f"{row['us']:.1f}"
        return (f"**{text}**" if row["us"] == best[head] else text) + ("*" if row.get("is_chosen") else "")

    return markdown_table([down, *heads], [[str(name), *(cell(name, head) for head in heads)] for name in names])


def render(report: Report) -> str:
    """The report as markdown, the bars last."""
    data = report.data
    facts = [f"{name} {value}" for name, value in (data["device"] | data["versions"]).items()]
    parts = ["# The Triton kernels on a GPU", ", ".join(facts), data["what"]]
    for family in FAMILIES:
        state = data["families"].get(family.name)
        if state is None:
            continue
        rms = f"; RMS error {state['rms']:.1e}" if "rms" in state else ""
        parts.append(f"## {family.name}\n\n{state['status']}, {state.get('seconds', 0)} s{rms}")
        rows = [row for row in data["rows"] if row["family"] == family.name]
        good = [row for row in rows if "error" not in row]
        errors = dict.fromkeys(f"{row['case']}: {row['error']}" for row in rows if "error" in row)
        if good:
            parts.append(pivot_table(good, *family.pivot) if family.pivot else table(good))
        if errors:
            parts.append("\n".join(f"- {error}" for error in list(errors)[:8]) + ("\n- ..." if len(errors) > 8 else ""))
    if data["bars"]:
        parts.append("## Bars\n\n" + table(data["bars"]))
    return "\n\n".join(parts) + "\n"


def plot(report: Report, path: Path) -> str | None:
    """Decode's share of the copy bandwidth over the context, and prefill beside torch; why not, if it can't."""
    decodes, prefills = report.rows("decode"), report.rows("prefill")
    if not decodes or not prefills:
        return "decode or prefill was not measured"
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "matplotlib is not installed (pip install hf-paged[bench])"
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for batch in dict.fromkeys(row["batch"] for row in decodes):
        own = sorted((row["context"], row["share"] or 0.0) for row in decodes if row["batch"] == batch)
        left.plot(*zip(*own), marker="o", label=f"batch {batch}")
    contexts = sorted({row["context"] for row in decodes})
    left.set(xscale="log", xlabel="context", ylabel="KV read, share of copy bandwidth", title="decode", ylim=(0, 1.15))
    left.set_xticks(contexts, [str(n) for n in contexts])
    left.minorticks_off()
    left.axhline(0.9, color="gray", linewidth=0.8, linestyle="--")
    left.legend(fontsize=8)
    positions = np.arange(len(prefills))
    right.bar(positions - 0.2, [row["tflop_s"] for row in prefills], 0.4, label="paged")
    right.bar(positions + 0.2, [row.get("sdpa_tflop_s") or 0 for row in prefills], 0.4, label="best SDPA, contiguous")
    right.set_xticks(positions, [row["case"] for row in prefills], fontsize=8, rotation=15)
    right.set(ylabel="TFLOP/s", title="prefill, causal")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(f"{report.data['device'].get('name')}, 32 query heads, 8 kv heads, head dim 128, bf16", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [family.name for family in FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="folder of JSON, markdown and plot"
    )
    parser.add_argument("--quick", action="store_true", help="one point a family, to gpu_kernels-quick.*")
    parser.add_argument("--only", nargs="+", choices=names, help="these families, and the limits")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds; what is left then is skipped")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--in-process", action="store_true", help="no child process: a crash ends it all")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cpu" and not (args.quick and launch.is_interpreting()):
        parser.error("--device cpu only shows that this program runs: with --quick and TRITON_INTERPRET=1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is there")
    args.only = args.only or [family.name for family in FAMILIES if family.is_default]
    if args.only != ["sanitizer"] and "limits" not in args.only:
        args.only = ["limits", *args.only]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    path = args.out / f"gpu_kernels{'-quick' if args.quick else ''}.json"
    if args.child:
        status = measure(args, Report.load(path))
        sys.stdout.flush()
        os._exit(status)  # a device that is gone can keep an ordinary exit waiting
    settings = {"quick": args.quick, "only": args.only, "time_limit_s": args.time_limit, "device": args.device}
    what = "microseconds are medians, p10 and p90 beside; share: of the bandwidth of a copy, read and written, on this device"
    empty: Row = {"limits": {}, "families": {}, "rows": [], "bars": []}
    data = {"what": what, "settings": settings, "device": {}, "versions": versions()} | empty
    report = Report(path, data)
    report.save()
    if args.in_process:
        measure(args, report)
    else:
        supervise(args, sys.argv[1:] if argv is None else argv, report)
    report.data["bars"] = bars(report)
    report.save()
    text = render(report)
    path.with_suffix(".md").write_text(text)
    print(text)
    try:
        reason = plot(report, path.with_suffix(".png"))
    except Exception as error:  # a picture is not worth the numbers
        reason = first_line(error)
    if reason:
        print(f"no plot: {reason}")
    missing = [name for name in args.only if name not in report.data["families"]]
    failed = [name for name, state in report.data["families"].items() if state["status"].startswith("failed")]
    if missing or failed:
        print(f"failed: {', '.join(failed) or 'none'}; not begun: {', '.join(missing) or 'none'}")
    return 1 if failed or (missing and len(missing) == len(args.only)) else 0


if __name__ == "__main__":
    sys.exit(main())
