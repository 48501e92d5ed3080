"""Tensors that don't fit: no kernel reads or writes beyond them, and a call means what it means without the kernels.

`make sanitize` runs this file, too, with kernels that report every access out of bounds.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import hf_paged
from helpers.kernel_cases import random_tensor, repaired_interpreter, step_metadata
from helpers.models import MODELS, build, random_ids
from helpers.pairs import Pair, assert_same
from hf_paged.attention.backends.registry import choose
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.kernels import cpu, cpu_layers
from hf_paged.kernels.layers import InputError, LayerKernels, _row_stride
from hf_paged.model.fused_rotary import _Rotary
from hf_paged.model.layers import Layers

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
IS_SANITIZED = "-fsanitize" in os.environ.get("CC", "")


def exact(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """An allocation of its own, which ends with the last element."""
    return random_tensor(*shape, dtype=dtype) if shape else torch.ones((), dtype=dtype)


def layer_kernels(kind: str, dtype: torch.dtype = F32) -> LayerKernels:
    if kind == "c":
        loaded = cpu_layers.load(dtype)
        assert isinstance(loaded, LayerKernels), loaded
        return loaded
    from hf_paged.kernels.triton_layers import TritonLayers

    return TritonLayers(dtype)


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, or the kind of error."""
    try:
        return call(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return "an IndexError" if isinstance(error, IndexError) else "an error"


@pytest.mark.skipif(not IS_SANITIZED, reason="make sanitize")
def test_the_sanitizers_see(tmp_path: Path) -> None:
    """A kernel that is called behind the checks' back, with a cosine for one token of two."""
    report = tmp_path / "report"

    def call() -> None:
        faulthandler.disable()
        with report.open("w") as file:
            os.dup2(file.fileno(), 2)
        layers: Any = layer_kernels("c")
        layers._rotary(exact(1, 1, 2, 16), exact(1, 1, 2, 16), exact(1, 1, 16), exact(1, 1, 16), False, False)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join(60)
    assert process.exitcode not in (0, None) and "heap-buffer-overflow" in report.read_text()


# Each kernel says no


def norm_inputs(**given: Any) -> dict[str, Any]:
    return {"states": exact(1, 5, 24), "weight": exact(24), "eps": 1e-5, "offset": 0.0, "rounds_first": True} | given


BAD_NORMS: dict[str, dict[str, Any]] = {
    "a shorter weight": {"weight": exact(23)},
    "a longer weight": {"weight": exact(25)},
    "a weight for all": {"weight": exact(1)},
    "a number": {"weight": torch.tensor(1.0)},
    "two weights": {"weight": exact(5, 24)},
    "no elements": {"states": exact(5, 0), "weight": exact(0)},
    "a scalar": {"states": torch.tensor(1.0), "weight": exact(1)},
    "strided": {"states": exact(5, 48)[:, ::2]},
    "strided weight": {"weight": exact(48)[::2]},
    "transposed": {"states": exact(24, 5).t()},
    "expanded": {"states": exact(1, 24).expand(5, 24)},
    "half the bytes": {"states": exact(1, 5, 24, dtype=BF16), "weight": exact(24, dtype=BF16)},
    "half the bytes of states": {"states": exact(1, 5, 24, dtype=BF16)},
    "half the bytes of the weight": {"weight": exact(24, dtype=BF16)},
    "twice the bytes": {"states": exact(5, 24, dtype=torch.float64), "weight": exact(24, dtype=torch.float64)},
    "nowhere": {"states": torch.empty(5, 24, device="meta"), "weight": torch.empty(24, device="meta")},
}


def gate_inputs(**given: Any) -> dict[str, Any]:
    return {"gate": exact(1, 5, 24), "up": exact(1, 5, 24), "linear": 1.0, "cubic": 0.0} | given


BAD_GATES: dict[str, dict[str, Any]] = {
    "fewer rows": {"up": exact(1, 4, 24)},
    "shorter rows": {"up": exact(1, 5, 23)},
    "longer rows": {"up": exact(1, 5, 25)},
    "one row": {"up": exact(1, 1, 24)},
    "fewer dimensions": {"up": exact(5, 24)},
    "no elements": {"gate": exact(5, 0), "up": exact(5, 0)},
    "scalars": {"gate": torch.tensor(1.0), "up": torch.tensor(1.0)},
    "every other": {"gate": exact(1, 5, 48)[..., ::2]},
    "uneven rows": {"gate": exact(2, 5, 24)[:, :3], "up": exact(2, 3, 24)},
    "transposed": {"up": exact(1, 24, 5).transpose(1, 2)},
    "half the bytes": {"gate": exact(1, 5, 24, dtype=BF16), "up": exact(1, 5, 24, dtype=BF16)},
    "half the bytes of one": {"up": exact(1, 5, 24, dtype=BF16)},
    "nowhere": {"gate": torch.empty(5, 24, device="meta"), "up": torch.empty(5, 24, device="meta")},
}


def rotary_inputs(**given: Any) -> dict[str, Any]:
    inputs = {"query": exact(1, 3, 5, 12), "key": exact(1, 2, 5, 12), "cos": exact(1, 5, 12), "sin": exact(1, 5, 12)}
    return inputs | {"interleaved": False, "rounds": True} | given


TENSORS = {name: value for name, value in rotary_inputs().items() if isinstance(value, torch.Tensor)}
BAD_ROTARIES: dict[str, dict[str, Any]] = {
    **{f"{tokens} angles": {"cos": exact(1, tokens, 12), "sin": exact(1, tokens, 12)} for tokens in (0, 1, 3, 4, 6)},
    **{f"{width} wide": {"cos": exact(1, 5, width), "sin": exact(1, 5, width)} for width in (1, 3, 11, 13, 14, 24)},
    "fewer sines": {"sin": exact(1, 4, 12)},
    "shorter sines": {"sin": exact(1, 5, 10)},
    "fewer keys": {"key": exact(1, 2, 4, 12)},
    "more keys": {"key": exact(1, 2, 6, 12)},
    "shorter keys": {"key": exact(1, 2, 5, 10)},
    "odd heads": {"query": exact(1, 3, 5, 3), "key": exact(1, 2, 5, 3), "cos": exact(1, 5, 4), "sin": exact(1, 5, 4)},
    "two dimensions": {"cos": exact(5, 12), "sin": exact(5, 12)},
    "four dimensions": {"cos": exact(1, 1, 5, 12), "sin": exact(1, 1, 5, 12)},
    "a batch": {"query": exact(2, 3, 5, 12)},
    "a batch of all": {name: value.expand(2, *value.shape[1:]).clone() for name, value in TENSORS.items()},
    "every other": {"query": exact(1, 3, 5, 24)[..., ::2]},
    "strided angles": {"cos": exact(1, 5, 24)[..., ::2]},
    "expanded angles": {"cos": exact(1, 1, 12).expand(1, 5, 12), "sin": exact(1, 1, 12).expand(1, 5, 12)},
    "half the bytes of angles": {"cos": exact(1, 5, 12, dtype=BF16), "sin": exact(1, 5, 12, dtype=BF16)},
    "half the bytes of keys": {"key": exact(1, 2, 5, 12, dtype=BF16)},
    "half the bytes": {name: value.bfloat16() for name, value in TENSORS.items()},
    "nowhere": {name: value.to("meta") for name, value in TENSORS.items()},
}
BAD = [
    *(("rms_norm", name) for name in BAD_NORMS),
    *(("gate", name) for name in BAD_GATES),
    *(("rotary", name) for name in BAD_ROTARIES),
]
INPUTS: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, dict[str, Any]]]] = {
    "rms_norm": (norm_inputs, BAD_NORMS),
    "gate": (gate_inputs, BAD_GATES),
    "rotary": (rotary_inputs, BAD_ROTARIES),
}


