"""What is refused of models over several processes, and asked of a model that is whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import hf_paged
from helpers.models import build, random_ids
from hf_paged.engine.leader import Leader


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"pp_size": 2}, "by layers (pp_size)"),
        ({"fsdp_size": 2}, "(fsdp_size)"),
        ({"ep_size": 2}, "(ep_size)"),
        ({}, "only tensor parallelism"),
    ],
)
def test_other_ways_to_share_a_model_out(sizes: dict[str, int], said: str) -> None:
    model: Any = build("llama")
    model._device_mesh = SimpleNamespace(size=lambda: 2)
    model.config.distributed_config = SimpleNamespace(**sizes)
    report = hf_paged.is_supported(model)
    assert not report and said in report.reasons[0]
    with pytest.raises(hf_paged.UnsupportedModelError, match="2 processes"):
        hf_paged.patch(model)


def test_a_forked_child_takes_no_leave() -> None:
    """Would break: followers that end because a child of rank 0's program does."""
    sent: list[Any] = []
    channel: Any = SimpleNamespace(others=[], send=sent.append, join=lambda seconds: None)
    leader = Leader(channel, lambda error: None)
    leader.start_anew()
    leader.part()
    assert not sent


def test_a_whole_model_follows_nobody() -> None:
    model: Any = hf_paged.patch(build("llama"), num_blocks=8)
    with pytest.raises(RuntimeError, match="not split"):
        model.paged.follow()


def test_ranks_have_what_they_agreed_on() -> None:
    """Would break: a rank whose own memory gives it another swap space: it never ends a copy."""
    model: Any = hf_paged.patch(build("llama"), num_blocks=8)
    model.paged.core.pool.limit(6, 3)
    model.generate(random_ids(1, 4), max_new_tokens=2)
    found = model.paged.snapshot()
    assert (found["num_blocks"], found["num_swap_blocks"]) == (6, 3)
