"""Kernels that write new tokens into a quantised cache, and gather one into contiguous bfloat16 rows.

The formats are those of ``arguments/cache_format.py``; caches are passed as its ``byte_columns``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mla_plugin.arguments import cache_format
from mla_plugin.kernels.decode.cache import row_blocks
from mla_plugin.kernels.decode.e4m3 import E4M3_MAX, from_e4m3, to_e4m3
from mla_plugin.kernels.launch import on_device_of
from mla_plugin.kernels.sources import hash_sources

_TILE = tl.constexpr(cache_format.TILE)
_SCALES = tl.constexpr(cache_format.SCALES)
_LEAST_SCALE = tl.constexpr(cache_format.LEAST_SCALE)
_LEAST_POWER_OF_2 = tl.constexpr(cache_format.LEAST_POWER_OF_2)


@triton.jit
def _write_values(source, target, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise D elements of one row with one scale."""
    columns = tl.arange(0, BLOCK)
    x = tl.load(source + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(target + columns, to_e4m3(tl.div_rn(x, scale + tl.zeros([BLOCK], tl.float32))), mask=columns < D)


@triton.jit
def _write_tiles(source, target, POWER_OF_2: tl.constexpr):
    """Quantise the tiles of one row, each with the scale of its largest element; the scales follow the tiles."""
    tile = tl.arange(0, _SCALES)
    columns = tile[:, None] * _TILE + tl.arange(0, _TILE)[None, :]
    x = tl.load(source + columns).to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), 1)
    scales = tl.div_rn(largest, tl.zeros([_SCALES], tl.float32) + E4M3_MAX)
    if POWER_OF_2:
        bits = tl.maximum(scales, _LEAST_POWER_OF_2).to(tl.int32, bitcast=True)
        scales = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    else:
        scales = tl.maximum(scales, _LEAST_SCALE)
    each = scales[:, None] + tl.zeros([_SCALES, _TILE], tl.float32)
    tl.store(target + columns, to_e4m3(tl.div_rn(x, each)))
    tl.store((target + _SCALES * _TILE).to(tl.pointer_type(tl.float32)) + tile, scales)


