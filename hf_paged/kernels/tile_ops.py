"""Operations on tiles that several kernels share: exact dot products, `tanh`, and codes of 8 bits."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# The interpreter multiplies bfloat16 wrongly: there tiles are cast before a dot product. Fixed at Triton's import.
INTERPRET: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b):
    """Matrix product `a @ b` accumulated in float32; float32 factors keep all their bits."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc):
    """`a @ b + acc`, summed by the matrix units in place."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """`tanh` of float32, by `1 - 2 / (e^2x + 1)`: right at both infinities, absolute error below 2e-7."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def decode_fp8(code, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """The numbers behind fp8 codes.

    By moving the code's bits to where float16 has its exponent and mantissa; e4m3's exponent is then 8 too small.
    Subnormals come out right by themselves, and no hardware support is needed.

    Args:
        code: uint8.
        FORMAT: "e4m3" (1-4-3 bits, bias 7, no infinity) or "e5m2" (1-5-2 bits, bias 15).
        NATIVE: Use the processor's own conversion of e4m3.

    Returns:
        float16; exact, since both formats are subsets of it.
    """
    if FORMAT == "e4m3":
        if NATIVE:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        wide = code.to(tl.uint16)
        moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        number = moved.to(tl.float16, bitcast=True) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), number)  # the one code that is none
    else:
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def encode_fp8(x, FORMAT: tl.constexpr):
    """The fp8 codes nearest to numbers, ties to even; beyond the largest finite code that one, NaN stays NaN.

    Args:
        x: float32.
        FORMAT: As in `decode_fp8`.

    Returns:
        uint8.
    """
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
    BIAS: tl.constexpr = 7 if FORMAT == "e4m3" else 15
    LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
    DROPPED: tl.constexpr = 23 - MANTISSA  # mantissa bits of float32 that the code has no room for
    # Added to a number below the smallest normal code, this has float32's own rounding drop the right bits.
    MAGIC_BITS: tl.constexpr = (24 - BIAS - MANTISSA + 127) << 23

    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    nearest = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
    normal = nearest - ((127 - BIAS) << MANTISSA)
    magic = tl.full(x.shape, MAGIC_BITS, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (size + magic).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(bits < ((128 - BIAS) << 23), subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def encode_int8(x):
    """Codes `[ROWS, D]` int8 and scales `[ROWS]` of float32 rows; see `scaled_rows.py`. Launched without fusion."""
    MAGIC: tl.constexpr = 12582912.0  # behind which float32 has no fractions
    MAGIC_BITS: tl.constexpr = 0x4B400000
    # As an integer, so that NaN is the largest.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    is_usual = (largest >= 1e-30) & (largest < float("inf"))
    factor = tl.div_rn(tl.full(largest.shape, 127.0, tl.float32), tl.where(is_usual, largest, 1.0))
    code = (x * factor[:, None] + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(is_usual[:, None], code, 0).to(tl.int8)
    return code, tl.where(largest < 1e-30, 0.0, largest * (1.0 / 127.0))


@triton.jit
def scale_pointers(row_pointers, rows, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Pointers to the scales of rows of codes, which have these places in their blocks."""
    behind = row_pointers + (BLOCK_SIZE - rows) * HEAD_DIM
    return behind.to(tl.pointer_type(tl.float32), bitcast=True) + rows


@triton.jit
def load_states(pointers, mask, FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """A tile of keys or values as `DTYPE`, of int8 yet to be multiplied by their scales; 0 where masked.

    Args:
        pointers: Into the pool; to uint8 where it holds fp8.
        mask: What to load; ignored unless `MASKED`.
        FORMAT: fp8 format, "int8", or "" for a pool of ordinary numbers.
        NATIVE: See `decode_fp8`.
        MASKED: Whether the mask hides anything.
    """
    if MASKED:
        states = tl.load(pointers, mask=mask, other=0)
    else:
        states = tl.load(pointers)
    if FORMAT == "int8":
        states = states.to(tl.float32)
    elif FORMAT != "":
        states = decode_fp8(states, FORMAT, NATIVE)
    return states.to(DTYPE)


def hash_now(*functions: Any) -> None:
    """Has Triton hash functions that kernels call, each before those that call it.

    What a kernel is called in Triton's cache depends on which of its functions were hashed before it (3.6 and 3.7 miss
    the constants of others), so on which kernel a process launches first: it would not find what another compiled.
    """
    for function in functions:
        if hasattr(function, "cache_key"):  # the interpreter's have none
            function.cache_key  # noqa: B018


hash_now(dot, dot_add, tanh, decode_fp8, encode_fp8, encode_int8, scale_pointers, load_states)
