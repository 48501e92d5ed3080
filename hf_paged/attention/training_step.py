"""Attention of whole sequences side by side, by torch, for layers that are computed again to be differentiated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hf_paged.attention.lazy import lazy
from hf_paged.attention.params import AttentionParams


class TrainingStep:
    """A `PagedStep` that stores nothing: each query sees the tokens of its own sequence up to itself."""

    def __init__(self, lens: Sequence[int], chunks: Sequence[int | None]) -> None:
        """For a packed batch.

        Args:
            lens: Tokens of each sequence.
            chunks: Of each layer, the tokens of a chunk that its attention stays within; `None`: it has none.
        """
        self._lens = torch.tensor(lens, device="cpu")
        self._chunks = chunks
        self._width = max(lens)
        self._is_even = min(lens) == self._width
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int | None, int | None], Tensor | None] = {}

    @lazy
    def _is_token(self) -> Tensor:
        """`[sequences, width]`."""
        return torch.arange(self._width, device="cpu") < self._lens[:, None]

    @lazy
    def _tokens(self) -> Tensor:
        """`[T]`, where each token of the batch is among `sequences * width`."""
        return self._is_token.flatten().nonzero()[:, 0]

    @lazy
    def _places(self) -> Tensor:
        """`[sequences * width]`, of tokens in the batch; of padding, which no token sees, the first one's."""
        places = torch.zeros(self._is_token.numel(), dtype=torch.int64, device="cpu")
        places[self._tokens] = torch.arange(len(self._tokens), device="cpu")
        return places

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        self._stored[layer] = key, value

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        key, value = self._stored.pop(params.layer)
        repeats = query.shape[1] // key.shape[1]
        queries, keys, values = (self._padded(each) for each in (query, key, value))
        if repeats > 1:
            keys, values = (each.repeat_interleave(repeats, dim=1) for each in (keys, values))
        kind = params.sliding_window, self._chunks[params.layer]
        if kind not in self._masks:
            self._masks[kind] = self._mask(*kind)
        mask = self._masks[kind]
        if params.softcap is None and params.sinks is None:
            found = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=params.scale
            )
        else:
            found = self._by_scores(queries, keys, values, self._causal if mask is None else mask, params)
        found = found.transpose(1, 2).flatten(0, 1)
        return found if self._is_even else found.index_select(0, self._tokens)

    def _padded(self, states: Tensor) -> Tensor:
        """`[T, heads, width]` as `[sequences, heads, tokens, width]`."""
        rows = states if self._is_even else states.index_select(0, self._places)
        rows = rows.unflatten(0, (len(self._lens), -1))
        return rows.transpose(1, 2)

    @lazy
    def _causal(self) -> Tensor:
        return torch.ones(self._width, self._width, dtype=torch.bool, device="cpu").tril()

    def _mask(self, window: int | None, chunk: int | None) -> Tensor | None:
        """`[width, width]`, what a query sees; `None`: all before it."""
        mask: Tensor | None = None
        if window is not None and window < self._width:
            mask = self._causal.triu(1 - window)
        if chunk is not None and chunk < self._width:
            number = torch.arange(self._width, device="cpu") // chunk
            mask = (self._causal if mask is None else mask) & (number == number[:, None])
        return mask

    def _by_scores(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, params: AttentionParams
    ) -> Tensor:
        """As models' own attention has it, where there is more to it than torch's function knows."""
        scores = queries @ keys.mT * params.scale
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if params.sinks is not None:
            sinks = params.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
        shares = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype)
        return shares[..., : keys.shape[2]] @ values
