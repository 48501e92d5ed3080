"""A model's architecture in small: the same kinds of layers, few of them and narrow, made from its config."""

from __future__ import annotations

import copy
import math
import re
from contextlib import suppress
from typing import Any

from transformers import PreTrainedConfig

SPECIAL = 60  # ids from here on are special, where a config insists on having such
_VOCAB = 64
_MOST_LAYERS = 8

# By the common names of what a config may state: the first that matches decides, a number above it becomes it.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"moe_intermediate_size|shared_expert_intermediate_size|expert_.*_(size|dim)|moe_.*_size", 24),
    (r".*intermediate_size.*|(.*_)?ffn_dim|n_inner|ffn_hidden_size|inner_dim|d_ff|d_inner", 48),
    (r"(max|n)_position(_embedding)?s|max_sequence_length|max_seq_len(gth)?|n_ctx", 128),
    (r"sliding_window", 5),
    (r"attention_window", 6),  # on both sides
    (r"attention_chunk_size", 6),
    (r"floor_scale|log_scaling_n_floor", 4),
    (r"(n|num)_(routed_|local_|moe_)?experts|(moe_)?num_(local_)?experts|n_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|num_selected_experts|moe_k|experts_top_k", 2),
    (r"(encoder|decoder)_sparse_step", 2),
    (r"num_sparse_(encoder|decoder)_layers", 1),
    (r"expert_capacity", 2),  # tokens of a row, or of whatever is taken for one, that an expert takes
    (r"n_group|topk_group|num_expert_groups?|first_k_dense_replace", 1),
    (r"q_lora_rank", 24),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"mamba_chunk_size|chunk_size", 8),
    (r"mamba_dt_rank|time_step_rank", 8),
    (r"index_topk", 4),
    (r"index_n_heads", 16),  # their scores are often 0, and where all are, ties decide
    (r"(num_)?(n_)?(encoder|decoder)_layers|num_hidden_layers|n_layers?|num_layers|num_blocks", 2),
)
_KINDS = ("layers_block_type", "layer_types")
_LATENT_WIDTH = 64  # of the hidden states where heads have widths of their own


def shrink(config: PreTrainedConfig, heads: int | None, is_beginning: bool = False) -> PreTrainedConfig:
    """A model in small: its language model shrunken, its towers, which are not tried, of one layer.

    Args:
        heads: See `_shrink_text`.
        is_beginning: See `_shrink_text`.
    """
    small = copy.deepcopy(config)
    if config.is_encoder_decoder:
        return _shrink_both(small, heads)
    text = small.get_text_config(decoder=True)
    if text is small:
        return _shrink_text(config, heads, is_beginning)
    for name, part in list(vars(small).items()):
        if part is text:
            shrunken = _shrink_text(text, heads, is_beginning)
            put(shrunken, "pad_token_id", SPECIAL + 2)  # what stands for a picture's token where embeddings are made
            put(small, name, shrunken)
        elif isinstance(part, PreTrainedConfig):
            for size in ("num_hidden_layers", "num_blocks", "depth", "encoder_layers", "n_layer"):
                if isinstance(getattr(part, size, None), int):
                    put(part, size, 1)
            for size in ("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size") if heads else ():
                if isinstance(getattr(part, size, None), int):
                    put(part, size, 64)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"):
        if getattr(small, name, None) is not None:
            put(small, name, None)
    return small


def _shrink_both(config: PreTrainedConfig, heads: int | None) -> PreTrainedConfig:
    """An encoder-decoder in small, be its config flat or one of two parts (or more). The encoder is not tried."""
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    if not parts:
        small = _shrink_text(config, heads, is_beginning=False)
        if (stated(small, "max_position_embeddings") or math.inf) < 2 * SPECIAL:
            put(small, "max_position_embeddings", 2 * SPECIAL)  # tables of positions have a row of the padding's id
        return small
    for name, part in parts.items():
        with suppress(Exception):
            put(config, name, _shrink_both(part, heads))
    encoder, decoder = parts.get("encoder"), parts.get("decoder")
    if encoder is not None and decoder is not None and getattr(decoder, "cross_attention_hidden_size", None):
        put(config.decoder, "cross_attention_hidden_size", stated(config.encoder, "hidden_size"))
    return config


