"""Decode steps in the shape of CUDA graphs: fixed addresses, padded batches, one set of recordings for all lengths.

Without a GPU a "recording" is the function itself, run again over the same inputs: everything but the capture is what
runs on one. `-m gpu` runs the same tests with real graphs.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hf_paged
from helpers.graphs import Recorder
from helpers.models import MODELS, build, ragged_batch, random_ids
from helpers.state_models import build_state_model
from helpers.waiting import join
from hf_paged import PagedCache
from hf_paged.attention.decode_work import WorkKind, share_out
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.model import cuda_graph, step_inputs
from hf_paged.model.cuda_graph import capture_sizes, token_sizes
from hf_paged.model.step_inputs import FixedTables, HostStep, Shape, StepInputs
from hf_paged.model.token_inputs import TokenInputs

PACKED = [name for name, model in MODELS.items() if model.runs_packed]
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
SMALL = {"num_blocks": 128, "block_size": 4}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Of experts in float32, torch reads on the host how many rows each has, and `gemma3n` copies a number to the device: on
# a GPU, such steps can't be recorded.
READ_BACK = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash")
READ_BACK += ("gemma3n",)
# Not recorded: of chunks; values narrower than keys. What keeps them from it is said.
REFUSED = ("llama4",)
NOT_RECORDED = (*REFUSED, "mimo_v2_flash")
compiles = pytest.mark.skipif(Version(torch.__version__) < Version("2.12.dev0"), reason="an older torch is refused")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Graphs everywhere, and what becomes of them."""
    made = Recorder()
    original = cuda_graph.recorder

    def make(attention: Any) -> Any:
        kv_cache = attention.kv_cache
        if any(kv_cache.groups.chunks):
            return "need layers of another kind"
        if kv_cache.tensor.device.type == "cuda":
            record = original(attention)
            if isinstance(record, str):
                return record
            made.make = record
        return made

    monkeypatch.setattr(cuda_graph, "recorder", make)
    return made


def patch(name: str = "llama", device: str = "cpu", **settings: Any) -> Any:
    settings = SMALL | {"max_num_seqs": 12, "cuda_graphs": True} | settings
    return hf_paged.patch(build(name).to(device), **settings)


def ragged(count: int) -> list[list[int]]:
    return [random_ids(1, 3 + 5 * index % 11)[0].tolist() for index in range(count)]


def plain_tokens(
    prompts: list[list[int]], name: str = "llama", device: str = "cpu", **arguments: Any
) -> list[list[int]]:
    """By stock `generate()`, one by one."""
    model = build(name).to(device)
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        results.append(model.generate(ids, **GREEDY | arguments)[0, len(prompt) :].tolist())
    return results


# Sizes and inputs


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 65, 256, 1000])
def test_sizes(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert len(sizes) <= 12 + most / 16
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < (2 if rows < 4 else 8 if rows <= 64 else 16)


@pytest.mark.parametrize("most", [1, 5, 16, 100, 255, 256, 2048, 3000])
def test_token_sizes(most: int) -> None:
    """At most a third is padding."""
    sizes = token_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] <= 16
    for tokens in range(17, most + 1):
        size = next(size for size in sizes if size >= tokens)
        assert size - tokens <= size / 3


