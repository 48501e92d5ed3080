"""What a layer caches: of each token, or of all of them together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

UNIT = 8  # bytes: every tensor of a state begins at a multiple of it


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer that caches keys and values.

    Attributes:
        window: Tokens that a query sees at most, itself included; `None`: all before it.
        chunk: The sequence is cut into pieces of so many tokens, and a query sees those of its own; `None`: it is not.
        is_latent: Whether these are one head's latents ("keys") and rotary keys ("values"), of which the layer makes
            keys and values: attention reads them as they are.
        is_cross: Whether they are made of what an encoder has read, not of the sequence's own tokens.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
    is_latent: bool = False
    is_cross: bool = False

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)

    def widened(self, by: int) -> AttentionSpec:
        """The same layer with so many more numbers in each head's key and value."""
        return replace(self, key_dim=self.key_dim + by, value_dim=self.value_dim + by)

    @property
    def row_elements(self) -> int:
        """Numbers of a head that lie side by side: of its key; of both where they are of two widths, or latents."""
        is_apart = self.key_dim == self.value_dim and not self.is_latent
        return self.key_dim if is_apart else self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One of the tensors that a layer keeps of all of a sequence's tokens together.

    Attributes:
        kind: `"conv"` or `"recurrent"`.
        shape: Of one sequence's tensor.
        dtype: Element type; `None`: the model's.
    """

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def num_units(self, dtype: torch.dtype) -> int:
        """Numbers of eight bytes that it takes in a model of this dtype."""
        return -(-math.prod(self.shape) * (self.dtype or dtype).itemsize // UNIT)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A layer with a state: recurrent, of a convolution, or both."""

    tensors: tuple[StateTensor, ...]

    @property
    def number_of_states(self) -> int:
        return 1 + max(tensor.index for tensor in self.tensors)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sequence's state in a model of this dtype."""
        return UNIT * sum(tensor.num_units(dtype) for tensor in self.tensors)
