"""`exact_training`: within it, a training forward's values are the engine's, bit by bit those of its rollouts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_paged.api.given_call import OUTPUTS
from hf_paged.api.own_forward import hands_on
from hf_paged.api.patching import is_patched
from hf_paged.api.support import is_supported, unwrap
from hf_paged.core.errors import UnsupportedModelError
from hf_paged.engine.engine import Engine
from hf_paged.engine.exact_pass import ExactPass, steps_wait_for_optimizers
from hf_paged.integrations import trl
from hf_paged.model.cache_argument import CACHE_ARGUMENTS
from hf_paged.model.traits import is_stochastic

_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_INPUTS = ("input_ids", "attention_mask", "position_ids", "logits_to_keep")


@contextmanager
def exact_training(model: Any) -> Iterator[None]:
    """Within it, the model's own forwards without a cache take the engine's values, with gradients of its own layers.

    The log-probabilities that training sees are then those of sampling, bit by bit, under the same weights. Real tokens
    run side by side, without padding; in the backward pass each layer is computed again by its own code, as in
    checkpointing. Where no position ids are given, a token's position is its place among its row's real tokens, as in
    `generate()`. An optimizer's step waits for the engine's, which then wait for it.

    If TRL's trainers have put their forward on the model, that is exact, too; make the trainer before you enter this.

    Args:
        model: Patched, or a PEFT model around one, on CPU; its `is_supported(model).exact` is true.

    Raises:
        ValueError: The model is not patched, or not exact: the message says why. Each forward raises it for dropout and
            gradient checkpointing in training mode, autocast, and outputs that it can't give (a cache, hidden states).
    """
    inner: Any = unwrap(model)
    if not is_patched(inner):
        raise ValueError(f"exact_training needs a patched model: hf_paged.patch() the {type(inner).__name__} first")
    engine: Engine = inner.paged
    forwards = Forwards(inner)
    with ExitStack() as stack:
        if "trl" in sys.modules:
            stack.enter_context(trl.exact_head(inner, forwards))
        if reasons := why_not(inner):
            raise UnsupportedModelError(f"exact training of {type(inner).__name__}", reasons)
        stack.enter_context(steps_wait_for_optimizers(engine.core))
        outer, engine.exact_forwards = engine.exact_forwards, forwards
        stack.callback(setattr, engine, "exact_forwards", outer)
        yield


def why_not(model: Any) -> tuple[str, ...]:
    """Reasons, a sentence each; none if a patched model's training can be exact."""
    engine, own = model.paged, vars(model)
    # What only passes generation's calls on says nothing about its modules; how it trains is looked at elsewhere.
    hidden = own.pop("forward") if "forward" in own and hands_on(model) else None
    try:
        report = is_supported(model)
    finally:
        own.update({} if hidden is None else {"forward": hidden})
    traits, config = engine.traits, engine.config
    kinds = {
        "its layers keep a state": bool(traits.states),
        "some of its layers attend to others' keys": None in traits.layers or traits.shares_attention,
        "it is multimodal": engine.core.bound.wrapper is not None,
        "it has an encoder": bool(traits.cross),
        f"keys and values are rounded: kv_cache_dtype={config.kv_cache_dtype!r}": config.kv_cache_dtype != "auto",
        "compile_decode=True": config.compile_decode,
    }
    return (*report.reasons, *report.why_not_exact, *(kind for kind, holds in kinds.items() if holds))


