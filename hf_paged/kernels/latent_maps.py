"""`LatentMaps`: what a layer of multi-head latent attention makes of latents, and what that makes of its queries.

Of each token the pool holds a latent `c` and a rotary key `r`. Head `h` has the key `[K_h c, r]` and the value `V_h c`.
With `q = [a, b]`, its score is `a · K_h c + b · r = [K_h' a, b] · [c, r]`, and its output `V_h (sum_j p_j c_j)`: so
attention may read latents as the keys and values of a single head, after a map of the queries and before one of its
results (absorbed); or keys and values may be made of the latents first (expanded).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LatentMaps:
    """One layer's maps.

    Attributes:
        key: `[num_heads, key_dim - rotary_dim, latent_dim]`, `K_h`.
        value: `[num_heads, value_dim, latent_dim]`, `V_h`.
    """

    key: Tensor
    value: Tensor

    @property
    def latent_dim(self) -> int:
        return self.key.shape[2]

    def absorb(self, query: Tensor) -> Tensor:
        """`[T, num_heads, latent_dim + rotary_dim]` of queries `[T, num_heads, key_dim]`."""
        plain = self.key.shape[1]
        mapped = torch.bmm(query[..., :plain].transpose(0, 1), self.key).transpose(0, 1)
        return torch.cat([mapped, query[..., plain:]], dim=-1)

    def project(self, latents: Tensor) -> Tensor:
        """`[T, num_heads, value_dim]` of weighted sums of latents, `[T, num_heads, latent_dim]`."""
        return torch.bmm(latents.transpose(0, 1), self.value.transpose(1, 2)).transpose(0, 1)

    def expand(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[G, num_heads, S, key_dim]` and `[..., value_dim]` of `[G, 1, S, latent_dim + rotary_dim]`.

        Rows of padding, which are zero, stay so.
        """
        latents, rotary = states[:, 0, :, : self.latent_dim], states[..., self.latent_dim :]
        rows = latents.flatten(0, 1).expand(len(self.key), -1, -1)  # the same for all heads: not copied
        key, value = (
            torch.bmm(rows, own.transpose(1, 2)).unflatten(1, latents.shape[:2]).transpose(0, 1)
            for own in (self.key, self.value)
        )
        return torch.cat([key, rotary.expand(-1, key.shape[1], -1, -1)], dim=-1), value

    def of_heads(self, first: int, last: int) -> LatentMaps:
        return LatentMaps(self.key[first:last], self.value[first:last])

    def is_expanded(self, num_new: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Which of some sequences cost fewer multiplications expanded than absorbed, `[S]` bool on the host.

        A query and a key take as many as they and their value are wide: absorbed (twice the latent) more than expanded.
        The maps take as many for a new token's query and result as for any token's key and value: expanded they are
        applied to all tokens, absorbed to the new ones. So a prompt is expanded, and a decode row is not.

        Args:
            num_new: `[S]` int64, new tokens of each.
            num_tokens: `[S]` int64, all tokens of each.
        """
        plain, latent = self.key.shape[1:]
        made = plain + self.value.shape[1]
        pairs = num_new * num_tokens - num_new * (num_new - 1) // 2
        return (num_new > 1) & (pairs * (2 * latent - made) > (num_tokens - num_new) * latent * made)
