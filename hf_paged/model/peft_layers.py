"""PEFT's layers as data: what an adapter adds behind a layer, or puts in its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.kernels.low_rank import LowRank
from hf_paged.model.module_overrides import has_hooks

BASE = "__base__"  # PEFT's name for no adapter
INNER = ("base_layer", "original_module")  # what PEFT's layers call the module that they stand before
OF_LATENTS = "kv_b_proj"  # transformers' name for the layer whose inputs attention caches
_MODULE = "peft.tuners.lora."
# Classes whose forward is that of the layer inside, and what each active adapter adds to it.
_KINDS = (
    *("Linear", "Embedding", "Linear8bitLt", "Linear4bit", "TorchaoLoraLinear", "HqqLoraLinear", "GPTQLoraLinear"),
    *("AwqLoraLinear", "EetqLoraLinear", "AqlmLoraLinear", "IncLoraLinear"),
)
_KEPT = "adapter_layer_names"  # the attribute of PEFT's layers that names what they keep of adapters


def tuners_among(modules: Iterable[nn.Module]) -> list[Any]:
    """Layers of PEFT's around other ones, or instead of them."""
    return [module for module in modules if hasattr(type(module), _KEPT) and hasattr(module, "active_adapters")]


def is_tuner(module: nn.Module) -> bool:
    """Whether it is one."""
    return bool(tuners_among([module]))


def inner(layer: Any) -> nn.Module:
    """The layer without adapters."""
    own: nn.Module = layer.original_module if is_wrapper(layer) else layer.base_layer
    return own


PREPARES = "what reads pictures or sounds and embeds tokens, which they change, runs in callers' calls"


def without_adapters(module: nn.Module) -> nn.Module:
    """The layer that a module is, or that PEFT's layer is around."""
    return inner(module) if is_tuner(module) else module


def bare_name(name: str) -> str:
    """A module's name in a model without PEFT's layers."""
    return ".".join(part for part in name.split(".") if part not in INNER)


def find(model: nn.Module, name: str) -> nn.Module:
    """The layer without adapters of such a name, in a model that has PEFT's layers now or has not."""
    module = model
    for part in name.split("."):
        module = without_adapters(module.get_submodule(part))
    return module


def is_wrapper(layer: nn.Module) -> bool:
    """Whether adapters put modules of their own in the place of one."""
    return hasattr(layer, "original_module")


def shared_modules(model: nn.Module, without: nn.Module | None = None) -> list[nn.Module]:
    """The model's modules that are no adapter's, each once, in the order of `model.modules()`.

    Args:
        without: A part of it that is left out.
    """
    found: dict[int, nn.Module] = {}
    stack: list[nn.Module | None] = [model]
    while stack:
        module = stack.pop()
        if module is not None and module is not without and id(module) not in found:
            found[id(module)] = module
            is_around = hasattr(type(module), _KEPT) and is_tuner(module)  # few have it: a call for these alone
            stack += [inner(module)] if is_around else reversed(module._modules.values())
    return list(found.values())


def why_own_code(layer: Any) -> str | None:
    """Why only PEFT's own forward of a layer is right, with one choice for all rows; `None`: it is not needed."""
    kind = type(layer)
    name = f"{kind.__module__}.{kind.__name__}"
    if is_wrapper(layer):
        return None if hasattr(layer, "modules_to_save") else f"{name} trains a part of a module"
    if not kind.__module__.startswith(_MODULE) or kind.__name__ not in _KINDS:
        return f"{name} is not a LoRA layer that runs for each row"
    if has_hooks(layer):
        return f"hooks look at a {name}"
    variants = {
        type(each).__name__ if not isinstance(each, type) else each.__name__ for each in layer.lora_variant.values()
    }
    odd = sorted(variants - {"DoraLinearVariant"})
    return f"{name} has a {odd[0]}" if odd else None


