"""A tiny random model of each multimodal family that the installed transformers knows, and calls with pictures."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hf_paged.api.shrinking import SPECIAL, put, shrink

AUDIO = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "granite_speech": "GraniteSpeechForConditionalGeneration",
    "glmasr": "GlmAsrForConditionalGeneration",
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
}
MOST_ELEMENTS = 3e8
PICTURE = SPECIAL - 1  # the id of a picture's tokens
_IDS = {"vision_start_token_id": SPECIAL - 2, "vision_end_token_id": SPECIAL - 3, "video_token_id": SPECIAL - 4}

# Of towers, by the common names of what a config may state; all of one name become the number.
_TOWER_SIZES: tuple[tuple[str, int], ...] = (
    (r"num_hidden_layers|depth|(num_)?encoder_layers|n_layers?|num_layers|num_blocks|(conf_)?num_hidden_layers", 2),
    (r"(hidden_size|embed_dim|d_model|width)", 32),
    (r"(conf_)?num_attention_heads|num_heads|encoder_attention_heads|num_key_value_heads", 2),
    (r"head_dim", 16),
    (r"intermediate_size|mlp_dim|encoder_ffn_dim|ffn_dim", 48),
    (r"num_mel_bins|input_feat_size", 8),
    (r"max_source_positions", 16),
    (r"output_channels|window_size", 8),
)
# What a config has to say beside its defaults, with which no model with a picture can be made.
SAID: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "gemma4": {"vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 16}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 1, "vision_end_token_id": 1},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 1, "vision_end_token_id": 1},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
}
_TO_TEXT = ("out_hidden_size", "projector_output_dim")  # what a tower hands over is as wide as the text's states
_LAYER_LISTS = r".*(_indexes|_indices|_layers|_idx)"


def family_names() -> dict[str, str]:
    """Class of the model by model type, of all families that are asked about pictures, and of some about sounds."""
    audio = {name: kind for name, kind in AUDIO.items() if hasattr(transformers, kind)}
    return dict(sorted((dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) | audio).items()))


def tiny_config(config: PreTrainedConfig, heads: int | None) -> PreTrainedConfig:
    """A multimodal config in small, its towers included, with a picture's token among the ids."""
    small = shrink(config, heads)
    text, small_text = config.get_text_config(decoder=True), small.get_text_config(decoder=True)
    same = {text.hidden_size: small_text.hidden_size}
    for part in _parts(small):
        if part is not small_text and part is not small:
            same.setdefault(getattr(_original(config, small, part), "hidden_size", None), 32)
    for part in _parts(small):
        if part is small_text:
            continue
        for name, value in list(vars(part).items()):
            if name.startswith("_") or isinstance(value, bool | PreTrainedConfig):
                continue
            is_output = name in _TO_TEXT or (name == "hidden_size" and hasattr(part, "embed_dim"))
            if is_output and part is not small and isinstance(value, int):
                put(part, name, small_text.hidden_size)
                continue
            put(
                part,
                name,
                _tower_number(name, getattr(_original(config, small, part), name, value), same, part is small),
            )
        patch = getattr(part, "patch_size", None)
        if part is not small and isinstance(getattr(part, "image_size", None), int) and isinstance(patch, int):
            put(part, "image_size", 4 * patch)
            if getattr(small, "image_grid_pinpoints", None):
                put(small, "image_grid_pinpoints", [[4 * patch, 4 * patch]])
        if part is not small and getattr(part, "spatial_merge_size", None) and getattr(part, "window_size", None):
            put(part, "window_size", 4 * patch)
        if part is not small and getattr(part, "pixel_shuffle_ratio", None):  # llama4's
            put(part, "intermediate_size", int(part.hidden_size / part.pixel_shuffle_ratio**2))
            for name in ("projector_input_dim", "vision_output_dim"):
                put(part, name, part.projector_output_dim)
        heads = getattr(part, "num_attention_heads", None)
        if part is not small and getattr(part, "head_dim", None) and isinstance(heads, int):
            put(part, "head_dim", part.hidden_size // heads)
    if getattr(small, "mm_tokens_per_image", None):
        put(small, "mm_tokens_per_image", 4)
    for name in list(vars(small)):
        if re.fullmatch(r"(image|audio|media)_token_(id|index)", name):
            put(small, name, PICTURE)
    for name, value in _IDS.items():
        if getattr(small, name, None) is not None:
            put(small, name, value)
    return small


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _original(config: PreTrainedConfig, small: PreTrainedConfig, part: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that one of its small copy was made of."""
    for own, shrunken in zip(_parts(config), _parts(small), strict=False):
        if shrunken is part:
            return own
    return part


def _tower_number(name: str, value: Any, same: dict[int, int], is_whole: bool) -> Any:
    if isinstance(value, int):
        if value in same and re.search("size|dim|width", name):
            return same[value]
        own = next((number for pattern, number in _TOWER_SIZES if re.fullmatch(pattern, name)), None)
        if name == "vision_feature_layer" or (own is not None and not is_whole):
            return -1 if name == "vision_feature_layer" else own
        return value
    is_list = isinstance(value, list | tuple) and all(isinstance(each, int) for each in value)
    return type(value)([0, 1][: len(value)]) if is_list and re.fullmatch(_LAYER_LISTS, name) else value


@dataclass(frozen=True)
class Asking:
    """Calls with pictures of a model.

    Attributes:
        picture: Arguments for a picture, by its seed.
        num_tokens: Tokens that stand for it.
        types: Which argument says what kinds of tokens there are, if any has to.
        has_start: Whether a token stands before each picture.
    """

    picture: Callable[[int], dict[str, Any]]
    num_tokens: int
    types: str | None
    has_start: bool

    def call(self, picture: int | None, before: int = 4, behind: int = 5, seed: int = 0) -> dict[str, Any]:
        """Arguments that ask something about a picture; `None`: about none."""
        words = torch.randint(
            5, SPECIAL - 6, (before + behind,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        if picture is None:
            return {"input_ids": torch.tensor([words])}
        start = [_IDS["vision_start_token_id"]] * self.has_start
        ids = torch.tensor([[*words[:before], *start, *[PICTURE] * self.num_tokens, *words[before:]]])
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | self.picture(picture)
        if self.types is not None:
            call[self.types] = (ids == PICTURE).long()
        return call


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _forms(config: PreTrainedConfig) -> list[Callable[[int], dict[str, Any]]]:
    """Ways to hand over a picture, to be tried."""
    tower = getattr(config, "vision_config", None) or getattr(config, "audio_config", None) or config
    size, patch = getattr(tower, "image_size", None), getattr(tower, "patch_size", None)
    patch = patch if isinstance(patch, int) else patch[0] if isinstance(patch, list | tuple) else 14
    size = size if isinstance(size, int) else size[0] if isinstance(size, list | tuple) else 4 * patch
    times, bins = getattr(tower, "temporal_patch_size", 1) or 1, getattr(tower, "num_mel_bins", 8)
    area = 3 * patch * patch
    sizes, grid = torch.tensor([[size, size]]), torch.tensor([[1, 4, 4]])
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), dim=-1).view(1, 16, 2)
    seen = torch.ones(1, 32, dtype=torch.long)
    return [
        lambda seed: {"pixel_values": _noise(seed, 16, area * times), "image_grid_thw": grid},
        lambda seed: {"pixel_values": _noise(seed, 16, 3, patch, patch), "image_grid_thw": grid},
        lambda seed: {"pixel_values": _noise(seed, 1, 16, 3, patch, patch), "image_grid_thw": grid},
        lambda seed: {
            "pixel_values": _noise(seed, 16, area),
            "image_grid_thw": grid,
            "image_merge_sizes": torch.tensor([2]),
        },
        lambda seed: {"pixel_values": _noise(seed, 1, 3, size, size)},
        lambda seed: {"pixel_values": _noise(seed, 1, 3, size, size), "image_sizes": sizes},
        lambda seed: {"pixel_values": _noise(seed, 1, 2, 3, size, size), "image_sizes": sizes},
        lambda seed: {"pixel_values": _noise(seed, 1, 1, 3, size, size)},
        lambda seed: {"pixel_values": _noise(seed, 1, 1, 3, size, size), "num_patches": torch.tensor([1])},
        lambda seed: {"pixel_values": _noise(seed, 1, 16, area), "image_position_ids": places},
        lambda seed: {
            "pixel_values": _noise(seed, 1, 16, area),
            "spatial_shapes": torch.tensor([[4, 4]]),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
        },
        lambda seed: {"pixel_values": _noise(seed, 1, 3, patch, 16 * patch), "target_sizes": torch.tensor([[4, 4]])},
        lambda seed: {"pixel_values": _noise(seed, 1, 4, area)},
        lambda seed: {"input_features": _noise(seed, 1, bins, 32)},
        lambda seed: {"input_features": _noise(seed, 1, bins, 32), "feature_attention_mask": seen},
        lambda seed: {"input_features": _noise(seed, 1, bins, 32), "input_features_mask": seen},
    ]


def _num_tokens(model: Any, picture: dict[str, Any]) -> int:
    """Tokens that stand for a picture: as many as its features."""
    names = ("get_image_features", "get_audio_features")
    owners = (model, getattr(model, "model", None))
    get = next(method for own in owners for name in names if (method := getattr(own, name, None)) is not None)
    taken = set(inspect.signature(get).parameters)
    found = get(**{name: value for name, value in picture.items() if name in taken})
    found = getattr(found, "pooler_output", found)
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)


@torch.no_grad()
def _asking(model: Any) -> Asking:
    """How pictures are told to a model. Raises what the last way that was tried did."""
    names = inspect.signature(model.forward).parameters
    types = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in names), None)
    failure: Exception | None = None
    for picture in _forms(model.config):
        given = picture(0)
        if not set(given) <= set(names):
            continue
        try:
            number = _num_tokens(model, given)
        except Exception as error:
            failure = failure or error
            continue
        for has_start in (False, True):
            asking = Asking(picture, number, types, has_start)
            try:
                one, other = (model(**asking.call(seed)).logits[0, -1] for seed in (0, 1))
            except Exception as error:
                failure = error
                continue
            if one.isfinite().all() and not torch.equal(one, other):
                return asking
    raise failure or ValueError(f"no picture was found that it takes: its forward has {', '.join(names)}")


def tiny_model(name: str) -> tuple[PreTrainedModel, Asking]:
    """A model of the family with random weights, and how it is asked. Raises what kept it from being made."""
    base, config = getattr(transformers, family_names()[name]), AutoConfig.for_model(name, **SAID.get(name, {}))
    if config.is_encoder_decoder or not base.can_generate():
        raise ValueError("it is an encoder-decoder model, or doesn't generate")
    failure: Exception | None = None
    for heads in (2, 4, None):
        try:
            small = tiny_config(config, heads)
            with torch.device("meta"):
                num_elements = sum(
                    parameter.numel() for parameter in base._from_config(copy.deepcopy(small)).parameters()
                )
            if num_elements > MOST_ELEMENTS:
                raise ValueError(f"it would have {num_elements:,} parameters")
            torch.manual_seed(0)
            model = _with_noise(base._from_config(small, dtype=torch.float32).eval())
            return model, _asking(model)
        except Exception as error:
            failure = failure or error
    raise failure or ValueError(name)


def _with_noise(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_matrix = parameter.ndim > 1
            parameter.copy_(noise * 2 / parameter.shape[-1] ** 0.5 if is_matrix else parameter.round() + 0.1 * noise)
    settings = model.generation_config
    settings.eos_token_id, settings.bos_token_id, settings.pad_token_id = 3, 1, 0
    settings.suppress_tokens = list(range(SPECIAL - 5, SPECIAL + 4))
    settings.forced_eos_token_id = settings.forced_bos_token_id = settings.cache_implementation = None
    return model
