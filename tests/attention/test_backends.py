"""The registry of backends: which one serves a pool, and that another one is one class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import hf_paged
from helpers.models import build, random_ids
from hf_paged.attention.backends import registry
from hf_paged.attention.backends.registry import PagedStep, PoolDescription, choose, register
from hf_paged.attention.backends.torch import TorchBackend, TorchStep
from hf_paged.attention.params import AttentionParams
from hf_paged.core.config import attention_backends

POOL = torch.zeros(2, 1, 2, 1, 4, 16)


class CountingStep(TorchStep):
    layers: ClassVar[list[int]] = []

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        self.layers.append(params.layer)
        return super().attend(query, params)


class NarrowBackend(TorchBackend):
    @classmethod
    def supports(cls, pool: PoolDescription) -> str | None:
        return "takes head dims up to 16" if pool.head_dim > 16 else None

    def step(self, metadata: registry.AttentionMetadata) -> PagedStep:
        return CountingStep(self._kv_cache, metadata)


@pytest.fixture
def narrow() -> Iterator[None]:
    register("narrow", device_types=("cpu",), preference=7)(NarrowBackend)
    yield
    del attention_backends["narrow"]


def test_one_more(narrow: None) -> None:
    """Would break: a list of names elsewhere, or an order that does not come from the registry."""
    assert registry.names() == ["narrow", "triton", "cpu", "torch"]
    assert choose("auto", POOL, torch.float32).name == choose("narrow", POOL, torch.float32).name == "narrow"
    assert choose("auto", POOL.to("meta"), torch.float32).name == "torch"
    assert choose("auto", torch.zeros(2, 1, 2, 1, 4, 17), torch.float32).name in ("cpu", "torch")
    with pytest.raises(
        ValueError, match=r'attention_backend="narrow" takes head dims up to 16; use "torch".* or "auto"$'
    ):
        choose("narrow", torch.zeros(2, 1, 2, 1, 4, 17), torch.float32)
    ids, arguments = random_ids(2, 5), {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    model = hf_paged.patch(build("llama"), num_blocks=32, attention_backend="narrow")
    assert torch.equal(model.generate(ids, **arguments), build("llama").generate(ids, **arguments))
    assert set(CountingStep.layers) == {0, 1}


def test_names() -> None:
    assert registry.names() == ["triton", "cpu", "torch"]
    with pytest.raises(ValueError, match="attention_backend must be one of auto, triton, cpu, torch; got 'narrow'"):
        choose("narrow", POOL, torch.float32)
    with pytest.raises(ValueError, match=r"attention_backend must be one of .*; got 'narrow'"):
        hf_paged.PagedConfig(attention_backend="narrow")


@pytest.mark.parametrize(("name", "can_record"), [("triton", True), ("cpu", False), ("torch", False)])
def test_what_can_be_recorded(name: str, can_record: bool) -> None:
    assert choose(name, POOL, torch.float32).can_record is can_record
