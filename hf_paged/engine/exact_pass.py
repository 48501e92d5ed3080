"""`ExactPass`: sequences that are all known, through the model in one forward of the engine's, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.attention.training_step import TrainingStep
from hf_paged.engine.core import EngineCore
from hf_paged.memory.kv_cache import KVCache
from hf_paged.model.exact_forward import differentiable
from hf_paged.model.token_inputs import TokenInputs


class ExactPass:
    """Forwards beside the engine's steps, over blocks of their own that are there as long as the forward runs."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def logits(self, ids: Tensor, positions: Tensor, lens: list[int], wanted: Tensor) -> Tensor:
        """The logits of some tokens, with gradients where these are enabled: bit by bit those that steps compute.

        Args:
            ids: `[T]` int64, sequence after sequence.
            positions: `[T]` int64.
            lens: Tokens of each sequence, one or more.
            wanted: `[K]` int64, the places of the tokens, one or more.

        Returns:
            `[K, vocab_size]`.

        Raises:
            ValueError: Adapters are added by PEFT's own code, or code of others runs in the model's forward.
        """
        core, bound = self._core, self._core.bound
        with core.worker.loop.exclusive(), torch.inference_mode(False):
            with core.transaction():
                core.weights_key()
                (adapter,) = core.adapters_for(1)
            if core.adapters.why_own_code is not None:
                raise ValueError(
                    f"no exact forward: adapters are added by PEFT's own code: {core.adapters.why_own_code}"
                )
            if foreign := core.weights_version.foreign():
                raise ValueError(f"no exact forward: hooks or modules of others run in the model's: {foreign}")
            attention, metadata = self._blocks(np.array(lens))
            layers = core.traits.layers
            step = TrainingStep(lens, [None if layer is None else layer.chunk for layer in layers])
            slots = np.full(len(ids), -1 if adapter is None else adapter.slot, dtype=np.int32)
            rows = nullcontext() if adapter is None else core.adapters.running([slots, slots[: len(wanted)]])
            has_gradients = torch.is_grad_enabled()
            bound.within = partial(differentiable, bound.model, step, bound.configs)
            try:
                with torch.no_grad(), bound.prepared(), rows, torch.set_grad_enabled(has_gradients):
                    return core.runner.packed.run(TokenInputs(ids, positions), metadata, attention, wanted)
            finally:
                bound.within = nullcontext

    def _blocks(self, lens: np.ndarray) -> tuple[PoolAttention, list[AttentionMetadata]]:
        """Blocks for sequences of these lengths, and the step that fills them."""
        pool, config = self._core.pool, self._core.config
        groups, size = pool.groups, config.block_size
        counts = -(-lens // size)
        starts = np.cumsum(counts) - counts
        num_blocks, columns = int(counts.sum()), np.arange(int(counts.max()))
        null_block = num_blocks * len(groups.windows)
        dtype, device = self._core.bound.placement
        kv_cache = KVCache(pool.geometry, null_block, size, device, dtype, groups)
        own = np.where(columns < counts[:, None], starts[:, None] + columns, -1)
        tables = [np.where(own < 0, null_block, own + number * num_blocks) for number in range(len(groups.windows))]
        metadata = AttentionMetadata.of_groups(tables, lens, lens, size, null_block, device)
        for group, chunk in enumerate(groups.chunks):
            if chunk is not None:
                metadata[group] = metadata[group].in_chunks(metadata[group].host_tables, chunk)
        return PoolAttention(kv_cache, config.attention_backend), metadata


@contextmanager
def steps_wait_for_optimizers(core: EngineCore) -> Iterator[None]:
    """Within it, an optimizer that holds some of the model's parameters steps between two of the engine's steps.

    What it leaves half done, when it raises, holds these up to the end of this context.
    """
    held: dict[int, ExitStack] = {}  # by the optimizer, whose end alone lets go

    def before(optimizer: Any, *_: Any) -> None:
        after(optimizer)
        own = set(map(id, core.model.parameters()))
        if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            stack = held[id(optimizer)] = ExitStack()
            stack.enter_context(core.worker.loop.exclusive())

    def after(optimizer: Any, *_: Any) -> None:
        held.pop(id(optimizer), ExitStack()).close()

    handles = [
        register_optimizer_step_pre_hook(before),  # type: ignore[no-untyped-call]
        register_optimizer_step_post_hook(after),  # type: ignore[no-untyped-call]
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while held:
            held.popitem()[1].close()