def _shrink_text(config: PreTrainedConfig, heads: int | None, is_beginning: bool) -> PreTrainedConfig:
    """The same kinds of layers, few of them, a tiny vocabulary.

    Args:
        heads: So many key/value heads, and as narrow; `None`: the width as it is.
        is_beginning: Its first layers, of which kinds they may be: for configs that tell this by a rule, not by a list.
    """
    small = copy.deepcopy(config)
    overrides = _take_overrides(small)
    vars(small).pop("quantization_config", None)
    if getattr(small, "output_router_logits", False):  # with a loss, which the engine's steps don't ask for
        put(small, "output_router_logits", False)
    layers = _beginning(config) if is_beginning else _chosen_layers(config)
    num_layers = stated(config, "num_hidden_layers")
    for name, value in list(vars(small).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):  # a part of the layers, or a tower that the trial doesn't use
            for own, number in list(vars(value).items()):
                put(value, own, _shrunken(own, number))
            continue
        if isinstance(value, list | tuple) and num_layers and len(value) == num_layers:
            put(small, name, type(value)(_shrunken(name, value[index]) for index in layers))
        else:
            put(small, name, _shrunken(name, value))
    put(small, "num_hidden_layers", len(layers))
    if (stated(config, "sliding_window") or 0) >= (stated(config, "max_position_embeddings") or math.inf):
        put(small, "sliding_window", small.max_position_embeddings)  # one that no text gets beyond
    stack = stated(config, "num_layers_per_stack")
    if stack and num_layers:  # layers that are run through again and again, each time with keys of their own
        put(small, "num_layers_per_stack", 2)
        put(small, "num_hidden_layers", 2 * num_layers // stack)
    shared = stated(config, "num_kv_shared_layers")
    if shared and num_layers:
        put(small, "num_kv_shared_layers", sum(index >= num_layers - shared for index in layers))
    widths = {} if heads is None else _widths(config, heads)
    widths |= _mixer_widths(config, widths)
    for name, value in widths.items():
        if stated(small, name) is not None:
            put(small, name, value)
    for part in vars(small).values() if widths else ():
        if isinstance(part, PreTrainedConfig) and stated(part, "hidden_size") == stated(config, "hidden_size"):
            put(part, "hidden_size", widths["hidden_size"])
        if isinstance(part, PreTrainedConfig) and stated(part, "kv_n_heads"):
            put(part, "kv_n_heads", min(part.kv_n_heads, widths["num_key_value_heads"]))
    if widths:
        _state_sections(small)
        _shrink_sections(getattr(small, "rope_parameters", None), widths.get("head_dim"))
    for number, name in enumerate(("bos_token_id", "eos_token_id", "pad_token_id")):
        put(small, name, None)
        # The config insists on one, or positions are counted from it (RoBERTa's).
        if getattr(small, name, None) is not None or (
            name == "pad_token_id" and getattr(config, name, None) is not None
        ):
            put(small, name, SPECIAL + number)
    if overrides:
        ratio = _ratio(config)
        small.per_layer_config = {
            new: {name: _narrow(config, name, value, widths, ratio) for name, value in overrides[old].items()}
            for new, old in enumerate(layers)
            if old in overrides
        }
    return small


def stated(config: PreTrainedConfig, name: str) -> int | None:
    """A positive number of a config; `None` where it has none of that name, or one for each layer."""
    try:
        value = getattr(config, name, None)
    except Exception:  # it varies from layer to layer
        value = vars(config).get(name)
    return value if isinstance(value, int) and value > 0 else None


def put(config: PreTrainedConfig, name: str, value: Any) -> None:
    """Sets what a config can have set: not a property that follows from others, nor what it insists is otherwise."""
    with suppress(Exception):
        setattr(config, name, value)


def _shrunken(name: str, value: Any) -> Any:
    """Makes a size, or all in a list of them, as small as the table says."""
    limit = next((limit for pattern, limit in _SIZES if re.fullmatch(pattern, name)), None)
    if name.startswith("vocab_size"):  # one that is smaller grows: the special ids are in it
        return _VOCAB if isinstance(value, int) and value > 0 else value
    if limit is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return min(value, limit)
    if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
        return type(value)(min(each, limit) for each in value)
    return value


def _chosen_layers(config: PreTrainedConfig) -> list[int]:
    """The layers of the small copy: two of each type, and one for each other difference between layers."""
    num_layers = stated(config, "num_hidden_layers") or stated(config, "decoder_layers") or 2
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == num_layers and not name.startswith("_")
    }
    shared = stated(config, "num_kv_shared_layers") or 0
    chosen: list[int] = []
    for part in (range(num_layers - shared), range(num_layers - shared, num_layers)):
        seen: dict[tuple[str, str], int] = {}
        own: list[int] = []
        for index in part:
            traits = [(name, repr(value[index])) for name, value in lists.items()]
            if any(seen.get(trait, 0) < (2 if trait[0] in _KINDS else 1) for trait in traits):
                own.append(index)
                for trait in traits:
                    seen[trait] = seen.get(trait, 0) + 1
        chosen += (own if len(own) >= 2 else list(part)[:2])[:_MOST_LAYERS]
    return chosen if len(chosen) >= 2 else [0, 0]


def _state_sections(config: PreTrainedConfig) -> None:
    """Says in a config what its model takes for granted: the shares of a rotary embedding's axes."""
    parameters, known = getattr(config, "rope_parameters", None), getattr(config, "ignore_keys_at_rope_validation", ())
    if isinstance(parameters, dict) and "mrope_section" in (known or ()):
        parameters.setdefault("mrope_section", [2, 3, 3])


