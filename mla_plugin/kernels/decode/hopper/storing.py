"""What a computing warpgroup of the Hopper decode writes: results of pieces, and the list of split sequences."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.hopper.common import in_order, list_of_split
from mla_plugin.kernels.hopper.common import ROWS
from mla_plugin.kernels.hopper.latent import HALF, OUT_ROWS
from mla_plugin.kernels.tile_math import LN_2

_MIXED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ROWS.value, HALF.value],
    )
)
"""A product's layout once columns are mixed: a thread keeps its numbers, which are 8 in a row now."""


@gluon.jit
def _store_half(
    base,
    acc,
    tile,
    num_rows,
    is_written,
    which: gl.constexpr,
    R: gl.constexpr,
    MIXED: gl.constexpr,
    EVICTION: gl.constexpr,
):
    """Store a warpgroup's columns of row tile ``tile`` of ``num_rows`` rows of R contiguous elements.

    MIXED: so that a thread has 16 bytes in a row and not 4; ``in_order`` undoes it. EVICTION: of the L2 cache.
    """
    layout: gl.constexpr = _MIXED if MIXED else acc.type.layout
    acc = acc.to(base.dtype.element_ty)
    if MIXED:
        acc = gl.convert_layout(in_order(acc), layout)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = which * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    exists = (tile * ROWS + rows < num_rows) & is_written
    base += tile.to(gl.int64) * (ROWS * R)
    gl.store(base + rows[:, None] * R + columns[None, :], acc, mask=exists[:, None], eviction_policy=EVICTION)


@gluon.jit
def store_piece(
    Parts,
    parts_lse,
    Out,
    Lse,
    acc,
    reference,
    row_sum,
    KV_scale,
    rows,
    b,
    tile,
    slot,
    is_written,
    is_whole,
    num_heads,
    seqlen_q,
    which: gl.constexpr,
    R: gl.constexpr,
    FORMAT: gl.constexpr,
    INVARIANT: gl.constexpr,
):
    """Write a warpgroup's columns of a piece, and from warpgroup 0 the log-sum-exps; nothing if not ``is_written``.

    A piece that ``is_whole``, of all keys of its sequence, gives the results. Others go to ``slot`` of Parts and of
    ``parts_lse``, as in ``decode_kernel``, with mixed columns. acc [ROWS, HALF]; reference, row_sum, rows [ROWS].
    INVARIANT: results have no -0, as a sum over chunks has none.
    """
    num_rows = seqlen_q * num_heads
    exists = (rows < num_rows) & is_written
    empty = row_sum == 0.0
    inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, row_sum))
    if FORMAT == "fp8":
        inverse *= gl.load(KV_scale)
    lse_log2 = gl.where(empty, float("-inf"), reference + gl.log2(gl.where(empty, 1.0, row_sum)))
    acc = acc * gl.convert_layout(inverse, OUT_ROWS)[:, None]
    if is_whole:
        if INVARIANT:
            acc = acc.to(Out.dtype.element_ty).to(gl.float32) + 0.0
        _store_half(Out + gl.cast(b, gl.int64) * num_rows * R, acc, tile, num_rows, is_written, which, R, False, "")
        if Lse is not None:
            if which == 0:
                lse_rows = (gl.cast(b, gl.int64) * num_heads + rows % num_heads) * seqlen_q + rows // num_heads
                gl.store(Lse + lse_rows, lse_log2 * LN_2, mask=exists)
    else:
        slot_row = slot.to(gl.int64) * num_rows
        # the keys that are read until the last kernel adds the chunks would displace them
        eviction: gl.constexpr = "evict_last" if INVARIANT else ""
        _store_half(Parts + slot_row * R, acc, tile, num_rows, is_written, which, R, True, eviction)
        if which == 0:
            gl.store(parts_lse + slot_row + rows, lse_log2, mask=exists)


@gluon.jit
def list_nothing(Parts, part, is_listed_by_part, num_parts, num_rows, R: gl.constexpr):
    """With more sequences than parts the list is indexed by part: default to "no sequence is split here"."""
    gl.store(list_of_split(Parts, num_parts, num_rows, R) + 2 * part + 1, 0, mask=is_listed_by_part)


@gluon.jit
def list_sequence(Parts, b, first_part, count, is_listed, batch, num_parts, num_rows, R: gl.constexpr):
    """Enter a sequence into the list that ``combine_kernel`` reads, where ``is_listed``."""
    entry, other = b, first_part
    if batch > num_parts:
        is_listed = is_listed & (count > 1)
        entry, other = first_part, b
    entries = list_of_split(Parts, num_parts, num_rows, R)
    gl.store(entries + 2 * entry, other, mask=is_listed)
    gl.store(entries + 2 * entry + 1, count, mask=is_listed)
