"""Proves that no address of a kernel overflows over pools of hundreds of gigabytes: a program that prints what may.

Pools on the meta device take no memory, so the kernels are launched over the largest, and what Triton makes of such a
launch (TTIR, before any optimisation that depends on the GPU) is gone through with the range of each integer: those of
a launch's own arguments and grid, of the pool's block numbers and slots. Where the range of what an address is computed
from exceeds its type, the line is a fault.

    python tests/helpers/kernel_offsets.py [--quick]

It prints JSON: by launch, its faults and the largest offset from a pointer; quick: one type and order of the pool.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
from kernel_census import ANY_NVIDIA, specialise
from torch import Tensor
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from hf_paged.kernels import (
    copy_blocks,
    latent_attention,
    launch,
    paged_decode,
    paged_prefill,
    reshape_and_cache,
    shared_decode,
    triton_scan,
)
from hf_paged.kernels.cpu_scan import DELTA, SELECTIVE, SUM
from hf_paged.kernels.paged_state import PagedState, StateRows

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS, KV_HEADS, GROUP, HEAD_DIM = 300_000, 16, 32, 8, 4, 128
LATENT, ROTARY = 512, 64
ROWS, LONGEST, TOKENS = 256, 131_072, 32_768

Range = tuple[int, int]
# What is read from memory, by the argument that it is read through.
CONTENTS: dict[str, Range] = {
    "block_tables": (0, NUM_BLOCKS - 1),
    "sources": (0, NUM_BLOCKS - 1),
    "destinations": (0, NUM_BLOCKS - 1),
    "slot_mapping": (-1, NUM_BLOCKS * BLOCK_SIZE - 1),
    "seq_lens": (0, LONGEST),
    "query_start_loc": (0, TOKENS),
    "start_loc": (0, TOKENS),
    "pages": (0, NUM_BLOCKS - 1),
    "items": (-1, max(TOKENS, LONGEST // 16)),  # sequences, tiles of 16 tokens and more; new tokens and parts
    "members": (-LONGEST // 16, LONGEST // 16),  # sequences, and parts before the first item's
    "split": (0, LONGEST // 16),
}
NAME = re.compile(r"%[\w-]+(?:#\d+)?")


@dataclass
class Launch:
    """A launch, as TTIR and as what is known of it.

    Attributes:
        text: The module.
        arguments: Ranges of the integers among its arguments.
        grid: Programs along each axis.
    """

    text: str
    arguments: dict[str, Range]
    grid: tuple[int, ...]


@contextmanager
def taking_down() -> Iterator[list[Launch]]:
    """Within it, launches only add to the list."""
    found: list[Launch] = []

    def run(self: Any, *values: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
        given = dict(zip((parameter.name for parameter in self.params), values)) | named
        integers = {f"%{name}": (value, value) for name, value in given.items() if type(value) is int}
        found.append(Launch(ttir(self, *values, **named), integers, grid))

    with mock.patch.object(JITFunction, "run", run):
        yield found


def ttir(kernel: Any, *values: Any, **named: Any) -> str:
    """Triton's first form of a kernel, its functions inlined."""
    source, given = specialise(kernel, *values, **named).source(ANY_NVIDIA)
    backend, stages = make_backend(ANY_NVIDIA), {}
    options = backend.parse_options(given)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(stages["ttir"](source.make_ir(ANY_NVIDIA, options, functions, modules, context), {}))


