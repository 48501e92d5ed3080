"""The forward context: a step reaches the forward it is of, and no other."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch

from hf_paged.attention.context import check_not_cut, current_context, forward_context, is_sentinel

CPU = torch.device("cpu")
OUTER, INNER = mock.Mock(name="outer"), mock.Mock(name="inner")


def test_the_innermost_step_is_found_by_its_own_mask_alone() -> None:
    with forward_context(OUTER, CPU) as outer:
        assert is_sentinel(outer) and outer.ndim == 4 and current_context(outer).step is OUTER
        with forward_context(INNER, CPU) as inner:
            assert current_context(inner).step is INNER
            with pytest.raises(RuntimeError, match="mask of another forward"):
                current_context(outer)
        assert current_context(outer).step is OUTER
    with pytest.raises(RuntimeError, match="mask of another forward"):
        current_context(outer)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 1, 1, dtype=torch.bool), torch.ones(2, 3)])
def test_other_masks(mask: Any) -> None:
    """Would break: the mask of another model's forward, inside of a step, taken for the step's."""
    with forward_context(OUTER, CPU):
        assert not is_sentinel(mask)


def test_a_mask_that_the_model_has_cut() -> None:
    """Would break: stock's attention over the tokens of several sequences, in silence."""
    other = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    check_not_cut(other)
    with forward_context(OUTER, CPU) as mask:
        check_not_cut(other)
        cut = mask[:, :, slice(0, None)]
        assert not is_sentinel(cut)
        with pytest.raises(RuntimeError, match="has cut the mask"):
            check_not_cut(cut)


def test_another_thread() -> None:
    found: list[Any] = []

    def look() -> None:
        try:
            current_context(outer)
        except RuntimeError as error:
            found.append(error)
        with forward_context(INNER, CPU) as inner:
            found.append(current_context(inner).step)

    with forward_context(OUTER, CPU) as outer:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(10)
        assert current_context(outer).step is OUTER
    assert isinstance(found[0], RuntimeError) and found[1] is INNER