@triton.jit(do_not_specialize=["num_slots", "page_size"])
def append_quantised_kernel(
    C_new,
    K_new,
    C_kv,
    K_rope,
    slot_mapping,
    KV_scale,
    num_slots,
    page_size,
    stride_cnt,
    stride_knt,
    stride_cb,
    stride_cn,
    stride_kb,
    stride_kn,
    R: tl.constexpr,
    D_ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    POWER_OF_2: tl.constexpr,
):
    """One program writes one token's row into its slot, if the cache has it. KV_scale None: ``fp8_ds_mla``."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < num_slots):
        page, row = slot // page_size, slot % page_size
        values = C_kv + page * stride_cb + row * stride_cn
        rope = K_rope + page * stride_kb + row * stride_kn
        if KV_scale is not None:
            scale = tl.load(KV_scale)
            _write_values(C_new + token * stride_cnt, values, scale, R, BLOCK_R)
            if D_ROPE > 0:
                _write_values(K_new + token * stride_knt, rope, scale, D_ROPE, BLOCK_ROPE)
        else:
            _write_tiles(C_new + token * stride_cnt, values, POWER_OF_2)
            columns = tl.arange(0, D_ROPE)
            k = tl.load(K_new + token * stride_knt + columns).to(tl.bfloat16)
            tl.store(rope.to(tl.pointer_type(tl.bfloat16)) + columns, k)


@triton.jit
def _read_values(source, target, scale, exists, D: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    x = from_e4m3(tl.load(source + columns, mask=(columns < D) & exists, other=0), tl.float32, "fields")
    tl.store(target + columns, tl.where(exists, x * scale, 0.0).to(tl.bfloat16), mask=columns < D)


@triton.jit(do_not_specialize=["num_pages", "page_size", "max_seqlen_kv", "stride_pt"])
def gather_quantised_kernel(
    C_kv,
    K_rope,
    page_table,
    seqlens_kv,
    KV_scale,
    C_out,
    K_out,
    num_pages,
    page_size,
    max_seqlen_kv,
    stride_cb,
    stride_cn,
    stride_kb,
    stride_kn,
    stride_pt,
    stride_cob,
    stride_con,
    stride_kob,
    stride_kon,
    R: tl.constexpr,
    D_ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One program copies one row of one sequence; zeros from its length on. KV_scale None: ``fp8_ds_mla``."""
    b = (tl.program_id(0) // max_seqlen_kv).to(tl.int64)
    key = (tl.program_id(0) % max_seqlen_kv).to(tl.int64)
    exists = key < tl.load(seqlens_kv + b)
    page = tl.load(page_table + b * stride_pt + key // page_size, mask=exists, other=0).to(tl.int64)
    exists = exists & (page >= 0) & (page < num_pages)
    row = key % page_size
    values = C_kv + page * stride_cb + row * stride_cn
    rope = K_rope + page * stride_kb + row * stride_kn
    c_out = C_out + b * stride_cob + key * stride_con
    k_out = K_out + b * stride_kob + key * stride_kon
    if KV_scale is not None:
        scale = tl.load(KV_scale)
        _read_values(values, c_out, scale, exists, R, BLOCK_R)
        if D_ROPE > 0:
            _read_values(rope, k_out, scale, exists, D_ROPE, BLOCK_ROPE)
    else:
        scales = (values + _SCALES * _TILE).to(tl.pointer_type(tl.float32))
        for tile in tl.static_range(_SCALES):
            scale = tl.load(scales + tile, mask=exists, other=0.0)
            _read_values(values + tile * _TILE, c_out + tile * _TILE, scale, exists, _TILE, _TILE)
        columns = tl.arange(0, D_ROPE)
        k = tl.load(rope.to(tl.pointer_type(tl.bfloat16)) + columns, mask=exists, other=0.0)
        tl.store(k_out + columns, k)


def append(
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    c_new: torch.Tensor,
    k_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scale: torch.Tensor | None,
    power_of_2_scales: bool,
) -> None:
    """Write c_new [T, R] and k_new [T, Dr] into the slots [T] of a cache of bytes; kv_scale None: ``fp8_ds_mla``."""
    tokens, rank = c_new.shape
    if tokens == 0:
        return
    pages, page_size, _ = c_kv.shape
    with on_device_of(c_kv):
        hash_sources(append_quantised_kernel)
        append_quantised_kernel[(tokens,)](
            *(c_new, k_new, c_kv, k_rope, slot_mapping, kv_scale, pages * page_size, page_size),
            *(c_new.stride(0), k_new.stride(0), *c_kv.stride()[:2], *k_rope.stride()[:2]),
            *row_blocks(rank, k_new.shape[1]),
            power_of_2_scales,
        )


def gather(
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    page_table: torch.Tensor,
    seqlens_kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    c_out: torch.Tensor,
    k_out: torch.Tensor,
) -> None:
    """Copy each sequence's pages into c_out [B, S, R] and k_out [B, S, Dr], bfloat16; zeros from its length on."""
    batch, max_seqlen_kv, rank = c_out.shape
    if batch * max_seqlen_kv == 0:
        return
    pages, page_size, _ = c_kv.shape
    with on_device_of(c_kv):
        hash_sources(gather_quantised_kernel)
        gather_quantised_kernel[(batch * max_seqlen_kv,)](
            *(c_kv, k_rope, page_table, seqlens_kv, kv_scale, c_out, k_out, pages, page_size, max_seqlen_kv),
            *(*c_kv.stride()[:2], *k_rope.stride()[:2], page_table.stride(0)),
            *(*c_out.stride()[:2], *k_out.stride()[:2]),
            *row_blocks(rank, k_out.shape[2]),
        )
