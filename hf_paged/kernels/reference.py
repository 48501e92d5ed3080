"""The plain-torch truth of each paged operation: any dtype up to float64, any device, vectorised over the batch.

The KV tensor is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; index 2 of it is key (0) or value
(1). Where values are not as wide as keys, it is `[num_blocks, num_layers, 1, num_kv_heads, block_size, key_dim +
value_dim]`: a token's key and value lie side by side. A block's numbers are contiguous; from one block to the next it
is a multiple of `block_size * width` numbers. A slot is `block * block_size + offset`. Of int8, see `scaled_rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.kernels.padded_groups import GatherView, PaddedGroup
from hf_paged.kernels.scaled_rows import head_dim_of, is_scaled, parts, quantized_rows

Read = Callable[[Tensor], tuple[Tensor, Tensor]]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantize(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts to the pool's dtype. In fp8 what is beyond the largest finite number becomes that number."""
    if dtype in FP8:
        largest = torch.finfo(dtype).max
        return states.clamp(-largest, largest).to(dtype)
    return states.to(dtype)


def elements(kv_cache: Tensor) -> Tensor:
    """The pool with elements that torch can index: it can't index fp8, whose bytes it moves as well."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype in FP8 else kv_cache


def reshape_and_cache(key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Writes the new keys and values of one layer into their slots.

    Args:
        key: `[T, num_kv_heads, head_dim]`, any strides; cast to the cache's dtype.
        value: Like `key`.
        kv_cache: The KV tensor, changed in place.
        layer: Layer index.
        slot_mapping: `[T]` int64; on CPU, tokens with a slot below 0 are skipped. Elsewhere finding them would make the
            host wait for the device, so there must be none.
    """
    if slot_mapping.device.type == "cpu" and bool((slot_mapping < 0).any()):
        keep = slot_mapping >= 0
        key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
    write_rows(key, value, kv_cache, layer, slot_rows(kv_cache, slot_mapping))


