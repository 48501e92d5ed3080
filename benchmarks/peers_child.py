"""One engine of peers.py, in an environment of its own: orders as lines of JSON in, tokens and seconds out.

PYTHON benchmarks/peers_child.py ENGINE MODEL_DIR DTYPE NUM_THREADS

An order: `prompts` (of token ids), `new_tokens` (of each, whatever token they are), `num_beams`. Conversions of the
model are kept beside it, by engine and dtype.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

MARK = "RESULT "

Prompts = list[list[int]]


class Transformers:
    """Stock `generate()` over one padded batch, or the patched model's requests."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, is_patched: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        options: dict[str, Any] = {"weight_dtype": "int8"} if dtype == "int8" else {}
        if options and not is_patched:
            raise ValueError("stock has no int8 on a CPU")
        kept = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kept).eval()
        self.model.generation_config.eos_token_id = None
        self.is_patched = is_patched
        if is_patched:
            import hf_paged

            self.model = hf_paged.patch(self.model, **options)

    def generate(self, prompts: Prompts, new_tokens: int, num_beams: int) -> Prompts:
        import torch

        options = {"max_new_tokens": new_tokens, "num_beams": num_beams, "do_sample": False, "pad_token_id": 0}
        if self.is_patched:
            outputs = self.model.paged.generate(prompts, **options)
            self.model.paged.reset_prefix_cache()
            return [output.token_ids for output in outputs]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        done = self.model.generate(ids, attention_mask=mask, **options)
        rows: Prompts = done[:, width:].tolist()
        return rows


class CTranslate2:
    """https://github.com/OpenNMT/CTranslate2, through its converter for transformers' models."""

    def __init__(self, folder: Path, dtype: str, num_threads: int) -> None:
        import ctranslate2

        converted = folder / f"ctranslate2-{dtype}"
        if not converted.exists():
            ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted), quantization=dtype)
        self.model = ctranslate2.Generator(
            str(converted), device="cpu", compute_type=dtype, intra_threads=num_threads, inter_threads=1
        )

    def generate(self, prompts: Prompts, new_tokens: int, num_beams: int) -> Prompts:
        results = self.model.generate_batch(
            [[f"t{token}" for token in prompt] for prompt in prompts],
            max_length=new_tokens,
            min_length=new_tokens,
            beam_size=num_beams,
            include_prompt_in_result=False,
            end_token=[],
            max_batch_size=len(prompts),
        )
        return [result.sequences_ids[0] for result in results]


class OpenVino:
    """https://github.com/openvinotoolkit/openvino.genai: its continuous batching, over what optimum exported."""

    def __init__(self, folder: Path, dtype: str, num_threads: int) -> None:
        import openvino_genai as genai
        from optimum.intel import OVModelForCausalLM

        converted = folder / f"openvino-{'int8' if dtype == 'int8' else 'float32'}"
        if not converted.exists():
            exported = OVModelForCausalLM.from_pretrained(
                folder, export=True, load_in_8bit=dtype == "int8", compile=False
            )
            exported.save_pretrained(converted)
        self.genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.max_num_batched_tokens = 2048
        self.model = genai.ContinuousBatchingPipeline(
            str(converted),
            scheduler_config=scheduler,
            device="CPU",
            properties={
                "INFERENCE_PRECISION_HINT": "bf16" if dtype == "bfloat16" else "f32",
                "INFERENCE_NUM_THREADS": num_threads,
                "KV_CACHE_PRECISION": "bf16" if dtype == "bfloat16" else "f32",
            },
            tokenizer_properties={},
        )

    def generate(self, prompts: Prompts, new_tokens: int, num_beams: int) -> Prompts:
        import numpy as np
        import openvino

        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        config.num_beams, config.num_return_sequences = num_beams, 1
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self.model.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0])[-new_tokens:] for result in results]


class LlamaCpp:
    """https://github.com/ggml-org/llama.cpp, through llama-cpp-python's bindings of its C functions."""

    def __init__(self, folder: Path, dtype: str, num_threads: int) -> None:
        import llama_cpp

        converted = folder / f"llama-cpp-{dtype}.gguf"
        if not converted.exists():
            write_gguf(folder, converted, dtype)
        self.lib = lib = llama_cpp
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(str(converted).encode(), lib.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp does not load {converted}")
        self.vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        options = lib.llama_context_default_params()
        options.n_seq_max, options.n_ctx, options.n_batch, options.n_ubatch = 32, 32 * 256, 8192, 512
        options.n_threads = options.n_threads_batch = num_threads
        options.kv_unified = True
        self.context = lib.llama_init_from_model(self.model, options)
        self.batch = lib.llama_batch_init(8192, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Runs `(token, position, sequence, wants logits)`."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = is_wanted
        if self.lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")

    def _argmax(self, index: int) -> int:
        import numpy as np

        logits = self.lib.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())

    def generate(self, prompts: Prompts, new_tokens: int, num_beams: int) -> Prompts:
        if num_beams > 1:
            raise ValueError("llama.cpp has no beam search")
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        self._decode(rows)
        tokens = [[self._argmax(index)] for index, row in enumerate(rows) if row[3]]
        for step in range(new_tokens - 1):
            self._decode([(own[-1], len(prompts[n]) + step, n, True) for n, own in enumerate(tokens)])
            for index, own in enumerate(tokens):
                own.append(self._argmax(index))
        return tokens


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """A Llama's weights in llama.cpp's format, without a vocabulary. Its rotary pairs are neighbours."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kinds = gguf.GGMLQuantizationType
    kind = {"float32": kinds.F32, "bfloat16": kinds.BF16, "int8": kinds.Q8_0}[dtype]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, value: np.ndarray, is_vector: bool = False) -> None:
        own = kinds.F32 if is_vector or (value.shape[-1] % 32 and kind is kinds.Q8_0) else kind
        writer.add_tensor(name, gguf.quants.quantize(value.astype(np.float32), own), raw_dtype=own)

    def permuted(value: np.ndarray, count: int) -> np.ndarray:
        return value.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(value.shape)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"], is_vector=True)
    if "lm_head.weight" in weights:
        add("output.weight", weights["lm_head.weight"])
    names = {
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(config["num_hidden_layers"]):
        source, target = f"model.layers.{layer}.", f"blk.{layer}."
        add(target + "attn_norm.weight", weights[source + "input_layernorm.weight"], is_vector=True)
        add(target + "ffn_norm.weight", weights[source + "post_attention_layernorm.weight"], is_vector=True)
        add(target + "attn_q.weight", permuted(weights[source + "self_attn.q_proj.weight"], heads))
        add(target + "attn_k.weight", permuted(weights[source + "self_attn.k_proj.weight"], kv_heads))
        for theirs, ours in names.items():
            add(target + ours + ".weight", weights[source + theirs + ".weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make(engine: str, folder: Path, dtype: str, num_threads: int) -> Any:
    if engine in ("stock", "hf_paged"):
        return Transformers(folder, dtype, num_threads, engine == "hf_paged")
    return {"ctranslate2": CTranslate2, "openvino": OpenVino, "llama.cpp": LlamaCpp}[engine](folder, dtype, num_threads)


def say(fact: dict[str, Any]) -> None:
    print(MARK + json.dumps(fact), flush=True)


def main() -> None:
    engine, folder, dtype, num_threads = sys.argv[1:]
    try:
        model = make(engine, Path(folder), dtype, int(num_threads))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        started = time.perf_counter()
        try:
            tokens = model.generate(order["prompts"], order["new_tokens"], order["num_beams"])
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            continue
        say({"seconds": time.perf_counter() - started, "tokens": tokens})


if __name__ == "__main__":
    main()
