"""`CPUDecoderLayer`: what a decoder layer computes before and behind its attention, each in one call from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

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

    def set_shape(self, rows: int, threads: int) -> None:
        for _, call in self.calls:
            call.rows, call.num_threads = rows, threads


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
        before_attention: Queries, keys and values of a layer's input, see `_Heads.of`.
        queries: The same with queries alone.
        keys_and_values: The same without queries.
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
        _check(settings, linears, layers.dtype)
        self._dtype, own = layers.dtype, settings
        self._width = own.norms[0].weight.shape[0]
        query_width, key_width, gate_width = (one[0].shape[0] for one in (own.query, own.key, own.gate))
        self._dim, self._row = own.head_dim, query_width
        # No kernel writes over what it reads: compilers don't vectorise such loops.
        attention_widths, mlp_widths = [query_width, key_width] * 2, [gate_width] * 3
        self._memory, places = scratch.of([self._width] * 3 + attention_widths + mlp_widths, layers.dtype)
        normed, projected, middle, query, key, normed_query, normed_key, gate, up, gated_up = places
        heads_at = normed, (query, normed_query), (key, normed_key)
        self.before_attention = _Heads(layers, linears, adapters, own, *heads_at).of
        self.queries = _Heads(layers, linears, adapters, own, *heads_at, has_keys=False).of
        self.keys_and_values = _Heads(layers, linears, adapters, own, *heads_at, has_queries=False).of
        norm, add, gated = (getattr(layers.compiled, f"hf_paged_{name}") for name in ("rms_norm", "add", "gate"))
        self._second_norm = _norm(own.norms[1], normed)
        self._second_norm.input = middle
        self._project, _ = linears.call(0, [(*own.projection, projected)])
        to_mlp, _ = linears.call(normed, [(*own.gate, gate), (*own.up, up)])
        to_result, _ = linears.call(gated_up, [(*own.down, projected)])
        linear, cubic = own.activation
        self._gate = Gate(
            gate=gate,
            up=up,
            output=gated_up,
            dim=gate_width,
            gate_row=gate_width,
            up_row=gate_width,
            linear=linear,
            cubic=cubic,
        )
        self._first_add = Add(second=projected, output=middle)
        self._second_add = Add(first=middle, second=projected)
        product, self._adding = linears.function, _Adding(adapters)
        behind = self._adding.behind
        to_projected = behind(3, own.projection, 0, projected)
        self._by_rows = [self._second_norm, self._gate, self._project, to_mlp, to_result]
        self._behind = _Calls(
            layers.compiled,
            [
                (product, self._project),
                *to_projected,
                (add, self._first_add),
                (norm, self._second_norm),
                (product, to_mlp),
                *behind(4, own.gate, normed, gate),
                *behind(5, own.up, normed, up),
                (gated, self._gate),
                (product, to_result),
                *behind(6, own.down, gated_up, projected),
                (add, self._second_add),
            ],
        )
        self._added_projection = to_projected[0][1] if to_projected else Adapters()
        self._shape = (0, 0)  # rows and threads that the calls behind attention are set to
        self._checked: tuple[object, ...] = ()  # what was found right in the call before

    def behind_attention(self, states: Tensor, attended: Tensor, added: Added | None = None) -> Tensor:
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
            if not (_are_states(states, self._width, self._dtype) and _is_of(attended, heads, self._dtype)):
                raise InputError("decoder layer", "states of its width, and heads", states=states, attended=attended)
            self._checked = given
        self._adding.set_step(added)
        threads = torch.get_num_threads()
        result = torch.empty_like(states)
        tokens, size = states.shape[1], self._dtype.itemsize
        for first in range(0, tokens, PIECE):
            shape = min(PIECE, tokens - first), threads
            if shape != self._shape:
                self._set_shape(*shape)
            self._project.input = self._added_projection.input = attended.data_ptr() + first * row * size
            if added is not None:
                self._adding.set_piece(added, first)
            self._first_add.first = states.data_ptr() + first * self._width * size
            self._second_add.output = result.data_ptr() + first * self._width * size
            self._behind.run()
        return result

    def _set_shape(self, rows: int, threads: int) -> None:
        self._shape = rows, threads
        for arguments in (*self._by_rows, self._first_add, self._second_add):
            arguments.num_threads = threads
        for arguments in self._by_rows:
            arguments.rows = rows
        self._adding.set_shape(rows, threads)
        self._first_add.size = self._second_add.size = rows * self._width


class _Heads:
    """The part of a layer before attention: queries, keys and values, or only some of them."""

    def __init__(
        self,
        layers: CPULayers,
        linears: CPULinear,
        adapters: CPUAdapters | None,
        own: DecoderSettings,
        normed: int,
        query_at: tuple[int, int],
        key_at: tuple[int, int],
        has_queries: bool = True,
        has_keys: bool = True,
    ) -> None:
        """Prepares the calls.

        Args:
            linears: Their products, and
            adapters: what is added to these.
            normed: Where its normed input is, for `PIECE` rows, and
            query_at: its queries before and behind their norm, and
            key_at: its keys.
            has_queries: Whether it is queries that are wanted,
            has_keys: and keys and values.
        """
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
        for one, at, heads in zip(own.head_norms or (), (query_at, key_at), self._heads, strict=False):
            if heads:
                norm = _norm(one, at[1])
                norm.input = at[0]
                self._norms.append((norm, heads))
        self._by_rows = self._first_norm, product
        self._adding = _Adding(adapters)
        added = self._adding.behind(0, own.query, normed, query_at[0]) if has_queries else []
        if has_keys:
            added += self._adding.behind(1, own.key, normed, key_at[0])
            added += (to_value := self._adding.behind(2, own.value, normed, 0))
        self._added_value = to_value[0][1] if has_keys and to_value else Adapters()
        norm_kernel = layers.compiled.hf_paged_rms_norm
        self._calls = _Calls(
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
        size, rotary = self._dtype.itemsize, self._rotary
        for first in range(0, tokens, PIECE):
            shape = min(PIECE, tokens - first), threads
            if shape != self._shape:
                self._set_shape(*shape)
            self._first_norm.input = states.data_ptr() + first * self._width * size
            if self._to_value is not None:
                self._to_value.output = value.data_ptr() + first * key_heads * self._dim * size
                self._added_value.output = self._to_value.output
            if added is not None:
                self._adding.set_piece(added, first)
            rotary.cos = cos.data_ptr() + first * rotary_dim * size
            rotary.sin = sin.data_ptr() + first * rotary_dim * size
            rotary.to_query = query.data_ptr() + first * query_heads * self._dim * size
            rotary.to_key = key.data_ptr() + first * key_heads * self._dim * size
            rotary.rotary_dim = rotary_dim
            self._calls.run()
        return query, key, value

    def _check(self, states: Tensor, cos: Tensor, sin: Tensor) -> None:
        if not (
            _are_states(states, self._width, self._dtype)
            and len(shape := cos.shape) == 3
            and shape[:2] == states.shape[:2]
            and shape[2] <= self._dim
            and shape[2] % 2 == 0
            and _is_of(cos, shape, self._dtype)
            and _is_of(sin, shape, self._dtype)
        ):
            raise InputError("decoder layer", "states of its width, and cos and sin", states=states, cos=cos, sin=sin)

    def _set_shape(self, rows: int, threads: int) -> None:
        self._shape = rows, threads
        for arguments in self._by_rows:
            arguments.rows, arguments.num_threads = rows, threads
        for norm, heads in self._norms:
            norm.rows, norm.num_threads = rows * heads, threads
        self._rotary.tokens, self._rotary.num_threads = rows, threads
        self._adding.set_shape(rows, threads)


def _are_states(states: Tensor, width: int, dtype: torch.dtype) -> bool:
    return states.ndim == 3 and _is_of(states, (1, states.shape[1], width), dtype)


def _is_of(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    return tensor.shape == tuple(shape) and tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()


def _check(own: DecoderSettings, linears: CPULinear, dtype: torch.dtype) -> None:
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
    """Kernels that run one after another, without Python in between."""

    def __init__(self, compiled: ctypes.CDLL, calls: Sequence[tuple[Any, ctypes.Structure]]) -> None:
        function = compiled.hf_paged_run
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], None
        self._held = [arguments for _, arguments in calls]
        self._calls = (_Call * len(calls))()
        for call, (kernel, arguments) in zip(self._calls, calls, strict=True):
            call.kernel = ctypes.cast(kernel, ctypes.c_void_p).value
            call.arguments = ctypes.addressof(arguments)
        self.run: Callable[[], None] = partial(function, ctypes.addressof(self._calls), len(calls))
