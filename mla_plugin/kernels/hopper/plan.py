"""Runs before a kernel of packed sequences: lists their query or key tiles on the device, the longest first.

It also fills the padding rows of the outputs.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl

from mla_plugin.kernels.launch import Launch
from mla_plugin.kernels.prefill.packing import Kind

TILES_AT_ONCE = 32
SEQUENCES_AT_ONCE = 64
COLUMNS_AT_ONCE = 1024
PROGRAMS = 512
"""In total; divided evenly among the sequences, each with the gap before it."""
HEADER = 2
"""int32 values before the list: the next ticket, and the number of tiles."""


def capacity(tokens: int, num_sequences: int, queries: int) -> int:
    """The most tiles that sequences of so many tokens in total can have."""
    return tokens // queries + num_sequences


@triton.jit
def _of_sequence(b, cu_seqlens_q, cu_seqlens_kv, num_sequences, QUERIES: tl.constexpr, RANK: tl.constexpr):
    """Number of query tiles of sequence b, and the rank of the first one: tiles of higher rank have more keys."""
    exists = b < num_sequences
    seqlen_q = tl.load(cu_seqlens_q + b + 1, mask=exists, other=0) - tl.load(cu_seqlens_q + b, mask=exists, other=0)
    seqlen_kv = tl.load(cu_seqlens_kv + b + 1, mask=exists, other=0) - tl.load(cu_seqlens_kv + b, mask=exists, other=0)
    if RANK == "top_left":
        rank = tl.zeros_like(seqlen_q)
    elif RANK == "bottom_right":
        rank = (seqlen_kv - seqlen_q + (1 << 30)) // QUERIES
    else:
        rank = seqlen_kv
    return (seqlen_q + QUERIES - 1) // QUERIES, rank


@triton.jit
def _fill_gap(X, first, last, row_size, COLUMNS: tl.constexpr):
    """0 in rows first to last - 1 of X [num_rows, row_size]."""
    for row in range(first + tl.program_id(1), last, tl.num_programs(1)):
        base = X + tl.cast(row, tl.int64) * row_size
        for start in range(0, row_size, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            tl.store(base + column, tl.zeros([COLUMNS], X.dtype.element_ty), mask=column < row_size)


@triton.jit
def _fill_lse_gap(Lse, first, last, num_heads, num_rows):
    """-inf in rows first to last - 1 of Lse [num_heads, num_rows]."""
    for row in range(first + tl.program_id(1), last, tl.num_programs(1)):
        for start in range(0, num_heads, 128):
            head = start + tl.arange(0, 128)
            empty = tl.full([128], float("-inf"), tl.float32)
            tl.store(Lse + head.to(tl.int64) * num_rows + row, empty, mask=head < num_heads)


@triton.jit
def plan_kernel(
    Work,
    First,
    Second,
    Lse,
    cu_seqlens_q,
    cu_seqlens_kv,
    starts_q,
    num_sequences,
    num_rows,
    num_heads,
    first_size,
    second_size,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    TILES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes Work, int32 [HEADER + 2 * capacity]: 0, the number of tiles n, then (tile, sequence) of n tiles.

    Also fills the gaps of the outputs First [num_rows, first_size] and, unless None, Second [num_rows, second_size] and
    Lse [num_heads, num_rows].

    Tiles are ordered by rank, then by sequence, then by tile. RANK: with a causal mask, ``top_left`` or
    ``bottom_right``, a tile's rank is one more than that of the tile before it; with ``length`` the rank of every tile
    is its sequence's number of keys. Each tile computes its position by counting the tiles before it. Grid:
    (sequences + 1, programs per sequence); the last sequence index is that of the last gap.

    Key tiles are listed by the same rules with queries and keys exchanged, tiles counted from the last key, and
    ``top_left`` and ``bottom_right`` exchanged: the further a key tile is from the end, the more queries see it.
    """
    own = tl.program_id(0)
    gap_start = tl.load(starts_q + own - 1, mask=own > 0, other=0)
    gap_start += tl.load(cu_seqlens_q + own, mask=own > 0, other=0)
    gap_start -= tl.load(cu_seqlens_q + own - 1, mask=own > 0, other=0)
    gap_end = tl.load(starts_q + own, mask=own < num_sequences, other=num_rows)
    _fill_gap(First, gap_start, gap_end, first_size, COLUMNS)
    if Second is not None:
        _fill_gap(Second, gap_start, gap_end, second_size, COLUMNS)
    if Lse is not None:
        _fill_lse_gap(Lse, gap_start, gap_end, num_heads, num_rows)
    own_tiles, own_rank = _of_sequence(own, cu_seqlens_q, cu_seqlens_kv, num_sequences, QUERIES, RANK)
    if (own == 0) & (tl.program_id(1) == 0):
        total = 0
        for first in range(0, num_sequences, SEQUENCES):
            b = first + tl.arange(0, SEQUENCES)
            tiles, _ = _of_sequence(b, cu_seqlens_q, cu_seqlens_kv, num_sequences, QUERIES, RANK)
            total += tl.sum(tiles)
        tl.store(Work, 0)
        tl.store(Work + 1, total)
    for first_tile in range(tl.program_id(1) * TILES, own_tiles, tl.num_programs(1) * TILES):
        tile = first_tile + tl.arange(0, TILES)
        place = tl.zeros([TILES], tl.int32)
        for first in range(0, num_sequences, SEQUENCES):
            b = first + tl.arange(0, SEQUENCES)
            tiles, rank = _of_sequence(b, cu_seqlens_q, cu_seqlens_kv, num_sequences, QUERIES, RANK)
            if RANK == "length":
                earlier = tl.where((rank > own_rank) | ((rank == own_rank) & (b < own)), tiles, 0)
                place += tl.sum(earlier)
            else:
                same = own_rank + tile[:, None] - rank[None, :]  # the tile of b with the same rank as this tile
                earlier = tl.maximum(tiles[None, :] - tl.maximum(same + 1, 0), 0)
                is_earlier = (same >= 0) & (same < tiles[None, :]) & (b[None, :] < own)
                place += tl.sum(earlier + is_earlier.to(tl.int32), 1)
        if RANK == "length":
            place += tile
        entry = Work + 2 + 2 * place
        tl.store(entry, tile, mask=tile < own_tiles)
        tl.store(entry + 1, own + tl.zeros_like(tile), mask=tile < own_tiles)