@pytest.mark.parametrize("kind", ["c", "triton"])
@pytest.mark.parametrize(("operation", "name"), BAD, ids=str)
def test_layers_refuse(kind: str, operation: str, name: str) -> None:
    """Before anything is read; the message names what was given."""
    make, bad = INPUTS[operation]
    if kind == "triton" and name == "nowhere":
        pytest.skip("a launch says so")
    with pytest.raises(InputError, match=rf"^{operation} takes .*got .*float"):
        getattr(layer_kernels(kind), operation)(**make(**bad[name]))


@pytest.mark.parametrize("operation", INPUTS)
def test_layers_take_what_fits(operation: str) -> None:
    """Else the test above would pass with kernels that take nothing."""
    getattr(layer_kernels("c"), operation)(**INPUTS[operation][0]())
    with repaired_interpreter():
        getattr(layer_kernels("triton"), operation)(**INPUTS[operation][0]())


def test_evenly_spaced_rows() -> None:
    """Against the addresses of all rows, for random views."""
    rng = random.Random(0)
    for _ in range(600):
        states = torch.empty([rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(1, 4))])
        for _ in range(rng.randint(0, 3)):
            dim = rng.randrange(states.ndim)
            how = rng.choice(("cut", "step", "transpose", "expand", "unsqueeze"))
            if how == "cut":
                states = states.narrow(dim, 0, rng.randint(1, states.shape[dim]))
            elif how == "step":
                states = states[(slice(None),) * dim + (slice(None, None, 2),)]
            elif how == "transpose":
                states = states.transpose(dim, rng.randrange(states.ndim))
            elif how == "unsqueeze":
                states = states.unsqueeze(dim)
            elif states.shape[dim] == 1:
                states = states.expand([*states.shape[:dim], 2, *states.shape[dim + 1 :]])
        step = _row_stride(states)
        offsets = torch.zeros(states.shape, dtype=torch.int64)
        for dim, stride in enumerate(states.stride()):
            index = torch.arange(states.shape[dim]) * stride
            offsets += index.view([-1 if d == dim else 1 for d in range(states.ndim)])
        rows = offsets.reshape(-1, states.shape[-1])
        if step is not None:
            expected = torch.arange(len(rows))[:, None] * step + torch.arange(states.shape[-1])
            assert torch.equal(rows, expected), (states.shape, states.stride())
        elif states.shape[-1] > 1 and states.stride(-1) == 1:
            assert len(set(rows[:, 0].diff().tolist())) > 1, (states.shape, states.stride())


