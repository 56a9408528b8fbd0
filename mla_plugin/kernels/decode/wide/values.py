"""Half of a key tile's V^T as a product's left operand: as in ``transposed/operands.py``, for 256 columns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.transposed.common import KEYS, PANEL, PANELS
from mla_plugin.kernels.decode.transposed.operands import STEP, pairs_of_keys, words_layout, zero_words
from mla_plugin.kernels.decode.wide.common import OUT
from mla_plugin.kernels.hopper.common import ROWS
from mla_plugin.kernels.hopper.latent import HALF

_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [8, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[STEP.value, HALF.value // 4],
    )
)
"""Registers of the words of a step: 8 bytes a thread, without bank conflicts."""
RESULT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [8, 0], [16, 0], [32, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]],
        warp_bases=[[0, 64], [0, 128]],
        block_bases=[],
        shape=[ROWS.value, HALF.value],
    )
)
"""The accumulator as ``in_columns`` gives it: no number changes its thread, which has 8 columns in a row."""


@gluon.jit
def _words_of_half(c_tiles, slot, half: gl.constexpr):
    """The words of half of the columns of a tile: [KEYS, HALF // 4]."""
    first = slot * PANELS + half * (PANELS // 2)
    return c_tiles.index(first)._reinterpret(gl.int32, [KEYS, HALF // 4], words_layout(PANEL))


@gluon.jit
def words_of_step(c_tiles, slot, step: gl.constexpr, half: gl.constexpr):
    """The bytes of STEP keys."""
    return _words_of_half(c_tiles, slot, half).slice(step * STEP, STEP, 0).load(_WORDS)


@gluon.jit
def values_of(words):
    """Words as the left operand: float16 [HALF, STEP], its rows as in ``in_columns``."""
    x = pairs_of_keys(words).reshape([2, 2, 2, 2, 2, 2, 2, 2, STEP])
    x = x.permute((5, 6, 0, 1, 7, 2, 3, 4, 8)).reshape([HALF, STEP])
    return gl.convert_layout(x, gl.DotOperandLayout(0, OUT, 2))


@gluon.jit
def in_columns(acc):
    """acc [HALF, ROWS], summed over ``values_of``, as [ROWS, HALF] with the columns in order."""
    x = acc.reshape([2, 2, 2, 2, 2, 2, 2, 2, ROWS]).permute((8, 2, 3, 5, 6, 7, 0, 1, 4))
    return gl.convert_layout(x.reshape([ROWS, HALF]), RESULT)


@gluon.jit
def zero_rows(c_tiles, slot, first, half: gl.constexpr):
    """Write 0 to half of the columns of the rows from ``first`` on: they may be NaN, and 0 * NaN is NaN."""
    zero_words(_words_of_half(c_tiles, slot, half), first, _WORDS)
