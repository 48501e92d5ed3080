"""What `submit()` takes: one prompt, in any of its forms, and the arguments beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_paged.kernels.transfers import to_host
from hf_paged.model.peft_layers import without_adapters

_NOT_TAKEN = {
    "streamer": "iterate the request instead",
    "inputs_embeds": "submit() takes token ids",
    "inputs": "give the prompt as input_ids",
    "synced_gpus": "it is for models that several processes run in lock-step",
    "output_scores": "a RequestOutput has no per-step outputs; call generate()",
    "output_logits": "a RequestOutput has no per-step outputs; call generate()",
    "output_attentions": "a RequestOutput has no per-step outputs; call generate()",
    "output_hidden_states": "a RequestOutput has no per-step outputs; call generate()",
    "prompt_logprobs": "model.paged.score(prompts) says how likely the tokens of texts are",
    "prompt_logprobs_from": "it is `first` of model.paged.score(prompts)",
}

_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


def one_prompt(input_ids: Any, model: Any) -> Tensor:
    """A prompt in any of the accepted forms as `[1, L]`, on the CPU. Waits for one that lies on a GPU."""
    if isinstance(input_ids, np.ndarray) and input_ids.dtype.kind in "biuf":
        input_ids = torch.from_numpy(input_ids.copy(order="C"))
    if isinstance(input_ids, Tensor):
        is_dense = input_ids.layout is torch.strided and not input_ids.is_nested and not input_ids.is_meta
        if input_ids.dtype not in _ID_DTYPES or not is_dense:
            kind = f"{input_ids.dtype}, {input_ids.layout}, on {input_ids.device}"
            raise ValueError(f"a prompt is a list or a dense tensor of integer token ids, got a tensor of {kind}")
        shape = tuple(input_ids.shape)
        if input_ids.ndim == 2 and shape[0] == 1:
            input_ids = input_ids[0]
        elif input_ids.ndim != 1:
            raise ValueError(
                f"submit() takes one prompt, a 1-D tensor or [1, L], got shape {shape}; submit each row by itself, or "
                "use engine.generate(list of prompts)"
            )
        prompt: list[int] = to_host([input_ids])[0].tolist()
    else:
        is_list = isinstance(input_ids, Sequence) and not isinstance(input_ids, str | bytes | bytearray | memoryview)
        if not is_list or any(isinstance(i, bool) or not isinstance(i, int | np.integer) for i in input_ids):
            remedy = "tokenize it first, as tokenizer(text).input_ids" if isinstance(input_ids, str) else ""
            if isinstance(input_ids, Mapping) and "input_ids" in input_ids:
                remedy = "give its input_ids"
            raise ValueError(
                f"a prompt is a list of integer token ids or a tensor, got {input_ids!r:.80}; "
                + (remedy or "several prompts go to engine.generate(list of prompts)")
            )
        prompt = list(input_ids)
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: give at least one token")
    check_ids(min(prompt), max(prompt), model)
    return torch.as_tensor(prompt, dtype=torch.int64, device="cpu")[None]


def one_source(given: Any, arguments: dict[str, Any], model: Any) -> Tensor | None:
    """What a model's encoder is to read for one request, `[1, ...]`, on the CPU if it is ids, as those of the decoder's
    prompt are from here on; `None`: the arguments have `encoder_outputs`.

    Args:
        given: As `submit()` is given it first.
        arguments: The others, out of which it is taken if it is there by its name.
    """
    name = model.main_input_name
    if arguments.get("decoder_input_ids") is not None:
        arguments["decoder_input_ids"] = one_prompt(arguments["decoder_input_ids"], model.get_decoder())
    source = arguments.pop(name, None) if given is None else given
    if source is None and arguments.get("encoder_outputs") is not None:
        return None
    if name == "input_ids":
        return one_prompt(source, model)
    source = torch.as_tensor(source) if isinstance(source, Tensor | np.ndarray) else source
    if not isinstance(source, Tensor) or source.shape[:1] != (1,) or not source.is_floating_point():
        kind = f"one of {source.dtype}, {tuple(source.shape)}" if isinstance(source, Tensor) else f"{source!r:.80}"
        raise ValueError(
            f"submit({name}=...) takes what this model's encoder reads of one request, a tensor of floats [1, ...], "
            f"got {kind}; the text that its decoder begins with is decoder_input_ids"
        )
    bins = getattr(model.config, "num_mel_bins", None)
    if name == "input_features" and bins is not None and bins not in source.shape[1:]:
        raise ValueError(
            f"this model's encoder reads {bins} mel bins, got features {list(source.shape)}: were they made by another "
            "model's feature extractor?"
        )
    return source.detach().clone()  # it may be read after this call


def check_ids(low: int, high: int, model: Any) -> None:
    """Raises `ValueError` if the lowest or the highest id of a prompt has no embedding."""
    try:
        vocab_size = getattr(without_adapters(model.get_input_embeddings()), "num_embeddings", high + 1)
    except NotImplementedError:  # a model that doesn't say where its embeddings are
        return
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(
            f"token id {bad} is outside the model's vocabulary of {vocab_size}: is the tokenizer another model's, or "
            "were tokens added to it without model.resize_token_embeddings()?"
        )


def check_arguments(arguments: dict[str, Any], priority: Any, cache_salt: Any) -> None:
    """Raises `ValueError` for arguments that a request can't have."""
    for name, reason in _NOT_TAKEN.items():
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"submit() does not take {name}: {reason}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    if cache_salt is not None and not isinstance(cache_salt, str | int | bytes):
        raise ValueError(f"cache_salt must be a string, an integer or bytes, got {cache_salt!r:.80}")
