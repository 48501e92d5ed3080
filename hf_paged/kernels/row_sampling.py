"""Triton kernels that choose a token for each row of logits, one program a row, whatever the rows' settings are.

A row is looked at several times, and nothing of it is sorted: a threshold is found by halving the range of its values.
As soon as few tokens lie above the range, those are written down, and only they are looked at.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_paged.kernels.launch import NO_FUSION, device_context, device_of
from hf_paged.kernels.philox import DrawGrid
from hf_paged.kernels.sampling_rows import OFFSETS, ROW, plain_rows
from hf_paged.kernels.transfers import to_device

WORDS = tl.constexpr(ROW.itemsize // 4)
# The places of its fields.
(
    SOURCE, IS_DRAWN, SCALE, TOP_K, CUT, MIN_P, SEED, ROUND, THREADS, FIRST, MASK, EDITED, TABLE, LENGTH, START,
    PENALTY, INVERSE, PRESENCE, FREQUENCY, BIAS, BIASES, _,
) = (tl.constexpr(offset // 4) for offset in OFFSETS)  # fmt: skip
TILE, ROOM = 4096, 4096  # tokens that are looked at together, and that are written down
NUM_WARPS = 16
NAN_KEY = tl.constexpr(2**31 - 1)
LOWEST_KEY = tl.constexpr(-(2**31))


@triton.jit
def _bits(own, place: tl.constexpr):
    return tl.load(own + place).to(tl.uint32, bitcast=True)


@triton.jit
def _number(own, place: tl.constexpr):
    return tl.load(own + place).to(tl.float32, bitcast=True)


@triton.jit
def _draw_of(own):
    """The draws of a row: seed, round, threads, first number."""
    seed_low = _bits(own, SEED)
    seed_high = _bits(own, SEED + 1)
    round_low = _bits(own, ROUND)
    round_high = _bits(own, ROUND + 1)
    return seed_low, seed_high, round_low, round_high, tl.load(own + THREADS), tl.load(own + FIRST)


@triton.jit
def _log2(x, IS_NVIDIA: tl.constexpr):
    """As CUDA's `__logf` has it: the processor's own, whose last bits differ from those of `tl.log2`."""
    if IS_NVIDIA:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def _exponential(draw, token, IS_WORD: tl.constexpr, IS_NVIDIA: tl.constexpr):
    """The exponentially distributed number that torch draws for a token: see `philox.py`; or the word behind it."""
    seed_low, seed_high, round_low, round_high, threads, first = draw
    element = first + token
    group = element // threads
    thread = element - group * threads
    counter = (round_low.to(tl.uint64) | (round_high.to(tl.uint64) << 32)) + (group >> 2).to(tl.uint64)
    low = counter.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox_impl(low, high, thread.to(tl.uint32), zero, seed_low + zero, seed_high + zero)
    which = group & 3
    word = tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))
    if IS_WORD:
        return word
    uniform = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    drawn = -(_log2(uniform, IS_NVIDIA) * 0.6931471824645996)
    return tl.where(uniform >= 0.9999999403953552, 5.960464477539063e-08, drawn)


@triton.jit(do_not_specialize=["vocab_size"])
def _noise_kernel(rows, output, vocab_size, IS_WORD: tl.constexpr, IS_NVIDIA: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    own = rows + row * WORDS
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    drawn = _exponential(_draw_of(own), token, IS_WORD, IS_NVIDIA)
    to = output + row.to(tl.int64) * vocab_size + token
    tl.store(to, drawn.to(output.dtype.element_ty, bitcast=IS_WORD), mask=token < vocab_size)


@triton.jit
def _key(x):
    """An integer that is ordered as the numbers are; both zeros are one. Of NaN: the largest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def _of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _exp(x):
    """To one or two ulp, as CUDA's `expf`: of numbers up to 0."""
    y = tl.maximum(x, -104.0)
    whole = tl.floor(y * 1.4426950408889634 + 0.5)
    rest = tl.fma(whole, -0.693145751953125, y)
    rest = tl.fma(whole, -1.428606765330187e-06, rest)
    return tl.where(x > -104.0, tl.exp2(rest * 1.4426950408889634) * tl.exp2(whole), 0.0)


@triton.jit
def _logit(logits, masks, is_masked, token, here):
    """Logits of some tokens, minus infinity where the row's grammar doesn't allow them."""
    x = tl.load(logits + token, mask=here, other=float("-inf")).to(tl.float32)
    word = tl.load(masks + (token >> 5), mask=here & is_masked, other=-1)
    return tl.where(((word >> (token & 31)) & 1) != 0, x, float("-inf"))