# The paged operations


def pool_inputs(dtype: torch.dtype = F32) -> dict[str, Any]:
    metadata = step_metadata([[2], [0, 1]], [1, 1], [4, 9], 8, 3, CPU)
    return {
        "key": exact(2, 2, 16, dtype=dtype),
        "value": exact(2, 2, 16, dtype=dtype),
        "query": exact(2, 4, 16, dtype=dtype),
        "output": exact(2, 4, 16, dtype=dtype),
        "kv_cache": exact(4, 2, 2, 2, 8, 16, dtype=dtype),
        "layer": 1,
        "metadata": metadata,
        "slots": metadata.slot_mapping,
        "sinks": None,
    }


def run_write(kernels: cpu.CPUKernels, i: dict[str, Any]) -> None:
    cpu.StepCalls(kernels, i["kv_cache"]).write(i["key"], i["value"], i["layer"], i["slots"])


def all_rows(step: cpu.StepCalls, metadata: AttentionMetadata) -> cpu.Rows:
    given = metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, 2, metadata.max_decode_len
    return step.rows(*given, metadata.query_tiles(2, 0))


def run_decode(kernels: cpu.CPUKernels, i: dict[str, Any]) -> None:
    metadata = i["metadata"]
    step = cpu.StepCalls(kernels, i["kv_cache"])
    step.attend(i["query"], i["output"], i["layer"], all_rows(step, metadata), 0.25, None, None, i["sinks"])


def metadata_of(**attributes: Any) -> AttentionMetadata:
    metadata = step_metadata([[2], [0, 1]], [1, 1], [4, 9], 8, 3, CPU)
    vars(metadata).update(attributes)
    return metadata


