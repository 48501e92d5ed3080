"""`Wrapper`: a multimodal model around a language model: its calls run up to the inner model, steps run that model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_paged.kernels.transfers import to_host
from hf_paged.model.peft_layers import without_adapters
from hf_paged.model.span_masks import SpanMasks

State = dict[tuple[int, str], Any]
"""What forwards left on the parts of a wrapper: by the part's place on the way to the language model, and its name."""

# What any language model is told, and what of it says nothing about tokens.
_COMMON = {"input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values"}
_IGNORED = {"use_cache", "return_dict", "cache_position", "logits_to_keep"}
_PER_LAYER = "per_layer_inputs"
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

    def compare(self, ids: Tensor | None, embedding: Any) -> None:
        """Finds out which embeddings are those of the ids (`[B, q]`); waits for a GPU."""
        batch, length = self.inputs_embeds.shape[:2]
        if ids is None:
            self.embedded = [list(range(length)) for _ in range(batch)]
            return
        size: Any = without_adapters(embedding).num_embeddings
        own = embedding(ids.clamp(0, size - 1))  # ids of pictures may lie beyond
        (differs,) = to_host([(own != self.inputs_embeds).any(dim=-1)])
        if bool(differs.any()):
            self.embedded = [row.nonzero()[:, 0].tolist() for row in differs]

    @property
    def given(self) -> Tensor:
        """`[B, q, hidden_size + width]`, all that belongs to a token."""
        return self.inputs_embeds if self.extras is None else torch.cat([self.inputs_embeds, self.extras], dim=-1)


class ReachedError(Exception):
    """Unwinds a model's forward at the call of a part of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class Twin:
    """A copy of a wrapper that shares all parts but those on the way to its language model, which hold a call's state.

    transformers' wrappers keep what one forward finds out for the next on themselves (the offsets of positions
    behind a picture). On a twin that is the call's own, whatever other threads do.
    """

    def __init__(self, model: Any, path: tuple[str, ...], state: State | None) -> None:
        """Copies a model, or a twin of it, along the `path` to its language model.

        Args:
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
        """The part that holds the language model."""
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
        """Copies to the model itself what forwards have left on the twin."""
        parts = [model]
        for name in path[:-1]:
            parts.append(parts[-1]._modules[name])
        for (place, name), value in self.state().items():
            vars(parts[place])[name] = value


