"""How encoders run in calls: over texts without padding, and once over audio that is decoded again, as Whisper's is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from hf_paged.api.engine_of import engine_of
from hf_paged.engine.call_context import call_context

Encodings = dict[Hashable, Tensor]  # by what a row was made of: of the last batch that was encoded in a call


def encoding(model: Any, inputs: Tensor, mask: Any = None) -> AbstractContextManager[None]:
    """In what an encoder runs: on CPU one at a time, which skips tokens, or embeddings, that a mask hides.

    Args:
        inputs: `[rows, columns, ...]`, what it reads.
        mask: `[rows, columns]`, if these are tokens; `None`: it hides nothing.
    """
    core = engine_of(model).core
    is_on_cpu = core.bound.placement[1].type == "cpu" and not core.bound.layer_devices and not core.bound.is_offloaded
    if core.encoder is None or not is_on_cpu:
        return nullcontext()
    if mask is None and inputs.is_cpu:
        mask = torch.ones(inputs.shape[:2], dtype=torch.int64, device="cpu")
    is_of_tokens = model.main_input_name == "input_ids" and isinstance(mask, Tensor) and mask.shape == inputs.shape[:2]
    return core.encoder.scope(mask if is_of_tokens and mask.is_cpu and _follows(model) else None)


def decodes_again(model: Any) -> bool:
    """Whether a model's `generate()` runs its encoder over one segment several times."""
    return hasattr(model, "generate_with_fallback")


def encoded(model: Any, features: Tensor, encode: Callable[[], Any]) -> Any:
    """What `encode` returns, an encoder's output, or what it returned for the same rows in this call.

    Args:
        features: `[rows, ...]`, all that the encoder is given.
        encode: Runs the encoder.
    """
    kept = call_context().encodings
    if kept is None or not _follows(model):
        with encoding(model, features):
            return encode()
    with engine_of(model).core.transaction():
        weights = engine_of(model).core.weights_key()
    keys = [(id(model), weights, _digest(row)) for row in features.detach()]
    if all(key in kept for key in keys):
        return BaseModelOutput(last_hidden_state=torch.stack([kept[key] for key in keys]))
    with encoding(model, features):
        output = encode()
    kept.clear()
    kept.update(zip(keys, output.last_hidden_state, strict=True))
    return output


def _follows(model: Any) -> bool:
    """Whether an encoder's output follows from its input, and nothing looks at the run."""
    encoder = model.get_encoder()
    modules = list(encoder.modules())
    return not any(each.training or each._forward_hooks or each._forward_pre_hooks for each in modules)


def _digest(row: Tensor) -> bytes:
    content = row.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).digest() + repr((row.dtype, row.shape)).encode()