POOLS: dict[str, dict[str, Any]] = {
    "a layer too many": {"layer": 2},
    "a layer before the first": {"layer": -1},
    "another head dim": {"kv_cache": exact(4, 2, 2, 2, 8, 12)},
    "another dtype": {"kv_cache": exact(4, 2, 2, 2, 8, 16, dtype=BF16)},
    "keys alone": {"kv_cache": exact(4, 2, 1, 2, 8, 16)},
    "a part of a pool": {"kv_cache": exact(4, 2, 2, 3, 8, 16)[:, :, :, :2]},
    "a pool nowhere": {"kv_cache": torch.empty(4, 2, 2, 2, 8, 16, device="meta")},
}
BAD_WRITES: dict[str, dict[str, Any]] = POOLS | {
    "fewer keys": {"key": exact(1, 2, 16)},
    "fewer values": {"value": exact(1, 2, 16)},
    "more slots": {"slots": torch.arange(3)},
    "fewer slots": {"slots": torch.arange(1)},
    "shorter keys": {"key": exact(2, 2, 15)},
    "a head less": {"value": exact(2, 1, 16)},
    "a head more": {"key": exact(2, 3, 16), "value": exact(2, 3, 16)},
    "flat keys": {"key": exact(2, 32)},
    "every other": {"key": exact(2, 2, 32)[..., ::2]},
    "half the bytes": {"key": exact(2, 2, 16, dtype=BF16), "value": exact(2, 2, 16, dtype=BF16)},
    "half the bytes of values": {"value": exact(2, 2, 16, dtype=BF16)},
    "narrow slots": {"slots": torch.arange(2, dtype=torch.int32)},
    "every other slot": {"slots": torch.arange(4)[::2]},
    "nowhere": {"key": torch.empty(2, 2, 16, device="meta")},
}
BAD_DECODES: dict[str, dict[str, Any]] = POOLS | {
    "fewer queries": {"query": exact(1, 4, 16), "output": exact(1, 4, 16)},
    "a smaller output": {"output": exact(1, 4, 16)},
    "an output of another dtype": {"output": exact(2, 4, 16, dtype=BF16)},
    "a strided output": {"output": exact(2, 4, 32)[..., :16]},
    "heads that don't share": {"query": exact(2, 5, 16), "output": exact(2, 5, 16)},
    "shorter heads": {"query": exact(2, 4, 15), "output": exact(2, 4, 15)},
    "flat queries": {"query": exact(2, 64), "output": exact(2, 64)},
    "every other": {"query": exact(2, 4, 32)[..., ::2]},
    "half the bytes": {"query": exact(2, 4, 16, dtype=BF16), "output": exact(2, 4, 16, dtype=BF16)},
    "fewer sinks": {"sinks": exact(3)},
    "more sinks": {"sinks": exact(5)},
    "one sink": {"sinks": torch.tensor(1.0)},
    "other blocks": {"kv_cache": exact(4, 2, 2, 2, 4, 16)},
    "fewer lengths": {"metadata": metadata_of(seq_lens=torch.tensor([4], dtype=torch.int32))},
    "wide lengths": {"metadata": metadata_of(seq_lens=torch.tensor([4, 9]))},
    "fewer tables": {"metadata": metadata_of(block_tables=torch.tensor([[2, 3]], dtype=torch.int32))},
    "shorter tables": {"metadata": metadata_of(block_tables=torch.tensor([[2], [0]], dtype=torch.int32))},
    "wide tables": {"metadata": metadata_of(block_tables=torch.tensor([[2, 3], [0, 1]]))},
    "strided tables": {"metadata": metadata_of(block_tables=torch.tensor([[2, 0], [3, 1]], dtype=torch.int32).t())},
}


@pytest.mark.parametrize(("run", "bad"), [(run_write, BAD_WRITES), (run_decode, BAD_DECODES)], ids=["write", "decode"])
def test_paged_operations_refuse(run: Callable[..., None], bad: dict[str, dict[str, Any]]) -> None:
    kernels: Any = cpu.load(F32, 16)
    run(kernels, pool_inputs())
    for name, given in bad.items():
        inputs = pool_inputs() | given
        before = {key: value.clone() for key, value in inputs.items() if isinstance(value, Tensor)}
        with pytest.raises(InputError, match=r"^(step|write|decode|attend) takes .*got .*(float|int)"):
            run(kernels, inputs)
            pytest.fail(f"took {name}")
        for key, value in before.items():
            assert value.is_meta or torch.equal(inputs[key], value), f"{name}: {key} was written"


def test_a_layer_unlike_the_one_before() -> None:
    """A step's layers are checked again where their tensors differ."""
    kernels: Any = cpu.load(F32, 16)
    i, metadata = pool_inputs(), pool_inputs()["metadata"]
    step = cpu.StepCalls(kernels, i["kv_cache"])
    rows = all_rows(step, metadata)

    def write(key: Tensor, value: Tensor, slots: Tensor, layer: int, **_: Any) -> None:
        step.write(key, value, layer, slots)

    def attend(query: Tensor, output: Tensor, layer: int, sinks: Tensor | None, **_: Any) -> None:
        step.attend(query, output, layer, rows, 0.25, None, None, sinks)

    for call, bad, elsewhere in ((write, BAD_WRITES, {"kv_cache"}), (attend, BAD_DECODES, {"kv_cache", "metadata"})):
        for name, given in bad.items():
            if not elsewhere & given.keys():
                call(**i)
                with pytest.raises(InputError):
                    call(**i | given)
                    pytest.fail(f"took {name}")
    call(**i)


