"""Pools of 8 bits, int8 with a scale a token and head and fp8: by plain torch, in C and in Triton.

What the numbers of a pool mean is worked out here once more, a row at a time; the pool is poisoned elsewhere.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.kernel_cases import random_tensor, repaired_interpreter, same_bits, step_metadata, strided
from hf_paged.attention.backends.cpu import CPUBackend
from hf_paged.attention.backends.registry import Backend, choose
from hf_paged.attention.backends.triton import TritonBackend
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import cpu, launch, reference
from hf_paged.kernels.scaled_rows import parts, quantized_rows

CPU = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = float("nan"), float("inf")
NUM_LAYERS = 2
# Norm of the error over norm of the truth, which reads the same codes.
TOLERANCE = {"torch": {F32: 1e-6, BF16: 1e-2}, "cpu": {F32: 1e-6, BF16: 4e-3}, "triton": {F32: 1e-5, BF16: 5e-3}}
SHAPES = {  # new tokens, and tokens including them
    "mixed": [(1, 70), (1, 133), (1, 3), (5, 40), (33, 47), (1, 2), (9, 9)],
    "shared": [(1, 64 + n) for n in (3, 1, 40, 2, 2, 6, 17, 9, 1, 5, 33, 2, 2, 3, 1, 1, 7, 4, 2)],
}
CHOICES: list[dict[str, Any]] = [
    {"stored": INT8, "head_dim": 128, "queries_per_kv": 1},
    {"stored": INT8, "head_dim": 128, "queries_per_kv": 2, "window": 33, "dtype": BF16},
    {"stored": INT8, "head_dim": 128, "mix": "shared", "queries_per_kv": 4, "dtype": BF16},
    {"stored": INT8, "head_dim": 20, "queries_per_kv": 7, "softcap": 2.0, "block_size": 3},
    {"stored": INT8, "head_dim": 20, "mix": "shared", "has_sinks": True, "queries_per_kv": 3, "block_size": 1},
    {"stored": E4M3, "head_dim": 80, "queries_per_kv": 2, "window": 33},
    {"stored": E4M3, "head_dim": 80, "mix": "shared", "queries_per_kv": 1, "dtype": BF16},
    {"stored": E5M2, "head_dim": 24, "queries_per_kv": 12, "has_sinks": True, "dtype": BF16, "block_size": 3},
]


def describe(choice: dict[str, Any]) -> str:
    return "-".join(f"{value}".removeprefix("torch.") for value in choice.values())


def meaning(states: Tensor, stored: torch.dtype) -> Tensor:
    """What rows `[R, head_dim]` are in such a pool, in float64."""
    if stored is not INT8:
        return states.float().clamp(-torch.finfo(stored).max, torch.finfo(stored).max).to(stored).double()
    found = np.zeros(states.shape)
    for number, row in enumerate(states.float().numpy()):
        scale = np.abs(row).max() * np.float32(1 / 127)
        codes = np.rint(row * (np.float32(127) / np.abs(row).max()))  # to even
        assert np.abs(codes).max() == 127
        found[number] = np.float32(scale) * codes.astype(np.float64)
    return torch.from_numpy(found)


def empty_pool(num_blocks: int, num_heads: int, block_size: int, head_dim: int, stored: torch.dtype) -> Tensor:
    """All NaN: in int8, so are the scales."""
    width = head_dim + 4 * (stored is INT8)
    shape = num_blocks, NUM_LAYERS, 2, num_heads, block_size, width
    return torch.full(shape, 0xFF if stored is INT8 else 0x7F, dtype=torch.uint8).view(stored)


class Batch:
    def __init__(self, stored: torch.dtype, head_dim: int, queries_per_kv: int, mix: str = "mixed", **own: Any) -> None:
        dtype, block_size = own.get("dtype", F32), own.get("block_size", 16)
        self.dtype, self.size, self.shapes, num_heads = dtype, block_size, SHAPES[mix], 2
        needed = [-(-length // block_size) for _, length in self.shapes]
        self.null_block = sum(needed)
        free = random.Random(0).sample(range(self.null_block), self.null_block)
        self.tables = [[free.pop() for _ in range(n)] for n in needed]
        if mix == "shared":
            for table in self.tables[1:]:
                table[: 64 // block_size] = self.tables[0][: 64 // block_size]
        self.pool = empty_pool(self.null_block + 1, num_heads, block_size, head_dim, stored)
        self.truth = torch.zeros(self.null_block + 1, NUM_LAYERS, 2, num_heads, block_size, head_dim).double()
        for seed, (table, (_, length)) in enumerate(zip(self.tables, self.shapes)):
            index = torch.arange(length)
            blocks, offsets = torch.tensor(table)[index // block_size], index % block_size
            states = [strided("transposed", length, num_heads, head_dim, dtype, seed=2 * seed + n) for n in (0, 1)]
            reference.reshape_and_cache(*states, self.pool, 1, blocks * block_size + offsets)
            for part, of_part in enumerate(states):
                rows = meaning(of_part.reshape(-1, head_dim), stored).view(length, num_heads, head_dim)
                self.truth[:, 1, part][blocks, :, offsets] = rows
        num_tokens = sum(new for new, _ in self.shapes)
        self.query = strided("transposed", num_tokens, num_heads * queries_per_kv, head_dim, dtype, seed=99)
        sinks = random_tensor(num_heads * queries_per_kv, dtype=F32, seed=5) if own.get("has_sinks") else None
        self.params = AttentionParams(1, 1.3 * head_dim**-0.5, own.get("window"), own.get("softcap"), sinks)

    def metadata(self) -> AttentionMetadata:
        new, lengths = zip(*self.shapes)
        return step_metadata(self.tables, new, lengths, self.size, self.null_block, CPU)

    def expected(self) -> Tensor:
        own, sinks = self.params, None if self.params.sinks is None else self.params.sinks.double()
        settings = own.scale, own.sliding_window, own.softcap, sinks
        return reference.paged_attention(self.query.double(), self.truth, 1, self.metadata().groups, *settings)

    def attend(self, backend: Backend) -> Tensor:
        return backend.step(self.metadata()).attend(self.query, self.params)

    def token_alone(self, backend: Backend, sequence: int, length: int, token: int) -> Tensor:
        """Of a sequence cut to so many tokens the last one's, which is this token of the queries."""
        metadata = step_metadata([self.tables[sequence]], [1], [length], self.size, self.null_block, CPU)
        return backend.step(metadata).attend(self.query[token : token + 1], self.params)[0]


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def readable(batch: Batch) -> None:
    """What plain torch multiplies by zero is finite."""
    clean = torch.zeros_like(batch.pool.view(torch.uint8))
    own = torch.zeros(len(clean), batch.size, dtype=torch.bool)
    for table, (_, length) in zip(batch.tables, batch.shapes):
        for index in range(length):
            own[table[index // batch.size], index % batch.size] = True
    if batch.pool.dtype is INT8:
        for found, given in zip(
            parts(clean.view(INT8).flatten(4), batch.size), parts(batch.pool.flatten(4), batch.size)
        ):
            mask = own[:, None, None, None]
            found[:] = torch.where(mask[..., None] if given.dim() == 6 else mask, given, 0)
    else:
        clean = torch.where(own[:, None, None, None, :, None], batch.pool.view(torch.uint8), 0)
    batch.pool = clean.view(batch.pool.dtype)


# Quantisation


def test_rows_become_codes_and_scales() -> None:
    """Each row by itself; half a step from the number at most; ties to even."""
    states = random_tensor(50, 20, dtype=F32) * 10.0 ** torch.linspace(-28, 37, 50)[:, None]
    codes, scales = quantized_rows(states)
    assert torch.equal(codes.double() * scales[:, None].double(), meaning(states, INT8))
    assert bool(((codes.double() * scales[:, None] - states).abs() <= scales[:, None] * 0.50001).all())
    for row in range(50):
        own, scale = quantized_rows(states[row])
        assert torch.equal(own, codes[row]) and torch.equal(scale, scales[row])
    codes, scales = quantized_rows(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]))
    assert codes.tolist() == [127, 0, 2, 2, 0, -2] and float(scales) == 1


