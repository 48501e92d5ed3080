"""How large a model's pool is: as it was set, or from the memory that is free at its first use."""

from __future__ import annotations

from hf_paged.core.cache_groups import CacheGroups
from hf_paged.core.config import PagedConfig
from hf_paged.engine.kv_pool import KV_DTYPES, PoolSize
from hf_paged.memory.kv_cache import check_size, num_blocks_for_memory
from hf_paged.memory.spread_cache import shares
from hf_paged.memory.state_cache import StateLayout
from hf_paged.memory.streams import among_steps
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.step_memory import StepMemory


def find_size(config: PagedConfig, groups: CacheGroups, model: BoundModel, memory: StepMemory) -> PoolSize:
    """The size of a pool for this model, where it is now; runs a trial step where that takes memory (on a GPU).

    Raises:
        ValueError: The blocks asked for are more than there is memory.
    """
    traits, max_context, block_size = model.traits, model.max_context, config.block_size
    dtype, device = model.placement
    num_groups = len(groups.windows)
    geometry = traits.geometry(groups, KV_DTYPES.get(config.kv_cache_dtype, dtype), block_size)
    state_blocks = 0
    if traits.states:
        page_bytes = geometry.bytes_per_block(block_size)
        state_blocks = StateLayout.of(traits.states, page_bytes, dtype).num_pages
    parts = shares(geometry, groups, model.layer_devices, device)
    num_blocks = config.num_blocks
    if num_blocks is None:
        with among_steps(device):  # a trial step, whose memory is then theirs
            reserved = memory.reserved_bytes(min(config.max_num_batched_tokens, max_context), block_size, num_groups)
            # Of states one that a sequence goes on with, and one that is kept.
            most = config.max_num_seqs * (max_context * num_groups + 2 * state_blocks * block_size)
            num_blocks = min(
                num_blocks_for_memory(
                    part.geometry,
                    block_size,
                    config.memory_fraction,
                    most,
                    part.device,
                    part.geometry.bytes_per_block(block_size) + reserved,
                )
                for part in parts
            )
    for part in parts:
        check_size(part.geometry, num_blocks, block_size, part.device)
    return PoolSize(num_blocks, max_context)
