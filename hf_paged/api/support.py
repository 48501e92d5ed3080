"""`is_supported`: whether the paged pool can stand behind a model, decided by trying it on a shrunken copy."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_paged.api.patched_class import attach, detach
from hf_paged.api.routing import base_class
from hf_paged.api.state_probe import keeps_states, state_traits
from hf_paged.attention.cache import PagedCache
from hf_paged.core.config import PagedConfig
from hf_paged.memory.spec import AttentionSpec
from hf_paged.model.runner import ModelTraits
from hf_paged.model.weights_version import is_batch_dependent, why_not_whole
from hf_paged.model.wrapper import inner_path

_PAGED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_TOLERANCE = 1e-3  # of the largest logit; float32 rounding is 1e-6, a wrongly placed key is 1e-1
_PROBE_LENGTHS = (11, 3, 1, 6)
_MAX_ELEMENTS = 5 * 10**8  # of a shrunken copy


@dataclass(frozen=True, slots=True)
class SupportReport:
    """Whether and how a model can be patched; true in a condition if it can.

    Attributes:
        supported: Whether `patch` accepts the model.
        reasons: Why not, a sentence each; empty if supported.
        traits: What was found out about its architecture; `None` if not supported.
    """

    supported: bool
    reasons: tuple[str, ...] = ()
    traits: ModelTraits | None = None

    def __bool__(self) -> bool:
        return self.supported

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The tokens that each layer keeps; `None`: all. Empty if not supported."""
        return (
            ()
            if self.traits is None
            else tuple(None if layer is None else layer.window for layer in self.traits.layers)
        )

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all layers, in a pool of this dtype; 0 if not supported."""
        layers = () if self.traits is None else self.traits.layers
        return sum(layer.elements_per_token for layer in layers if layer is not None) * dtype.itemsize


def unwrap(model: Any) -> nn.Module:
    """The model inside a PEFT wrapper, or the model itself.

    Raises:
        ValueError: Not a torch module at all.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a Hugging Face model, got {type(model).__name__}: {model!r:.80}")
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
    try:
        if not isinstance(model, nn.Module):
            hint = "; patch its .model" if isinstance(getattr(model, "model", None), PreTrainedModel) else ""
            return SupportReport(False, (f"it is a {type(model).__name__}, not a Hugging Face model{hint}",))
        model = unwrap(model)
        reasons = _structural_reasons(model)
        if reasons:
            return SupportReport(False, tuple(reasons))
        assert isinstance(model, PreTrainedModel)
        with torch.random.fork_rng(devices=[]):
            return _probe(model)
    except Exception as error:  # half constructed, or with a config that raises where it is read
        return SupportReport(False, (f"looking at it raised {type(error).__name__}: {error!s:.200}",))


def _structural_reasons(model: nn.Module) -> list[str]:
    """What rules a model out by its looks alone."""
    if not isinstance(model, PreTrainedModel):
        inside = next((name for name, part in model.named_children() if isinstance(part, PreTrainedModel)), None)
        hint = "" if inside is None else f"; patch the one inside of it, its .{inside}"
        return [f"{type(model).__name__} is not a transformers PreTrainedModel{hint}"]
    if not model.can_generate():
        return [f"{type(model).__name__} has no language-model head, so it can't generate()"]
    config = model.config
    reasons = []
    if config.is_encoder_decoder:
        reasons.append("it is an encoder-decoder model; only decoder-only models have one growing KV cache")
    has_states = not config.is_encoder_decoder and keeps_states(config)
    if getattr(model, "_is_stateful", False) and not has_states and not _is_all_attention(config):
        reasons.append("it keeps a recurrent state elsewhere than in its cache, where the pool can't stand in for it")
    text = config.get_text_config(decoder=True)
    if text is not config and not config.is_encoder_decoder and inner_path(model) is None:
        reasons.append("it is multimodal, and the language model in it was not found: leave it unpatched")
    unpaged = sorted(set(getattr(text, "layer_types", None) or ()) - _PAGED_LAYER_TYPES)
    if unpaged and not has_states:
        reasons.append(f"it has layers of type {', '.join(unpaged)}; the pool holds keys and values of plain attention")
    if vars(text).get("kv_lora_rank"):
        reasons.append(
            "it caches what its keys and values are made from (kv_lora_rank), as in multi-head latent attention"
        )
    share = why_not_whole(model)
    if share is not None:
        reasons.append(share)
    if "forward" in vars(model):
        reasons.append("its forward was replaced on the instance (accelerate hooks, a wrapper): patch it before that")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        reasons.append("its weights lie on several devices, the pool on one")
    elif any(parameter.device.type == "meta" for parameter in model.parameters()):
        reasons.append("its weights are on the meta device: load them first")
    if not reasons and not has_states and _stated_shape(text) is None:
        reasons.append("its config does not state one number of layers, heads and head dimension for all layers")
    return reasons