@triton.jit
def _penalised(x, token_penalty, inverse):
    return tl.where(x < 0, x * token_penalty, x * inverse)


@triton.jit
def _edit(
    own, logits, masks, is_masked, ids, numbers, counts, bias_tokens, bias_values, vocab_size, TILE: tl.constexpr
):
    """Writes a row's changed logits to `numbers`: by its mask, its tokens' penalties and its biases, in this order."""
    for begin in tl.range(0, vocab_size, TILE):
        token = begin + tl.arange(0, TILE)
        here = token < vocab_size
        tl.store(numbers + token, _logit(logits, masks, is_masked, token, here), mask=here)
    tl.debug_barrier()
    length = tl.load(own + LENGTH)
    penalty = _number(own, PENALTY)
    inverse = _number(own, INVERSE)
    if penalty != 1.0:
        for begin in tl.range(0, length, TILE):
            place = begin + tl.arange(0, TILE)
            token = tl.load(ids + place, mask=place < length, other=-1)
            here = (token >= 0) & (token < vocab_size)
            x = _logit(logits, masks, is_masked, token, here)  # not what is written: a token may be there twice
            tl.store(numbers + token, _penalised(x, penalty, inverse), mask=here)
        tl.debug_barrier()
    presence = _number(own, PRESENCE)
    frequency = _number(own, FREQUENCY)
    if (presence != 0.0) | (frequency != 0.0):
        start = tl.load(own + START)
        for begin in tl.range(start, length, TILE):
            place = begin + tl.arange(0, TILE)
            token = tl.load(ids + place, mask=place < length, other=-1)
            tl.store(counts + token, tl.zeros([TILE], tl.int32), mask=(token >= 0) & (token < vocab_size))
        tl.debug_barrier()
        for begin in tl.range(start, length, TILE):
            place = begin + tl.arange(0, TILE)
            token = tl.load(ids + place, mask=place < length, other=-1)
            here = (token >= 0) & (token < vocab_size)
            tl.atomic_add(counts + token, tl.full([TILE], 1, tl.int32), mask=here)
        tl.debug_barrier()
        for begin in tl.range(start, length, TILE):
            place = begin + tl.arange(0, TILE)
            token = tl.load(ids + place, mask=place < length, other=-1)
            here = (token >= 0) & (token < vocab_size)
            count = tl.load(counts + token, mask=here, other=0).to(tl.float32)
            x = _logit(logits, masks, is_masked, token, here)
            if penalty != 1.0:
                x = _penalised(x, penalty, inverse)
            tl.store(numbers + token, x - count * frequency - presence, mask=here)
        tl.debug_barrier()
    first = tl.load(own + BIAS)
    biases = tl.load(own + BIASES)
    for begin in tl.range(0, biases, TILE):
        place = begin + tl.arange(0, TILE)
        token = tl.load(bias_tokens + first + place, mask=place < biases, other=0)
        x = tl.load(numbers + token, mask=place < biases, other=0.0)
        x += tl.load(bias_values + first + place, mask=place < biases, other=0.0)
        tl.store(numbers + token, x, mask=place < biases)
    tl.debug_barrier()


@triton.jit
def _read(view, begin, count, TILE: tl.constexpr):
    """Scores of a tile of what a row is at present, and which tokens' they are; minus infinity behind its end.

    That is its logits, all of them changed (`has_numbers`), or some tokens' scores (`has_tokens`, too).
    """
    logits, masks, is_masked, numbers, tokens, has_numbers, has_tokens, scale = view
    place = begin + tl.arange(0, TILE)
    here = place < count
    x = _logit(logits, masks, is_masked, place, here & (has_numbers == 0))
    number = tl.load(numbers + place, mask=here & (has_numbers != 0), other=float("-inf"))
    token = tl.load(tokens + place, mask=here & (has_tokens != 0), other=0)
    return tl.where(has_numbers != 0, number, x) * scale, tl.where(has_tokens != 0, token, place), here


@triton.jit
def _now(view, written, is_listed):
    """The tokens that were written down, if some were, in place of the whole row."""
    logits, masks, is_masked, numbers, tokens, has_numbers, _, scale = view
    to_numbers, to_tokens = written
    if is_listed != 0:
        numbers = to_numbers
        has_numbers = is_listed
        scale = tl.full([], 1.0, tl.float32)
    return logits, masks, is_masked, numbers, to_tokens, has_numbers, is_listed, scale


@triton.jit
def _is_kept(x, token, here, threshold, first_kept):
    key = _key(x)
    return here & ((key > threshold) | ((key == threshold) & (token >= first_kept)))


