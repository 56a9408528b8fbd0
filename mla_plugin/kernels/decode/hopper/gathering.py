"""The gathering warpgroup, the Hopper decode's other producer: key tiles that TMA cannot copy.

Their rows lie in several pages, or their numbers are e4m3 and must be converted. Addresses are looked up per key. The
queries come by TMA, as in ``loading.py``. ``tiles`` and ``barriers`` are those of ``hopper_decode_kernel``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from mla_plugin.arguments import cache_format
from mla_plugin.kernels.decode import e4m3
from mla_plugin.kernels.decode.hopper.loading import load_queries
from mla_plugin.kernels.decode.hopper.pieces import next_piece, share_of
from mla_plugin.kernels.hopper.common import PANEL, ROWS, matrix_layout, synchronize
from mla_plugin.kernels.hopper.latent import HALF, KEYS, PANELS, PANELS_OF_HALF, panels_as_matrix

words_from_e4m3 = gluon.jit(e4m3.words_from_e4m3.fn)

UNIT = gl.constexpr(16)
"""Bytes that a thread loads at once; strides of the cache are in these, so that the compiler knows they are aligned."""
_CHUNK = gl.constexpr(cache_format.TILE)
"""Columns of e4m3 that are converted at a time: those under one scale of ``fp8_ds_mla``."""
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""A panel that is copied as it is: 16 bytes a thread, a row of it 8 threads."""
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
"""Words of 4 bytes: 16 bytes a thread, which become twice 16 bytes in shared memory, without bank conflicts."""


@gluon.jit
def keys_before(start, end, LAYOUT: gl.constexpr):
    """Which keys of the tile from ``start`` on lie before ``end``, also where ``start`` has left int32."""
    return gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT)) < end - start


