"""`KVCache`: sizes, allocation, and copies within the pool."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.memory.kv_cache import KVCache, KVGeometry, check_size, num_blocks_for_memory

CPU = torch.device("cpu")
LLAMA_8B = KVGeometry.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
SMALL = KVGeometry.uniform(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)


def filled(num_blocks: int = 6, geometry: KVGeometry = SMALL) -> KVCache:
    """A pool in which every element is another number."""
    cache = KVCache(geometry, num_blocks, 2, CPU)
    with torch.no_grad():
        numbers = torch.arange(cache.tensor[:num_blocks].numel(), dtype=torch.float32) + 1
        cache.tensor[:num_blocks] = numbers.view(cache.tensor[:num_blocks].shape).to(geometry.dtype)
    return cache


# Sizes


def test_a_block_that_no_machine_holds() -> None:
    with pytest.raises(ValueError, match=r"num_blocks=1 of block_size=16777216 tokens need .*smaller block_size"):
        check_size(LLAMA_8B, 1, 2**24, CPU)


def test_bytes_per_block() -> None:
    assert LLAMA_8B.bytes_per_block(16) == 2 * 2**20  # 2 MiB, as the design says
    assert SMALL.bytes_per_block(1) == 3 * 2 * 2 * 4 * 4
    assert SMALL.bytes_per_block(7) == 7 * SMALL.bytes_per_block(1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 1), (5, 3), (4, 16)])
def test_shape_and_size(dtype: torch.dtype, num_blocks: int, block_size: int) -> None:
    geometry = KVGeometry.uniform(3, 2, 4, dtype)
    cache = KVCache(geometry, num_blocks, block_size, CPU)
    assert cache.tensor.shape == (num_blocks + 1, 3, 2, 2, block_size, 4)
    assert cache.tensor.dtype == dtype and cache.tensor.device == CPU and cache.tensor.is_contiguous()
    assert cache.tensor.nbytes == (num_blocks + 1) * geometry.bytes_per_block(block_size)
    assert cache.null_block == num_blocks and (cache.geometry, cache.block_size) == (geometry, block_size)
    assert not cache.tensor.view(torch.uint8).any(), "not zeroed"
    assert not cache.tensor.requires_grad


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_free(num_bytes: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=num_bytes))

    return set_free


@pytest.mark.parametrize(
    ("free_blocks", "fraction", "max_tokens", "expected"),
    [
        (100, 0.25, 10**6, 25),
        (100, 1.0, 10**6, 100),
        (100, 0.999, 10**6, 99),
        (100, 0.25, 16 * 25, 25),
        (100, 0.25, 16 * 24 + 1, 25),
        (100, 0.25, 16 * 24, 24),
        (100, 0.25, 1, 1),
        (100, 0.001, 10**6, 1),  # always at least one
        (0, 0.25, 10**6, 1),
    ],
)
def test_num_blocks_for_memory(
    free_memory: Callable[[int], None], free_blocks: int, fraction: float, max_tokens: int, expected: int
) -> None:
    free_memory(free_blocks * LLAMA_8B.bytes_per_block(16))
    assert num_blocks_for_memory(LLAMA_8B, 16, fraction, max_tokens, CPU) == expected


def test_num_blocks_never_exceeds_what_it_may_take(free_memory: Callable[[int], None]) -> None:
    for free in range(0, 5000, 37):
        free_memory(free)
        for fraction in (0.1, 0.5, 1.0):
            num_blocks = num_blocks_for_memory(SMALL, 2, fraction, 40, CPU)
            assert 1 <= num_blocks <= 20
            assert num_blocks == 1 or num_blocks * SMALL.bytes_per_block(2) <= free * fraction


def test_num_blocks_asks_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 40 * LLAMA_8B.bytes_per_block(16), 10**15

    block = LLAMA_8B.bytes_per_block(16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * block)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 8 * block)
    device = torch.device("cuda", 1)
    assert num_blocks_for_memory(LLAMA_8B, 16, 0.5, 10**9, device) == 21  # of 40 that are free and 2 that torch keeps
    assert asked == [device]
    assert num_blocks_for_memory(LLAMA_8B, 16, 0.5, 10**9, device, reserved=20 * block) == 11
    assert num_blocks_for_memory(LLAMA_8B, 16, 0.5, 10**9, device, reserved=30 * block) == 6
    assert num_blocks_for_memory(LLAMA_8B, 16, 0.5, 10**9, device, reserved=50 * block) == 1


# Allocation


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_pool_made_in_any_mode_is_written_in_any_other(mode: Callable[[], Any]) -> None:
    with mode():
        cache = KVCache(SMALL, 4, 2, CPU)
        cache.tensor[0] = 1
        PoolAttention(cache, "torch").zero_blocks([0])
    assert not cache.tensor.is_inference()
    cache.tensor[1] = 2
    PoolAttention(cache, "torch").copy_blocks([(1, 3)])
    with torch.inference_mode():
        PoolAttention(cache, "torch").copy_blocks([(1, 2)])
        PoolAttention(cache, "torch").zero_blocks([1])
    assert [float(block.mean()) for block in cache.tensor] == [0, 0, 2, 2, 0]
    assert not cache.tensor.requires_grad


def test_a_pool_ignores_the_default_dtype_and_device() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            cache = KVCache(SMALL, 2, 2, CPU)
            cache.tensor[0] = 1
            PoolAttention(cache, "torch").copy_blocks([(0, 1)])
            PoolAttention(cache, "torch").zero_blocks([0])
    finally:
        torch.set_default_dtype(before)
    assert cache.tensor.dtype == torch.float32 and cache.tensor.device == CPU
    assert [float(block.mean()) for block in cache.tensor] == [0, 1, 0]


def test_a_pool_on_another_device() -> None:
    cache = KVCache(SMALL, 4, 2, torch.device("meta"))
    assert cache.tensor.device.type == "meta" and cache.tensor.shape == (5, 3, 2, 2, 2, 4)
    PoolAttention(cache, "torch").copy_blocks([(0, 1)])
    PoolAttention(cache, "torch").zero_blocks([2])


def check_message(error: pytest.ExceptionInfo[ValueError], num_blocks: int, block_size: int, device: str) -> None:
    size = (num_blocks + 1) * LLAMA_8B.bytes_per_block(block_size)
    for part in (f"{num_blocks} blocks", f"{size:,} bytes", device, "num_blocks", "memory_fraction"):
        assert part in str(error.value)


def test_a_pool_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    error = MemoryError()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(np, "zeros", refuse)
    with pytest.raises(ValueError) as caught:
        KVCache(LLAMA_8B, 1000, 16, CPU)
    check_message(caught, 1000, 16, "cpu")
    assert caught.value.__cause__ is error


def test_a_pool_that_does_not_fit_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(ValueError) as caught:
        KVCache(LLAMA_8B, 1000, 16, torch.device("cuda", 1))
    check_message(caught, 1000, 16, "cuda:1")


# Copies


@pytest.mark.parametrize(
    "copies",
    [
        [],
        [(0, 5)],
        [(2, 0), (2, 4), (2, 5)],  # one source, several destinations
        [(0, 1), (2, 3), (4, 5)],
        [(0, 1), (3, 0)],  # what is read is what was there before
        [(3, 0), (0, 1)],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_blocks(copies: list[tuple[int, int]], dtype: torch.dtype) -> None:
    cache = filled(geometry=KVGeometry.uniform(3, 2, 4, dtype))
    before, expected = cache.tensor.clone(), cache.tensor.clone()
    address = cache.tensor.data_ptr()
    for source, destination in copies:
        expected[destination] = before[source]
    PoolAttention(cache, "torch").copy_blocks(copies)
    assert torch.equal(cache.tensor, expected)
    assert cache.tensor.data_ptr() == address


@pytest.mark.parametrize("blocks", [[], [0], [5, 1, 3], [2, 2]])
def test_zero_blocks(blocks: list[int]) -> None:
    cache = filled()
    cache.tensor[1, 0, 0, 0, 0, 0] = float("nan")
    expected = cache.tensor.clone()
    for block in blocks:
        expected[block] = 0
    PoolAttention(cache, "torch").zero_blocks(blocks)
    assert torch.equal(cache.tensor.nan_to_num(-1), expected.nan_to_num(-1))
