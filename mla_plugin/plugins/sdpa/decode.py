"""Decode on any device in plain PyTorch, with weight absorption; on CUDA the host does not read the lengths."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN, dequantised
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.hooks.decode import DecodeOutput, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.shared.refusals import batch_dependence

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GROUP_ELEMENTS = 1 << 26
"""Most elements of cache rows and of scores at a time in float32: 256 MiB each."""


def refusals(request: DecodeRequest, platform: Platform) -> Iterator[str]:
    """Every reason why this backend cannot compute the request."""
    if request.device_type not in ("cpu", "cuda"):
        yield f"device_type={request.device_type!r}, expected 'cpu' or 'cuda'"
    if request.device_type != platform.device_type:
        yield f"device_type={request.device_type!r} on a platform of device_type={platform.device_type!r}"
    if request.dtype not in DTYPES:
        yield f"dtype={request.dtype}, expected float32, bfloat16, float16 or float64"
    yield from batch_dependence(request, "PyTorch's products are computed in an order that follows their sizes")


def select(request: DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Accept every decode request on a CPU or a CUDA device except ``batch_invariant``, quantised caches included."""
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    return Accepted(notes=("products of plain PyTorch in float32",), kv_cache_formats=(FP8, FP8_DS_MLA))


def forward(tensors: DecodeTensors) -> DecodeOutput:
    """Sequence by sequence on the CPU, where the lengths are known; on a CUDA device in groups of sequences."""
    q = tensors.q_nope_abs
    batch, seqlen_q, heads, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(q.shape)
    lse = q.new_empty(tensors.lse_shape, dtype=compute)
    capacity = tensors.capacity
    knows_lengths = tensors.seqlens_kv is None or q.device.type == "cpu"
    sees_all = knows_lengths and tensors.leftpad_kv is None and (not tensors.causal or seqlen_q == 1)
    if q.device.type == "cpu":
        lengths = [capacity] * batch if tensors.seqlens_kv is None else tensors.seqlens_kv.tolist()
        groups = [(b, b + 1, length) for b, length in enumerate(lengths)]
    else:
        size = max(1, GROUP_ELEMENTS // max(1, capacity * max(tensors.c_kv.shape[-1], seqlen_q * heads)))
        groups = [(b, min(b + size, batch), capacity) for b in range(0, batch, size)]
    with torch.autocast(q.device.type, enabled=False):  # the products in float32, as in every backend
        for first, last, length in groups:
            out[first:last], lse[first:last] = _attend(tensors, first, last, length, compute, sees_all=sees_all)
    return DecodeOutput(out, lse if tensors.return_lse else None)


def _rows(cache: torch.Tensor, tensors: DecodeTensors, first: int, last: int, length: int) -> torch.Tensor:
    """The first ``length`` rows of some sequences' cache: [last - first, length, columns]."""
    if tensors.page_table is None:
        return cache[first:last, :length]
    pages, page_size, _ = cache.shape
    # entries beyond a length hold anything
    used = tensors.page_table[first:last, : -(-length // page_size)].clamp(0, max(pages - 1, 0))
    return cache[used].flatten(1, 2)[:, :length]


def _keys(
    tensors: DecodeTensors, first: int, last: int, length: int, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """c_kv and k_rope of some sequences in ``compute``: [last - first, length, columns]."""
    c_kv, k_rope = (_rows(cache, tensors, first, last, length) for cache in (tensors.c_kv, tensors.k_rope))
    if tensors.kv_cache_format == PLAIN:
        return c_kv.to(compute), k_rope.to(compute)
    scale = tensors.kv_scale
    assert scale is not None  # checked
    if scale.dim():
        scale = _rows(scale, tensors, first, last, length)
    return dequantised(c_kv, k_rope, scale, tensors.kv_cache_format, compute)


def _visible(tensors: DecodeTensors, first: int, last: int, length: int) -> torch.Tensor:
    """Which query sees which key: bool [last - first, S_q, length]."""
    seqlen_q, device = tensors.q_nope_abs.shape[1], tensors.q_nope_abs.device
    key = torch.arange(length, device=device)
    if tensors.seqlens_kv is None:
        ends = torch.full((last - first, 1, 1), length, device=device)
    else:
        ends = tensors.seqlens_kv[first:last, None, None]
    if tensors.causal:
        ends = ends + torch.arange(1 - seqlen_q, 1, device=device)[:, None]
    visible = key < ends
    if tensors.leftpad_kv is not None:
        visible = visible & (key >= tensors.leftpad_kv[first:last, None, None])
    return visible.expand(last - first, seqlen_q, length)


def _attend(
    tensors: DecodeTensors, first: int, last: int, length: int, compute: torch.dtype, *, sees_all: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [G, S_q, H, R] and lse [G, H, S_q] of some sequences over their first ``length`` cache rows.

    ``sees_all``: every query sees all of these rows, so nothing is masked.
    """
    q_nope_abs, q_rope = (x[first:last].flatten(1, 2).to(compute) for x in tensors[:2])  # [G, S_q * H, columns]
    if length == 0:
        lse = q_rope.new_full((last - first, *tensors.lse_shape[1:]), -torch.inf)
        return torch.zeros_like(tensors.q_nope_abs[first:last]), lse
    c_kv, k_rope = _keys(tensors, first, last, length, compute)
    visible = None if sees_all else _visible(tensors, first, last, length)
    if visible is not None:
        seen = visible.any(1)[..., None]  # [G, length, 1]
        # a row that no query sees may hold NaN, and 0 * NaN is NaN
        c_kv, k_rope = (keys.masked_fill(~seen, 0.0) for keys in (c_kv, k_rope))
    scale = tensors.softmax_scale
    scores = torch.baddbmm(
        torch.bmm(q_nope_abs, c_kv.transpose(1, 2)), q_rope, k_rope.transpose(1, 2), beta=scale, alpha=scale
    )
    seqlen_q, heads = tensors.q_nope_abs.shape[1:3]
    scores = scores.unflatten(1, (seqlen_q, heads))
    if visible is not None:
        scores = scores.masked_fill_(~visible[:, :, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True)  # [G, S_q, H, 1]
    if visible is not None:
        highest = highest.masked_fill_(highest.isneginf(), 0.0)
    weights = scores.sub_(
        highest
    ).exp_()  # fewer operators than logsumexp and exp: with a short cache the overhead of operators dominates
    total = weights.sum(-1, keepdim=True)
    lse = highest.add_(total.log()).squeeze(-1)  # [G, S_q, H]
    if visible is not None:
        total = total.masked_fill_(total == 0, 1.0)
    out = torch.bmm(weights.flatten(1, 2), c_kv).unflatten(1, (seqlen_q, heads)).div_(total)
    return out.to(tensors.q_nope_abs.dtype), lse.transpose(1, 2)
