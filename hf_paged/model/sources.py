"""`SourceTap`: what an encoder-decoder hands to its decoder: found out for a call, and handed packed in a step."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_paged.core.sequence import Source
from hf_paged.kernels.transfers import to_device, to_host
from hf_paged.model.wrapper import ReachedError, Twin, arguments_of, tap


class StandIn(BaseModelOutput):
    """What stands for an encoder's output where the decoder is handed another."""

    attention_mask = router_logits = router_probs = None


def source_width(model: Any) -> int:
    """The width of what a model's encoder makes.

    Raises:
        ValueError: Its config doesn't say.
    """
    config = getattr(model.get_encoder(), "config", model.config)
    names = ("output_hidden_size", "hidden_size", "d_model")
    found = (getattr(config, name, None) for name in names)
    width = next((int(width) for width in found if width), None)
    if width is None:
        raise ValueError(f"the config of its encoder states none of {', '.join(names)}")
    return width


def sources_of(states: Tensor, mask: Tensor | None) -> list[Source]:
    """What an encoder has read for each row: of its states `[B, E, hidden_size]` those that the mask `[B, E]` shows.

    Copies, and a digest of each; waits for a GPU, once.

    Raises:
        ValueError: The mask is of another kind, or shows nothing of a row.
    """
    if mask is not None and (mask.ndim != 2 or mask.shape[1] != states.shape[1]):
        raise ValueError(f"an encoder's mask must be of one number for each of its states, got {tuple(mask.shape)}")
    found, states = [], states.detach()
    numbers, *shown = to_host([states] if mask is None else [states, mask])
    for row, own in enumerate(states):
        content = numbers[row]
        if shown:
            places = shown[0][row].nonzero()[:, 0]
            content, own = content[places], own[to_device(places, own.device)]
        else:
            own = own.clone()
        if not len(own):
            raise ValueError(f"row {row} has no source: its encoder mask shows nothing")
        digest = hashlib.sha256(content.contiguous().view(torch.uint8).numpy().tobytes()).digest()
        found.append(Source(own, len(own), digest))
    return found


class SourceTap:
    """Stands before a model's decoder.

    Attributes:
        width: Of what the encoder makes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = model.get_decoder()
        if hasattr(decoder, "encoder") and hasattr(decoder, "decoder"):  # a text model of both parts, in another
            decoder = decoder.decoder
        self._names = arguments_of(decoder)
        taken = inspect.signature(decoder.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._mask = "encoder_padding_mask" if "encoder_padding_mask" in taken else "encoder_attention_mask"  # FSMT's
        self._path = next(tuple(name.split(".")) for name, part in model.named_modules() if part is decoder)
        self.width = source_width(model)

    def reach(self, model: Any, forward: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """What the decoder is handed of a call: the encoder's states `[B, E, hidden_size]`, and which of them it sees.

        Args:
            forward: The unbound one of the model's class.
            arguments: Its arguments, with `encoder_outputs` among them.

        Raises:
            ValueError: It never called its decoder.
        """
        twin = Twin(model, self._path, None)
        inner = twin.innermost._modules[self._path[-1]]

        def reached(*args: Any, **kwargs: Any) -> Any:
            raise ReachedError(self._names(*args, **kwargs))

        tap(twin, self._path, inner, reached)
        try:
            forward(twin.model, **arguments)
        except ReachedError as error:
            return error.arguments["encoder_hidden_states"], error.arguments.get(self._mask)
        raise ValueError(f"{type(model).__name__} did not call its {'.'.join(self._path)}")

    def handing(
        self,
        model: Any,
        sources: Tensor | None,
        source_mask: Tensor | None,
        attention_mask: Tensor,
        positions: Tensor | None,
    ) -> Any:
        """A twin of a model whose decoder is handed a step's sources, masks and positions.

        Args:
            sources: `[B, L, hidden_size]`, those that are fresh, one behind another; `None`: there are none.
            source_mask: `[B, E]`, what each row's attention may see; `None`: it knows, of a packed step.
            attention_mask: Of the rows' own tokens.
            positions: `[B, Q]`; `None`: the cache tells them.
        """
        twin = Twin(model, self._path, {})
        inner = twin.innermost._modules[self._path[-1]]

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = self._names(*args, **kwargs) if args else kwargs
            given["attention_mask"] = attention_mask
            if source_mask is not None or self._mask in given:  # what the model's own hides isn't in the pool
                given[self._mask] = source_mask
            if sources is not None:
                given["encoder_hidden_states"] = sources
            elif source_mask is not None:
                given["encoder_hidden_states"] = given["encoder_hidden_states"].expand(len(source_mask), -1, -1)
            if positions is not None and self._takes_positions:
                given["position_ids"] = positions
            return inner.forward(**given)

        tap(twin, self._path, inner, forward)
        return twin.model

    def stand_in(self, dtype: torch.dtype, device: torch.device) -> StandIn:
        """An encoder's output of one position, all zeros."""
        return StandIn(last_hidden_state=torch.zeros(1, 1, self.width, dtype=dtype, device=device))