@pytest.mark.parametrize("layer", [-1, 2, 7])
@pytest.mark.parametrize("kind", ["torch", "cpu", "triton"])
def test_a_layer_that_the_pool_does_not_have(kind: str, layer: int) -> None:
    """It would be a layer of another sequence's block."""
    inputs = pool_inputs()
    pool = inputs["kv_cache"]
    before = pool.clone()
    with pytest.raises(ValueError, match=rf"layer.* {layer}\b|\b{layer} .*layer"):
        choose(kind, pool, F32).step(inputs["metadata"]).write(inputs["key"], inputs["value"], layer)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("kind", ["torch", "cpu", "triton"])
def test_keys_of_another_shape(kind: str) -> None:
    """As many numbers, but of two tokens where there is one: plain torch would take them."""
    inputs = pool_inputs()
    step = choose(kind, inputs["kv_cache"], F32).step(inputs["metadata"])
    for shape in ((4, 1, 16), (1, 4, 16), (2, 4, 8), (2, 1, 16)):
        with pytest.raises(ValueError, match="key"):
            step.write(exact(*shape), exact(*shape), 1)


# In the place of a model's own code


@pytest.mark.parametrize("takes_part", [False, True])
def test_rotary_embeddings_of_any_shape(takes_part: bool) -> None:
    """The same as the function itself, or the same kind of error; what only the kernel can, it does as it is told."""
    rng = random.Random(0)
    own = modeling_llama.apply_rotary_pos_emb
    rotary = _Rotary(vars(modeling_llama), layer_kernels("c"), False, True, takes_part)
    num_results = 0
    for _ in range(600):
        batch, heads, tokens, dim = rng.choice((1, 1, 2)), rng.choice((1, 3)), rng.choice((1, 1, 5)), 12

        def other(number: int, *others: int) -> int:
            return rng.choice((number, number, number, number, *others))

        q = exact(batch, heads, tokens, dim)
        k = exact(other(batch, 1), other(heads, 2), other(tokens, 1, 4), other(dim, 10))
        shape = [other(batch, 1, 3), other(tokens, 1, 0, 3, 6), other(dim, 1, 3, 13, 24)]
        shape = rng.choice([shape] * 6 + [shape[1:], shape[2:], [1, *shape], []])
        cos = exact(*shape, dtype=rng.choice((F32, F32, F32, BF16, torch.float64)))
        sin = cos.clone() if rng.random() < 0.9 else exact(*shape[:-1], 5) if shape else exact()
        if rng.random() < 0.2:
            q, cos = (exact(*x.shape, 2)[..., 0].copy_(x) if x.dtype is F32 else x for x in (q, cos))
        expected, found = (outcome(function, q, k, cos, sin) for function in (own, rotary))
        if not isinstance(expected, str):
            num_results += 1
            assert_same(expected, found)
        elif found != expected:
            assert takes_part and cos.shape[-1] < dim, (q.shape, k.shape, cos.shape)
    assert num_results > 50


def own_and_fused(module: nn.Module) -> Callable[[Tensor], tuple[Any, Any]]:
    """What a module makes of a tensor by itself, and in the engine's forwards."""
    layers = Layers(module)
    with torch.no_grad(), layers.scope():
        assert layers.found

    def both(states: Tensor) -> tuple[Any, Any]:
        with torch.no_grad():
            expected = outcome(module, states)
            with layers.scope():
                return expected, outcome(module, states)

    return both


STATES = {
    "usual": exact(1, 5, 32),
    "one number less": exact(1, 5, 31),
    "one number more": exact(1, 5, 33),
    "one number": exact(1, 5, 1),
    "nothing": exact(1, 5, 0),
    "no rows": exact(0, 32),
    "a row": exact(32),
    "a scalar": torch.tensor(1.0),
    "five dimensions": exact(1, 2, 1, 3, 32),
    "strided": exact(5, 64)[:, ::2],
    "transposed": exact(32, 5).t(),
    "expanded": exact(1, 1, 32).expand(2, 5, 32),
    "bfloat16": exact(1, 5, 32, dtype=BF16),
    "float16": exact(1, 5, 32, dtype=F16),
    "float64": exact(1, 5, 32, dtype=torch.float64),
    "integers": torch.ones(1, 5, 32, dtype=torch.int64),
}


