"""Finds every specialisation of the Triton kernels that serving some models launches: a soak, of the keys alone.

The models have their real shapes but for layers, vocabulary and experts, and weights that take no memory; what a
kernel or a matrix product would compute is left out, since only the keys of the launches count. So 256 rows, or a
prompt of 20,000 tokens, take a moment on any CPU.

    python benchmarks/kernel_soak.py             # says what differs from the written census
    python benchmarks/kernel_soak.py --write     # and writes it anew
"""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as hf
from kernel_census import WRITTEN, Cell, Census, Specialisation, differences, read, record, write
from torch import Tensor, nn
from tqdm import tqdm

import hf_paged
from hf_paged.attention.backends import triton as triton_backend
from hf_paged.engine import executor, warm_up
from hf_paged.kernels import availability, cpu_layers, launch, reference, row_sampling
from hf_paged.kernels.latent_maps import LatentMaps
from hf_paged.kernels.low_rank import LowRank
from hf_paged.kernels.philox import DrawGrid
from hf_paged.kernels.triton_layers import TritonLayers
from hf_paged.model import adapters, cuda_graph, layers, mixers
from hf_paged.model.adapter_files import AdapterWeights
from hf_paged.model.adapter_store import AdapterStore
from hf_paged.model.gpu_layers import GPULayer
from hf_paged.model.peft_layers import OF_LATENTS
from hf_paged.model.scans import PackedScans, functions_of
from hf_paged.sampling import random

# What the launchers read off a device; an sm_100 is an sm_90 to them, but for its processors.
GPUS = {
    "sm_80": launch.Device(108, False, shared_memory=166_912, reads_shared_factors=False, is_nvidia=True),
    "sm_90": launch.Device(132, True, shared_memory=232_448, reads_shared_factors=True, is_nvidia=True),
    "sm_120": launch.Device(188, True, shared_memory=101_376, reads_shared_factors=False, is_nvidia=True),
    "gfx942": launch.Device(304, False, shared_memory=65_536, reads_shared_factors=False, lanes=64),
}
_trial_launch = availability.launch_failure.__wrapped__
POOLS = ("auto", "fp8_e4m3", "int8")

_FEW = {"vocab_size": 512, "num_hidden_layers": 2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}


def _config(kind: Any, hidden: int, intermediate: int, heads: tuple[int, int], positions: int, **more: Any) -> Any:
    """The real shape, but for what is few; heads: of queries, and of keys and values."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "max_position_embeddings": positions}
    counts = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return kind(**_FEW | sizes | counts | more)


# Of Gemma and DeepSeek other positions than the real ones', for sequences of one length in all models.
MODELS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "Llama-3.1-8B": lambda: _config(hf.LlamaConfig, 4096, 14336, (32, 8), 131072),
    "Qwen3-0.6B": lambda: _config(hf.Qwen3Config, 1024, 3072, (16, 8), 40960, head_dim=128),
    "Qwen3-30B-A3B": lambda: _config(
        hf.Qwen3MoeConfig, 2048, 6144, (32, 4), 40960, **_EXPERTS, moe_intermediate_size=16, head_dim=128
    ),
    "gemma-2-9b": lambda: _config(
        hf.Gemma2Config, 3584, 14336, (16, 8), 32768, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256
    ),
    "gpt-oss-20b": lambda: _config(
        hf.GptOssConfig, 2880, 16, (64, 8), 131072, **_EXPERTS, head_dim=64, sliding_window=128
    ),
    "DeepSeek-V2-Lite": lambda: _config(
        *(hf.DeepseekV2Config, 2048, 10944, (16, 16), 32768),
        **{"q_lora_rank": None, "first_k_dense_replace": 2, "num_experts_per_tok": 2},
    ),
}

# Of these only the kernels over states are looked at, which no pool changes.
STATE_MODELS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "Qwen3-Next-80B-A3B": lambda: _config(
        hf.Qwen3NextConfig, 2048, 5120, (16, 2), 32768, **_EXPERTS, moe_intermediate_size=16, head_dim=256,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    ),
    "Kimi-Linear-48B-A3B": lambda: hf.KimiLinearConfig(
        **_FEW, hidden_size=2304, intermediate_size=9216, max_position_embeddings=32768, num_attention_heads=32,
        num_key_value_heads=32, **_EXPERTS, moe_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Bamba-9B": lambda: _config(
        hf.BambaConfig, 4096, 14336, (32, 8), 32768, attn_layer_indices=[1], mamba_n_heads=128, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1,
    ),
    "falcon-mamba-7b": lambda: hf.FalconMambaConfig(
        **_FEW, hidden_size=4096, intermediate_size=8192, state_size=16, max_position_embeddings=32768
    ),
    "LFM2-1.2B": lambda: _config(
        hf.Lfm2Config, 2048, 12288, (32, 8), 32768, layer_types=["conv", "full_attention"]
    ),
}  # fmt: skip


def build(name: str, device: str = "cpu") -> hf.PreTrainedModel:
    """A model of the table in bfloat16, each of whose matrices is one zero, repeated."""
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config((MODELS | STATE_MODELS)[name](), dtype=torch.bfloat16).eval()
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            fill = torch.ones if parameter.ndim == 1 else torch.zeros  # experts are few and small
            is_large = parameter.ndim == 2
            numbers = fill(() if is_large else parameter.shape, dtype=parameter.dtype, device=device)
            numbers = numbers.expand(parameter.shape)
            setattr(module, key, nn.Parameter(numbers, requires_grad=False))
        for key, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(key, torch.ones(buffer.shape, dtype=buffer.dtype, device=device), persistent=False)
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model


@cache
@torch.inference_mode(False)
def _zeros(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Enough for what a layer computes in any step, made once: most of a soak's time would go into them."""
    return torch.zeros(2048 * 28672, dtype=dtype, device=device)


