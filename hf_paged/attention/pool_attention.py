"""`PoolAttention`: the pool's tensor, and the backends that compute over it."""

from __future__ import annotations

from collections.abc import Sequence

from hf_paged.attention.backends.registry import Backend, PagedStep, choose
from hf_paged.attention.groups import GroupedStep
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.memory.kv_cache import KVCache


class PoolAttention:
    """What reads and writes a pool in steps.

    Attributes:
        backends: Of each group of layers, what computes over its view; one for groups of one shape.
    """

    def __init__(self, kv_cache: KVCache, name: str) -> None:
        """Takes backends from the registry.

        Raises:
            ValueError: See `choose`.
        """
        self.kv_cache = kv_cache
        made: dict[int, Backend] = {}
        for view, page in zip(kv_cache.views, kv_cache.geometry.groups, strict=True):
            if id(view) not in made:
                latent_dim = page.key_dim if page.is_latent else None
                made[id(view)] = choose(name, view, kv_cache.compute_dtype, latent_dim)
        self.backends = [made[id(view)] for view in kv_cache.views]

    @property
    def backend(self) -> Backend:
        """The first group's backend, which does what concerns whole blocks."""
        return self.backends[0]

    def step(self, metadata: Sequence[AttentionMetadata]) -> PagedStep:
        if self.kv_cache.groups.is_single:  # its layers are the pool's
            return self.backends[0].step(metadata[0])
        steps = [backend.step(own) for backend, own in zip(self.backends, metadata, strict=False)]
        return GroupedStep(steps, self.kv_cache.groups)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Executes copy-on-write pairs `(source, destination)`, all layers at once."""
        if copies:
            self.backend.copy_blocks(self.kv_cache.tensor, copies)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks about to be filled, where a backend needs it.

        The torch attention multiplies what masked slots hold by zero, so whatever an earlier owner left there (a NaN
        of a failed request) must be gone.
        """
        if blocks and any(backend.reads_empty_slots for backend in self.backends):
            self.kv_cache.zero_blocks(blocks)

    def warm_up(self) -> None:
        """Launches the kernels that no forward does, on a block that stays as it is."""
        self.backend.warm_up(self.kv_cache.tensor, self.kv_cache.null_block)