@pytest.mark.parametrize("name", STATES)
def test_norms_and_mlps_of_any_states(name: str) -> None:
    config = hf.LlamaConfig(hidden_size=32, intermediate_size=24)
    for module in (LlamaRMSNorm(32), LlamaMLP(config)):
        assert_same(*own_and_fused(module)(STATES[name]))


def test_weights_that_change_after_they_were_seen() -> None:
    """Their shape and their dtype; the kernels were chosen for the first parameter's."""
    norm, mlp = LlamaRMSNorm(32), LlamaMLP(hf.LlamaConfig(hidden_size=32, intermediate_size=24))
    module = nn.Sequential(nn.Linear(32, 32), norm, mlp)
    both = own_and_fused(module)
    states = exact(1, 5, 32)
    assert_same(*both(states))
    for weight in (exact(31), exact(1), exact(64)[::2], exact(32, dtype=BF16), exact(5, 32), exact(32)):
        norm.weight = nn.Parameter(weight)
        assert_same(*both(states))
    for out, dtype in ((23, F32), (25, F32), (1, F32), (24, BF16), (24, F32)):
        mlp.up_proj = nn.Linear(32, out, bias=False, dtype=dtype)
        assert_same(*both(states))
    mlp.to(BF16)
    norm.to(BF16)
    assert_same(*both(states))
    module[0].to(BF16)
    mlp.to(F32)
    norm.to(F32)
    assert_same(*both(states.bfloat16()))


# Calls: as stock's, or the same kind of error

LENGTH = 60
POSITIONS: dict[str, Callable[[int, int], Tensor]] = {
    "one": lambda rows, length: torch.full((rows, 1), 5),
    "none": lambda rows, length: torch.zeros(rows, 0, dtype=torch.int64),
    "three": lambda rows, length: torch.arange(3).expand(rows, 3),
    "one less": lambda rows, length: torch.arange(length - 1).expand(rows, -1),
    "one more": lambda rows, length: torch.arange(length + 1).expand(rows, -1),
    "all five": lambda rows, length: torch.full((rows, length), 5),
    "one row": lambda rows, length: torch.arange(length)[None] + 2,
    "one dimension": lambda rows, length: torch.arange(length),
    "one of one dimension": lambda rows, length: torch.tensor([5]),
    "backwards": lambda rows, length: torch.arange(length).flip(0).expand(rows, -1),
    "negative": lambda rows, length: -torch.arange(length).expand(rows, -1),
    "whole floats": lambda rows, length: torch.arange(float(length)).expand(rows, -1),
    "floats": lambda rows, length: (torch.arange(length) / 2).expand(rows, -1),
    "int32": lambda rows, length: torch.arange(length, dtype=torch.int32).expand(rows, -1),
    "every other": lambda rows, length: torch.arange(2 * length)[::2].expand(rows, -1),
    "far": lambda rows, length: torch.arange(length).expand(rows, -1) + 100_000,
}
FAMILIES = ("llama", "gpt_neox", "gpt2", "stablelm", "phi3", "gemma2", "falcon_rotary", "opt")


