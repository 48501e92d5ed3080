"""`is_supported`: whether the paged pool can stand behind a model, decided by trying it on a shrunken copy."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.api.exactness import why_not_exact
from hf_paged.api.probe import Trial, probe
from hf_paged.api.stored_layers import as_their_modules_say, keeps_states, on_meta
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.model import peft_layers
from hf_paged.model.base_class import base_class
from hf_paged.model.cache_argument import CACHE_ARGUMENTS
from hf_paged.model.placement import Placement, why_not_on
from hf_paged.model.sharding import local_layers, ranks_of, why_not_whole
from hf_paged.model.spread import is_hooked, is_wrapped, offloading, runs_on
from hf_paged.model.traits import ModelTraits
from hf_paged.model.wrapper import in_steps, inner_path

_PAGED_LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "deepseek_sparse_attention",  # the same, of older transformers
}


@dataclass(frozen=True, slots=True)
class SupportReport:
    """Whether and how a model can be patched; true in a condition if it can.

    Attributes:
        supported: Whether `patch` accepts the model.
        reasons: Why not, a sentence each; empty if supported.
        traits: What was found out about its architecture; `None` if not supported.
        notes: Where a supported model's tokens may differ from stock's, or its rows can't have adapters of their own,
            and why, a sentence each.
        exact: Whether a row has the same bits whatever shares its steps, of this model here and under default settings.
        why_not_exact: Why a supported model's rows may not, a sentence each.
    """

    supported: bool
    reasons: tuple[str, ...] = ()
    traits: ModelTraits | None = None
    notes: tuple[str, ...] = ()
    exact: bool = False
    why_not_exact: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.supported

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many tokens each layer keeps, or `None` of one that keeps all. Empty if not supported."""
        layers = () if self.traits is None else self.traits.layers
        return tuple(None if layer is None else layer.window for layer in layers)

    @property
    def layout(self) -> str:
        """How forwards run. "packed" is real tokens side by side, and attention straight over the pool; "padded" is
        rows of one width, and the model's own attention over keys gathered from the pool; "alone" is the same, a call
        at a time; under "stock" calls run stock `generate()`. Empty if not supported.
        """
        if self.traits is None:
            return ""
        if self.traits.runs_stock:
            return "stock"
        return "packed" if self.traits.runs_packed else "padded" if self.traits.is_batched else "alone"

    @property
    def why_padded(self) -> str:
        """Why its forwards don't run packed, in words or in those of the trial's error; empty if they do."""
        return "" if self.traits is None else self.traits.why_padded

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layout of each layer, or "shared" of one that stores nothing and attends to another one's keys."""
        layers = () if self.traits is None else self.traits.layers
        return tuple("shared" if layer is None else self.layout for layer in layers)

    @property
    def padding(self) -> float:
        """What of the pool's pages stays empty because layers are grouped, as a share of what they fill."""
        return 0.0 if self.traits is None else CacheGroups.of(self.traits.stored).padding(self.traits.stored)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all layers, in a pool of this dtype; 0 if nothing runs over one."""
        layers = () if self.traits is None or self.traits.runs_stock else self.traits.stored
        return sum(layer.elements_per_token for layer in layers if layer is not None) * dtype.itemsize


def unwrap(model: Any) -> nn.Module:
    """The model inside a PEFT wrapper, or the model itself.

    Raises:
        ValueError: Not a torch module at all.
    """
    if not isinstance(model, nn.Module):
        remedy = ""
        if isinstance(model, str):
            remedy = "; load it first, as AutoModelForCausalLM.from_pretrained(...)"
        elif isinstance(getattr_static(model, "model", None), nn.Module):
            remedy = "; give the model inside, its `.model`"
        raise ValueError(f"expected a Hugging Face model, got {type(model).__name__}: {model!r:.80}{remedy}")
    get_base_model: Any = getattr(model, "get_base_model", None)
    inner = model if get_base_model is None else get_base_model()
    return inner if isinstance(inner, nn.Module) else model


def is_supported(model: Any) -> SupportReport:
    """Looks at a model and tries a shrunken copy of its architecture. The model itself is untouched. Never raises.

    Args:
        model: Anything; a PEFT wrapper is looked through.

    Returns:
        The report, with the reasons if the answer is no.
    """
    return look_at(model, is_exact_asked=True)


def look_at(model: Any, is_exact_asked: bool = False) -> SupportReport:
    """The same; whether it is exact takes a trial of its own, which `patch` has no need of."""
    try:
        if not isinstance(model, nn.Module):
            hint = "; patch its .model" if isinstance(getattr(model, "model", None), PreTrainedModel) else ""
            return SupportReport(False, (f"it is a {type(model).__name__}, not a Hugging Face model{hint}",))
        model = unwrap(model)
        reasons = _structural_reasons(model)
        if reasons:
            return SupportReport(False, tuple(reasons))
        assert isinstance(model, PreTrainedModel)
        found = _tried(base_class(model), model.config)
        if isinstance(found, SupportReport):
            return found
        is_shared_out = ranks_of(model) is not None
        reason = _why_not_on_ranks(found.traits, model) if is_shared_out else None
        reason = reason or _why_not_on_devices(found.traits, model)
        if reason is not None:
            return SupportReport(False, (reason,))
        layers = as_their_modules_say(found.traits.layers, model)
        layers = local_layers(layers, model) if is_shared_out else layers
        found = replace(found, traits=replace(found.traits, layers=layers))
        return _report(model, found, is_exact_asked, _notes(model))
    except Exception as error:  # half constructed, or with a config that raises where it is read
        return SupportReport(False, (f"looking at it raised {type(error).__name__}: {error!s:.200}",))


def _notes(model: PreTrainedModel) -> tuple[str, ...]:
    """Why a model that can be patched may not give stock's tokens, or takes the same adapters for all rows."""
    stepped = in_steps(model) if peft_layers.tuners_among(model.modules()) else None
    why = peft_layers.why_shared(model, model.modules(), ranks_of(model) is None, stepped)
    same = () if why is None else (f"rows of a step share their adapters, by PEFT's own code: {why}",)
    mixed = [name for name, module in model.named_modules() if _scales_by_batch(module)]
    if not mixed:
        return same
    names = ", ".join(mixed[:3]) + (f" and {len(mixed) - 3} more" if len(mixed) > 3 else "")
    return (
        *same,
        f"{names}: quantized layers that scale their input by its largest number, that of all rows and of padding. "
        "What they make of a row depends on what is beside it, in stock as well: batches of rows that differ in "
        "length, and rows of several calls in one step, may give other tokens than stock. Layers with a scale for "
        "each row don't",
    )


