"""`TokenInputs`: what a step's tokens are, on their way from the scheduler's plain data to the model's arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_paged.core.batch import Batch
from hf_paged.kernels.transfers import to_device
from hf_paged.model.cuda_graph import fill_in


@dataclass(slots=True)
class TokenInputs:
    """Tokens of a packed batch, side by side.

    Attributes:
        input_ids: `[N]` int64; any number for a token that was given as an embedding.
        position_ids: `[N]` int64, or `[axes, N]` where they differ from axis to axis.
        chosen: Of ids that only the device knows: `[M]` tokens there, and for each of the N its place in them, or -1
            (`input_ids` knows it).
        embedded: Of tokens given as embeddings: `[E]` their places among the N, and what was given: `[E, hidden_size]`,
            or wider, with what else belongs to them (see `Wrapper`).
        inputs_embeds: `[N, hidden_size]`, once some were given so: the ids' embeddings, too.
        extras: `[N, width]`, what else belongs to tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    chosen: tuple[Tensor, np.ndarray] | None = None
    embedded: tuple[np.ndarray, Tensor] | None = None
    inputs_embeds: Tensor | None = None
    extras: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, embeddings: Tensor | None, chosen: Tensor | None) -> TokenInputs:
        """The tokens of a step, on the CPU.

        Args:
            batch: The step.
            embeddings: What its tokens of `embedded` were given as.
            chosen: The tokens that the step before has chosen.
        """
        ids, positions = (torch.from_numpy(np.frombuffer(a, np.int64)) for a in (batch.token_ids, batch.positions))
        if batch.axes is not None:
            positions = torch.from_numpy(np.frombuffer(batch.axes, np.int64)).view(len(ids), -1).T
        known = cls(ids, positions)
        if batch.placeholders is not None:
            assert chosen is not None
            known.chosen = chosen, np.frombuffer(batch.placeholders, np.int64)
        if embeddings is not None:
            known.embedded = np.frombuffer(batch.embedded, np.int64), embeddings
        return known

    def as_row(self) -> TokenInputs:
        """As the one row of a batch."""
        return TokenInputs(
            self.input_ids[None],
            self.position_ids[..., None, :],
            inputs_embeds=None if self.inputs_embeds is None else self.inputs_embeds[None],
            extras=None if self.extras is None else self.extras[None],
        )

    def select(self, places: Tensor) -> TokenInputs:
        """Those at `[...]` places, in the places' shape; they are on their device."""
        return TokenInputs(
            self.input_ids[places],
            self.position_ids[..., places],
            inputs_embeds=None if self.inputs_embeds is None else self.inputs_embeds[places],
            extras=None if self.extras is None else self.extras[places],
        )

    def to(self, device: torch.device, embed: Callable[[Tensor], Tensor]) -> TokenInputs:
        """The same on a device, where all ids are known, and their embeddings if any are given.

        Args:
            device: Where the model is.
            embed: Its embedding of ids.
        """
        ids = to_device(self.input_ids, device)
        if self.chosen is not None:
            ids = fill_in(ids, self.chosen[0], to_device(self.chosen[1], device))
        embeds = extras = None
        if self.embedded is not None:
            embeds = embed(ids)
            places, given = to_device(self.embedded[0], device), self.embedded[1].to(device, embeds.dtype)
            width = given.shape[-1] - embeds.shape[-1]
            if width:
                extras = embeds.new_zeros(len(ids), width).index_copy(0, places, given[:, -width:])
            embeds = embeds.index_copy(0, places, given[:, : embeds.shape[-1]])
        return TokenInputs(ids, to_device(self.position_ids, device), inputs_embeds=embeds, extras=extras)
