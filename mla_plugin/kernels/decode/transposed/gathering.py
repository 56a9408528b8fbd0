"""The gathering warps of the transposed decode kernel: key tiles that TMA cannot load, copied row by row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_plugin.kernels.decode.hopper.common import piece_of, share_of_tiles
from mla_plugin.kernels.decode.hopper.gathering import UNIT, blocks_of_keys, keys_before, places_of
from mla_plugin.kernels.decode.transposed.common import KEYS, PANEL, PANELS, ROPE, STAGES

_COPIED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
"""16 bytes a thread, a row of a panel 8 threads."""


@gluon.jit
def _copy(base, rows, exists, column, target, COLUMNS: gl.constexpr):
    """Start to copy columns from ``column`` on of the rows at ``rows``; those that do not exist are left out."""
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, _COPIED))
    pointers = base + (rows * UNIT)[:, None] + columns[None, :]
    tile = target._reinterpret(gl.uint8, [KEYS, COLUMNS], gl.NVMMASharedLayout(min(COLUMNS, PANEL), 8, 2))
    async_copy.async_copy_global_to_shared(tile, pointers, mask=exists[:, None])


@gluon.jit
def gather(
    C_kv,
    K_rope,
    page_table,
    seqlens_kv,
    Plan,
    tiles,
    barriers,
    batch,
    num_heads,
    seqlen_q,
    capacity,
    num_parts,
    overhead,
    stride_pt,
    stride_cb,
    stride_cn: gl.constexpr,
    stride_kb,
    stride_kn: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """As the loading warp: the key tiles of every piece of this program's part."""
    _q_tile, _r_tile, c_tiles, r_tiles, _p_tile = tiles
    full, empty = barriers
    part = gl.program_id(0)
    first_b, last_b, at, size = share_of_tiles(Plan, seqlens_kv, part, batch, capacity, num_parts, overhead, PLANNED)
    used = 0
    for b in range(first_b, last_b):
        at += overhead
        length, sequence_tiles, low, _, steps = piece_of(
            seqlens_kv, b, 0, at, size, part, batch, capacity, num_heads, seqlen_q, CAUSAL
        )
        pages = page_table
        if PAGE_SIZE > 0:
            pages = page_table + gl.cast(b, gl.int64) * stride_pt
        first = low * KEYS
        end = first + gl.minimum(length - first, steps * KEYS)
        blocks = blocks_of_keys(pages, b, first, end, PAGE_SIZE, _COPIED)
        for n in range(steps):
            start = first + n * KEYS
            exists = keys_before(start, end, _COPIED)
            rows = places_of(blocks, start, stride_cb, stride_cn, PAGE_SIZE, _COPIED)
            rope = places_of(blocks, start, stride_kb, stride_kn, PAGE_SIZE, _COPIED)
            blocks = blocks_of_keys(pages, b, start + KEYS, end, PAGE_SIZE, _COPIED)
            stage = used % STAGES
            mbarrier.wait(empty.index(stage), (used // STAGES & 1) ^ 1)
            for panel in gl.static_range(PANELS):
                _copy(C_kv, rows, exists, panel * PANEL, c_tiles.index(stage * PANELS + panel), PANEL)
            _copy(K_rope, rope, exists, 0, r_tiles.index(stage), ROPE)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            used += 1
        at += sequence_tiles
