"""FlashAttention 4 emulated: ``flash_attn.cute.interface`` of 4.0.0b36 on compute capability 9.0."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tests.plugins.flash_libraries import Emulated, check_no_broadcast, check_tile_addresses

Sides = tuple[int | None, int | None]


def _validate_head_dims(head_dim: int, head_dim_v: int, compute_capability: int, alignment: int) -> None:
    assert compute_capability == 9
    assert 8 <= head_dim <= 256
    assert 8 <= head_dim_v <= 256
    assert head_dim % alignment == head_dim_v % alignment == 0


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sides,
    starts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    longest: tuple[int | None, int | None] = (None, None),
) -> Emulated:
    check_tile_addresses(q, k, v)
    check_no_broadcast(q, k, v)
    _validate_head_dims(q.shape[-1], v.shape[-1], 9, 8)
    assert softmax_scale is not None
    assert all(side is None or side >= 0 for side in window_size), "a single negative side is taken as it is"
    left, right = (-1 if side is None else side for side in window_size)
    return Emulated(q, k, v, softmax_scale, causal, (left, right), starts, longest=longest)


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    assert qv is None
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    if not k.shape[1]:
        return out.zero_(), lse.fill_(-torch.inf)
    key = (q.dtype, q.shape[-1], v.shape[-1], q.shape[2] // k.shape[2], causal, *(side is None for side in window_size))
    cache = _flash_attn_fwd.compile_cache
    if key not in cache:
        cache[key] = functools.partial(_kernel, causal)
    aux, no_lengths = AuxData(), (None,) * 5
    tensors = [x.detach() for x in (q, k, v, out)]
    cache[key](*tensors, lse, softmax_scale, *no_lengths, *window_size, learnable_sink, None, aux, None, None)
    return out, lse if return_lse else None


class AuxData(NamedTuple):
    tensors: tuple[torch.Tensor, ...] | None = None
    scalars: tuple[object, ...] | None = None


def _kernel(causal, q, k, v, out, lse, softmax_scale, *others):
    """What is compiled: it writes into the caller's memory."""
    found = _call(q, k, v, softmax_scale, causal, others[5:7]).forward(-torch.inf)
    out.copy_(found[0])
    lse.copy_(found[1])


def _flash_attn_fwd():
    raise NotImplementedError("the functions above it are called")


_flash_attn_fwd.compile_cache = {}


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    assert qv is None
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    out, lse = _call(q, k, v, softmax_scale, causal, window_size, starts, longest).forward(-torch.inf)
    return out, lse if return_lse else None


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
):
    """Of its 42 arguments those that a caller may set; the others tune the kernel."""
    check_tile_addresses(dout, out)
    check_no_broadcast(dout, out)
    assert q.shape[-2] == k.shape[-2] or q.shape[-1] == v.shape[-1], "GQA backward requires head_dim == head_dim_v"
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    return _call(q, k, v, softmax_scale, causal, window, starts, longest).backward(dout, out, lse)


MEMBERS = {
    "_flash_attn_fwd": _flash_attn_fwd,
    "_validate_head_dims": _validate_head_dims,
    "flash_attn_func": flash_attn_func,
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "_flash_attn_bwd": _flash_attn_bwd,
}