def slot_rows(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Where the keys of layer 0 lie in the KV tensor seen as `rows`; the same for all layers of a step.

    Args:
        slots: `[..., T]` int64.

    Returns:
        `[..., T, num_kv_heads]` int64.
    """
    _, _, _, num_heads, block_size, width = kv_cache.shape
    heads = torch.arange(num_heads, device=slots.device)
    first = (slots // block_size) * (kv_cache.stride(0) // (block_size * width))
    return (first[..., None] + heads) * block_size + (slots % block_size)[..., None]


def write_rows(key: Tensor, value: Tensor, kv_cache: Tensor, layer: int, rows: Tensor) -> None:
    """`reshape_and_cache` with the slots' rows at hand: `rows` is `slot_rows(kv_cache, slot_mapping)`."""
    _, num_layers, num_parts, num_heads, block_size, _ = kv_cache.shape
    if not 0 <= layer < num_layers:  # else it would be some layer of the next block
        raise ValueError(f"the pool has {num_layers} layers, and none of number {layer}")
    width = head_dim_of(kv_cache)
    widths = (width, width) if num_parts == 2 else (key.shape[-1], width - key.shape[-1])
    if (key.shape, value.shape) != tuple((*rows.shape, own) for own in widths):
        raise ValueError(
            f"keys and values must be [tokens, num_kv_heads, head_dim] = {[*rows.shape, widths[0]]} and "
            f"{[*rows.shape, widths[1]]}, got {list(key.shape)} and {list(value.shape)}"
        )
    rows = rows.reshape(-1) + layer * num_parts * num_heads * block_size
    if num_parts == 1:
        _store(kv_cache, rows, torch.cat([key, value], dim=-1).reshape(-1, width))
        return
    for part_rows, states in ((rows, key), (rows + num_heads * block_size, value)):
        _store(kv_cache, part_rows, states.reshape(-1, width))


def _store(kv_cache: Tensor, rows: Tensor, states: Tensor) -> None:
    """Writes states `[R, width]` to rows `[R]` of the pool."""
    if is_scaled(kv_cache):
        codes, scales = _scaled_parts(kv_cache)
        places = rows // kv_cache.shape[4], rows % kv_cache.shape[4]
        codes[places], scales[places] = quantized_rows(states)
    else:
        _rows(kv_cache, kv_cache.shape[5]).index_copy_(0, rows, elements(quantize(states, kv_cache.dtype)))


def _load(kv_cache: Tensor, rows: Tensor) -> Tensor:
    """Rows `[R]` of the pool, `[R, width]`, in its dtype; float32 of int8."""
    if is_scaled(kv_cache):
        codes, scales = _scaled_parts(kv_cache)
        places = rows // kv_cache.shape[4], rows % kv_cache.shape[4]
        return codes[places] * scales[places][:, None]
    return _rows(kv_cache, kv_cache.shape[5]).index_select(0, rows).view(kv_cache.dtype)


def _scaled_parts(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """All codes `[-1, block_size, width]` and scales `[-1, block_size]`, a head's of a block in each place."""
    block_size, width = kv_cache.shape[4:]
    return parts(_rows(kv_cache, block_size * width), block_size)


def _rows(kv_cache: Tensor, width: int) -> Tensor:
    """The KV tensor as `[-1, width]`, whatever lies between its blocks included."""
    if kv_cache.is_contiguous():
        return elements(kv_cache).view(-1, width)
    pool = elements(kv_cache)
    num_rows = ((pool.shape[0] - 1) * pool.stride(0) + pool[0].numel()) // width
    return pool.as_strided((num_rows, width), (width, 1))


def block_rows(kv_cache: Tensor, block_table: Tensor) -> Tensor:
    """Where the keys and the values of layer 0 lie in the KV tensor seen as rows of a head's part of a block.

    Args:
        block_table: `[G, N]` int64.

    Returns:
        `[2 * G * num_kv_heads * N]` int64, keys first (where both lie side by side half of that); the same for all
        layers of a step.
    """
    _, _, num_parts, num_heads, block_size, width = kv_cache.shape
    heads = torch.arange(num_heads, device=block_table.device)
    keys = (block_table * (kv_cache.stride(0) // (block_size * width)))[:, None, :] + heads[:, None]
    return torch.cat([keys.reshape(-1) + part * num_heads for part in range(num_parts)])


def gather_rows(
    kv_cache: Tensor, layer: int, rows: Tensor, num_sequences: int, key_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer for every block of a table `[G, N]`, in one copy each.

    Args:
        layer: Layer index.
        rows: The table's `block_rows`.
        num_sequences: `G`.
        key_dim: Width of a head's key; `None`: as its value's.

    Returns:
        Key and value, `[G, num_kv_heads, N * block_size, head_dim]`, in the pool's dtype; float32 of int8.
    """
    _, _, num_parts, num_heads, block_size, width = kv_cache.shape
    states = _rows(kv_cache, block_size * width).index_select(0, rows + layer * num_parts * num_heads)
    if is_scaled(kv_cache):
        codes, scales = parts(states, block_size)
        states = (codes * scales[..., None]).view(num_parts, num_sequences, num_heads, -1, codes.shape[-1])
    else:
        states = states.view(num_parts, num_sequences, num_heads, -1, width).view(kv_cache.dtype)
    return (states[0], states[1]) if num_parts == 2 else _parted(states[0], key_dim)


def _gather(
    kv_cache: Tensor, layer: int, blocks: PaddedGroup | GatherView, query: Tensor, read: Read | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of these blocks in the query's dtype; of rows of latents, those that `read` makes of them."""
    if blocks.block_rows is None:
        blocks.block_rows = block_rows(kv_cache, blocks.block_table)
    width = kv_cache.shape[5] if read is not None else query.shape[-1]
    key, value = gather_rows(kv_cache, layer, blocks.block_rows, len(blocks.block_table), width)
    key = key.to(query.dtype)
    return read(key) if read is not None else (key, value.to(query.dtype))


def read_latents(states: Tensor, latent_dim: int) -> tuple[Tensor, Tensor]:
    """Rows of latents `[..., latent_dim + rotary_dim]` as the keys, and the latents as the values, of a single head."""
    return states, states[..., :latent_dim]


def _parted(states: Tensor, key_dim: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values that lie side by side."""
    assert key_dim is not None, "keys and values of two widths"
    return states[..., :key_dim], states[..., key_dim:]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    groups: Sequence[PaddedGroup],
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    output: Tensor | None = None,
    read: Read | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Causal attention of the packed batch over block tables: prefill, chunked prefill and decode in one.

    `softmax(softcap(scale * q k^T) + bias + mask) v`, with `softcap(x) = cap * tanh(x / cap)` (Gemma 2)
    and a sink logit per head that joins the softmax's denominator only (GPT-OSS). This step's keys and values must be
    in the cache already. Memory a masked slot holds must be finite: the engine zeroes blocks when it hands them out.

    Args:
        query: `[T, num_heads, head_dim]`.
        layer: Layer index.
        groups: The sequences: all, or those behind the ones that are done.
        scale: Factor on the scores.
        sliding_window: Tokens a query sees, itself included; `None`: all before it.
        softcap: Bound of the scores; `None`: none.
        sinks: `[num_heads]` logits.
        output: `[T, num_heads, head_dim]`, where other sequences' tokens are done: those of `groups` are written to it.
            `None`: these are all tokens, to be written to a new tensor.
        read: Where the pool holds latents: keys and values `[G, heads, S, ...]` of whole rows `[G, 1, S, width]`.
        bias: `[num_heads, distances]`, added to the scores of a query and a key so many tokens before it (T5); the
            last one to all that are farther.

    Returns:
        `[T, num_heads, head_dim]` in the query's dtype, or autocast's.
    """
    is_plain = softcap is None and sinks is None and bias is None

    def attend(rows: Tensor, group: PaddedGroup) -> Tensor:
        if is_plain and group.is_whole and (sliding_window is None or group.longest <= sliding_window):
            # Whole prompts: torch skips what is above the diagonal, and no mask is made.
            states = _gather(kv_cache, layer, group, query, read)
            key, value = (part[:, :, : group.longest] for part in states)
            is_grouped = key.shape[1] != rows.shape[2]
            result = F.scaled_dot_product_attention(
                rows.transpose(1, 2), key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
            )
            return result.transpose(1, 2)
        view = group.view(sliding_window, query.dtype)
        key, value = _gather(kv_cache, layer, view, query, read)
        packed = _pack_heads(rows, key.shape[1])
        if is_plain:
            mask = _repeat_mask(view.mask, packed.shape[2])
            result = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
        else:
            by_place = None if bias is None else _by_place(bias, group.query_positions - view.first[:, None], key.shape)
            result = _explicit_attention(packed, key, value, view.mask, scale, softcap, sinks, by_place)
        return _unpack_heads(result, rows.shape[1])

    first = groups[0]
    if output is None and len(groups) == 1 and first.is_real is None:
        # One group without padding is the whole batch in order: nothing to pick out and put back.
        return attend(query.view(*first.token_index.shape, *query.shape[1:]), first).flatten(0, 1)
    for group in groups:  # a few buckets of similar length, not sequences
        result = attend(query[group.token_index], group)
        if output is None:
            # Under autocast the result has another dtype than the query, and values may be of another width.
            output = result.new_empty(*query.shape[:2], result.shape[-1])
        if group.is_real is None:
            output[group.token_index] = result
        else:
            output[group.token_index[group.is_real]] = result[group.is_real]
    assert output is not None
    return output


def _by_place(bias: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """`[G, num_kv_heads, queries_per_kv, Q, S]`, what a bias by distance adds to the scores.

    Args:
        places: `[G, Q]` int64, of the queries, counted from the first key.
        shape: Of the keys.
    """
    columns = torch.arange(shape[2], device=bias.device)
    distance = (places[:, :, None] - columns).clamp(0, bias.shape[1] - 1)
    return bias[:, distance].transpose(0, 1).unflatten(1, (shape[1], -1))


def copy_blocks(kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copies whole blocks, all layers, keys and values; all sources are read before any destination is written.

    Args:
        kv_cache: The KV tensor, changed in place.
        sources: `[P]` int64.
        destinations: `[P]` int64, each block once.
    """
    blocks = elements(kv_cache)
    blocks.index_copy_(0, destinations, blocks.index_select(0, sources))


def _pack_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """`[G, Q, num_heads, D]` to `[G, num_kv_heads, queries_per_kv * Q, D]`: a kv head's queries share its keys."""
    groups, length, num_heads, head_dim = query.shape
    grouped = query.view(groups, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return grouped.permute(0, 2, 3, 1, 4).reshape(groups, num_kv_heads, -1, head_dim)


def _repeat_mask(mask: Tensor, packed_length: int) -> Tensor:
    """`[G, 1, Q, S]` to `[G, 1, packed_length, S]`, as `_pack_heads` lays the queries out; one query needs no copy."""
    groups, _, length, keys = mask.shape
    if length in (1, packed_length):
        return mask.expand(groups, 1, packed_length, keys)
    return mask.repeat(1, 1, packed_length // length, 1)


def _explicit_attention(
    packed: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """The formula of `paged_attention` written out, for what `scaled_dot_product_attention` has no argument for."""
    groups, num_kv_heads, packed_length, head_dim = packed.shape
    length, keys = mask.shape[2:]
    scores = (packed @ key.transpose(-1, -2) * scale).view(groups, num_kv_heads, -1, length, keys)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    scores = scores + mask[:, :, None]
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    # Half precision keeps its softmax in float32, as the models' own code does.
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=softmax_dtype).to(value.dtype)[..., :keys]
    return weights.reshape(groups, num_kv_heads, packed_length, keys) @ value


def _unpack_heads(result: Tensor, length: int) -> Tensor:
    """Undoes `_pack_heads`: `[G, num_kv_heads, queries_per_kv * Q, D]` to `[G, Q, num_heads, D]`."""
    groups, num_kv_heads, packed_length, head_dim = result.shape
    rows = result.view(groups, num_kv_heads, packed_length // length, length, head_dim)
    return rows.permute(0, 3, 1, 2, 4).reshape(groups, length, -1, head_dim)


def gather_slots(kv_cache: Tensor, layer: int, slots: Tensor, key_dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, token by token.

    Args:
        layer: Layer index.
        slots: `[B, S]` int64.
        key_dim: Width of a head's key; `None`: as its value's.

    Returns:
        Key and value, `[B, num_kv_heads, S, head_dim]`, in the pool's dtype; float32 of int8.
    """
    _, _, num_parts, num_heads, block_size, _ = kv_cache.shape
    batch, width = slots.shape
    rows = slot_rows(kv_cache, slots).transpose(1, 2).reshape(-1) + layer * num_parts * num_heads * block_size
    shape = (batch, num_heads, width, head_dim_of(kv_cache))
    if num_parts == 1:
        return _parted(_load(kv_cache, rows).view(shape), key_dim)
    return _load(kv_cache, rows).view(shape), _load(kv_cache, rows + num_heads * block_size).view(shape)


def block_sums(kv_cache: Tensor, blocks: Tensor) -> Tensor:
    """`[P]` float32 for blocks `[P]`: not finite where a token's value of the last layer has NaN or infinity."""
    values = elements(kv_cache)[:, -1, -1][blocks]
    if is_scaled(kv_cache):
        return parts(values.flatten(2), kv_cache.shape[4])[1].sum(dim=(1, 2))
    return values.view(kv_cache.dtype).sum(dim=(1, 2, 3), dtype=torch.float32)