def rank(is_causal: bool, is_shifted: bool) -> str:
    """RANK of ``plan_kernel``; ``is_shifted``: a sequence's diagonal does not begin at its first tile."""
    if not is_causal:
        return "length"
    return "bottom_right" if is_shifted else "top_left"


def launch(kind: Kind, side: Literal["q", "kv"], rows: int, rank: str, has_lse: bool = False) -> Launch:
    """The launch of ``plan_kernel`` that lists tiles of ``rows`` queries, or with ``side`` kv of ``rows`` keys.

    With ``side`` kv queries and keys are exchanged in its arguments, and the outputs are dk and dv. Otherwise the
    output has a row for each query, of v's width with ``has_lse`` (out), else of q's (dq).
    """
    shape, heads = (kind.q_shape, kind.num_heads) if side == "q" else (kind.k_shape, kind.num_kv_heads)
    sizes = heads * kind.q_shape[-1], heads * kind.v_shape[-1]
    first_size = sizes[1] if has_lse else sizes[0]
    fixed = {
        "num_sequences": kind.num_sequences,
        "num_rows": shape[0],
        "num_heads": heads,
        "first_size": first_size,
        "second_size": sizes[1],
        "QUERIES": rows,
        "RANK": rank,
        "TILES": TILES_AT_ONCE,
        "SEQUENCES": SEQUENCES_AT_ONCE,
        "COLUMNS": min(COLUMNS_AT_ONCE, triton.next_power_of_2(first_size)),
    }
    grid = (kind.num_sequences + 1, max(1, PROGRAMS // (kind.num_sequences + 1)), 1)
    given = ("Work", "First", "Second", "Lse", "cu_seqlens_q", "cu_seqlens_kv", "starts_q")
    return Launch(plan_kernel, grid, given, fixed, {"num_warps": 4})