def why_shared(model: Any, modules: Iterable[nn.Module], is_whole: bool, stepped: set[int] | None) -> str | None:
    """Why all rows of a step have the same adapters; `None`: each may have its own.

    Args:
        modules: Of the model, PEFT's layers among them.
        is_whole: It is not split between processes.
        stepped: As `in_steps` has found.
    """
    modules = list(modules)
    tuners = tuners_among(modules)
    if stepped is not None and any(id(own) not in stepped for own in tuners):
        return PREPARES
    if tuners and model.config.is_encoder_decoder:
        return "an encoder runs in its callers' calls, and what it made serves all that read the same"
    if tuners and not is_whole:
        return "the model is split between processes (tp_plan)"
    if tuners_among([own for module in modules if (own := module._modules.get(OF_LATENTS)) is not None]):
        return f"{OF_LATENTS} makes keys and values of what is cached, for all rows at once"
    return next((why for layer in tuners if (why := why_own_code(layer))), None)


def own_names(layer: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Those of some adapters' names that have something in a layer."""
    if is_wrapper(layer):
        return tuple(name for name in names if name in layer.modules_to_save)
    return tuple(name for name in names if name in layer.lora_A or name in layer.lora_embedding_A)


def active_names(layer: Any) -> tuple[str, ...]:
    """The adapters that a layer is set to."""
    return () if layer.disable_adapters else own_names(layer, layer.active_adapters)


def scales(layer: Any, names: Sequence[str]) -> tuple[float, ...]:
    """What these adapters' parts of a layer are multiplied by."""
    return () if is_wrapper(layer) else tuple([float(layer.scaling[name]) for name in names])


def is_merged(layer: Any) -> bool:
    """Whether adapters are in the weights: then nothing is added, for any row."""
    return bool(getattr(layer, "merged", False))


def tensors_of(layer: Any, names: Sequence[str]) -> list[Tensor]:
    """What adapters keep in a layer, and what else is part of `added`."""
    if is_wrapper(layer):
        kept = [layer.modules_to_save[name] for name in names if name in layer.modules_to_save]
        return [tensor for own in kept for tensor in (*own.parameters(), *own.buffers())]
    tables = [getattr(layer, table) for table in type(layer).adapter_layer_names if hasattr(layer, table)]
    kept = [table[name] for table in tables for name in names if name in table]
    found = [t for own in kept for t in ([own] if isinstance(own, Tensor) else own.parameters())]
    if any(name in layer.lora_magnitude_vector for name in names):
        found += list(layer.get_base_layer().parameters())
    return found


@torch.no_grad()
def added(layer: Any, names: Sequence[str]) -> LowRank:
    """What these adapters together add behind a LoRA layer; of an embedding, `a` is `[rank, words]`."""
    parts = [_one(layer, name) for name in names]
    if len(parts) == 1:
        return parts[0]
    if any(part.output_scale is not None for part in parts):
        raise ValueError(f"DoRA adapters can't be active together with others: {', '.join(names)}")
    biases = [part.scale * part.bias for part in parts if part.bias is not None]
    return LowRank(
        a=torch.cat([part.a for part in parts]),
        b=torch.cat([part.scale * part.b for part in parts], dim=1),
        scale=1.0,
        bias=sum(biases[1:], biases[0]) if biases else None,
    )


def _one(layer: Any, name: str) -> LowRank:
    scale = float(layer.scaling[name])
    if name in layer.lora_embedding_A:
        return LowRank(layer.lora_embedding_A[name].detach(), layer.lora_embedding_B[name].detach(), scale)
    first, last = layer.lora_A[name], layer.lora_B[name]
    a, b = first.weight.detach(), last.weight.detach()
    output_scale = None
    if name in layer.lora_magnitude_vector:
        dora = layer.lora_magnitude_vector[name]
        from peft.utils.integrations import dequantize_module_weight

        weight = dequantize_module_weight(layer.get_base_layer()).to(a.dtype)
        norm = dora.get_weight_norm(weight=weight, lora_weight=b @ a, scaling=scale)
        output_scale = (dora.weight.detach() / norm).float().contiguous()
    bias = None if last.bias is None else last.bias.detach()
    return LowRank(a, b, scale, bias, output_scale)