ODD = {"nan": NAN, "infinity": INF, "minus infinity": -INF, "zeros": 0.0, "denormals": 1e-40, "huge": 3e38}


@pytest.mark.parametrize("name", ODD)
def test_rows_out_of_the_ordinary(name: str) -> None:
    """What is not finite shows in all of its row, and in what the prefix cache is told of a block."""
    states = torch.zeros(2, 1, 16) if name in ("zeros", "denormals") else random_tensor(2, 1, 16, dtype=F32)
    states[0, 0, 3] = ODD[name]
    pool = torch.zeros(2, 1, 2, 1, 2, 20, dtype=INT8)
    reference.reshape_and_cache(states, states, pool, 0, torch.tensor([2, 3]))
    _, (row, other) = (own[0, 0] for own in reference.gather_slots(pool, 0, torch.tensor([[2, 3]])))
    assert other.isfinite().all()
    is_finite = name not in ("nan", "infinity", "minus infinity")
    assert bool(row.isfinite().all()) == is_finite
    assert reference.block_sums(pool, torch.tensor([0, 1])).isfinite().tolist() == [True, is_finite]
    if name == "huge":
        assert float(row[3]) == pytest.approx(3e38)
    elif is_finite:
        assert not row.any()


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_what_is_written_is_gathered(block_size: int, gap: int) -> None:
    """By tokens and by blocks, also where other numbers lie between blocks (layers of other groups)."""
    size = NUM_LAYERS * 2 * 3 * block_size * 12
    flat = torch.zeros(6, size + gap * block_size * 12, dtype=INT8)
    pool = flat[:, :size].unflatten(1, (NUM_LAYERS, 2, 3, block_size, 12))
    slots = torch.tensor(random.Random(0).sample(range(6 * block_size), 5))
    key, value = (strided("transposed", 5, 3, 8, F32, seed) for seed in (1, 2))
    reference.reshape_and_cache(key, value, pool, 1, slots)
    assert not flat[:, size:].any() and not pool[:, 0].any()
    by_token = reference.gather_slots(pool, 1, slots[None])
    by_block = reference.gather_rows(pool, 1, reference.block_rows(pool, torch.arange(6)[None]), 1)
    for states, tokens, blocks in zip((key, value), by_token, by_block):
        expected = meaning(states.reshape(-1, 8), INT8).view(5, 3, 8).transpose(0, 1)
        assert tokens.dtype is F32 and torch.allclose(tokens[0].double(), expected, rtol=1e-6, atol=0)
        assert same_bits(blocks[0][:, slots], tokens[0])


