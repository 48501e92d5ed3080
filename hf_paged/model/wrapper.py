"""`Wrapper`: a multimodal model around a language model: what a call hands to the inner one, and what a step does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_paged.kernels.transfers import to_host

State = dict[tuple[int, str], Any]
"""What forwards left on the parts of a wrapper: by the part's place on the way to the language model, and its name."""

# What any language model is told, and what of it says nothing about tokens.
_COMMON = {"input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values"}
_IGNORED = {"use_cache", "return_dict", "cache_position", "logits_to_keep"}
SLIDING = "sliding_attention"
_DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")


@dataclass(slots=True)
class InnerCall:
    """What a wrapper handed to its language model for a call.

    Attributes:
        inputs_embeds: `[B, q, hidden_size]`.
        position_ids: `[B or 1, q]`, `[axes, B, q]` or `None`.
        attention_mask: 2-D as the caller's, or made by the wrapper: 4-D, or several by kind of layer.
        extras: `[B, q, width]`, what else belongs to tokens; see `Wrapper`.
        others: Further arguments, of which nothing is known.
        embedded: Of each row the columns whose embeddings aren't those of their ids; `None`: of no row any.
        spans: Of each row the first column, and that behind the last, of runs that see each other, whichever comes
            first; `None`: there are none.
    """

    inputs_embeds: Tensor
    position_ids: Tensor | None
    attention_mask: Any
    extras: Tensor | None = None
    others: dict[str, Any] = field(default_factory=dict)
    embedded: list[list[int]] | None = None
    spans: list[list[tuple[int, int]]] | None = None

    def compare(self, ids: Tensor | None, embedding: Callable[[Tensor], Tensor]) -> None:
        """Finds out which embeddings are those of the ids (`[B, q]`); waits for a GPU."""
        batch, length = self.inputs_embeds.shape[:2]
        if ids is None:
            self.embedded = [list(range(length)) for _ in range(batch)]
            return
        size = embedding.num_embeddings  # type: ignore[attr-defined]
        own = embedding(ids.clamp(0, size - 1))  # ids of pictures may lie beyond
        (differs,) = to_host([(own != self.inputs_embeds).any(dim=-1)])
        if bool(differs.any()):
            self.embedded = [row.nonzero()[:, 0].tolist() for row in differs]

    def find_spans(self, is_causal: bool, window: int | None) -> bool:
        """Finds the runs that see each other, in the wrapper's masks. Waits for a GPU.

        Args:
            is_causal: Whether the language model's attention is causal where it has no mask.
            window: Of layers with one.

        Returns:
            Whether masks are understood: causal, but for such runs, of which all see all, and for the window.
        """
        batch, length = self.inputs_embeds.shape[:2]
        if self.attention_mask is None and not is_causal:
            self.spans = [[(0, length)]] * batch if length > 1 else None
            return True
        masks = self.attention_mask if isinstance(self.attention_mask, dict) else {"": self.attention_mask}
        drawn = {kind: mask for kind, mask in masks.items() if isinstance(mask, Tensor) and mask.ndim == 4}
        if not drawn or length == 1:
            return is_causal or length == 1
        visible = to_host([mask if mask.dtype is torch.bool else mask == 0 for mask in drawn.values()])
        spans: list[list[tuple[int, int]]] | None = None
        for kind, mask in zip(drawn, visible, strict=True):
            mask = mask[:, 0].expand(batch, -1, -1)
            found = [_spans(row[:, -length:]) for row in mask]
            if spans not in (None, found):
                return False
            spans = found
            if not all(
                _is_drawn_from(row, own, window if kind == SLIDING else None)
                for row, own in zip(mask, found, strict=True)
            ):
                return False
        self.spans = spans if any(spans or ()) else None
        return len(drawn) == len(masks) or self.spans is None

    @property
    def given(self) -> Tensor:
        """`[B, q, hidden_size + width]`, all that belongs to a token."""
        return self.inputs_embeds if self.extras is None else torch.cat([self.inputs_embeds, self.extras], dim=-1)


