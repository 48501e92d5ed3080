"""`HostCall`: a `generate()` call on a GPU that transformers prepares from host copies of its tensors.

While it prepares a call, transformers looks at ids, masks and special tokens again and again. On a GPU each look waits
for what is queued there. So all of them are copied to the host at once, transformers prepares the call as it would on
CPU, and what its loop or our sampler needs of the result goes to the device, for which nothing waits.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from hf_paged.attention.cache import PagedCache
from hf_paged.kernels.transfers import to_device, to_host
from hf_paged.model.base_class import base_class

_TENSORS = ("inputs", "input_ids", "attention_mask", "position_ids", "token_type_ids")
_PARAMETERS = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
_SPECIAL_TOKENS = ("_bos_token_tensor", "_eos_token_tensor", "_pad_token_tensor", "_decoder_start_token_tensor")

# Arguments and settings whose preparation computes on the model's device.
_ARGUMENTS = {
    *("assistant_model", "synced_gpus", "encoder_outputs"),
    *("inputs_embeds", "negative_prompt_ids", "negative_prompt_attention_mask"),
    # A loop from elsewhere, which is given these tensors as they are: some settings ask for one, too, by the latter.
    *("custom_generate", "trust_remote_code"),
}
_SETTINGS = ("cache_implementation", "watermarking_config", "token_healing")
# Methods of `GenerationMixin` that its loops call, not its preparation: a model may have its own.
_OF_LOOPS = {
    *("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "_reorder_cache"),
    *("_sample", "_beam_search", "_assisted_decoding"),
}


@dataclass(frozen=True, slots=True)
class HostCall:
    """One call.

    Attributes:
        device: Where its tensors belong.
        arguments: Of `generate()`, all of them by name, tensors on the CPU.
        vocab_size: Columns of the model's logits; `None` where that isn't known.
    """

    device: torch.device
    arguments: dict[str, Any]
    vocab_size: int | None

    @classmethod
    def of(
        cls, model: Any, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any], from_host: bool
    ) -> HostCall | None:
        """The call, if its preparation looks at nothing but these tensors; else `None`. Waits once for those on a GPU.

        Args:
            from_host: Tensors on the CPU stand for such on the device.
        """
        arguments = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
        if len(arguments) != len(args) + len(kwargs) or "kwargs" in _PARAMETERS[: len(args)]:
            return None  # refused by `generate()`
        if model.config.is_encoder_decoder:
            return None  # its encoder reads them meanwhile
        found = {name: arguments[name] for name in _TENSORS if arguments.get(name) is not None}
        if not found.keys() & {"inputs", "input_ids"} or not all(
            type(value) is Tensor
            and value.layout is torch.strided
            and not value.is_nested
            and (value.device == device or (from_host and value.device.type == "cpu"))
            for value in found.values()
        ):
            return None
        if not isinstance(arguments.get("past_key_values"), PagedCache | None):
            return None
        others = [value for name, value in arguments.items() if name not in found]
        if any(_is_given(arguments.get(name)) for name in _ARGUMENTS) or any(map(_has_tensor, others)):
            return None
        configs = (arguments.get("generation_config"), model.generation_config)
        for name in _SETTINGS:
            if any(map(_is_given, (arguments.get(name), *(getattr(config, name, None) for config in configs)))):
                return None
        if not _prepares_as_transformers(base_class(model)) or _PREPARATION & vars(model).keys():
            return None
        copies = dict(zip(found, to_host(list(found.values())), strict=True))
        return cls(device, arguments | copies, _vocab_size(model))

    def place_items(self, *lists: Iterable[Any]) -> None:
        """Moves the tensors of processors and criteria that transformers made; the caller's own are left alone."""
        own = [
            id(item) for name in ("logits_processor", "stopping_criteria") for item in self.arguments.get(name) or ()
        ]
        for item in (item for items in lists for item in items):
            if id(item) in own:
                continue
            if self.vocab_size is not None and getattr(item, "prepared_bias_variables", True) is False:
                # Tables of biased tokens, which it would make when it is first called: in a step.
                item._prepare_bias_variables(torch.empty(0, self.vocab_size, device="cpu"))
            for name, value in vars(item).items():
                setattr(item, name, self._placed(value))

    def place_config(self, config: GenerationConfig) -> GenerationConfig:
        """Copies the prepared config, with its tensors on the device."""
        config = copy.copy(config)
        for name in _SPECIAL_TOKENS:
            if isinstance(value := getattr(config, name, None), Tensor):
                setattr(config, name, to_device(value, self.device))
        return config

    def place(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Brings the tensors among a loop's arguments to the device."""
        return {
            name: to_device(value, self.device) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }

    def _placed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return to_device(value, self.device)
        if type(value) in (list, tuple) and _has_tensor(value):
            return type(value)(map(self._placed, value))
        return value


_PREPARATION = {
    name
    for name, value in vars(GenerationMixin).items()
    if isinstance(value, FunctionType | staticmethod) and name not in _OF_LOOPS
}


@functools.lru_cache(maxsize=64)
def _prepares_as_transformers(kind: type) -> bool:
    """Whether a class, as it was before patching, changes none of the methods that prepare calls."""
    return all(
        next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None) is vars(GenerationMixin)[name]
        for name in _PREPARATION
    )


def _vocab_size(model: Any) -> int | None:
    head = model.get_output_embeddings()
    size, weight = getattr(head, "out_features", None), getattr(head, "weight", None)
    # Quantized weights may be of any shape.
    return size if isinstance(weight, Tensor) and weight.shape[:1] == (size,) else None


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if type(value) in (list, tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)
