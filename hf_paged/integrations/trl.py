"""TRL: its trainers put a forward of their own on a model, which gives log-probabilities in place of logits.

It calls the model's body and multiplies by the head's weights itself, so that nothing of ours would see the logits.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.utils import logging

from hf_paged.core.errors import UnsupportedModelError
from hf_paged.model import exact_operations
from hf_paged.model.exact_forward import Product
from hf_paged.sampling.logprobs import log_probs

logger = logging.get_logger(__name__)

TESTED = ("1.16",)
"""Versions, by their beginnings: this module depends on a private function of theirs."""


class Forwards(Protocol):
    """Exact forwards of one model."""

    def logits(self, given: dict[str, Any], wanted: Tensor) -> Tensor: ...

    def check(self, given: dict[str, Any]) -> None: ...


@contextmanager
def exact_head(model: Any, forwards: Forwards) -> Iterator[None]:
    """Within it, the forward that TRL has put on a model, if it has, gives exact log-probabilities.

    Raises:
        UnsupportedModelError: It is of a version that this was not tested with, or does more than is known.
    """
    fused = vars(model).get("forward")
    if not _is_fused(fused):
        yield
        if _is_fused(vars(model).get("forward")):
            logger.warning(
                "hf_paged: a trainer of TRL's was made within exact_training, and its log-probabilities were stock's: "
                "make the trainer first"
            )
        return
    _check_version(model)
    settings = inspect.getclosurevars(fused.__func__).nonlocals
    head = model.get_output_embeddings()
    cast = vars(head).get("forward") if settings["cast_lm_head_to_fp32"] else None

    def forward(_: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return fused(*args, **kwargs)
        return _fused(forwards, dict(settings), args, kwargs)

    forward.stands_in_for = fused  # type: ignore[attr-defined]  # where it is asked what generation would do
    model.forward = types.MethodType(forward, model)
    if cast is not None:
        head.forward = partial(_wide_head, head)
        head.forward.__module__ = __name__
    try:
        yield
    finally:
        model.forward = fused
        if cast is not None:
            head.forward = cast


@contextmanager
def plain_forward(model: Any) -> Iterator[None]:
    """Within it, a model is without TRL's forward, so that it can be patched: `ref_model` of a trainer, which makes it.

    Raises:
        ValueError: TRL has put none on the model, or on another than its class's.
        UnsupportedModelError: It is of a version that this was not tested with.
    """
    fused = vars(model).get("forward")
    if not _is_fused(fused):
        raise ValueError(f"plain_forward needs a model with TRL's forward on it; this {type(model).__name__} has none")
    _check_version(model)
    settings = inspect.getclosurevars(fused.__func__).nonlocals
    if getattr(settings["original_forward"], "__func__", None) is not type(model).forward:
        raise ValueError(
            f"plain_forward needs the class's own forward beneath TRL's; {type(model).__name__} has another"
        )
    del model.forward
    try:
        yield
    finally:
        from trl.trainer.utils import add_fused_lm_head

        names = ("temperature", "cast_lm_head_to_fp32", "outputs")
        add_fused_lm_head(model, **{name: settings[name] for name in names})


def _check_version(model: Any) -> None:
    if not version("trl").startswith(tuple(f"{own}." for own in TESTED)):
        reason = f"TRL {version('trl')} is on it, and only TRL {', '.join(TESTED)} is tested"
        raise UnsupportedModelError(f"exact training of {type(model).__name__}", (reason,))


def _is_fused(forward: Any) -> bool:
    function = getattr(forward, "__func__", None)
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    return code is not None and code.co_name == "_fused_forward" and names.get("__name__") == "trl.trainer.utils"


def _wide_head(head: Any, states: Tensor) -> Tensor:
    """The forward of a head under `cast_lm_head_to_fp32`, in rollouts as well, each row with one order of sums."""
    with torch.no_grad():
        value = exact_operations.linear(states.detach().float(), head.weight, head.bias)
    found: Tensor = Product.apply([value], states, head.weight, head.bias)
    return found


def _fused(forwards: Forwards, settings: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of TRL's forward: the log-probability of each labelled token, and so on."""
    from trl.trainer.utils import FusedCausalLMOutput

    given = dict(zip(("input_ids", "attention_mask", "position_ids"), args, strict=False)) | kwargs
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    num_items = given.pop("num_items_in_batch", None)
    forwards.check(given)
    if shifted is None:
        shifted = labels[:, 1:]
    mask = shifted != -100
    is_real = torch.ones_like(given["input_ids"]) if given.get("attention_mask") is None else given["attention_mask"]
    mask = mask & (is_real[:, : mask.shape[1]] != 0)
    wanted = torch.nn.functional.pad(mask, (0, is_real.shape[1] - mask.shape[1]))
    if not mask.any():  # a batch without labels has a loss that is zero, and can be differentiated
        wanted = is_real != 0
    logits = forwards.logits(given, wanted)[: int(mask.sum())]
    scores, tokens = log_probs(logits, settings["temperature"]), shifted[mask]

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    own = spread(scores.gather(1, tokens[:, None])[:, 0])
    shares = scores.exp()
    found = {
        "entropy": lambda: -(shares * scores.masked_fill(scores.isneginf(), 0.0)).sum(dim=-1),
        "log_sum_sq_probs": lambda: (2 * scores.detach()).logsumexp(dim=-1),
        "mean_logits": lambda: (logits.detach().float() / settings["temperature"]).mean(dim=-1),
        "is_top1": lambda: scores.argmax(dim=-1) == tokens,
    }
    loss = -own.sum() / (mask.sum().clamp(min=1) if num_items is None else num_items)
    return FusedCausalLMOutput(
        loss=loss,
        log_probs=own,
        label_mask=mask,
        **{name: spread(make()) for name, make in found.items() if name in settings["outputs"]},
    )
