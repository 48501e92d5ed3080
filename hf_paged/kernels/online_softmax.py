"""The loop both attention kernels share: one tile of query rows over a range of KV tiles.

For query rows `q_i` and the keys and values `k_j`, `v_j` seen so far, three running quantities are kept (online
softmax, Milakov and Gimelshein 2018; FlashAttention):

    m_i = max_j s_ij        l_i = sum_j 2^(s_ij - m_i)        acc_i = sum_j 2^(s_ij - m_i) v_j

with scores `s_ij` in units of log2, so that `exp2` serves. A tile of KV spans `TILE` tokens whatever the block size:
the block of each token is looked up in the block table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_paged.kernels.tile_ops import LOG2_E, dot, dot_add, hash_now, load_states, scale_pointers, tanh


@triton.jit
def attend_tiles(
    acc,  # [M, D] float32
    row_max,  # [M] float32, m above
    row_sum,  # [M] float32, l above
    query,  # [M, D]
    positions,  # [M], of the query rows in their sequence
    key_base,  # pointer to this layer's and head's keys in block 0
    value_base,
    table,  # pointer to the sequence's block table
    stride_block,
    first_tile,
    last_tile,
    last_position,  # of the sequence's tokens that any of these rows may see
    score_scale,
    softcap,
    window,
    bias,  # pointer to [heads, BIAS] float32, what is added to scores by distance; ignored unless BIAS
    heads,  # [M], of the query rows
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,  # head_dim up to the next power of two
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,  # distances, the last of which stands for all that are farther; 0: none
    MASKED: tl.constexpr,  # whether some row of some tile must not see some token of it
):
    """Adds the tiles `[first_tile, last_tile)` to `(acc, row_max, row_sum)`."""
    columns = tl.arange(0, D)
    in_head = columns[None, :] < HEAD_DIM
    # Past the end the last token is read again, which is always there, and its score masked. Blocks are looked up one
    # tile ahead: what the keys' addresses wait for is there already.
    present = tl.minimum(first_tile * TILE + tl.arange(0, TILE), last_position)
    blocks = tl.load(table + present // BLOCK_SIZE)
    # Hoisted, the addresses of all factors in shared memory take registers that wide tiles don't have.
    for tile in tl.range(first_tile, last_tile, disable_licm=True):
        tokens = tile * TILE + tl.arange(0, TILE)
        present = tl.minimum(tokens, last_position) if MASKED else tokens
        next_present = tl.minimum(tokens + TILE, last_position)
        next_blocks = tl.load(table + next_present // BLOCK_SIZE)
        blocks64 = blocks.to(tl.int64)
        rows = blocks64 * stride_block + (present % BLOCK_SIZE) * HEAD_DIM
        offsets = rows[:, None] + columns[None, :]  # [TILE, D]

        key = load_states(key_base + offsets, in_head, FORMAT, NATIVE, query.dtype, HEAD_DIM != D)
        scores = dot(query, tl.trans(key))  # [M, TILE]
        if FORMAT == "int8":
            scores *= tl.load(scale_pointers(key_base + rows, present % BLOCK_SIZE, BLOCK_SIZE, HEAD_DIM))[None, :]
        if HAS_SOFTCAP:
            scores = tanh(scores * score_scale) * softcap
        else:
            scores = scores * score_scale
        if MASKED or BIAS > 0:
            distance = positions[:, None] - tokens[None, :]
        if BIAS > 0:
            place = tl.minimum(tl.maximum(distance, 0), BIAS - 1)
            scores += tl.load(bias + heads[:, None] * BIAS + place) * LOG2_E
        if MASKED:
            visible = distance >= 0
            if HAS_WINDOW:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max

        value = load_states(value_base + offsets, in_head, FORMAT, NATIVE, query.dtype, HEAD_DIM != D)
        if FORMAT == "int8":  # not the weights: what float16 has of small numbers would be lost
            scales = tl.load(scale_pointers(value_base + rows, present % BLOCK_SIZE, BLOCK_SIZE, HEAD_DIM))
            value = (value.to(tl.float32) * scales[:, None]).to(query.dtype)
        acc = dot_add(weights.to(query.dtype), value, acc * decay[:, None])
        blocks = next_blocks
    return acc, row_max, row_sum


@triton.jit
def start_rows(rows_head, sinks, HAS_SINKS: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """`(acc, row_max, row_sum)` before the first tile.

    A sink (GPT-OSS) is a score that joins the softmax without a value: as if a first token with `v = 0` had been seen.

    Args:
        rows_head: `[M]`, query head of each row; in range.
        sinks: Pointer to `[num_heads]` scores.
        HAS_SINKS: Whether there are any.
        M: Rows.
        D: Columns.
    """
    acc = tl.zeros([M, D], tl.float32)
    if HAS_SINKS:
        row_max = tl.load(sinks + rows_head).to(tl.float32) * LOG2_E
        row_sum = tl.full([M], 1.0, tl.float32)
    else:
        row_max = tl.full([M], float("-inf"), tl.float32)
        row_sum = tl.zeros([M], tl.float32)
    return acc, row_max, row_sum


hash_now(attend_tiles, start_rows)
