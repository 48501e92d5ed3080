"""Multimodal models of the suite: tiny random configs, and calls with random pictures for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as hf
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from helpers.models import BOS, EOS, PAD, VOCAB

IMAGE = VOCAB - 1
START = VOCAB - 3
SIZE = 16  # pixels of a picture's side

_TEXT = {
    "vocab_size": VOCAB,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 8,
}
_QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
_WINDOWED_TOWER = _QWEN_TOWER | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "window_size": 32,
    "fullatt_block_indexes": [1],
}
_WHOLE = {"image_token_id": IMAGE, "tie_word_embeddings": False}
_INDEXED = {"image_token_index": IMAGE, "tie_word_embeddings": False}
_QWEN_IDS = _WHOLE | {
    "video_token_id": VOCAB - 2,
    "vision_start_token_id": START,
    "vision_end_token_id": VOCAB - 4,
}


def _pixels(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _one_picture(seed: int) -> dict[str, Any]:
    return {"pixel_values": _pixels(seed, 1, 3, SIZE, SIZE)}


def _tall_patches(seed: int) -> dict[str, Any]:
    """What Qwen's towers take: patches of a picture of 4 x 8."""
    return {"pixel_values": _pixels(seed, 32, 3 * 2 * 8 * 8), "image_grid_thw": torch.tensor([[1, 4, 8]])}


def _tiles(seed: int) -> dict[str, Any]:
    return {"pixel_values": _pixels(seed, 1, 1, 3, SIZE, SIZE)}


def _placed_patches(width: int, height: int) -> Callable[[int], dict[str, Any]]:
    """What Gemma 4's tower takes: a picture's patches and where they lie."""

    def picture(seed: int) -> dict[str, Any]:
        across, down = torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy")
        places = torch.stack([across.flatten(), down.flatten()], dim=-1)[None]
        return {"pixel_values": _pixels(seed, 1, width * height, 3 * 4 * 4), "image_position_ids": places}

    return picture


def _gemma4(**text: Any) -> PreTrainedConfig:
    own = {key: value for key, value in _TEXT.items() if key != "num_hidden_layers"}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    own |= {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 6, "head_dim": 16, "global_head_dim": 32}
    own |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB}
    return hf.Gemma4Config(
        text_config=hf.Gemma4TextConfig(**(own | text)),
        vision_config=hf.Gemma4VisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            patch_size=4,
            pooling_kernel_size=2,
            position_embedding_size=16,
        ),
        image_token_id=IMAGE,
        video_token_id=VOCAB - 2,
        audio_token_id=VOCAB - 5,
        tie_word_embeddings=False,
    )


def _gemma3n() -> PreTrainedConfig:
    kinds = ["sliding_attention", "full_attention"] * 3
    config = hf.Gemma3nConfig(
        text_config=hf.Gemma3nTextConfig(
            **(_TEXT | {"num_hidden_layers": 6}),
            vocab_size_per_layer_input=VOCAB - 5,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            layer_types=kinds,
            head_dim=16,
            sliding_window=6,
            laurel_rank=8,
            altup_num_inputs=2,
        ),
        audio_config=hf.Gemma3nAudioConfig(
            vocab_size=2,
            vocab_offset=VOCAB - 2,
            hidden_size=32,
            input_feat_size=8,
            conf_num_attention_heads=2,
            conf_num_hidden_layers=1,
            sscp_conv_channel_size=[4, 2],
        ),
        image_token_id=IMAGE,
        audio_token_id=VOCAB - 5,
        vision_soft_tokens_per_image=4,
        tie_word_embeddings=False,
    )
    # Its own is timm's. Ids of pictures and sounds have embeddings of their own.
    tower = hf.SiglipVisionConfig(
        **_TOWER, vocab_size=3, vocab_offset=VOCAB - 5, rms_norm_eps=1e-6, vision_use_head=False
    )
    vars(config)["vision_config"] = tower
    return config