# The kernels


def write_both(make: Any, dtype: torch.dtype, stored: torch.dtype, head_dim: int, layout: str = "transposed") -> None:
    """A kernel's and plain torch's codes and scales, bit for bit, and all that is not written to."""
    key, value = (strided(layout, 9, 3, head_dim, dtype, seed=seed) for seed in (1, 2))
    if dtype is not F16:
        key *= 10.0 ** torch.linspace(-35, 35, 9, dtype=dtype)[:, None, None]
    if layout == "transposed":
        for token, number in enumerate(ODD.values()):
            key[token, 0, 5], value[token, 1] = number, number
    slots = torch.tensor([9, 0, -1, 17, 23, 11, 3, 1, 2])
    pools = [empty_pool(7, 3, 4, head_dim, stored) for _ in (0, 1)]
    metadata = step_metadata([[0, 1, 2]], [9], [9], 4, 6, CPU)
    metadata.slot_mapping = slots
    make(pools[0], None, dtype).step(metadata).write(key, value, 1)
    reference.reshape_and_cache(key, value, pools[1], 1, slots)
    found, expected = (pool.view(torch.uint8) for pool in pools)
    if stored is not INT8:  # torch turns the sign of some NaNs
        found, expected = (torch.where(codes & 0x7F == 0x7F, 0x7F, codes) for codes in (found, expected))
    assert same_bits(found, expected)


