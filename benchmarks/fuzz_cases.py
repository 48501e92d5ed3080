"""What `fuzz.py` draws for a seed, the same each time: a tiny random model, a pool, calls and their prompts."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, StoppingCriteria

Record = dict[str, Any]
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MLP = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, **IDS}
BASE = MLP | {"num_key_value_heads": 2, "max_position_embeddings": 512}
HEAD = BASE | {"head_dim": 16}
WINDOWS = HEAD | {"sliding_window": 9, "query_pre_attn_scalar": 16}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, **IDS}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENTS = BASE | {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8}
LATENTS |= {"qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = BASE | {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
DENSE: dict[str, dict[str, Any]] = {  # judged in half precision, too
    **dict.fromkeys(("llama", "qwen2", "phi3", "olmo2", "cohere", "granite", "smollm3", "ernie4_5", "nemotron"), BASE),
    **dict.fromkeys(("qwen3", "gemma", "seed_oss"), HEAD),
    **dict.fromkeys(("mistral", "starcoder2", "cohere2", "olmo3"), BASE | {"sliding_window": 11}),
    **dict.fromkeys(("gemma2", "gemma3_text"), WINDOWS),
    **dict.fromkeys(("glm4", "helium"), BASE | {"head_dim": 12}),
    **dict.fromkeys(("gpt_neox", "persimmon", "biogpt"), MLP | {"max_position_embeddings": 512}),
    "stablelm": BASE | {"hidden_size": 64},
    "gpt2": GPT2,
    "opt": MLP | {"ffn_dim": 96, "word_embed_proj_dim": 48, "max_position_embeddings": 512},
}
OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": BASE | EXPERTS,
    "qwen3_moe": HEAD | EXPERTS,
    "gpt_oss": HEAD | EXPERTS | {"sliding_window": 9},
    "gptj": GPT2 | {"rotary_dim": 8},
    "falcon": MLP | {"alibi": False},
    "bloom": {"hidden_size": 48, "n_layer": 3, "n_head": 4, **IDS},
    "mpt": {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, **IDS},
    "deepseek_v3": LATENTS,
    "qwen3_next": HEAD | EXPERTS | LINEAR | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "lfm2": BASE | {"layer_types": ["conv", "full_attention", "conv"]},
    "bamba": MAMBA | {"attn_layer_indices": [1], "mamba_d_head": 24},
    "falcon_h1": MAMBA | {"head_dim": 16, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "jamba": BASE | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
}
FAMILIES = DENSE | OTHERS
STATES = ("qwen3_next", "lfm2", "bamba", "falcon_h1", "jamba")  # of their caches nothing is taken back
PADDED = ("gptj", "falcon", "bloom", "mpt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DRAFTS = ("lookup", "sampled lookup", "assistant")
# Of each setting how often it is given, and what.
SAMPLING: dict[str, tuple[float, list[Any]]] = {
    "temperature": (0.35, [0.3, 0.8, 1.5]),
    "top_k": (0.35, [1, 5, 50, 0]),
    "top_p": (0.35, [0.3, 0.9, 1.0]),
    "min_p": (0.25, [0.02, 0.2]),
    "typical_p": (0.2, [0.5, 0.9]),
    "epsilon_cutoff": (0.15, [1e-3]),
    "eta_cutoff": (0.15, [1e-3]),
}
BEAMS: dict[str, tuple[float, list[Any]]] = {
    "num_beams": (1.0, [2, 3, 4, 6]),
    "early_stopping": (0.4, [True, False, "never"]),
    "length_penalty": (0.3, [-1.0, 0.0, 0.5, 2.0]),
    "num_return_sequences": (0.4, [1, 2]),
}
ALWAYS: dict[str, tuple[float, list[Any]]] = {
    "repetition_penalty": (0.25, [0.7, 1.3]),
    "no_repeat_ngram_size": (0.15, [1, 2, 3]),
    "encoder_no_repeat_ngram_size": (0.1, [2]),
    "encoder_repetition_penalty": (0.1, [1.4]),
    "min_new_tokens": (0.15, [1, 4, 9]),
    "bad_words_ids": (0.1, [[[5], [7, 8]]]),
    "suppress_tokens": (0.1, [[4, 9, 11]]),
    "begin_suppress_tokens": (0.1, [[3, 6]]),
    "forced_eos_token_id": (0.1, [2]),
    "exponential_decay_length_penalty": (0.1, [(2, 1.3)]),
    "sequence_bias": (0.1, [[[[5], -3.0]]]),
    "renormalize_logits": (0.1, [True]),
    "max_time": (0.1, [1000.0]),
    "eos_token_id": (0.05, [list(range(0, 30, 3))]),
}
OUTPUTS: dict[str, tuple[float, list[Any]]] = dict.fromkeys(
    ("output_scores", "output_logits", "output_hidden_states"), (0.4, [True])
)


class Code(LogitsProcessor):
    """A user's processor: `ban` repetitions, write `in_place` and remember calls, look at the whole `batch`, `draw`."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.kind == "ban":
            return scores.scatter(1, input_ids[:, -1:].clamp(max=scores.shape[1] - 1), -1e9)
        if self.kind == "in_place":
            scores[:, self.calls % scores.shape[1]] -= 3.0
            return scores
        if self.kind == "batch":
            return scores - 0.01 * input_ids.float().mean() * (torch.arange(scores.shape[1]) % 3)
        return scores + 0.5 * torch.randn_like(scores)