class Forwards:
    """A patched model's forwards without a cache, in `exact_training`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._pass = ExactPass(model.paged.core)

    def takes(self, given: dict[str, Any]) -> bool:
        """Whether a call, by the names of its arguments, is one: it trains, or says that it wants no cache."""
        if any(given.get(name) is not None for name in CACHE_ARGUMENTS):
            return False
        use_cache = given.get("use_cache")
        return torch.is_grad_enabled() or not (
            getattr(self._model.config, "use_cache", True) if use_cache is None else use_cache
        )

    def forward(self, given: dict[str, Any]) -> CausalLMOutputWithPast:
        """Runs such a call. Logits of padding are zeros.

        Raises:
            ValueError: It asks for more than logits and a loss.
        """
        keep, labels = given.get("logits_to_keep"), given.get("labels")
        self.check({name: value for name, value in given.items() if name not in _LOSS})
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise ValueError("an exact forward takes input_ids of [rows, tokens]")
        columns = torch.arange(ids.shape[1])
        columns = columns[keep if isinstance(keep, Tensor) else slice(-keep if keep else None, None)]
        mask = given.get("attention_mask")
        wanted = torch.zeros(ids.shape, dtype=torch.bool)
        wanted[:, columns] = True
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            wanted &= mask != 0
        found = self.logits(given, wanted)
        if not isinstance(keep, Tensor) and wanted[:, columns].all():  # nothing to scatter, nor to choose
            logits = found.unflatten(0, (len(ids), len(columns)))
        else:
            logits = found.new_zeros(*ids.shape, found.shape[-1])
            logits = logits.index_put((wanted,), found)[:, columns]
        loss = None
        if labels is not None:
            size = self._model.config.get_text_config().vocab_size
            own = {name: given[name] for name in _LOSS if given.get(name) is not None}
            loss = self._model.loss_function(logits=logits, vocab_size=size, **own)
        return CausalLMOutputWithPast(loss=loss, logits=logits)  # type: ignore[arg-type]

    def logits(self, given: dict[str, Any], wanted: Tensor) -> Tensor:
        """`[K, vocab_size]`, those of real tokens in `wanted`, `[rows, tokens]` bool, row by row.

        Raises:
            ValueError: No token is wanted; or the forward can't be exact now.
        """
        self._check_state()
        ids, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        assert isinstance(ids, Tensor)
        for name, own in (("attention_mask", mask), ("position_ids", positions)):
            if own is not None and not isinstance(own, Tensor):
                raise ValueError(f"an exact forward takes {name} as a tensor, got a {type(own).__name__}")
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(
                f"an exact forward takes a mask of {list(ids.shape)}, a number a token; got {list(mask.shape)}"
            )
        is_real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        place = (is_real.cumsum(dim=1) - 1)[is_real]
        is_first = place == 0
        if positions is not None:
            if positions.shape[-2:] not in ((1, ids.shape[1]), tuple(ids.shape)) or positions.ndim != 2:
                raise ValueError(
                    f"an exact forward takes position_ids of {list(ids.shape)}, got {list(positions.shape)}"
                )
            place = positions.expand(ids.shape)[is_real]
            if mask is None:  # several texts may follow each other in a row, as transformers' masks have it
                is_first |= torch.cat([is_first[:1], place[1:] != place[:-1] + 1])
        places = wanted[is_real].nonzero()[:, 0]
        if not len(places):
            raise ValueError("an exact forward was asked for the logits of no token")
        starts = [*is_first.nonzero()[:, 0].tolist(), len(place)]
        lens = [end - start for start, end in itertools.pairwise(starts)]
        return self._pass.logits(ids[is_real], place, lens, places)

    def check(self, given: dict[str, Any]) -> None:
        """Raises `ValueError` if a forward is asked for more than logits."""
        asked = {name: True for name in OUTPUTS if getattr(self._model.config, name, False)}  # by the config
        asked |= {name: value for name, value in given.items() if name not in _INPUTS and value is not None}
        for name, value in asked.items():
            if value is not False and (name, value) != ("return_dict", True):
                raise ValueError(
                    f"an exact forward takes {', '.join(_INPUTS)}, and labels; it was given {name}={value!r:.80}"
                )

    def _check_state(self) -> None:
        model = self._model
        if torch.is_autocast_enabled("cpu"):
            raise ValueError("no exact forward under autocast: load the model in the dtype that it is to compute in")
        if not model.training:
            return
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            raise ValueError(
                "no exact forward with gradient checkpointing: it is one already, each layer is computed again in the "
                "backward pass; call gradient_checkpointing_disable() (of a trainer: gradient_checkpointing=False)"
            )
        if is_stochastic(model):
            raise ValueError("no exact forward with dropout, or noise of a router, in training mode: set it to 0")
