"""`TokenInputs`: a step's tokens, from the scheduler's plain data to the model's arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_paged.core.batch import Batch
from hf_paged.kernels.transfers import to_device


def fill_in(ids: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
    """`[N]` ids, of which those with a place of 0 or above are the `chosen` token there (0 for one that is none)."""
    return torch.where(places >= 0, chosen[places.clamp(min=0)].clamp(min=0), ids)


@dataclass(slots=True)
class TokenInputs:
    """Tokens of a packed batch, side by side.

    Attributes:
        input_ids: `[N]` int64; any number for a token that was given as an embedding.
        position_ids: `[N]` int64, or `[axes, N]` where they differ from axis to axis.
        chosen: Of ids that only the device knows: `[M]` tokens there, and for each of the N its place in them, or -1
            (`input_ids` knows it).
        given: `[E, hidden_size]`, what tokens were given as that are not ids, or wider, with what else belongs to them
            (see `Wrapper`); `None`: all are ids.
        given_at: `[N]` int64, each token's place in these, or -1: it is an id.
    """

    input_ids: Tensor
    position_ids: Tensor
    chosen: tuple[Tensor, np.ndarray] | None = None
    given: Tensor | None = None
    given_at: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, embeddings: Tensor | None, chosen: Tensor | None) -> TokenInputs:
        """The tokens of a step, on the CPU.

        Args:
            embeddings: What its tokens of `embedded` were given as.
        """
        ids = torch.from_numpy(np.frombuffer(batch.token_ids, np.int64))
        positions = torch.from_numpy(np.frombuffer(batch.positions, np.int64))
        if batch.axes is not None:
            positions = torch.from_numpy(np.frombuffer(batch.axes, np.int64)).view(len(ids), -1).T
        known = cls(ids, positions)
        if batch.placeholders is not None:
            assert chosen is not None
            known.chosen = chosen, np.frombuffer(batch.placeholders, np.int64)
        if embeddings is not None:
            known.given, known.given_at = embeddings, torch.full((len(ids),), -1)
            places = torch.from_numpy(np.frombuffer(batch.embedded, np.int64))
            known.given_at[places] = torch.arange(len(places))
        return known

    def as_row(self) -> TokenInputs:
        return TokenInputs(
            self.input_ids[None],
            self.position_ids[..., None, :],
            given=self.given,
            given_at=None if self.given_at is None else self.given_at[None],
        )

    def select(self, places: Tensor) -> TokenInputs:
        """Selects tokens by `[...]` places, which are on their device, in the places' shape."""
        return TokenInputs(
            self.input_ids[places],
            self.position_ids[..., places],
            given=self.given,
            given_at=None if self.given_at is None else self.given_at[places],
        )

    def to(self, device: torch.device) -> TokenInputs:
        """Copies to a device on which all ids are known."""
        ids = to_device(self.input_ids, device)
        if self.chosen is not None:
            ids = fill_in(ids, self.chosen[0], to_device(self.chosen[1], device))
        given_at = None if self.given_at is None else to_device(self.given_at, device)
        return TokenInputs(ids, to_device(self.position_ids, device), given=self.given, given_at=given_at)
