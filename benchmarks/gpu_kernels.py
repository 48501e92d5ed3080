"""The Triton kernels on a GPU: times, the share of what the card's memory and matrix units can do, which settings win.

    PYTHONPATH=. python benchmarks/gpu_kernels.py --out benchmarks/results          # all that is not there yet
    PYTHONPATH=. python benchmarks/gpu_kernels.py --only decode prefill --quick     # one point a family
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/gpu_kernels.py --quick --device cpu    # that it runs at all

The shape is that of Llama-3.1-8B: 32 query heads, 8 kv heads, head dim 128, 32 layers, bfloat16, blocks of 16 tokens
from all over a pool that fills a large part of the card. Limits are measured on the same card: a large copy (bytes read
and written), a large matrix product. A layer's attention is a call; calls in turn go through all layers, and through as
many sets of blocks as it takes for the L2 cache to be cold. Timed is a CUDA graph of many calls (`common.Timer`).

Each family is first compared with the float64 reference, and left out if it is wrong. Measuring happens in a child
process: a crash costs one point. What was measured is in the JSON file at any moment, and is not measured again unless
the kernels' code has changed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import children
import common
import numpy as np
import torch
import torch.nn.functional as F
from common import Family, Point, Report, Row
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from hf_paged.attention.backends.triton import TritonStep
from hf_paged.attention.decode_work import LEAST_SAVED
from hf_paged.attention.metadata import AttentionMetadata, pad_tables
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import launch, ops, reference, shared_decode
from hf_paged.kernels import paged_decode as decode
from hf_paged.kernels import paged_prefill as prefill

MAX_RMS = 1e-2 if launch.is_interpreting() else 5e-3  # the interpreter cuts bfloat16 off instead of rounding it
ROOT = Path(__file__).parent.parent
# What figures depend on
CODE = [ROOT / "hf_paged" / name for name in ("kernels", "attention")]
CODE += [ROOT / "benchmarks" / name for name in ("gpu_kernels.py", "common.py")]
GIB = 2**30
DTYPE = torch.bfloat16
E4M3 = torch.float8_e4m3fn
Points = Iterator[Point]


class Scale:
    """The shapes that are measured; a pair is sequences and tokens of each."""

    heads, kv_heads, head_dim, layers = 32, 8, 128, 32
    memory, fp8_memory = 60 * GIB, 10 * GIB  # of the pools
    cold = GIB // 2  # bytes read before the first of them is read again
    samples, matmul = 15, 8192
    contexts, batches = (128, 1024, 4096, 16384, 32768), (1, 8, 32, 128, 256)
    most_tokens = 4 * 2**20  # of a decode: beyond, nothing new is seen
    ragged = (32768, *(128 + 28 * i for i in range(31)))
    cases = ((32, 4096), (8, 16384), (1, 32768), (8, 4096))
    splits = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
    tiles = tuple(itertools.product((32, 64, 128), (4, 8), (2, 3, 4, 5)))  # tokens, warps, stages
    # Sequences, new tokens of each, tokens before them.
    prefills = ((1, 512, 0), (1, 2048, 0), (1, 8192, 0), (4, 2048, 0), (1, 2048, 8192), (1, 16, 32768))
    long_prefill = 8192
    # Samples, tokens of the prompt that they share, tokens of each besides.
    shared = (
        (2, 8192, 64),
        (4, 2048, 64),
        (16, 512, 64),
        (16, 2048, 256),
        (64, 512, 64),
        (64, 2048, 256),
        (256, 2048, 64),
    )
    writes, copies = (1, 32, 256, 2048, 8192), (1, 16, 256)
    small_pool = 1024  # blocks, for what torch's indexing is measured beside
    layout_cases, block_sizes = ((32, 4096), (128, 1024)), (16, 32, 64, 128)
    check_tokens = 1024  # bounds the lengths of what is compared with the reference


class Quick(Scale):
    """One point a family."""

    memory, fp8_memory, samples = 8 * GIB, 4 * GIB, 5
    contexts, batches, cases, layout_cases = (4096,), (32,), ((32, 4096),), ((32, 4096),)
    splits, tiles, block_sizes, writes, copies = (1, 4), ((64, 4, 3),), (16,), (2048,), (16,)
    prefills, long_prefill, shared = ((1, 2048, 0),), 2048, ((16, 2048, 256),)


class Tiny(Quick):
    """For Triton's interpreter."""

    heads, kv_heads, head_dim, layers = 2, 1, 16, 2
    memory, fp8_memory, cold, samples, matmul = 2**19, 2**18, 2**12, 1, 64
    contexts, batches, cases, layout_cases, ragged = (32,), (2,), ((2, 48),), ((2, 40),), (64, 20)
    splits, tiles, writes, copies, small_pool = (1, 3), ((32, 4, 3),), (5,), (2,), 16
    prefills, long_prefill, check_tokens = ((2, 40, 0), (1, 20, 24)), 40, 40
    shared = ((3, 192, 5),)


