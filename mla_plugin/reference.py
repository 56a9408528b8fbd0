"""The oracle: attention as its definition, in plain differentiable PyTorch, float64 unless told otherwise.

Slow, quadratic in memory and meant to be read: for each sequence one boolean matrix says which query sees which key,
then come two matrix products and a softmax. Masks, windows and biases are those of TransformerEngine's
``DotProductAttention``; the log-sum-exp and the rows that see no key follow ``AttentionOutput``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.cache_format import PLAIN, dequantised
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.mask import ATTN_MASK_TYPES
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients
from mla_plugin.hooks.decode import DecodeOutput

Spans = list[tuple[int, int]]
"""(start, length) of each sequence along its dimension of the tensor."""

_ONLY: dict[str, tuple[object, ...]] = {
    "attn_mask_type": ATTN_MASK_TYPES,
    "bias_type": ("no_bias", "pre_scale_bias", "post_scale_bias"),
    "dropout_p": (0.0,),
    "softmax_type": ("vanilla",),
    "has_score_mod": (False,),
    "fp8": (False,),
    "has_kv_cache": (False,),
    "context_parallel": (False,),
}


def attention(
    request: AttentionRequest, tensors: AttentionTensors, *, compute_dtype: torch.dtype = torch.float64
) -> AttentionOutput:
    """Attention over expanded K and V, every intermediate in ``compute_dtype``.

    With a low precision as ``compute_dtype`` this is "the same computation done in that dtype by plain PyTorch", whose
    error is the yardstick for a backend's. Autograd through q, k, v and bias gives their gradients.

    Args:
        request: the call; ``max_seqlen_*`` are consulted for ``thd`` only.
        tensors: its tensors, any strides; padded positions are never read.
        compute_dtype: dtype of every intermediate and of the result.

    Returns:
        out (*q.shape[:-1], head_dim_v), and lse [B, H, S_q] or [H, T], both in ``compute_dtype``. Rows that see no key,
        and padded rows, have out 0 and lse -inf; no gradient flows through them.

    Raises:
        ValueError: the request asks for what the oracle does not compute, or a tensor that it needs is missing.
    """
    _check(request, tensors)
    q, k, v = (request.layout.to_bhsd(x.to(compute_dtype)) for x in (tensors.q, tensors.k, tensors.v))
    bias = None if tensors.bias is None else tensors.bias.to(compute_dtype)
    out = q.new_zeros((*tensors.q.shape[:-1], v.shape[-1]))
    out_bhsd = request.layout.to_bhsd(out)
    lse = q.new_full(q.shape[:-1], -torch.inf)

    is_packed = request.layout.is_packed
    spans_q = _spans(request, q.shape[2], tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded)
    spans_kv = _spans(request, k.shape[2], tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded)
    for b, ((start_q, seqlen_q), (start_kv, seqlen_kv)) in enumerate(zip(spans_q, spans_kv, strict=True)):
        row = 0 if is_packed else b
        rows, columns = slice(start_q, start_q + seqlen_q), slice(start_kv, start_kv + seqlen_kv)
        visible = visibility(request, seqlen_q, seqlen_kv, device=q.device)
        if tensors.attention_mask is not None:
            visible = visible & ~_of_sequence(tensors.attention_mask, request, q, k, b)[:, :seqlen_q, :seqlen_kv]
        bias_b = None if bias is None else _of_sequence(bias, request, q, k, b)[:, :seqlen_q, :seqlen_kv]
        out_bhsd[row, :, rows], lse[row, :, rows] = _attend(
            request, tensors.softmax_scale, q[row, :, rows], k[row, :, columns], v[row, :, columns], visible, bias_b
        )
    return AttentionOutput(out, lse.squeeze(0) if is_packed else lse)


def attention_with_gradients(
    request: AttentionRequest,
    tensors: AttentionTensors,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[AttentionOutput, Gradients]:
    """``attention`` and its gradients by autograd, everything in ``compute_dtype``.

    Args:
        request, tensors, compute_dtype: as for ``attention``.
        dout: gradient of out, out's shape.
        dlse: gradient of lse, lse's shape; None for zero.

    Returns:
        The output, detached, and dq, dk, dv with the inputs' shapes; dbias with the bias's shape when there is a bias.
    """
    leaves = {
        name: getattr(tensors, name).detach().to(compute_dtype).requires_grad_()
        for name in ("q", "k", "v", "bias")
        if getattr(tensors, name) is not None
    }
    with torch.enable_grad():
        result = attention(request, replace(tensors, **leaves), compute_dtype=compute_dtype)
    outputs, weights = [result.out], [dout.to(compute_dtype)]
    if dlse is not None:
        outputs.append(result.lse)
        weights.append(dlse.to(compute_dtype))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights)
    return AttentionOutput(result.out.detach(), result.lse.detach()), Gradients(*gradients)


def visibility(
    request: AttentionRequest, seqlen_q: int, seqlen_kv: int, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Which query of one sequence sees which key, by the mask type and the window; bool [seqlen_q, seqlen_kv].

    A causal mask and a window share one diagonal; ``Band`` says where it is.
    """
    band = request.band
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + band.offset(seqlen_q, seqlen_kv)
    key = torch.arange(seqlen_kv, device=device)[None, :]
    visible = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool, device=device)
    if band.left >= 0:
        visible &= key >= diagonal - band.left
    if band.right >= 0:
        visible &= key <= diagonal + band.right
    return visible


