"""One engine of real_sizes.py, in an environment of its own: orders in, tokens and their times out.

PYTHON benchmarks/real_sizes_child.py ENGINE MODEL_DIR DTYPE NUM_THREADS MAX_TOKENS NUM_ROWS

MODEL_DIR has a model in bfloat16; DTYPE is what its weights become ("float32", "bfloat16", "int8"). Keys and values are
in the weights' dtype, and in bfloat16 beside int8. MAX_TOKENS is what all rows of an order have at most, together, and
NUM_ROWS how many these are. Conversions are kept beside the model, by engine and dtype.

An order: the `lengths` of its prompts, the `seed` of their random tokens, `new_tokens` (of each row, whatever they are)
and, if `is_filled`, that all of the prompts but their ends is in the cache already, as random keys and values; then all
are of one length. With `expected` and `actual` tokens, stock judges these instead (`verdict`).
Answers: `seconds`; `first`, until the median row's first token; `tokens`; `bytes`, the most memory that the process had
meanwhile, beside the weights; of the patched model `read`, the seconds in which torch reads what one decode step reads.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from children import answer_orders

Prompts = list[list[int]]
FIRST_TOKEN = 3
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
GIB = 16  # of memory that an engine may write to
INT8_CACHE = "hf_paged, int8 cache"


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


class Clock:
    """Times of the first tokens of rows, from its making on."""

    def __init__(self, num_rows: int) -> None:
        self._started = time.perf_counter()
        self.firsts: list[float | None] = [None] * num_rows

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def saw(self, row: int) -> None:
        """A token of this row is there."""
        if self.firsts[row] is None:
            self.firsts[row] = self.seconds()


class Transformers:
    """Stock `generate()` over one padded batch, or the patched model's requests."""

    def __init__(self, engine: str, folder: Path, dtype: str, num_threads: int, max_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self.torch = torch
        kept = torch.float32 if dtype == "float32" else torch.bfloat16
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kept).eval()
        self.model.generation_config.eos_token_id = None
        self.weights = sum(each.numel() for each in self.model.parameters()) * BYTES[dtype]
        self.is_quantised = dtype == "int8"
        if self.is_quantised:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(self.model, Int8WeightOnlyConfig())
        self.is_patched = engine.startswith("hf_paged")
        if self.is_patched:
            import hf_paged

            settings: dict[str, Any] = {"num_blocks": max_tokens // 16 + 16} if max_tokens > 2**15 else {}
            if engine == INT8_CACHE:
                settings["kv_cache_dtype"] = "int8"
            self.model = hf_paged.patch(self.model, **settings)

    def generate(self, prompts: Prompts, new_tokens: int, is_filled: bool) -> tuple[Prompts, Clock]:
        options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        if self.is_patched:
            engine = self.model.paged
            if is_filled:
                self._fill_pool(prompts)
            clock = Clock(len(prompts))
            outputs = engine.generate(prompts, **options)
            clock.firsts = [output.metrics.time_to_first_token for output in outputs]
            return [output.token_ids for output in outputs], clock
        torch = self.torch
        ids, mask = self._padded(prompts)
        width = ids.shape[1]
        if is_filled:
            options["past_key_values"] = self._filled_cache(len(prompts), width - 1)
        clock = Clock(len(prompts))

        def look(ids: Any, scores: Any) -> Any:
            for row in range(len(ids)):
                clock.saw(row)
            return torch.zeros(len(ids), dtype=torch.bool)

        done = self.model.generate(ids, attention_mask=mask, stopping_criteria=[look], **options)
        rows: Prompts = done[:, width:].tolist()
        return rows, clock

    def _padded(self, prompts: Prompts) -> tuple[Any, Any]:
        width = max(map(len, prompts))
        ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return self.torch.tensor(ids), self.torch.tensor(mask)

    def judge(self, prompts: Prompts, expected: Prompts, actual: Prompts) -> str:
        """Whether another engine's tokens are stock's, which are expected, up to near ties."""
        from hf_paged.testing import compare_generations

        (ids, mask), torch = self._padded(prompts), self.torch
        sides = (torch.cat([ids, torch.tensor(tokens)], dim=1) for tokens in (expected, actual))
        options = {"max_new_tokens": len(expected[0]), "do_sample": False, "pad_token_id": 0}
        return compare_generations(self.model, ids, *sides, attention_mask=mask, **options).summary

    def read_seconds(self, prompts: Prompts, new_tokens: int) -> float | None:
        """Of one plain read of all weights, and of as many blocks as the prompts' rows have at their end.

        The fastest of five times that torch makes the dot product of each tensor with itself, as if of float32. None
        where a step doesn't read all weights, or reads what isn't a tensor of numbers.
        """
        torch, config = self.torch, self.model.config
        has_windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        if self.is_quantised or has_windows or not config.tie_word_embeddings or hasattr(config, "num_experts"):
            return None
        engine = self.model.paged
        blocks = sum((len(prompt) + new_tokens) // engine.config.block_size for prompt in prompts)
        tensors = [each.detach() for each in self.model.parameters()]
        tensors.append(engine.core.pool.kv_cache.tensor[:blocks])
        flat = [each.reshape(-1).view(torch.float32) for each in tensors]

        def seconds() -> float:
            started = time.perf_counter()
            for each in flat:
                torch.dot(each, each)
            return time.perf_counter() - started

        return min(seconds() for _ in range(5))

    def _fill_pool(self, prompts: Prompts) -> None:
        """Random keys and values as those of the prompts: their steps run no model, and leave blocks to be found."""
        engine, torch = self.model.paged, self.torch
        runner, vocab_size = engine.core.runner.packed, self.model.config.vocab_size
        runner.run = lambda tokens, metadata, attention, rows, *others, **named: torch.zeros(len(rows), vocab_size)
        engine.generate(prompts, max_new_tokens=1, do_sample=False)
        del runner.run
        pool = engine.core.pool.kv_cache.tensor
        for block, count in enumerate(engine.snapshot()["blocks"]):
            if count >= 0:  # it can't be found again
                continue
            if pool.dtype is torch.int8:  # codes of a head's tokens, then their scales
                heads, end = pool[block].flatten(-2), pool.shape[4] * (pool.shape[5] - 4)
                heads[..., :end].random_(-127, 128)
                heads[..., end:].view(torch.float32).fill_(1 / 64)
            else:
                pool[block].normal_()

    def _filled_cache(self, rows: int, length: int) -> Any:
        from transformers import DynamicCache

        config, dtype = self.model.config, self.model.dtype
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            shape = rows, config.num_key_value_heads, length, config.head_dim
            cache.update(self.torch.randn(shape, dtype=dtype), self.torch.randn(shape, dtype=dtype), layer)
        return cache


class LlamaCpp:
    """https://github.com/ggml-org/llama.cpp, through llama-cpp-python's bindings of its C functions."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, max_tokens: int, num_rows: int) -> None:
        import llama_cpp

        converted = folder / f"llama-cpp-{dtype}.gguf"
        if not converted.exists():
            write_gguf(folder, converted, dtype)
        self.weights = converted.stat().st_size
        self.lib = lib = llama_cpp
        lib.llama_backend_init()
        model = lib.llama_model_load_from_file(str(converted).encode(), lib.llama_model_default_params())
        if not model:
            raise ValueError(f"llama.cpp does not load {converted.name}")
        self.vocab_size = config_of(folder)["vocab_size"]
        options = lib.llama_context_default_params()
        options.n_seq_max, options.n_ctx, options.n_batch = num_rows, max_tokens, max_tokens
        options.n_outputs_max = num_rows
        options.n_threads = options.n_threads_batch = num_threads
        options.kv_unified = True
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which is slower, by far over bfloat16 keys
        options.type_k = options.type_v = 0 if dtype == "float32" else 30  # GGML_TYPE_F32, GGML_TYPE_BF16
        self.context = lib.llama_init_from_model(model, options)
        if not self.context:
            raise ValueError("llama.cpp makes no context for these keys and values")
        self.batch = lib.llama_batch_init(max_tokens, 0, 1)

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
        logits = self.lib.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())

    def generate(self, prompts: Prompts, new_tokens: int, is_filled: bool) -> tuple[Prompts, Clock]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        clock = Clock(len(prompts))
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        self._decode(rows)
        tokens = [[self._argmax(index)] for index, row in enumerate(rows) if row[3]]
        for row in range(len(prompts)):
            clock.saw(row)
        for step in range(new_tokens - 1):
            self._decode([(own[-1], len(prompts[row]) + step, row, True) for row, own in enumerate(tokens)])
            for row, own in enumerate(tokens):
                own.append(self._argmax(row))
        return tokens, clock


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values, in float32, of a file of safetensors in bfloat16, which numpy doesn't know."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            assert about["dtype"] == "BF16"
            bits = np.fromfile(path, np.uint16, (end - begin) // 2, offset=8 + size + begin)
            yield name, (bits.astype(np.uint32) << 16).view(np.float32).reshape(about["shape"])


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """The weights in llama.cpp's format, without a vocabulary.

    Raises:
        ValueError: This program doesn't know how, for such a model.
    """
    import gguf

    config = config_of(folder)
    kind = config["model_type"].removesuffix("_text")
    if kind not in ("llama", "qwen3", "gemma3"):
        raise ValueError(f"no GGUF is written here for {kind}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config["num_hidden_layers"])
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    rope = config["rope_parameters"]
    kinds = gguf.GGMLQuantizationType
    own = {"float32": kinds.F32, "bfloat16": kinds.BF16, "int8": kinds.Q8_0}[dtype]
    writer = gguf.GGUFWriter(path, kind, use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if kind == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    for file in sorted(folder.glob("*.safetensors")):
        for name, value in tensors(file):
            part = name.split(".")[-2]
            if kind == "llama" and part in ("q_proj", "k_proj"):  # whose rotary pairs are neighbours there
                count = heads if part == "q_proj" else kv_heads
                value = value.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(value.shape)
            if value.ndim == 1:
                value = value + np.float32(kind == "gemma3")  # whose norms multiply by 1 + weight here
            stored = own if value.ndim > 1 else kinds.F32
            target = names.get_name(name, try_suffixes=(".weight",))
            writer.add_tensor(target, gguf.quants.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class OpenVino:
    """https://github.com/openvinotoolkit/openvino.genai: its continuous batching, over what optimum exported."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, max_tokens: int) -> None:
        import openvino
        import openvino_genai

        converted = folder / f"openvino-{'int8' if dtype == 'int8' else 'bfloat16'}"
        if not converted.exists():
            from optimum.intel import OVModelForCausalLM

            options = {"load_in_8bit": dtype == "int8", "compile": False, "torch_dtype": "bfloat16"}
            OVModelForCausalLM.from_pretrained(folder, export=True, **options).save_pretrained(converted)
        self.genai, self.openvino = openvino_genai, openvino
        config = config_of(folder)
        width = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        self.weights = sum(file.stat().st_size for file in converted.glob("*.bin"))
        if dtype == "float32":
            self.weights *= 2  # which it computes with, from a file of the same numbers in bfloat16
        has_bfloat16 = {"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text().split())
        precision = "bf16" if dtype != "float32" and has_bfloat16 else "f32"  # it has no other for keys without these
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = -(-max_tokens * width * (2 if precision == "bf16" else 4) * 5 // 4 // 2**30)  # GiB
        scheduler.max_num_batched_tokens = 2048
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": num_threads,
            "KV_CACHE_PRECISION": precision,
        }
        self.model = openvino_genai.ContinuousBatchingPipeline(
            str(converted), scheduler_config=scheduler, device="CPU", properties=properties, tokenizer_properties={}
        )

    def generate(self, prompts: Prompts, new_tokens: int, is_filled: bool) -> tuple[Prompts, Clock]:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        config.set_eos_token_id(0)  # or it finds fault with none
        clock = Clock(len(prompts))
        handles = [
            self.model.add_request(row, self.openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for row, prompt in enumerate(prompts)
        ]
        tokens: Prompts = [[] for _ in prompts]
        while self.model.has_non_finished_requests():
            self.model.step()
            for row, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        clock.saw(row)
                        tokens[row] += output.generated_ids
        return tokens, clock


class Vllm:
    """https://github.com/vllm-project/vllm for CPUs, its engine in this process."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, max_tokens: int, num_rows: int) -> None:
        if dtype == "int8":
            raise ValueError("vLLM for CPUs has int8 only for checkpoints that were made with it")
        config = config_of(folder)
        width = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config.get("head_dim", 128)
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(1 + max_tokens * width * BYTES[dtype] * 5 // 4 // 2**30),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        }
        from vllm import LLM, SamplingParams

        sizes = {"max_model_len": max_tokens, "max_num_seqs": num_rows}
        # Compiling takes minutes on two cores, anew for each cell.
        llm = LLM(str(folder), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, seed=0, **sizes)
        self.engine: Any = llm.llm_engine
        self.params = SamplingParams
        self.weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) * BYTES[dtype] // 2

    def generate(self, prompts: Prompts, new_tokens: int, is_filled: bool) -> tuple[Prompts, Clock]:
        params = self.params(max_tokens=new_tokens, ignore_eos=True, detokenize=False, temperature=0.0)
        clock = Clock(len(prompts))
        for row, prompt in enumerate(prompts):
            self.engine.add_request(str(row), {"prompt_token_ids": prompt}, params)
        tokens: Prompts = [[] for _ in prompts]
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                row = int(output.request_id)
                clock.saw(row)
                tokens[row] = list(output.outputs[0].token_ids)
        return tokens, clock


def make(engine: str, folder: Path, dtype: str, num_threads: int, max_tokens: int, num_rows: int) -> Any:
    if engine == "llama.cpp":
        return LlamaCpp(folder, dtype, num_threads, max_tokens, num_rows)
    if engine == "openvino":
        return OpenVino(folder, dtype, num_threads, max_tokens)
    if engine == "vllm":
        return Vllm(folder, dtype, num_threads, max_tokens, num_rows)
    return Transformers(engine, folder, dtype, num_threads, max_tokens)


def peak_bytes() -> int:
    """The most resident memory of this process since `/proc/self/clear_refs` was written to."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(found.split()[1]) * 1024


def main() -> None:
    name, folder, dtype, *numbers = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_DATA, (GIB * 2**30, GIB * 2**30))
    engine = make(name, Path(folder), dtype, *map(int, numbers))
    vocab_size = config_of(Path(folder))["vocab_size"]

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        draw = np.random.default_rng(order["seed"])
        prompts = [draw.integers(FIRST_TOKEN, vocab_size, length).tolist() for length in order["lengths"]]
        if "actual" in order:
            return {"verdict": engine.judge(prompts, order["expected"], order["actual"])}
        Path("/proc/self/clear_refs").write_text("5")
        tokens, clock = engine.generate(prompts, order["new_tokens"], order["is_filled"])
        seconds = clock.seconds()
        found = {
            "seconds": seconds,
            "first": statistics.median(clock.firsts),
            "tokens": tokens,
            "bytes": peak_bytes() - engine.weights,
        }
        if name.startswith("hf_paged") and (len(prompts) == 1 or order["is_filled"]):
            found["read"] = engine.read_seconds(prompts, order["new_tokens"])
        return found

    answer_orders(answer)


if __name__ == "__main__":
    main()
