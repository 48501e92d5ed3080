"""Noise in C: the numbers that torch draws, bit for bit, wherever its generator stands."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.kernel_cases import INSTRUCTIONS_HERE
from hf_paged.kernels import cpu_noise

WORDS = slice(24, 24 + 624 * 8)  # of a state, eight bytes each
ALL_BY_LIBM = {"DOUBT": 1 << 28}


def two_generators(state: Tensor | None = None) -> tuple[torch.Generator, torch.Generator]:
    both = torch.Generator().manual_seed(11), torch.Generator().manual_seed(11)
    if state is not None:
        for generator in both:
            generator.set_state(state)
    return both


def assert_same(kernel: Any, own: torch.Generator, other: torch.Generator, count: int) -> Tensor:
    found, expected = torch.empty(count), torch.empty(count)
    cpu_noise._draw(kernel, found, own)
    expected.exponential_(1, generator=other)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(own.get_state(), other.get_state())
    return expected


@pytest.mark.parametrize("instructions", [name for name in INSTRUCTIONS_HERE if name != "AVX512_BF16"])
@pytest.mark.parametrize("constants", [{}, ALL_BY_LIBM], ids=["own", "libm"])
def test_noise_wherever_the_generator_stands(instructions: str, constants: dict[str, int]) -> None:
    """Would break: numbers in another order, pairs that are taken apart at a round's end, a logarithm's last bit."""
    kernel = cpu_noise.compiled(instructions, **constants)
    draw, (own, other) = random.Random(3), two_generators()
    for _ in range(200):
        assert_same(kernel, own, other, draw.choice([1, 2, 311, 312, 313, 624, draw.randrange(1, 3000)]))
        count = draw.randrange(3)  # single outputs in between
        for generator in (own, other):
            torch.empty(count, dtype=torch.int32).random_(generator=generator)


def test_noise_of_many_numbers() -> None:
    """Would break: a logarithm that is wrong where its value lies next to the middle between two floats."""
    kernel = cpu_noise.load()
    assert kernel is not None
    own, other = two_generators()
    for _ in range(4):
        assert_same(kernel, own, other, 1 << 20)


def test_noise_of_the_ends() -> None:
    """Would break: zero, one, and the largest number that there is."""
    ends = [0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 0, 1, 0xFFFFFFFF, 0xFFFFFFFE, 0x80000, 0, 0x100000, 0]
    generator = torch.Generator().manual_seed(0)
    torch.empty(2, dtype=torch.int32).random_(generator=generator)
    state = generator.get_state()
    words = state[WORDS].view(torch.int64)
    words[2 : 2 + len(ends)] = torch.tensor([_untempered(each) for each in ends])
    kernel = cpu_noise.load()
    assert kernel is not None
    found = assert_same(kernel, *two_generators(state), len(ends) // 2)
    assert found[0] == 0 and found[1] > 36.7 and 0 < found[2] < 1e-15


def _untempered(output: int) -> int:
    """The word of the generator's state that gives this output."""
    y = output
    y ^= y >> 18
    y ^= (y << 15) & 0xEFC60000
    x = y
    for _ in range(5):
        x = y ^ ((x << 7) & 0x9D2C5680)
    y = x = x & 0xFFFFFFFF
    for _ in range(3):
        x = y ^ (x >> 11)
    return x


def test_other_tensors_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = two_generators()
    for make in (
        lambda: torch.empty(8, 5, dtype=torch.bfloat16),
        lambda: torch.empty(8, 5).t(),
        lambda: torch.empty(0),
    ):
        assert torch.equal(cpu_noise.exponential(make(), own), make().exponential_(1, generator=other))
    monkeypatch.setattr(cpu_noise, "load", lambda: None)
    assert torch.equal(cpu_noise.exponential(torch.empty(50), own), torch.empty(50).exponential_(1, generator=other))
    assert torch.equal(own.get_state(), other.get_state())


@pytest.mark.parametrize("change", ["numbers", "state"])
def test_another_torch_is_noticed(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Would break: noise of this algorithm where torch's is another."""
    draw = cpu_noise._draw

    def other_draw(kernel: Any, noise: Tensor, generator: torch.Generator) -> None:
        draw(kernel, noise, generator)
        if change == "numbers":
            noise[-1] = noise[-1].nextafter(torch.tensor(0.0))
        else:
            torch.empty(1).exponential_(1, generator=generator)

    monkeypatch.setattr(cpu_noise, "_draw", other_draw)
    assert cpu_noise.load.__wrapped__() is None
