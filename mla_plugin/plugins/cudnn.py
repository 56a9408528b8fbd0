"""cuDNN's fused attention through PyTorch: head_dim_qk != head_dim_v natively, on CUDA devices only.

It accepts the intersection of two sets of rules, so that the kernel never runs a call that it gets wrong:
PyTorch's own checks before it calls cuDNN (``can_use_cudnn_attention`` in aten's ``sdp_utils.cpp``), and those of
TransformerEngine (``nvte_get_fused_attn_backend`` in ``fused_attn.cpp``). Each refusal names its source.

PyTorch passes cuDNN only the top-left alignment, so a bottom-right causal mask with more keys than queries is computed
in two parts that the kernel supports: the keys that every query sees, and the square after them. The parts are merged
by their log-sum-exp; in the backward each gets the out and the log-sum-exp of the whole.

The kernel has no input for the gradient of the log-sum-exp and, at 192/128, no spare column to carry it, so a request
that trains on lse gets its backward from ``sdpa``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import (
    LAYOUTS,
    Layout,
    addressable,
    aligned,
    contiguous_from_16_bytes,
    has_addressable_strides,
    start_aligned,
)
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.shared import small_scale
from mla_plugin.plugins.shared.refusals import (
    NO_DECODE,
    accepted_without_dlse,
    beyond_grid,
    beyond_plain_attention,
    off_cuda,
    refuse_dlse,
)

_forward = getattr(  # Python's own binding takes 1.5 us less than the operator's object, where there is one
    torch,
    "_scaled_dot_product_cudnn_attention",
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default._op

BROKEN_CUDNN = ((9, 10, 0), (9, 10, 1))
LEAST_KEYS = 2


def _platform_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    capability, cudnn = platform.compute_capability, platform.cudnn_version
    off_device = tuple(off_cuda(request.device_type, platform.device_type))
    if off_device:
        yield from off_device
        return
    if platform.cuda_version is None:
        yield "cuda_version=None: this PyTorch is not a CUDA build"
    if capability is None or not (8, 0) <= capability <= (12, 1):
        yield f"compute_capability={capability}, expected (8, 0) to (12, 1) [PyTorch]"
        return
    if cudnn is None or cudnn < (9, 0, 0):
        yield f"cudnn_version={cudnn} < (9, 0, 0) [PyTorch]"
        return
    if cudnn in BROKEN_CUDNN:
        yield f"cudnn_version={cudnn}, expected any but 9.10.0 and 9.10.1 [TransformerEngine]"
    if capability >= (10, 0) and cudnn < (9, 7, 0):
        yield f"cudnn_version={cudnn} < (9, 7, 0) on compute_capability={capability} [TransformerEngine]"
    if capability[0] == 12 and cudnn < (9, 18, 1):
        yield f"cudnn_version={cudnn} < (9, 18, 1) on compute_capability={capability} [TransformerEngine]"


def _head_dim_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    dims, capability, cudnn = (
        (request.head_dim_qk, request.head_dim_v),
        platform.compute_capability,
        platform.cudnn_version,
    )
    found = f"head_dim_qk={dims[0]}, head_dim_v={dims[1]}"
    if dims[0] % 8 or dims[1] % 8:
        yield f"{found}, expected multiples of 8 [PyTorch, TransformerEngine]"
    if max(dims) <= 128:
        return
    if dims != (192, 128):
        yield f"{found}, expected at most 128 each, or exactly 192 and 128 [PyTorch]"
    elif capability is not None and capability != (9, 0) and capability[0] != 10:
        yield f"{found} on compute_capability={capability}, expected (9, 0) or (10, x) [PyTorch]"
    elif cudnn is not None and cudnn < (9, 11, 0):
        yield f"{found} with cudnn_version={cudnn} < (9, 11, 0) [PyTorch, TransformerEngine]"


def _shape_refusals(request: AttentionRequest) -> Iterator[str]:
    len_q, len_kv = request.max_seqlen_q, request.max_seqlen_kv
    if request.qkv_format not in ("bshd", "sbhd", "bhsd"):
        yield f"qkv_format={request.qkv_format!r}, expected bshd, sbhd or bhsd: PyTorch packs nested tensors only"
    if request.attn_mask_type not in ("no_mask", "causal", "causal_bottom_right"):
        yield f"attn_mask_type={request.attn_mask_type!r}, expected no_mask, causal or causal_bottom_right"
    if request.has_sliding_window:
        yield f"window_size={request.window_size}, expected (-1, -1) or (-1, 0): PyTorch passes no window"
    if request.is_causal and len_q != len_kv:
        found = f"a causal mask with max_seqlen_q={len_q}, max_seqlen_kv={len_kv}"
        if not request.bottom_right_diagonal:
            yield f"{found}, expected equal lengths or attn_mask_type='causal_bottom_right'"
        elif len_q != 1 and len_kv - len_q < LEAST_KEYS:
            yield f"{found}, expected at least {LEAST_KEYS} keys more than queries [PyTorch]"
    if not len_q or not request.batch_size:
        yield f"batch_size={request.batch_size}, max_seqlen_q={len_q}, expected at least 1 [PyTorch]"
    if len_kv < LEAST_KEYS:
        yield f"max_seqlen_kv={len_kv} < {LEAST_KEYS} [PyTorch]"
    yield from beyond_grid(request)


def _feature_refusals(request: AttentionRequest) -> Iterator[str]:
    if request.dtype not in (torch.bfloat16, torch.float16):
        yield f"dtype={request.dtype}, expected bfloat16 or float16 [PyTorch, TransformerEngine]"
    if request.deterministic and request.is_training:
        yield "deterministic=True in training: the backward is not repeatable [PyTorch]"
    if request.dropout_p:
        yield f"dropout_p={request.dropout_p}, expected 0: cuDNN's generator does not follow dropout_seed"
    if request.bias_type != "no_bias":
        yield f"bias_type={request.bias_type!r}, expected 'no_bias'"


def refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    """Every reason why this backend cannot compute the request."""
    yield from _platform_refusals(request, platform)
    yield from _feature_refusals(request)
    yield from beyond_plain_attention(request)
    yield from _shape_refusals(request)
    yield from _head_dim_refusals(request, platform)


@hookimpl
def select_backend(request: AttentionRequest | DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take fp16 and bf16 on dense layouts, square causal masks, head dims up to 128 or exactly 192/128."""
    if isinstance(request, DecodeRequest):
        return NO_DECODE
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    return accepted_without_dlse(request)


