"""The kernels as custom ops of torch, `torch.ops.hf_paged.*`: what `torch.compile` and CUDA graphs see.

Registered with `torch.library`'s dispatcher directly, since its decorator costs several times as much a call, for each
layer of each step. On CPU tensors they run in Triton's interpreter, and only there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_paged.kernels import copy_blocks as copy_kernel
from hf_paged.kernels import latent_attention as latents
from hf_paged.kernels import paged_decode as decode
from hf_paged.kernels import paged_prefill as prefill
from hf_paged.kernels import reshape_and_cache as write_kernel
from hf_paged.kernels import shared_decode as shared
from hf_paged.kernels.launch import LayerAttention, check_kv_cache, next_power_of_two
from hf_paged.kernels.scaled_rows import head_dim_of

_LIBRARY = torch.library.Library("hf_paged", "DEF")

_LIBRARY.define(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) kv_cache, int layer, Tensor slot_mapping) -> ()"
)
_LIBRARY.define("copy_blocks(Tensor(a!) kv_cache, Tensor sources, Tensor destinations) -> ()")
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor kv_cache, int layer, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor? decode_items, Tensor? split, Tensor? shared_items, Tensor? members, "
    "int max_parts, Tensor? query_items, Tensor? query_split, int query_rows, float scale, int window, float softcap, "
    "Tensor? sinks, Tensor(a!) partials, bool exact=False, "
    "bool is_padded=False, Tensor? bias=None) -> Tensor"
)
_LIBRARY.define(
    "write_latents(Tensor latent, Tensor rotary, Tensor(a!) kv_cache, int layer, Tensor slot_mapping) -> ()"
)
_LIBRARY.define(
    "latent_attention(Tensor query, Tensor kv_cache, int layer, int latent_dim, Tensor block_tables, Tensor seq_lens, "
    "Tensor items, Tensor split, int max_parts, float scale, int window, float softcap, Tensor? sinks, "
    "Tensor(a!) partials, bool is_padded=False) -> Tensor"
)


def _reshape_and_cache(key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
    check_kv_cache(kv_cache)
    _check_layer(kv_cache, layer)
    num_heads, head_dim = kv_cache.shape[3], head_dim_of(kv_cache)
    expected = (slot_mapping.shape[0], num_heads, head_dim)
    if key.shape != expected or value.shape != expected:
        raise ValueError(
            f"key and value must be [tokens, num_kv_heads, head_dim] = {list(expected)}, "
            f"got {list(key.shape)} and {list(value.shape)}"
        )
    write_kernel.reshape_and_cache(key, value, kv_cache, layer, slot_mapping.contiguous())


def _paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    decode_items: Tensor | None,
    split: Tensor | None,
    shared_items: Tensor | None,
    members: Tensor | None,
    max_parts: int,
    query_items: Tensor | None,
    query_split: Tensor | None,
    query_rows: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    partials: Tensor,
    exact: bool = False,
    is_padded: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    check_kv_cache(kv_cache)
    _check_layer(kv_cache, layer)
    num_kv_heads, head_dim = kv_cache.shape[3], head_dim_of(kv_cache)
    if query.dim() != 3 or query.shape[2] != head_dim or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"query must be [tokens, num_heads, {head_dim}] with num_heads a multiple of {num_kv_heads}, "
            f"got {list(query.shape)}"
        )
    if query.stride(2) != 1:
        query = query.contiguous()
    # Tokens of no sequence would keep what the memory held, perhaps NaN.
    output = query.new_zeros(query.shape) if is_padded else query.new_empty(query.shape)
    where = output, query, kv_cache, layer, block_tables, seq_lens, query_start_loc.contiguous()
    call = _call(*where, scale, window, softcap, sinks, partials, max_parts)
    if bias is not None:
        call.bias = _checked_bias(bias, query)
    if shared_items is not None and members is not None:
        if window:
            raise ValueError(f"tokens are read together by layers without a window, this one's is {window}")
        shared.shared_decode(call, shared_items.contiguous(), members.contiguous())
    if decode_items is not None and split is not None:
        decode.paged_decode(call, decode_items.contiguous(), split.contiguous())
    if query_items is not None and query_split is not None and query_items.shape[0]:
        prefill.paged_prefill(call, query_items.contiguous(), query_split.contiguous(), query_rows, exact)
    return output


def _write_latents(latent: Tensor, rotary: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
    _check_latents(kv_cache)
    _check_layer(kv_cache, layer)
    num_tokens, width = slot_mapping.shape[0], kv_cache.shape[5]
    if latent.shape[:2] != (num_tokens, 1) or rotary.shape != (num_tokens, 1, width - latent.shape[2]):
        raise ValueError(
            f"latents and rotary keys must be [{num_tokens}, 1, ...], {width} wide together, "
            f"got {list(latent.shape)} and {list(rotary.shape)}"
        )
    latents.write_latents(latent, rotary, kv_cache, layer, slot_mapping.contiguous())


def _latent_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    latent_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    items: Tensor,
    split: Tensor,
    max_parts: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    partials: Tensor,
    is_padded: bool = False,
) -> Tensor:
    _check_latents(kv_cache)
    _check_layer(kv_cache, layer)
    width = kv_cache.shape[5]
    if query.dim() != 3 or query.shape[2] != width or not 0 < latent_dim < width:
        raise ValueError(f"query must be [rows, num_heads, {width}] with a latent in it, got {list(query.shape)}")
    shape = *query.shape[:2], latent_dim
    output = query.new_zeros(shape) if is_padded else query.new_empty(shape)  # as above
    where = output, query.contiguous(), kv_cache, layer, block_tables, seq_lens, None
    call = _call(*where, scale, window, softcap, sinks, partials, max_parts)
    latents.latent_decode(call, items.contiguous(), split.contiguous())
    return output


def _call(
    output: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    partials: Tensor,
    max_parts: int,
) -> LayerAttention:
    """What the launchers take. Refuses settings out of range, and too little scratch."""
    if scale <= 0 or softcap < 0 or window < 0:
        raise ValueError(
            f"scale must be above 0, softcap and window at least 0 (none), got {scale}, {softcap}, {window}"
        )
    needed = decode.partials_size(max_parts, query.shape[1], output.shape[2])
    if partials.numel() < needed or partials.dtype != torch.float32:
        raise ValueError(f"partials must hold {needed} float32 numbers, got {partials.numel()} of {partials.dtype}")
    return LayerAttention(
        output,
        query,
        kv_cache,
        layer,
        block_tables if block_tables.stride(1) == 1 else block_tables.contiguous(),
        seq_lens.contiguous(),
        query_start_loc,
        scale,
        window,
        softcap,
        sinks.contiguous() if sinks is not None else None,
        partials,
    )


def _copy_blocks(kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    copy_kernel.copy_blocks(kv_cache, sources.contiguous(), destinations.contiguous())


def _on_its_device(function: Callable[..., Any], tensor_index: int) -> Callable[..., Any]:
    """Triton launches on the thread's current device, which need not be the model's."""

    def run(*args: Any) -> Any:
        device = args[tensor_index].device
        if device.index == torch.cuda.current_device():
            return function(*args)
        with torch.cuda.device(device):
            return function(*args)

    return run


for _name, _function, _kv_cache_index in (
    ("reshape_and_cache", _reshape_and_cache, 2),
    ("paged_attention", _paged_attention, 1),
    ("copy_blocks", _copy_blocks, 0),
    ("write_latents", _write_latents, 2),
    ("latent_attention", _latent_attention, 1),
):
    _LIBRARY.impl(_name, _function, "CPU")
    _LIBRARY.impl(_name, _on_its_device(_function, _kv_cache_index), "CUDA")  # ROCm's key, too


@torch.library.register_fake("hf_paged::reshape_and_cache", lib=_LIBRARY)
@torch.library.register_fake("hf_paged::copy_blocks", lib=_LIBRARY)
@torch.library.register_fake("hf_paged::write_latents", lib=_LIBRARY)
def _(*_: object) -> None:
    return None


@torch.library.register_fake("hf_paged::paged_attention", lib=_LIBRARY)
def _(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.register_fake("hf_paged::latent_attention", lib=_LIBRARY)
def _(query: Tensor, _cache: Tensor, _layer: int, latent_dim: int, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:2], latent_dim)


def _checked_bias(bias: Tensor, query: Tensor) -> Tensor:
    if bias.dim() != 2 or bias.shape[0] != query.shape[1] or not bias.shape[1] or bias.dtype != torch.float32:
        wanted = f"[{query.shape[1]}, distances] in float32"
        raise ValueError(f"a bias by distance must be {wanted}, got {list(bias.shape)} in {bias.dtype}")
    return bias.contiguous()


def _check_latents(kv_cache: Tensor) -> None:
    width = kv_cache.shape[-1]
    if kv_cache.dim() != 6 or kv_cache.shape[2:4] != (1, 1) or kv_cache.stride()[4:] != (width, 1):
        raise ValueError(
            "a pool of latents must be [num_blocks, num_layers, 1, 1, block_size, width], a block's tokens contiguous, "
            f"got {list(kv_cache.shape)} with strides {kv_cache.stride()}"
        )


def _check_layer(kv_cache: Tensor, layer: int) -> None:
    if not 0 <= layer < kv_cache.shape[1]:
        raise ValueError(f"layer must be one of the pool's {kv_cache.shape[1]}, got {layer}")


# The functions of these names in `reference`, by the Triton kernels: slots below 0 are skipped on every device, and
# blocks are copied in no order, so no destination may be a source.
reshape_and_cache = torch.ops.hf_paged.reshape_and_cache
copy_blocks = torch.ops.hf_paged.copy_blocks


class Partials:
    """Scratch for the partial results of split sequences, kept between calls and shared by all layers.

    Grows to what was needed most. What recorded steps have is kept when others need more: their graphs go on using it.
    """

    def __init__(self, keeps: bool = False) -> None:
        self._tensor: Tensor | None = None
        self._kept: list[Tensor] | None = [] if keeps else None

    def get(self, size: int, device: torch.device) -> Tensor:
        """At least `size` float32 numbers on `device`."""
        tensor = self._tensor
        if tensor is None or tensor.device != device or tensor.numel() < size:
            with torch.inference_mode(False):
                tensor = torch.empty(next_power_of_two(max(size, 1)), dtype=torch.float32, device=device)
            self._tensor = tensor
            if self._kept is not None:
                self._kept.append(tensor)
        return tensor


# What a step has to know of the kernels before it calls them
partials_size = decode.partials_size
decode_plan, shared_plan, latent_plan, prefill_plan = decode.plan, shared.plan, latents.plan, prefill.plan
