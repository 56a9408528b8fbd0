"""Operations of the Hopper kernels on tiles of 64 rows, stored in shared memory as panels of 64 columns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from mla_plugin.kernels.hopper.common import (
    PANEL,
    ROWS,
    as_stored,
    columns_of,
    matrix_layout,
    panels_of,
    product_layout,
    store_layout,
    synchronize,
    width_of,
)

_ZEROED_ROWS = gl.constexpr(16)
"""Rows that are set to 0 per step."""

_TO_BFLOAT16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_TO_FLOAT16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_FROM_BFLOAT16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_FROM_FLOAT16 = gl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)


@gluon.jit
def add_transposed(acc, a, first_a, b, first_b, COLUMNS: gl.constexpr, IS_ZERO: gl.constexpr):
    """Issue acc + A B^T of two tiles [64, COLUMNS], without waiting for it: [64, 64]. IS_ZERO: acc is 0."""
    for panel in gl.static_range(panels_of(COLUMNS)):
        left = columns_of(a, first_a + panel, width_of(panel, COLUMNS))
        right = columns_of(b, first_b + panel, width_of(panel, COLUMNS)).permute((1, 0))
        acc = warpgroup_mma(left, right, acc, use_acc=(not IS_ZERO) or panel > 0, is_async=True)
    return acc


@gluon.jit
def operand(x, dtype: gl.constexpr):
    """A product [64, 64] as the left operand of the next WGMMA, in registers."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, product_layout(PANEL), 2))


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """x in ``dtype``, two values per register; the compiler would keep values that are used again in float32."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(_TO_BFLOAT16, "=r,r,r", [x], gl.bfloat16, True, 2)
    else:
        return gl.inline_asm_elementwise(_TO_FLOAT16, "=r,r,r", [x], gl.float16, True, 2)


@gluon.jit
def unpacked(x):
    """The result of ``packed`` in float32."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(_FROM_BFLOAT16, "=&r,=r,r", [x], gl.float32, True, 2)
    else:
        return gl.inline_asm_elementwise(_FROM_FLOAT16, "=&r,=r,r", [x], gl.float32, True, 2)


@gluon.jit
def copy_tile(source, row, head, start, is_full, tiles, first, PANELS: gl.constexpr):
    """Issue the TMA copies of 64 rows to panel ``first`` and the following ones."""
    for panel in gl.static_range(PANELS):
        tma.async_copy_global_to_shared(source, [row, head, start, panel * PANEL], is_full, tiles.index(first + panel))


@gluon.jit
def zero_rows(tiles, first, low, high, PANELS: gl.constexpr):
    """Write 0 to the rows of a tile below ``low`` and from ``high`` on: they may be NaN, and 0 * NaN is NaN.

    Both warpgroups write the same zeros.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    blocks: gl.constexpr = ROWS // _ZEROED_ROWS
    rows = gl.arange(0, _ZEROED_ROWS, gl.SliceLayout(1, layout))
    parts = tiles._reinterpret(tiles.dtype, [tiles.shape[0] * blocks, _ZEROED_ROWS, PANEL], matrix_layout(tiles.dtype))
    kept = 0  # leading blocks without such rows
    if low <= 0:
        kept = gl.maximum(high, 0) // _ZEROED_ROWS
    for block in range(kept, blocks):
        row = rows + block * _ZEROED_ROWS
        exists = (row >= low) & (row < high)
        for panel in gl.static_range(PANELS):
            part = parts.index((first + panel) * blocks + block)
            part.store(gl.where(exists[:, None], part.load(layout), 0.0))
    fence_async_shared()
    synchronize()


@gluon.jit
def store(base, out, first, num_rows, stride):
    """Store a product [64, columns] to the rows from ``first`` on, up to ``num_rows``."""
    layout: gl.constexpr = store_layout(out.shape[1])
    out = out.to(base.dtype.element_ty)
    out = as_stored(out) if out.shape[1] > 2 * PANEL else gl.convert_layout(out, layout)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))
    gl.store(base + (rows.to(gl.int64) * stride)[:, None] + columns[None, :], out, mask=(rows < num_rows)[:, None])