def _is_all_attention(config: PreTrainedConfig) -> bool:
    """Whether it names its layers' types, and all of them are attention."""
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    return bool(kinds) and kinds <= {*_PAGED_LAYER_TYPES, "attention"}


def _stated_shape(config: PreTrainedConfig) -> tuple[int, int, int] | None:
    """Layers, key/value heads and head dimension by the config's common names; `None` if it doesn't say."""
    try:
        num_heads, hidden_size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        num_kv_heads = (
            getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or num_heads
        )
        head_dim = getattr(config, "head_dim", None)
        num_layers = getattr(config, "num_hidden_layers", None)
    except Exception:  # Gemma 4's, where it varies from layer to layer
        return None
    if head_dim is None and isinstance(hidden_size, int) and isinstance(num_heads, int):
        head_dim = hidden_size // num_heads
    shape = (num_layers, num_kv_heads, head_dim)
    is_stated = all(isinstance(number, int) and number > 0 for number in shape)
    return shape if is_stated else None  # type: ignore[return-value]


def _probe(model: PreTrainedModel) -> SupportReport:
    """Compares paged with stock logits on a tiny model of the same class."""
    base, config = base_class(model), model.config.get_text_config(decoder=True)
    if keeps_states(model.config):
        shrunken = [partial(_shrink_wrapper, model.config, heads) for heads in (2, 4, None)]
        traits = state_traits(base, model.config, partial(_build, base), shrunken)
        return SupportReport(False, (traits,)) if isinstance(traits, str) else SupportReport(True, (), traits)
    tiny, failure = None, ""
    for heads in (2, 4, None):  # CodeGen's come in fours
        try:
            tiny = _build(base, _shrink_wrapper(model.config, heads))
            stock = DynamicCache(config=tiny.config.get_text_config(decoder=True))
            expected = _probe_logits(tiny, stock)
            break
        except Exception as error:
            tiny, failure = None, f"{type(error).__name__}: {error}"
    if tiny is None:
        return SupportReport(False, (f"a shrunken copy of it could not be built and run to try ({failure:.200})",))

    tiny_config = tiny.config.get_text_config(decoder=True)
    layers = _real_layers(config, tiny_config, stock)
    tiny_layers = _real_layers(tiny_config, tiny_config, stock)
    if isinstance(layers, str) or isinstance(tiny_layers, str):
        return SupportReport(False, (str(layers),))
    rope_types = _rope_types(getattr(config, "rope_parameters", None))
    rows_independent = not any(map(is_batch_dependent, rope_types))
    # Without position_ids a model places tokens by their column, which a packed batch doesn't have.
    may_run_packed = rows_independent and "position_ids" in inspect.signature(base.forward).parameters
    own = ModelTraits(tiny_layers, runs_packed=False, rows_independent=rows_independent)
    ways: list[tuple[ModelTraits, bool]] = []
    if may_run_packed:
        # The windows that the config states, unless a layer turns out to attend to more than that.
        for has_windows in (True, False) if any(_stated_windows(tiny_config)) else (False,):
            layers_tried = _with_windows(tiny_layers, tiny) if has_windows else tiny_layers
            flat = replace(own, layers=layers_tried, runs_packed=True)
            ways += [(replace(flat, allows_inference_mode=may_infer), has_windows) for may_infer in (True, False)]
    if rows_independent:
        ways += [
            (replace(own, runs_padded=True, allows_inference_mode=may_infer), False) for may_infer in (True, False)
        ]
    else:
        ways.append((replace(own, regime_length=_regime_length(config)), False))
    for traits, has_windows in [*ways, (own, False)]:
        keeps_tokens = traits.is_batched or traits.regime_length is not None
        try:
            attach(tiny, PagedConfig(num_blocks=128, block_size=2, cuda_graphs=False), traits)
            cache = PagedCache(tiny)
            found = _probe_logits(tiny, cache)
            error_size = float((found - expected).abs().max() / expected.abs().max())
            if error_size < _TOLERANCE and cache.is_padded is not keeps_tokens and not _keeps_inference_tensors(tiny):
                layers = _with_windows(layers, model) if has_windows else layers
                return SupportReport(True, (), replace(traits, layers=layers))
            failure = f"logits differ by {error_size:.1%}"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            detach(tiny)
        if _keeps_inference_tensors(tiny):
            tiny = _build(base, tiny.config)
    return SupportReport(
        False,
        (f"its attention doesn't work on keys and values as it stores them in the cache ({failure:.200})",),
    )