@pytest.mark.parametrize("stored", [INT8, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_c_writes_what_plain_torch_writes(dtype: torch.dtype, stored: torch.dtype) -> None:
    for layout in ("transposed", "part of qkv"):
        write_both(CPUBackend, dtype, stored, next(c["head_dim"] for c in CHOICES if c["stored"] is stored), layout)


@pytest.mark.parametrize("choice", CHOICES, ids=describe)
def test_attention_in_c(choice: dict[str, Any]) -> None:
    batch = Batch(**choice)
    backend = choose("cpu", batch.pool, batch.dtype)
    before = batch.pool.clone()
    found, expected = batch.attend(backend), batch.expected()
    tolerance, token = TOLERANCE["cpu"][batch.dtype], 0
    assert error_of(found, expected) < tolerance
    for number, (new, length) in enumerate(batch.shapes):
        for own in range(length - new + 1, length + 1):
            assert error_of(found[token], expected[token]) < 4 * tolerance, (number, own)
            alone = batch.token_alone(backend, number, own, token)
            assert same_bits(alone, found[token]), "a row's bits depend on what it was computed beside"
            token += 1
    assert same_bits(batch.pool.view(torch.uint8), before.view(torch.uint8)), "attention wrote into the pool"


@pytest.mark.parametrize("choice", CHOICES[::2], ids=describe)
def test_attention_by_plain_torch(choice: dict[str, Any]) -> None:
    batch = Batch(**choice)
    readable(batch)
    found = batch.attend(choose("torch", batch.pool, batch.dtype))
    assert error_of(found, batch.expected()) < TOLERANCE["torch"][batch.dtype]


HERE = {
    "DEFAULT": True,
    "AVX2": torch.cpu._is_avx2_supported(),
    "AVX512": torch.cpu._is_avx512_supported(),
    "AVX512_BF16": torch.cpu._is_avx512_bf16_supported(),
}


@pytest.mark.parametrize("stored", [INT8, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("instructions", [name for name, is_here in HERE.items() if is_here])
def test_all_instructions(instructions: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc -O1")  # compiles in less time
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # that is one of these
    monkeypatch.setattr(cpu, "load", cpu.load.__wrapped__)
    head_dim = {INT8: 36, E4M3: 21, E5M2: 16}[stored]
    write_both(CPUBackend, BF16, stored, head_dim)
    for mix in SHAPES:
        batch = Batch(stored, head_dim, 3, mix, dtype=BF16, has_sinks=True)
        assert error_of(batch.attend(CPUBackend(batch.pool, None, BF16)), batch.expected()) < TOLERANCE["cpu"][BF16]


@pytest.fixture
def interpreter() -> Any:
    if not launch.is_interpreting():
        pytest.skip("kernels are compiled here; TRITON_INTERPRET=1 runs them on CPU")
    with repaired_interpreter():
        yield


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("head_dim", [8, 80, 128])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_triton_writes_what_plain_torch_writes(dtype: torch.dtype, head_dim: int) -> None:
    write_both(TritonBackend, dtype, INT8, head_dim)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice["stored"] is INT8], ids=describe)
def test_attention_in_triton(choice: dict[str, Any]) -> None:
    batch = Batch(**choice)
    found = batch.attend(choose("triton", batch.pool, batch.dtype))
    assert error_of(found, batch.expected()) < TOLERANCE["triton"][batch.dtype]


@pytest.mark.usefixtures("interpreter")
def test_small_values_of_half_precision() -> None:
    """Would break: weights times scales in float16, which are less than its smallest number."""
    batch = Batch(INT8, 16, 2, dtype=F16)
    codes, scales = parts(batch.pool[:, 1, 1].flatten(2), batch.size)
    scales *= 2.0**-14
    batch.truth[:, 1, 1] *= 2.0**-14
    assert codes.any() and error_of(batch.attend(choose("triton", batch.pool, F16)), batch.expected()) < 0.02
