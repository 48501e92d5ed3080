"""`PagedCache`: a `transformers.Cache` whose rows are block tables of the model's pool."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import logging

from hf_paged.attention.cache_rows import CacheRows, SequenceStore
from hf_paged.core.interrupts import deferred_interrupt
from hf_paged.core.sequence import Sequence
from hf_paged.kernels.transfers import to_host

logger = logging.get_logger(__name__)

# transformers before 5.18 reads a positive argument of `crop` as the length to keep; later versions refuse it.
_POSITIVE_CROP_IS_A_LENGTH = Version(transformers.__version__) < Version("5.18.dev0")


class Past(Tensor):
    """`[T]` or `[B, Q]`, of each token its position less its place in the forward's row.

    Compared with a number, whether any is.
    """

    @classmethod
    def of(cls, positions: Tensor) -> Past:
        """That of tokens at these positions."""
        return (positions - torch.arange(positions.shape[-1], device=positions.device)).as_subclass(cls)

    def places(self) -> Tensor:
        """The positions."""
        own = self.as_subclass(Tensor)
        return own + torch.arange(own.shape[-1], device=own.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _COMPARISONS:
            return found.any()
        return found.as_subclass(cls) if name in _KEEPING and isinstance(found, Tensor) else found


_KEEPING = {"clone", "add", "__add__", "__radd__"}
_COMPARISONS = {"gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__"}


class StepCache(Cache):
    """The cache the model sees in an engine-driven forward: keys and values pass through, attention stores them.

    Args:
        states: The states of the step's rows, of a model with layers that keep one.
        positions: `[T]`, for layers that reckon with the length of what is cached: they are told, for each token, what
            makes its place in the forward its position. `None`: no layer asks.
        tells_all: Whether the model itself is told so, too, which else takes position ids.
    """

    def __init__(self, states: Any = None, positions: Tensor | None = None, tells_all: bool = False) -> None:
        super().__init__(layers=[])
        self.states = states
        self._past: Any = 0
        self._tells_all = tells_all
        if positions is not None:
            self._past = Past.of(positions) if tells_all else Past.of(positions).as_subclass(Tensor)

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        return self._past if self._tells_all or layer_idx is not None else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class LayerNotingCache(StepCache):
    """A `StepCache` that remembers the layer whose keys it was given last.

    Attributes:
        layer: Its number.
    """

    layer = -1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        return key_states, value_states


def as_indexer(update: Callable[..., tuple[Tensor, Tensor]], key_states: Tensor, place: int) -> Tensor:
    """An indexer's keys are those of one head, without values.

    Args:
        update: Of a cache.
        key_states: `[batch, new, width]`.
        place: Theirs among all that is stored.
    """
    own = key_states[:, None]
    return update(own, own[..., :0], place)[0][:, 0]


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`, for code that looks at `cache.layers[i]`; reading `keys` gathers from the pool.

    One with a state of all tokens together, or with nothing, has no keys and values.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, layer_idx: int) -> None:
        # A proxy, since a cycle would keep a dropped cache and its blocks alive until the next garbage collection.
        self._cache: Any = weakref.proxy(cache)
        self._layer_idx = layer_idx

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether it has keys and values; a state can't be cut."""
        return self._cache.store.stores(self._layer_idx)  # type: ignore[no-any-return]

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    @property
    def keys(self) -> Tensor | None:
        """`[batch, num_kv_heads, length, head_dim]`, a copy; left padding and finished rows read as zeros.

        Of a layer with a window, as in a `DynamicCache`, the last columns: all but one of those that a query sees.
        """
        return self._cache.read_layer(self._layer_idx)[0] if self._has_states else None

    @property
    def values(self) -> Tensor | None:
        """Like `keys`."""
        return self._cache.read_layer(self._layer_idx)[1] if self._has_states else None

    @property
    def _has_states(self) -> bool:
        return self.is_initialized and self.is_croppable

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool exists."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.update()  # type: ignore[no-any-return]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._layer_idx)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._layer_idx)

    def get_max_length(self) -> int:
        return -1


class CacheShape(NamedTuple):
    """What the caller of a `PagedCache` sees of it, but for its content.

    Attributes:
        width: Columns.
        num_rows: Stored rows.
        fan_out: Rows of the batch that each stands for.
        padding: Left columns of each stored row that hold no token.
    """

    width: int
    num_rows: int
    fan_out: int
    padding: list[int]