class End(StoppingCriteria):
    """A user's criterion: ends rows by their last token (`stop`) or all of them at once (`stop_all`), or `switch`es."""

    def __init__(self, kind: str, model: Any = None, adapter: str = "", call: int = 7) -> None:
        self.kind, self.model, self.adapter, self.calls = kind, model, adapter, call

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls -= 1
        if self.kind == "stop":
            return input_ids[:, -1] % 7 == 3
        if self.kind == "switch" and self.calls == 0:
            self.model.set_adapter(self.adapter)
        return torch.full((len(input_ids),), self.kind == "stop_all" and self.calls <= 0)


def draw_config(rng: random.Random, dtype: str) -> tuple[str, dict[str, Any]]:
    """A family, and what its config says."""
    is_exact = dtype == "float32"
    family = rng.choice([*DENSE, *(OTHERS if is_exact else ())])
    config = FAMILIES[family] | {"vocab_size": rng.choice([199] * 8 + [30, 1000])}
    if "num_key_value_heads" in config and family not in ("deepseek_v3", *STATES) and rng.random() < 0.6:
        # The fewer numbers a model has, the more its rounding matters.
        heads = rng.choice([1, 2, 3, 4, 6, 8] if is_exact else [3, 4, 6, 8])
        config["num_attention_heads"] = heads
        config["num_key_value_heads"] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
        if "head_dim" in config:
            is_small = family in ("glm4", "helium")
            config["head_dim"] = rng.choice([8, 12, 16, 20] if is_small else [8, 12, 16, 20, 40, 64, 80, 128])
            config["hidden_size"] = heads * config["head_dim"] if is_small else config["hidden_size"]
        else:
            config["hidden_size"] = heads * rng.choice([8, 12, 16, 20, 40] if is_exact else [16, 20, 40])
    if "num_hidden_layers" in config and family not in STATES:
        config["num_hidden_layers"] = rng.choice([1, 2, 2, 3, 4] if is_exact else [1, 2])
    if "sliding_window" in config:
        config["sliding_window"] = rng.choice([2, 3, 4, 5, 7, 8, 9, 16, 17, 32])
    if family in ("llama", "mistral", "qwen2", "qwen3", "olmo2") and rng.random() < 0.25:
        kind = rng.choice(["linear", "yarn", "llama3", *(["dynamic"] if is_exact else [])])
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        if kind in ("yarn", "llama3"):
            rope["original_max_position_embeddings"] = 32
        if kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if kind == "dynamic":
            config["max_position_embeddings"] = rng.choice([16, 32, 64])
        config["rope_parameters"] = rope
    if family in ("llama", "qwen3", "granite") and rng.random() < 0.3:
        config["attention_bias"] = True
    if rng.random() < 0.3:
        config["tie_word_embeddings"] = rng.random() < 0.5
    return family, config


def make_model(family: str, config: dict[str, Any], seed: int, dtype: str, attention: str | None) -> Any:
    """A model with random weights, sharper than transformers makes them: what it says next is no toss-up."""
    torch.manual_seed(seed)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    eos = [token for token in (2, 17, 33, 58, 101) if token < config["vocab_size"]]
    model.generation_config.update(pad_token_id=0, eos_token_id=eos, use_cache=True)
    return model.to(DTYPES[dtype])


def add_adapters(model: Any, seed: int) -> Any:
    """The model in PEFT's wrapper, with two adapters of random weights."""
    import peft

    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**options), adapter_name="one")
    wrapped.add_adapter("two", peft.LoraConfig(**options))
    return wrapped.eval()


