"""Compiles the Triton kernels for GPUs that need not be there, and reports what they take.

No device is needed: Triton compiles for any target, and the assembler's own report says how many registers a thread
takes, how many bytes it spills to local memory and how much shared memory a program takes; the code says how wide the
loads are and which matrix instructions are used. Compiled are those of the census (`kernel_census.py`), for the targets
that it was soaked on and by the releases of Triton in `CENSUS_TRITONS`, and for all targets and by any release one or
two specialisations of each kernel, in bfloat16 (`ONE_EACH`). With `--table` more than serving launches: all features,
dtypes and head dims. With `--out` each row is kept in a file there as it is found, and not compiled again until its
kernel changes: what is stopped goes on where it was.

    python benchmarks/compile_kernels.py --target sm_90 --out benchmarks/results
    python benchmarks/compile_kernels.py --table --target sm_90 gfx942 --only decode

Of the census, what doesn't compile, spills registers inside a loop, or takes more memory than a program can have, is a
fault, and the exit status 1; spills on AMD GPUs other than gfx942 are reported only.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from kernel_census import Census, Specialisation, kernel_of, read, record
from torch import Tensor
from tqdm import tqdm
from triton.backends.compiler import GPUTarget

from hf_paged.kernels import (
    copy_blocks,
    latent_attention,
    launch,
    paged_decode,
    paged_prefill,
    reshape_and_cache,
    row_sampling,
    shared_decode,
    triton_adapters,
    triton_layers,
    triton_scan,
)
from hf_paged.kernels.cpu_scan import DELTA, SELECTIVE, SUM
from hf_paged.kernels.layers import NormWeight, Place
from hf_paged.kernels.paged_state import PagedState, StateRows
from hf_paged.kernels.sampling_rows import plain_rows
from hf_paged.kernels.scaled_rows import SCALE_BYTES
from hf_paged.kernels.slot_tables import SlotTables

# Bytes of shared memory that one program may take, from the vendors' programming guides.
SHARED_MEMORY_LIMIT = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx90a": 65_536,
    "gfx942": 65_536,
    "gfx950": 163_840,
    "gfx1100": 65_536,
    "gfx1201": 65_536,
}
TARGETS = {
    name: GPUTarget("cuda", int(name[3:]), 32)
    if name[:3] == "sm_"
    else GPUTarget("hip", name, 32 if name[3] == "1" else 64)
    for name in SHARED_MEMORY_LIMIT
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POOLS = DTYPES | {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
NUM_BLOCKS = 4096
TABLE_TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
MOST = ("registers", "shared_memory", "spilled_bytes", "spills_in_loops")


@dataclass(frozen=True)
class Case:
    """One specialisation."""

    kernel: str
    dtype: str
    pool: str
    head_dim: int
    block_size: int
    group: int
    features: str
    rows: int

    @property
    def name(self) -> str:
        parts = [self.kernel, self.dtype, self.pool, f"d{self.head_dim}", f"b{self.block_size}", f"g{self.group}"]
        return " ".join([*parts, f"m{self.rows}"] + ([self.features] if self.features else []))


def on_meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def device_of(target: str) -> launch.Device:
    """What the launchers would read off such a device."""
    return launch.Device(
        num_processors=132,
        has_native_fp8=target in ("sm_89", "sm_90", "sm_100", "sm_120"),
        shared_memory=SHARED_MEMORY_LIMIT[target],
        reads_shared_factors=target in ("sm_90", "sm_100"),
        is_nvidia=target.startswith("sm_"),
        lanes=TARGETS[target].warp_size,
    )


def launches(case: Case, target: str) -> list[Specialisation]:
    """What this case launches."""
    dtype, kv_heads = DTYPES[case.dtype], 8
    width = case.head_dim + SCALE_BYTES * (case.pool == "int8")
    pool = on_meta(NUM_BLOCKS, 32, 2, kv_heads, case.block_size, width, dtype=POOLS[case.pool])
    device = device_of(target)
    with mock.patch.object(launch.Device, "of", staticmethod(lambda _: device)), record() as found:
        if case.kernel == "copy":
            ids = on_meta(16, dtype=torch.int64)
            copy_blocks.copy_blocks(pool, ids, ids)
        elif case.kernel == "layers":
            layers, heads = triton_layers.TritonLayers(dtype), kv_heads * case.group
            wide, one = on_meta(1, 64, heads * case.head_dim, dtype=dtype), on_meta(64, case.head_dim, dtype=dtype)
            for states in (wide, one):
                layers.rms_norm(states, states.view(-1, states.shape[-1])[0], 1e-5, 0.0, True)
            layers.gate(wide, wide, 1.0, 0.0)
            query, key = (on_meta(1, count, 64, case.head_dim, dtype=dtype) for count in (heads, kv_heads))
            layers.rotary(query, key, one[None], one[None], False, True)
            layers.rotary(query, key, one[None], one[None], True, False)
            layers.add_norm(wide, wide, NormWeight(wide[0, 0], 1e-5, 0.0, True))
            norm = NormWeight(one[0], 1e-5, 0.0, True)
            triple = query[0].transpose(0, 1), *[key[0].transpose(0, 1)] * 2
            place = Place(pool, 3, on_meta(64, dtype=torch.int64))
            for norms in (None, (norm, norm)):
                layers.rotary_write(triple, (one[None], one[None]), (False, True), norms, place)
        elif case.kernel == "adapters":
            tables, wide = SlotTables(torch.device("meta"), dtype, 300), on_meta(1, 64, 4096, dtype=dtype)
            for bias in (None, wide[0, 0]):
                triton_adapters.add(wide, wide, on_meta(64, dtype=torch.int32), tables, 3, bias)
        elif case.kernel == "states":
            scan_states(dtype, case.head_dim)
        elif case.kernel == "sampling":
            row_sampling.sample_rows(plain_rows(2), on_meta(2, 128256, dtype=dtype))
            row_sampling.draw_noise(plain_rows(2), 128256, torch.device("meta"))
        elif case.kernel == "latents":
            latent, rotary = case.head_dim, case.head_dim // 8
            pool = on_meta(NUM_BLOCKS, 32, 1, 1, case.block_size, latent + rotary, dtype=POOLS[case.pool])
            query, output = (on_meta(64, case.group, width, dtype=dtype) for width in (latent + rotary, latent))
            tables, lens, slots = (
                on_meta(64, 128, dtype=torch.int32),
                on_meta(64, dtype=torch.int32),
                on_meta(64, dtype=torch.int64),
            )
            work, scratch = on_meta(96, 4, dtype=torch.int32), on_meta(1 << 20, dtype=torch.float32)
            split = work[:80], work[80:]
            call = launch.LayerAttention(
                output, query, pool, 3, tables, lens, None, latent**-0.5, 0, 0.0, None, scratch
            )
            latent_attention.latent_decode(call, *split)
            states = (on_meta(64, 1, width, dtype=dtype) for width in (latent, rotary))
            latent_attention.write_latents(*states, pool, 3, slots)
        elif case.kernel == "write":
            states = on_meta(64, kv_heads, case.head_dim, dtype=dtype)
            slots = on_meta(64, dtype=torch.int64)
            reshape_and_cache.reshape_and_cache(states, states, pool, 3, slots)
        else:
            heads = kv_heads * case.group
            query = on_meta(64, heads, case.head_dim, dtype=dtype)
            features = case.features.split("+")
            call = launch.LayerAttention(
                query,
                query,
                pool,
                3,
                on_meta(64, 128, dtype=torch.int32),
                on_meta(64, dtype=torch.int32),
                on_meta(65, dtype=torch.int32),
                case.head_dim**-0.5,
                100 if "window" in features else 0,
                50.0 if "softcap" in features else 0.0,
                on_meta(heads, dtype=dtype) if "sinks" in features else None,
                on_meta(1 << 20, dtype=torch.float32),
                on_meta(heads, DISTANCES, dtype=torch.float32) if "bias" in features else None,
            )
            work = on_meta(96, 4, dtype=torch.int32)
            if case.kernel == "decode":
                paged_decode.paged_decode(call, work[:80], work[80:])
            elif case.kernel == "shared":
                shared_decode.shared_decode(call, work[:80], work[80:])
            else:
                paged_prefill.paged_prefill(call, work.view(-1, 8), work, case.rows)
    return list(found)


def scan_states(dtype: torch.dtype, dim: int) -> None:
    """Scans of each kind with keys of this width, and convolutions of their inputs."""
    heads, tokens = 16, 64

    def state(*shape: int, dtype: torch.dtype, is_decode: bool = False) -> PagedState:
        lens, starts = on_meta(64, dtype=torch.int32), on_meta(65, dtype=torch.int32)
        rows = StateRows(on_meta(64, 9, dtype=torch.int64), lens, starts, lens, is_decode, False, False)
        strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        return PagedState(rows, on_meta(NUM_BLOCKS, 16_384, dtype=dtype), 5000, (64, *shape), strides)

    wide, single = on_meta(1, tokens, heads, dim, dtype=dtype), torch.float32
    for is_decode in (False, True):
        inputs = wide.flatten(2).transpose(1, 2)
        held = state(heads * dim, 4, dtype=dtype, is_decode=is_decode)
        triton_scan.convolve(inputs, on_meta(heads * dim, 4, dtype=dtype), None, True, held)
    step = on_meta(1, tokens, heads, 1, dtype=single)
    for decay in (step, on_meta(1, tokens, heads, dim, dtype=single)):
        triton_scan.scan(DELTA, *[wide] * 3, decay, step, state(heads, dim, dim, dtype=single), is_normed=True)
    one, rate = wide[:, :, :1], on_meta(heads, dtype=single)
    skip = on_meta(heads, dim, dtype=single)
    triton_scan.scan(SUM, one, one, wide, rate, step, state(heads, dim, dim, dtype=single).mT, skip=skip)
    channels, few = wide.flatten(2)[:, :, None], on_meta(1, tokens, 1, 16, dtype=dtype)
    rates, steps = on_meta(1, heads * dim, 16, dtype=single), on_meta(1, tokens, 1, heads * dim, dtype=single)
    held = state(1, heads * dim, 16, dtype=single).mT
    triton_scan.scan(SELECTIVE, few, few, channels, rates, steps, held, skip=rates[..., 0], gate=channels)


# A kernel's usual case, and what is not in the census: 128 heads over latents, as in DeepSeek-V3.
ONE_EACH = (
    Case("decode", "bf16", "bf16", 128, 16, 4, "", 16),
    Case("prefill", "bf16", "bf16", 128, 16, 4, "", 64),
    Case("shared", "bf16", "bf16", 128, 16, 4, "", 64),
    Case("latents", "bf16", "bf16", 512, 16, 128, "", 0),
    Case("latents", "bf16", "e4m3", 512, 16, 128, "", 0),
    Case("write", "bf16", "bf16", 128, 16, 1, "", 0),
    Case("layers", "bf16", "bf16", 128, 16, 4, "", 0),
    Case("copy", "bf16", "bf16", 128, 16, 1, "", 0),
    Case("sampling", "bf16", "bf16", 0, 0, 0, "", 0),
    Case("adapters", "bf16", "bf16", 0, 0, 0, "", 0),
    Case("states", "bf16", "bf16", 128, 0, 0, "", 0),
)
ALL_FEATURES = "window+softcap+sinks+bias"
DISTANCES = 129  # of a T5
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
PAIRS = [(name, name) for name in DTYPES] + [("bf16", "e4m3"), ("fp16", "e5m2"), ("bf16", "int8")]


def cases(target: str) -> Iterator[Case]:
    """All specialisations: features are compiled one at a time and all at once, not in all combinations."""
    device = device_of(target)
    for dtype, pool in PAIRS:
        for kernel, head_dim in itertools.product(("decode", "prefill"), HEAD_DIMS):
            yield from attention_cases(kernel, dtype, pool, head_dim, device)
        for head_dim in HEAD_DIMS:
            rows = shared_decode.tiling(head_dim, DTYPES[dtype].itemsize, POOLS[pool].itemsize, device).rows
            for feature in ("", "softcap+sinks+bias"):
                yield Case("shared", dtype, pool, head_dim, 16, 4, feature, rows)
            yield Case("write", dtype, pool, head_dim, 16, 1, "", 0)
        for head_dim, heads in itertools.product((256, 512), (16, 32, 128)):
            if pool == "int8":
                continue
            sizes = DTYPES[dtype].itemsize, POOLS[pool].itemsize
            widths = latent_attention.LatentWidths(heads, head_dim, head_dim + head_dim // 8, *sizes)
            yield Case("latents", dtype, pool, head_dim, 16, heads, "", latent_attention.tiling(widths, device).rows)
    for dtype, head_dim in itertools.product(DTYPES, (64, 80, 128, 256)):
        yield Case("layers", dtype, dtype, head_dim, 16, 4, "", 0)
    for kernel, dtype in itertools.product(("sampling", "adapters"), DTYPES):
        yield Case(kernel, dtype, dtype, 0, 0, 0, "", 0)
    for dtype, head_dim in itertools.product(DTYPES, (64, 128, 256)):
        yield Case("states", dtype, dtype, head_dim, 0, 0, "", 0)
    for block_size in (8, 16, 256):
        yield Case("copy", "bf16", "bf16", 128, block_size, 1, "", 0)


def attention_cases(kernel: str, dtype: str, pool: str, head_dim: int, device: launch.Device) -> Iterator[Case]:
    """Of decode or prefill: by group; of some head dims by feature, block size and rows."""
    itemsize, padded = DTYPES[dtype].itemsize, launch.next_power_of_two(head_dim)
    if kernel == "decode":
        sizes = {group: paged_decode.tiling(itemsize, padded, group).rows for group in (4, 64)}
    else:
        more = 512, device, pool not in DTYPES
        sizes = {group: paged_prefill.tiling(itemsize, padded, group, *more).rows for group in (1, 4)}
        bounded = paged_prefill.tiling(itemsize, padded, 4, *more, has_softcap=True).rows
    for group, rows in sizes.items():
        yield Case(kernel, dtype, pool, head_dim, 16, group, "", rows)
    if head_dim in (128, 256) and (dtype, pool) != ("fp16", "e5m2"):
        for feature in (*ALL_FEATURES.split("+"), ALL_FEATURES):
            rows = bounded if kernel == "prefill" and "softcap" in feature else sizes[4]
            yield Case(kernel, dtype, pool, head_dim, 16, 4, feature, rows)
    if head_dim == 64:
        yield Case(kernel, dtype, pool, head_dim, 16, 1, "bias", next(iter(sizes.values())))
    if head_dim == 128 and pool in DTYPES:
        for block_size in (8, 24, 32, 64, 128, 256):
            yield Case(kernel, dtype, pool, head_dim, block_size, 4, "", sizes[4])
        for rows in (16, 64) if kernel == "prefill" else ():
            if rows < sizes[4]:
                yield Case(kernel, dtype, pool, head_dim, 16, 4, "", rows)


def assembler_report(ptx: str, arch: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    number = int(arch.removeprefix("sm_"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        report = subprocess.run(
            [get_ptxas(number).path, "-v", f"--gpu-name={sm_arch_from_capability(number)}", source, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    return registers, spilled


def spills_in_loops(cubin: bytes) -> int:
    """Loads from and stores to local memory inside a loop, in the machine code: the spills that cost time."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return inside_loops(lines, r"\s*(\.L_x_\d+):", r"\bBRA\b.*`\((\.L_x_\d+)\)", r"\b(LDL|STL)\b")


def inside_loops(lines: list[str], label: str, branch: str, wanted: str) -> int:
    """Lines like this between a label and a branch back to it."""
    labels = {match[1]: number for number, line in enumerate(lines) if (match := re.match(label, line))}
    inside: set[int] = set()
    for number, line in enumerate(lines):
        match = re.search(branch, line)
        if match and labels.get(match[1], number) < number:
            inside.update(range(labels[match[1]], number))
    return sum(bool(re.search(wanted, lines[number])) for number in inside)


def instructions(compiled: Any) -> dict[str, int]:
    """Loads by width, matrix instructions, logarithms, and products that are added without being rounded first."""
    ptx = compiled.asm["ptx"]
    found = {
        "copies of 16 bytes": len(re.findall(r"cp\.async\.cg\.shared\.global[^\n]*0x10", ptx)),
        "narrower copies": len(re.findall(r"cp\.async\.ca\.shared\.global", ptx)),
        "loads of 16 bytes": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64", ptx)),
        "loads of 8 bytes": len(re.findall(r"ld\.global[.\w:]*\.v2\.b32|ld\.global[.\w:]*\.b64", ptx)),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "tcgen05": len(re.findall(r"tcgen05\.mma", ptx)),
        "processor's own log2": len(re.findall(r"lg2\.approx", ptx)),
        "fused in half precision": len(re.findall(r"fma\.rn\.b?f16", ptx)),
    }
    return {name: count for name, count in found.items() if count}


def measure(key: Specialisation, target: str) -> dict[str, Any]:
    """What a kernel takes on a target."""
    source, options = key.source(TARGETS[target])
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    result: dict[str, Any] = {"shared_memory": compiled.metadata.shared}
    if target.startswith("sm_"):
        result["registers"], result["spilled_bytes"] = assembler_report(compiled.asm["ptx"], target)
        result["spills_in_loops"] = spills_in_loops(compiled.asm["cubin"]) if result["spilled_bytes"] else 0
        result["instructions"] = instructions(compiled)
    else:
        text = compiled.asm["amdgcn"]
        result["registers"] = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
        result["spilled_bytes"] = 4 * int(re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)[0])
        spill = r"\bscratch_(load|store)|Folded (Spill|Reload)"
        where = text.splitlines(), r"(\.LBB\d+_\d+):", r"s_c?branch\w*\s+(\.LBB\d+_\d+)", spill
        result["spills_in_loops"] = inside_loops(*where) if result["spilled_bytes"] else 0
        widths = re.findall(r"(?:global|buffer)_load_(dwordx4|dwordx2|dword|ushort|ubyte)", text)
        result["instructions"] = {f"load {width}": widths.count(width) for width in sorted(set(widths))} | {
            "mfma": len(re.findall(r"v_mfma", text))
        }
    return result


# By the GPU that it was soaked on: to the launchers sm_100 is sm_90.
CENSUS_TARGETS = {"sm_80": ("sm_80",), "sm_90": ("sm_90", "sm_100"), "sm_120": ("sm_120",), "gfx942": ("gfx942",)}
CENSUS_TRITONS = ("3.7", "3.9")  # what CUDA builds of torch 2.11 to 2.14 come with, and the newest
MAY_SPILL = ("gfx90a", "gfx950", "gfx1100", "gfx1201")
Job = tuple[dict[str, Any], Specialisation, str]  # what a row says of itself, what is compiled, for which target


def of_census(census: Census, targets: Iterable[str]) -> list[Job]:
    """What serving launches there."""
    return [
        ({"kernel": key.name, "target": target}, key, target)
        for target in targets
        for key, cells in sorted(census.items())
        if any(target in CENSUS_TARGETS[cell.gpu] for cell in cells)
    ]


def of_cases(given: Iterable[tuple[Case, str]]) -> list[Job]:
    """What these launch on their targets."""
    return [
        (asdict(case) | {"kernel": key.name, "target": target}, key, target)
        for case, target in given
        for key in launches(case, target)
    ]


def compiled(job: Job) -> dict[str, Any]:
    """A row for a job, with its fault, if it has one."""
    about, key, target = job
    try:
        row = about | measure(key, target)
    except Exception as error:  # whatever the compiler raises: the others are compiled all the same
        return about | {"fault": f"{type(error).__name__}: {error}: {key}"}
    return row | {"fault": fault(row, target)}


def fault(row: dict[str, Any], target: str) -> str:
    """What is wrong with a kernel; empty: nothing."""
    if row["spills_in_loops"] and target not in MAY_SPILL:
        return f"{row['spilled_bytes']} bytes spilled, {row['spills_in_loops']} times in loops"
    if row["shared_memory"] > SHARED_MEMORY_LIMIT[target]:
        return f"{row['shared_memory']} bytes of shared memory"
    return ""


class Kept:
    """Rows of an earlier run, as JSON lines in a file; of kernels that have changed since, none is found."""

    def __init__(self, path: Path | None) -> None:
        """`path`: the file, which need not exist; `None`: nothing is kept."""
        self._path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self._rows: dict[str, dict[str, Any]] = {row.pop("id"): row for row in map(json.loads, lines)}

    @staticmethod
    def id_of(job: Job) -> str:
        """Of what decides what comes out."""
        about, key, target = job
        parts = triton.__version__, target, key, kernel_of(key.kernel).cache_key, sorted(about.items())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def get(self, job: Job) -> dict[str, Any] | None:
        """Its row, if there is one. Faults are looked into again."""
        row = self._rows.get(self.id_of(job))
        return None if row is None or row["fault"] else row

    def add(self, job: Job, row: dict[str, Any]) -> None:
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps({"id": self.id_of(job)} | row) + "\n")


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """The most that any variant of a kernel takes."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    groups: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        if "registers" in row:
            own = groups.setdefault(tuple(row[name] for name in columns), {target: [] for target in targets})
            own[row["target"]].append(row)
    lines = [
        f"Triton {triton.__version__}. Variants: registers of a thread / KiB of shared memory of a program / bytes",
        "spilled / spill instructions inside loops, the most of any of them.",
        "",
        "| " + " | ".join([*columns, *targets]) + " |",
        "|---" * (len(columns) + len(targets)) + "|",
    ]
    for group in sorted(groups):
        cells = []
        for of in groups[group].values():
            most = [max((row[name] for row in of), default=0) // (1024 if "memory" in name else 1) for name in MOST]
            cells.append(f"{len(of)}: " + " / ".join(map(str, most)))
        lines.append("| " + " | ".join([*map(str, group), *cells]) + " |")
    return "\n".join(lines) + "\n"


def jobs_of(given: argparse.Namespace) -> list[Job]:
    """What the command line asks for."""
    if given.table:
        targets = given.target or TABLE_TARGETS
        every = [(case, target) for target in targets for case in cases(target)]
        return of_cases(job for job in every if any(part in job[0].name for part in given.only))
    targets = given.target or list(TARGETS)
    jobs = of_cases((case, target) for target in targets for case in ONE_EACH)
    if triton.__version__.startswith(CENSUS_TRITONS):
        jobs += of_census(read(), targets)
    unique = {(key, target): ({"kernel": key.name, "target": target}, key, target) for _, key, target in jobs}
    return [job for job in unique.values() if any(part in job[0]["kernel"] for part in given.only)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="instead of the census")
    parser.add_argument("--target", nargs="+", choices=TARGETS, help="all for which there is something to compile")
    parser.add_argument("--only", nargs="+", default=[""], help="those whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--out", type=Path, help="folder for the table")
    given = parser.parse_args()
    name, columns = f"compiled_kernels_{triton.__version__}", ["kernel"]
    if given.table:
        name, columns = "kernel_resources", ["kernel", "dtype", "pool", "head_dim"]
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    kept, jobs = Kept(given.out and given.out / f"{name}.jsonl.tmp"), jobs_of(given)
    found = [kept.get(job) for job in jobs]
    left = [number for number, row in enumerate(found) if row is None]
    with ProcessPoolExecutor(given.jobs) as pool:
        rows = pool.map(compiled, (jobs[number] for number in left))
        for number, row in zip(left, tqdm(rows, total=len(left), mininterval=10)):
            kept.add(jobs[number], row)
            found[number] = row
            if row["fault"]:
                tqdm.write(f"{row['target']} {row['kernel']}: {row['fault']}: {jobs[number][1]}")
    rows = [row for row in found if row is not None]
    text, faults = table(rows, columns), sum(bool(row["fault"]) for row in rows)
    print(f"{text}\nTriton {triton.__version__}: {len(rows)} kernels compiled, {faults} faults")
    if given.out:
        Path(given.out, f"{name}.md").write_text(text)
        if given.table:
            text = json.dumps({"triton": triton.__version__, "kernels": rows}).replace("}, {", "},\n{")
            Path(given.out, f"{name}.json").write_text(f"{text}\n")
    if faults and not given.table:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
