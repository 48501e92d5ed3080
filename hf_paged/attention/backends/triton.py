"""The Triton kernels: on a GPU, or in Triton's interpreter on CPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_paged.attention.backends.registry import Backend, PagedStep, PoolDescription, block_pairs, register
from hf_paged.attention.decode_work import DecodeWork, Together, WorkKind
from hf_paged.attention.latent_step import LatentAttention
from hf_paged.attention.lazy import lazy
from hf_paged.attention.metadata import AttentionMetadata
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import reference
from hf_paged.kernels.availability import HALF_OR_SINGLE, launch_failure
from hf_paged.kernels.layers import Place
from hf_paged.kernels.scaled_rows import is_scaled

if TYPE_CHECKING:  # Triton need not be installed for the other backends
    from hf_paged.kernels.ops import Partials

MAX_HEAD_DIM = 256
MAX_LATENT_ROW = 768  # elements of a latent and a rotary key
EXACT_ROWS = 64  # of a query tile, whatever a step has
EXACT_PART = 4096  # tokens, a multiple of any tile


# Not on CPU, where its interpreter is there to test with: only who asks for it gets it.
@register("triton", device_types=("cuda",), preference=2)
class TritonBackend(Backend):
    reads_empty_slots = False
    can_record = True

    def __init__(
        self,
        kv_cache: Tensor,
        latent_dim: int | None = None,
        dtype: torch.dtype | None = None,
        exact: bool = False,
    ) -> None:
        """`exact`: a token's bits depend on its own sequence only, not on how much of it a step computes, beside what.

        Steps are not recorded then, and nothing is read together.
        """
        from hf_paged.kernels import ops

        if exact and latent_dim is not None:
            raise ValueError(f"exact attention takes keys and values, got a pool of latents of {latent_dim} elements")
        super().__init__(kv_cache, latent_dim, dtype)
        self.reads_empty_slots = latent_dim is not None  # prompts of latents are expanded by torch
        self.can_record = self.can_record_all = not exact
        self._exact = exact
        self._ops: Any = ops
        self._partials = ops.Partials()
        self._recorded_partials = ops.Partials(keeps=True)

    @classmethod
    def supports(cls, pool: PoolDescription) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "needs the triton package (pip install hf-paged[gpu]), which is not installed"
        device = pool.device
        if device.type == "cuda":
            if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
                return f"needs a GPU of compute capability 8.0 or above, {torch.cuda.get_device_name(device)} has less"
        else:
            from hf_paged.kernels import launch

            if device.type != "cpu" or not launch.is_interpreting():
                return f"needs a CUDA or ROCm device, the model is on {device}"
        if pool.compute_dtype not in HALF_OR_SINGLE:
            return f"computes in float32 and half precision, the model is in {pool.compute_dtype}"
        if pool.has_two_widths:
            return "takes keys and values of one width, this pool's differ"
        most = MAX_HEAD_DIM if pool.latent_dim is None else MAX_LATENT_ROW
        if pool.head_dim > most:
            return f"takes head dims up to {most}, the model has {pool.head_dim}"
        return launch_failure(device) if device.type == "cuda" else None

    def step(self, metadata: AttentionMetadata) -> PagedStep:
        partials = self._recorded_partials if metadata.is_recorded else self._partials
        return TritonStep(self._kv_cache, metadata, partials, self._exact)

    def copy_blocks(self, pool: Tensor, copies: list[tuple[int, int]]) -> None:
        sources, destinations = block_pairs(copies, pool.device)
        if {source for source, _ in copies}.isdisjoint(destination for _, destination in copies):
            self._ops.copy_blocks(pool, sources, destinations)
        else:  # a block that is copied from and then reused as the copy of another one: order matters
            reference.copy_blocks(pool, sources, destinations)

    def warm_up(self, pool: Tensor, block: int) -> None:
        self._ops.copy_blocks(pool, *block_pairs([(block, block)], pool.device))


class TritonStep:
    def __init__(self, kv_cache: Tensor, metadata: AttentionMetadata, partials: Partials, exact: bool = False) -> None:
        """Over a pool.

        Args:
            partials: Scratch, the same for all layers.
        """
        from hf_paged.kernels import ops

        self._ops = ops
        self._kv_cache = kv_cache
        self._metadata = metadata
        self._partials = partials
        self._exact = exact

    @lazy
    def _latents(self) -> LatentAttention:
        return LatentAttention(self._kv_cache, self._metadata, self._attend_rows)

    def _attend_rows(self, query: Tensor, metadata: AttentionMetadata, params: AttentionParams) -> Tensor:
        assert params.maps is not None
        ops, kv_cache, window, width = self._ops, self._kv_cache, params.sliding_window or 0, params.maps.latent_dim
        tile, slots = ops.latent_plan(query, kv_cache, width)
        work = metadata.decode_work(WorkKind(tile, slots, window))
        return torch.ops.hf_paged.latent_attention(
            query,
            kv_cache,
            params.layer,
            width,
            metadata.block_tables,
            metadata.seq_lens,
            work.items,
            work.split,
            work.max_parts,
            params.scale,
            window,
            params.softcap or 0.0,
            params.sinks,
            self._partials.get(ops.partials_size(work.max_parts, query.shape[1], width), query.device),
            metadata.is_recorded and metadata.max_query_len > 1,
        )

    def place_of(self, layer: int) -> Place | None:
        """Where `write` puts keys and values of a layer, for kernels that do so themselves; `None`: it alone can."""
        kv_cache = self._kv_cache
        is_written_alone = kv_cache.shape[2] == 1 or is_scaled(kv_cache)
        return None if is_written_alone else Place(kv_cache, layer, self._metadata.slot_mapping)

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        if self._kv_cache.shape[2] == 1:
            torch.ops.hf_paged.write_latents(key, value, self._kv_cache, layer, self._metadata.slot_mapping)
            return
        self._ops.reshape_and_cache(key, value, self._kv_cache, layer, self._metadata.slot_mapping)

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        """Computes `reference.paged_attention` by the kernels, which read no slot that no query may see.

        The sequences that the batch begins with and that have one new token each go to the decode kernel, the others
        to the prefill kernel: one launch for either, one for each one's combination where it was split, and one for
        what decoding sequences share, where that saves enough. If exact, all go to the prefill kernel.

        Args:
            query: `[T, num_heads, head_dim]`, float32 or half precision; the keys and values are cast to it.

        Returns:
            `[T, num_heads, head_dim]` in the query's dtype, or autocast's.

        Raises:
            ValueError: Shapes that don't fit together.
        """
        kind = query.device.type
        if torch.is_autocast_enabled(kind):  # as the model's own attention would
            query = query.to(torch.get_autocast_dtype(kind))
        if params.maps is not None:
            return self._latents.attend(query, params)
        ops, kv_cache, metadata = self._ops, self._kv_cache, self._metadata
        window, num_decodes = params.sliding_window or 0, metadata.num_decodes
        work: DecodeWork | None = None
        queries: DecodeWork | None = None
        rows = 0
        if num_decodes and not self._exact:
            shape, slots = ops.decode_plan(query, kv_cache)
            shares = metadata.shared_prefixes is not None and not window
            plan = ops.shared_plan(query, kv_cache) if shares else None
            together = None if plan is None else Together(*plan)
            work = metadata.decode_work(WorkKind(shape.tokens, slots, window), together)
        if num_decodes < metadata.seq_lens.shape[0] or self._exact:
            num_tokens = max(1, EXACT_ROWS * kv_cache.shape[3] // query.shape[1])
            num_queries = num_tokens if self._exact else metadata.max_query_len
            scores = params.bias is not None, bool(params.softcap)
            rows, tile, tokens, slots = ops.prefill_plan(query, kv_cache, num_queries, *scores)
            queries = metadata.query_work(WorkKind(tokens, slots, window, tile, EXACT_PART if self._exact else 0))
        # One after the other, so their parts are in the same place.
        max_parts = max(work.max_parts if work else 0, queries.max_parts if queries else 0)
        return torch.ops.hf_paged.paged_attention(
            query,
            kv_cache,
            params.layer,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            work.items if work else None,
            work.split if work else None,
            work.shared_items if work else None,
            work.members if work else None,
            max_parts,
            queries.items if queries else None,
            queries.split if queries else None,
            rows,
            params.scale,
            window,
            params.softcap or 0.0,
            params.sinks,
            self._partials.get(ops.partials_size(max_parts, query.shape[1], query.shape[2]), query.device),
            self._exact,
            metadata.is_recorded and metadata.max_query_len > 1,
            params.bias,
        )
