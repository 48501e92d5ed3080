"""The models of the suite: a tiny random config an architecture, and how to build one whose text is worth comparing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_paged
from hf_paged.api.support import look_at
from hf_paged.core.block_manager import BlockManager
from hf_paged.core.cache_groups import CacheGroups
from hf_paged.memory.state_cache import StateLayout
from hf_paged.model.wrapper import inner_path

VOCAB = 97
PAD, BOS, EOS = 0, 1, 2
TINY_LM = Path(hf_paged.__file__).resolve().parent / "assets" / "tiny_lm"

_SPECIAL = {
    "vocab_size": VOCAB,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,  # tied and random, a model repeats its last token
}
_COMMON = _SPECIAL | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_GQA = _COMMON | {"num_key_value_heads": 2}
_FOUR_LAYERS = _GQA | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
_GPT2_NAMES = _SPECIAL | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENTS = (_COMMON | {"num_key_value_heads": 4}) | {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_SHARING = _SPECIAL | {
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 16,
    "sliding_window": 6,
    "max_position_embeddings": 256,
}
_FALCON = _SPECIAL | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_HALF_HEAD = 8  # frequencies of a rotary embedding over 16 dimensions


@dataclass(frozen=True)
class TinyModel:
    """A row of the table.

    Attributes:
        config: Makes the config.
        runs_packed: Whether its prompts are computed without their padding, straight over the pool.
        is_batched: Whether rows of several calls share its forwards.
        generation: Changes to its generation config.
        attention: Attention implementation; the model's default if not given.
        seed: Seed of the weights; another one is chosen where this one generates boring text or near ties.
    """

    config: Callable[[], PreTrainedConfig]
    runs_packed: bool = True
    is_batched: bool = True
    generation: dict[str, Any] = field(default_factory=dict)
    attention: str | None = None
    seed: int = 0

    @property
    def has_windows(self) -> bool:
        """Whether blocks behind a window are given back in some layers."""
        config = self.config().get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None)
        has_them = "sliding_attention" in kinds if kinds else bool(getattr(config, "sliding_window", None))
        return self.runs_packed and has_them


MODELS: dict[str, TinyModel] = {
    "llama": TinyModel(lambda: hf.LlamaConfig(**_GQA), seed=1),
    "mistral": TinyModel(lambda: hf.MistralConfig(**_GQA, sliding_window=6)),
    "qwen2": TinyModel(lambda: hf.Qwen2Config(**_GQA)),
    "qwen2_windows": TinyModel(
        lambda: hf.Qwen2Config(**_GQA, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "qwen3": TinyModel(lambda: hf.Qwen3Config(**_GQA, head_dim=16), seed=1),
    "gemma": TinyModel(lambda: hf.GemmaConfig(**_GQA, head_dim=16)),
    # Its sdpa attention ignores the softcap in transformers 5.17.
    "gemma2": TinyModel(lambda: hf.Gemma2Config(**_FOUR_LAYERS), attention="eager"),
    "gemma3": TinyModel(
        lambda: hf.Gemma3TextConfig(**_FOUR_LAYERS, layer_types=["sliding_attention", "full_attention"] * 2),
        seed=3,
    ),
    "gemma3_dynamic_rope": TinyModel(
        lambda: hf.Gemma3TextConfig(
            **(_FOUR_LAYERS | {"max_position_embeddings": 16}),
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        runs_packed=False,
        is_batched=False,
    ),
    "phi3": TinyModel(lambda: hf.Phi3Config(**_GQA), seed=1),
    "gpt2": TinyModel(lambda: hf.GPT2Config(**_GPT2_NAMES), seed=1),
    "gpt_neox": TinyModel(lambda: hf.GPTNeoXConfig(**_COMMON), seed=9),
    "opt": TinyModel(
        lambda: hf.OPTConfig(
            **_SPECIAL,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
        )
    ),
    "starcoder2": TinyModel(lambda: hf.Starcoder2Config(**_GQA, sliding_window=6), seed=1),
    "stablelm": TinyModel(lambda: hf.StableLmConfig(**_GQA), seed=3),
    "olmo2": TinyModel(lambda: hf.Olmo2Config(**_GQA), seed=3),
    "cohere": TinyModel(lambda: hf.CohereConfig(**_GQA, logit_scale=1.0)),
    "granite": TinyModel(lambda: hf.GraniteConfig(**_GQA)),
    "mixtral": TinyModel(lambda: hf.MixtralConfig(**_GQA, num_local_experts=4, sliding_window=None), seed=2),
    "qwen3_moe": TinyModel(
        lambda: hf.Qwen3MoeConfig(**_GQA, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "gpt_oss": TinyModel(
        lambda: hf.GptOssConfig(
            **_GQA,
            **_EXPERTS,
            head_dim=16,
            sliding_window=6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        seed=1,
    ),
    # Two stacks of layers, run through eight times, each time with keys of their own.
    "hrm_text": TinyModel(
        lambda: hf.HrmTextConfig(**(_COMMON | {"num_hidden_layers": 1}), head_dim=16, H_cycles=2, L_cycles=3), seed=1
    ),
    "smollm3": TinyModel(lambda: hf.SmolLM3Config(**_GQA), seed=4),
    # Layers that cache more than others, values narrower than keys, and layers that attend to another one's keys.
    "gemma4": TinyModel(
        lambda: hf.Gemma4TextConfig(**(_SHARING | {"num_kv_shared_layers": 0}), global_head_dim=32), seed=1
    ),
    "gemma4_sharing": TinyModel(lambda: hf.Gemma4TextConfig(**_SHARING, global_head_dim=32)),
    "gemma3n": TinyModel(
        lambda: hf.Gemma3nTextConfig(
            **_SHARING, laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=[0.5, *[0.0] * 5]
        ),
        seed=1,
    ),
    "mimo_v2_flash": TinyModel(
        lambda: hf.MiMoV2FlashConfig(
            **(_FOUR_LAYERS | {"num_hidden_layers": 3, "v_head_dim": 12}),
            **(_ROUTED | {"routed_scaling_factor": 1.0}),
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
    ),
    # Latents in place of keys and values.
    "deepseek_v2": TinyModel(lambda: hf.DeepseekV2Config(**_LATENTS, **_ROUTED, topk_method="greedy")),
    "deepseek_v3": TinyModel(lambda: hf.DeepseekV3Config(**_LATENTS, **_ROUTED)),
    # A sequence cut into chunks of 12 tokens; layers without rotary positions are scaled by the position.
    "llama4": TinyModel(
        lambda: hf.Llama4TextConfig(
            **(_GQA | {"num_hidden_layers": 4, "intermediate_size": 48}),
            intermediate_size_mlp=96,
            head_dim=16,
            attention_chunk_size=12,
            no_rope_layers=[1, 0, 1, 0],
            num_local_experts=4,
            interleave_moe_layer_step=2,
        ),
    ),
    # A layer's indexer, whose keys are cached too, chooses eight of the tokens.
    "deepseek_v32": TinyModel(
        lambda: hf.DeepseekV32Config(
            **_LATENTS, **_ROUTED, index_topk=8, index_n_heads=16, index_head_dim=14, num_nextn_predict_layers=0
        ),
        runs_packed=False,
        seed=1,
    ),
    "glm4_moe_lite": TinyModel(
        lambda: hf.Glm4MoeLiteConfig(**_LATENTS, **_ROUTED, mlp_layer_types=["dense", "sparse"])
    ),
    "minicpm3": TinyModel(lambda: hf.MiniCPM3Config(**_LATENTS), seed=1),
    "longcat_flash": TinyModel(
        lambda: hf.LongcatFlashConfig(
            **(_LATENTS | {"num_layers": 2, "head_dim": 8}),
            ffn_hidden_size=96,
            expert_ffn_hidden_size=32,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=2,
        ),
        seed=3,
    ),
    "youtu": TinyModel(lambda: hf.YoutuConfig(**_LATENTS)),
    "falcon_alibi": TinyModel(lambda: hf.FalconConfig(**_FALCON, alibi=True), runs_packed=False, seed=12),
    "falcon_rotary": TinyModel(lambda: hf.FalconConfig(**_FALCON, alibi=False), runs_packed=False, seed=3),
    "falcon_new": TinyModel(
        lambda: hf.FalconConfig(**_FALCON, alibi=False, new_decoder_architecture=True, num_kv_heads=2),
        runs_packed=False,
        seed=2,
    ),
    "bloom": TinyModel(
        lambda: hf.BloomConfig(**_SPECIAL, hidden_size=64, n_layer=2, n_head=4), runs_packed=False, seed=2
    ),
    "gptj": TinyModel(lambda: hf.GPTJConfig(**_GPT2_NAMES, rotary_dim=8), runs_packed=False, seed=2),
    "codegen": TinyModel(lambda: hf.CodeGenConfig(**_GPT2_NAMES, rotary_dim=8), runs_packed=False, seed=18),
    "mpt": TinyModel(
        lambda: hf.MptConfig(**_SPECIAL, d_model=64, n_layers=2, n_heads=4, max_seq_len=256),
        runs_packed=False,
        generation={"use_cache": True},  # its config says False
        seed=3,
    ),
    "llama_dynamic_rope": TinyModel(
        lambda: hf.LlamaConfig(
            **(_GQA | {"max_position_embeddings": 16}),
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        ),
        runs_packed=False,
        is_batched=False,
    ),
    "phi3_longrope": TinyModel(
        lambda: hf.Phi3Config(
            **_GQA,
            original_max_position_embeddings=16,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.1 * i for i in range(_HALF_HEAD)],
                "long_factor": [2.0 + 0.5 * i for i in range(_HALF_HEAD)],
                "original_max_position_embeddings": 16,
            },
        ),
        runs_packed=False,
        is_batched=False,
        seed=3,
    ),
}
"""Every architecture the suite runs. A row is all that a new one needs."""


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "xlstm": (
        lambda: hf.xLSTMForCausalLM(hf.xLSTMConfig(vocab_size=VOCAB, hidden_size=64, num_heads=4, num_hidden_layers=2)),
        "recurrent state",
    ),
    "minimax": (lambda: AutoModelForCausalLM.from_config(hf.MiniMaxConfig(**_GQA)), "cache of its own"),
    "openai_gpt": (lambda: hf.OpenAIGPTLMHeadModel(hf.OpenAIGPTConfig(**_GPT2_NAMES)), "has no cache"),
    "no_lm_head": (lambda: hf.LlamaModel(hf.LlamaConfig(**_GQA)), "language-model head"),
    "plain_module": (lambda: nn.Linear(2, 2), "PreTrainedModel"),
}
"""What `patch` must refuse: how to build it, and a word of the reason."""


@cache
def _built(name: str, layers: int | None, seed: int | None, attention: str | None) -> PreTrainedModel:
    row = MODELS[name]
    config = row.config()
    if layers is not None:
        config.num_hidden_layers = layers
        for kind in ("layer_types", "mlp_layer_types", "no_rope_layers"):
            if getattr(config, kind, None):
                setattr(config, kind, (getattr(config, kind) * layers)[:layers])
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        torch.manual_seed(row.seed if seed is None else seed)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                noise = torch.randn_like(parameter)
                # Eight times the usual width, with which a model repeats one token whatever it was told. Vectors start
                # at ones or zeros; one that starts at random (sinks, biases of routers) does so in an unseeded draw.
                parameter.copy_(0.16 * noise if parameter.ndim > 1 else parameter.round() + 0.1 * noise)
    model.generation_config.update(**row.generation)
    return model


def build(
    name: str,
    *,
    layers: int | None = None,
    seed: int | None = None,
    attention: str | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """A fresh copy of a model of the table, with weights that make its text diverse.

    Args:
        name: Row of `MODELS`.
        layers: Another number of layers.
        seed: Another seed for the weights.
        attention: Attention implementation; the row's if not given.
        dtype: Converted to this type.
    """
    model = copy.deepcopy(_built(name, layers, seed, attention or MODELS[name].attention))
    return model if dtype is None else model.to(dtype)


@cache
def _tiny_lm() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY_LM, local_files_only=True).eval()


def tiny_lm() -> PreTrainedModel:
    """A fresh copy of the embedded trained model."""
    return copy.deepcopy(_tiny_lm())


@cache
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's tokenizer."""
    return hf.AutoTokenizer.from_pretrained(TINY_LM, local_files_only=True)