def _scales_by_batch(module: nn.Module) -> bool:
    """Whether a layer quantizes its input as it runs, with one scale for all of it (as torch and torchao do it)."""
    if getattr(getattr(module, "_packed_params", None), "dtype", None) is torch.qint8:
        return True
    quantizes = getattr(getattr(module, "weight", None), "act_quant_kwargs", None)
    return type(getattr(quantizes, "granularity", None)).__name__ == "PerTensor"


def _why_not_on_ranks(traits: ModelTraits, model: PreTrainedModel) -> str | None:
    """Why a model of these traits can't be served by several processes, or `None`."""
    kinds = {
        "it is multimodal": inner_path(model) not in (None, ""),
        "its layers have indexers": bool(traits.indexers),
        "its rows can't share steps with others": not traits.is_batched,
        "it has an encoder": bool(traits.cross),
    }
    found = [kind for kind, is_so in kinds.items() if is_so]
    return f"{found[0]}, which is not taken over several processes (tp_plan): load it on one" if found else None


def _why_not_on_devices(traits: ModelTraits, model: PreTrainedModel) -> str | None:
    """Why a model of these traits can't be served on the devices that its layers run on, or `None`."""
    placement = Placement(model)
    if not is_hooked(model) or placement() is None or placement.layers(traits.num_layers) is None:
        return None
    kinds = {
        "its layers keep a state": bool(traits.states),
        "its layers have indexers": bool(traits.indexers),
        "some of its layers attend to others' keys": None in traits.layers or traits.shares_attention,
        "its layers are told positions": traits.tells_positions,
        "its rows can't share steps with others": not traits.is_batched,
        "it has an encoder": bool(traits.cross),
    }
    found = [kind for kind, is_so in kinds.items() if is_so]
    return f"{found[0]}, which is not taken over several devices: load it on one (device_map=0)" if found else None


