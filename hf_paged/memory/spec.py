"""What a layer caches of each token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer that caches keys and values.

    Attributes:
        kv_heads: Key/value heads.
        key_dim: Elements of a head's key.
        value_dim: Elements of a head's value.
        window: Tokens that a query sees at most, itself included; `None`: all before it.
        chunk: The sequence is cut into pieces of so many tokens, and a query sees those of its own; `None`: it is not.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None

    @property
    def elements_per_token(self) -> int:
        """Numbers that a token takes."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def row_elements(self) -> int:
        """Numbers of a head that lie side by side: of its key, or where that is not as wide as its value, of both."""
        return self.key_dim if self.key_dim == self.value_dim else self.key_dim + self.value_dim