def same_or_both_fail(pair: Pair, **arguments: Any) -> bool:
    """Whether `generate()` had a result. Afterwards nothing is held."""
    expected, found = (outcome(model.generate, **arguments, **GREEDY) for model in (pair.stock, pair.paged))
    assert_same(expected, found)
    pair.engine.check_invariants()
    pair.assert_all_free()
    return not isinstance(expected, str)


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), *zip(FAMILIES, cycle((2, 1)))])
def test_position_ids(make_pair: Callable[..., Pair], name: str, rows: int) -> None:
    pair = make_pair(name)
    ids = random_ids(rows, LENGTH)
    kinds = [
        kind
        for kind, make in POSITIONS.items()
        if same_or_both_fail(pair, input_ids=ids, position_ids=make(rows, LENGTH))
    ]
    assert {"all five", "one row", "one more", "int32"} <= set(kinds)
    pair.generate(input_ids=ids, **GREEDY)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_position_ids_of_one_row_and_beams(make_pair: Callable[..., Pair], name: str) -> None:
    """transformers repeats the row as often as each of the batch: two are given for four."""
    pair = make_pair(name)
    positions = torch.arange(9)[None] + 2
    for beams in ({"num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2}):
        assert not same_or_both_fail(pair, input_ids=random_ids(2, 9), position_ids=positions, **beams)
        assert same_or_both_fail(pair, input_ids=random_ids(1, 9), position_ids=positions, **beams)


def test_position_ids_of_more_rows(make_pair: Callable[..., Pair]) -> None:
    """OPT would make two rows of one, for which its cache has no place; BLOOM looks at none."""
    for name in ("llama", "opt", "bloom"):
        pair = make_pair(name)
        for rows, number in ((1, 2), (2, 3), (3, 2)):
            ids, positions = random_ids(rows, 9), torch.arange(9).expand(number, -1)
            if name == "bloom":
                pair.generate(input_ids=ids, position_ids=positions, **GREEDY)
                continue
            with pytest.raises((RuntimeError, ValueError), match=r"must match the size|position_ids of \d rows"):
                pair.paged.generate(ids, position_ids=positions, **GREEDY)
            pair.assert_all_free()


@pytest.mark.parametrize("name", FAMILIES)
def test_position_ids_of_three_dimensions(make_pair: Callable[..., Pair], name: str) -> None:
    """Stock mixes up heads and rows, or raises: here it is an error, and no more than that."""
    pair = make_pair(name)
    ids = random_ids(1, LENGTH)
    for rows in (1, 3):
        positions = torch.arange(LENGTH).expand(rows, 1, -1)
        found = outcome(pair.paged.generate, ids, position_ids=positions, **GREEDY)
        assert isinstance(found, str)
        pair.assert_all_free()
    pair.generate(input_ids=ids, **GREEDY)


@pytest.mark.parametrize("name", ["llama", "persimmon", "gpt_neox"])
def test_embeddings_and_chunks(make_pair: Callable[..., Pair], name: str) -> None:
    """transformers cuts the ids, of which there are none, and hands over all embeddings with no position."""
    pair = make_pair(build(name) if name in MODELS else PARTIAL[name](0.5))
    embeds = pair.stock.get_input_embeddings()(random_ids(1, LENGTH)).detach()
    for size in (1, 7, LENGTH, LENGTH + 1):
        for extra in ({}, {"position_ids": torch.arange(LENGTH)[None]}, {"position_ids": torch.tensor([[5]])}):
            same_or_both_fail(pair, inputs_embeds=embeds, prefill_chunk_size=size, **extra)
    pair.generate(inputs_embeds=embeds, **GREEDY)


def _partial(kind: Any, **more: Any) -> Callable[[float], Any]:
    def make(factor: float) -> Any:
        config = kind(
            **more,
            vocab_size=97,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            eos_token_id=2,
            bos_token_id=1,
            pad_token_id=0,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor},
        )
        torch.manual_seed(0)
        return hf.AutoModelForCausalLM.from_config(config).eval()

    return make


PARTIAL: dict[str, Callable[[float], Any]] = {
    "stablelm": _partial(hf.StableLmConfig, num_key_value_heads=2),
    "persimmon": _partial(hf.PersimmonConfig),
    "gpt_neox": _partial(hf.GPTNeoXConfig),
    "phi": _partial(hf.PhiConfig),
    "glm": _partial(hf.GlmConfig, num_key_value_heads=2, head_dim=12),
    "nemotron": _partial(hf.NemotronConfig, num_key_value_heads=2),
}


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.4, 0.75, 1.0])
@pytest.mark.parametrize("name", PARTIAL)
def test_partial_rotary_embeddings(name: str, factor: float) -> None:
    """3 of 12 elements are odd, and the cosine is wider than they are. What stock refuses is not supported."""
    stock = PARTIAL[name](factor)
    ids = random_ids(2, 9)
    expected = outcome(stock.generate, ids, **GREEDY)
    if isinstance(expected, str):
        paged = outcome(lambda: hf_paged.patch(stock, block_size=4, num_blocks=64).generate(ids, **GREEDY))
        assert isinstance(paged, str), "stock refuses"
        return
    paged = hf_paged.patch(PARTIAL[name](factor), block_size=4, num_blocks=64)
    assert torch.equal(paged.generate(ids, **GREEDY), expected)
