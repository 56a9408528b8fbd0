"""From e4m3 bytes in shared memory to operands of WGMMA in registers, in float16, which holds e4m3 exactly.

Both products of the transposed kernel have the cache on the left, K q^T and V^T p^T, where WGMMA reads its operand from
registers. So a byte is converted where it is used, and never written back.

WGMMA sums over its inner dimension in any order, and its rows may stand for any keys or columns. So a thread takes 16
bytes in a row from shared memory, and only the names of keys and columns change: ``key_of_rows`` gives the order of
keys in the scores, ``as_operand_of_scores`` that of columns in the queries.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.transposed.common import KEYS, PANEL, PANELS, RANK, ROPE, product_layout

STEP = gl.constexpr(16)
"""Keys of V that are converted at a time: what one WGMMA sums over."""

# four bytes to float16, two and two
_TO_FLOAT16 = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}""")

# four bytes of a key and four of the next one: (first of both), (second of both), ...
_TO_PAIRS = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 bytes, pair;
    prmt.b32 bytes, $8, $9, 0x5140;
    mov.b32 {low, high}, bytes;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {$0, $1}, pair;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {$2, $3}, pair;
    prmt.b32 bytes, $8, $9, 0x7362;
    mov.b32 {low, high}, bytes;
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {$4, $5}, pair;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {$6, $7}, pair;
}""")


@gluon.constexpr_function
def words_layout(bytes_in_row):
    """A matrix [rows, bytes_in_row // 4] of words in shared memory, as TMA writes bytes of e4m3."""
    return gl.NVMMASharedLayout(min(bytes_in_row, 128), 32, 2)


@gluon.constexpr_function
def _key_words(columns):
    """Registers of [KEYS, columns // 4] words for the scores: 16 bytes a thread, without bank conflicts."""
    more = [[0, 16]] if columns == 2 * ROPE.value else []
    lanes = [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *more], lanes, [[16, 0], [32, 0]], [], [KEYS.value, columns // 4]
    )


_VALUE_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [8, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[0, 32], [0, 64]],
        block_bases=[],
        shape=[STEP.value, RANK.value // 4],
    )
)
"""Registers of V's words: 16 bytes a thread, without bank conflicts."""


@gluon.jit
def key_of_rows(ROWS: gl.constexpr):
    """The key in its tile that each row of the scores [KEYS, ROWS] stands for."""
    row = gl.arange(0, KEYS, gl.SliceLayout(1, product_layout(ROWS)))
    return (row & 56) | ((row & 1) << 2) | ((row >> 1) & 3)


@gluon.jit
def in_order_of_keys(p):
    """Weights [KEYS, ROWS] in the order of the scores' rows, in that of keys."""
    return p.reshape([2, 2, 2, 2, 2, 2, p.shape[1]]).permute((0, 1, 2, 5, 3, 4, 6)).reshape([KEYS, p.shape[1]])


@gluon.jit
def as_operand_of_scores(q):
    """Queries [ROWS, columns], the columns in the order in which ``keys_of_panel`` gives them."""
    BLOCKS: gl.constexpr = q.shape[1] // 64
    blocks = q.reshape([q.shape[0], BLOCKS, 2, 2, 2, 2, 2, 2])
    return blocks.permute((0, 1, 4, 5, 6, 2, 3, 7)).reshape([q.shape[0], q.shape[1]])


@gluon.jit
def _converted_keys(words, ROWS: gl.constexpr):
    """Words [KEYS, columns // 4] as WGMMA's left operand: float16 [KEYS, columns], rows and columns permuted."""
    COLUMNS: gl.constexpr = 4 * words.shape[1]
    f16x4: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
    a, b, c, d = gl.inline_asm_elementwise(_TO_FLOAT16, "=h,=h,=h,=h,r", [words], f16x4, True, 1)
    x = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 1, 3, 2))
    BLOCKS: gl.constexpr = COLUMNS // 64
    x = x.reshape([8, 2, 2, 2, BLOCKS, 2, 2, 2, 2, 2, 2])
    x = x.permute((0, 2, 3, 1, 4, 7, 8, 9, 5, 6, 10)).reshape([KEYS, COLUMNS])
    return gl.convert_layout(x, gl.DotOperandLayout(0, product_layout(ROWS), 2))