@triton.jit
def _write_down(view, count, lowest, written, TILE: tl.constexpr):
    """Writes down the scores that reach a key, and their tokens, in order; returns how many."""
    to_numbers, to_tokens = written
    num = tl.full([], 0, tl.int32)
    for begin in tl.range(0, count, TILE):
        x, token, here = _read(view, begin, count, TILE)
        reaches = here & (_key(x) >= lowest)
        own = reaches.to(tl.int32)
        place = num + tl.cumsum(own, 0) - 1
        tl.store(to_numbers + place, x, mask=reaches)
        tl.store(to_tokens + place, token, mask=reaches)
        num += tl.sum(own, 0)
    tl.debug_barrier()
    return num


@triton.jit
def _find(
    view, written, is_listed, count, low, high, above, least, floor, top, IS_MASS: tl.constexpr, TILE: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """The threshold in the range `[low, high)` of keys, which is halved, and whose lower end `above` tokens reach.

    That is the largest key that at least `least` tokens reach; or (`IS_MASS`) that those below it, down to `floor`,
    don't outweigh `least`, each with its exponential. Tokens are written down as soon as there is room for those left:
    the threshold is followed by how many reach it, what is then to be looked at, and what is left of `least`.
    """
    under = least * 0
    while high - low > 1:
        if (is_listed == 0) & (above <= ROOM):
            count = _write_down(view, count, low, written, TILE)
            is_listed = tl.full([], 1, tl.int32)
            if IS_MASS:
                least -= under
        now = _now(view, written, is_listed)
        middle = low + (high - low) // 2
        own = middle.to(tl.int32)
        reaching = tl.zeros([TILE], tl.int32)
        below = tl.zeros([TILE], tl.float32)
        for begin in tl.range(0, count, TILE):
            x, _, here = _read(now, begin, count, TILE)
            key = _key(x)
            reaching += (here & (key >= own)).to(tl.int32)
            if IS_MASS:
                below += tl.where(here & (key < own) & (key >= floor), _exp(x - top), 0.0)
        num_reaching = tl.sum(reaching, 0)
        if IS_MASS:
            mass = tl.sum(below, 0)
            is_low = mass <= least
            under = tl.where(is_low, mass, under)
        else:
            is_low = num_reaching >= least
        above = tl.where(is_low, num_reaching, above)
        low = tl.where(is_low, middle, low)
        high = tl.where(is_low, high, middle)
    return low, above, is_listed, count, least


@triton.jit
def _first_kept_tie(view, count, key, floor, cut, top, TILE: tl.constexpr):
    """The first token of a key that is kept: the earlier ones of a tie go as long as the sum allows it."""
    below = tl.zeros([TILE], tl.float32)
    ties = tl.zeros([TILE], tl.int32)
    for begin in tl.range(0, count, TILE):
        x, _, here = _read(view, begin, count, TILE)
        own = _key(x)
        below += tl.where(here & (own < key) & (own >= floor), _exp(x - top), 0.0)
        ties += (here & (own == key)).to(tl.int32)
    weight = _exp(_of_key(key) - top)
    num_gone = tl.floor((cut - tl.sum(below, 0)) / weight).to(tl.int32)
    num_gone = tl.minimum(tl.maximum(num_gone, 0), tl.sum(ties, 0) - 1)
    first = tl.full([], 0, tl.int32)
    if num_gone > 0:
        seen = tl.full([], 0, tl.int32)
        for begin in tl.range(0, count, TILE):
            x, token, here = _read(view, begin, count, TILE)
            is_tie = (here & (_key(x) == key)).to(tl.int32)
            rank = seen + tl.cumsum(is_tie, 0) - 1
            found = tl.where((is_tie != 0) & (rank == num_gone), token, 0)
            first = tl.maximum(first, tl.max(found, 0))
            seen += tl.sum(is_tie, 0)
    return first


@triton.jit(
    do_not_specialize=["stride_masks", "stride_ids", "num_edited"],
    do_not_specialize_on_alignment=["bias_tokens", "bias_values"],
)
def _sample_kernel(
    rows,  # [B, WORDS] int32: `ROW`
    logits,  # [K, vocab_size]
    masks,  # [M, words] int32: a bit a token
    ids,  # [R, W] int64: tokens so far
    bias_tokens,  # int32
    bias_values,  # float32
    workspace,  # float32: [num_edited, vocab_size] and [B, ROOM]
    places,  # int32: [num_edited, vocab_size] and [B, ROOM]
    chosen,  # [B] int64
    vocab_size,
    stride_logits,
    stride_masks,
    stride_ids,
    num_edited,
    IS_NVIDIA: tl.constexpr,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
):
    row = tl.program_id(0)
    own = rows + row * WORDS
    logits += tl.load(own + SOURCE).to(tl.int64) * stride_logits
    mask_row = tl.load(own + MASK)
    is_masked = mask_row >= 0
    masks += tl.maximum(mask_row, 0).to(tl.int64) * stride_masks
    table = tl.load(own + TABLE)
    ids += tl.maximum(table, 0).to(tl.int64) * stride_ids
    slot = tl.load(own + EDITED)
    changed_at = tl.maximum(slot, 0).to(tl.int64) * vocab_size
    is_changed = (slot >= 0).to(tl.int32)
    if slot >= 0:
        _edit(
            own, logits, masks, is_masked, ids, workspace + changed_at, places + changed_at, bias_tokens, bias_values,
            vocab_size, TILE,
        )  # fmt: skip
    scale = _number(own, SCALE)
    count = vocab_size.to(tl.int32)
    view = (logits, masks, is_masked, workspace + changed_at, places, is_changed, 0, scale)
    best_key = tl.full([TILE], LOWEST_KEY, tl.int32)
    best_token = tl.full([TILE], 0, tl.int32)
    for begin in tl.range(0, count, TILE):
        x, token, here = _read(view, begin, count, TILE)
        key = _key(x)
        is_better = here & (key > best_key)
        best_key = tl.where(is_better, key, best_key)
        best_token = tl.where(is_better, token, best_token)
    top_key = tl.max(best_key, 0)
    top = _of_key(top_key)
    result = tl.min(tl.where(best_key == top_key, best_token, NAN_KEY), 0)
    if tl.load(own + IS_DRAWN) != 0:
        # Infinite, or no number, is the sum of what has such a largest one: nothing can be drawn.
        result = tl.full([], -1, tl.int32)
        if (top > float("-inf")) & (top < float("inf")):
            list_at = num_edited.to(tl.int64) * vocab_size + row.to(tl.int64) * ROOM
            written = (workspace + list_at, places + list_at)
            lowest = tl.full([], LOWEST_KEY, tl.int64)
            high = top_key.to(tl.int64) + 1
            above = count
            is_listed = tl.full([], 0, tl.int32)
            threshold = tl.full([], LOWEST_KEY, tl.int32)
            first_kept = tl.full([], 0, tl.int32)
            top_k = tl.load(own + TOP_K)
            if (top_k > 0) & (top_k < vocab_size):
                found, above, is_listed, count, _ = _find(
                    view, written, is_listed, count, lowest, high, above, top_k, LOWEST_KEY, top, False, TILE, ROOM
                )
                threshold = found.to(tl.int32)
            cut = _number(own, CUT)
            if cut >= 0.0:
                now = _now(view, written, is_listed)
                sums = tl.zeros([TILE], tl.float32)
                for begin in tl.range(0, count, TILE):
                    x, _, here = _read(now, begin, count, TILE)
                    sums += tl.where(here & (_key(x) >= threshold), _exp(x - top), 0.0)
                floor = threshold
                found, above, is_listed, count, cut = _find(
                    view, written, is_listed, count, floor.to(tl.int64), high, above, cut * tl.sum(sums, 0), floor, top,
                    True, TILE, ROOM,
                )  # fmt: skip
                threshold = found.to(tl.int32)
                first_kept = _first_kept_tie(_now(view, written, is_listed), count, threshold, floor, cut, top, TILE)
            now = _now(view, written, is_listed)
            min_p = _number(own, MIN_P)
            least = tl.full([], 0.0, tl.float32)
            total = tl.full([], 1.0, tl.float32)
            if min_p > 0.0:
                sums = tl.zeros([TILE], tl.float32)
                for begin in tl.range(0, count, TILE):
                    x, token, here = _read(now, begin, count, TILE)
                    sums += tl.where(_is_kept(x, token, here, threshold, first_kept), _exp(x - top), 0.0)
                total = tl.sum(sums, 0)
                least = tl.div_rn(1.0, total) * min_p
            draw = _draw_of(own)
            PART: tl.constexpr = TILE // 2  # a draw takes as many registers as all else
            best = tl.full([PART], -1.0, tl.float32)
            drawn = tl.full([PART], 0, tl.int32)
            for begin in tl.range(0, count, PART):
                x, token, here = _read(now, begin, count, PART)
                is_kept = _is_kept(x, token, here, threshold, first_kept)
                if tl.max(is_kept.to(tl.int32), 0) != 0:  # most tiles have none
                    weight = _exp(x - top)
                    is_kept = is_kept & (tl.div_rn(weight, total) >= least)
                    ratio = tl.where(is_kept, tl.div_rn(weight, _exponential(draw, token, False, IS_NVIDIA)), -1.0)
                    is_better = ratio > best
                    best = tl.where(is_better, ratio, best)
                    drawn = tl.where(is_better, token, drawn)
            result = tl.min(tl.where(best == tl.max(best, 0), drawn, NAN_KEY), 0)
    tl.store(chosen + row, result.to(tl.int64))
    if table >= 0:
        tl.store(ids + tl.load(own + LENGTH), tl.maximum(result, 0).to(tl.int64))


def sample_rows(
    rows: np.ndarray,
    logits: Tensor,
    masks: Tensor | None = None,
    ids: Tensor | None = None,
    biases: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    tile: int = TILE,
    room: int = ROOM,
) -> Tensor:
    """A token for each row; -1 where there are no probabilities. What is wanted of a row is what `ROW` says.

    Args:
        rows: `[B]` of `ROW`. `edited` is set here, for those that change their logits.
        logits: `[K, vocab_size]`, rows any distance apart.
        masks: `[M, ceil(vocab_size / 32)]` int32: bit `i % 32` of word `i // 32` says whether token `i` is allowed.
        ids: `[R, W]` int64: the rows' tokens so far. Written to: the chosen one, behind them; there must be room.
        biases: Tokens, and what is added to their logits, one row's behind another's.
        tile: Tokens that are looked at together.
        room: Tokens that are written down.

    Returns:
        `[B]` int64.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    device, vocab_size = logits.device, logits.shape[1]
    chosen = torch.empty(len(rows), dtype=torch.int64, device=device)
    changes = (rows["penalty"] != 1) | (rows["presence"] != 0) | (rows["frequency"] != 0) | (rows["biases"] > 0)
    num_edited = int(changes.sum())
    rows["edited"] = np.where(changes, np.cumsum(changes) - 1, -1)
    told = rows.view(np.int32)
    if biases is not None:
        tokens, values = biases
        told = np.concatenate([told, tokens.astype(np.int32), values.astype(np.float32).view(np.int32)])
    on_device = to_device(told, device)
    size = num_edited * vocab_size + len(rows) * room
    numbers = on_device[rows.nbytes // 4 :]
    with device_context(logits):
        _sample_kernel[(len(rows),)](
            on_device,
            logits,
            on_device if masks is None else masks,
            chosen if ids is None else ids,
            numbers,
            numbers[len(numbers) // 2 :].view(torch.float32),
            torch.empty(size, dtype=torch.float32, device=device),
            torch.empty(size, dtype=torch.int32, device=device),
            chosen,
            vocab_size,
            logits.stride(0),
            0 if masks is None else masks.stride(0),
            0 if ids is None else ids.stride(0),
            num_edited,
            IS_NVIDIA=device_of(device).is_nvidia,
            TILE=tile,
            ROOM=room,
            num_warps=NUM_WARPS,
            **NO_FUSION,
        )
    return chosen


def draw_noise(rows: np.ndarray, vocab_size: int, device: torch.device, words: bool = False) -> Tensor:
    """`[B, vocab_size]` float32, what torch draws for these rows; or int32, the words that it draws them by."""
    output = torch.empty(len(rows), vocab_size, dtype=torch.int32 if words else torch.float32, device=device)
    on_device = to_device(rows.view(np.int32), device)
    with device_context(output):
        _noise_kernel[(len(rows), -(-vocab_size // TILE))](
            on_device,
            output,
            vocab_size,
            IS_WORD=words,
            IS_NVIDIA=device_of(device).is_nvidia,
            TILE=TILE,
            num_warps=NUM_WARPS,
            **NO_FUSION,
        )
    return output


def draws_agree(grid: DrawGrid, device: torch.device) -> bool:
    """Whether torch draws what the kernel does, on the device's first round of threads and beyond it."""
    with torch.inference_mode(False):
        num_numbers = 5 * grid.most_threads + 77
        generator = torch.Generator(device).manual_seed(2**40 + 3)
        torch.empty(9, device=device).exponential_(generator=generator)  # from its second round on
        expected = torch.empty(num_numbers, device=device).exponential_(generator=generator)
        rows = plain_rows(1)
        rows["seed"], rows["round"], rows["threads"] = 2**40 + 3, 1, grid.num_threads(num_numbers)
        drawn = draw_noise(rows, num_numbers, device)[0]
        ends = 4 * (1 + int(grid.num_rounds(num_numbers)))
        return generator.get_offset() == ends and bool(torch.allclose(drawn, expected, rtol=1e-6, atol=0))
