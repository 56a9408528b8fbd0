"""What the loading warp, or the gathering warpgroup, loads: a piece of each sequence of its part, or nothing."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_plugin.kernels.decode.hopper.chunks import chunks_of, first_key, share_of_chunks, steps_between
from mla_plugin.kernels.decode.hopper.common import piece_of, share_of_tiles
from mla_plugin.kernels.hopper.latent import KEYS


@gluon.jit
def share_of(
    Plan,
    seqlens_kv,
    leftpad_kv,
    part,
    is_first_tile,
    batch,
    capacity,
    num_parts,
    overhead,
    CHUNK: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """(first, last, at, start, end): the part's sequences are first .. last - 1; the others are for ``next_piece``.

    With CHUNK and not PLANNED the program of part 0 with ``is_first_tile`` also writes the list of sequences to Plan.
    """
    if CHUNK == 0:
        first, last, at, size = share_of_tiles(Plan, seqlens_kv, part, batch, capacity, num_parts, overhead, PLANNED)
        return first, last, at, size, size
    else:
        writes = is_first_tile & (part == 0)
        return share_of_chunks(Plan, seqlens_kv, leftpad_kv, part, writes, batch, capacity, num_parts, CHUNK, PLANNED)


@gluon.jit
def next_piece(
    seqlens_kv,
    leftpad_kv,
    b,
    tile,
    at,
    start,
    end,
    part,
    batch,
    capacity,
    num_heads,
    seqlen_q,
    overhead,
    CAUSAL: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """The piece of sequence ``b`` that row tile ``tile`` of this part needs.

    Returns:
        (length, first, steps, at): the sequence's keys end at ``length``; the piece is ``steps`` tiles from key
        ``first`` on; ``at`` of the next sequence.
    """
    if CHUNK == 0:
        at += overhead
        length, tiles, low, _, steps = piece_of(
            seqlens_kv, b, tile, at, start, part, batch, capacity, num_heads, seqlen_q, CAUSAL
        )
        return length, low * KEYS, steps, at + tiles
    else:
        origin, length, last, count, low, high = chunks_of(
            seqlens_kv, leftpad_kv, b, tile, at, start, end, batch, capacity, num_heads, seqlen_q, CAUSAL, CHUNK
        )
        first = first_key(low, CHUNK)
        steps = gl.where(low < high, steps_between(first, high, last, CHUNK), 0)
        return origin + length, origin + first, steps, at + count