def is_architecture_supported(base: type[PreTrainedModel], config: PreTrainedConfig) -> SupportReport:
    """The same of a model that doesn't exist yet, by its class and its config alone. Never raises.

    Args:
        base: A class of models with a language-model head.
        config: Of one; not changed. It is exact if one in float32 would be, on this machine's CPU.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            model = on_meta(base, config)
        reasons = _architecture_reasons(model)
        found = SupportReport(False, tuple(reasons)) if reasons else _tried(base, model.config)
        return found if isinstance(found, SupportReport) else _report(model, found, is_exact_asked=True)
    except Exception as error:
        return SupportReport(False, (f"making one raised {type(error).__name__}: {error!s:.200}",))


def _report(model: PreTrainedModel, found: Trial, is_exact_asked: bool, notes: tuple[str, ...] = ()) -> SupportReport:
    reasons = why_not_exact(model, found) if is_exact_asked else ()
    return SupportReport(True, (), found.traits, notes, is_exact_asked and not reasons, reasons)


def _tried(base: type[PreTrainedModel], config: PreTrainedConfig) -> Trial | SupportReport:
    with torch.random.fork_rng(devices=[]):
        found = probe(base, config)
    if not isinstance(found, str):
        return found
    if not set(CACHE_ARGUMENTS) & set(inspect.signature(base.forward).parameters):
        found = f"its forward takes no {' or '.join(CACHE_ARGUMENTS)}, so it has no cache for the pool to stand in for"
    return SupportReport(False, (found,))


def _structural_reasons(model: nn.Module) -> list[str]:
    """Why a model can't be patched, as far as its class and config show."""
    if not isinstance(model, PreTrainedModel):
        inside = next((name for name, part in model.named_children() if isinstance(part, PreTrainedModel)), None)
        hint = "" if inside is None else f"; patch the one inside of it, its .{inside}"
        return [f"{type(model).__name__} is not a transformers PreTrainedModel{hint}"]
    reasons = _architecture_reasons(model)
    share = why_not_whole(model)
    if share is not None:
        reasons.append(share)
    if "forward" in vars(model) and not is_wrapped(model):
        reasons.append("its forward was replaced on the instance (by a wrapper): patch it before that")
    if is_hooked(model):
        reason = _why_not_spread(model)
        return [*reasons, reason] if reason is not None else reasons
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    if len(devices) > 1:
        reasons.append("its weights lie on several devices, and nothing moves its inputs there: load it by device_map")
    elif any(device.type == "meta" for device in devices):
        reasons.append("its weights are on the meta device: load them first")
    else:
        reasons += [reason for device in devices if (reason := why_not_on(device)) is not None]
    return reasons


def _why_not_spread(model: PreTrainedModel) -> str | None:
    if ranks_of(model) is not None:
        return "it is split between processes (tp_plan) and spread by accelerate: only one of these is supported"
    if inner_path(model) not in (None, ""):
        return "it is multimodal, and accelerate has spread its weights (device_map, offloading): load it on one device"
    if offloading(model):
        return "accelerate offloads weights of the whole model, not of modules: leave out preload_module_classes"
    for device in filter(None, map(runs_on, model.modules())):
        if (reason := why_not_on(device)) is not None:
            return reason
    kept = {id(t) for module in model.modules() if offloading(module) for t in module.parameters()}
    if any(parameter.device.type == "meta" and id(parameter) not in kept for parameter in model.parameters()):
        return "some of its weights are on the meta device, and nothing fetches them: load them first"
    return None


def _architecture_reasons(model: PreTrainedModel) -> list[str]:
    if not model.can_generate():
        return [f"{type(model).__name__} has no language-model head, so it can't generate()"]
    config = model.config
    reasons = []
    has_states = not config.is_encoder_decoder and keeps_states(config)
    if getattr(model, "_is_stateful", False) and not has_states and not _is_all_attention(config):
        reasons.append("it keeps a recurrent state elsewhere than in its cache, where the pool can't stand in for it")
    text = config.get_text_config(decoder=True)
    if text is not config and not config.is_encoder_decoder and inner_path(model) is None:
        reasons.append("it is multimodal, and the language model in it was not found: leave it unpatched")
    unpaged = sorted(set(getattr(text, "layer_types", None) or ()) - _PAGED_LAYER_TYPES)
    if unpaged and not has_states:
        reasons.append(f"it has layers of type {', '.join(unpaged)}; the pool holds keys and values of plain attention")
    return reasons


def _is_all_attention(config: PreTrainedConfig) -> bool:
    """Whether the config names its layers' types, and all of them are attention."""
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    return bool(kinds) and kinds <= {*_PAGED_LAYER_TYPES, "attention"}
