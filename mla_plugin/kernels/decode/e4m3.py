"""e4m3 numbers (torch.float8_e4m3fn) from and to bytes, on every card; exact for all 256 of them.

A byte is s eeee mmm: (-1)^s 2^(e - 7) (1 + m / 8); e = 0 is 2^-6 m / 8, 0x7F and 0xFF are NaN, there is no infinity.
Read as the same fields of a float16 it is 2^-8 of the number, of a bfloat16 2^-120, also where e = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)

# two instructions for four numbers in float16, from compute capability 8.9 on
_BY_INSTRUCTION = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")

# 0x7F + 1 sets a byte's highest bit, which prmt then spreads over both bytes of a number: NaN
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
def numbers_of(x, DTYPE: tl.constexpr, WAY: tl.constexpr):
    """The numbers of the bytes ``x``, uint8, in DTYPE: bfloat16, float16 or float32, which all hold each of them.

    WAY: ``instruction``, ``bits`` (of two numbers at a time), or ``fields``, plain operations for the interpreter;
    ``pure instruction`` where products read shared memory alone (compute capability 10.0): Triton's pipeliner refuses
    the other one there.
    """
    # is_pure=False: Triton would convert once for each product, in its layout, where bytes are loaded one by one
    if WAY == "pure instruction":
        found = tl.inline_asm_elementwise(_BY_INSTRUCTION, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
        return found.to(DTYPE)
    elif WAY == "instruction":
        found = tl.inline_asm_elementwise(_BY_INSTRUCTION, "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4)
        return found.to(DTYPE)
    elif WAY == "bits" and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(_BFLOAT16_BY_BITS, "=&r,=&r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=4)
    elif WAY == "bits":
        found = tl.inline_asm_elementwise(_FLOAT16_BY_BITS, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=False, pack=4)
        return found.to(DTYPE)
    else:
        fields = x.to(tl.int32)
        bits = ((fields & 0x80) << 8) | ((fields & 0x7F) << 7)
        found = bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
        return tl.where((fields & 0x7F) == 0x7F, float("nan"), found).to(DTYPE)


@triton.jit
def bytes_of(x):
    """The nearest e4m3 of each ``x``, float32, ties to even, the largest one beyond it: uint8. NaN becomes 0x7F."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # beside 2^14 a float32 has steps of 2^-9, those of e4m3 where e = 0
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal) | sign
    return tl.where(x == x, code, 0x7F).to(tl.uint8)
