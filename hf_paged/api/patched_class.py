"""The class of a patched model: `attach` gives a model an engine and this class, `detach` takes both back."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from hf_paged.api.batch_methods import MANAGER
from hf_paged.api.engine_of import ENGINE
from hf_paged.api.forward import paged_forward
from hf_paged.api.generation import PagedGenerationMixin
from hf_paged.core.config import PagedConfig
from hf_paged.core.interrupts import deferred_interrupt
from hf_paged.engine.engine import Engine
from hf_paged.model.base_class import BASE, base_class
from hf_paged.model.spread import rebind
from hf_paged.model.traits import ModelTraits
from hf_paged.parallel.channel import Channel

_SETTINGS = "_hf_paged_settings"


def patched_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass of `base` under the same name, so that what reads the name (`save_pretrained`) sees the original."""

    @functools.wraps(base.__init__)
    def become_unpatched(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = base
        self.__init__(*args, **kwargs)

    def reduce(self: Any, _: Any) -> Any:
        """Pickling and `copy.deepcopy`: the copy is patched with the same settings and gets a pool of its own."""
        if self.paged.ranks is not None:
            raise TypeError("a patched model that is split between processes can't be copied: unpatch it first")
        settings = (self.paged.config, self.paged.traits)
        state = {name: value for name, value in self.__getstate__().items() if name not in (ENGINE, MANAGER)}
        return _rebuild, (base, settings), state

    def set_state(self: Any, state: dict[str, Any]) -> None:
        settings = self.__dict__.pop(_SETTINGS)
        base.__setstate__(self, state)
        attach(self, *settings)

    return type(
        base.__name__,
        (PagedGenerationMixin, base),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__init__": become_unpatched,
            "__reduce_ex__": reduce,
            "__setstate__": set_state,
            "forward": paged_forward(base.forward),
            BASE: base,
        },
    )


@deferred_interrupt()
def attach(model: Any, config: PagedConfig, traits: ModelTraits, channel: Channel | None = None) -> None:
    """Makes a model paged, in place: gives it an engine and its patched class.

    Args:
        model: A supported model; patched already only while it is being unpickled.
        channel: To the other processes that it is shared out to.
    """
    base = base_class(model)
    # Past nn.Module.__setattr__: the engine is no part of the model's state.
    model.__dict__[ENGINE] = Engine(model, config, base.forward, traits, channel)
    model.__class__ = patched_class(base)
    rebind(model, type(model).forward)


@deferred_interrupt()
def detach(model: Any) -> None:
    """Undoes `attach`. Live `PagedCache` objects keep the engine's pool until they are dropped.

    Raises:
        RuntimeError: This thread is inside a step of the model, or the model is inside `exact_training`.
    """
    model.paged.core.bound.check_outside()
    if model.paged.exact_forwards is not None:
        raise RuntimeError("the model is inside exact_training: leave it before you unpatch the model")
    model.destroy_cached_continuous_batching_manager()
    model.__class__ = base_class(model)
    rebind(model, type(model).forward)
    engine = model.__dict__.pop(ENGINE)
    engine.close()
    engine.core.layers.part()


def _rebuild(base: type[PreTrainedModel], settings: tuple[PagedConfig, ModelTraits]) -> Any:
    model: Any = object.__new__(patched_class(base))
    model.__dict__[_SETTINGS] = settings
    return model
