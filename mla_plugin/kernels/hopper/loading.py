"""The loading warp (producer) of the Hopper forward: takes tickets, publishes their records, loads tiles by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from mla_plugin.kernels.hopper.common import FIELDS, PANEL, RECORDS, ROWS, kv_tiles, scalar_layout


@gluon.jit
def work_of(ticket, Work, tiles, num_heads, together, PACKED: gl.constexpr):
    """Query tile, sequence and head of a ticket; the tiles of ``together`` heads are interleaved.

    plan.py has listed the tiles of packed sequences; a dense batch starts with the last tile, the longest if causal.
    """
    if PACKED:
        tiles = gl.load(Work + 1)
    per_group = together * tiles
    rest = ticket % per_group
    head = ticket // per_group * together + rest % together
    if PACKED:
        entry = Work + 2 + 2 * (rest // together)
        return gl.load(entry), gl.load(entry + 1), head
    else:
        return tiles - 1 - rest // together, head // num_heads, head % num_heads


@gluon.jit
def sequence_of(b, cu_seqlens, starts, seqlen, PACKED: gl.constexpr, HAS_LENGTHS: gl.constexpr):
    """First row and length of a sequence, as ``tile_math.sequence`` but int32."""
    start = 0
    length = seqlen
    if HAS_LENGTHS:
        length = gl.load(cu_seqlens + b + 1) - gl.load(cu_seqlens + b)
        if PACKED:
            start = gl.load(starts + b)
    return start, length


@gluon.jit
def publish(records, record, r_full, r_empty, start_m, b, head, start_q, seqlen_q, seqlen_kv):
    """Write the record of a query tile for both computing warpgroups; a negative ``start_m`` ends their loops."""
    layout: gl.constexpr = scalar_layout(1)
    slot = record % RECORDS
    mbarrier.wait(r_empty.index(slot), (record // RECORDS & 1) ^ 1)
    at = slot * FIELDS
    records.index(at).store(gl.full([1], start_m, gl.int32, layout))
    records.index(at + 1).store(gl.full([1], b, gl.int32, layout))
    records.index(at + 2).store(gl.full([1], head, gl.int32, layout))
    records.index(at + 3).store(gl.full([1], start_q, gl.int32, layout))
    records.index(at + 4).store(gl.full([1], seqlen_q, gl.int32, layout))
    records.index(at + 5).store(gl.full([1], seqlen_kv, gl.int32, layout))
    mbarrier.arrive(r_full.index(slot))


@gluon.jit
def next_ticket(ticket, Work, num_tickets, DYNAMIC: gl.constexpr):
    """The program's next ticket; ``num_tickets`` or more means that there is none."""
    ticket += gl.num_programs(0)
    if DYNAMIC:
        if num_tickets > gl.num_programs(0):  # otherwise each program had its only one: nothing to count or to reset
            taken = gl.atomic_add(Work, 1)
            if taken == num_tickets - 1:  # the last addition of this launch: reset the counter for the next one
                gl.store(Work, 0)
            ticket = gl.num_programs(0) + taken
    return ticket


@gluon.jit
def _load_k(
    k_source,
    k_tiles,
    k_full,
    k_empty,
    place,
    n,
    step,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    QK_PANELS: gl.constexpr,
):
    """K's tile n before ``place``: (row, head, token) of the tile that is processed first."""
    row, head, token = place
    stage = step % STAGES
    mbarrier.wait(k_empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(k_full.index(stage), BLOCK_N * QK_PANELS * PANEL * 2)
    for panel in gl.static_range(QK_PANELS):
        at = [row, head, token - n * BLOCK_N, panel * PANEL]
        tma.async_copy_global_to_shared(k_source, at, k_full.index(stage), k_tiles.index(stage * QK_PANELS + panel))


@gluon.jit
def _load_v(
    v_source,
    v_tiles,
    v_full,
    v_empty,
    place,
    n,
    step,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    V_COLUMNS: gl.constexpr,
):
    """The same for V."""
    row, head, token = place
    stage = step % STAGES
    mbarrier.wait(v_empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(v_full.index(stage), BLOCK_N * V_COLUMNS * 2)
    at = [row, head, token - n * BLOCK_N, 0]
    tma.async_copy_global_to_shared(v_source, at, v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def load(
    q_source,
    k_source,
    v_source,
    tiles,
    barriers,
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
    window_left,
    window_right,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    QK_PANELS: gl.constexpr,
    V_COLUMNS: gl.constexpr,
    AHEAD: gl.constexpr,
    DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The loading warp: takes tickets, publishes their records and loads their tiles.

    AHEAD: K of each tile before V of the previous one. See ``Tile.ahead``.
    """
    q_tiles, k_tiles, v_tiles, records = tiles
    r_full, r_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    if PACKED:
        num_tickets = gl.load(Work + 1) * num_heads
    ticket = gl.program_id(0)
    record = 0
    tile = 0
    step = 0
    while ticket < num_tickets:
        m, b, head = work_of(ticket, Work, num_tiles, num_heads, together, PACKED)
        start_m = m * 2 * ROWS
        start_q, seqlen_q = sequence_of(b, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, PACKED, HAS_LENGTHS)
        start_kv, seqlen_kv = sequence_of(b, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv, PACKED, HAS_LENGTHS)
        publish(records, record, r_full, r_empty, start_m, b, head, start_q, seqlen_q, seqlen_kv)
        record += 1
        last, _, _, first = kv_tiles(
            start_m, seqlen_q, seqlen_kv, window_left, window_right, BLOCK_N, BOTTOM_RIGHT, HAS_LEFT, HAS_RIGHT
        )
        row = b
        if PACKED:
            row = 0
        if last > first:
            for w in gl.static_range(2):
                mbarrier.wait(q_empty.index(w), (tile & 1) ^ 1)
                mbarrier.expect(q_full.index(w), ROWS * QK_PANELS * PANEL * 2)
                for panel in gl.static_range(QK_PANELS):
                    at = [row, head, start_q + start_m + w * ROWS, panel * PANEL]
                    tma.async_copy_global_to_shared(q_source, at, q_full.index(w), q_tiles.index(w * QK_PANELS + panel))
            tile += 1
        place = (row, head // group, start_kv + (last - 1) * BLOCK_N)
        if AHEAD:
            for n in range(gl.where(last > first, last - first + 1, 0)):
                if n < last - first:
                    _load_k(k_source, k_tiles, k_full, k_empty, place, n, step + n, BLOCK_N, STAGES, QK_PANELS)
                if n > 0:
                    _load_v(v_source, v_tiles, v_full, v_empty, place, n - 1, step + n - 1, BLOCK_N, STAGES, V_COLUMNS)
        else:
            for n in range(last - first):
                _load_k(k_source, k_tiles, k_full, k_empty, place, n, step + n, BLOCK_N, STAGES, QK_PANELS)
                _load_v(v_source, v_tiles, v_full, v_empty, place, n, step + n, BLOCK_N, STAGES, V_COLUMNS)
        step += last - first
        ticket = next_ticket(ticket, Work, num_tickets, DYNAMIC)
    publish(records, record, r_full, r_empty, -1, 0, 0, 0, 0, 0)