class Wrapper:
    """How a multimodal model and its language model talk to each other.

    What belongs to a token beside its embedding and its positions is one vector to us, `[width]`: what each layer is
    told of it, layer by layer (of models that do so of any token), then what is added to the states behind the first
    layers (deepstack), one after another (zeros, or nothing at all, of a token that has none).

    Attributes:
        path: Names of the parts on the way to the language model, its own the last.
        is_causal: Whether the language model's attention is causal where it has no mask.
        mask_kinds: What kinds of masks it takes, by name; `None`: one for all layers.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        self.path = tuple(path.split("."))
        parts = model.get_submodule(path).modules()
        self.is_causal = all(getattr(part, "is_causal", True) is not False for part in parts)
        config = model.get_submodule(path).config
        self.mask_kinds: tuple[str, ...] | None = None
        self._masks = SpanMasks(getattr(config, "sliding_window", None))

    @classmethod
    def of(cls, model: nn.Module) -> Wrapper | None:
        """The wrapper that a model is; `None`: it is a language model itself."""
        path = inner_path(model)
        return None if path is None else cls(model, path)

    def twin(self, model: Any, state: State | None) -> Twin:
        return Twin(model, self.path, state)

    def reach(self, twin: Twin, forward: Callable[..., Any], arguments: dict[str, Any]) -> InnerCall:
        """Runs a wrapper's forward, the unbound one of its class, up to the call of its language model.

        Raises:
            ValueError: It never called its language model.
        """
        inner = twin.innermost._modules[self.path[-1]]
        names = arguments_of(inner)

        def reached(*args: Any, **kwargs: Any) -> Any:
            raise ReachedError(names(*args, **kwargs))

        tap(twin, self.path, inner, reached)
        try:
            forward(twin.model, **arguments)
        except ReachedError as error:
            found = _inner_call(inner, error.arguments)
            if isinstance(found.attention_mask, dict):
                self.mask_kinds = tuple(found.attention_mask)
            return found
        finally:
            twin.innermost._modules[self.path[-1]] = inner
        raise ValueError(f"{type(twin.model).__name__} did not call its {'.'.join(self.path)}")

    def find_spans(self, call: InnerCall) -> bool:
        """Finds the runs of a call's tokens that see each other. Waits for a GPU.

        Returns:
            Whether its masks are understood; see `SpanMasks`.
        """
        batch, length = call.inputs_embeds.shape[:2]
        if call.attention_mask is None and not self.is_causal:
            call.spans = [[(0, length)]] * batch if length > 1 else None
            return True
        by_kind = call.attention_mask if isinstance(call.attention_mask, dict) else {"": call.attention_mask}
        masks = {kind: mask if isinstance(mask, Tensor) and mask.ndim == 4 else None for kind, mask in by_kind.items()}
        drawn = {kind: mask for kind, mask in masks.items() if mask is not None}
        if not drawn or length == 1:
            return self.is_causal or length == 1
        visible = to_host([mask if mask.dtype is torch.bool else mask == 0 for mask in drawn.values()])
        rows = (mask[:, 0].expand(batch, -1, -1) for mask in visible)
        spans = self._masks.read(masks | dict(zip(drawn, rows, strict=True)))
        if spans is not None and any(spans):
            call.spans = spans
        return spans is not None and (self.is_causal or len(drawn) == len(masks))

    def masks(
        self, attention_mask: Tensor, query_width: int, spans: list[tuple[int, int, int]], dtype: torch.dtype
    ) -> Any:
        """Masks of a padded forward, as the language model takes them; see `SpanMasks.draw`."""
        kinds = ("",) if self.mask_kinds is None else self.mask_kinds
        found = {kind: self._masks.draw(kind, attention_mask, query_width, spans, dtype) for kind in kinds}
        return found if self.mask_kinds is not None else found[""]

    def handing(self, model: Any, given: Tensor, places: Tensor) -> Any:
        """A twin of a model that hands its language model something else for some tokens.

        Args:
            given: `[E, hidden_size + width]`, see `Wrapper`; `width` may be 0.
            places: `[B, q]` int64, of each token its place in these, or -1: what the wrapper makes of its id is right.
        """
        twin = Twin(model, self.path, {})
        inner = twin.innermost._modules[self.path[-1]]
        names = arguments_of(inner)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return inner.forward(**_handed(inner, names(*args, **kwargs), given, places))

        tap(twin, self.path, inner, forward)
        return twin.model


def tap(twin: Twin, path: tuple[str, ...], inner: Any, forward: Callable[..., Any]) -> None:
    """Puts a copy of the part at a twin's path in its place, with this forward."""
    copy = _shallow_copy(inner)
    copy.__dict__["forward"] = forward
    twin.innermost._modules[path[-1]] = copy


def inner_path(model: Any) -> str | None:
    """Where a model has a language model of its text config, dots between; `None`: it has none but itself."""
    if model.config.is_encoder_decoder:  # whose decoder is tapped; a flat config would give a copy of itself
        return None
    text = model.config.get_text_config(decoder=True)
    if text is model.config:
        return None
    for name, part in model.named_modules():
        if name and isinstance(part, PreTrainedModel) and type(part.config) is type(text):
            return str(name)
    return None