class PagedCache(Cache):
    """Keys and values of a batch, in the block pool of a patched model.

    Pass it as `past_key_values` (Mamba's: `cache_params`) to `generate()` or to the model, once or again and again
    (multi-turn chat). Its blocks go back to the pool when it is dropped, or at once with `reset()`.

    What a caller sees is a batch of rows of one width, as with `DynamicCache`. Stored is less: left padding takes no
    slot (`padding[row]` columns are only counted), rows that are copies of each other share their blocks, and while
    all of `fan_out` copies of each prompt are still equal (the samples or beams of one prompt), one row stands for
    them.

    Args:
        model: A model patched by `hf_paged.patch`.

    Raises:
        ValueError: The model isn't patched, or is one whose calls run stock `generate()`.
    """

    def __new__(cls, model: Any = None) -> PagedCache:
        engine = getattr(model, "paged", None)
        return object.__new__(cls if engine is None or cls is not PagedCache else engine.store.cache_type)

    def __init__(self, model: Any) -> None:
        engine = getattr(model, "paged", None)
        if engine is None:
            kind = type(model).__name__
            raise ValueError(f"PagedCache needs a patched model: call hf_paged.patch(model) first, got {kind}")
        if engine.traits.runs_stock:
            raise ValueError(
                f"there is no PagedCache for this {type(model).__name__} ({engine.traits.why_padded}): give it a cache "
                "of transformers' own"
            )
        self._setup(engine.store)

    @classmethod
    def for_call(cls, store: SequenceStore, fan_out: int) -> PagedCache:
        """The cache of one `generate()` call, whose rows come in runs of `fan_out` equal prompts."""
        cache: PagedCache = object.__new__(store.cache_type if cls is PagedCache else cls)
        cache._setup(store)
        cache.expect_fan_out(fan_out)
        cache.owned_by_call = True
        return cache

    def _setup(self, store: SequenceStore) -> None:
        self.store = store
        self.owned_by_call = False
        self.loop: Any = None  # the decoding loop that is running over it
        self.state: dict[Any, Any] = {}  # what a multimodal model's forwards leave for those behind them
        self._rows = CacheRows(store)
        self._width = 0
        self._windows = store.windows()
        self._records_past = False
        Cache.__init__(self, layers=[PagedLayer(self, index) for index in range(store.num_layers)])

    def __repr__(self) -> str:
        return f"PagedCache(batch_size={self.batch_size}, seq_length={self.get_seq_length()})"

    # The engine's side

    @property
    def places_by_column(self) -> bool:
        """Whether left padding counts in the places of a row's tokens."""
        return self.store.places_by_column

    @property
    def sequences(self) -> list[Sequence | None]:
        """The stored rows: `batch_size / fan_out` of them; `None` for a finished one."""
        return self._rows.sequences

    @property
    def padding(self) -> list[int]:
        """Left columns of each stored row that hold no token."""
        return self._rows.padding

    @property
    def fan_out(self) -> int:
        """Equal rows of the batch that each stored row stands for."""
        return self._rows.fan_out

    def expect_fan_out(self, fan_out: int) -> None:
        """Tells a cache that holds nothing yet that its rows will come in runs of `fan_out` equal prompts."""
        if not len(self._rows):
            self._rows.fan_out = fan_out

    def open_rows(self, num_rows: int) -> None:
        """Makes the (empty) rows of a first forward."""
        self._rows.open(num_rows)
        if self._records_past:
            self.activate_past_recording()

    def set_padding(self, padding: list[int], rows: list[int]) -> None:
        """Declares the left padding of some stored rows, from their first token on."""
        for row, columns in zip(rows, padding, strict=True):
            self.padding[row] = columns

    def advance(self, num_columns: int) -> None:
        """Books columns whose tokens a packed forward stored in all layers."""
        self._width += num_columns

    def rewind(self, width: int) -> None:
        """Forgets columns of a forward that failed; their tokens were taken back by the engine."""
        self._width = width
        if width == 0:
            self._rows.clear()
            self.state = {}

    def shape(self) -> CacheShape:
        """What its caller sees of it."""
        return CacheShape(self._width, len(self._rows), self.fan_out, list(self.padding))

    def take_shape(self, shape: CacheShape) -> None:
        """Becomes one of this shape, of rows without content."""
        if len(self._rows) != shape.num_rows:
            self._rows.clear()
            self.open_rows(shape.num_rows)
        self._rows.fan_out = shape.fan_out
        self.padding[:] = shape.padding
        self._width = shape.width

    @deferred_interrupt()
    def split_fan_out(self) -> None:
        """See `CacheRows.split`."""
        self._rows.split()

    @deferred_interrupt()
    def retire(self, rows: Iterable[int]) -> None:
        """Frees rows of the batch that are finished; later forwards leave them out."""
        self._rows.retire(rows)

    # The Cache interface

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raises `ValueError`: only forwards of the patched model store into the pool.

        Raises:
            RuntimeError: A `generate()` call made the cache, and the model was unpatched before the call ended.
        """
        if self.loop is not None:
            self.loop.check_cancelled()  # the model was unpatched, whose forward comes here now
        if self.owned_by_call:
            raise RuntimeError(
                "the model was unpatched while this call was running (or one of its inner modules was given the call's "
                "PagedCache, which only forwards of the patched model itself fill)"
            )
        raise ValueError(
            "only forwards of the patched model itself fill a PagedCache: call that model (with "
            "output_hidden_states=True for what its inner model returns), or give the inner module a DynamicCache"
        )

    update_indexer = update  # type: ignore[assignment]

    def read_layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer for the whole batch, as its `keys` and `values`."""
        width = self._width
        # Row by row: a batch larger than the pool is never in it as a whole.
        rows = [
            self.store.read_tokens(layer_idx, [row], [pad], width)
            for row, pad in zip(self.sequences, self.padding, strict=True)
        ]
        window = self._windows[layer_idx]
        first = 0 if window is None else max(0, width - window + 1)
        keys, values = (torch.cat(states)[:, :, first:] for states in zip(*rows, strict=True))
        return keys.repeat_interleave(self.fan_out, dim=0), values.repeat_interleave(self.fan_out, dim=0)

    def __iter__(self) -> Any:
        for layer in self.layers if self.is_initialized else ():
            yield layer.keys, layer.values, None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch stored so far, left padding included."""
        return self._width if layer_idx < len(self._windows) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """`(columns, 0)`: what `update` will return for `query_length` new tokens, and the first column's index."""
        return self.get_seq_length(layer_idx) + query_length, 0

    @property
    def is_initialized(self) -> bool:
        """Whether anything is stored."""
        return self._width > 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward."""
        return len(self._rows) * self.fan_out or -1

    @deferred_interrupt()
    def reset(self) -> None:
        """Frees all blocks; the cache is as new."""
        self._rows.fan_out = 1
        self.rewind(0)

    @deferred_interrupt()
    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` columns of every row, as the installed `DynamicCache` does.

        Raises:
            ValueError: No integer, or a positive one, where transformers refuses it too (after 5.17).
            RuntimeError: A layer with a sliding window has given back what it would need then, and
                `activate_past_recording` was not called before.
        """
        tokens_to_remove = _integer("tokens_to_remove", tokens_to_remove)  # transformers 5.17 gives a tensor
        if tokens_to_remove > 0:
            if not _POSITIVE_CROP_IS_A_LENGTH:
                raise ValueError(
                    f"crop takes the number of tokens to remove as a negative integer, got {tokens_to_remove}"
                )
            tokens_to_remove = min(tokens_to_remove - self._width, 0)
        width = max(self._width + tokens_to_remove, 0)
        self._rows.crop(self._width, width)
        self._width = width

    @deferred_interrupt()
    def activate_past_recording(self) -> None:
        """From now on layers with a sliding window keep what lies behind it, until a `crop`, which may go so far."""
        self._records_past = True
        self._rows.keep_past(self._width)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was, by sharing its blocks: no key or value is copied here."""
        self._select(_integers("beam_idx", beam_idx))  # the block tables are host data

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices` (integers, below 0 from the end, or a mask)."""
        batch, is_mask = max(self.batch_size, 0), getattr(indices, "dtype", None) is torch.bool
        if is_mask:
            if batch and indices.shape != (batch,):
                raise ValueError(f"a mask over {batch} rows has shape ({batch},), got {tuple(indices.shape)}")
            indices = indices.nonzero()[:, 0]
        rows = _integers("indices", indices)
        self._select([row + batch if -batch <= row < 0 else row for row in rows])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times; the copies share their blocks."""
        repeats = _integer("repeats", repeats)
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        self._select([row for row in range(max(self.batch_size, 0)) for _ in range(repeats)])

    @deferred_interrupt()
    def _select(self, indices: list[int]) -> None:
        if not len(self._rows):
            return  # as over a `DynamicCache` that holds nothing
        bad = [index for index in indices if not 0 <= index < self.batch_size]
        if bad or not indices:
            raise ValueError(f"rows must be one or more numbers from 0 to {self.batch_size - 1}, got {bad or indices}")
        self._rows.select(indices)

    @deferred_interrupt()
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A cache of the same content that shares all blocks until one of the two writes."""
        copy = type(self).__new__(type(self))
        copy._setup(self.store)
        copy._rows.copy_from(self._rows)
        copy._records_past = self._records_past
        copy.state = dict(self.state)
        copy.advance(self._width)
        return copy

    def __reduce__(self) -> Any:
        raise TypeError("a PagedCache lives in its model's block pool and can't be pickled; keep the token ids instead")


_NO_INTEGERS = (torch.bool, torch.complex64, torch.complex128)


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, Tensor):
            (value,) = to_host([value])
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be an integer, got {value!r:.80}") from error


def _integers(name: str, values: Any) -> list[int]:
    (values,) = to_host([torch.as_tensor(values)])
    if values.ndim != 1 or (len(values) and (values.dtype.is_floating_point or values.dtype in _NO_INTEGERS)):
        raise ValueError(f"{name} must be integers, [rows], got {values.dtype} of shape {tuple(values.shape)}")
    return [int(value) for value in values.tolist()]  # an empty list's tensor is of floats
