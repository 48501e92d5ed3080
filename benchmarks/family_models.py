"""A tiny random model of each family that the installed transformers knows, for the survey of families."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_paged.api.shrinking import shrink
from hf_paged.tools.families import family_names

MOST_ELEMENTS = 3e8
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_SHORT_CONVOLUTIONS = ["conv", "conv", "full_attention"] * 8

# What a config has to say beside its defaults, with which transformers can't make the model or can't generate with it:
# numbers that have no default, and a layer with attention among those with states.
SAID: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 512},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": _SHORT_CONVOLUTIONS, "num_hidden_layers": len(_SHORT_CONVOLUTIONS)},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True},
    "xlstm": {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2},
    "xmod": {"default_language": "en_XX"},
}


def default_config(name: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """A family's class with a language-model head, and the config of a model of it. Raises what transformers does."""
    base, config = getattr(transformers, family_names()[name]), AutoConfig.for_model(name, **SAID.get(name, {}))
    if base.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    with torch.device("meta"):  # some make another one of what they were given: that of a decoder
        return base, base._from_config(config).config


def tiny_model(name: str) -> PreTrainedModel:
    """A model of the family with random weights. Raises what its config raises."""
    base, config = default_config(name)
    failure: Exception | None = None
    for heads, is_beginning in itertools.product((2, 4, None), (False, True)):
        try:
            small = shrink(config, heads, is_beginning)
            if hasattr(small.get_text_config(), "floor_scale"):  # of positions behind it stock counts the padding, too
                small.get_text_config().floor_scale = config.get_text_config().floor_scale
            with torch.device("meta"):
                num_elements = sum(parameter.numel() for parameter in base._from_config(small).parameters())
            if num_elements > MOST_ELEMENTS:
                raise ValueError(f"it would have {num_elements:,} parameters")
            torch.manual_seed(0)
            model = base._from_config(small, dtype=torch.float32).eval()
            model(input_ids=torch.tensor([[5, 6, 7]]))
            break
        except Exception as error:
            failure = failure or error
    else:
        raise failure or ValueError(name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_matrix = parameter.ndim > 1
            parameter.copy_(noise * 2 / parameter.shape[-1] ** 0.5 if is_matrix else parameter.round() + 0.1 * noise)
    settings = model.generation_config
    settings.eos_token_id, settings.bos_token_id, settings.pad_token_id = 3, 1, 0
    settings.forced_eos_token_id = settings.forced_bos_token_id = settings.cache_implementation = None
    return model