@gluon.jit
def blocks_of_keys(pages, b, start, end, PAGE_SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """The page of each key of a tile, or the sequence of a contiguous cache; entries from ``end`` on are not read."""
    keys = start + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    if PAGE_SIZE == 0:
        return gl.full([KEYS], 0, gl.int32, gl.SliceLayout(1, LAYOUT)) + b
    else:
        return gl.load(pages + keys // PAGE_SIZE, mask=keys_before(start, end, LAYOUT), other=0)


@gluon.jit
def places_of(blocks, start, stride_block, stride_row, PAGE_SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the rows of the tile from key ``start`` on begin, in units: int64 [KEYS]."""
    keys = start + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
    rows = keys
    if PAGE_SIZE > 0:
        rows = keys % PAGE_SIZE
    return blocks.to(gl.int64) * stride_block + rows.to(gl.int64) * stride_row


@gluon.jit
def _copy(base, places, exists, column, k_tiles, panel, COLUMNS: gl.constexpr):
    """Start to copy columns from ``column`` on to the panels from ``panel`` on; rows that do not exist are left out."""
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, _COPIED))
    pointers = base + (places * (UNIT // 2))[:, None] + columns[None, :]
    async_copy.async_copy_global_to_shared(panels_as_matrix(k_tiles, panel, COLUMNS), pointers, mask=exists[:, None])


@gluon.jit
def _publish(k_full, stage, half):
    """What every thread of the warpgroup has written of a half becomes visible to the products."""
    fence_async_shared()
    synchronize()
    mbarrier.arrive(k_full.index(2 * stage + half))


@gluon.jit
def _copy_piece(
    C_kv,
    K_rope,
    pages,
    b,
    first,
    steps,
    end,
    even,
    odd,
    k_tiles,
    k_full,
    k_empty,
    stride_cb,
    stride_cn,
    stride_kb,
    stride_kn,
    PAGE_SIZE: gl.constexpr,
):
    """The tiles of a piece, copied as they are. A half is published after the next one has been issued."""
    blocks = blocks_of_keys(pages, b, first, end, PAGE_SIZE, _COPIED)
    for n in range(steps):
        stage = n & 1
        free = ((gl.where(stage == 0, even, odd) + n // 2) & 1) ^ 1
        start = first + n * KEYS
        exists = keys_before(start, end, _COPIED)
        places = places_of(blocks, start, stride_cb, stride_cn, PAGE_SIZE, _COPIED)
        rope = places_of(blocks, start, stride_kb, stride_kn, PAGE_SIZE, _COPIED)
        blocks = blocks_of_keys(pages, b, start + KEYS, end, PAGE_SIZE, _COPIED)
        for i in gl.static_range(2):
            half = stage ^ i
            mbarrier.wait(k_empty.index(2 * stage + half), free)
            panel = stage * PANELS + half * PANELS_OF_HALF
            _copy(C_kv, places, exists, half * HALF, k_tiles, panel, HALF)
            if i == 0:
                _copy(K_rope, rope, exists, 0, k_tiles, stage * PANELS + PANELS - 1, PANEL)
            async_copy.commit_group()
            async_copy.wait_group(1)
            if i == 1:
                _publish(k_full, stage, stage)
            elif n > 0:  # the second half of the tile before
                _publish(k_full, 1 - stage, stage)
    async_copy.wait_group(0)
    last = (steps - 1) & 1
    _publish(k_full, last, 1 - last)


@gluon.jit
def _load_words(base, places, exists, column, COLUMNS: gl.constexpr):
    """Words from ``column`` on of the rows at ``places``: [KEYS, COLUMNS]; 0 where there is none."""
    source = base.to(gl.pointer_type(gl.int32), bitcast=True)
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, _WORDS))
    pointers = source + (places * (UNIT // 4))[:, None] + columns[None, :]
    return gl.load(pointers, mask=exists[:, None], other=0)


@gluon.jit
def _store_words(x, k_tiles, panel):
    """Write words to the panels from ``panel`` on."""
    COLUMNS: gl.constexpr = x.shape[1]
    k_tiles.index(panel)._reinterpret(gl.int32, [KEYS, COLUMNS], matrix_layout(gl.int32)).store(x)


@gluon.jit
def _load_chunk(C_kv, KV_scale, places, exists, chunk, FORMAT: gl.constexpr):
    """A chunk of c_kv in e4m3, in words, and its scale."""
    words = _load_words(C_kv, places, exists, chunk * (_CHUNK // 4), _CHUNK // 4)
    scale = places  # unused
    if FORMAT == "fp8_ds_mla":
        scale = gl.load(KV_scale + places * (UNIT // 4) + chunk, mask=exists, other=0.0)
    return words, scale


@gluon.jit
def _store_converted(words, scale, k_tiles, panel, FORMAT: gl.constexpr):
    """Convert words of e4m3 and write them to the panels from ``panel`` on."""
    if FORMAT == "fp8_ds_mla":
        low, high = words_from_e4m3(words, scale[:, None])
    else:
        low, high = words_from_e4m3(words, None)
    _store_words(gl.join(low, high).reshape([KEYS, 2 * words.shape[1]]), k_tiles, panel)


@gluon.jit
def _convert_piece(
    C_kv,
    K_rope,
    KV_scale,
    pages,
    b,
    first,
    steps,
    end,
    even,
    odd,
    k_tiles,
    k_full,
    k_empty,
    stride_cb,
    stride_cn,
    stride_kb,
    stride_kn,
    PAGE_SIZE: gl.constexpr,
    FORMAT: gl.constexpr,
):
    """The tiles of a piece, converted. A chunk of the next half is loaded where one of this half has been written."""
    ROPE_WORDS: gl.constexpr = PANEL // 4 if FORMAT == "fp8" else PANEL // 2
    exists = keys_before(first, end, _WORDS)
    blocks = blocks_of_keys(pages, b, first, end, PAGE_SIZE, _WORDS)
    places = places_of(blocks, first, stride_cb, stride_cn, PAGE_SIZE, _WORDS)
    c0, scale0 = _load_chunk(C_kv, KV_scale, places, exists, 0, FORMAT)
    c1, scale1 = _load_chunk(C_kv, KV_scale, places, exists, 1, FORMAT)
    places = places_of(blocks, first, stride_kb, stride_kn, PAGE_SIZE, _WORDS)
    rope = _load_words(K_rope, places, exists, 0, ROPE_WORDS)
    following = blocks_of_keys(pages, b, first + KEYS, end, PAGE_SIZE, _WORDS)
    for n in range(steps):
        stage = n & 1
        free = ((gl.where(stage == 0, even, odd) + n // 2) & 1) ^ 1
        start = first + n * KEYS
        for i in gl.static_range(2):
            half = stage ^ i
            if i == 1:  # the next half is the next tile's
                start += KEYS
                blocks = following
                following = blocks_of_keys(pages, b, start + KEYS, end, PAGE_SIZE, _WORDS)
            exists = keys_before(start, end, _WORDS)
            places = places_of(blocks, start, stride_cb, stride_cn, PAGE_SIZE, _WORDS)
            mbarrier.wait(k_empty.index(2 * stage + half), free)
            panel = stage * PANELS + half * PANELS_OF_HALF
            chunk = (stage ^ 1) * (HALF // _CHUNK)
            _store_converted(c0, scale0, k_tiles, panel, FORMAT)
            c0, scale0 = _load_chunk(C_kv, KV_scale, places, exists, chunk, FORMAT)
            _store_converted(c1, scale1, k_tiles, panel + _CHUNK // PANEL, FORMAT)
            c1, scale1 = _load_chunk(C_kv, KV_scale, places, exists, chunk + 1, FORMAT)
            if i == 0:
                if FORMAT == "fp8":
                    _store_converted(rope, places, k_tiles, stage * PANELS + PANELS - 1, FORMAT)
                else:
                    _store_words(rope, k_tiles, stage * PANELS + PANELS - 1)
            else:
                places = places_of(blocks, start, stride_kb, stride_kn, PAGE_SIZE, _WORDS)
                rope = _load_words(K_rope, places, exists, 0, ROPE_WORDS)
            _publish(k_full, stage, half)


@gluon.jit
def gather(
    desc_q,
    desc_r,
    C_kv,
    K_rope,
    KV_scale,
    page_table,
    seqlens_kv,
    leftpad_kv,
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
    FORMAT: gl.constexpr,
    CHUNK: gl.constexpr,
    PLANNED: gl.constexpr,
):
    """As ``load``: the queries and key tiles of every piece of this program's part."""
    q_tiles, k_tiles, _p_tile, _maxima, _sums = tiles
    q_full, q_empty, k_full, k_empty, _published, _finished = barriers
    row_tiles = gl.cdiv(seqlen_q * num_heads, ROWS)
    tile = gl.program_id(0) % row_tiles
    part = gl.program_id(0) // row_tiles
    first_b, last_b, at, start, end = share_of(
        Plan, seqlens_kv, leftpad_kv, part, tile == 0, batch, capacity, num_parts, overhead, CHUNK, PLANNED
    )
    pieces = 0
    even = 0
    odd = 0
    for b in range(first_b, last_b):
        # fmt: off
        length, first, steps, at = next_piece(
            seqlens_kv, leftpad_kv, b, tile, at, start, end, part, batch, capacity, num_heads, seqlen_q, overhead,
            CAUSAL, CHUNK,
        )
        # fmt: on
        if steps > 0:
            load_queries(desc_q, desc_r, q_tiles, q_full, q_empty, b, tile, num_heads, pieces)
            pieces += 1
            pages = page_table
            if PAGE_SIZE > 0:
                pages = page_table + gl.cast(b, gl.int64) * stride_pt
            stop = first + gl.minimum(length - first, steps * KEYS)
            # fmt: off
            if FORMAT == "plain":
                _copy_piece(
                    C_kv, K_rope, pages, b, first, steps, stop, even, odd, k_tiles, k_full, k_empty,
                    stride_cb, stride_cn, stride_kb, stride_kn, PAGE_SIZE,
                )
            else:
                _convert_piece(
                    C_kv, K_rope, KV_scale, pages, b, first, steps, stop, even, odd, k_tiles, k_full, k_empty,
                    stride_cb, stride_cn, stride_kb, stride_kn, PAGE_SIZE, FORMAT,
                )
            # fmt: on
            even += (steps + 1) // 2
            odd += steps // 2
