"""Kernels that write new tokens into a paged cache, in place, and copy a paged cache into contiguous rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mla_plugin.kernels.launch import on_device_of
from mla_plugin.kernels.sources import hash_sources
from mla_plugin.kernels.tiles import next_power_of_2


@triton.jit
def _copy_row(source, target, D: tl.constexpr, BLOCK: tl.constexpr, exists):
    """Copy D contiguous elements; write zeros if not ``exists``."""
    columns = tl.arange(0, BLOCK)
    x = tl.load(source + columns, mask=(columns < D) & exists, other=0.0)
    tl.store(target + columns, x, mask=columns < D)


@triton.jit(do_not_specialize=["num_slots", "page_size"])
def append_kernel(
    C_new,
    K_new,
    C_kv,
    K_rope,
    slot_mapping,
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
):
    """One program writes one token's row into its slot. A slot outside the cache is ignored."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (slot < num_slots):
        page, row = slot // page_size, slot % page_size
        _copy_row(C_new + token * stride_cnt, C_kv + page * stride_cb + row * stride_cn, R, BLOCK_R, True)
        if D_ROPE > 0:
            target = K_rope + page * stride_kb + row * stride_kn
            _copy_row(K_new + token * stride_knt, target, D_ROPE, BLOCK_ROPE, True)


@triton.jit(do_not_specialize=["num_pages", "page_size", "max_seqlen_kv", "stride_pt"])
def gather_kernel(
    C_kv,
    K_rope,
    page_table,
    seqlens_kv,
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
    """One program copies one row of one sequence; rows from the sequence's length on are zeros."""
    b = (tl.program_id(0) // max_seqlen_kv).to(tl.int64)
    key = (tl.program_id(0) % max_seqlen_kv).to(tl.int64)
    exists = key < tl.load(seqlens_kv + b)
    page = tl.load(page_table + b * stride_pt + key // page_size, mask=exists, other=0).to(tl.int64)
    exists = exists & (page >= 0) & (page < num_pages)
    row = key % page_size
    _copy_row(C_kv + page * stride_cb + row * stride_cn, C_out + b * stride_cob + key * stride_con, R, BLOCK_R, exists)
    if D_ROPE > 0:
        target = K_out + b * stride_kob + key * stride_kon
        _copy_row(K_rope + page * stride_kb + row * stride_kn, target, D_ROPE, BLOCK_ROPE, exists)


def row_blocks(rank: int, rope: int) -> tuple[int, int, int, int]:
    """R, D_ROPE, BLOCK_R and BLOCK_ROPE of a kernel that moves rows."""
    return rank, rope, next_power_of_2(rank), next_power_of_2(max(rope, 1))


def append(
    c_kv: torch.Tensor, k_rope: torch.Tensor, c_new: torch.Tensor, k_new: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write c_new [T, R] and k_new [T, Dr] into the slots slot_mapping [T] of c_kv [pages, page_size, R] and k_rope."""
    tokens, rank = c_new.shape
    if tokens == 0:
        return
    pages, page_size, _ = c_kv.shape
    with on_device_of(c_kv):
        hash_sources(append_kernel)
        append_kernel[(tokens,)](
            *(c_new, k_new, c_kv, k_rope, slot_mapping, pages * page_size, page_size),
            *(c_new.stride(0), k_new.stride(0), *c_kv.stride()[:2], *k_rope.stride()[:2]),
            *row_blocks(rank, k_new.shape[1]),
        )


def gather(
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    page_table: torch.Tensor,
    seqlens_kv: torch.Tensor,
    c_out: torch.Tensor,
    k_out: torch.Tensor,
) -> None:
    """Copy the pages of each sequence into c_out [B, S, R] and k_out [B, S, Dr]; zeros from its length on."""
    batch, max_seqlen_kv, rank = c_out.shape
    if batch * max_seqlen_kv == 0:
        return
    pages, page_size, _ = c_kv.shape
    with on_device_of(c_kv):
        hash_sources(gather_kernel)
        gather_kernel[(batch * max_seqlen_kv,)](
            *(c_kv, k_rope, page_table, seqlens_kv, c_out, k_out, pages, page_size, max_seqlen_kv),
            *(*c_kv.stride()[:2], *k_rope.stride()[:2], page_table.stride(0)),
            *(*c_out.stride()[:2], *k_out.stride()[:2]),
            *row_blocks(rank, k_out.shape[2]),
        )
