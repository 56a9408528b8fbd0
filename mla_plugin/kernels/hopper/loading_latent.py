"""The loading warp (producer) of the Hopper forward over latents: tickets and records as in ``loading.py``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mla_plugin.kernels.hopper.common import PANEL, ROWS
from mla_plugin.kernels.hopper.latent import KEYS, PANELS, PANELS_OF_HALF
from mla_plugin.kernels.hopper.loading import next_ticket, publish, sequence_of, work_of


@gluon.jit
def steps_of(start_m, seqlen_q, seqlen_kv, window_right, BOTTOM_RIGHT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """(key tiles that some row of a query tile sees, keys that all of its rows see, diagonal)."""
    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = seqlen_kv - seqlen_q
    last = seqlen_kv
    seen_by_all = seqlen_kv
    if HAS_RIGHT:
        reach = start_m + diagonal + window_right + 1  # keys that the first row sees
        seen_by_all = gl.minimum(seqlen_kv, reach)
        last = gl.minimum(seqlen_kv, reach + ROWS - 1)
    if start_m >= seqlen_q:  # rows of a dense batch past the end of their sequence
        last = 0
    return gl.cdiv(gl.maximum(last, 0), KEYS), seen_by_all, diagonal


@gluon.jit
def _load_half(k_source, k_tiles, k_full, k_empty, at, uses, stage: gl.constexpr, half: gl.constexpr):
    """Half of a key tile's latent columns; the half with the stage's number comes with the rope columns."""
    row, head, token = at
    full = k_full.index(2 * stage + half)
    mbarrier.wait(k_empty.index(2 * stage + half), (uses & 1) ^ 1)
    panels: gl.constexpr = PANELS_OF_HALF + 1 if half == stage else PANELS_OF_HALF
    mbarrier.expect(full, panels * KEYS * PANEL * 2)
    first: gl.constexpr = half * PANELS_OF_HALF
    for i in gl.static_range(PANELS_OF_HALF):
        target = k_tiles.index(stage * PANELS + first + i)
        tma.async_copy_global_to_shared(k_source, [row, head, token, (first + i) * PANEL], full, target)
    if half == stage:
        target = k_tiles.index(stage * PANELS + PANELS - 1)
        tma.async_copy_global_to_shared(k_source, [row, head, token, (PANELS - 1) * PANEL], full, target)


@gluon.jit
def _load_tile(k_source, k_tiles, k_full, k_empty, at, uses, stage: gl.constexpr):
    """One key tile. The half of the stage's number first: the scores of the tile begin with it."""
    _load_half(k_source, k_tiles, k_full, k_empty, at, uses, stage, stage)
    _load_half(k_source, k_tiles, k_full, k_empty, at, uses, stage, 1 - stage)


@gluon.jit
def load(
    q_source,
    k_source,
    tiles,
    records,
    barriers,
    record_barriers,
    Work,
    cu_seqlens_q,
    cu_seqlens_kv,
    cu_seqlens_q_padded,
    cu_seqlens_kv_padded,
    num_tiles,
    num_tickets,
    num_heads,
    group,
    together,
    max_seqlen_q,
    max_seqlen_kv,
    window_right,
    DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The loading warp: takes tickets, publishes their records and loads their tiles."""
    q_tiles, k_tiles, _p_tile, _maxima, _sums = tiles
    q_full, q_empty, k_full, k_empty, _published, _finished = barriers
    r_full, r_empty = record_barriers
    if PACKED:
        num_tickets = gl.load(Work + 1) * num_heads
    ticket = gl.program_id(0)
    record = 0
    tile = 0
    even = 0
    odd = 0
    while ticket < num_tickets:
        m, b, head = work_of(ticket, Work, num_tiles, num_heads, together, PACKED)
        start_m = m * ROWS
        start_q, seqlen_q = sequence_of(b, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, PACKED, HAS_LENGTHS)
        start_kv, seqlen_kv = sequence_of(b, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, PACKED, HAS_LENGTHS)
        publish(records, record, r_full, r_empty, start_m, b, head, start_q, seqlen_q, seqlen_kv)
        record += 1
        steps, _, _ = steps_of(start_m, seqlen_q, seqlen_kv, window_right, BOTTOM_RIGHT, HAS_RIGHT)
        row = b
        if PACKED:
            row = 0
        for pair in range((steps + 1) // 2):
            start_n = start_kv + 2 * pair * KEYS
            _load_tile(k_source, k_tiles, k_full, k_empty, (row, head // group, start_n), even, 0)
            even += 1
            if pair == 0:  # after the first keys, whose slots are released later: so both come at once
                mbarrier.wait(q_empty.index(0), (tile & 1) ^ 1)
                mbarrier.expect(q_full.index(0), ROWS * PANELS * PANEL * 2)
                for panel in gl.static_range(PANELS):
                    at = [row, head, start_q + start_m, panel * PANEL]
                    tma.async_copy_global_to_shared(q_source, at, q_full.index(0), q_tiles.index(panel))
                tile += 1
            if 2 * pair + 1 < steps:
                _load_tile(k_source, k_tiles, k_full, k_empty, (row, head // group, start_n + KEYS), odd, 1)
                odd += 1
        ticket = next_ticket(ticket, Work, num_tickets, DYNAMIC)
    publish(records, record, r_full, r_empty, -1, 0, 0, 0, 0, 0)
