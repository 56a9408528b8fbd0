"""FlashAttention 3 emulated: ``flash_attn_interface`` of two ages, SGLang's module and vLLM's operator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tests.plugins.flash_libraries import Emulated, Tensors, check_no_broadcast, check_tile_addresses


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """``mha_fwd``."""
    check_tile_addresses(q, k, v)
    check_no_broadcast(q, k, v)
    dim_qk, dim_v = q.shape[-1], v.shape[-1]
    assert dim_qk % 8 == dim_v % 8 == 0
    assert dim_qk <= 256
    assert q.shape[-2] % k.shape[-2] == 0
    if dim_qk != dim_v:
        assert (128 < dim_qk <= 192 and 96 < dim_v <= 128) or (dim_qk <= 64 and dim_v <= 512)


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    seqused: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    longest: tuple[int | None, int | None] = (None, None),
) -> Emulated:
    _check(q, k, v)
    assert softmax_scale is not None, "the default would be of the padded or absorbed dimension"
    for x in seqused:
        assert x is None or (x.is_contiguous() and cu_seqlens[0] is not None)
    return Emulated(q, k, v, softmax_scale, causal, window_size, cu_seqlens, seqused, longest)


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    assert qv is None
    out, lse = _call(q, k, v, softmax_scale, causal, window_size).forward(torch.inf)
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    call = _call(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        (cu_seqlens_q, cu_seqlens_k),
        (seqused_q, seqused_k),
        (max_seqlen_q, max_seqlen_k),
    )
    out, lse = call.forward(torch.inf)
    return (out, lse) if return_attn_probs else out


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sequed_q=None,
    sequed_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dq=None,
    dk=None,
    dv=None,
    softmax_scale=None,
    is_causal=False,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    check_tile_addresses(dout, q, k, v, out, dq, dk, dv)
    check_no_broadcast(dout, out)
    largest = max(q.shape[-1], v.shape[-1])
    assert largest <= 256
    assert not (deterministic and largest > 192), "Deterministic backward not supported for hdim 256."
    assert softmax_lse.is_contiguous()
    assert softcap == 0
    call = _call(
        q,
        k,
        v,
        softmax_scale,
        is_causal,
        (window_size_left, window_size_right),
        (cu_seqlens_q, cu_seqlens_k),
        (sequed_q, sequed_k),
        (max_seqlen_q, max_seqlen_k),
    )
    _write((dq, dk, dv), call.backward(dout, out, softmax_lse))
    return torch.empty(0)


def _write(gradients: Tensors, values: Tensors) -> None:
    for gradient, value in zip(gradients, values, strict=True):
        written = ~value.isnan()
        gradient[written] = value[written]


def operator_forward(*arguments: Any) -> Tensors:
    """``flash_attn_3::fwd``; PyTorch leaves out what is at its default at the end."""
    q, k, v, k_new, v_new, q_v, out, cu_q, cu_k, cu_k_new, used_q, used_k, longest_q, longest_k, *rest = arguments
    assert all(x is None for x in (k_new, v_new, q_v, out, cu_k_new, *rest[:9]))
    scale, causal, left, right, chunk, softcap, _, metadata, splits, *extra = rest[9:]
    assert (chunk, softcap, metadata, splits) == (0, 0.0, None, 1), "0 splits would be a number of the kernel's choice"
    assert not any(extra)
    longest = (longest_q, longest_k)
    call = _call(q, k, v, scale, causal, (left, right), (cu_q, cu_k), (used_q, used_k), longest)
    return (*call.forward(torch.inf), torch.empty(0), torch.empty(0))


def operator_backward(dout, q, k, v, out, lse, dq, dk, dv, *rest: Any) -> Tensors:
    """``flash_attn_3::bwd``."""
    _flash_attn_backward(dout, q, k, v, out, lse, *rest[:6], dq, dk, dv, *rest[6:])
    return tuple(torch.empty(0) for _ in range(5))


def older_flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1)):
    """Before August 2025: lse always, and no argument for it."""
    return _call(q, k, v, softmax_scale, causal, window_size).forward(torch.inf)


def older_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    window_size=(-1, -1),
):
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        softmax_scale,
        causal,
        window_size=window_size,
        return_attn_probs=True,
    )


def older_flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q,
    cu_seqlens_k,
    sequed_q,
    sequed_k,
    max_seqlen_q,
    max_seqlen_k,
    dq,
    dk,
    dv,
    softmax_scale,
    causal,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    sm_margin=0,
):
    _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        sequed_q,
        sequed_k,
        max_seqlen_q,
        max_seqlen_k,
        dq,
        dk,
        dv,
        softmax_scale,
        causal,
        *window_size,
        softcap,
        deterministic,
    )
    return dq, dk, dv, torch.empty(0)


NEWER = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "_flash_attn_backward": _flash_attn_backward,
}
OLDER = {
    "flash_attn_func": older_flash_attn_func,
    "flash_attn_varlen_func": older_flash_attn_varlen_func,
    "_flash_attn_backward": older_flash_attn_backward,
}


def sgl_flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    out, lse = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        softmax_scale,
        causal,
        window_size=window_size,
        return_attn_probs=True,
    )
    return (out, lse, None, None) if return_softmax_lse else out


VLLM_SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
"""As it is in the binary of vLLM 0.25.1."""


def vllm_forward(*arguments: Any) -> list[torch.Tensor]:
    """The operator's kernel: packed, or dense with lengths of the keys; everything else off."""
    q, k, v, k_new, v_new, q_v, out, cu_q, cu_k, cu_k_new, used_q, used_k, max_q, max_k, *rest = arguments
    assert all(x is None for x in (k_new, v_new, q_v, out, cu_k_new))
    assert all(x is None for x in rest[:9])
    scale, causal, left, right, softcap, _, metadata, splits, pack_gqa, margin, *extra = rest[9:]
    if cu_q is None:
        assert used_k is not None, "This flash attention build only supports varlen"
        assert used_k.tolist() == [k.shape[1]] * len(k)  # every row is full: the oracle needs no lengths
        assert (used_k.dtype, used_q) == (torch.int32, None)
        used_k = None
    assert (softcap, metadata, splits, pack_gqa, margin) == (0.0, None, 1, None, 0)
    assert extra == [None, 1, 0, None]
    call = _call(q, k, v, scale, causal, (left, right), (cu_q, cu_k), (used_q, used_k), (max_q, max_k))
    return [*call.forward(torch.inf), torch.empty(0), torch.empty(0)]


@contextlib.contextmanager
def vllm_operator() -> Iterator[None]:
    """vLLM's operator on CPU tensors, until the context ends: the real binary wants its namespace too."""
    operators = torch.library.Library("_vllm_fa3_C", "DEF")
    operators.define(VLLM_SCHEMA)
    operators.impl("fwd", vllm_forward, "CPU")
    try:
        yield
    finally:
        operators._destroy()
