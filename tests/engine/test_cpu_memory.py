"""Memory of a process on a CPU: weights stay in their file's pages, the pool is touched as it is used."""

from __future__ import annotations

import logging
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import hf_paged
from helpers.models import build, random_ids
from helpers.processes import run_compiled
from hf_paged.core import control_group
from hf_paged.engine import kv_pool, openmp
from hf_paged.memory import kv_cache
from hf_paged.memory.kv_cache import _zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def parts_of(path: Path) -> list[range]:
    """Where a file is mapped in this process."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    places = [line[0].split("-") for line in lines if len(line) > 5 and line[5] == str(path)]
    return [range(int(first, 16), int(end, 16)) for first, end in places]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_weight_leaves_its_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """Would break: a layer that keeps its weights in another order, or type; joined products; tied heads."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0}
    for number, config in enumerate(
        (LlamaConfig(**sizes, **heads), Qwen3Config(**sizes, **heads, tie_word_embeddings=True))
    ):
        folder = tmp_path / str(number)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
        mapped = parts_of(folder / "model.safetensors")
        if not mapped or not all(any(place in part for part in mapped) for place in before.values()):
            pytest.skip("this transformers doesn't leave weights in their file's pages")
        hf_paged.patch(model, num_blocks=64)
        for rows in (1, 3):
            model.generate(random_ids(rows, 40), max_new_tokens=4)
        model.paged.warm_up()
        assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == before
        hf_paged.unpatch(model)
        assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == before


def huge_bytes(place: int) -> int:
    """What the system gives of the mapping that an address is in, in huge pages."""
    is_own = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            first, end = (int(number, 16) for number in name.split("-"))
            is_own = first <= place < end
        elif is_own and name == "AnonHugePages:":
            return int(rest[0]) * 1024
    return 0


def test_huge_pages_where_the_system_gives_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system gives none")
    pool = _zeros((64, 2**20), torch.uint8, torch.device("cpu"))
    middle = pool[32].data_ptr()
    assert huge_bytes(middle) == 0, "touched before it is used"
    pool[16:48] = 1
    assert huge_bytes(middle) >= 2**24


def test_sizes_are_of_what_the_control_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool's, and the swapped blocks'; an explicit size is what was asked for."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40, total=2**40))
    sizes: dict[int | None, tuple[int, int]] = {}
    for left in (2**20, 2**22, None):
        monkeypatch.setattr(kv_cache, "available_memory", lambda left=left: left)
        model = hf_paged.patch(build("llama"), max_num_seqs=10**4)
        pool = model.paged.core.pool
        assert pool.manager.swap_pool is not None
        sizes[left] = pool.num_blocks, pool.manager.swap_pool.num_blocks
        other = hf_paged.patch(build("llama"), max_num_seqs=10**4, swap_space_gib=2**-11)
        explicit = other.paged.core.pool
        assert explicit.manager.swap_pool is not None
        assert explicit.manager.swap_pool.num_blocks == min(explicit.num_blocks, 2**19 // pool.bytes_per_block)
    quarter = 2**18 // pool.bytes_per_block
    assert quarter - 1 <= sizes[2**20][0] <= quarter and sizes[2**20][1] == min(sizes[2**20][0], quarter)
    assert 4 * sizes[2**20][0] <= sizes[2**22][0] < sizes[None][0]


@pytest.mark.parametrize(
    ("allowed", "is_warned"), [(None, False), (8.0, False), (2.0, False), (1.5, True), (0.5, True)]
)
def test_a_warning_where_a_container_has_fewer_cores(
    allowed: float | None, is_warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(openmp, "allowed_cpus", lambda: allowed)
    monkeypatch.setattr(kv_pool, "warn_of_quota", lru_cache(openmp.warn_of_quota.__wrapped__))  # none was given yet
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = hf_paged.patch(build("llama"), num_blocks=8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.generate(random_ids(1, 5), max_new_tokens=2)
    said = [record.getMessage() for record in caplog.records if "processors" in record.getMessage()]
    assert len(said) == is_warned
    if is_warned:
        assert (
            "2 threads" in said[0] and f"allows {allowed:g} processors" in said[0] and "set_num_threads(1)" in said[0]
        )


def test_one_thread_is_never_too_many(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(openmp, "allowed_cpus", lambda: 0.5)
    openmp.warn_of_quota.__wrapped__(1)
    assert not caplog.records and control_group.UNLIMITED > 2**50


PROGRAM = """
import sys, threading, time
import torch
from transformers import AutoModelForCausalLM
import hf_paged
from hf_paged.model.step_memory import estimated_bytes

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

folder, num_tokens = sys.argv[1], int(sys.argv[2])
before, peak, is_over = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not is_over.wait(0.002):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
rows = 8  # whose logits a step holds
settings = {"num_blocks": num_tokens // 16 + 4, "max_num_batched_tokens": num_tokens, "max_num_seqs": rows}
hf_paged.patch(model, **settings)
model.paged.warm_up(touch=True)
model.generate(torch.randint(1, 1000, (1, num_tokens)), max_new_tokens=4, do_sample=False)
is_over.set()
watcher.join()
pool = model.paged.core.kv_cache.tensor.nbytes
print(peak - before, pool, estimated_bytes(model, num_tokens, rows, 2))
"""


@pytest.mark.slow
def test_the_peak_of_a_process(tmp_path: Path) -> None:
    """Of Qwen3-0.6B's shape, whose weights alone are 1.2 GB: nothing beside the pool and a chunk's activations."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
    config = Qwen3Config(**sizes, **heads, max_position_embeddings=40960, eos_token_id=None, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02) if weight.ndim > 1 else torch.nn.init.ones_(weight)
    model.save_pretrained(tmp_path)
    del model
    said = run_compiled("-c", PROGRAM, tmp_path, "512", seconds=900)
    peak, pool, activations = map(int, said.split()[-3:])
    assert peak <= 1.03 * (pool + activations) + 2**25, (peak, pool, activations)