@dataclass(frozen=True)
class TinyWrapper:
    """A row of the table.

    Attributes:
        config: Makes the config.
        picture: Arguments for a picture, by its seed; those of several pictures are joined on the first dimension.
        num_tokens: Image tokens of a picture.
        types: Which argument says what kinds of tokens there are, if any has to, and
        of_picture: what it says of a picture's.
        has_start: Whether a token stands before each picture.
        is_causal: Whether tokens of a picture see only what is before them.
        kind: Its class; by its config if not given.
        seed: Of the weights.
    """

    config: Callable[[], PreTrainedConfig]
    picture: Callable[[int], dict[str, Any]] = _one_picture
    num_tokens: int = 4
    types: str | None = None
    of_picture: int = 1
    is_causal: bool = True
    has_start: bool = False
    kind: Any = AutoModelForImageTextToText
    seed: int = 0


WRAPPERS: dict[str, TinyWrapper] = {
    "llava": TinyWrapper(
        lambda: hf.LlavaConfig(
            text_config=hf.LlamaConfig(**_TEXT),
            vision_config=hf.CLIPVisionConfig(**_TOWER),
            vision_feature_select_strategy="default",
            vision_feature_layer=-1,
            **_INDEXED,
        )
    ),
    "mistral3": TinyWrapper(
        lambda: hf.Mistral3Config(
            text_config=hf.MistralConfig(**_TEXT, sliding_window=None, head_dim=16),
            vision_config=hf.PixtralVisionConfig(**_TOWER, head_dim=16),
            spatial_merge_size=1,
            vision_feature_layer=-1,
            **_INDEXED,
        ),
        picture=lambda seed: _one_picture(seed) | {"image_sizes": torch.tensor([[SIZE, SIZE]])},
    ),
    "internvl": TinyWrapper(
        lambda: hf.InternVLConfig(
            text_config=hf.Qwen2Config(**_TEXT),
            vision_config=hf.InternVLVisionConfig(
                **(_TOWER | {"image_size": [SIZE, SIZE], "patch_size": [4, 4]}), layer_scale_init_value=0.1
            ),
            downsample_ratio=0.5,
            **_WHOLE,
        )
    ),
    "smolvlm": TinyWrapper(
        lambda: hf.SmolVLMConfig(
            text_config=hf.LlamaConfig(**_TEXT),
            vision_config=hf.SmolVLMVisionConfig(**(_TOWER | {"patch_size": 4})),
            scale_factor=2,
            **_WHOLE,
        ),
        picture=_tiles,
    ),
    "idefics3": TinyWrapper(
        lambda: hf.Idefics3Config(
            text_config=hf.LlamaConfig(**_TEXT),
            vision_config=hf.Idefics3VisionConfig(**(_TOWER | {"patch_size": 4})),
            scale_factor=2,
            **_WHOLE,
        ),
        picture=_tiles,
    ),
    "qwen2_vl": TinyWrapper(
        lambda: hf.Qwen2VLConfig(
            text_config=_TEXT | _MROPE,
            vision_config=_QWEN_TOWER | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            **_QWEN_IDS,
        ),
        picture=_tall_patches,
        num_tokens=8,
        types="mm_token_type_ids",
        has_start=True,
    ),
    "qwen2_5_vl": TinyWrapper(
        lambda: hf.Qwen2_5_VLConfig(
            text_config=_TEXT | _MROPE,
            vision_config=_WINDOWED_TOWER,
            **_QWEN_IDS,
        ),
        picture=_tall_patches,
        num_tokens=8,
        types="mm_token_type_ids",
        has_start=True,
    ),
    "qwen3_vl": TinyWrapper(
        lambda: hf.Qwen3VLConfig(
            text_config=_TEXT | _MROPE | {"head_dim": 16},
            vision_config=_QWEN_TOWER
            | {
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            **_QWEN_IDS,
        ),
        picture=_tall_patches,
        num_tokens=8,
        types="mm_token_type_ids",
        has_start=True,
    ),
    "gemma3": TinyWrapper(
        lambda: hf.Gemma3Config(
            text_config=hf.Gemma3TextConfig(
                **(_TEXT | {"num_hidden_layers": 4}),
                head_dim=16,
                sliding_window=6,
                query_pre_attn_scalar=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            vision_config=hf.SiglipVisionConfig(**_TOWER),
            mm_tokens_per_image=4,
            **_WHOLE,
        ),
        types="token_type_ids",
        is_causal=False,
    ),
    # What each layer is told of a token, and layers that attend to others' keys.
    "gemma4": TinyWrapper(
        lambda: _gemma4(num_kv_shared_layers=3, hidden_size_per_layer_input=8),
        picture=_placed_patches(4, 4),
        types="mm_token_type_ids",
    ),
    "gemma3n": TinyWrapper(_gemma3n, types="token_type_ids"),
    # Tokens of a picture see each other in layers with a window, not beyond that, and not in others.
    "gemma4_mutual": TinyWrapper(
        lambda: _gemma4(
            sliding_window=4, use_bidirectional_attention="vision", attention_k_eq_v=True, num_global_key_value_heads=1
        ),
        picture=_placed_patches(8, 4),
        num_tokens=8,
        types="mm_token_type_ids",
        is_causal=False,
    ),
    "paligemma": TinyWrapper(
        lambda: hf.PaliGemmaConfig(
            text_config=hf.GemmaConfig(**_TEXT, head_dim=16),
            vision_config=hf.SiglipVisionConfig(**_TOWER),
            projection_dim=64,
            **_INDEXED,
        ),
        types="token_type_ids",
        of_picture=0,
        is_causal=False,
    ),
    # Chunks of 12 tokens, which a picture may lie across.
    "llama4": TinyWrapper(
        lambda: hf.Llama4Config(
            text_config=hf.Llama4TextConfig(
                **(_TEXT | {"num_hidden_layers": 4}),
                intermediate_size_mlp=96,
                head_dim=16,
                attention_chunk_size=12,
                no_rope_layers=[1, 0, 1, 0],
                num_local_experts=2,
                moe_layers=[1],
            ),
            vision_config=hf.Llama4VisionConfig(
                **(_TOWER | {"patch_size": 4, "intermediate_size": 128}),
                vision_output_dim=32,
                projector_input_dim=32,
                projector_output_dim=32,
            ),
            boi_token_index=START,
            eoi_token_index=VOCAB - 4,
            **_INDEXED,
        )
    ),
    "aya_vision": TinyWrapper(
        lambda: hf.AyaVisionConfig(
            text_config=hf.CohereConfig(**_TEXT, logit_scale=1.0),
            vision_config=hf.SiglipVisionConfig(**(_TOWER | {"patch_size": 4})),
            downsample_factor=2,
            vision_feature_layer=-1,
            **_INDEXED,
        )
    ),
    "llava_next": TinyWrapper(
        lambda: hf.LlavaNextConfig(
            text_config=hf.LlamaConfig(**_TEXT),
            vision_config=hf.CLIPVisionConfig(**_TOWER),
            image_grid_pinpoints=[[SIZE, SIZE]],
            vision_feature_layer=-1,
            **_INDEXED,
        ),
        picture=lambda seed: {
            "pixel_values": _pixels(seed, 1, 2, 3, SIZE, SIZE),
            "image_sizes": torch.tensor([[SIZE, SIZE]]),
        },
        num_tokens=10,
    ),
    "got_ocr2": TinyWrapper(
        lambda: hf.GotOcr2Config(
            text_config=hf.Qwen2Config(**_TEXT),
            vision_config={
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": SIZE,
                "patch_size": 2,
                "window_size": 2,
                "global_attn_indexes": [1],
                "mlp_dim": 48,
            },
            **_INDEXED,
        )
    ),
    "fuyu": TinyWrapper(
        lambda: hf.FuyuConfig(
            text_config=hf.PersimmonConfig(**_TEXT), patch_size=2, image_token_id=IMAGE, tie_word_embeddings=False
        ),
        picture=lambda seed: {"pixel_values": _pixels(seed, 1, 4, 12)},
    ),
    "voxtral": TinyWrapper(
        lambda: hf.VoxtralConfig(
            text_config=hf.LlamaConfig(**_TEXT),
            audio_config=hf.VoxtralEncoderConfig(
                hidden_size=16,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_mel_bins=8,
                max_source_positions=16,
            ),
            audio_token_id=IMAGE,
            tie_word_embeddings=False,
        ),
        picture=lambda seed: {"input_features": _pixels(seed, 1, 8, 32)},
        kind=hf.VoxtralForConditionalGeneration,
    ),
    "qwen2_audio": TinyWrapper(
        lambda: hf.Qwen2AudioConfig(
            text_config=hf.Qwen2Config(**_TEXT),
            audio_config=hf.Qwen2AudioEncoderConfig(
                d_model=32,
                encoder_layers=1,
                encoder_attention_heads=2,
                encoder_ffn_dim=48,
                num_mel_bins=8,
                max_source_positions=16,
            ),
            audio_token_index=IMAGE,
            tie_word_embeddings=False,
        ),
        picture=lambda seed: {
            "input_features": _pixels(seed, 1, 8, 32),
            "feature_attention_mask": torch.ones(1, 32, dtype=torch.long),
        },
        num_tokens=8,
        kind=hf.Qwen2AudioForConditionalGeneration,
    ),
    "qwen2_5_omni": TinyWrapper(
        lambda: hf.Qwen2_5OmniThinkerConfig(
            text_config=_TEXT | _MROPE,
            vision_config=_WINDOWED_TOWER,
            audio_config={
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 8,
                "output_dim": 64,
            },
            image_token_index=IMAGE,
            video_token_index=VOCAB - 2,
            audio_token_index=VOCAB - 5,
            vision_start_token_id=START,
            vision_end_token_id=VOCAB - 4,
            tie_word_embeddings=False,
        ),
        picture=_tall_patches,
        num_tokens=8,
        has_start=True,
        kind=hf.Qwen2_5OmniThinkerForConditionalGeneration,
    ),
}
"""Every kind of wrapper the suite runs."""
if Version(hf.__version__) < Version("5.18.dev0"):
    del WRAPPERS["fuyu"]  # its pictures are told otherwise there


@cache
def _built(name: str, seed: int | None) -> PreTrainedModel:
    row = WRAPPERS[name]
    with torch.random.fork_rng(devices=[]):
        config = row.config()
        model = (row.kind.from_config if hasattr(row.kind, "from_config") else row.kind)(config).eval()
        torch.manual_seed(row.seed if seed is None else seed)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                noise = torch.randn_like(parameter)
                parameter.copy_(0.16 * noise if parameter.ndim > 1 else parameter.round() + 0.1 * noise)
    model.generation_config.update(eos_token_id=EOS, pad_token_id=PAD, bos_token_id=BOS, suppress_tokens=[IMAGE])
    return model


def build_wrapper(name: str, seed: int | None = None) -> PreTrainedModel:
    """A fresh copy of a model of the table."""
    return copy.deepcopy(_built(name, seed))


def asking(
    name: str, pictures: tuple[int, ...] = (0,), lengths: tuple[tuple[int, int], ...] | None = None, seed: int = 0
) -> dict[str, Any]:
    """Arguments of a call that asks something about a picture a row.

    Args:
        name: Row of `WRAPPERS`.
        pictures: Seed of each row's picture.
        lengths: Of each row, random tokens before and behind its picture; the prompts are padded on the left.
        seed: Of the random tokens.
    """
    row = WRAPPERS[name]
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths or tuple((3, 4) for _ in pictures)
    prompts = []
    for before, behind in lengths:
        words = torch.randint(3, VOCAB - 4, (before + behind,), generator=generator).tolist()
        picture = [START] * row.has_start + [IMAGE] * row.num_tokens
        prompts.append([*words[:before], *picture, *words[before:]])
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = [row.picture(picture) for picture in pictures]
    call = {"input_ids": ids, "attention_mask": mask}
    call |= {key: torch.cat([own[key] for own in found]) for key in found[0]}
    if row.types is not None:
        call[row.types] = (ids == IMAGE).long() * row.of_picture
    return call