class Sanitized(Tiny):
    """For compute-sanitizer: the heads that are measured, little of everything else."""

    heads, kv_heads, head_dim, memory, fp8_memory, check_tokens = 8, 2, 128, 2**23, 2**22, 160


class WrongError(Exception):
    """A kernel's result is not the reference's."""


class Memory:
    """One large piece of random numbers, which every pool and every contiguous tensor is a view of."""

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device, scale: type[Scale]) -> None:
        self._kv_heads, self._head_dim = scale.kv_heads, scale.head_dim
        self.dtype = dtype
        self.token_bytes = 2 * scale.kv_heads * scale.head_dim * dtype.itemsize  # in one layer
        self.flat = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        self.num_bytes = self.flat.numel() * dtype.itemsize
        for part in self.flat.split(2**27):
            part.copy_(torch.randn(part.numel(), dtype=DTYPE, device=device))

    def pool(self, num_blocks: int, layers: int, block_size: int = 16, is_layer_major: bool = False) -> Tensor:
        """A pool; its strides say whether a block's layers or a layer's blocks lie side by side."""
        block = (2, self._kv_heads, block_size, self._head_dim)
        flat = self.flat[: num_blocks * layers * math.prod(block)]
        if is_layer_major:
            return flat.view(layers, num_blocks, *block).transpose(0, 1)
        return flat.view(num_blocks, layers, *block)

    def contiguous(self, batch: int, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[batch, kv_heads, num_tokens, head_dim]`, several of them in different places."""
        shape = (2, batch, self._kv_heads, num_tokens, self._head_dim)
        num_places = min(256, self.flat.numel() // math.prod(shape))
        places = self.flat[: num_places * math.prod(shape)].view(num_places, *shape)
        return [(place[0], place[1]) for place in places]


class Bench:
    """What all families need: shapes, device, memory, and the limits that the device was found to have."""

    def __init__(self, scale: type[Scale], device: torch.device, limits: dict[str, float]) -> None:
        torch.manual_seed(0)
        self.scale, self.device, self.limits = scale, device, limits
        self.timer = common.Timer(device, scale.cold, scale.samples)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else scale.memory * 2
        self.memory = Memory(min(scale.memory, int(0.7 * free)), DTYPE, device, scale)
        self.partials = ops.Partials()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self.device)

    def bandwidth(self, us: float, num_bytes: int) -> Row:
        """GB/s, and how much of what a copy reaches that is."""
        gb_s = num_bytes / us / 1e3
        copy = self.limits.get("copy_gb_s")
        return {"gb_s": gb_s, "share": gb_s / copy if copy else None}


class Step:
    """A step over a pool: called with a number it runs the attention of one layer, with each number another one.

    The blocks are drawn from all over the memory; once all layers have been read, other blocks are.
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
        shared: int = 0,
        least_saved: float = LEAST_SAVED,
        **options: Any,
    ) -> None:
        """Lays a step out, all of whose sequences begin with `shared` tokens, a multiple of the block size.

        Where these are worth `least_saved` bytes, they are read together; `options` are those of `AttentionParams`.
        """
        scale, self.memory = bench.scale, memory or bench.memory
        self.query_lens, self.seq_lens, self.block_size = list(query_lens), list(seq_lens), block_size
        self._bench, self._options = bench, {"scale": scale.head_dim**-0.5} | options
        sizes, common = -(-np.array(seq_lens) // block_size), shared // block_size
        # Of each place in the tables, one after another, the block; what is shared comes first.
        places = np.concatenate([np.arange(size) for size in sizes])
        is_own = places >= common
        places[is_own] = common + np.arange(is_own.sum())
        needed = int(places.max()) + 1
        self.layers = scale.layers
        while (capacity := self.memory.num_bytes // (self.layers * block_size * self.memory.token_bytes)) <= needed:
            if self.layers == 1:
                raise ValueError(f"{sum(seq_lens)} tokens don't fit into {self.memory.num_bytes / GIB:.0f} GiB")
            self.layers //= 2
        self.pool = self.memory.pool(capacity, self.layers, block_size, is_layer_major)
        self.kv_bytes = (sum(seq_lens) - shared * (len(seq_lens) - 1 if shared else 0)) * self.memory.token_bytes
        num_sets = min(-(-scale.cold // (self.layers * self.kv_bytes)), (capacity - 1) // needed)
        shuffled = np.random.default_rng(0).permutation(capacity)
        lens = np.array(query_lens), np.array(seq_lens)
        self._sets = [
            AttentionMetadata(
                pad_tables(own[places], sizes, shuffled[-1], np.int64), *lens, block_size, shuffled[-1], bench.device
            )
            for own in shuffled[: num_sets * needed].reshape(num_sets, needed)
        ]
        for metadata in self._sets:
            metadata.least_saved = least_saved
        self.query = bench.random(sum(query_lens), scale.heads, scale.head_dim)

    @property
    def flops(self) -> int:
        """Multiplications and additions for what queries really see."""
        seen = sum(n * (s - n) + n * (n + 1) // 2 for n, s in zip(self.query_lens, self.seq_lens))
        return 4 * self._bench.scale.head_dim * self._bench.scale.heads * seen

    def __call__(self, number: int, num_splits: int | None = None) -> Tensor:
        layer, metadata = number % self.layers, self._sets[number // self.layers % len(self._sets)]
        step = TritonStep(self.pool, metadata, self._bench.partials)
        with self._cut_into(num_splits):
            return step.attend(self.query, AttentionParams(layer, **self._options))

    def _cut_into(self, num_splits: int | None) -> AbstractContextManager[Any]:
        """Within it, a sequence of the mean length is cut into so many items; `None`: as lengths say."""
        if num_splits is None:
            return nullcontext()
        plan = ops.decode_plan(self.query, self.pool)[0], num_splits * len(self.seq_lens)
        return mock.patch.object(ops, "decode_plan", lambda *_: plan)

    def chosen_splits(self) -> int:
        """Items of the sequence that is split into most, by default."""
        with mock.patch.object(decode, "paged_decode", wraps=decode.paged_decode) as launcher:
            self(0)
        return max(launcher.call_args.args[2][:, 3].tolist(), default=1)

    def reads_together(self) -> bool:
        """Whether what sequences share is read for several of them at once."""
        with mock.patch.object(shared_decode, "shared_decode", wraps=shared_decode.shared_decode) as launcher:
            self(0)
        return bool(launcher.called)

    def tiles(self) -> Row:
        """What the kernels it takes would choose by themselves, before shared memory cuts stages."""
        found: Row = {}

        def noting(module: Any, name: str) -> Any:
            def tiling(*args: Any, original: Any = module.tiling, **kwargs: Any) -> Any:
                tile = original(*args, **kwargs)
                found[name] = "x".join(map(str, tile))
                return tile

            return mock.patch.object(module, "tiling", tiling)

        with noting(decode, "decode_tile"), noting(prefill, "prefill_tile"):
            self(0)
        return found

    def time(self, num_splits: int | None = None) -> Row:
        """Microseconds of a layer, and the bandwidth that its KV was read with."""
        times = self._bench.timer.time(lambda i: self(i, num_splits), self.kv_bytes)
        return times.row() | self._bench.bandwidth(times.us, self.kv_bytes) | self.tiles()

    def check(self, picked: Sequence[int], num_splits: int | None = None) -> float:
        """RMS ratio of the result to the float64 reference's, for the picked sequences.

        Raises:
            WrongError: It is above `MAX_RMS`.
        """
        bounds = np.cumsum([0, *self.query_lens])
        rows = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in picked]).to(self._bench.device)
        query_lens, seq_lens = (np.array(lens)[picked] for lens in (self.query_lens, self.seq_lens))
        sizes = -(-seq_lens // self.block_size)
        blocks = torch.cat([self._sets[0].block_tables[i, :size].long() for i, size in zip(picked, sizes)])
        states = reference.elements(self.pool)[blocks, 0].view(self.memory.dtype).double().unsqueeze(1)
        states = torch.cat([states, torch.zeros_like(states[:1])])  # and a null block
        tables = pad_tables(np.arange(len(blocks)), sizes, len(blocks), np.int64)
        metadata = AttentionMetadata(tables, query_lens, seq_lens, self.block_size, len(blocks), self._bench.device)
        options = {name: v.double() if isinstance(v, Tensor) else v for name, v in self._options.items()}
        expected = reference.paged_attention(self.query[rows].double(), states, 0, metadata.groups, **options)
        return require(common.rms_ratio(self(0, num_splits)[rows], expected))


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
        half = min(bench.memory.flat.numel() // 2, 2 * GIB)  # 4 GiB
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

    yield Point("large copy", copy)
    yield Point(f"bf16 matmul of {bench.scale.matmul}", matmul)


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
        return {"math": partial(grouped, SDPBackend.MATH), "math, plain": partial(plain, SDPBackend.MATH)}
    kind = "packed" if is_decode else "expanded"
    found = {
        "flash": partial(grouped, SDPBackend.FLASH_ATTENTION),
        f"flash, {kind}": partial(plain, SDPBackend.FLASH_ATTENTION),
        f"efficient, {kind}": partial(plain, SDPBackend.EFFICIENT_ATTENTION),
    }
    if not is_decode or (batch, seq_len) in scale.cases:  # cuDNN builds a kernel for each shape, which takes seconds
        found["cudnn"] = partial(grouped, SDPBackend.CUDNN_ATTENTION)
    return found


def time_sdpa(bench: Bench, batch: int, query_len: int, seq_len: int, num_bytes: int) -> Row:
    """The fastest way, and all that work; empty if none does."""
    found: dict[str, float] = {}
    for name, call in sdpa_calls(bench, batch, query_len, seq_len).items():
        try:
            found[name] = bench.timer.time(call, num_bytes, sample_us=1000.0).us
        except Exception:  # "No available kernel", for example
            bench.timer.synchronize()  # raises if the device is gone
    best = min(found, key=found.__getitem__, default=None)
    return {"sdpa_us": found[best], "sdpa": best, "sdpa_all_us": found} if best else {}


# ------------------------------------------------------------------------------------------------------------- decode


@functools.cache
def check_decode(bench: Bench) -> float:
    batch, context = bench.scale.cases[0]
    step = decoding(bench, batch, context - 5)  # a last block that is not full
    return max(step.check([0, batch - 1], num_splits) for num_splits in (None, 1, 3))


def decode_points(bench: Bench) -> Points:
    def measure(batch: int, context: int) -> Row:
        step = decoding(bench, batch, context)
        row = {"batch": batch, "context": context, "splits": step.chosen_splits()} | step.time()
        row |= time_sdpa(bench, batch, 1, context, step.kv_bytes)
        return row | ({"times_sdpa": row["sdpa_us"] / row["us"]} if "sdpa_us" in row else {})

    for context, batch in itertools.product(bench.scale.contexts, bench.scale.batches):
        if batch * context <= bench.scale.most_tokens:
            yield Point(f"{batch} x {context}", partial(measure, batch, context))


def check_ragged(bench: Bench) -> float:
    lens = [min(n, bench.scale.check_tokens) for n in bench.scale.ragged]
    return Step(bench, [1] * len(lens), lens).check(range(len(lens)))


def time_splits(make: Callable[[], Step], num_splits: int) -> Row:
    is_chosen = num_splits == make().chosen_splits()
    return {"splits": num_splits, "is_chosen": is_chosen} | make().time(num_splits)


def ragged_points(bench: Bench) -> Points:
    lens = bench.scale.ragged
    make = functools.cache(lambda: Step(bench, [1] * len(lens), lens))
    case = f"{lens[0]} beside {len(lens) - 1} of {min(lens)} to {max(lens[1:])}"
    yield Point(case, lambda: {"splits": make().chosen_splits(), "is_chosen": True} | make().time())
    for num_splits in bench.scale.splits:
        yield Point(case, partial(time_splits, make, num_splits))


def split_points(bench: Bench) -> Points:
    for batch, context in bench.scale.cases:
        make = functools.cache(partial(decoding, bench, batch, context))
        for num_splits in bench.scale.splits:
            yield Point(f"{batch} x {context}", partial(time_splits, make, num_splits))


# ------------------------------------------------------------------------------------------------------ shared tokens

# Whatever it saves, or never.
WAYS = {"together": -math.inf, "alone": math.inf}


def samples_of(bench: Bench, samples: int, prompt: int, own: int, least_saved: float = LEAST_SAVED) -> Step:
    """Samples of one prompt, with some tokens of their own each."""
    return Step(bench, [1] * samples, [prompt + own] * samples, shared=prompt, least_saved=least_saved)


def check_shared(bench: Bench) -> float:
    samples, prompt, own = bench.scale.shared[0]
    given = samples, min(prompt, -(-bench.scale.check_tokens // 128) * 128), own
    steps = {way: samples_of(bench, *given, least_saved) for way, least_saved in WAYS.items()}
    if [step.reads_together() for step in steps.values()] != [True, False]:
        raise WrongError("the two ways are the same")
    return max(step.check([0, samples - 1]) for step in steps.values())


def shared_points(bench: Bench) -> Points:
    """Both ways, and which of them `decode_work.py` would take."""

    def measure(way: str, samples: int, prompt: int, own: int) -> Row:
        step = samples_of(bench, samples, prompt, own, WAYS[way])
        is_chosen = samples_of(bench, samples, prompt, own).reads_together() == step.reads_together()
        row = {"samples": samples, "prompt": prompt, "own": own, "is_chosen": is_chosen}
        return row | bench.timer.time(step, step.kv_bytes).row() | step.tiles()

    for (samples, prompt, own), way in itertools.product(bench.scale.shared, WAYS):
        yield Point(f"{samples} of {prompt}, {own} own", partial(measure, way, samples, prompt, own), {"way": way})


# ------------------------------------------------------------------------------------------------------------ prefill


def check_prefill(bench: Bench) -> float:
    n = bench.scale.check_tokens
    return Step(bench, [n * 3 // 10, 1, n // 13 + 1], [n * 3 // 10, n, n * 11 // 10]).check([0, 1, 2])


def prefill_points(bench: Bench) -> Points:
    def measure(batch: int, new: int, before: int) -> Row:
        step = Step(bench, [new] * batch, [before + new] * batch)
        times = bench.timer.time(step, step.kv_bytes)
        row = {"tokens": new, "before": before} | times.row() | {"tflop_s": step.flops / times.us / 1e6} | step.tiles()
        row |= time_sdpa(bench, batch, new, before + new, step.kv_bytes)
        if "sdpa_us" in row:
            row |= {"sdpa_tflop_s": step.flops / row["sdpa_us"] / 1e6, "times_sdpa": row["sdpa_us"] / row["us"]}
        return row

    for batch, new, before in bench.scale.prefills:
        yield Point(f"{batch} x {new}" + (f" behind {before}" if before else ""), partial(measure, batch, new, before))


# -------------------------------------------------------------------------------------------------------------- tiles


def with_tile(module: Any, tile: launch.Tiling | None, run: Callable[[], Any]) -> Any:
    """Runs something with this tile instead of what `module.tiling` would choose."""
    if tile is None:
        return run()
    # `fit` takes stages away that the device has no shared memory for: here that is an error to be seen.
    fit = mock.patch.object(launch.Tiling, "fit", lambda tiling, *_: tiling)
    with fit, mock.patch.object(module, "tiling", lambda *_, **__: tile):
        return run()


def tile_points(bench: Bench) -> Points:
    n = bench.scale.long_prefill
    cases: dict[str, tuple[Any, Callable[[], Step]]] = {f"prefill of {n}": (prefill, partial(Step, bench, [n], [n]))}
    for batch, context in bench.scale.cases[:3]:
        cases[f"{batch} x {context}"] = (decode, partial(decoding, bench, batch, context))

    def measure(module: Any, make: Any, expected: Any, tile: launch.Tiling | None) -> Row:
        step, truth = make(), expected()
        rms = require(common.rms_ratio(with_tile(module, tile, lambda: step(0)), truth))
        times = with_tile(module, tile, lambda: bench.timer.time(step, step.kv_bytes, sample_us=1000.0))
        return {"rms": rms} | times.row()

    for case, (module, create) in cases.items():
        make = functools.cache(create)
        expected = functools.cache(lambda make=make: make()(0))
        tiles = [launch.Tiling(128 if module is prefill else 16, *tile) for tile in bench.scale.tiles]
        if module is prefill:  # fewer rows: only with what stands a chance
            tiles += [tile._replace(rows=64) for tile in tiles if tile.tokens >= 64 and tile.num_stages <= 3]
        for tile in (None, *tiles):
            name = "chosen" if tile is None else "{} rows, {} tokens, {} warps, {} stages".format(*tile)
            yield Point(case, partial(measure, module, make, expected, tile), {"tile": name})


def by_hand(run: Callable[[], Any]) -> Any:
    """Runs something as on a device that can't convert e4m3 by itself."""
    device = launch.Device.of
    with mock.patch.object(launch.Device, "of", staticmethod(lambda d: replace(device(d), has_native_fp8=False))):
        return run()


def check_fp8(bench: Bench) -> float:
    memory = Memory(bench.scale.fp8_memory, E4M3, bench.device, bench.scale)
    step = decoding(bench, 2, bench.scale.check_tokens - 3, memory=memory)
    checks = [partial(step.check, [0, 1], num_splits) for num_splits in (1, 3)]
    return max(error for check in checks for error in (check(), by_hand(check)))


def fp8_points(bench: Bench) -> Points:
    memory = functools.cache(lambda: Memory(bench.scale.fp8_memory, E4M3, bench.device, bench.scale))

    def measure(batch: int, context: int, name: str) -> Row:
        step = decoding(bench, batch, context, memory=None if name == "bf16" else memory())
        return by_hand(step.time) if name == "by hand" else step.time()

    for (batch, context), name in itertools.product(bench.scale.cases[:2], ("native", "by hand", "bf16")):
        yield Point(f"{batch} x {context}", partial(measure, batch, context, name), {"conversion": name})


# ------------------------------------------------------------------------------------------------ cache write, copies


def require_equal(pool: Tensor, expected: Tensor) -> float:
    if not torch.equal(pool, expected):
        raise WrongError(f"{int((pool != expected).sum())} numbers of the pool differ from the reference's")
    return 0.0


def check_write(bench: Bench) -> float:
    pool = bench.memory.pool(8, bench.scale.layers).clone()
    expected = pool.clone()
    slots = torch.randperm(8 * 16, device=bench.device)[:37]
    key, value = (bench.random(37, bench.scale.kv_heads, bench.scale.head_dim) for _ in range(2))
    ops.reshape_and_cache(key, value, pool, 1, slots)
    reference.reshape_and_cache(key, value, expected, 1, slots)
    return require_equal(pool, expected)


def write_points(bench: Bench) -> Points:
    scale = bench.scale

    def measure(num_tokens: int, write: Callable[..., None]) -> Row:
        pool = bench.memory.pool(scale.small_pool, scale.layers)
        # What was just decoded goes to a block of its own each, a prompt fills blocks.
        run = 1 if num_tokens <= 256 else 16
        firsts = torch.randperm(scale.small_pool * 16 // run, device=bench.device)[: -(-num_tokens // run)] * run
        slots = (firsts[:, None] + torch.arange(run, device=bench.device)).flatten()[:num_tokens].contiguous()
        num_bytes = 2 * num_tokens * bench.memory.token_bytes  # read and written
        num_places = min(256, -(-scale.cold // num_bytes))
        key, value = (bench.random(num_places, num_tokens, scale.kv_heads, scale.head_dim) for _ in range(2))

        def call(i: int) -> None:
            write(key[i % num_places], value[i % num_places], pool, i % scale.layers, slots)

        times = bench.timer.time(call, num_bytes)
        row = {"tokens": num_tokens, "by": "triton" if write is ops.reshape_and_cache else "torch"}
        return row | times.row() | bench.bandwidth(times.us, num_bytes)

    for num_tokens, write in itertools.product(scale.writes, (ops.reshape_and_cache, reference.reshape_and_cache)):
        yield Point(f"{num_tokens} tokens", partial(measure, num_tokens, write))


def check_copy(bench: Bench) -> float:
    pool = bench.memory.pool(8, bench.scale.layers).clone()
    expected = pool.clone()
    sources, destinations = torch.randperm(8, device=bench.device).view(2, 4)
    ops.copy_blocks(pool, sources, destinations)
    reference.copy_blocks(expected, sources, destinations)
    return require_equal(pool, expected)


def copy_points(bench: Bench) -> Points:
    scale = bench.scale

    def measure(num_pairs: int, copy: Callable[..., None]) -> Row:
        pool = bench.memory.pool(scale.small_pool, scale.layers)
        num_sets = scale.small_pool // (2 * num_pairs)
        ids = torch.randperm(scale.small_pool, device=bench.device)[: num_sets * 2 * num_pairs]
        ids = ids.view(num_sets, 2, num_pairs)
        num_bytes = 2 * num_pairs * pool[0].numel() * DTYPE.itemsize
        times = bench.timer.time(lambda i: copy(pool, *ids[i % num_sets]), num_bytes)
        row = {"blocks": num_pairs, "by": "triton" if copy is ops.copy_blocks else "torch"}
        return row | times.row() | bench.bandwidth(times.us, num_bytes)

    for num_pairs, copy in itertools.product(scale.copies, (ops.copy_blocks, reference.copy_blocks)):
        yield Point(f"{num_pairs} blocks", partial(measure, num_pairs, copy))


def layouts(bench: Bench) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {f"block-major, {n}": {"block_size": n} for n in bench.scale.block_sizes}
    return found | {"layer-major, 16": {"is_layer_major": True}}


def check_layouts(bench: Bench) -> float:
    n = bench.scale.check_tokens - 3
    return max(decoding(bench, 2, n, **settings).check([0, 1]) for settings in layouts(bench).values())


def layout_points(bench: Bench) -> Points:
    for (batch, context), (name, settings) in itertools.product(bench.scale.layout_cases, layouts(bench).items()):
        make = partial(decoding, bench, batch, context, **settings)
        yield Point(f"{batch} x {context}", lambda make=make: make().time(), {"layout": name})


# --------------------------------------------------------------------------------------------------------------- swap


def sanitizer_points(bench: Bench) -> Points:
    """Every kernel once, small: for compute-sanitizer to watch."""
    small = Bench(Sanitized, bench.device, {})
    n, heads = Sanitized.check_tokens, Sanitized.heads
    features = {"sliding_window": 21, "softcap": 5.0, "sinks": torch.rand(heads, device=bench.device)}
    query_lens, seq_lens = [1, 1, 1, n // 3, 9], [n - 3, 1, n // 2, n // 3, n]

    def attention(num_splits: int, **options: Any) -> Row:
        return {"rms": Step(small, query_lens, seq_lens, **options).check(range(5), num_splits)}

    for num_splits in (1, 3):
        yield Point(f"attention, {num_splits} split(s)", partial(attention, num_splits))
        yield Point(f"with all features, {num_splits} split(s)", partial(attention, num_splits, **features))
    for check in (check_layouts, check_shared, check_fp8, check_write, check_copy):
        yield Point(check.__name__, lambda check=check: {"rms": check(small)})


# ------------------------------------------------------------------------------------------------------------- report

# What matters most first: the time limit cuts off the end.
FAMILIES = (
    Family("limits", limit_points),
    Family("decode", decode_points, check_decode),
    Family("layouts", layout_points, check_layouts, pivot=("layout", "case")),
    Family("splits", split_points, check_decode, pivot=("splits", "case")),
    Family("prefill", prefill_points, check_prefill),
    Family("tiles", tile_points, check_decode, pivot=("tile", "case")),
    Family("write", write_points, check_write),
    Family("copy", copy_points, check_copy),
    Family("ragged", ragged_points, check_ragged),
    Family("shared", shared_points, check_shared, pivot=("way", "case")),
    Family("fp8", fp8_points, check_fp8),
    Family("sanitizer", sanitizer_points, is_default=False),
)


def bars(report: Report) -> list[Row]:
    """What the kernels should reach, and whether they do; passed is `None` where something was not measured."""
    results: list[Row] = []

    def add(bar: str, wanted: str | None, measured: str | None, passed: Callable[[], bool]) -> None:
        texts = {"wanted": wanted or "not measured", "measured": measured or "not measured"}
        results.append({"bar": bar, **texts, "passed": passed() if wanted and measured else None})

    def at_least(bar: str, limit: float, unit: str, rows: list[Row], name: str) -> None:
        """The worst of the rows counts."""
        found = min(((row[name], row["case"]) for row in rows if row.get(name) is not None), default=None)
        show = "{:.1%}" if name == "share" else "{:.0f}"
        measured = found and f"{show.format(found[0])} at {found[1]}"
        add(bar, f"{show.format(limit)} {unit}", measured, lambda: found[0] >= limit)

    def at_most(bar: str, limit: float | None, us: float | None) -> None:
        add(bar, limit and f"{limit:.1f} us", us and f"{us:.1f} us", lambda: us <= limit)

    decodes = {(row["batch"], row["context"]): row for row in report.rows("decode")}
    large = [row for (batch, _), row in decodes.items() if batch >= 32]
    long = [row for row in large if row["context"] >= 4096]
    at_least("decode, batch 32 and above, 4k and above", 0.9, "of a copy", long, "share")
    short = [row for row in large if row["context"] == 1024]
    at_least("decode, batch 32 and above, 1k", 0.7, "of a copy", short, "share")
    at_most("decode, 8 x 16k: best published 132.7 us, and 5 %", 132.7 * 1.05, decodes.get((8, 16384), {}).get("us"))
    single = decodes.get((1, 32768), {})
    flash = [us for name, us in single.get("sdpa_all_us", {}).items() if name.startswith("flash")]
    at_most("decode, 1 x 32k: contiguous flash SDPA", min(flash, default=None), single.get("us"))
    prefills = [row for row in report.rows("prefill") if row["tokens"] == 8192]
    at_least("prefill of 8k", 400, "TFLOP/s", prefills, "tflop_s")
    moved = [row for family in ("write", "copy") for row in report.rows(family) if row["by"] == "triton"]
    at_least("cache write", 0.8, "of a copy", [row for row in moved if row.get("tokens") == 8192], "share")
    at_least("block copy", 0.8, "of a copy", [row for row in moved if row.get("blocks") == 256], "share")
    return results


def render(report: Report) -> str:
    """The report as markdown, the bars last."""
    data = report.data
    facts = ", ".join(f"{name} {value}" for name, value in (data["device"] | data["versions"]).items())
    parts = ["# The Triton kernels on a GPU", facts, data["what"], common.render_families(FAMILIES, report)]
    if data["bars"]:
        parts.append("## Bars\n\n" + common.table(data["bars"]))
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------------------------------ running


def measure(args: argparse.Namespace, report: Report) -> bool:
    """Measures what the report does not have yet; False if the device is gone before the end."""
    deadline = time.monotonic() + args.time_limit
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    device = torch.device(args.device)
    scale = Tiny if device.type == "cpu" else Quick if args.quick else Scale
    if args.only == ["sanitizer"]:
        scale = Sanitized
    bench = Bench(scale, device, report.data["limits"])
    report.data["device"] = common.device_facts(device)
    families = {family.name: family for family in FAMILIES}
    due = [families[name] for name in args.only if report.is_due(name)]
    return all(common.run_family(family, bench, report, deadline) for family in due)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [family.name for family in FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of JSON and table")
    parser.add_argument("--quick", action="store_true", help="one point a family, to gpu_kernels-quick.*")
    parser.add_argument("--only", nargs="+", choices=names, help="these families in this order, and the limits")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds; what is left then, another run does")
    parser.add_argument("--again", action="store_true", help="measure families anew that failed or have a row that did")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--in-process", action="store_true", help="no child process: a crash ends it all")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device == "cpu" and not (args.quick and launch.is_interpreting()):
        parser.error("--device cpu only shows that this program runs: with --quick and TRITON_INTERPRET=1")
    args.only = args.only or [family.name for family in FAMILIES if family.is_default]
    if args.only != ["sanitizer"] and "limits" not in args.only:
        args.only = ["limits", *args.only]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if something failed, or `children.UNFINISHED` if the time was up."""
    started = time.monotonic()
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is there")
    path = args.out / f"gpu_kernels{'-quick' if args.quick else ''}.json"
    if args.child:
        is_alive = measure(args, Report.load(path))
        sys.stdout.flush()
        os._exit(not is_alive)  # a device that is gone can keep an ordinary exit waiting
    data: dict[str, Any] = {
        "what": "medians in microseconds; share: of the bandwidth that a copy has on this device, read and written",
        "code": children.code_hash(CODE),
        "versions": common.versions(),
    } | {"device": {}, "limits": {}, "families": {}, "rows": [], "bars": []}
    report = Report.resume(path, data, args.again)
    report.save()
    if args.in_process:
        measure(args, report)
    else:
        passed_on = [argument for argument in argv if argument != "--again"]
        command = [sys.executable, __file__, *passed_on, "--child"]
        common.supervise(command, args.only, report, started + args.time_limit)
    report.data["bars"] = bars(report) if "limits" in args.only else []
    report.save()
    text = render(report)
    path.with_suffix(".md").write_text(text)
    print(text)
    states = {name: report.data["families"].get(name, {"status": "not begun"}) for name in args.only}
    others = [f"{name} {state['status']}" for name, state in states.items() if state["status"] != "done"]
    checked = [row for row in report.data["rows"] if row["family"] == "sanitizer"]  # each of its points is a check
    failed = [f"{row['case']} failed: {row['error']}" for row in checked if "error" in row]
    print("\n".join(others + failed) or "all done")
    return 1 if failed else report.exit_status(args.only)


if __name__ == "__main__":
    sys.exit(main())
