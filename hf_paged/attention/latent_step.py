"""Attention of one step over latents: decode rows absorbed, prompts expanded, what lies between as it costs less."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.metadata import AttentionMetadata, RecordedMetadata
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import reference
from hf_paged.kernels.latent_maps import LatentMaps
from hf_paged.kernels.padded_groups import PaddedGroup
from hf_paged.kernels.transfers import to_device

MOST_EXPANDED = 2**27  # numbers of keys and values that are made of latents at once: of few heads, if tokens are many
AttendRows = Callable[[Tensor, AttentionMetadata, AttentionParams], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LatentPlan:
    """How a step's tokens are attended for.

    Attributes:
        absorbed: Tokens whose queries are mapped, each as a sequence that ends with it; `None`: none.
        tokens: `[R]` int64, where they are in the batch; `None`: it has no others.
        expanded: The sequences whose keys and values are made of latents.
    """

    absorbed: AttentionMetadata | None
    tokens: Tensor | None
    expanded: list[PaddedGroup]

    @property
    def num_expanded(self) -> int:
        """The tokens of the group that has most."""
        return max(len(group.seq_lens) * group.longest for group in self.expanded)

    @classmethod
    def of(cls, metadata: AttentionMetadata, maps: LatentMaps, device: torch.device) -> LatentPlan:
        """Chooses the cheaper way of each sequence. Of a recorded step, whose lengths are not known: one for all."""
        num_sequences = len(metadata.host_seq_lens)
        if isinstance(metadata, RecordedMetadata):
            return cls(metadata.of_all_tokens(), None, [])
        if metadata.num_decodes == num_sequences:
            return cls(metadata, None, [])
        is_expanded = maps.is_expanded(metadata.host_query_lens, metadata.host_seq_lens)
        groups = metadata.padded(np.nonzero(is_expanded)[0])
        if is_expanded.all():
            return cls(None, None, groups)
        absorbed, tokens = metadata.by_token(np.nonzero(~is_expanded)[0])
        return cls(absorbed, to_device(tokens, device), groups)


class LatentAttention:
    """What a backend's step does for layers whose latents are in the pool."""

    def __init__(self, kv_cache: Tensor, metadata: AttentionMetadata, attend_rows: AttendRows) -> None:
        """For one step.

        Args:
            kv_cache: The KV tensor, `[blocks, layers, 1, 1, block_size, latent_dim + rotary_dim]`.
            attend_rows: Attention of absorbed queries `[R, num_heads, latent_dim + rotary_dim]`, the tokens of the
                metadata it is given, over one head: whole rows are its keys, the latents in them its values. Returns
                `[R, num_heads, latent_dim]`.
        """
        self._kv_cache = kv_cache
        self._metadata = metadata
        self._attend_rows = attend_rows
        self._plans: dict[Hashable, LatentPlan] = {}  # layers of the same widths share one

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        """`[T, num_heads, value_dim]` for queries `[T, num_heads, key_dim]`."""
        maps = params.maps
        assert maps is not None
        kind = maps.key.shape[1:], maps.value.shape[1]
        if kind not in self._plans:
            self._plans[kind] = LatentPlan.of(self._metadata, maps, query.device)
        plan = self._plans[kind]
        result: Tensor | None = None
        if plan.absorbed is not None:
            rows = query if plan.tokens is None else query[plan.tokens]
            found = maps.project(self._attend_rows(maps.absorb(rows), plan.absorbed, params))
            if plan.tokens is None:
                return found
            result = found.new_empty(*query.shape[:2], found.shape[-1])
            result[plan.tokens] = found
        if not plan.expanded:
            assert result is not None
            return result
        num_heads, width = query.shape[1], query.shape[2] + maps.value.shape[1]
        at_once = max(1, MOST_EXPANDED // (plan.num_expanded * width))
        if at_once >= num_heads:
            return self._expand(query, params, maps, plan, result)
        if result is None:
            result = query.new_empty(*query.shape[:2], maps.value.shape[1])
        for first in range(0, num_heads, at_once):
            heads = slice(first, first + at_once)
            sinks = None if params.sinks is None else params.sinks[heads]
            own = replace(params, sinks=sinks)
            self._expand(query[:, heads], own, maps.of_heads(first, first + at_once), plan, result[:, heads])
        return result

    def _expand(
        self, query: Tensor, params: AttentionParams, maps: LatentMaps, plan: LatentPlan, result: Tensor | None
    ) -> Tensor:
        return reference.paged_attention(
            query,
            self._kv_cache,
            params.layer,
            plan.expanded,
            params.scale,
            params.sliding_window,
            params.softcap,
            params.sinks,
            output=result,
            read=maps.expand,
        )