class _ReachedError(Exception):
    """Unwinds a wrapper's forward at the call of its language model."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class Twin:
    """A copy of a wrapper that shares all parts but those on the way to its language model, which hold a call's state.

    transformers' wrappers keep what one forward finds out for the next on themselves (the offsets of positions behind a
    picture). On a twin that is the call's own, whatever other threads do.

    Attributes:
        model: The copy.
    """

    def __init__(self, model: Any, path: tuple[str, ...], state: State | None) -> None:
        """Copies a model.

        Args:
            model: A wrapper, or a twin of it.
            path: Where its language model is.
            state: What an earlier call has left; `None`: what the model holds itself.
        """
        self.model = part = _shallow_copy(model)
        self._parts = [part]
        for name in path[:-1]:
            part._modules[name] = _shallow_copy(part._modules[name])
            part = part._modules[name]
            self._parts.append(part)
        self._state = state or {}
        if state is not None:
            for part in self._parts:
                left = {name: None for name, value in vars(part).items() if isinstance(value, Tensor)}
                vars(part).update(left)
            for (place, name), value in state.items():
                vars(self._parts[place])[name] = value
        self._before = [dict(vars(part)) for part in self._parts]

    @property
    def innermost(self) -> Any:
        """The part that has the language model."""
        return self._parts[-1]

    def state(self) -> State:
        """What was given to the twin, and what forwards have left on it since."""
        changed = {
            (place, name): value
            for place, (part, before) in enumerate(zip(self._parts, self._before, strict=True))
            for name, value in vars(part).items()
            if name not in before or before[name] is not value
        }
        return self._state | changed

    def write_back(self, model: Any, path: tuple[str, ...]) -> None:
        """Leaves on the model itself what forwards have left on the twin."""
        parts = [model]
        for name in path[:-1]:
            parts.append(parts[-1]._modules[name])
        for (place, name), value in self.state().items():
            vars(parts[place])[name] = value


class Wrapper:
    """How a multimodal model and its language model talk to each other.

    What belongs to a token beside its embedding and its positions is one vector to us, `[width]`: what is added to the
    states behind the first layers (deepstack), one after another.

    Attributes:
        path: Names of the parts on the way to the language model, its own the last.
        is_causal: Whether the language model's attention is causal where it has no mask.
        window: Of its layers that have one.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        """Of the language model at this place."""
        self.path = tuple(path.split("."))
        parts = model.get_submodule(path).modules()
        self.is_causal = all(getattr(part, "is_causal", True) is not False for part in parts)
        config = model.get_submodule(path).config
        self.window = getattr(config, "sliding_window", None)  # type: ignore[union-attr]
        # What kinds of masks it takes, by name; `None`: one for all layers.
        self.mask_kinds: tuple[str, ...] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Wrapper | None:
        """The wrapper that a model is; `None`: it is a language model itself."""
        path = inner_path(model)
        return None if path is None else cls(model, path)

    def twin(self, model: Any, state: State | None) -> Twin:
        """See `Twin`."""
        return Twin(model, self.path, state)

    def reach(self, twin: Twin, forward: Callable[..., Any], arguments: dict[str, Any]) -> InnerCall:
        """Runs a wrapper's forward up to the call of its language model.

        Args:
            twin: Of the model.
            forward: Of its class, unbound.
            arguments: Of the forward.

        Raises:
            ValueError: It never called its language model.
        """
        inner = twin.innermost._modules[self.path[-1]]
        signature = inspect.signature(inner.forward)

        def reached(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            found = dict(bound.arguments)
            for parameter in signature.parameters.values():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    found |= found.pop(parameter.name, {})
            raise _ReachedError(found)

        self._tap(twin, inner, reached)
        try:
            forward(twin.model, **arguments)
        except _ReachedError as error:
            found = _inner_call(inner, error.arguments)
            if isinstance(found.attention_mask, dict):
                self.mask_kinds = tuple(found.attention_mask)
            return found
        finally:
            twin.innermost._modules[self.path[-1]] = inner
        raise ValueError(f"{type(twin.model).__name__} did not call its {'.'.join(self.path)}")

    def masks(
        self, attention_mask: Tensor, query_width: int, spans: list[tuple[int, int, int]], dtype: torch.dtype
    ) -> Any:
        """Masks of a padded forward, as the language model takes them; see `draw_masks`."""

        def draw(window: int | None) -> Tensor:
            return draw_masks(attention_mask, query_width, spans, window, dtype)

        if self.mask_kinds is None:
            return draw(None)
        return {kind: draw(self.window if kind == SLIDING else None) for kind in self.mask_kinds}

    def handing(self, model: Any, extras: Tensor) -> Any:
        """A twin of a model that hands `extras` (`[B, q, width]`) to its language model, too."""
        twin = Twin(model, self.path, {})
        inner = twin.innermost._modules[self.path[-1]]

        def forward(*args: Any, **kwargs: Any) -> Any:
            return inner.forward(*args, **(kwargs | _unpacked(extras, inner.config.hidden_size)))

        self._tap(twin, inner, forward)
        return twin.model

    def _tap(self, twin: Twin, inner: Any, forward: Callable[..., Any]) -> None:
        tap = _shallow_copy(inner)
        tap.__dict__["forward"] = forward
        twin.innermost._modules[self.path[-1]] = tap


def inner_path(model: Any) -> str | None:
    """Where a model has a language model of its text config, dots between; `None`: it has none but itself."""
    text = model.config.get_text_config(decoder=True)
    if text is model.config:
        return None
    for name, part in model.named_modules():
        if name and isinstance(part, PreTrainedModel) and type(part.config) is type(text):
            return str(name)
    return None


def token_positions(positions: Tensor) -> Tensor:
    """Position ids without what says nothing: `[B or 1, q]` where all axes are equal, else `[axes, B or 1, q]`.

    Of four axes the first counts tokens, for masks of rows that lie side by side; ours know where rows end.
    """
    if positions.ndim != 3:
        return positions
    if positions.shape[0] == 4:
        positions = positions[1:]
    return positions[0] if bool((positions == positions[:1]).all()) else positions


def _shallow_copy(module: Any) -> Any:
    copy = object.__new__(type(module))
    own = dict(vars(module))
    for name in ("_modules", "_parameters", "_buffers"):
        own[name] = dict(own[name])
    vars(copy).update(own)
    return copy


def _inner_call(inner: Any, arguments: dict[str, Any]) -> InnerCall:
    embeds = arguments.get("inputs_embeds")
    if embeds is None:
        embeds = inner.get_input_embeddings()(arguments["input_ids"])
    others = {name: value for name, value in arguments.items() if name not in _COMMON | _IGNORED}
    others = {name: value for name, value in others.items() if value is not None and value is not False}
    extras = None
    if all(name in others for name in _DEEPSTACK):
        mask, layers = (others.pop(name) for name in _DEEPSTACK)
        extras = embeds.new_zeros(*embeds.shape[:2], len(layers) * embeds.shape[-1])
        extras[mask.to(embeds.device)] = torch.cat([layer.to(embeds.device, embeds.dtype) for layer in layers], dim=-1)
    return InnerCall(embeds, arguments.get("position_ids"), arguments.get("attention_mask"), extras, others)


def _unpacked(extras: Tensor, hidden_size: int) -> dict[str, Any]:
    """Arguments for the language model."""
    rows = extras.flatten(0, 1)
    everywhere = torch.ones(extras.shape[:2], dtype=torch.bool, device=extras.device)
    return dict(zip(_DEEPSTACK, (everywhere, list(rows.split(hidden_size, dim=-1))), strict=True))


def _spans(visible: Tensor) -> list[tuple[int, int]]:
    """Runs of columns that see each other.

    Args:
        visible: `[n, n]`, which of the new columns each of them sees.
    """
    length = visible.shape[0]
    columns = torch.arange(length)
    last = torch.where(visible, columns, -1).amax(dim=1).tolist()  # that each one sees
    spans: list[tuple[int, int]] = []
    column = 0
    while column < length:
        if last[column] > column:
            spans.append((column, last[column] + 1))
            column = last[column]
        column += 1
    return spans


def _is_drawn_from(visible: Tensor, spans: list[tuple[int, int]], window: int | None) -> bool:
    """Whether a row's mask (`[n, columns]`) is causal within a window, but for these runs and left padding."""
    length, width = visible.shape
    query, key = torch.arange(width - length, width)[:, None], torch.arange(width)
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    for start, stop in spans:
        expected[start:stop, width - length + start : width - length + stop] = True
    seen = visible.any(dim=0)
    first = int(seen.int().argmax()) if bool(seen.any()) else width  # what nothing sees is padding
    real = query[:, 0] >= first
    expected &= key >= first
    return bool((expected == visible)[real].all())


def draw_masks(
    attention_mask: Tensor, query_width: int, spans: list[tuple[int, int, int]], window: int | None, dtype: torch.dtype
) -> Tensor:
    """`[B, 1, Q, W]`, what is added to the scores of the last `Q` columns: as `InnerCall.find_spans` understands masks.

    Args:
        attention_mask: `[B, W]`, 0 at padding.
        query_width: `Q`.
        spans: Rows, and columns of theirs.
        window: Of the layers.
        dtype: Of the model.
    """
    width, device = attention_mask.shape[1], attention_mask.device
    query, key = torch.arange(width - query_width, width, device=device)[:, None], torch.arange(width, device=device)
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    visible = visible.expand(len(attention_mask), -1, -1).clone()
    for row, start, stop in spans:
        visible[row, max(start - width + query_width, 0) : stop - width + query_width, start:stop] = True
    visible &= attention_mask[:, None].bool()
    masks = torch.zeros(visible.shape, dtype=dtype, device=device)
    return masks.masked_fill(~visible, torch.finfo(dtype).min)[:, None]