@functools.lru_cache(maxsize=4096)
def _parts(request: AttentionRequest) -> tuple[tuple[int, int, bool], ...]:
    """First key, number of keys and whether the mask is causal, of each call of the kernel."""
    before = request.max_seqlen_kv - request.max_seqlen_q
    if not before or not request.is_causal or request.max_seqlen_q == 1:  # a single query sees every key
        return ((0, request.max_seqlen_kv, request.is_causal and not before),)
    return (0, before, False), (before, request.max_seqlen_q, True)


def _merged(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
    """Out and log-sum-exp [B, H, S_q, 1] of both parts' keys; every query sees keys of both."""
    lse = torch.logaddexp(first[1], second[1])
    out = first[0] * (first[1] - lse).exp_()  # float32
    return out.addcmul_(second[0], (second[1] - lse).exp_()).to(first[0].dtype), lse


@hookimpl
def forward(plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
    """Attention; cuDNN's softmax statistics are the natural-log log-sum-exp, [B, H, S_q] in float32."""
    kept = tensors.kept
    known = None if kept is None else kept.get("cudnn")
    if known is not None and start_aligned(tensors.q, tensors.k, tensors.v):
        found: AttentionOutput = known(tensors)
        return found
    layout, scale = plan.request.layout, tensors.softmax_scale
    q, k, v = (layout.to_bhsd(addressable(x)) for x in (tensors.q, tensors.k, tensors.v))  # cuDNN wants real strides
    parts = _parts(plan.request)
    if len(parts) == 1:
        is_causal = parts[0][2]
        out, lse = _forward(q, k, v, None, True, 0.0, is_causal, False, scale=scale)[:2]
        if kept is not None and has_addressable_strides(tensors.q, tensors.k, tensors.v):
            kept["cudnn"] = _kept(layout, is_causal)
    else:
        pairs = (
            _forward(q, k.narrow(2, *keys), v.narrow(2, *keys), None, True, 0.0, is_causal, False, scale=scale)[:2]
            for *keys, is_causal in parts
        )
        out, lse = _merged(*pairs)
    return AttentionOutput(layout.from_bhsd(out).contiguous(), lse.squeeze(-1))


def _kept(layout: Layout, is_causal: bool) -> Callable[[AttentionTensors], AttentionOutput]:
    """``forward`` of calls of a kind that need one call of the kernel and no copy, for the host's time."""

    def in_bshd(tensors: AttentionTensors) -> AttentionOutput:
        q, k, v = tensors.q.transpose(1, 2), tensors.k.transpose(1, 2), tensors.v.transpose(1, 2)
        found = _forward(q, k, v, None, True, 0.0, is_causal, False, scale=tensors.softmax_scale)
        return AttentionOutput(found[0].transpose(1, 2).contiguous(), found[1].squeeze(-1))

    def in_any(tensors: AttentionTensors) -> AttentionOutput:
        q, k, v = layout.to_bhsd(tensors.q), layout.to_bhsd(tensors.k), layout.to_bhsd(tensors.v)
        found = _forward(q, k, v, None, True, 0.0, is_causal, False, scale=tensors.softmax_scale)
        return AttentionOutput(layout.from_bhsd(found[0]).contiguous(), found[1].squeeze(-1))

    return in_bshd if layout is LAYOUTS["bshd"] else in_any


@hookimpl
def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients of q, k and v.

    PyTorch caches cuDNN's backward plans by the strides of q, k and v alone and assumes that out and dout lie in memory
    as q does; otherwise the gradients are silently wrong (seen with PyTorch 2.11). So all five are made contiguous in
    the request's layout, which copies only what is not.

    Raises:
        ValueError: dlse is given; a request with return_lse=True plans its backward on ``sdpa``.
    """
    refuse_dlse("cudnn", dlse)
    request, layout, tensors = plan.request, plan.request.layout, residuals.tensors
    inputs = (dout, tensors.q, tensors.k, tensors.v, residuals.out)
    dout, q, k, v, out = [layout.to_bhsd(aligned(x.contiguous())) for x in inputs]
    lse = contiguous_from_16_bytes(residuals.lse).unsqueeze(-1)
    lowered = small_scale.factor_of_q(request.dtype, tensors.softmax_scale)
    if lowered != 1.0:
        q = q * lowered
    no_seed = torch.empty((), dtype=torch.int64, device=q.device)  # read with dropout only
    found = []
    for first, length, is_causal in _parts(request):
        of_part = [x.narrow(2, first, length) for x in (k, v)]
        sizes = (q.shape[2], length, 0.0, is_causal)
        unused = (no_seed, no_seed, None, None, None)
        found.append(_backward(dout, q, *of_part, out, lse, *unused, *sizes, scale=tensors.softmax_scale / lowered))
    from_bhsd = layout.from_bhsd
    dq, dk, dv = found[0]
    if len(found) == 2:
        dq = (dq.float() + found[1][0]).to(dq.dtype)
        dk, dv = (torch.cat(pair, 2) for pair in zip(found[0][1:], found[1][1:], strict=True))
    if lowered != 1.0:
        dq = dq * lowered
    return Gradients(from_bhsd(dq).contiguous(), from_bhsd(dk).contiguous(), from_bhsd(dv).contiguous())
