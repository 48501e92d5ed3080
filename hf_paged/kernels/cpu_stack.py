"""`CPUDecoderStack`: decoder layers one behind the other, with their attention, in one call from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hf_paged.kernels.cpu_decoder import (
    Behind,
    DecoderSettings,
    Heads,
    Scratch,
    are_states,
    check,
    is_of,
    places_of,
)
from hf_paged.kernels.cpu_layers import CPULayers
from hf_paged.kernels.cpu_linear import CPULinear
from hf_paged.kernels.layers import InputError

MOST = 64  # rows: the results of all layers are held at once

# Addresses of kernels that all layers call between their two parts, and the arguments, an array with one of each layer.
AttentionCalls: TypeAlias = Sequence[tuple[int, ctypes.Array[Any]]]


class CPUDecoderStack:
    """Bit for bit what `CPUDecoderLayer` gives, layer by layer, for at most `MOST` rows without adapters.

    Attributes:
        buffers: Of queries, keys, values and what attention makes of them, `[MOST, heads, head_dim]` each.
    """

    def __init__(
        self, layers: CPULayers, linears: CPULinear, settings: Sequence[DecoderSettings], scratch: Scratch
    ) -> None:
        """Prepares the calls; weights are those that a `CPUDecoderLayer` was made of, held by their addresses alone.

        Raises:
            InputError: They differ in shape; or as of `CPUDecoderLayer`.
        """
        first = settings[0]
        self._run, self._dtype, self._width = layers.compiled.hf_paged_run, layers.dtype, first.norms[0].weight.shape[0]
        for own in settings:
            check(own, linears, layers.dtype)
        if any(own.head_dim != first.head_dim or _widths(own) != _widths(first) for own in settings):
            raise InputError("decoder layers", "layers of one shape")
        self._memory, places = places_of(first, scratch, layers.dtype)
        heads, key_heads = (one[0].shape[0] // first.head_dim for one in (first.query, first.key))
        # Apart from the scratch: of the layers between two of which nothing else is computed.
        self.buffers = [
            torch.empty(MOST, number, first.head_dim, dtype=layers.dtype, device="cpu")
            for number in (heads, key_heads, key_heads, heads)
        ]
        given = [(layers, linears, None, own, places) for own in settings]
        self._layers = [(Heads(*own), Behind(*own)) for own in given]
        self._shape = (0, 0)  # rows and threads
        self._calls: dict[int, np.ndarray] = {}  # `[layers, calls, 2]` int64, by the number of attention's kernels

    def heads(self, rows: int) -> list[Tensor]:
        """Of all layers: queries, keys, values and what attention makes of them, `[rows, heads, head_dim]` each."""
        return [own[:rows] for own in self.buffers]

    def compute(self, states: Tensor, cos: Tensor, sin: Tensor, attention: AttentionCalls) -> tuple[Tensor, ...]:
        """The result of each of the first layers; these count together how often they are written to.

        Args:
            states: `[1, rows, width]`, the first one's input, contiguous.
            cos: `[1, rows, rotary_dim]`, contiguous.
            sin: Like `cos`.
            attention: The calls of these layers, as many as there are arguments, over their `heads`.

        Raises:
            InputError: Tensors of other shapes, strides, dtypes or devices.
        """
        rows, dim, num_layers = states.shape[1], cos.shape[-1], len(attention[0][1])
        if not (
            are_states(states, self._width, self._dtype)
            and rows <= MOST
            and is_of(cos, (1, rows, dim), self._dtype)
            and is_of(sin, (1, rows, dim), self._dtype)
            and dim <= self.buffers[0].shape[2]
            and dim % 2 == 0
        ):
            raise InputError(
                "decoder layers", "states of their width, and cos and sin", states=states, cos=cos, sin=sin
            )
        query, key, value, attended = [own.data_ptr() for own in self.buffers]
        with torch.inference_mode(False):  # in which tensors don't count how often they are written to
            result = torch.empty((num_layers, *states.shape), dtype=self._dtype, device="cpu")
            results = result.unbind()
        angles, places = (cos.data_ptr(), sin.data_ptr(), dim), (query, key, value)
        self._set_shape(rows, torch.get_num_threads())
        size, before, behind = states.nbytes, states.data_ptr(), results[0].data_ptr()
        for first, second in self._layers[:num_layers]:
            first.place(before, angles, places)
            second.place(before, attended, behind)
            before, behind = behind, behind + size
        calls = self._calls_with(attention)[:num_layers]
        self._run(calls.ctypes.data, calls.size // 2)
        return results

    def _set_shape(self, rows: int, threads: int) -> None:
        if self._shape != (rows, threads):
            self._shape = (0, 0)  # until all is set
            for first, second in self._layers:
                first.set_shape(rows, threads)
                second.set_shape(rows, threads)
            self._shape = rows, threads

    def _calls_with(self, attention: AttentionCalls) -> np.ndarray:
        number = len(attention)
        calls = self._calls.get(number)
        place = len(self._layers[0][0].calls.addresses)
        if calls is None:
            calls = np.array(
                [
                    [*first.calls.addresses, *[(0, 0)] * number, *second.calls.addresses]
                    for first, second in self._layers
                ]
            )
            self._calls[number] = calls
        for index, (kernel, arguments) in enumerate(attention):
            own = calls[: len(arguments), place + index]
            own[:, 0] = kernel
            start, stride = ctypes.addressof(arguments), ctypes.sizeof(arguments._type_)
            own[:, 1] = start + stride * np.arange(len(arguments))
        return calls


def _widths(own: DecoderSettings) -> list[torch.Size]:
    return [one[0].shape for one in (own.query, own.key, own.gate)]
