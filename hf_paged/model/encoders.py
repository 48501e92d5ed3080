"""`Encoder`: on CPU it reads of a padded batch of texts the tokens that are no padding, each row as if alone."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_paged.attention.context import encoding
from hf_paged.attention.encoder_rows import EncoderRows
from hf_paged.attention.paged_attention import attention_configs, paged_attention_scope
from hf_paged.core.process import PROCESS, Lasting
from hf_paged.model.exact_operations import Activation, ExactModule, is_leaf, names_in
from hf_paged.model.layers import Layers
from hf_paged.model.linears import Linear
from hf_paged.model.module_overrides import CALL, ModuleOverride, is_untouched

_MASK = "attention_mask"
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the table in which models' code looks for its attention


class Encoder(Lasting):
    """The encoder of a model on CPU. It runs on the threads of callers, which take turns: at once they would take each
    other's processors away in every single operation.

    Of texts, embeddings are those of its own code, over the padded batch: positions are the columns, as in stock.
    Layers that are given nothing but states and a mask run packed; of others, linear layers and activations skip
    padding. They are computed by our kernels, and attention runs row by row, where it is one of transformers'
    functions: a row's bits depend on that row alone.
    """

    def __init__(self, model: PreTrainedModel, layers: Layers | None) -> None:
        """`layers`: the ways to compute its modules; `None`: all are computed as they are."""
        self._configs = attention_configs(model)
        self._layers = layers
        self._lock = threading.RLock()
        PROCESS.watch(self)

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self._lock

    @contextmanager
    def scope(self, mask: Tensor | None) -> Iterator[None]:
        """Within it, this thread's forward of the encoder computes what a mask `[rows, columns]` on CPU shows.

        One that has gaps, or hides a whole row, changes nothing; neither does `None`.
        """
        with self._lock:
            layers = self._layers
            rows = None if mask is None or layers is None else EncoderRows.of(mask)
            if rows is None or layers is None:
                yield
                return
            with paged_attention_scope(self._configs), layers.scope(), encoding(rows):
                shown: list[_Shown] = []
                if rows.has_padding:
                    shown += [_Shown(own.module, rows) for own in layers.found if own.thread_id and _is_by_token(own)]
                    shown += [_Shown(layer, rows) for layer in layers.modules if _may_be_packed(layer)]
                for own in shown:
                    own.module.__dict__[CALL] = own
                try:
                    yield
                finally:
                    for own in shown:
                        own.give_back()


class _Shown(ModuleOverride):
    """Computes of such a batch what is no padding, where a module treats each token by itself but in attention."""

    __slots__ = ("before", "rows")

    def __init__(self, module: nn.Module, rows: EncoderRows) -> None:
        super().__init__(module)
        self.rows, self.thread_id = rows, threading.get_ident()
        self.before: Any = module.__dict__.get(CALL)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self.before or self.module._call_impl
        tables = [each for each in kwargs.values() if isinstance(each, Tensor) and each is not kwargs.get(_MASK)]
        if not args or args[0].shape[:-1] != self.rows.shape or tables:
            return call(*args, **kwargs)
        found = call(self.rows.pack(args[0]), *args[1:], **kwargs)
        if isinstance(found, Tensor):
            return self.rows.unpack(found)
        return self.rows.unpack(found[0]), *found[1:]

    def give_back(self) -> None:
        if self.before is None:
            self.module.__dict__.pop(CALL, None)
        else:
            self.module.__dict__[CALL] = self.before


def _is_by_token(own: ModuleOverride) -> bool:
    """Whether it is a linear layer, or an activation."""
    return isinstance(own, Linear | Activation) or (isinstance(own, ExactModule) and is_leaf(own.module))


def _may_be_packed(layer: nn.Module) -> bool:
    """Whether a layer is given states and a mask, no table of positions, and leaves attention to transformers."""
    if not isinstance(layer, GradientCheckpointingLayer) or not is_untouched(layer):
        return False
    parameters = inspect.signature(layer.forward).parameters.values()
    names = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    kinds: set[Any] = {type(module) for module in layer.modules()}
    attends = any(_INTERFACE in names_in(kind) for kind in kinds)
    return attends and names <= {"hidden_states", _MASK, "output_attentions"}
