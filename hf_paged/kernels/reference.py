"""The plain-torch truth of each paged operation: any dtype up to float64, any device, vectorised over the batch.

The KV tensor is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous; index 2 of it is key (0)
or value (1). A slot is `block * block_size + offset`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.attention_metadata import AttentionGroup, AttentionMetadata


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
    _, num_layers, _, num_heads, block_size, head_dim = kv_cache.shape
    if slot_mapping.device.type == "cpu" and bool((slot_mapping < 0).any()):
        keep = slot_mapping >= 0
        key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    heads = torch.arange(num_heads, device=key.device)
    # Row of the tensor seen as [-1, head_dim], for every (token, head) of the key; the value is num_heads blocks on.
    rows = ((block * num_layers + layer) * 2 * num_heads)[:, None] + heads
    rows = rows * block_size + offset[:, None]
    flat = kv_cache.view(-1, head_dim)
    flat.index_copy_(0, rows.reshape(-1), key.reshape(-1, head_dim).to(kv_cache.dtype))
    flat.index_copy_(0, (rows + num_heads * block_size).reshape(-1), value.reshape(-1, head_dim).to(kv_cache.dtype))


def gather_blocks(kv_cache: Tensor, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer for every block of a table, in one copy each.

    Args:
        kv_cache: The KV tensor.
        layer: Layer index.
        block_table: `[G, N]` int64.

    Returns:
        Key and value, `[G, num_kv_heads, N * block_size, head_dim]`, contiguous.
    """
    _, num_layers, _, num_heads, block_size, head_dim = kv_cache.shape
    groups, width = block_table.shape
    heads = torch.arange(num_heads, device=block_table.device)
    # Row of the tensor seen as [-1, block_size * head_dim], for every (sequence, head, block) of the key.
    rows = ((block_table * num_layers + layer) * 2 * num_heads)[:, None, :] + heads[:, None]
    flat = kv_cache.view(-1, block_size * head_dim)
    shape = (groups, num_heads, width * block_size, head_dim)
    key = flat.index_select(0, rows.reshape(-1)).view(shape)
    value = flat.index_select(0, (rows + num_heads).reshape(-1)).view(shape)
    return key, value


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of the flat batch over block tables: prefill, chunked prefill and decode in one.

    `softmax(softcap(scale * q k^T) - slope * distance + mask) v`, with `softcap(x) = cap * tanh(x / cap)` (Gemma 2)
    and a sink logit per head that joins the softmax's denominator only (GPT-OSS). This step's keys and values must be
    in the cache already. Memory a masked slot holds must be finite: the engine zeroes blocks when it hands them out.

    Args:
        query: `[T, num_heads, head_dim]`.
        kv_cache: The KV tensor.
        layer: Layer index.
        metadata: The step's metadata.
        scale: Factor on the scores.
        sliding_window: Tokens a query sees, itself included; `None`: all before it.
        softcap: Bound of the scores; `None`: none.
        sinks: `[num_heads]` logits.
        alibi_slopes: `[num_heads]` slopes of linear position biases.

    Returns:
        `[T, num_heads, head_dim]` in the query's dtype.
    """
    output = torch.empty_like(query)
    for group in metadata.groups:  # a few buckets of similar length, not sequences
        view = group.view(sliding_window, metadata.block_size, metadata.null_block, query.dtype)
        key, value = gather_blocks(kv_cache, layer, view.block_table)
        key, value = key.to(query.dtype), value.to(query.dtype)
        packed = _pack_heads(query[group.token_index], key.shape[1])
        if softcap is None and sinks is None and alibi_slopes is None:
            mask = _repeat_mask(view.mask, packed.shape[2])
            result = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
        else:
            result = _explicit_attention(
                packed, key, value, view.mask, view.distance, scale, softcap, sinks, alibi_slopes
            )
        _scatter(output, result, group)
    return output


def copy_blocks(kv_cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copies whole blocks, all layers, keys and values. `sources`, `destinations`: `[P]` int64; no block in both."""
    kv_cache.index_copy_(0, destinations, kv_cache.index_select(0, sources))


def _pack_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """`[G, Q, num_heads, D]` to `[G, num_kv_heads, queries_per_kv * Q, D]`: a kv head's queries share its keys."""
    groups, length, num_heads, head_dim = query.shape
    grouped = query.view(groups, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return grouped.permute(0, 2, 3, 1, 4).reshape(groups, num_kv_heads, -1, head_dim)


def _repeat_mask(mask: Tensor, packed_length: int) -> Tensor:
    """`[G, 1, Q, S]` to `[G, 1, packed_length, S]`, as `_pack_heads` lays the queries out; one query needs no copy."""
    groups, _, length, keys = mask.shape
    if length == 1 or length == packed_length:
        return mask.expand(groups, 1, packed_length, keys)
    return mask.repeat(1, 1, packed_length // length, 1)


def _explicit_attention(
    packed: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    distance: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """The formula of `paged_attention` written out, for what `scaled_dot_product_attention` has no argument for."""
    groups, num_kv_heads, packed_length, head_dim = packed.shape
    length, keys = mask.shape[2:]
    scores = (packed @ key.transpose(-1, -2) * scale).view(groups, num_kv_heads, -1, length, keys)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.view(num_kv_heads, -1, 1, 1) * distance[:, :, None]
    scores = scores + mask[:, :, None]
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    # Half precision keeps its softmax in float32, as the models' own code does.
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=softmax_dtype).to(value.dtype)[..., :keys]
    return weights.reshape(groups, num_kv_heads, packed_length, keys) @ value


def _scatter(output: Tensor, result: Tensor, group: AttentionGroup) -> None:
    """Undoes `_pack_heads` and puts the group's rows back into the flat batch."""
    groups, length = group.token_index.shape
    num_heads, head_dim = output.shape[1:]
    rows = result.view(groups, result.shape[1], -1, length, head_dim).permute(0, 3, 1, 2, 4)
    rows = rows.reshape(groups, length, num_heads, head_dim)
    if group.is_real is None:
        output[group.token_index] = rows
    else:
        output[group.token_index[group.is_real]] = rows[group.is_real]


def gather_slots(kv_cache: Tensor, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, token by token.

    Args:
        kv_cache: The KV tensor.
        layer: Layer index.
        slots: `[B, S]` int64.

    Returns:
        Key and value, `[B, num_kv_heads, S, head_dim]`.
    """
    _, num_layers, _, num_heads, block_size, head_dim = kv_cache.shape
    batch, width = slots.shape
    heads = torch.arange(num_heads, device=slots.device)
    rows = (((slots // block_size) * num_layers + layer) * 2 * num_heads)[:, None, :] + heads[:, None]
    rows = rows * block_size + (slots % block_size)[:, None, :]
    flat = kv_cache.view(-1, head_dim)
    shape = (batch, num_heads, width, head_dim)
    key = flat.index_select(0, rows.reshape(-1)).view(shape)
    value = flat.index_select(0, (rows + num_heads * block_size).reshape(-1)).view(shape)
    return key, value
