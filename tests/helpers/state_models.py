"""Tiny random models with recurrent or convolution states, a config a family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from helpers.models import VOCAB

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_LATENTS = {"kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]


def _kinds(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (_COMMON | changes).items() if value is not None}


STATE_MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **_kinds(**_DELTA, **_MOE), head_dim=16, shared_expert_intermediate_size=32
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**_kinds(**_DELTA), head_dim=16),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeTextConfig(
        **_kinds(**_DELTA, **_MOE), head_dim=16, shared_expert_intermediate_size=32
    ),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(
        **_kinds(**(_DELTA | {"linear_num_key_heads": 4, "linear_value_head_dim": 16}))
    ),
    "bamba": lambda: hf.BambaConfig(**_kinds(**_MAMBA2), attn_layer_indices=[1]),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **_kinds(**_MAMBA2),
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **_kinds(num_hidden_layers=None),
        layers_block_type=["mamba", "attention", "mamba", "moe", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        conv_kernel=4,
        chunk_size=16,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "falcon_h1": lambda: hf.FalconH1Config(**_kinds(**_MAMBA2), mamba_d_ssm=128),
    "zamba2": lambda: hf.Zamba2Config(
        **_kinds(num_key_value_heads=None),
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_ngroups=1,
        n_mamba_heads=8,
        mamba_headdim=16,
        chunk_size=16,
        num_mem_blocks=1,
        adapter_rank=8,
    ),
    "lfm2": lambda: hf.Lfm2Config(**_kinds(), layer_types=["conv", "full_attention", "conv", "conv"]),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(
        **_kinds(**_MOE), layer_types=["conv", "full_attention", "conv", "conv"], num_dense_layers=1
    ),
    "jamba": lambda: hf.JambaConfig(
        **_kinds(num_experts=4, num_experts_per_tok=2),
        attn_layer_period=4,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "mamba": lambda: hf.MambaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, state_size=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, use_mambapy=False, tie_word_embeddings=False,
    ),
    "falcon_mamba": lambda: hf.FalconMambaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, state_size=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, use_mambapy=False, tie_word_embeddings=False,
    ),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, state_size=16, num_heads=8, head_dim=16, expand=2,
        n_groups=1, chunk_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    ),
    # Latents beside states.
    "kimi_linear": lambda: hf.KimiLinearConfig(
        **_kinds(num_key_value_heads=4, moe_intermediate_size=32),
        **_LATENTS,
        linear_num_heads=2,
        linear_head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    ),
    # Four convolutions on a layer, each with a state; a bias by distance, and windows that cache more heads.
    "inkling": lambda: hf.InklingTextConfig(
        **_kinds(tie_word_embeddings=None, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_head_dim=16,
        sliding_window_size=5,
        d_rel=4,
        rel_extent=8,
        logits_mup_width_multiplier=1.0,
        local_layer_ids=[0, 2],
        mlp_layer_types=["dense", "sparse", "dense", "dense"],
    ),
    # A mixer that gives queries, keys and values.
    "zaya": lambda: hf.ZayaConfig(
        **_kinds(intermediate_size=None), head_dim=16, num_experts=4, moe_intermediate_size=32, router_hidden_size=16
    ),
    # Attention that is told its number in the call.
    "zamba": lambda: hf.ZambaConfig(
        **_kinds(num_key_value_heads=4, num_hidden_layers=6),
        attention_head_dim=32,
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=8,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba", "mamba"],
    ),
}  # fmt: skip


@cache
def _built(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(STATE_MODELS[name]()).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4.0)
    return model


def build_state_model(name: str) -> PreTrainedModel:
    """A fresh copy of a model of a family."""
    return copy.deepcopy(_built(name))
