"""Tiny random models with an encoder and a decoder, a row a family, and what their encoders read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import PreTrainedModel

from helpers.models import VOCAB

PAD, BOS, EOS, START = 1, 0, 2, 3

_IDS: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": START}
_SIZES: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
}
_BART: dict[str, Any] = {
    **_IDS,
    **_SIZES,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "forced_eos_token_id": None,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": START,
}
_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
}
_VIT: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 12,
    "patch_size": 4,
}


def _bart(name: str, **changes: Any) -> Callable[[], PreTrainedModel]:
    given = {key: value for key, value in (_BART | changes).items() if value is not ...}
    kind = {"Marian": "MarianMTModel"}.get(name, f"{name}ForConditionalGeneration")
    return lambda: getattr(hf, kind)(getattr(hf, f"{name}Config")(**given))


def _t5(name: str, **changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: getattr(hf, f"{name}ForConditionalGeneration")(getattr(hf, f"{name}Config")(**_T5 | changes))


def _t5gemma() -> PreTrainedModel:
    def part() -> Any:
        return hf.models.t5gemma.T5GemmaModuleConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
            max_position_embeddings=128,
            query_pre_attn_scalar=16,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=BOS,
        )

    config = hf.T5GemmaConfig(encoder=part(), decoder=part(), vocab_size=VOCAB)
    # Older versions let torch's function compute it, which leaves the softcap of its scores out.
    return hf.T5GemmaForConditionalGeneration._from_config(config, attn_implementation="eager")  # type: ignore[no-any-return]


def _pix2struct() -> PreTrainedModel:
    text = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
    seen = {"hidden_size": 64, "patch_embed_hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.Pix2StructConfig(
        text_config={**_T5, **_IDS, **text, "use_cache": True},
        vision_config={**seen, "d_kv": 16, "d_ff": 96, "seq_len": 32},
    )
    return hf.Pix2StructForConditionalGeneration(config)


def _of_parts(kind: str, encoder: Any, decoder: Any) -> PreTrainedModel:
    config = getattr(hf, f"{kind}Config").from_encoder_decoder_configs(encoder, decoder)
    return getattr(hf, f"{kind}Model")(config)  # type: ignore[no-any-return]


def _decoder(name: str, **changes: Any) -> Any:
    as_decoder = {"is_decoder": True, "add_cross_attention": True}
    if name == "GPT2":
        return hf.GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=64, n_layer=2, n_head=4, **as_decoder)
    if name == "TrOCR":
        sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
        return hf.TrOCRConfig(vocab_size=VOCAB, max_position_embeddings=128, **sizes, **changes)
    return getattr(hf, f"{name}Config")(**_BERT, **as_decoder)


def _seen(decoder: str, **changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: _of_parts("VisionEncoderDecoder", hf.ViTConfig(**_VIT), _decoder(decoder, **changes))


PACKED: dict[str, Callable[[], PreTrainedModel]] = {
    "bart": _bart("Bart"),
    "mbart": _bart("MBart"),
    "plbart": _bart("PLBart"),
    "marian": _bart("Marian", decoder_vocab_size=VOCAB),
    "pegasus": _bart("Pegasus"),
    "pegasus_x": _bart("PegasusX", block_size=8, num_global_tokens=4),
    "bigbird_pegasus": _bart("BigBirdPegasus", attention_type="original_full"),
    "blenderbot": _bart("Blenderbot"),
    "blenderbot_small": _bart("BlenderbotSmall"),
    "m2m_100": _bart("M2M100"),
    "speech_to_text": _bart(
        "Speech2Text",
        max_position_embeddings=...,
        max_source_positions=200,
        max_target_positions=128,
        input_feat_per_channel=8,
        conv_channels=16,
        conv_kernel_sizes=(5, 5),
    ),
    "whisper": _bart(
        "Whisper",
        max_position_embeddings=...,
        max_source_positions=20,
        max_target_positions=128,
        num_mel_bins=8,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "moonshine": lambda: hf.MoonshineForConditionalGeneration(
        hf.MoonshineConfig(
            **_IDS,
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2,
            encoder_num_attention_heads=4,
            decoder_num_attention_heads=4,
        )
    ),
    "t5": _t5("T5"),
    "mt5": _t5("MT5"),
    "umt5": _t5("UMT5"),
    "longt5": _t5("LongT5", local_radius=4),
    "t5gemma": _t5gemma,
    "pix2struct": _pix2struct,
    "vision_gpt2": _seen("GPT2"),
    "vision_bert": _seen("Bert"),
    "vision_roberta": _seen("Roberta"),
    "bert2bert": lambda: _of_parts("EncoderDecoder", hf.BertConfig(**_BERT), _decoder("Bert")),
}
"""Families whose batches are packed."""

PADDED: dict[str, Callable[[], PreTrainedModel]] = {
    "mvp": _bart("Mvp"),
    "vision_trocr": _seen("TrOCR"),
    "vision_trocr_sinusoidal": _seen("TrOCR", use_learned_position_embeddings=False, pad_token_id=PAD),
    "speecht5": lambda: hf.SpeechT5ForSpeechToText(
        hf.SpeechT5Config(
            **_IDS,
            **{name: size for name, size in _SIZES.items() if name != "d_model"},
            vocab_size=VOCAB,
            hidden_size=64,
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 8),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            max_text_positions=128,
        )
    ),
}
"""Families with attention code of their own, whose rows are padded to each other."""

ALIKE: dict[str, Callable[[], PreTrainedModel]] = {
    "led": _bart(
        "LED",
        max_position_embeddings=...,
        max_encoder_position_embeddings=128,
        max_decoder_position_embeddings=128,
        attention_window=8,
    ),
    "nllb_moe": _bart("NllbMoe", num_experts=4, expert_capacity=64, encoder_sparse_step=2, decoder_sparse_step=2),
}
"""The same, but for padding: they take it for tokens."""

ONE_BY_ONE: dict[str, Callable[[], PreTrainedModel]] = {
    "fsmt": lambda: hf.FSMTForConditionalGeneration(
        hf.FSMTConfig(
            **_IDS,
            **_SIZES,
            langs=["en", "de"],
            src_vocab_size=VOCAB,
            tgt_vocab_size=VOCAB,
            max_position_embeddings=128,
        )
    ),
    "switch_transformers": _t5(
        "SwitchTransformers",
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=64,
    ),
}
"""Families that give several tokens at once another result than single ones."""


@cache
def _built(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (PACKED | PADDED | ALIKE | ONE_BY_ONE)[name]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:  # large enough for a wrong key to change a token
                    parameter.copy_(torch.randn_like(parameter) * 1.2 / parameter.shape[-1] ** 0.5)
    config = model.generation_config
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = START, PAD, EOS
    return model


def build(name: str) -> Any:
    """A copy of the model of this row."""
    return copy.deepcopy(_built(name))


def sources(name: str, lengths: tuple[int, ...] = (16, 5, 11)) -> dict[str, Tensor]:
    """What the encoder of a family reads: rows of these lengths, padded on the right where they can differ."""
    rows, longest, generator = len(lengths), max(lengths), torch.Generator().manual_seed(5)
    shown = torch.arange(longest) < torch.tensor(lengths)[:, None]
    if name.startswith("vision"):
        return {"pixel_values": torch.randn(rows, 3, 12, 12, generator=generator)}
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 40, generator=generator)}
    if name == "speech_to_text":
        features = torch.randn(rows, 4 * longest, 8, generator=generator)
        return {"input_features": features, "attention_mask": shown.repeat_interleave(4, dim=1).long()}
    if name == "pix2struct":
        patches = torch.randn(rows, longest, 50, generator=generator)
        patches[:, :, :2] = torch.arange(1, longest + 1)[:, None] % 8  # rows and columns of the picture
        return {"flattened_patches": patches * shown[:, :, None], "attention_mask": shown.long()}
    if name in ("moonshine", "speecht5"):
        number = 400 if name == "moonshine" else 40  # of samples for each position, or for two
        samples = torch.randn(rows, number * longest, generator=generator)
        return {"input_values": samples, "attention_mask": shown.repeat_interleave(number, dim=1).long()}
    ids = torch.randint(5, VOCAB, (rows, longest), generator=generator)
    return {"input_ids": torch.where(shown, ids, PAD), "attention_mask": shown.long()}


def texts(number: int, seed: int = 0) -> list[Tensor]:
    """Ragged texts for an encoder, `[1, length]` each; every fourth is one that was there before."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 40, (number,), generator=generator).tolist()
    found = [torch.randint(5, VOCAB, (1, length), generator=generator) for length in lengths]
    return [found[index // 4] if index % 4 == 3 else own for index, own in enumerate(found)]
