"""`TextEncoder`: an encoder on CPU computes the tokens of a padded batch that are no padding, each row as if alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.attention.context import encoding
from hf_paged.attention.encoder_rows import EncoderRows
from hf_paged.attention.paged_attention import attention_configs, paged_attention_scope
from hf_paged.core.process import PROCESS, Lasting
from hf_paged.model.exact_operations import Activation, ExactModule, is_leaf
from hf_paged.model.layers import Layers
from hf_paged.model.linears import Linear
from hf_paged.model.module_overrides import CALL, ModuleOverride


class TextEncoder(Lasting):
    """The encoder of a model whose sources are texts. It runs on the threads of callers, which take turns.

    Embeddings, norms and sums are those of its own code, over the padded batch: positions are the columns, as in stock.
    Linear layers and activations skip padding, and are computed by our kernels; attention runs row by row, where it is
    one of transformers' functions. Both leave the bits of a row to that row alone.
    """

    def __init__(self, model: PreTrainedModel, layers: Layers) -> None:
        self._configs = attention_configs(model)
        self._layers = layers
        self._lock = threading.RLock()
        PROCESS.watch(self)

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self._lock

    @contextmanager
    def scope(self, mask: Tensor) -> Iterator[None]:
        """Within it, this thread's forward of the encoder computes what a mask `[rows, columns]` on CPU shows.

        One that has gaps, or hides a whole row, changes nothing.
        """
        rows = EncoderRows.of(mask)
        if rows is None:
            yield
            return
        with self._lock, paged_attention_scope(self._configs), self._layers.scope(), encoding(rows):
            shown = [_Shown(own, rows) for own in self._layers.found if own.thread_id and _is_by_token(own)]
            for own in shown:
                own.module.__dict__[CALL] = own
            try:
                yield
            finally:
                for own in shown:
                    own.module.__dict__[CALL] = own.inner


def _is_by_token(own: ModuleOverride) -> bool:
    """Whether it is a linear layer, or an activation."""
    return isinstance(own, Linear | Activation) or (isinstance(own, ExactModule) and is_leaf(own.module))


class _Shown(ModuleOverride):
    """A layer that computes each token by itself: of such a batch, those that are no padding.

    Attributes:
        inner: What computes them.
    """

    __slots__ = ("inner", "rows")

    def __init__(self, inner: ModuleOverride, rows: EncoderRows) -> None:
        super().__init__(inner.module)
        self.inner, self.rows, self.thread_id = inner, rows, inner.thread_id

    def compute(self, states: Tensor) -> Tensor:
        if states.shape[:-1] != self.rows.shape:
            return self.inner(states)
        return self.rows.unpack(self.inner(self.rows.pack(states)))
