"""FlashAttention 2 emulated: ``flash_attn.flash_attn_interface`` of 2.8.3, and PyTorch's two operators."""

from __future__ import annotations

import torch

from tests.plugins.flash_libraries import Emulated, Tensors, check_tile_addresses

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    starts: Pair,
    longest: tuple[int | None, int | None],
) -> Emulated:
    """``mha_fwd`` and ``mha_varlen_fwd``."""
    check_tile_addresses(q, k, v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert softmax_scale is not None, "the default would be of the padded dimension"
    left, right = window_size
    longest_kv = k.shape[1] if longest[1] is None else longest[1]
    left, right = (-1 if side >= longest_kv else side for side in (left, right))
    if (left < 0) != (right < 0):
        left, right = (longest_kv if side < 0 else side for side in (left, right))
    if starts[0] is not None:
        is_swapped = longest[0] == 1 and q.shape[1] > k.shape[1] and (left, right) == (-1, -1)
        assert not is_swapped, "the kernel would take every row for a sequence"
        assert longest[1] > 0
    return Emulated(q, k, v, softmax_scale, causal, (left, right), starts, longest=longest, clears_tiles=True)


def _backward(call: Emulated, dout: torch.Tensor, out: torch.Tensor, softmax_lse: torch.Tensor) -> Tensors:
    check_tile_addresses(call.tensors.q, dout, out)
    assert out.shape == dout.shape == call.tensors.q.shape
    assert softmax_lse.is_contiguous()
    return call.backward(dout, out, softmax_lse)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    out, lse = _call(q, k, v, softmax_scale, causal, window_size, (None, None), (None, None)).forward(torch.inf)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    out, lse = _call(q, k, v, softmax_scale, causal, window_size, starts, longest).forward(torch.inf)
    return (out, lse, None) if return_attn_probs else out


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    window = (window_size_left, window_size_right)
    call = _call(q, k, v, softmax_scale, causal, window, (None, None), (None, None))
    for gradient, value in zip((dq, dk, dv), _backward(call, dout, out, softmax_lse), strict=True):
        gradient.copy_(value)
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    return torch.empty(0)


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    call = _call(q, k, v, softmax_scale, causal, (window_size_left, window_size_right), starts, longest)
    for gradient, value in zip((dq, dk, dv), _backward(call, dout, out, softmax_lse), strict=True):
        gradient.copy_(value)
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    return torch.empty(0)


def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
    window = (window_size_left, window_size_right)
    out, lse = _call(q, k, v, softmax_scale, causal, window, (None, None), (None, None)).forward(torch.inf)
    return out, lse, torch.empty(0), torch.empty(2)


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    out, lse = _call(q, k, v, softmax_scale, causal, window, starts, longest).forward(torch.inf)
    return out, lse, torch.empty(0), torch.empty(2)


MEMBERS = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "_flash_attn_forward": _flash_attn_forward,
    "_flash_attn_varlen_forward": _flash_attn_varlen_forward,
    "_flash_attn_backward": _flash_attn_backward,
    "_flash_attn_varlen_backward": _flash_attn_varlen_backward,
}


def aten_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    """``aten::_flash_attention_forward``, with the arguments that it has since PyTorch 2.8."""
    window = (window_size_left, window_size_right)
    longest = (None, None) if cum_seq_q is None else (max_q, max_k)
    call = _call(query, key, value, scale, is_causal, window, (cum_seq_q, cum_seq_k), longest)
    assert not dropout_p
    assert not return_debug_mask
    return (*call.forward(torch.inf), None, None, None)


def aten_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    state,
    unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    """``aten::_flash_attention_backward``."""
    window = (window_size_left, window_size_right)
    longest = (None, None) if cum_seq_q is None else (max_q, max_k)
    call = _call(query, key, value, scale, is_causal, window, (cum_seq_q, cum_seq_k), longest)
    assert state.dtype == unused.dtype == torch.uint64
    assert not dropout_p
    return _backward(call, grad_out, out, logsumexp)