def in_steps(model: Any) -> set[int] | None:
    """The `id()` of a wrapper's modules that run in steps, and not in callers' calls; `None`: it is no wrapper."""
    path = inner_path(model)
    if not path:
        return None
    text, head = model.get_submodule(path), model.get_output_embeddings()
    own = [*text.modules(), *([] if head is None else [head, without_adapters(head)])]
    embeddings = model.get_input_embeddings(), getattr(text, "embed_tokens_per_layer", None)
    return set(map(id, own)) - set(map(id, embeddings))


def token_positions(positions: Tensor) -> Tensor:
    """Position ids without what says nothing: `[B or 1, q]` where all axes are equal, else `[axes, B or 1, q]`.

    Of four axes the first counts tokens, for masks of rows that lie side by side; ours know where rows end. Some
    wrappers count in floating-point numbers.
    """
    if positions.is_floating_point() and bool((positions == positions.round()).all()):
        positions = positions.long()
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


def arguments_of(inner: Any) -> Callable[..., dict[str, Any]]:
    """Returns what names the arguments that a language model is called with."""
    signature = inspect.signature(inner.forward)

    def names(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = dict(signature.bind(*args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                found |= found.pop(parameter.name, {})
        return found

    return names


def _inner_call(inner: Any, arguments: dict[str, Any]) -> InnerCall:
    embeds = arguments.get("inputs_embeds")
    if embeds is None:
        embeds = inner.get_input_embeddings()(arguments["input_ids"])
    others = {name: value for name, value in arguments.items() if name not in _COMMON | _IGNORED}
    others = {name: value for name, value in others.items() if value is not None and value is not False}
    extras = []
    if arguments.get(_PER_LAYER) is None and getattr(inner.config, "hidden_size_per_layer_input", None):
        others[_PER_LAYER] = None  # computed otherwise than of ids
    if others.get(_PER_LAYER) is not None:
        extras.append(others.pop(_PER_LAYER).flatten(2).to(embeds.device, embeds.dtype))
    if all(name in others for name in _DEEPSTACK):
        mask, layers = (others.pop(name) for name in _DEEPSTACK)
        stacked = embeds.new_zeros(*embeds.shape[:2], len(layers) * embeds.shape[-1])
        stacked[mask.to(embeds.device)] = torch.cat([layer.to(embeds.device, embeds.dtype) for layer in layers], dim=-1)
        extras.append(stacked)
    told = arguments.get("position_ids"), arguments.get("attention_mask")
    return InnerCall(embeds, *told, torch.cat(extras, dim=-1) if extras else None, others)


def _handed(inner: Any, arguments: dict[str, Any], given: Tensor, places: Tensor) -> dict[str, Any]:
    """What a language model was called with, but for the tokens that were given as something else; see `handing`."""
    embeds = arguments.get("inputs_embeds")
    if embeds is None:
        embeds = inner.get_input_embeddings()(arguments.pop("input_ids"))
    own = arguments.get(_PER_LAYER)
    parts = [embeds] if own is None else [embeds, own.flatten(2)]
    width = sum(part.shape[-1] for part in parts)
    if given.shape[-1] > width:
        parts.append(embeds.new_zeros(*embeds.shape[:2], given.shape[-1] - width))
    found = list(put_in(torch.cat(parts, dim=-1), given, places).split([part.shape[-1] for part in parts], dim=-1))
    arguments["inputs_embeds"] = found[0]
    if own is not None:
        arguments[_PER_LAYER] = found[1].view_as(own)
    if given.shape[-1] > width:
        rows = torch.arange(len(embeds), device=embeds.device)  # whole: to find the places in a mask waits for a GPU
        arguments |= zip(_DEEPSTACK, (rows, list(found[-1].split(embeds.shape[-1], dim=-1))), strict=True)
    return arguments


def put_in(own: Tensor, given: Tensor, places: Tensor) -> Tensor:
    """`[B, q, width]`, of each token its own, or what was given (`[E, width]`) at its place (`[B, q]` int64)."""
    is_given = (places >= 0)[..., None]
    return torch.where(is_given, given.to(own.device, own.dtype)[places.clamp(min=0)], own)