def _linear(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.stride() != (0, 0):
            return own(states, weight, bias)
        shape = *states.shape[:-1], weight.shape[0]
        if weight.shape[0] == _FEW["vocab_size"]:  # logits are written to
            return states.new_zeros(shape)
        return _zeros(states.dtype, states.device)[: math.prod(shape)].view(shape)

    return linear


def _nothing(states: Tensor, width: int) -> Tensor:
    """`[T, num_heads, width]` zeros."""
    shape = *states.shape[:2], width
    return _zeros(states.dtype, states.device)[: math.prod(shape)].view(shape)


def _absorb(maps: LatentMaps, query: Tensor) -> Tensor:
    return _nothing(query, maps.latent_dim + query.shape[2] - maps.key.shape[1])


def _project(maps: LatentMaps, latents: Tensor) -> Tensor:
    return _nothing(latents, maps.value.shape[1])


def _expanded(query: Tensor, *_: object, read: Any, **__: object) -> Tensor:
    return _project(read.__self__, query)  # of prompts over latents, which torch attends to


class _Layers(TritonLayers):
    """The launchers, and numbers where it is tried out which layers can be fused: few rows."""

    FEW = 8

    def _rms_norm(self, states: Tensor, weight: Tensor, *settings: Any) -> Tensor:
        output = super()._rms_norm(states, weight, *settings)
        if states.numel() <= self.FEW * weight.numel():
            on_host(output).copy_(_computing(self.dtype)._rms_norm(on_host(states), on_host(weight), *settings))
        return output

    def _gate(self, gate: Tensor, up: Tensor, *settings: Any) -> Tensor:
        output = super()._gate(gate, up, *settings)
        if gate.numel() <= self.FEW * gate.shape[-1]:
            on_host(output).copy_(_computing(self.dtype)._gate(on_host(gate), on_host(up), *settings))
        return output

    def _rotary(self, query: Tensor, key: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        outputs = super()._rotary(query, key, *settings)
        if query.shape[2] <= self.FEW:
            given = [on_host(value) if isinstance(value, Tensor) else value for value in (query, key, *settings)]
            for output, numbers in zip(outputs, _computing(self.dtype)._rotary(*given)):
                on_host(output).copy_(numbers)
        return outputs


def on_host(tensor: Tensor) -> Tensor:
    """The tensor; of one on a pretended device, what it is in the host's memory."""
    return tensor if tensor.device.type == "cpu" else torch.ops.pretend_cuda.host(tensor)


def _computing(dtype: torch.dtype) -> cpu_layers.CPULayers:
    kernels = cpu_layers.load(dtype)
    if isinstance(kernels, str):
        raise RuntimeError(f"the census needs the layer kernels in C, which {kernels}")
    return kernels


class _Again:
    """A recording without a device to record: the function, run again; its output stays where it was."""

    num_bytes = 0

    def __init__(self, function: Callable[[], Tensor], replays: list[int]) -> None:
        """`replays` grows by the rows of each."""
        self._function = function
        self._replays = replays
        self.output = function()

    def replay(self) -> None:
        self._replays.append(len(self.output))
        with torch.inference_mode():  # the output is a tensor of it
            self.output.copy_(self._function())


@contextmanager
def pretending(gpu: str) -> Iterator[list[int]]:
    """Within it, tensors in the host's memory are served as those of such a GPU are: the rows of replayed steps."""
    replays: list[int] = []
    with ExitStack() as stack:
        for owner, name, instead in (
            (launch.Device, "of", staticmethod(lambda _: GPUS[gpu])),
            (launch, "is_interpreting", lambda: True),  # so that the Triton backend takes CPU tensors
            (triton_backend, "launch_failure", lambda _: None),  # nothing is computed that could be right
            (layers, "layer_kernels", lambda dtype, _: _Layers(dtype)),
            (adapters, "layer_kernels", lambda dtype, _: _Layers(dtype)),
            (cuda_graph, "recorder", lambda _: lambda function: _Again(function, replays)),
            (GPULayer, "agrees", lambda *_: True),  # nor that could be the same
            (nn.functional, "linear", _linear(nn.functional.linear)),
            (LatentMaps, "absorb", _absorb),
            (LatentMaps, "project", _project),
            (reference, "paged_attention", _expanded),
            (executor, "draw_grid", lambda _: DrawGrid(8192)),
            (warm_up, "draw_grid", lambda _: DrawGrid(8192)),
            (mixers, "takes_all_rows", lambda _: True),
            (mixers, "find_packed_scans", lambda mixer, *_: PackedScans(*functions_of(mixer))),
            (random, "where", lambda _: (0, 0)),  # of a generator of the CPU's
            (random, "move", lambda *_: None),
            (row_sampling, "sample_rows", _first(row_sampling.sample_rows)),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield replays


def _first(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Token 0, for what a kernel that computes nothing would have chosen."""

    def sampled(*values: Any, **named: Any) -> Tensor:
        return sample(*values, **named).zero_()

    return sampled


def prompts(*lengths: int) -> list[list[int]]:
    """Token ids, the first of which differ."""
    return [[1 + (7 * row + column) % 500 for column in range(length)] for row, length in enumerate(lengths)]


def together(model: Any, lengths: Iterable[int], **settings: Any) -> None:
    """Serves requests of these lengths; those that fit into a step begin in one."""
    model.paged.pause()  # else the first would be on its way when the next comes
    requests = [model.paged.submit(ids, **{"max_new_tokens": 2} | settings) for ids in prompts(*lengths)]
    model.paged.resume()
    for request in requests:
        request.result(timeout=600)


def serve(model: Any) -> None:
    """All that requests make the engine do, over lengths from 1 to 20,000 and batches of 1 to 256 rows."""
    ids = torch.tensor(prompts(37, 37, 37))
    for length in (1, 2, 4, 8, 32, 128, 20_000):
        together(model, [length])
    together(model, [20_000])  # behind what the prefix cache has of it
    together(model, range(1, 41), max_new_tokens=4)
    together(model, [3] * 256)
    together(model, [5] * 17, max_new_tokens=30)  # into the next block
    together(model, [5, 17, 16, 33, 700], do_sample=True, top_k=20, temperature=0.7, max_new_tokens=5)
    model.generate(ids, num_beams=4, num_return_sequences=2, max_new_tokens=20)
    together(model, [5, 17], do_sample=True, typical_p=0.9)
    model.generate(ids, do_sample=True, num_return_sequences=5, max_new_tokens=6)
    model.generate(ids[:1, :1], max_new_tokens=3)


def serve_samples(model: Any) -> None:
    """Steps that are not recorded: of few tokens and of many, and of rows that share enough to read it together."""
    for lengths in ([2], [4], [8], [32], range(1, 41), [5, 17, 16, 33, 700]):
        together(model, lengths, max_new_tokens=4)
    model.generate(torch.tensor(prompts(3000)), do_sample=True, num_return_sequences=20, max_new_tokens=3)


def serve_adapters(model: Any) -> None:
    """Steps of few tokens and of many, whose rows have an adapter behind each linear layer."""
    linears = {
        name: LowRank(own.weight.new_zeros(8, own.in_features), own.weight.new_zeros(own.out_features, 8), 1.0)
        for name, own in model.named_modules()
        if isinstance(own, nn.Linear) and not name.endswith(OF_LATENTS)
    }
    store = model.paged.core.adapters.store = AdapterStore(_no_files, 0)
    store.add("one", AdapterWeights(linears, {}, {}, {}))
    for lengths in ([2], range(1, 41), [5, 17, 16, 33, 700]):
        together(model, lengths, max_new_tokens=4, adapter="one")


def _no_files(path: Path) -> AdapterWeights:
    raise FileNotFoundError(path)


def serve_short_of_memory(model: Any) -> None:
    """Rows that the pool has no room for: swapped out and in."""
    ids = torch.tensor(prompts(30, 30, 30))
    together(model, [20] * 30, max_new_tokens=40)
    assert model.paged.stats().num_preemptions > 0
    model.generate(ids, num_beams=3, max_new_tokens=20)


def serve_states(model: Any) -> None:
    """Steps of one length and of several, recorded and not."""
    together(model, [3] * 256)
    for lengths in ([1], [2], range(1, 41), [5, 17, 16, 33, 700]):
        together(model, lengths, max_new_tokens=4)
    model.generate(torch.tensor(prompts(3000)), do_sample=True, num_return_sequences=3, max_new_tokens=3)


SERVICES: tuple[tuple[dict[str, Any], Callable[[Any], None]], ...] = (
    ({"num_blocks": 4000}, serve),
    ({"num_blocks": 600, "cuda_graphs": False}, serve_samples),
    ({"num_blocks": 600, "cuda_graphs": False}, serve_adapters),
    ({"num_blocks": 64, "preemption": "swap", "cuda_graphs": False, "max_num_seqs": 32}, serve_short_of_memory),
)
STATE_SERVICES = (({"num_blocks": 4000}, serve_states),)
CELLS = [
    Cell(name, gpu, pool)
    for name in MODELS
    for gpu in GPUS
    for pool in POOLS
    if (name, pool) != ("DeepSeek-V2-Lite", "int8")  # which takes no latents
] + [Cell(name, gpu, "auto") for name in STATE_MODELS for gpu in GPUS]


def soak(cell: Cell, device: str = "cpu") -> set[Specialisation]:
    """What a model launches: with and without memory to spare, decoding in the shape of CUDA graphs and without.

    Args:
        cell: What is soaked.
        device: Where the tensors say they are. Their memory must be the host's.
    """
    model = build(cell.model, device)
    found: set[Specialisation] = set()
    for settings, service in STATE_SERVICES if cell.model in STATE_MODELS else SERVICES:
        settings = {"attention_backend": "triton", "kv_cache_dtype": cell.pool, "use_async_batching": True} | settings
        with hf_paged.patched(model, **settings), pretending(cell.gpu) as replays, record() as launches:
            # The trial that a pool on a GPU begins with.
            _trial_launch(torch.device(device))
            service(model)
        if (256 in replays) != (service in (serve, serve_states)):
            raise RuntimeError(f"decode steps took another way than they were meant to: {sorted(set(replays))}")
        gc.collect()  # the pool
        found |= set(launches)
    if cell.model in STATE_MODELS:
        found = {key for key in found if key.kernel.startswith("triton_scan.")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the census anew")
    arguments = parser.parse_args()
    found: Census = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for cell, keys in zip(CELLS, tqdm(pool.map(soak, CELLS), total=len(CELLS), desc="soaks", mininterval=5)):
            for key in keys:
                found.setdefault(key, set()).add(cell)
    lines = differences(found, read() if WRITTEN.exists() else {}, CELLS)
    print(*lines, f"{len(found)} specialisations; {len(lines)} differ from what is written", sep="\n")
    if arguments.write:
        write(found)
    elif lines:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