def _attend(
    request: AttentionRequest,
    softmax_scale: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q [H, S_q, D], k and v [H_kv, S_kv, D] to out [H, S_q, D_v] and lse [H, S_q]."""
    group = request.num_heads // request.num_kv_heads
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(-1, -2)
    if bias is not None and request.bias_type == "pre_scale_bias":
        scores = scores + bias
    scores = scores * softmax_scale
    if bias is not None and request.bias_type == "post_scale_bias":
        scores = scores + bias
    sees_a_key = visible.any(-1, keepdim=True)
    # A row that sees no key goes through the softmax with finite scores and is dropped after it; all -inf gives NaN.
    scores = scores.masked_fill(~visible & sees_a_key, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~sees_a_key, 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(~sees_a_key.squeeze(-1), -torch.inf)
    return weights @ v, lse


def _spans(
    request: AttentionRequest, extent: int, cu_seqlens: torch.Tensor | None, cu_seqlens_padded: torch.Tensor | None
) -> Spans:
    """Where each sequence lies: packed one after the other, at its row's start, or filling its row."""
    if not request.layout.is_packed and not request.has_padding:
        return [(0, extent)] * request.batch_size
    if cu_seqlens is None:
        raise ValueError(
            f"attn_mask_type={request.attn_mask_type!r} with qkv_format={request.qkv_format!r} needs each sequence's "
            "length; give cu_seqlens_q and cu_seqlens_kv"
        )
    lengths = cu_seqlens.diff().tolist()
    if not request.layout.is_packed:
        return [(0, length) for length in lengths]
    starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[:-1].tolist()
    return list(zip(starts, lengths, strict=True))


def _of_sequence(
    x: torch.Tensor, request: AttentionRequest, q: torch.Tensor, k: torch.Tensor, sequence: int
) -> torch.Tensor:
    """The part [H, S_q, S_kv] of a bias or a mask that broadcasts to [B, H, S_q, S_kv]."""
    extents = (q.shape[2], k.shape[2])
    if request.layout.is_packed:
        extents = (request.max_seqlen_q, request.max_seqlen_kv)
    return x.expand(request.batch_size, request.num_heads, *extents)[sequence]


def _check(request: AttentionRequest, tensors: AttentionTensors) -> None:
    for name, accepted in _ONLY.items():
        given = getattr(request, name)
        if given not in accepted:
            raise ValueError(
                f"{name}={given!r}: the reference computes {' or '.join(map(repr, accepted))} only; change the request"
            )
    for name, wanted in (
        ("attention_mask", request.attn_mask_type == "arbitrary"),
        ("bias", request.bias_type != "no_bias"),
    ):
        given = getattr(tensors, name)
        if (given is not None) != wanted:
            raise ValueError(
                f"attn_mask_type={request.attn_mask_type!r}, bias_type={request.bias_type!r} and {name} "
                f"{'missing' if given is None else 'given'}; {'give' if wanted else 'leave out'} {name}"
            )


def decode(tensors: DecodeTensors, *, compute_dtype: torch.dtype = torch.float64) -> DecodeOutput:
    """Absorbed attention over the compressed cache, one sequence after the other.

    Args:
        tensors: a decode call, cache contiguous or paged; what the cache and the page table hold beyond a length is
            never read.
        compute_dtype: dtype of every intermediate and of the result.

    Returns:
        out [B, S_q, H, R] and lse [B, H, S_q] in ``compute_dtype``; a query that sees no key has out 0 and lse -inf.
    """
    q = torch.cat([tensors.q_nope_abs, tensors.q_rope], -1).to(compute_dtype)
    batch, seqlen_q, heads, _ = q.shape
    rank = tensors.c_kv.shape[-1]
    out = q.new_zeros((batch, seqlen_q, heads, rank))
    lse = q.new_full(tensors.lse_shape, -torch.inf)
    leftpads = [0] * batch if tensors.leftpad_kv is None else tensors.leftpad_kv.tolist()
    for b, leftpad in enumerate(leftpads):
        rows = decode_rows(tensors, b, compute_dtype)
        for i in range(seqlen_q):
            end = len(rows) - seqlen_q + i + 1 if tensors.causal else len(rows)
            if end <= leftpad:
                continue
            keys = rows[leftpad:end]  # [keys, R + Dr]
            scores = (q[b, i] @ keys.T) * tensors.softmax_scale  # [H, keys]
            out[b, i] = scores.softmax(-1) @ keys[:, :rank]
            lse[b, :, i] = scores.logsumexp(-1)
    return DecodeOutput(out, lse)


def decode_rows(tensors: DecodeTensors, sequence: int, dtype: torch.dtype) -> torch.Tensor:
    """The keys of one sequence of a decode call in ``dtype``, a quantised cache's too: [its length, R + Dr]."""
    c_kv, k_rope = (_cache_rows(cache, tensors, sequence) for cache in (tensors.c_kv, tensors.k_rope))
    if tensors.kv_cache_format != PLAIN:
        scale = tensors.kv_scale
        assert scale is not None
        scale = _cache_rows(scale, tensors, sequence) if scale.dim() else scale
        c_kv, k_rope = dequantised(c_kv, k_rope, scale, tensors.kv_cache_format, dtype)
    return torch.cat([c_kv, k_rope], -1).to(dtype)


def _cache_rows(cache: torch.Tensor, tensors: DecodeTensors, sequence: int) -> torch.Tensor:
    """The rows of one sequence: [its length, columns]."""
    length = cache.shape[1] if tensors.seqlens_kv is None else int(tensors.seqlens_kv[sequence])
    if tensors.page_table is None:
        return cache[sequence, :length]
    pages = tensors.page_table[sequence, : -(-length // cache.shape[1])]
    return cache[pages.long()].flatten(0, 1)[:length]
