"""`PackedForward`: a caller's padded rows as sequences with uncomputed tokens, ready for the packed batch."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_paged.core.sequence import GivenPrompt, GivenToken, Sequence, Token
from hf_paged.kernels.transfers import to_device, to_host
from hf_paged.model.adapter import Adapter
from hf_paged.model.bound_model import BoundModel
from hf_paged.model.forward_call import ForwardCall
from hf_paged.model.weights_version import WeightsKey


def plain_padding(call: ForwardCall, before: list[int], width: int, takes_positions: bool) -> list[int] | None:
    """Left padding of each row, if its real tokens alone say what is to be stored; else `None`.

    Args:
        before: The rows' padding in the cache of `width` columns.
        takes_positions: Whether the model's forward takes position ids: without them, a token's place is its column.
    """
    if not call.is_known:
        return None
    length = call.tokens.shape[1]
    positions = call.position_ids
    if (
        positions is not None
        and (
            positions.ndim not in ((2,) if call.given is None else (2, 3))  # only wrappers take several axes
            or positions.shape[-2:] not in ((1, length), (len(before), length))
            or positions.is_floating_point()
        )
    ):
        return None  # the model itself broadcasts them, or refuses
    mask = call.on_host().attention_mask
    if mask is None:
        return before
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != (len(before), width + length):
        return None
    hidden = mask == 0
    given: list[int] = hidden.sum(dim=1).tolist()
    if not any(given):
        return before if not any(before) else None
    leading = hidden.long().cumprod(dim=1).sum(dim=1).tolist()
    if leading != given or min(given) >= width + length or (positions is None and takes_positions):
        return None
    # Padding of a row that has no token yet may grow.
    is_same = all(now == own or now >= own == width for now, own in zip(given, before, strict=True))
    return given if is_same else None


def sees_padding(call: ForwardCall, padding: list[int], width: int) -> bool:
    """Whether a call with such padding asks for more than logits of real tokens.

    Args:
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
        padding: The left padding of each row, in columns.
        width: Columns of the cache before the call.
        positions: `[axes, rows, columns]` on the host.
        offsets: Of each row, what the last token's position (on the first axis) exceeds its index in the sequence by.
        is_uniform: Of each row, whether that goes for all its new tokens.
    """

    call: ForwardCall
    sequences: list[Sequence]
    padding: list[int]
    width: int
    positions: Tensor
    offsets: list[int]
    is_uniform: list[bool]

    @classmethod
    def make(
        cls, call: ForwardCall, sequences: list[Sequence], padding: list[int], width: int, bound: BoundModel
    ) -> PackedForward:
        """The forward of `call`'s rows; where it gives no position ids, a token's position is its column."""
        given = call.on_host().position_ids
        # On the host by name: the caller may have set another default device.
        columns = torch.arange(width, width + call.tokens.shape[1], device="cpu")
        index = columns - torch.tensor(padding, device="cpu")[:, None]
        if not bound.takes_positions:  # a token's place is its index in the sequence, or its column
            is_shifted, are_uniform = bound.traits.places_by_column, [True] * len(padding)
            places = columns.expand_as(index) if is_shifted else index
            offsets = padding.copy() if is_shifted else [0] * len(padding)
            return cls(call, sequences, padding, width, places[None], offsets, are_uniform)
        positions = columns if given is None else given.cpu()
        difference = positions - index  # [rows, columns], or [axes, rows, columns]
        if difference.ndim == 2:
            difference = difference[None]
        last = difference[0, :, -1:]
        is_uniform = ((difference == last) | (index < 0)).all(dim=2).all(dim=0).tolist()
        return cls(call, sequences, padding, width, difference + index, last[:, 0].tolist(), is_uniform)

    @property
    def length(self) -> int:
        """The columns of the call."""
        return self.call.tokens.shape[1]

    @property
    def longest(self) -> int:
        """One more than the largest position id of the call."""
        positions = self.call.on_host().position_ids
        return 1 + (self.width + self.length - 1 if positions is None else int(positions.max()))

    def extend_sequences(
        self,
        state: WeightsKey | None,
        salt: tuple[Hashable, ...] = (),
        adapters: list[Adapter | None] | None = None,
    ) -> None:
        """Adds the call's tokens to its sequences. What was given as embeddings is copied: the caller may write to it.

        Args:
            state: The key of the model's weights; `None`: steps notice when these change.
            salt: Part of the prefix-cache key of sequences that begin.
            adapters: Of each of its sequences; `None`: those that they have.
        """
        # Hashing full blocks and recomputing preempted ones need the new ids.
        given = self.call.on_host().input_ids
        new_ids = None if given is None else given.tolist()
        given_rows = self._given_rows()
        for row, sequence in enumerate(self.sequences):
            new = self.length - max(self.padding[row] - self.width, 0)
            adapter = sequence.adapter if adapters is None else adapters[row]
            if sequence.num_tokens == 0:
                sequence.position_offset, sequence.is_recomputable = self.offsets[row], True
                sequence.adapter, own = adapter, () if adapter is None else (adapter.key,)
                if self.call.sources is not None:
                    sequence.source = self.call.sources[row]
                    own = sequence.source.digest, *own
                sequence.extra_key = (*(state or ()), sequence.position_offset, *salt, *own)
            elif adapter is not sequence.adapter or (state is not None and not sequence.is_of(state)):
                if sequence.num_uncomputed_tokens:
                    sequence.check_state(state, adapter)
                # Older weights or another adapter wrote the beginning: only the pool has it.
                sequence.is_recomputable, sequence.adapter = False, adapter
            first = len(sequence.token_ids)
            tokens, spans = self._tokens(row, new, new_ids, given_rows, first, sequence.position_offset)
            if given_rows is not None or spans or not self._is_plain(row, sequence.position_offset):
                sequence.given_end = first + len(tokens)
            sequence.token_ids += tokens
            sequence.spans += spans
            sequence.num_tokens += new
            if new > 1:
                sequence.num_at_once = sequence.num_tokens
            if not sequence.num_prompt_tokens:
                sequence.num_prompt_tokens = sequence.num_tokens

    @classmethod
    def prompts(cls, call: ForwardCall, bound: BoundModel) -> list[GivenPrompt] | None:
        """A first forward's rows, if each of them goes on with plain ids at the positions that follow; else `None`."""
        padding = plain_padding(call, [0] * call.tokens.shape[0], 0, bound.takes_positions)
        if padding is None or call.others:
            return None
        packed = cls.make(call, [], padding, 0, bound)
        last = packed.positions[:, :, -1]
        if not bool((last == last[:1]).all()):
            return None
        ids = call.on_host().input_ids
        new_ids, given_rows = None if ids is None else ids.tolist(), packed._given_rows()
        prompts: list[GivenPrompt] = []
        for row, offset in enumerate(packed.offsets):
            new = packed.length - padding[row]
            tokens, spans = packed._tokens(row, new, new_ids, given_rows, 0, offset)
            prompts.append(GivenPrompt(tokens, offset, spans))
        return prompts

    def _tokens(
        self,
        row: int,
        new: int,
        ids: list[list[int]] | None,
        given_rows: list[_GivenRow | None] | None,
        num_tokens: int,
        offset: int,
    ) -> tuple[list[Token], tuple[tuple[int, int], ...]]:
        """A row's last `new` columns, as tokens of a sequence of `num_tokens`, and runs of them that see each other."""
        given = given_rows[row] if given_rows is not None else None
        spans = self._spans(row, new, num_tokens)
        own_ids = None if ids is None else ids[row]
        if own_ids is not None and given is None and not spans and self._is_plain(row, offset):
            return [*own_ids[self.length - new :]], ()
        tokens = self._given_tokens(row, new, own_ids, given, offset)
        _see_each_other(tokens, spans, num_tokens, offset)
        return tokens, tuple(spans)

    def _is_plain(self, row: int, offset: int) -> bool:
        return self.is_uniform[row] and self.offsets[row] == offset

    def wanted_logits(self) -> np.ndarray:
        """Index, in its sequence, of each token whose logits the caller wants: `[rows, columns kept]`."""
        keep = self.call.on_host().logits_to_keep
        columns = np.arange(self.length)[keep.cpu().numpy() if isinstance(keep, Tensor) else slice(-keep, None)]
        return self.width + columns - np.asarray(self.padding, dtype=np.int64)[:, None]

    def _given_rows(self) -> list[_GivenRow | None] | None:
        """What tokens of each row were given as, beside ids; `None`: nothing."""
        inner, embeds = self.call.inner, self.call.inputs_embeds
        if inner is None:
            if embeds is None:
                return None
            embeds = embeds.detach().clone()
            return [_GivenRow(states, list(range(self.length)), None) for states in embeds]
        if inner.embedded is None:
            return None
        rows: list[_GivenRow | None] = []
        for row, columns in enumerate(inner.embedded):
            if not columns:
                rows.append(None)
                continue
            states = inner.given[row, to_device(columns, inner.inputs_embeds.device)].detach()
            (content,) = to_host([states.contiguous()])
            rows.append(_GivenRow(states, columns, content.view(torch.uint8).numpy()))
        return rows

    def _spans(self, row: int, new: int, num_tokens: int) -> list[tuple[int, int]]:
        """Runs of a row's new tokens that see each other, as places in its sequence of so many tokens."""
        inner = self.call.inner
        if inner is None or inner.spans is None:
            return []
        shift, first = num_tokens - (self.length - new), self.length - new
        return [(max(start, first) + shift, stop + shift) for start, stop in inner.spans[row] if stop > first + 1]

    def _given_tokens(
        self, row: int, new: int, ids: list[int] | None, given: _GivenRow | None, offset: int
    ) -> list[Token]:
        """A row's last `new` columns, as ids where these and the sequence's offset tell all of them."""
        tokens: list[Token] = []
        index = {} if given is None else {column: place for place, column in enumerate(given.columns)}
        first = self.width - self.padding[row] + offset
        for column, axes in enumerate(self.positions[:, row].T.tolist()[self.length - new :], self.length - new):
            position = axes[0] if axes.count(axes[0]) == len(axes) else tuple(axes)
            place = index.get(column)
            if place is not None:
                assert given is not None
                content = None if given.content is None else given.content[place]
                tokens.append(GivenToken.embedded(position, given.states, place, content))
            else:
                assert ids is not None
                is_plain = position == first + column
                tokens.append(ids[column] if is_plain else GivenToken.at(position, ids[column]))
        return tokens


@dataclass(frozen=True, slots=True)
class _GivenRow:
    """Tokens of a row that were not given as ids.

    Attributes:
        states: `[tokens, width]`, what they were given as.
        columns: Where they are in the call.
        content: `[tokens, bytes]` of the same, on the host; `None`: they are to equal nothing.
    """

    states: Tensor
    columns: list[int]
    content: np.ndarray | None


def _see_each_other(tokens: list[Token], spans: list[tuple[int, int]], first: int, offset: int) -> None:
    """Gives tokens that see each other a digest of all of them: what is computed of one follows from them all.

    Args:
        tokens: Of a sequence, from its token number `first` on; changed in place.
        spans: Runs of them, as places in the sequence.
        offset: What positions of plain tokens exceed their place in the sequence by.
    """
    for start, stop in spans:
        run = tokens[start - first : stop - first]
        whole = hashlib.sha256(repr([getattr(token, "digest", token) for token in run]).encode()).digest()
        for place, token in enumerate(run):
            tokens[start - first + place] = GivenToken.within(whole, place, token, start + place + offset)