def _keeps_inference_tensors(model: PreTrainedModel) -> bool:
    """Whether a module keeps something that a forward in inference mode made, in whatever it holds."""
    seen: set[int] = set()

    def finds(value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.is_inference()
        if id(value) in seen or isinstance(value, str | int | float | type | PreTrainedConfig):
            return False
        seen.add(id(value))
        if isinstance(value, dict):
            return any(map(finds, list(value.values())))
        if isinstance(value, list | tuple | set):
            return any(map(finds, list(value)))
        return finds(vars(value)) if hasattr(value, "__dict__") and not callable(value) else False

    return any(finds(vars(module)) for module in model.modules())


def _rope_types(parameters: Any) -> set[str]:
    """All kinds of rotary scaling in a config's `rope_parameters`, which may be nested by layer type."""
    if not isinstance(parameters, dict):
        return set()
    own = {parameters["rope_type"]} if isinstance(parameters.get("rope_type"), str) else set()
    return own.union(*(_rope_types(value) for value in parameters.values()))


def _regime_length(config: PreTrainedConfig) -> int:
    """Tokens below which a rotary embedding that depends on the longest row is as of its first day."""

    def lengths(parameters: Any) -> Iterator[int]:
        if isinstance(parameters, dict):
            own = parameters.get("original_max_position_embeddings")
            if isinstance(own, int):
                yield own
            for value in parameters.values():
                yield from lengths(value)

    return min([config.max_position_embeddings, *lengths(config.rope_parameters)])


def _stated_windows(config: PreTrainedConfig) -> list[int | None]:
    """The window that the config states for each layer."""
    window, num_layers = getattr(config, "sliding_window", None), config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    if not isinstance(window, int) or window < 1 or len(kinds) != num_layers:
        return [None] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _with_windows(layers: tuple[AttentionSpec, ...], model: PreTrainedModel) -> tuple[AttentionSpec, ...]:
    """The layers with the windows that the config states and their modules don't gainsay."""
    config = model.config.get_text_config(decoder=True)
    windows = _stated_windows(config)
    context = getattr(config, "max_position_embeddings", None) or math.inf
    for module in model.get_submodule(inner_path(model) or "").modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and 0 <= index < len(windows):
            own = getattr(module, "sliding_window", windows[index])
            windows[index] = own if own == windows[index] else None
    return tuple(
        replace(layer, window=window if window is not None and window < context else None)
        for layer, window in zip(layers, windows, strict=True)
    )


def _real_layers(
    config: PreTrainedConfig, tiny_config: PreTrainedConfig, stock: DynamicCache
) -> tuple[AttentionSpec, ...] | str:
    """What each layer of the model caches, all of it, or why the pool can't hold that.

    Read from its config, and corrected by what the tiny copy was seen to store (Falcon's config counts heads that its
    multi-query attention doesn't have).
    """
    stated, tiny_stated = _stated_shape(config), _stated_shape(tiny_config)
    assert stated is not None and tiny_stated is not None
    stored = {(*layer.keys.shape[1::2], *layer.values.shape[1::2]) for layer in stock.layers}
    if len(stock.layers) != tiny_stated[0] or len(stored) != 1:
        return f"its layers don't store keys and values of one shape, but {sorted(stored)}"
    heads, head_dim, value_heads, value_dim = stored.pop()
    if (heads, head_dim) != (value_heads, value_dim):
        return f"its keys and values differ in width ({head_dim} and {value_dim}), as in multi-head latent attention"
    if head_dim != tiny_stated[2]:
        return f"its stored head dimension ({head_dim}) isn't the one its config states ({tiny_stated[2]})"
    candidates = (
        (stated[1], tiny_stated[1]),
        (1, 1),
        (config.num_attention_heads, tiny_config.num_attention_heads),
    )
    for number, tiny_number in candidates:
        if heads == tiny_number:
            return (AttentionSpec(number, stated[2], stated[2]),) * stated[0]
    return f"its number of stored heads ({heads}) isn't one its config states"


def _shrink_wrapper(config: PreTrainedConfig, heads: int | None) -> PreTrainedConfig:
    """A multimodal model in small: its language model shrunken, its towers, which are not tried, of one layer."""
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    if text is small:
        return _shrink(config, heads)
    for name, part in list(vars(small).items()):
        if part is text:
            setattr(small, name, _shrink(text, heads))
        elif isinstance(part, PreTrainedConfig):
            for size in ("num_hidden_layers", "num_blocks", "depth", "encoder_layers", "n_layer"):
                if isinstance(getattr(part, size, None), int):
                    setattr(part, size, 1)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"):
        if getattr(small, name, None) is not None:
            setattr(small, name, None)
    return small


def _shrink(config: PreTrainedConfig, heads: int | None) -> PreTrainedConfig:
    """The architecture in small: same kinds of layers, few of them, a tiny vocabulary.

    Args:
        config: Of the model.
        heads: So many key/value heads, and as narrow; `None`: the width as it is.
    """
    small = copy.deepcopy(config)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    stated = _stated_shape(small) or (0, 1, 0)
    layer_types = getattr(small, "layer_types", None)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "ffn_dim": 48,
        "n_inner": 48,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "sliding_window": 5,
    }
    if layer_types:
        kinds = list(dict.fromkeys(layer_types))
        sizes |= {"num_hidden_layers": 2 * len(kinds), "layer_types": kinds * 2}
    else:
        sizes["num_hidden_layers"] = 2
    if heads is not None:
        groups = max(small.num_attention_heads // stated[1], 1)
        kv_heads = 1 if stated[1] == 1 else heads
        num_heads = kv_heads * min(groups, 4)
        head_dim = 16
        sizes |= {
            "num_attention_heads": num_heads,
            "num_key_value_heads": kv_heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_size": num_heads * head_dim,
            "word_embed_proj_dim": num_heads * head_dim,
            "rotary_dim": min(getattr(small, "rotary_dim", None) or head_dim, head_dim),
        }
    for name, value in sizes.items():
        if getattr(small, name, None) is not None:
            with suppress(AttributeError):  # a property that follows from others (Falcon's head_dim)
                setattr(small, name, value)
    for part in vars(small).values():
        if isinstance(part, PreTrainedConfig):  # towers of another kind, which the probe doesn't use
            for name in ("num_hidden_layers", "num_blocks"):
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, 2)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(small, name, None)
    return small