class Ranges:
    """The range of each integer of a module, and where one that an address needs exceeds its type."""

    def __init__(self, given: Launch) -> None:
        self.launch = given
        self.known: dict[str, Range] = dict(given.arguments)
        self.carried: dict[str, Range] = {}  # by loops, from one turn to the next
        self.roots: dict[str, str] = {}  # the argument that a pointer comes from
        self.operands: dict[str, list[str]] = {}
        self.too_large: dict[str, str] = {}
        self.offsets: list[str] = []
        self.lines = [re.sub(r" loc\(.*", "", line.strip()) for line in given.text.splitlines()]
        for _ in range(5):
            before = dict(self.carried)
            self._pass()
            if self.carried == before:
                return
        raise ValueError("a loop carries an integer that grows with each turn")

    @property
    def faults(self) -> list[str]:
        """Lines that overflow, and that an address is computed from."""
        needed, waiting = set(), list(self.offsets)
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting += self.operands.get(name, [])
        return [line for name, line in self.too_large.items() if name in needed]

    @property
    def furthest(self) -> int:
        """The largest offset that is added to a pointer."""
        return max(self._of(name)[1] for name in self.offsets)

    def _pass(self) -> None:
        self.operands, self.too_large, self.offsets = defaultdict(list), {}, []
        loops: list[tuple[str, list[str]]] = []
        for line in self.lines:
            result, _, rest = line.partition(" = ") if line.startswith("%") else ("", "", line)
            operation = rest.split(" ", 1)[0]
            names = NAME.findall(rest)
            if operation == "scf.for":
                self._enter(result, rest, loops)
            elif operation == "scf.if":
                loops.append((result.split(":")[0], []))
            elif operation == "scf.yield" and loops:
                self._yield(names, *loops[-1])
            elif line == "}" and loops:
                loops.pop()
            elif result:
                self._compute(result, operation, names, line)

    def _enter(self, result: str, rest: str, loops: list[tuple[str, list[str]]]) -> None:
        index, first, last = NAME.findall(rest)[:3]
        low, high = self._of(first)[0], self._of(last)[1] - 1
        self.known[index] = low, max(low, high)
        self.operands[index] = [first, last]
        carried = re.findall(r"(%\w+) = (%[\w#]+)", rest.partition("iter_args")[2])
        for name, start in carried:
            self.roots[name] = self.roots.get(start, "")
            if start in self.known:
                self.known[name] = _union(self.known[start], self.carried.get(name, self.known[start]))
                self.operands[name] = [start]
        loops.append((result.split(":")[0], [name for name, _ in carried]))

    def _yield(self, names: list[str], result: str, carried: list[str]) -> None:
        for place, name in enumerate(names):
            if name not in self.known:
                continue
            for to in (f"{result}#{place}", *([result] if len(names) == 1 else [])):
                self.known[to] = _union(self.known[name], self.known.get(to, self.known[name]))
                self.operands[to].append(name)
            if place < len(carried):
                self.carried[carried[place]] = self.known[name]
                self.operands[carried[place]].append(name)

    def _of(self, name: str) -> Range:
        return self.known.get(name, (-(2**63), 2**63 - 1))

    def _compute(self, result: str, operation: str, names: list[str], line: str) -> None:
        self.operands[result] = [] if operation == "tt.load" else names
        if operation in ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.addptr", "arith.select") and names:
            pointer = names[-1] if operation == "arith.select" else names[0]
            self.roots[result] = self.roots.get(pointer, pointer.removeprefix("%"))
        if operation == "tt.addptr":
            self.offsets.append(names[1])
            return
        # The type that the line ends with, or of a load what the pointer there points to.
        kind = re.search(r"(?:[ x]|(!tt\.ptr<))i(\d+)>*$", line)
        if kind is None or bool(kind[1]) != (operation == "tt.load"):
            return
        width = int(kind[2])
        full = -(2 ** (width - 1)), 2 ** (width - 1) - 1
        found = self._range(operation, names, line)
        if found is not None and not (full[0] <= found[0] and found[1] <= full[1]):
            self.too_large[result] = f"{line} is in {found}"
            found = None
        self.known[result] = full if found is None else found

    def _range(self, operation: str, names: list[str], line: str) -> Range | None:
        """`None`: any."""
        ranges = [self._of(name) for name in names]
        if operation == "arith.constant":
            value = re.search(r"constant (?:dense<)?(-?\d+)>? :", line)
            return (int(value[1]), int(value[1])) if value else None
        if operation == "tt.make_range":
            return int(re.search(r"start = (\d+)", line)[1]), int(re.search(r"end = (\d+)", line)[1]) - 1
        if operation in ("tt.get_program_id", "tt.get_num_programs"):
            axis = "xyz".index(line.split(" : ")[0][-1])
            number = self.launch.grid[axis] if axis < len(self.launch.grid) else 1
            return (0, number - 1) if operation == "tt.get_program_id" else (number, number)
        if operation == "tt.load":
            return CONTENTS.get(self.roots.get(names[0], ""))
        if operation in ("tt.splat", "tt.broadcast", "tt.expand_dims", "arith.extsi", "tt.reshape", "arith.trunci"):
            return ranges[0]
        if operation == "arith.select":
            return _union(*ranges[1:])
        if operation == "arith.addi":
            return ranges[0][0] + ranges[1][0], ranges[0][1] + ranges[1][1]
        if operation == "arith.subi":
            return ranges[0][0] - ranges[1][1], ranges[0][1] - ranges[1][0]
        if operation == "arith.minsi":
            return min(ranges[0][0], ranges[1][0]), min(ranges[0][1], ranges[1][1])
        if operation == "arith.maxsi":
            return max(ranges[0][0], ranges[1][0]), max(ranges[0][1], ranges[1][1])
        if operation == "arith.muli":
            corners = [a * b for a in ranges[0] for b in ranges[1]]
            return min(corners), max(corners)
        if operation == "arith.divsi" and ranges[1][0] > 0:
            corners = [int(a / b) if abs(a) < 2**53 else a // b for a in ranges[0] for b in ranges[1]]
            return min(corners), max(corners)
        if operation == "arith.remsi" and ranges[1][0] > 0:
            most = ranges[1][1] - 1
            return max(-most, min(0, ranges[0][0])), min(most, max(0, ranges[0][1]))
        return None


def _union(one: Range, other: Range) -> Range:
    return min(one[0], other[0]), max(one[1], other[1])


def on_meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pools(dtype: torch.dtype) -> dict[str, Tensor]:
    """Pools as they are, and in other orders that strides can say: those exceed 32 bits themselves."""
    sizes = {"blocks": NUM_BLOCKS, "layers": NUM_LAYERS, "kinds": 2}
    rest = KV_HEADS, BLOCK_SIZE, HEAD_DIM
    found = {}
    for order in (("blocks", "layers", "kinds"), ("layers", "kinds", "blocks"), ("kinds", "blocks", "layers")):
        pool = on_meta(*(sizes[name] for name in order), *rest, dtype=dtype)
        found[" of ".join(order[::-1])] = pool.permute(*(order.index(name) for name in sizes), 3, 4, 5)
    return found


def launch_all(pool: Tensor, dtype: torch.dtype, window: int) -> None:
    """Every kernel that takes a pool, over its last layer."""
    layer, heads = NUM_LAYERS - 1, KV_HEADS * GROUP
    states = on_meta(TOKENS, KV_HEADS, HEAD_DIM, dtype=dtype)
    reshape_and_cache.reshape_and_cache(states, states, pool, layer, on_meta(TOKENS, dtype=torch.int64))
    query = on_meta(TOKENS, heads, HEAD_DIM, dtype=dtype)
    tables, lens, starts = on_meta(ROWS, LONGEST // BLOCK_SIZE), on_meta(ROWS), on_meta(ROWS + 1)
    call = launch.LayerAttention(
        query, query, pool, layer, tables, lens, starts, 0.1, window, 0.0, None,
        on_meta(1 << 24, dtype=torch.float32),
    )  # fmt: skip
    paged_decode.paged_decode(call, on_meta(2 * ROWS, 4), on_meta(ROWS, 4))
    if not window:
        shared_decode.shared_decode(call, on_meta(ROWS, 4), on_meta(ROWS, 4))
    paged_prefill.paged_prefill(call, on_meta(TOKENS // 32, 8), on_meta(TOKENS, 4), 128)
    if pool.is_contiguous():
        ids = on_meta(1000, dtype=torch.int64)
        copy_blocks.copy_blocks(pool, ids, ids)
        latents = on_meta(NUM_BLOCKS, NUM_LAYERS, 1, 1, BLOCK_SIZE, LATENT + ROTARY, dtype=pool.dtype)
        new = (on_meta(TOKENS, 1, width, dtype=dtype) for width in (LATENT, ROTARY))
        latent_attention.write_latents(*new, latents, layer, on_meta(TOKENS, dtype=torch.int64))
        query, output = (on_meta(TOKENS, 16, width, dtype=dtype) for width in (LATENT + ROTARY, LATENT))
        call = launch.LayerAttention(
            output, query, latents, layer, tables, lens, None, 0.1, window, 0.0, None,
            on_meta(1 << 24, dtype=torch.float32),
        )  # fmt: skip
        latent_attention.latent_decode(call, on_meta(2 * ROWS, 4), on_meta(ROWS, 4))
        scan_states(dtype)


def scan_states(dtype: torch.dtype) -> None:
    """The kernels over states: of a large model, of the last layer, in several pages and in one."""
    heads, dim, page = 128, 128, NUM_LAYERS * KV_HEADS * BLOCK_SIZE * HEAD_DIM  # numbers of eight bytes
    rows = StateRows(
        on_meta(ROWS, 100, dtype=torch.int64), on_meta(ROWS), on_meta(ROWS + 1), on_meta(ROWS), False, False, False
    )

    def state(offset: int, *shape: int, dtype: torch.dtype) -> PagedState:
        own = page * 8 // dtype.itemsize
        strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        return PagedState(rows, on_meta(NUM_BLOCKS, own, dtype=dtype), offset * own, (ROWS, *shape), strides)

    wide, f32 = on_meta(1, TOKENS, heads, dim, dtype=dtype), torch.float32
    step, rate = on_meta(1, TOKENS, heads, 1, dtype=f32), on_meta(heads, dtype=f32)
    channels, few = wide.flatten(2)[:, :, None], on_meta(1, TOKENS, 1, 16, dtype=dtype)
    rates, steps = on_meta(1, heads * dim, 16, dtype=f32), on_meta(1, TOKENS, 1, heads * dim, dtype=f32)
    for offset in (0, 98):
        held = state(offset, heads * dim, 4, dtype=dtype)
        triton_scan.convolve(wide.flatten(2).mT, on_meta(heads * dim, 4, dtype=dtype), None, True, held)
        matrix = state(offset, heads, dim, dim, dtype=f32)
        for decay in (step, on_meta(1, TOKENS, heads, dim, dtype=f32)):
            triton_scan.scan(DELTA, wide, wide, wide, decay, step, matrix, is_normed=True)
        triton_scan.scan(SUM, wide, wide, wide, rate, step, matrix.mT, limits=(0.0, 1.0))
        vector = state(offset, 1, heads * dim, 16, dtype=f32).mT
        triton_scan.scan(SELECTIVE, few, few, channels, rates, steps, vector, gate=channels)


def main() -> None:
    is_quick = "--quick" in sys.argv[1:]
    found: dict[str, dict[str, Any]] = {}
    for dtype in (torch.bfloat16,) if is_quick else (torch.bfloat16, torch.float8_e4m3fn):
        for order, pool in list(pools(dtype).items())[: 1 if is_quick else None]:
            for window in (0,) if is_quick else (0, 4096):
                with taking_down() as launches:
                    launch_all(pool, torch.bfloat16, window)
                for number, one in enumerate(launches):
                    kernel = re.search(r"@(\w+)\(", one.text)[1]
                    ranges = Ranges(one)
                    name = f"{kernel} {number}, {pool.dtype}, {order}, window {window}"
                    found[name] = {"faults": ranges.faults, "furthest": ranges.furthest}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