def draw_record(rng: random.Random, family: str, dtype: str, kind: str, has_adapters: bool) -> Record:
    """A call or a conversation, as JSON would say it. `noise` is the seed of its prompts and draws."""
    is_exact, is_alone, has_states = dtype == "float32", kind == "alone", family in STATES
    modes = ["greedy", "greedy", "sample", "sample"]
    if is_alone:
        modes += ["beams", "beams"]
    if is_alone and not has_states:
        modes += ["lookup", "turns"]
        modes += ["drawn beams", "sampled lookup"] if is_exact else []
        modes += ["assistant"] if is_exact and not has_adapters else []
    mode = "greedy" if kind == "fp8" else rng.choice(modes)
    is_draft, is_turns = mode in DRAFTS, mode == "turns"
    rows = 1 if kind == "together" else rng.choice([1, 1, 2, 3, 5])
    kwargs: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 3, 5, 8, 13, 20, 33])}
    record: Record = {"dtype": dtype, "mode": mode, "kwargs": kwargs, "noise": rng.randrange(10**6)}
    record |= {"lengths": [rng.choice([1, 2, 3, 5, 8, 15, 16, 17, 23, 40]) for _ in range(rows)], "code": []}
    record |= {"repeats": rng.random() < 0.3, "mask": "left", "embeds": False, "operations": [], "switch": None}
    record["adapter"] = rng.choice(["one", "one", "two", "none"]) if has_adapters else None
    if kind == "fp8":
        return record

    def add(settings: dict[str, tuple[float, list[Any]]]) -> None:
        kwargs.update(
            {name: rng.choice(values) for name, (chance, values) in settings.items() if rng.random() < chance}
        )

    if mode in ("sample", "drawn beams", "sampled lookup") or (is_turns and rng.random() < 0.5):
        kwargs["do_sample"] = True
        add(SAMPLING)
    if mode in ("beams", "drawn beams"):
        add(BEAMS)
    if mode in ("lookup", "sampled lookup"):
        kwargs["prompt_lookup_num_tokens"] = rng.choice([1, 2, 3, 5])
    add(ALWAYS)
    if not is_alone:
        return record
    if mode == "sample":
        add({"num_return_sequences": (0.4, [2, 3])})
    if is_exact and mode in ("greedy", "sample"):
        add({"guidance_scale": (0.1, [1.4])})
    chances = {"ban": 0.1, "stop": 0.1} | ({} if is_draft else {"in_place": 0.08, "stop_all": 0.08})
    chances |= {"batch": 0.08, "draw": 0.08} if is_exact and not is_draft else {}
    record["code"] = [name for name, chance in chances.items() if rng.random() < chance]
    if is_turns:
        operations = ["none", "deepcopy", "reorder", "select", "interleave", "crop"]
        record["operations"] = rng.choices(operations, k=rng.choice([1, 2]))
        kwargs["max_new_tokens"] = min(kwargs["max_new_tokens"], 8)
        return record
    if family != "jamba":  # which in stock loses its state between chunks
        add({"prefill_chunk_size": (0.1, [1, 3, 8])})
    if rng.random() < 0.2:
        kwargs["return_dict_in_generate"] = True
        add(OUTPUTS)
    if is_exact and not is_draft and not has_states:
        record["mask"] = rng.choice(["left"] * 12 + ["none", "right", "holes"])
        record["embeds"] = rng.random() < 0.06 and "prefill_chunk_size" not in kwargs
        if has_adapters and rng.random() < 0.3:
            record["switch"] = [rng.choice(["one", "two"]), rng.choice([1, 2, 4])]
    return record


def draw_prompts(record: Record, vocab: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, `[rows, width]`."""
    generator, width = torch.Generator().manual_seed(record["noise"]), max(record["lengths"])
    ids, mask = torch.zeros(2, len(record["lengths"]), width, dtype=torch.long)
    for row, length in enumerate(record["lengths"]):
        place = slice(0, length) if record["mask"] == "right" else slice(width - length, width)
        ids[row, place] = torch.randint(3, vocab, (length,), generator=generator)
        mask[row, place] = 1
        if record["mask"] == "holes" and length > 4:
            mask[row, width - 3] = 0
    return ids, mask


def draw_settings(rng: random.Random, kind: str, family: str, config: Record, records: list[Record]) -> Record:
    """Those of a pool so small that calls preempt each other, unless some of them hold whole batches at a time."""
    block_size, longest, whole = rng.choice([1, 2, 3, 5, 7, 8, 16, 32]), 0, 0
    rope = config.get("rope_parameters", {}).get("rope_type")
    is_whole = rope == "dynamic" or family in (*PADDED, *STATES) or kind == "fp8"
    for record in records:
        kwargs, has_turns = record["kwargs"], bool(record["operations"])
        length = max(record["lengths"]) + kwargs["max_new_tokens"] + 8 + 30 * len(record["operations"])
        longest = max(longest, length)
        seen = record["code"] or record["embeds"] or record["switch"] or has_turns or "output_hidden_states" in kwargs
        if is_whole or seen or record["mask"] not in ("left", "none") or record["mode"] == "assistant":
            copies = max(kwargs.get("num_beams", 1), kwargs.get("num_return_sequences", 1), 4 if has_turns else 1)
            whole = max(whole, len(record["lengths"]) * copies * (-(-length // block_size) + 1))
    least = -(-longest // block_size) * rng.choice([1, 1, 1.3, 2, 4, 10]) + rng.choice([0, 1, 2])
    groups = 4 if "sliding_window" in config or family in STATES else 1
    return {
        "block_size": block_size,
        "num_blocks": groups * int(max(least, whole * rng.choice([1, 1.2, 3]))) + (60 if family in STATES else 0),
        "max_num_seqs": rng.choice([1, 2, 3, 8, 256]),
        "max_num_batched_tokens": rng.choice([1, 2, 7, 16, 64, 2048]),
        "preemption": rng.choice(["auto", "recompute", "swap"]),
        "enable_prefix_caching": rng.random() < 0.85,
        "attention_backend": rng.choice(["auto", "auto", "torch"]),
        "use_async_batching": rng.choice([None, True, False]),
        "kv_cache_dtype": rng.choice(["fp8_e4m3", "fp8_e5m2"]) if kind == "fp8" else "auto",
    }