@gluon.jit
def keys_of_panel(c_tiles, stage, panel: gl.constexpr, ROWS: gl.constexpr):
    """128 columns of a tile of c_kv as the left operand of the scores."""
    words = c_tiles.index(stage * PANELS + panel)._reinterpret(gl.int32, [KEYS, PANEL // 4], words_layout(PANEL))
    return _converted_keys(words.load(_key_words(PANEL)), ROWS)


@gluon.jit
def keys_of_rope(r_tiles, stage, ROWS: gl.constexpr):
    """A tile of k_rope as the left operand of the scores."""
    words = r_tiles.index(stage)._reinterpret(gl.int32, [KEYS, ROPE // 4], words_layout(ROPE))
    return _converted_keys(words.load(_key_words(ROPE)), ROWS)


@gluon.jit
def _words_of_tile(c_tiles, stage):
    """The words of a tile of c_kv: [KEYS, RANK // 4]."""
    return c_tiles.index(stage * PANELS)._reinterpret(gl.int32, [KEYS, RANK // 4], words_layout(PANEL))


@gluon.jit
def pairs_of_keys(words):
    """Words [STEP, n] of as many keys in float16: [n, 2, 2, STEP // 2, 2], word, column of it, pair of keys, key."""
    even, odd = words.reshape([STEP // 2, 2, words.shape[1]]).permute((0, 2, 1)).split()
    # fmt: off
    f16x8: gl.constexpr = (
        gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16,
    )
    # fmt: on
    a0, b0, a1, b1, a2, b2, a3, b3 = gl.inline_asm_elementwise(
        _TO_PAIRS, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd], f16x8, True, 1
    )
    low = gl.join(gl.join(a0, b0), gl.join(a1, b1))
    high = gl.join(gl.join(a2, b2), gl.join(a3, b3))
    return gl.join(low, high).permute((1, 4, 3, 0, 2))


@gluon.jit
def values_of_step(c_tiles, stage, step: gl.constexpr, ROWS: gl.constexpr):
    """16 keys of a tile's V^T as the left operand: float16 [RANK, STEP], its rows as in ``as_columns``."""
    x = pairs_of_keys(_words_of_tile(c_tiles, stage).slice(step * STEP, STEP, 0).load(_VALUE_WORDS))
    x = x.reshape([2, 2, 2, 2, 2, 2, 2, 2, 2, STEP]).permute((5, 6, 7, 0, 1, 8, 2, 3, 4, 9)).reshape([RANK, STEP])
    return gl.convert_layout(x, gl.DotOperandLayout(0, product_layout(ROWS), 2))


@gluon.constexpr_function
def result_layout(rows):
    """[rows, RANK] with 16 columns in a row a thread."""
    more = [[16, 0]] if rows == 32 else []
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [8, 0], *more],
        [[2, 0], [4, 0], [0, 16], [0, 32], [0, 64]],
        [[0, 128], [0, 256]],
        [],
        [rows, RANK.value],
    )


@gluon.jit
def as_columns(acc):
    """acc [RANK, ROWS], summed over ``values_of_step``, as [ROWS, RANK] with the columns in order."""
    ROWS: gl.constexpr = acc.shape[1]
    x = acc.reshape([2, 2, 2, 2, 2, 2, 2, 2, 2, ROWS]).permute((9, 3, 4, 6, 7, 8, 0, 1, 2, 5)).reshape([ROWS, RANK])
    return gl.convert_layout(x, result_layout(ROWS))


@gluon.jit
def zero_words(words, first, LAYOUT: gl.constexpr):
    """Write 0 to the rows of words [KEYS, n] from ``first`` on; LAYOUT: of STEP rows in registers."""
    rows = gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
    for step in gl.static_range(KEYS // STEP):
        if first < (step + 1) * STEP:
            part = words.slice(step * STEP, STEP, 0)
            part.store(gl.where((rows < first - step * STEP)[:, None], part.load(LAYOUT), 0))


@gluon.jit
def zero_rows(c_tiles, stage, first):
    """Write 0 to the rows of a tile of c_kv from ``first`` on: they may be NaN, and 0 * NaN is NaN."""
    zero_words(_words_of_tile(c_tiles, stage), first, _VALUE_WORDS)