def _build(base: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A float32 CPU model whose weights are large enough for a wrong key to show. Seeds the CPU's global RNG.

    Raises:
        ValueError: It would take gigabytes.
    """
    with torch.device("meta"):
        num_elements = sum(parameter.numel() for parameter in base._from_config(config).parameters())
    if num_elements > _MAX_ELEMENTS:
        raise ValueError(f"it would have {num_elements:,} parameters")
    with torch.device("cpu"), torch.inference_mode(False):
        torch.default_generator.manual_seed(0)  # no other device's
        model = base._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                if parameter.ndim > 1:
                    parameter.copy_(noise * 2 / math.sqrt(parameter.shape[-1]))
                else:
                    parameter.add_(0.1 * noise)
    return model.eval()


@torch.no_grad()
def _probe_logits(model: PreTrainedModel, past: Cache) -> Tensor:
    """Last logits of a ragged left-padded prefill, a chunk of two tokens and two decode steps: `[rows, 4, vocab]`."""
    with torch.device("cpu"):
        longest, rows = max(_PROBE_LENGTHS), len(_PROBE_LENGTHS)
        ids = torch.randint(0, 64, (rows, longest + 4), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        for row, length in enumerate(_PROBE_LENGTHS):
            mask[row, : longest - length] = 0
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        edges = [0, longest, longest + 2, longest + 3, longest + 4]
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        collected = []
        for start, end in itertools.pairwise(edges):
            extra: dict[str, Any] = {"position_ids": positions[:, start:end]} if takes_positions else {}
            if model._supports_logits_to_keep():
                extra["logits_to_keep"] = 1
            output = model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                past_key_values=past,
                use_cache=True,
                **extra,
            )
            collected.append(output.logits[:, -1:].float())
        return torch.cat(collected, dim=1)
