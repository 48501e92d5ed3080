"""Tiny models that read with an encoder what their decoder writes about; `speech` has those that hear."""

from __future__ import annotations

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    PreTrainedModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}


def sharpened(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """With weights that make texts worth comparing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                size = 1.4 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model.eval()


def tiny_bart(vocab_size: int = 97, num_positions: int = 64, **special: int) -> PreTrainedModel:
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
             {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()}  # fmt: skip
    config = BartConfig(
        vocab_size=vocab_size,
        d_model=32,
        max_position_embeddings=num_positions,
        forced_eos_token_id=None,
        **sizes,
        **SPECIAL | special,
    )
    return sharpened(BartForConditionalGeneration(config))


def tiny_captioner() -> PreTrainedModel:
    decoder = GPT2Config(
        vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True, is_decoder=True
    )
    encoder = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = sharpened(VisionEncoderDecoderModel(config))
    for name, value in SPECIAL.items():
        setattr(model.config, name, value)
        setattr(model.generation_config, name, value)
    return model
