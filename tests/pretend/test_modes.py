"""Every mode of every architecture on the pretended device: stock's tokens, and nothing that makes a step wait.

The essential part runs by default; `-m ""` is the full product.
"""

from __future__ import annotations

import copy
import gc

import pytest

import hf_paged
from helpers.device_modes import MODES
from helpers.models import MODELS, build, random_ids
from helpers.pairs import assert_same
from hf_paged.model import cuda_graph

from .conftest import watched

# Mixtures of experts in float32: no graph can hold them.
READS_ON_THE_HOST = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
# Not served by Triton's kernels and graphs as they are: of two widths, of chunks; gemma3n's own code makes a tensor on
# the host in each step, LongCat's experts read from the device.
SERVED_OTHERWISE = ("gemma3n", "llama4", "mimo_v2_flash", "longcat_flash")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
PACKED = [name for name, model in MODELS.items() if model.runs_packed and name not in SERVED_OTHERWISE]


def _is_essential(name: str, mode: str, graphs: bool) -> bool:
    if graphs:
        return (name, mode) in (("llama", "greedy"), ("llama", "prompt_lookup"), ("gpt2", "sampling"))
    return name == "llama" or mode == "greedy"


CASES = [
    pytest.param(name, mode, graphs, marks=() if _is_essential(name, mode, graphs) else pytest.mark.slow)
    for name in PACKED
    for graphs in (False, True)
    for mode in MODES
    if not (mode == "int8_pool" and name in LATENT)  # which is refused
]


@pytest.mark.parametrize(("name", "mode", "graphs"), CASES)
def test_as_stock_and_without_waiting(name: str, mode: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a tensor of a step made on the host, a launch that reads from the device, memory of a graph that an
    earlier replay left, an asynchronous copy that is read too early."""
    own = MODES[mode]
    if not _is_essential(name, mode, graphs):  # one graph each, since to record takes longest
        monkeypatch.setattr(cuda_graph, "capture_sizes", lambda max_num_seqs: [max_num_seqs])
    stock = build(name).to("cuda")
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "cuda_graphs": graphs} | own.settings
    paged = hf_paged.patch(copy.deepcopy(stock), **settings)
    if own.reached == "num_preemptions" and (most := 2 * paged.paged.core.manager.most_blocks(19, 9)) > 12:
        paged = hf_paged.patch(copy.deepcopy(stock), **settings | {"num_blocks": most + 2})
    expected = own.call(stock)
    # The first steps find out which layers can be fused; the process's first launch of a kernel compiles it.
    paged.generate(random_ids(1, 5).to("cuda"), max_new_tokens=2, eos_token_id=None)
    before = paged.paged.stats()
    with watched() as seen:
        found = own.call(paged)
    after = paged.paged.stats()
    if own.is_exact:
        assert_same(expected, found)
    else:  # rounded numbers: most of the tokens, and all of the prompt
        assert found.shape == expected.shape and (found == expected).float().mean() > 0.5
    # Rows that hold a window's blocks at most are let in with all of them.
    is_reserved = own.reached == "num_preemptions" and all(
        layer is not None and layer.window is not None for layer in paged.paged.core.traits.layers
    )
    assert (getattr(after, own.reached) > getattr(before, own.reached)) is not is_reserved
    assert paged.paged.core.pool.attention.backend.name == "triton"
    assert bool(seen.seen.of("replay")) == (graphs and name not in READS_ON_THE_HOST)
    seen.assert_clean(own.entries)
    paged.paged.check_invariants()
    del found  # scores come with a cache
    gc.collect()
    assert paged.paged.stats().num_free_blocks == after.num_blocks
