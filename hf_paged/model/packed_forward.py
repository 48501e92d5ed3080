"""`PackedForward`: a caller's padded rows as sequences with uncomputed tokens, ready for the packed batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.cache import PagedCache
from hf_paged.core.sequence import GivenToken, Sequence
from hf_paged.model.forward_call import ForwardCall
from hf_paged.model.weights_version import WeightsVersion


def plain_padding(cache: PagedCache, call: ForwardCall, active: list[int], takes_positions: bool) -> list[int] | None:
    """Left padding of each row, if its real tokens alone say what is to be stored; else `None`.

    Args:
        cache: The call's cache.
        call: The call, reduced to the active rows.
        active: Rows of the cache that the call is about.
        takes_positions: Whether the model's forward takes position ids: without them, a token's place is its column.
    """
    if cache.is_padded:
        return None
    length = call.tokens.shape[1]
    width = cache.get_seq_length()
    positions = call.position_ids
    if positions is not None and (
        positions.shape not in ((1, length), (len(active), length)) or positions.is_floating_point()
    ):
        return None  # the model itself broadcasts them, or refuses
    padding = [cache.padding[row] for row in active]
    mask = call.on_host().attention_mask
    if mask is None:
        return padding
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != (len(active), width + length):
        return None
    hidden = mask == 0
    given: list[int] = hidden.sum(dim=1).tolist()
    if not any(given):
        return padding if not any(padding) else None
    leading = hidden.long().cumprod(dim=1).sum(dim=1).tolist()
    if leading != given or min(given) >= width + length or (positions is None and takes_positions):
        return None
    # Padding of a row that has no token yet may grow.
    is_same = all(now == before or now >= before == width for now, before in zip(given, padding, strict=True))
    return given if is_same else None


def sees_padding(call: ForwardCall, padding: list[int], width: int) -> bool:
    """Whether a call with such padding asks for more than logits of real tokens.

    Args:
        call: The call.
        padding: Of each row.
        width: Columns of the cache before the call.
    """
    if call.others:
        return True
    keep, num_columns = call.logits_to_keep, width + call.tokens.shape[1]
    return max(padding) > width and not (isinstance(keep, int) and 0 < keep <= num_columns - max(padding))


@dataclass(slots=True)
class PackedForward:
    """One call whose rows run in the packed batch.

    Attributes:
        call: The call, reduced to its active rows.
        sequences: Their sequences.
        padding: Their left padding, in columns.
        width: Columns of the cache before the call.
        offsets: Of each row, what its new tokens' positions exceed their index in the sequence by; `None` if it varies.
    """

    call: ForwardCall
    sequences: list[Sequence]
    padding: list[int]
    width: int
    offsets: list[int | None]

    @classmethod
    def make(
        cls, call: ForwardCall, sequences: list[Sequence], padding: list[int], width: int, takes_positions: bool
    ) -> PackedForward:
        """The forward of `call`'s rows; where it gives no position ids, a token's position is its column."""
        given = call.on_host().position_ids
        if not takes_positions:  # a token's place is its index in the sequence
            return cls(call, sequences, padding, width, [0] * len(sequences))
        # On the host by name: the caller may have set another default device.
        columns = torch.arange(width, width + call.tokens.shape[1], device="cpu")
        index = columns - torch.tensor(padding, device="cpu")[:, None]
        difference = (columns if given is None else given.cpu()) - index
        last = difference[:, -1:]
        is_uniform = ((difference == last) | (index < 0)).all(dim=1).tolist()
        offsets = [offset if uniform else None for offset, uniform in zip(last[:, 0].tolist(), is_uniform, strict=True)]
        return cls(call, sequences, padding, width, offsets)

    @property
    def length(self) -> int:
        """Columns of the call."""
        return self.call.tokens.shape[1]

    @property
    def longest(self) -> int:
        """One more than the largest position id of the call."""
        positions = self.call.on_host().position_ids
        return 1 + (self.width + self.length - 1 if positions is None else int(positions.max()))

    def extend_sequences(self, weights_version: WeightsVersion | None, salt: tuple[Hashable, ...] = ()) -> None:
        """Adds the call's tokens to its sequences. What was given as embeddings is copied: the caller may write to it.

        Args:
            weights_version: Asked for the key of the model's weights; `None` when they can't have changed since the
                last call.
            salt: Part of the prefix-cache key of sequences that begin.
        """
        # Hashing full blocks and recomputing preempted ones need the new ids.
        given = self.call.on_host().input_ids
        new_ids = None if given is None else given.tolist()
        state = None if weights_version is None else weights_version.key()
        embeds = None if self.call.inputs_embeds is None else self.call.inputs_embeds.detach().clone()
        for row, sequence in enumerate(self.sequences):
            new = self.length - max(self.padding[row] - self.width, 0)
            if sequence.num_tokens == 0:
                sequence.position_offset, sequence.is_stale = self.offsets[row] or 0, False
                sequence.extra_key = (*(state or ()), sequence.position_offset, *salt)
            elif state is not None and sequence.extra_key[: len(state)] != state:
                if sequence.num_uncomputed_tokens:
                    sequence.check_state(state)
                sequence.is_stale = True  # older weights or another adapter wrote the beginning: only the pool has it
            assert sequence.token_ids is not None, "tokens behind unknown ones"
            if new_ids is not None and self.offsets[row] == sequence.position_offset:
                sequence.token_ids += new_ids[row][self.length - new :]
            else:
                sequence.token_ids += self._given_tokens(row, new, None if new_ids is None else new_ids[row], embeds)
                sequence.given_end = len(sequence.token_ids)
            sequence.num_tokens += new
            if new > 1:
                sequence.num_at_once = sequence.num_tokens
            if not sequence.num_prompt_tokens:
                sequence.num_prompt_tokens = sequence.num_tokens

    def wanted_logits(self) -> np.ndarray:
        """Index, in its sequence, of each token whose logits the caller wants: `[rows, columns kept]`."""
        keep = self.call.on_host().logits_to_keep
        columns = np.arange(self.length)[keep.cpu().numpy() if isinstance(keep, Tensor) else slice(-keep, None)]
        return self.width + columns - np.asarray(self.padding, dtype=np.int64)[:, None]

    def _given_tokens(self, row: int, new: int, ids: list[int] | None, embeds: Tensor | None) -> list[GivenToken]:
        """A row's last `new` columns as tokens that say where they are, and what."""
        columns = range(self.length - new, self.length)
        offset = self.offsets[row]
        if offset is not None:
            first = self.width - self.padding[row] + offset
            positions = {column: first + column for column in columns}
        else:
            given = self.call.on_host().position_ids
            assert given is not None
            own = given.expand(len(self.sequences), self.length)[row].tolist()
            positions = {column: own[column] for column in columns}
        if ids is not None:
            return [GivenToken.at(positions[column], ids[column]) for column in columns]
        assert embeds is not None
        states = embeds[row]
        return [GivenToken.embedded(positions[column], states, column) for column in columns]
