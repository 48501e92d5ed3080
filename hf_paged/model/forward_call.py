"""One `model(...)` call over a `PagedCache`, in the caller's padded shape, and results put back into that shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from hf_paged.core.sequence import Source
from hf_paged.kernels.transfers import to_device, to_host
from hf_paged.model.cache_argument import CACHE_ARGUMENTS
from hf_paged.model.wrapper import InnerCall, Twin


@dataclass(slots=True)
class ForwardCall:
    """One `model(...)` call over a `PagedCache`, in the caller's padded shape.

    Attributes:
        attention_mask: `[B, columns so far + q]`, 0 at padding; `None`: no padding. A mask of another form rules out
            the packed batch.
        position_ids: `[B or 1, q]`, `[axes, B or 1, q]` where they differ from axis to axis, or `None`.
        logits_to_keep: As in transformers: the last so many columns (0: all), or a tensor of column indices.
        others: Every other argument that was given. Any of them rules out the packed batch.
        copies: The call over copies of its tensors on the host, once it was asked for.
        inner: Of a wrapper, what it handed to its language model.
        is_known: Whether keys and values follow from the tokens as they are told here.
        given: Of a wrapper, all arguments of its forward as they were given.
        twin: Of a wrapper, the model with the call's state.
        sources: What an encoder has read for each row, of rows that begin.
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Any
    position_ids: Tensor | None
    logits_to_keep: int | Tensor
    others: dict[str, Any] = field(default_factory=dict)
    copies: ForwardCall | None = field(default=None, repr=False)
    inner: InnerCall | None = field(default=None, repr=False)
    is_known: bool = True
    given: dict[str, Any] | None = field(default=None, repr=False)
    twin: Twin | None = field(default=None, repr=False)
    sources: list[Source] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> Tensor:
        if (self.input_ids is None) == (self.inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        tokens = self.input_ids if self.input_ids is not None else self.inputs_embeds
        assert tokens is not None
        return tokens

    def arguments(self) -> dict[str, Any]:
        """The arguments for the model's own forward, without the cache."""
        if self.given is not None:
            return self.given
        named = {
            "input_ids": self.input_ids,
            "inputs_embeds": self.inputs_embeds,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }
        if isinstance(self.logits_to_keep, Tensor) or self.logits_to_keep:
            named["logits_to_keep"] = self.logits_to_keep
        return {name: value for name, value in (named | self.others).items() if value is not None}

    def behind(self, width: int) -> ForwardCall:
        """The call without its first `width` columns, if its mask says that the tokens before it were given again.

        As `generate()` of models whose cache is their `cache_params` does, which doesn't leave out what a cache holds.
        """
        mask, length = self.attention_mask, self.tokens.shape[1]
        if not width or not isinstance(mask, Tensor) or mask.ndim != 2 or not width < length == mask.shape[1]:
            return self
        ids, embeds = self.input_ids, self.inputs_embeds
        return replace(
            self,
            input_ids=None if ids is None else ids[:, width:],
            inputs_embeds=None if embeds is None else embeds[:, width:],
        )

    def on_host(self) -> ForwardCall:
        """The call with ids, 2-D mask and positions on the CPU, to be looked at. Waits for a GPU once a forward."""
        if self.tokens.device.type == "cpu":
            return self
        if self.copies is None:
            looked_at = (self.input_ids, self.attention_mask, self.position_ids, self.logits_to_keep)
            places = [
                i
                for i, value in enumerate(looked_at)
                if isinstance(value, Tensor) and (value.ndim <= 2 or value is self.position_ids)
            ]
            values: list[Any] = list(looked_at)
            for place, copy in zip(places, to_host([values[place] for place in places]), strict=True):
                values[place] = copy
            ids, mask, positions, keep = values
            self.copies = ForwardCall(ids, self.inputs_embeds, mask, positions, keep, self.others, inner=self.inner)
        return self.copies

    def select(self, rows: list[int] | slice) -> ForwardCall:
        """The call for some rows of the batch (a list or a slice); tensors of one row serve all rows."""
        batch = self.tokens.shape[0]

        def pick(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim <= 1 or value.shape[0] != batch:
                return value
            return value[rows if isinstance(rows, slice) else to_device(rows, value.device)]

        def pick_positions(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim == 3:
                return pick(value.transpose(0, 1)).transpose(0, 1)
            return pick(value)

        def pick_all(values: dict[str, Any]) -> dict[str, Any]:
            return {name: (pick_positions if name == "position_ids" else pick)(value) for name, value in values.items()}

        selected = ForwardCall(
            pick(self.input_ids),
            pick(self.inputs_embeds),
            pick(self.attention_mask),
            pick_positions(self.position_ids),
            self.logits_to_keep,
            pick_all(self.others),
            is_known=self.is_known,
            given=None if self.given is None else pick_all(self.given),
            twin=self.twin,
            sources=None if self.sources is None else _pick_rows(self.sources, rows),
        )
        if self.inner is not None:
            inner = self.inner
            selected.inner = replace(
                inner,
                inputs_embeds=pick(inner.inputs_embeds),
                extras=pick(inner.extras),
                embedded=None if inner.embedded is None else _pick_rows(inner.embedded, rows),
                spans=None if inner.spans is None else _pick_rows(inner.spans, rows),
            )
        if self.copies is not None:
            selected.copies = self.copies.select(rows)
        return selected

    def repeats_rows(self, fan_out: int) -> bool:
        """Whether the batch is runs of `fan_out` equal rows, with position ids for each of them or for all."""
        positions = self.position_ids
        if positions is not None and positions.shape[-2] not in (1, self.tokens.shape[0]):
            return False  # of fewer rows, they might be as many as there are runs
        own = self.on_host()
        positions = own.position_ids
        if positions is not None and positions.ndim == 3:
            positions = positions.transpose(0, 1)
        told = (own.inner.inputs_embeds, own.inner.extras) if own.inner is not None else ()
        if self.given is not None and (self.others or not self.is_known):
            return False  # what else a wrapper was given can't be told apart by rows
        digests = [source.digest for source in self.sources or ()]
        if any(digest != digests[row - row % fan_out] for row, digest in enumerate(digests)):
            return False
        for value in (own.tokens, own.attention_mask, positions, *own.others.values(), *told):
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == self.tokens.shape[0]:
                if value.shape[0] % fan_out:
                    return False
                runs = value.unflatten(0, (-1, fan_out))
                if not bool((runs == runs[:, :1]).all()):  # embeddings and the like: a host read, of a fresh cache
                    return False
        return True


def _pick_rows(values: list[Any], rows: list[int] | slice) -> list[Any]:
    return values[rows] if isinstance(rows, slice) else [values[row] for row in rows]


def map_batch(output: ModelOutput, batch: int, function: Callable[[Tensor], Tensor]) -> ModelOutput:
    """Applies a function to every tensor of a model output whose first dimension is the batch."""

    def apply(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value) if value.ndim > 1 and value.shape[0] == batch else value
        return type(value)(apply(item) for item in value) if isinstance(value, tuple | list) else value

    return type(output)(**{name: apply(value) for name, value in output.items() if name not in CACHE_ARGUMENTS})


def spread_rows(output: ModelOutput, active: list[int], num_rows: int) -> ModelOutput:
    """Puts the active rows' results at their rows; the others are zeros."""

    def spread(value: Tensor) -> Tensor:
        full = value.new_zeros(num_rows, *value.shape[1:])
        full[to_device(active, value.device)] = value
        return full

    return map_batch(output, len(active), spread)