class Tables:
    """What `FixedTables` asks of a pool."""

    block_size, null_block, groups = 4, 50, SimpleNamespace(windows=[None] * 3)

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def a_step(rng: np.random.Generator, query_lens: list[int], num_wanted: int) -> HostStep:
    """Of sequences with so many new tokens, in three groups of layers."""
    rows, tokens = len(query_lens), sum(query_lens)
    seq_lens = np.array(query_lens) + rng.integers(0, 15, rows)
    tables = np.full((3, rows, -(-int(seq_lens.max()) // 4)), 50)
    for row, length in enumerate(-(-seq_lens // 4)):
        tables[:, row, :length] = [rng.permutation(50)[:length] for _ in range(3)]
    lens = np.array(query_lens), seq_lens, 4, 50, torch.device("cpu")
    ids, positions = (torch.from_numpy(rng.integers(1, 99, tokens)) for _ in range(2))
    metadata = AttentionMetadata.of_groups(list(tables), *lens)
    wanted = np.sort(rng.permutation(tokens)[:num_wanted])
    return HostStep(TokenInputs(ids, positions), metadata, wanted, rng.integers(0, 50, (rows, 2)))


DECODES = [(8, [1] * rows) for rows in (8, 3, 3, 5, 1, 8, 2)]
OTHERS = [(8, [1, 1, 5, 7]), (8, [16]), (8, [1] * 7 + [9]), (8, [2, 1, 3]), (8, [3] * 5), (8, [1, 15])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [DECODES, OTHERS], ids=["decodes", "others"])
def test_inputs(steps: list[tuple[int, list[int]]], device: str) -> None:
    """What the model reads is the step's, and beyond it padding, whatever the steps before were."""
    rng = np.random.default_rng(0)
    is_decode, tables = steps is DECODES, FixedTables(8, 9, cast("Any", Tables(device)))
    shape = Shape(8, 8, 8) if is_decode else Shape(8, 16, 8, 16)
    kinds = [WorkKind(tile=2, slots=5), WorkKind(tile=2, slots=5, window=6)]
    queries = [] if is_decode else [WorkKind(tile=2, slots=5, queries=size) for size in (1, 4)]
    inputs = StepInputs(shape, tables, 2, kinds, queries, [] if is_decode else kinds)
    addresses: list[int] = []
    for size, query_lens in steps:
        rows, num_tokens = len(query_lens), sum(query_lens)
        step = a_step(rng, query_lens, rows if is_decode else min(num_tokens, 8))
        for _ in range(2):  # the second time, tables are known
            inputs.fill(step)
            ids, positions, groups = inputs.views()
            rest = shape.tokens - num_tokens
            assert ids.tolist() == [*step.tokens.input_ids, *[0] * rest]
            assert positions.tolist() == [*step.tokens.position_ids, *[0] * rest]
            assert inputs.pages.tolist() == [*step.pages.tolist(), *[[50, 50]] * (size - rows)]
            if not is_decode:
                assert inputs.wanted.tolist() == [*step.wanted, *[0] * (8 - len(step.wanted))]
            found = [ids, positions, inputs.pages, inputs.wanted]
            for metadata, own in zip(groups, step.metadata, strict=True):
                assert metadata.slot_mapping.tolist() == [*own.slot_mapping, *[-1] * rest]
                assert metadata.seq_lens[:rows].tolist() == own.seq_lens.tolist()
                assert metadata.block_tables[:rows, : own.block_tables.shape[1]].tolist() == own.block_tables.tolist()
                assert metadata.block_tables[rows:, 0].tolist() == [50] * (size - rows)
                starts = metadata.query_start_loc.tolist()
                assert starts[: rows + 1] == own.query_start_loc.tolist()
                padding = range(rows + 1, size + 1) if is_decode else [num_tokens] * (size - rows)
                assert starts[rows + 1 :] == list(padding)
                assert (metadata.num_decodes == size) == is_decode and metadata.max_query_len == shape.longest
                found += [metadata.slot_mapping, metadata.block_tables, metadata.seq_lens, metadata.query_start_loc]
            decoding = [*own.host_seq_lens, *[1] * (size - rows)] if is_decode else own.host_seq_lens[: own.num_decodes]
            for kind in kinds:
                work = metadata.decode_work(kind)
                items, split = share_out(np.array(decoding), kind)
                assert work.items[: len(items)].tolist() == items.tolist()
                assert work.split[: len(split)].tolist() == split.tolist()
                assert (work.items[len(items) :, 1] == -1).all() and (work.split[len(split) :, 3] == 0).all()
                assert len(work.items) == kind.max_items(size) and len(work.split) == kind.max_split(size)
                found += [work.items, work.split]
            alone = None if is_decode else own.of_tokens(np.arange(num_tokens))
            for kind in kinds if alone else []:
                given = metadata.of_all_tokens()
                assert given.seq_lens.tolist() == [*alone.host_seq_lens, *[1] * rest]
                tables = given.block_tables[:num_tokens, : alone.block_tables.shape[1]]
                assert tables.tolist() == alone.block_tables.tolist()
                work, expected = given.decode_work(kind), alone.decode_work(kind)
                assert work.items[: len(expected.items)].tolist() == expected.items.tolist()
                assert work.split[: len(expected.split)].tolist() == expected.split.tolist()
                assert (work.items[len(expected.items) :, 1] == -1).all()
                assert (work.split[len(expected.split) :, 3] == 0).all()
                assert len(work.items) == kind.max_items(16) and len(work.split) == kind.max_split(16)
                found += [given.seq_lens, work.items, work.split]
            for kind in queries:
                work, expected = metadata.query_work(kind), own.query_work(kind)
                for part, real, column, nothing in (
                    (work.items, expected.items, 1, -1),
                    (work.split, expected.split, 3, 0),
                ):
                    assert part[: len(real)].tolist() == real.tolist()
                    assert (part[len(real) :, column] == nothing).all()
                found += [work.items, work.split]
            where = [tensor.data_ptr() for tensor in found]
            assert not any(address % 16 for address in where), "another kernel than elsewhere"
            addresses = addresses or where
            assert addresses == where


def test_inputs_are_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a list of work for each of several kinds of layers; tables go when they change."""
    tables = FixedTables(8, 9, cast("Any", Tables("cpu")))
    inputs = StepInputs(Shape(4, 4, 4), tables, 2, [WorkKind(16, 5), WorkKind(16, 5, window=8), WorkKind(16, 3)])
    step = a_step(np.random.default_rng(0), [1, 1, 1], 3)
    inputs.fill(step)
    copies: list[int] = []
    copy = Tensor.copy_

    def counted(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        copies.append(self.numel())
        return copy(self, *arguments, **options)

    monkeypatch.setattr(Tensor, "copy_", counted)
    inputs.fill(step)
    assert len(copies) == 1


# The same tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PACKED)
def test_tokens_of_all_models(name: str, device: str, recorder: Recorder) -> None:
    """Ragged prompts that end one by one: batches of every size, padded to the next recorded one."""
    prompts = ragged(6)
    model = patch(name, device, cuda_graphs=None if name in NOT_RECORDED else True)
    model.paged.pause()  # all begin together, however slow the machine is
    requests = [
        model.paged.submit(prompt, **GREEDY | {"max_new_tokens": 4 + 2 * index}) for index, prompt in enumerate(prompts)
    ]
    model.paged.resume()
    tokens = [request.result(60).token_ids for request in requests]
    expected = [
        plain_tokens([prompt], name, device, max_new_tokens=4 + 2 * index)[0] for index, prompt in enumerate(prompts)
    ]
    assert tokens == expected
    model.paged.check_invariants()
    if device == "cuda" and name in READ_BACK:
        assert not recorder.sizes and "waits for the device" in model.paged.core.runner.graphs.held.reason
        return
    if name in NOT_RECORDED:
        graphs = model.paged.core.runner.graphs.held
        assert not recorder.steps and (graphs is None or graphs.reason)
        return
    sizes = capture_sizes(12)[::-1]
    assert recorder.sizes[: len(sizes)] == sizes, "all sizes, once"
    assert len(recorder.sizes) <= len(sizes) + (device == "cuda"), "of most, kernels take the step of prompts, too"
    assert len(recorder.steps) >= 13 and set(recorder.steps) > {1, 2, 4}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"repetition_penalty": 1.3},
        {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_tokens_of_all_modes(arguments: dict[str, Any], device: str, recorder: Recorder) -> None:
    ids = random_ids(1 if "prompt_lookup_num_tokens" in arguments else 3, 9).to(device)
    stock, model = build("llama").to(device), patch(device=device)
    results = []
    for one in (stock, model):
        torch.manual_seed(7)
        result = one.generate(ids, **GREEDY | arguments)
        results.append(result)
    if isinstance(results[0], Tensor):
        assert torch.equal(*results)
    else:
        assert torch.equal(results[0].sequences, results[1].sequences)
        torch.testing.assert_close(results[1].logits, results[0].logits, rtol=1e-4, atol=1e-5)
    assert recorder.steps or "prompt_lookup_num_tokens" in arguments


class Grids:
    """Stands in for a kernel; the grids that it is launched over in replays, by their size."""

    def __init__(self, kernel: Any, recorder: Recorder) -> None:
        self._kernel, self._recorder = kernel, recorder
        self.of: dict[int, set[tuple[int, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if self._recorder.running:
            self.of.setdefault(self._recorder.running, set()).add(grid)
        return self._kernel[grid]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_of_a_long_row_among_short_ones(
    name: str, device: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the Triton kernels: the long row is split and the others are not, by launches that lengths don't change."""
    decode = pytest.importorskip("hf_paged.kernels.paged_decode")  # Triton need not be there
    if device == "cpu" and not pytest.importorskip("hf_paged.kernels.launch").is_interpreting():
        pytest.skip("kernels are compiled here; TRITON_INTERPRET=1 runs them on CPU")
    grids = {kernel: Grids(getattr(decode, kernel), recorder) for kernel in ("_decode_kernel", "_combine_kernel")}
    for kernel, stand_in in grids.items():
        monkeypatch.setattr(decode, kernel, stand_in)
    shared_out: dict[WorkKind, list[list[int]]] = {}

    def watched(lens: np.ndarray, kind: WorkKind) -> Any:
        items, split = share_out(lens, kind)
        shared_out.setdefault(kind, []).append(np.bincount(items[:, 1]).tolist())
        return items, split

    monkeypatch.setattr(step_inputs, "share_out", watched)
    prompts = {key: tensor.to(device) for key, tensor in ragged_batch((5, 60, 14)).items()}
    arguments = GREEDY | prompts | {"max_new_tokens": 3}
    found = patch(name, device, attention_backend="triton", max_num_seqs=3).generate(**arguments)
    assert torch.equal(found, build(name).to(device).generate(**arguments))
    assert recorder.steps == [3, 3]
    kinds = {bool(kind.window): counts for kind, counts in shared_out.items()}
    assert len(shared_out) == len(kinds) == (2 if name == "gemma2" else 1), "a list for each kind of layer"
    assert kinds[False][-2:] == [[1, 2, 1]] * 2
    for stand_in in grids.values() if device == "cpu" else []:
        assert sorted(stand_in.of) == [1, 2, 3] and all(len(launched) == 1 for launched in stand_in.of.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_tokens_under_preemption(preemption: str, device: str, recorder: Recorder) -> None:
    """Tables change under the recordings; a pool too small for all is no reason to run eagerly."""
    prompts = ragged(8)
    model = patch(device=device, num_blocks=20, preemption=preemption, swap_space_gib=0.1)
    outputs = model.paged.generate(prompts, **GREEDY | {"max_new_tokens": 20})
    assert [output.token_ids for output in outputs] == plain_tokens(prompts, device=device, max_new_tokens=20)
    assert model.paged.stats().num_preemptions and len(recorder.steps) > 20


@pytest.mark.parametrize("device", DEVICES)
def test_threads(device: str, recorder: Recorder) -> None:
    """Callers generate, while others score and train through the model itself."""
    model = patch(device=device)
    prompts = ragged(6)
    expected = plain_tokens(prompts, device=device)
    results: dict[int, list[int]] = {}

    def generate(index: int) -> None:
        ids = torch.tensor([prompts[index]], device=device)
        results[index] = model.generate(ids, **GREEDY)[0, len(prompts[index]) :].tolist()

    threads = [threading.Thread(target=generate, args=(index,), daemon=True) for index in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        model(random_ids(2, 5).to(device), labels=random_ids(2, 5).to(device)).loss.backward()
    join(*threads)
    assert [results[index] for index in range(6)] == expected


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_the_callers_to_keep(device: str, recorder: Recorder) -> None:
    """A later step writes where an earlier one wrote, and not into what a caller holds."""
    model, ids = patch(device=device), random_ids(2, 8).to(device)
    cache = PagedCache(model)
    model(ids[:, :5], past_key_values=cache)
    held = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(5, 8)]
    assert len(recorder.steps) == 3
    truth = build("llama").to(device)(ids).logits[:, 5:]
    torch.testing.assert_close(torch.cat(held, dim=1), truth.detach(), rtol=1e-4, atol=1e-5)


# Compiled


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Traced and cut into pieces as ever; on CPU the pieces run as they are, unless a test is slow."""
    calls: list[dict[str, Any]] = []
    original = torch.compile

    def compile_for_a_test(function: Any, **arguments: Any) -> Any:
        calls.append(arguments)
        return original(function, **({"backend": "eager"} | arguments))

    monkeypatch.setattr(torch, "compile", compile_for_a_test)
    torch.compiler.reset()
    counters.clear()
    yield calls
    torch.compiler.reset()


@compiles
def test_compiled(recorder: Recorder, compiled: list[dict[str, Any]]) -> None:
    """A few programs for all layers and batch sizes: no more for nine layers than for two."""
    ids = random_ids(3, 6)
    stock = build("llama", layers=9)
    expected = stock.generate(ids, **GREEDY)
    model = hf_paged.patch(stock, **SMALL, cuda_graphs=True, compile_decode=True, max_num_seqs=3)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert recorder.sizes == [3, 2, 1] and len(compiled) == 1
    assert 0 < counters["stats"]["unique_graphs"] <= 25


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_compiled_to_machine_code(name: str, recorder: Recorder) -> None:
    ids = random_ids(3, 6)
    model = hf_paged.patch(build(name), **SMALL, cuda_graphs=True, compile_decode=True, max_num_seqs=3)
    assert torch.equal(model.generate(ids, **GREEDY), build(name).generate(ids, **GREEDY))
    assert recorder.steps
    torch.compiler.reset()


@pytest.mark.gpu
@compiles
def test_compiled_on_a_gpu(recorder: Recorder) -> None:
    ids = random_ids(3, 6).cuda()
    model = hf_paged.patch(build("llama").cuda(), **SMALL, compile_decode=True, max_num_seqs=6)
    assert torch.equal(model.generate(ids, **GREEDY), build("llama").cuda().generate(ids, **GREEDY))
    assert recorder.steps


@compiles
def test_compiled_where_there_are_no_graphs() -> None:
    model = patch(cuda_graphs=None, compile_decode=True)
    with pytest.raises(ValueError, match="compile_decode=True: CUDA graphs need a CUDA device, the model is on cpu"):
        model.generate(random_ids(1, 5), **GREEDY)
    with pytest.raises(ValueError, match="compile_decode=True needs CUDA graphs"):
        patch(cuda_graphs=False, compile_decode=True)


# When it is not used


def test_where_there_are_none() -> None:
    """CUDA graphs are for CUDA; asked for elsewhere, the caller is told."""
    model = patch()
    with pytest.raises(ValueError, match="cuda_graphs=True: CUDA graphs need a CUDA device, the model is on cpu"):
        model.generate(random_ids(1, 5), **GREEDY)
    model.paged.check_invariants()
    model = patch(cuda_graphs=None)
    assert torch.equal(model.generate(random_ids(1, 5), **GREEDY), build("llama").generate(random_ids(1, 5), **GREEDY))


def test_switched_off(recorder: Recorder) -> None:
    model = patch(cuda_graphs=False)
    model.generate(random_ids(2, 5), **GREEDY)
    assert not recorder.sizes


def add_hook(model: Any) -> None:
    model.model.norm.register_forward_hook(hf_paged.packed_hook(lambda module, args, output: 2 * output + 0.5))


def own_forward(model: Any) -> None:
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda states: -forward(states)


class Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, states: Tensor) -> Tensor:
        return self.norm(states).flip(-1)


def own_module(model: Any) -> None:
    model.model.norm = Norm(model.model.norm)


@pytest.mark.parametrize("change", [add_hook, own_forward, own_module])
def test_code_of_a_users_own(change: Callable[[Any], None], recorder: Recorder) -> None:
    """It may do anything at any step, so it runs at every step; also if it comes when all is recorded."""
    ids = random_ids(2, 6)
    stock, model = build("llama"), patch()
    model.generate(ids, **GREEDY)
    recorder.replays.clear()
    for one in (stock, model):
        change(one)
    assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))
    assert not recorder.replays


def test_autocast(recorder: Recorder) -> None:
    model = patch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(random_ids(2, 6), **GREEDY)
    assert not recorder.sizes


def test_sequences_beyond_the_models_context(recorder: Recorder) -> None:
    """Tables are as wide as the longest context; what is longer runs eagerly."""
    stock, model = build("llama"), build("llama")
    stock.config.max_position_embeddings = model.config.max_position_embeddings = 16
    model = hf_paged.patch(model, num_blocks=64, block_size=4, cuda_graphs=True, max_num_seqs=2)
    ids = random_ids(1, 10)
    assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))
    assert len(recorder.steps) == 6  # tokens 11 to 16


# When weights change


def in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def other_storage(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def other_parameter(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0).clone())


@pytest.mark.parametrize(("change", "is_moved"), [(in_place, False), (other_storage, True), (other_parameter, True)])
def test_weights(change: Callable[[Any], None], is_moved: bool, recorder: Recorder) -> None:
    """A recording reads the weights where they were: values may change, places must not."""
    ids = random_ids(2, 6)
    stock, model = build("llama"), patch()
    model.generate(ids, **GREEDY)
    num_recorded = len(recorder.sizes)
    for one in (stock, model):
        change(one)
    assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))
    assert len(recorder.sizes) == num_recorded * (1 + is_moved)


def test_adapters(recorder: Recorder) -> None:
    """A recording is of the adapters that were active."""
    peft = pytest.importorskip("peft")
    ids, pair = random_ids(2, 6), []
    for model in (build("llama"), build("llama")):
        for name, seed in (("one", 0), ("two", 1)):
            torch.manual_seed(seed)
            model.add_adapter(peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False), name)
        pair.append(model.eval())
    stock, model = pair[0], hf_paged.patch(pair[1], **SMALL, max_num_seqs=2, cuda_graphs=True)
    texts = []
    for name in ("one", "two"):
        for one in pair:
            one.set_adapter(name)
        texts.append(model.generate(ids, **GREEDY))
        assert torch.equal(texts[-1], stock.generate(ids, **GREEDY))
        assert recorder.replays and len(recorder.sizes) == 2 * len(texts)
        recorder.replays.clear()
    assert not torch.equal(*texts)


def test_release(recorder: Recorder) -> None:
    """Memory goes back, the recordings' too; the next call records again."""
    ids = random_ids(2, 6)
    model = patch()
    expected = model.generate(ids, **GREEDY)
    first = len(recorder.sizes)
    model.paged.release()
    gc.collect()
    assert not any(reference() for reference in recorder.recordings)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert len(recorder.sizes) == 2 * first


def test_a_model_that_is_dropped(recorder: Recorder) -> None:
    model = patch()
    model.generate(random_ids(2, 6), **GREEDY)
    reference, pool = weakref.ref(model), weakref.ref(model.paged.core.kv_cache)
    hf_paged.unpatch(model)
    del model
    gc.collect()
    assert reference() is None and pool() is None
    assert not any(recording() for recording in recorder.recordings)


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever is recorded agrees with what is not, and no step fell back in silence."""
    yield
    are_known = [*(f"{name}-cuda" for name in READ_BACK), *(f"[{name}-" for name in NOT_RECORDED)]
    if not any(name in request.node.name for name in are_known):
        assert not [record for record in caplog.get_records("call") if "CUDA graphs" in record.getMessage()]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("name", ["mamba2", "lfm2"])
def test_states_of_a_step_that_is_not_recorded(
    recorder: Recorder, name: str, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """Would break: states that have gone on by what was tried, so that the step itself begins with other ones."""

    def make(function: Any) -> Any:
        function()
        raise kind("it can't be recorded")

    recorder.make = make
    stock = build_state_model(name)
    ids = random_ids(3, 7)
    expected = stock.generate(ids, **GREEDY)
    paged = hf_paged.patch(stock, **SMALL, max_num_seqs=4, cuda_graphs=True)
    assert paged.generate(ids, **GREEDY).tolist() == expected.tolist()
    assert paged.paged.stats().num_replayed_steps == 0 and "run without CUDA graphs" in caplog.text
    caplog.clear()
