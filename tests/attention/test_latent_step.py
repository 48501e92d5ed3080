"""Attention over latents, absorbed and expanded, against keys and values made of all latents in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.kernel_cases import random_tensor, step_metadata
from hf_paged.attention import latent_step, shared_prefix
from hf_paged.attention.backends.cpu import CPUBackend, CPUStep
from hf_paged.attention.backends.registry import Backend
from hf_paged.attention.backends.torch import TorchBackend
from hf_paged.attention.backends.triton import TritonBackend
from hf_paged.attention.decode_work import WorkKind
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import ops
from hf_paged.kernels.latent_maps import LatentMaps

CPU = torch.device("cpu")
BACKENDS: list[type[Backend]] = [CPUBackend, TorchBackend, TritonBackend]
BLOCK, LAYERS, SCALE = 4, 2, 0.3
# New tokens and tokens of each sequence: those with one new token first.
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1, 1, 1], [9, 1, 22]),
    "prompts": ([7, 12, 7], [7, 12, 7]),
    "mixed": ([1, 1, 9, 3], [5, 17, 9, 30]),
    "chunks": ([2, 6], [25, 19]),
}
WIDTHS = {  # heads, plain, rotary, value, latent
    "wide": (3, 16, 8, 12, 20),
    "as the rotary key": (2, 8, 16, 8, 16),
    "many heads": (19, 6, 4, 10, 12),
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 6},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
}


class Case:
    """A step over a pool of latents, and the truth."""

    def __init__(self, step: str, widths: str, dtype: torch.dtype, extra: str = "plain") -> None:
        new, lens = STEPS[step]
        heads, plain, rotary, value, latent = WIDTHS[widths]
        counts = [-(-length // BLOCK) for length in lens]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        null = sum(counts)
        self.metadata = step_metadata(tables, new, lens, BLOCK, null, CPU)
        self.latent_dim = latent
        self.pool = torch.zeros(null + 1, LAYERS, 1, 1, BLOCK, latent + rotary, dtype=dtype)
        self.rows = [random_tensor(length, latent + rotary, dtype=dtype, seed=length) for length in lens]
        for own, table in zip(self.rows, tables, strict=True):
            for index, row in enumerate(own):
                self.pool[table[index // BLOCK], 1, 0, 0, index % BLOCK] = row
        self.query = random_tensor(sum(new), heads, plain + rotary, dtype=dtype, seed=1)
        key, made = (random_tensor(heads, width, latent, dtype=dtype, seed=width) / 4 for width in (plain, value))
        own_extra = dict(EXTRAS[extra])
        if own_extra.get("sinks"):
            own_extra["sinks"] = random_tensor(heads, dtype=dtype, seed=9)
        self.params = AttentionParams(1, SCALE, **own_extra, maps=LatentMaps(key, made))
        self.new = new

    def truth(self) -> Tensor:
        maps, params = self.params.maps, self.params
        assert maps is not None
        found, first = [], 0
        for rows, new in zip(self.rows, self.new, strict=True):
            query = self.query[first : first + new].double().transpose(0, 1)  # [heads, new, width]
            first += new
            latents, rotary = rows[:, : self.latent_dim].double(), rows[:, self.latent_dim :].double()
            key = torch.cat([latents @ maps.key.double().mT, rotary.expand(len(query), -1, -1)], dim=-1)
            scores = query @ key.mT * SCALE
            if params.softcap:
                scores = torch.tanh(scores / params.softcap) * params.softcap
            distance = torch.arange(len(rows) - new, len(rows))[:, None] - torch.arange(len(rows))
            scores[:, (distance < 0) | (distance >= (params.sliding_window or 10**6))] = float("-inf")
            if params.sinks is not None:
                sinks = params.sinks.double()[:, None, None].expand(-1, new, 1)
                weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            found.append((weights @ (latents @ maps.value.double().mT)).transpose(0, 1))
        return torch.cat(found)


def error_of(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("step", STEPS)
def test_a_step(step: str, widths: str, extra: str, backend: type[Backend]) -> None:
    case = Case(step, widths, torch.float32, extra)
    found = backend(case.pool, case.latent_dim).step(case.metadata).attend(case.query, case.params)
    assert error_of(found, case.truth()) < 1e-6


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_tokens_that_share_latents(widths: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens of a sequence, absorbed, are rows over the same blocks."""
    monkeypatch.setattr(shared_prefix, "LEAST_TOKENS", 1)
    monkeypatch.setitem(STEPS, "shared", ([7, 2, 9], [26, 19, 30]))
    monkeypatch.setattr(LatentMaps, "is_expanded", lambda self, new, tokens: np.full(len(new), False))
    case = Case("shared", widths, torch.float32, extra)
    step = CPUBackend(case.pool, case.latent_dim).step(case.metadata)
    assert error_of(step.attend(case.query, case.params), case.truth()) < 1e-6
    assert isinstance(step, CPUStep) and any(one.together for rows in step._rows.values() for one in rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("step", STEPS)
def test_bfloat16(step: str, widths: str, backend: type[Backend]) -> None:
    case = Case(step, widths, torch.bfloat16)
    found = backend(case.pool, case.latent_dim).step(case.metadata).attend(case.query, case.params)
    assert error_of(found, case.truth()) < 2e-2


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_either_way(step: str, expanded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: tokens that are put back elsewhere, a way that sees what lies behind a token."""
    monkeypatch.setattr(LatentMaps, "is_expanded", lambda self, new, tokens: np.full(len(new), expanded))
    case = Case(step, "wide", torch.float32)
    for backend in BACKENDS:
        found = backend(case.pool, case.latent_dim).step(case.metadata).attend(case.query, case.params)
        assert error_of(found, case.truth()) < 1e-6


@pytest.mark.parametrize("extra", ["plain", "sinks"])
def test_few_heads_at_a_time(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: memory for the keys of all heads, where prompts are long."""
    monkeypatch.setattr(latent_step, "MOST_EXPANDED", 30 * 16 * 3)
    for step in ("prompts", "mixed"):
        case = Case(step, "many heads", torch.float32, extra)
        found = TorchBackend(case.pool, case.latent_dim).step(case.metadata).attend(case.query, case.params)
        assert error_of(found, case.truth()) < 1e-6


@pytest.mark.parametrize("widths", WIDTHS)
def test_written(widths: str) -> None:
    """Would break: a kernel that takes the rotary key for a value of another place."""
    _, _, rotary, _, latent = WIDTHS[widths]
    pools = [torch.zeros(9, LAYERS, 1, 1, BLOCK, latent + rotary) for _ in BACKENDS]
    metadata = step_metadata([[3, 1], [0, 8]], [5, 2], [5, 7], BLOCK, 8, CPU)
    new = [
        random_tensor(1, 1, 7, width, dtype=torch.float32, seed=width)[0].transpose(0, 1) for width in (latent, rotary)
    ]
    for backend, pool in zip(BACKENDS, pools, strict=True):
        backend(pool, latent).step(metadata).write(*new, layer=1)
    assert all(torch.equal(pool, pools[0]) for pool in pools)
    assert torch.equal(pools[0][3, 1, 0, 0, 2], torch.cat([own[2, 0] for own in new]))


def test_the_cheaper_way() -> None:
    """DeepSeek-V3's widths: prompts are expanded, decode rows never, chunks when they are long enough for it."""
    maps = LatentMaps(torch.empty(2, 128, 512), torch.empty(2, 128, 512))
    new, tokens = np.array([1, 1, 2, 2, 100, 400]), np.array([1, 4000, 2, 4000, 4000, 4000])
    assert maps.is_expanded(new, tokens).tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize("extra", ["plain", "window", "sinks"])
def test_split_among_programs(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: parts that are combined with another's, a sink counted in each of them."""
    STEPS["long"] = ([1, 1, 1], [150, 3, 77])
    case = Case("long", "wide", torch.float32, extra)
    del STEPS["long"]
    step = TritonBackend(case.pool, case.latent_dim).step(case.metadata)
    for slots in (1, 3, 8):
        work = case.metadata.decode_work(WorkKind(16, slots, case.params.sliding_window or 0))
        assert (work.max_parts > 0) is (slots > 1 and extra != "window")
        monkeypatch.setattr(case.metadata, "decode_work", lambda kind, work=work: work)
        assert error_of(step.attend(case.query, case.params), case.truth()) < 1e-6
        monkeypatch.undo()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_pool(dtype: torch.dtype) -> None:
    """The kernels read the numbers that torch wrote, and the reverse."""
    found = []
    for writer, reader in ((TritonBackend, TorchBackend), (TorchBackend, TritonBackend)):
        case = Case("mixed", "wide", torch.float32)
        pool = case.pool.to(dtype)
        tokens = torch.cat([rows[-new:] for rows, new in zip(case.rows, case.new, strict=True)])[:, None]
        parts = tokens[..., : case.latent_dim], tokens[..., case.latent_dim :]
        writer(pool, case.latent_dim).step(case.metadata).write(*parts, layer=1)
        found.append(reader(pool, case.latent_dim).step(case.metadata).attend(case.query, case.params))
    assert error_of(*found) < 1e-6 and error_of(found[0], case.truth()) < 0.2


def test_padding_is_zeros() -> None:
    """Would break: rows that no item lists keep what the memory held, perhaps NaN."""
    case = Case("decode", "wide", torch.float32)
    maps, metadata = case.params.maps, case.metadata
    assert maps is not None
    query = maps.absorb(case.query)
    work = metadata.decode_work(WorkKind(*ops.latent_plan(query, case.pool, case.latent_dim)))
    shown = work.items[work.items[:, 1] == 1]
    where = query, case.pool, 1, case.latent_dim, metadata.block_tables, metadata.seq_lens
    settings = SCALE, 0, 0.0, None, torch.zeros(ops.partials_size(work.max_parts, query.shape[1], case.latent_dim))
    whole = torch.ops.hf_paged.latent_attention(*where, work.items, work.split, work.max_parts, *settings)
    found = torch.ops.hf_paged.latent_attention(*where, shown, work.split[:0], work.max_parts, *settings, True)
    assert torch.equal(found[1], whole[1]) and whole.all(dim=-1).all() and not found[[0, 2]].any()
