"""Conversion of e4m3 (torch.float8_e4m3fn) from and to bytes on every GPU; exact for all 256 values.

A byte is s eeee mmm: (-1)^s 2^(e - 7) (1 + m / 8); e = 0 is 2^-6 m / 8, 0x7F and 0xFF are NaN, there is no infinity.
With its fields moved to those of a float16 the value is 2^-8 of the number, to those of a bfloat16 2^-120, also where
e = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)

# converts four bytes to float16 by two instructions, from compute capability 8.9 on
_BY_INSTRUCTION = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")

# NaN: 0x7F + 1 sets a byte's highest bit, which prmt copies to all bits of both bytes of the result
_BY_BITS = """{{
    .reg .b32 low, high, shifted, nan, spread, factor, zero;
    mov.b32 factor, {factor};
    mov.b32 zero, 0x80008000;
    and.b32 nan, $2, 0x7F7F7F7F;
    add.u32 nan, nan, 0x01010101;
    prmt.b32 low, $2, 0, 0x1404;
    shr.u32 shifted, low, {shift};
    and.b32 shifted, shifted, {fields};
    lop3.b32 low, low, 0x80008000, shifted, 0xEA;
    prmt.b32 spread, nan, 0, 0x9988;
    or.b32 low, low, spread;
    fma.rn.{type} $0, low, factor, zero;
    prmt.b32 high, $2, 0, 0x3424;
    shr.u32 shifted, high, {shift};
    and.b32 shifted, shifted, {fields};
    lop3.b32 high, high, 0x80008000, shifted, 0xEA;
    prmt.b32 spread, nan, 0, 0xBBAA;
    or.b32 high, high, spread;
    fma.rn.{type} $1, high, factor, zero;
}}"""
_FLOAT16_BY_BITS = tl.constexpr(_BY_BITS.format(type="f16x2", shift=1, fields="0x3F803F80", factor="0x5C005C00"))
_BFLOAT16_BY_BITS = tl.constexpr(_BY_BITS.format(type="bf16x2", shift=4, fields="0x07F007F0", factor="0x7B807B80"))


@triton.jit
def from_e4m3(x, DTYPE: tl.constexpr, CONVERSION: tl.constexpr):
    """The values of the e4m3 bytes ``x``, uint8, in DTYPE: bfloat16, float16 or float32; all three hold them exactly.

    CONVERSION: ``instruction`` (cvt), ``bits`` (integer operations on two values at a time), or ``fields`` (Triton's
    operations, for the interpreter). ``pure instruction`` is for compute capability 10.0, where operands of tl.dot must
    be in shared memory: Triton's pipeliner does not take the impure assembly there.
    """
    # is_pure=False: otherwise Triton converts once for each tl.dot, in a layout that loads single bytes
    if CONVERSION == "pure instruction":
        found = tl.inline_asm_elementwise(_BY_INSTRUCTION, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
        return found.to(DTYPE)
    elif CONVERSION == "instruction":
        found = tl.inline_asm_elementwise(_BY_INSTRUCTION, "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4)
        return found.to(DTYPE)
    elif CONVERSION == "bits" and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(_BFLOAT16_BY_BITS, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4)
    elif CONVERSION == "bits":
        found = tl.inline_asm_elementwise(_FLOAT16_BY_BITS, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=False, pack=4)
        return found.to(DTYPE)
    else:
        fields = x.to(tl.int32)
        bits = ((fields & 0x80) << 8) | ((fields & 0x7F) << 7)
        found = bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
        return tl.where((fields & 0x7F) == 0x7F, float("nan"), found).to(DTYPE)


@triton.jit
def to_e4m3(x):
    """Round ``x``, float32, to e4m3, ties to even, saturating: uint8. NaN becomes 0x7F."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # at 2^14 float32 values are 2^-9 apart, as e4m3 values with e = 0 are
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal) | sign
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


# the two float16 of a word to bfloat16, scaled in float32
_TO_SCALED_BFLOAT16 = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .f32 first, second;
    mov.b32 {low, high}, $1;
    cvt.f32.f16 first, low;
    cvt.f32.f16 second, high;
    mul.f32 first, first, $2;
    mul.f32 second, second, $2;
    cvt.rn.bf16x2.f32 $0, second, first;
}""")


@triton.jit
def words_from_e4m3(x, scale):
    """The values of the four e4m3 bytes of each int32 ``x``, two and two in an int32: (low, high).

    By instructions of compute capability 8.9 on. Words, because Triton keeps each byte that a loop carries in a
    register of its own.

    Args:
        x: int32.
        scale: None: the values are float16. float32: they are multiplied by it, and bfloat16.
    """
    pairs: tl.constexpr = (tl.int32, tl.int32)
    low, high = tl.inline_asm_elementwise(_BY_INSTRUCTION, "=r,=r,r", [x], dtype=pairs, is_pure=True, pack=1)
    if scale is not None:
        low = tl.inline_asm_elementwise(_TO_SCALED_BFLOAT16, "=r,r,r", [low, scale], tl.int32, True, 1)
        high = tl.inline_asm_elementwise(_TO_SCALED_BFLOAT16, "=r,r,r", [high, scale], tl.int32, True, 1)
    return low, high
