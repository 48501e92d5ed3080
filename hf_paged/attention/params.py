"""`AttentionParams`: what one layer's call of attention asks for, besides queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_paged.kernels.latent_maps import LatentMaps


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """Settings of one call: a layer may decide them anew in every forward.

    Attributes:
        sliding_window: Tokens a query sees, itself included; `None`: all before it.
        softcap: Bound of the scores; `None`: none.
        sinks: `[num_heads]` logits that join the softmax's denominator only; `None`: none.
        bias: `[num_heads, distances]` float32, added to the scores of a query and a key so many tokens before it; all
            that are farther have the last; `None`: none.
        maps: What makes keys and values of the latents that the pool holds of this layer; `None`: it holds them.
    """

    layer: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    maps: LatentMaps | None = None
    bias: Tensor | None = None
