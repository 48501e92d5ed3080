"""`CPUDecoderLayer`: what a decoder layer computes before and behind its attention, each in one call from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_paged.kernels.c_compiler import address_of
from hf_paged.kernels.cpu_adapters import Adapters, CPUAdapters, Table
from hf_paged.kernels.cpu_layers import Add, CPULayers, Gate, RMSNorm, Rotary
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.kernels.layers import InputError, NormWeight

PIECE = 256  # rows at a time: what lies between two kernels stays in the processor's caches
_ALIGNMENT = 64  # elements


LinearWeight = tuple[Tensor, Tensor | None]  # `[columns, width]`, as `CPULinear` takes it, and a bias or none


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """A layer: `h = x + o(attention(rotary(q(n)), rotary(k(n)), v(n)))` with `n = norm(x)`, then `h + mlp(norm(h))`.

    Attributes:
        norms: Before attention, and before the MLP, `down(activation(gate(x)) * up(x))`.
        head_norms: Of queries' heads, and of keys'; or none.
        projection: `o` in the formula.
        activation: `linear` and `cubic` of `LayerKernels.gate`.
        interleaved: As `rounds`, of `LayerKernels.rotary`.
    """

    head_dim: int
    norms: tuple[NormWeight, NormWeight]
    head_norms: tuple[NormWeight, NormWeight] | None
    query: LinearWeight
    key: LinearWeight
    value: LinearWeight
    projection: LinearWeight
    gate: LinearWeight
    up: LinearWeight
    down: LinearWeight
    activation: tuple[float, float]
    interleaved: bool
    rounds: bool


@dataclass(frozen=True, slots=True)
class Added:
    """The adapters behind the products of a layer in a step.

    Attributes:
        slots: `[tokens]` int32, those of `CPUAdapters.add`.
        tables: Of the queries' product, the keys', the values', the projection's, the gate's, that of `up`, of `down`.
    """

    slots: Tensor
    tables: Sequence[Table]

    def of(self, rows: Tensor) -> Added:
        """For some of the tokens."""
        return Added(self.slots[rows], self.tables)


class _Adding:
    """The calls behind some products that add what adapters do; they add nothing until they are set."""

    def __init__(self, kernel: CPUAdapters | None) -> None:
        self.kernel = kernel
        self.calls: list[tuple[int, Adapters]] = []  # and the place of each product's table

    def behind(self, place: int, weight: LinearWeight, states: int, output: int) -> list[tuple[Any, Adapters]]:
        """The call behind a product, as `_Calls` takes it: none without a kernel."""
        if self.kernel is None:
            return []
        columns, width = weight[0].shape
        call = self.kernel.call(width, columns, states, output, weight[1])
        self.calls.append((place, call))
        return [(self.kernel.function, call)]

    def set_step(self, added: Added | None) -> None:
        """Sets what is added, for all pieces.

        Raises:
            InputError: Something is, and there is no kernel.
        """
        if added is not None and self.kernel is None:
            raise InputError("decoder layer", "rows without adapters")
        for place, call in self.calls:
            table = None if added is None else added.tables[place]
            call.slots = None
            call.table, call.num_slots = (None, 0) if table is None else (table.address, len(table))

    def set_piece(self, added: Added, first: int) -> None:
        slots = added.slots.data_ptr() + first * added.slots.itemsize
        for _, call in self.calls:
            call.slots = slots


class Scratch:
    """Memory for what lies between the kernels of a layer. Layers are computed one after another: all use the same."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, widths: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
        """Memory, and the addresses in it of `PIECE` rows of each of these widths."""
        sizes = [-(-width * PIECE // _ALIGNMENT) * _ALIGNMENT * dtype.itemsize for width in widths]
        if self._memory.numel() < sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        start = self._memory.data_ptr()
        return self._memory, [start + sum(sizes[:place]) for place in range(len(sizes))]


class CPUDecoderLayer:
    """One layer's calls, prepared: a step fills in where its rows are. Bit for bit what the kernels give one by one.

    Attributes:
        before_attention: Queries, keys and values of a layer's input, see `Heads.of`.
        queries: The same with queries alone.
        keys_and_values: The same without queries.
        behind_attention: The layer's result, see `Behind.of`.
    """

    def __init__(
        self,
        layers: CPULayers,
        linears: CPULinear,
        settings: DecoderSettings,
        scratch: Scratch,
        adapters: CPUAdapters | None = None,
    ) -> None:
        """The kernels are of one dtype, which all weights have. They are held by their addresses alone.

        Raises:
            InputError: Weights of sizes that don't fit together, of other dtypes or strides.
        """
        check(settings, linears, layers.dtype)
        self._memory, places = places_of(settings, scratch, layers.dtype)
        given = layers, linears, adapters, settings, places
        self.before_attention = Heads(*given).of
        self.queries = Heads(*given, has_keys=False).of
        self.keys_and_values = Heads(*given, has_queries=False).of
        self.behind_attention = Behind(*given).of


class _Places(NamedTuple):
    """Addresses of what lies between the kernels of a layer, for `PIECE` rows. None writes over what it reads:
    compilers don't vectorise such loops.
    """

    normed: int
    projected: int
    middle: int
    query: int
    key: int
    normed_query: int
    normed_key: int
    gate: int
    up: int
    gated_up: int


def places_of(own: DecoderSettings, scratch: Scratch, dtype: torch.dtype) -> tuple[Tensor, _Places]:
    """Those of a layer, and the memory that they are in."""
    width, query, key, gate = (one.shape[0] for one in (own.norms[0].weight, own.query[0], own.key[0], own.gate[0]))
    memory, places = scratch.of([width] * 3 + [query, key] * 2 + [gate] * 3, dtype)
    return memory, _Places(*places)


class Heads:
    """The part of a layer before attention: queries, keys and values, or only some of them."""

    def __init__(
        self,
        layers: CPULayers,
        linears: CPULinear,
        adapters: CPUAdapters | None,
        own: DecoderSettings,
        at: _Places,
        has_queries: bool = True,
        has_keys: bool = True,
    ) -> None:
        """Prepares the calls.

        Args:
            linears: Their products, and
            adapters: what is added to these.
            has_queries: Whether it is queries that are wanted,
            has_keys: and keys and values.
        """
        normed, query_at, key_at = at.normed, (at.query, at.normed_query), (at.key, at.normed_key)
        self._dtype, self._dim = layers.dtype, own.head_dim
        self._width = own.norms[0].weight.shape[0]
        widths = own.query[0].shape[0], own.key[0].shape[0]
        self._heads = widths[0] // own.head_dim * has_queries, widths[1] // own.head_dim * has_keys
        self._first_norm = _norm(own.norms[0], normed)
        wanted = [(*own.query, query_at[0])] * has_queries + [(*own.key, key_at[0]), (*own.value, 0)] * has_keys
        product, parts = linears.call(normed, wanted)
        self._to_value = parts[-1] if has_keys else None
        has_norms = own.head_norms is not None
        self._rotary = Rotary(
            query=query_at[has_norms],
            key=key_at[has_norms],
            query_heads=self._heads[0],
            key_heads=self._heads[1],
            dim=own.head_dim,
            query_token=widths[0],
            query_head=own.head_dim,
            key_token=widths[1],
            key_head=own.head_dim,
            interleaved=own.interleaved,
            rounds=own.rounds,
        )
        self._norms: list[tuple[RMSNorm, int]] = []  # of heads, and how many a token has
        for one, (before, behind), heads in zip(own.head_norms or (), (query_at, key_at), self._heads, strict=False):
            if heads:
                norm = _norm(one, behind)
                norm.input = before
                self._norms.append((norm, heads))
        self._adding = _Adding(adapters)
        added = self._adding.behind(0, own.query, normed, query_at[0]) if has_queries else []
        if has_keys:
            added += self._adding.behind(1, own.key, normed, key_at[0])
            added += (to_value := self._adding.behind(2, own.value, normed, 0))
        self._added_value = to_value[0][1] if has_keys and to_value else Adapters()
        self._by_rows = [self._first_norm, product, *(call for _, call in self._adding.calls)]
        norm_kernel = layers.compiled.hf_paged_rms_norm
        self.calls = _Calls(
            layers.compiled,
            [
                (norm_kernel, self._first_norm),
                (linears.function, product),
                *added,
                *((norm_kernel, norm) for norm, _ in self._norms),
                (layers.compiled.hf_paged_rotary, self._rotary),
            ],
        )
        self._shape = (0, 0)  # rows and threads that the calls are set to
        self._checked: tuple[object, ...] = ()  # what was found right in the call before

    def of(self, states: Tensor, cos: Tensor, sin: Tensor, added: Added | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a layer's input.

        Args:
            states: `[1, tokens, width]`, contiguous.
            cos: `[1, tokens, rotary_dim]`, contiguous.
            sin: Like `cos`.

        Returns:
            `[tokens, heads, head_dim]` each, contiguous; no heads of what is not wanted.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices.
        """
        tables = cos.shape, cos.stride(), cos.dtype, cos.device, sin.shape, sin.stride(), sin.dtype, sin.device
        given = *tables, states.shape, states.stride(), states.dtype, states.device
        if given != self._checked:
            self._check(states, cos, sin)
            self._checked = given
        self._adding.set_step(added)
        (_, tokens, rotary_dim), (query_heads, key_heads) = cos.shape, self._heads
        threads = torch.get_num_threads()
        query = states.new_empty((tokens, query_heads, self._dim))
        key = states.new_empty((tokens, key_heads, self._dim))
        value = torch.empty_like(key)
        size = self._dtype.itemsize
        for first in range(0, tokens, PIECE):
            self.set_shape(min(PIECE, tokens - first), threads)
            if added is not None:
                self._adding.set_piece(added, first)
            at = first * size
            query_at, key_at = at * query_heads * self._dim, at * key_heads * self._dim
            self.place(
                states.data_ptr() + at * self._width,
                (cos.data_ptr() + at * rotary_dim, sin.data_ptr() + at * rotary_dim, rotary_dim),
                (query.data_ptr() + query_at, key.data_ptr() + key_at, value.data_ptr() + key_at),
            )
            self.calls.run()
        return query, key, value

    def place(self, states: int, angles: tuple[int, int, int], heads: tuple[int, int, int]) -> None:
        """Sets the addresses of a piece: its rows' states, cosines and sines, with their width, and the results'."""
        rotary, self._first_norm.input = self._rotary, states
        rotary.cos, rotary.sin, rotary.rotary_dim = angles
        rotary.to_query, rotary.to_key, value = heads
        if self._to_value is not None:
            self._to_value.output = self._added_value.output = value

    def _check(self, states: Tensor, cos: Tensor, sin: Tensor) -> None:
        if not (
            are_states(states, self._width, self._dtype)
            and len(shape := cos.shape) == 3
            and shape[:2] == states.shape[:2]
            and shape[2] <= self._dim
            and shape[2] % 2 == 0
            and is_of(cos, shape, self._dtype)
            and is_of(sin, shape, self._dtype)
        ):
            raise InputError("decoder layer", "states of its width, and cos and sin", states=states, cos=cos, sin=sin)

    def set_shape(self, rows: int, threads: int) -> None:
        if self._shape == (rows, threads):
            return
        self._shape = (0, 0)  # until all is set
        for arguments in self._by_rows:
            arguments.rows, arguments.num_threads = rows, threads
        for norm, heads in self._norms:
            norm.rows, norm.num_threads = rows * heads, threads
        self._rotary.tokens, self._rotary.num_threads = rows, threads
        self._shape = rows, threads


class Behind:
    """The part of a layer behind attention."""

    def __init__(
        self, layers: CPULayers, linears: CPULinear, adapters: CPUAdapters | None, own: DecoderSettings, at: _Places
    ) -> None:
        """Prepares the calls; arguments as of `Heads`."""
        self._dtype, self._dim = layers.dtype, own.head_dim
        self._width, self._row, gate_width = (one.shape[0] for one in (own.norms[0].weight, own.query[0], own.gate[0]))
        norm, add, gated = (getattr(layers.compiled, f"hf_paged_{name}") for name in ("rms_norm", "add", "gate"))
        self._second_norm = _norm(own.norms[1], at.normed)
        self._second_norm.input = at.middle
        self._project, _ = linears.call(0, [(*own.projection, at.projected)])
        to_mlp, _ = linears.call(at.normed, [(*own.gate, at.gate), (*own.up, at.up)])
        to_result, _ = linears.call(at.gated_up, [(*own.down, at.projected)])
        linear, cubic = own.activation
        self._gate = Gate(
            gate=at.gate,
            up=at.up,
            output=at.gated_up,
            dim=gate_width,
            gate_row=gate_width,
            up_row=gate_width,
            linear=linear,
            cubic=cubic,
        )
        self._first_add = Add(second=at.projected, output=at.middle)
        self._second_add = Add(first=at.middle, second=at.projected)
        product, self._adding = linears.function, _Adding(adapters)
        behind = self._adding.behind
        to_projected = behind(3, own.projection, 0, at.projected)
        self.calls = _Calls(
            layers.compiled,
            [
                (product, self._project),
                *to_projected,
                (add, self._first_add),
                (norm, self._second_norm),
                (product, to_mlp),
                *behind(4, own.gate, at.normed, at.gate),
                *behind(5, own.up, at.normed, at.up),
                (gated, self._gate),
                (product, to_result),
                *behind(6, own.down, at.gated_up, at.projected),
                (add, self._second_add),
            ],
        )
        products = self._project, to_mlp, to_result, *(call for _, call in self._adding.calls)
        self._by_rows = [self._second_norm, self._gate, *products]
        self._added_projection = to_projected[0][1] if to_projected else Adapters()
        self._shape = (0, 0)  # rows and threads that the calls are set to
        self._checked: tuple[object, ...] = ()  # what was found right in the call before

    def of(self, states: Tensor, attended: Tensor, added: Added | None = None) -> Tensor:
        """The layer's result.

        Args:
            attended: `[tokens, heads, head_dim]`, what attention makes of the queries, contiguous.

        Returns:
            Like `states`.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices.
        """
        row, of_states = self._row, (states.shape, states.stride(), states.dtype, states.device)
        given = *of_states, attended.shape, attended.stride(), attended.dtype, attended.device
        if given != self._checked:
            heads = (states.shape[1], row // self._dim, self._dim) if states.ndim == 3 else ()
            if not (are_states(states, self._width, self._dtype) and is_of(attended, heads, self._dtype)):
                raise InputError("decoder layer", "states of its width, and heads", states=states, attended=attended)
            self._checked = given
        self._adding.set_step(added)
        threads = torch.get_num_threads()
        result = torch.empty_like(states)
        tokens, size = states.shape[1], self._dtype.itemsize
        for first in range(0, tokens, PIECE):
            self.set_shape(min(PIECE, tokens - first), threads)
            if added is not None:
                self._adding.set_piece(added, first)
            row_at = first * self._width * size
            attended_at = attended.data_ptr() + first * row * size
            self.place(states.data_ptr() + row_at, attended_at, result.data_ptr() + row_at)
            self.calls.run()
        return result

    def place(self, states: int, attended: int, result: int) -> None:
        """Sets the addresses of a piece: its rows' states, what attention makes of them, and the result's."""
        self._project.input = self._added_projection.input = attended
        self._first_add.first, self._second_add.output = states, result

    def set_shape(self, rows: int, threads: int) -> None:
        if self._shape == (rows, threads):
            return
        self._shape = (0, 0)  # until all is set
        for arguments in (*self._by_rows, self._first_add, self._second_add):
            arguments.num_threads = threads
        for arguments in self._by_rows:
            arguments.rows = rows
        self._first_add.size = self._second_add.size = rows * self._width
        self._shape = rows, threads


def are_states(states: Tensor, width: int, dtype: torch.dtype) -> bool:
    return states.ndim == 3 and is_of(states, (1, states.shape[1], width), dtype)


def is_of(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    return tensor.shape == tuple(shape) and tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()


def check(own: DecoderSettings, linears: CPULinear, dtype: torch.dtype) -> None:
    width, dim = own.norms[0].weight.shape[0], own.head_dim
    heads, keys, mlp = own.query[0].shape[0], own.key[0].shape[0], own.gate[0].shape[0]
    weights = [
        *((one, (rows, width)) for one, rows in ((own.query, heads), (own.key, keys), (own.value, keys))),
        *((one, (mlp, width)) for one in (own.gate, own.up)),
        *((one, (width, columns)) for one, columns in ((own.projection, heads), (own.down, mlp))),
    ]
    vectors = [(norm.weight, width) for norm in own.norms] + [(norm.weight, dim) for norm in own.head_norms or ()]
    vectors += [(bias, shape[0]) for (_, bias), shape in weights if bias is not None]
    fit = all(linears.takes(weight) and weight.shape == shape for (weight, _), shape in weights)
    fit &= all(
        each.dtype is dtype and each.is_cpu and each.is_contiguous() and each.shape == (size,) for each, size in vectors
    )
    if not fit or heads % dim or keys % dim:
        raise InputError("decoder layer", f"weights that fit together; a head has {dim}", norm=own.norms[0].weight)


def _norm(settings: NormWeight, output: int) -> RMSNorm:
    return RMSNorm(
        weight=settings.weight.data_ptr(),
        output=output,
        dim=settings.weight.shape[0],
        rounds_first=settings.rounds_first,
        eps=settings.eps,
        offset=settings.offset,
    )


class _Call(ctypes.Structure):
    _fields_ = [("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p)]


class _Calls:
    """Kernels that run one after another, without Python in between.

    Attributes:
        addresses: Of each kernel, and of its arguments.
        run: Runs them.
    """

    def __init__(self, compiled: ctypes.CDLL, calls: Sequence[tuple[Any, ctypes.Structure]]) -> None:
        function = compiled.hf_paged_run
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], None
        self._held = [arguments for _, arguments in calls]
        self.addresses = [(address_of(kernel), ctypes.addressof(arguments)) for kernel, arguments in calls]
        self._calls = (_Call * len(calls))(*(_Call(*own) for own in self.addresses))
        self.run: Callable[[], None] = partial(function, ctypes.addressof(self._calls), len(calls))