def ragged_batch(lengths: tuple[int, ...] = (11, 7, 2), seed: int = 0, side: str = "left") -> dict[str, Tensor]:
    """Random prompts of these lengths, padded to one width: `input_ids` and `attention_mask`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)), generator=generator)
    columns = torch.arange(max(lengths))
    pads = max(lengths) - torch.tensor(lengths)[:, None]
    mask = (columns >= pads if side == "left" else columns < max(lengths) - pads).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def least_blocks(model: str | PreTrainedModel, num_tokens: int, block_size: int, chunk: int) -> int:
    """The smallest pool that a sequence of so many tokens fits, which grows by at most `chunk` of them a step."""
    traits = look_at(build(model) if isinstance(model, str) else model).traits
    assert traits is not None
    groups = CacheGroups.of(traits.stored)
    needed = BlockManager(1, block_size, windows=groups.windows).most_blocks(num_tokens, chunk)
    if traits.states:
        page_bytes = traits.geometry(groups, torch.float32, block_size).bytes_per_block(block_size)
        needed += StateLayout.of(traits.states, page_bytes, torch.float32).num_pages
    return needed


def random_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random prompts without padding."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def name_of(arguments: dict[str, Any]) -> str:
    """A test id for arguments of `generate()`."""
    return "+".join(arguments) or "greedy"


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's list of decoder layers, wherever it keeps it."""
    inner = model.get_submodule(inner_path(model) or "")
    if model.config.is_encoder_decoder:
        inner = model.get_decoder()  # type: ignore[operator]
    return next(module for module in inner.modules() if isinstance(module, nn.ModuleList))


def watch_tokens(model: nn.Module) -> list[int]:
    """A list that grows by one number a forward: the tokens that the first decoder layer was given.

    The hook stays for good: hf_paged takes hooks that come and go for changes of the model.
    """
    seen: list[int] = []

    @hf_paged.packed_hook
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        seen.append(states.shape[-3] * states.shape[-2])

    decoder_layers(model)[0].register_forward_pre_hook(note, with_kwargs=True)
    return seen