def _shrink_sections(parameters: Any, head_dim: int | None) -> None:
    """Shrinks the shares of a rotary embedding of several axes: together they are half a head."""
    if not isinstance(parameters, dict) or head_dim is None:
        return
    for value in parameters.values():
        _shrink_sections(value, head_dim)
    sections = parameters.get("mrope_section")
    if isinstance(sections, list | tuple):
        half, whole = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2, sum(sections)
        own = [max(1, half * section // whole) for section in sections]
        own[0] += half - sum(own)
        parameters["mrope_section"] = own


def _beginning(config: PreTrainedConfig) -> list[int]:
    """The first layers, as far as the first one of the last kind."""
    for name in _KINDS:
        kinds = getattr(config, name, None)
        if kinds:
            return list(range(max(2, 1 + max(list(kinds).index(kind) for kind in set(kinds)))))
    return _chosen_layers(config)


def _mixer_widths(config: PreTrainedConfig, widths: dict[str, int]) -> dict[str, int]:
    """Heads and widths of layers with a state, which hang together; none where the width stays as it is."""
    if not widths:
        return {}
    found: dict[str, int] = {}
    inner = widths["hidden_size"] * (stated(config, "mamba_expand") or stated(config, "expand") or 2)
    for name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim"):
        found[name] = 16
    for name in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"):
        found[name] = inner // 16
    if stated(config, "num_attention_heads") is None:  # nothing but mixers
        found |= {"head_dim": 16, "num_heads": inner // 16}
    for name in ("mamba_n_groups", "n_groups", "mamba_ngroups"):
        found[name] = min(stated(config, name) or 1, 2)
    key_heads, value_heads = stated(config, "linear_num_key_heads") or 1, stated(config, "linear_num_value_heads") or 1
    found |= {
        "mamba_d_ssm": inner,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * min(value_heads // key_heads, 2),
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16
        if stated(config, "linear_key_head_dim") == stated(config, "linear_value_head_dim")
        else 24,
    }
    if stated(config, "attention_hidden_size"):
        wide = 2 * widths["hidden_size"]
        found |= {"attention_hidden_size": wide, "attention_head_dim": wide // widths["num_attention_heads"]}
    return found


def _ratio(config: PreTrainedConfig) -> float:
    """The share of the model's own heads that heads of 16 are."""
    width, hidden_size, num_heads = (
        stated(config, name) for name in ("head_dim", "hidden_size", "num_attention_heads")
    )
    if not width and hidden_size and num_heads:
        width = hidden_size // num_heads
    return 16 / width if width else 1.0


def _widths(config: PreTrainedConfig, heads: int) -> dict[str, int]:
    """Chooses few heads and narrow widths; those that differ go on to differ."""
    num_heads = stated(config, "num_attention_heads") or heads
    num_kv_heads = stated(config, "num_key_value_heads") or stated(config, "num_kv_heads") or num_heads
    kv_heads = 1 if num_kv_heads == 1 else heads
    num = kv_heads * min(max(num_heads // num_kv_heads, 1), 4)
    names = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
    widths = dict.fromkeys(names, num) | dict.fromkeys(("num_key_value_heads", "num_kv_heads"), kv_heads)
    few = ("num_global_key_value_heads", "swa_num_key_value_heads")
    widths |= {
        name: max(1, kv_heads * own // num_kv_heads) for name in few if (own := stated(config, name)) is not None
    }
    if stated(config, "kv_lora_rank"):
        # Heads made from latents keep their widths, which are what is to be tried; the rest is narrow.
        return widths | {"hidden_size": _LATENT_WIDTH}
    head_dim = 16
    hidden_size = num * head_dim
    widths |= {
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "rotary_dim": min(stated(config, "rotary_dim") or head_dim, head_dim),
    }
    ratio = _ratio(config)
    wide = ("global_head_dim", "v_head_dim", "value_head_dim", "swa_head_dim", "swa_v_head_dim")
    return widths | {name: _scaled(own, ratio) for name in wide if (own := stated(config, name)) is not None}


def _scaled(width: int, ratio: float) -> int:
    """Another width beside heads of 16: a multiple of 4, and 16 only if it is one with theirs."""
    scaled = max(4, round(width * ratio / 4) * 4)
    return scaled if scaled != 16 or width * ratio == 16 else 12 if width * ratio < 16 else 20


def _take_overrides(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Takes the settings of single layers (transformers' heterogeneous configs) out of a config."""
    spec = vars(config).get("_heterogeneity_spec")
    if spec is None:
        return {}
    overrides: dict[int, dict[str, Any]] = spec.per_layer_overrides
    config.per_layer_config = None
    return overrides


def _narrow(config: PreTrainedConfig, name: str, value: Any, widths: dict[str, int], ratio: float) -> Any:
    """Narrows a layer's own number like the others of its kind."""
    if not isinstance(value, int) or isinstance(value, bool) or not widths:
        return value
    if name == "head_dim":
        return _scaled(value, ratio)
    if name in ("num_attention_heads", "num_key_value_heads"):
        return max(1, widths[name] * value // (stated(config, name) or value))
    return _shrunken(name, value)
