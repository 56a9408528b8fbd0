"""PyTorch's memory-efficient CUDA kernels, emulated on the CPU: their shapes, demands, and what they leave unwritten.

Written after ``kernel_forward.h``, ``kernel_backward.h`` and ``attention*.cu`` of PyTorch 2.13. Memory that the kernels
do not write is NaN here, and what they would refuse or get wrong fails an assertion.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

NO_MASK, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2


def _check(x: torch.Tensor) -> None:
    assert x.dim() == 4
    assert x.stride(-1) == 1
    assert x.shape[-1] % 8 == 0
    assert all(stride % 8 == 0 for stride in x.stride()[:-1])
    assert x.data_ptr() % 16 == 0


def _spans(x: torch.Tensor, cu_seqlens: torch.Tensor | None, longest: int | None) -> Iterator[tuple[int, slice]]:
    """(batch row, rows) of each sequence."""
    if cu_seqlens is None:
        yield from ((n, slice(0, x.shape[1])) for n in range(x.shape[0]))
        return
    assert x.shape[0] == 1
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.is_contiguous()
    assert longest is not None
    assert 0 < longest <= x.shape[1]
    offsets = cu_seqlens.tolist()
    for start, stop in itertools.pairwise(offsets):
        assert stop - start <= longest
        yield 0, slice(start, stop)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, mask: int, window_size: int | None) -> torch.Tensor:
    """[H, rows, columns]; the window of the backward has no bottom-right shift, so none is accepted in either pass."""
    len_q, len_kv = q.shape[0], k.shape[0]
    scores = torch.einsum("ihd,jhd->hij", q.float(), k.float()) * scale
    offset = len_kv - len_q if mask == BOTTOM_RIGHT else 0
    column, row = torch.arange(len_kv), torch.arange(len_q).unsqueeze(-1) + offset
    if mask != NO_MASK:
        scores = scores.masked_fill(column > row, -torch.inf)
    if window_size:
        assert mask != NO_MASK
        assert offset == 0
        scores = scores.masked_fill(column <= row - window_size, -torch.inf)
    assert not (scores == -torch.inf).all(-1).any(), "the kernel must never meet a row without keys"
    return scores


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool,
    *,
    scale: float,
    window_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None, None, int, int]:
    """``aten::_efficient_attention_forward``."""
    for x in (query, key, value):
        _check(x)
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert bias is None
    assert dropout_p == 0
    assert compute_log_sumexp
    out = query.new_full((*query.shape[:-1], value.shape[-1]), torch.nan)
    spans_q = list(_spans(query, cu_seqlens_q, max_seqlen_q))
    spans_k = list(_spans(key, cu_seqlens_k, max_seqlen_k))
    rows = math.ceil((query.shape[1] if cu_seqlens_q is None else max_seqlen_q) / 32) * 32
    lse = torch.full((len(spans_q), query.shape[2], rows), torch.nan, dtype=torch.float32)
    for b, ((n, i), (_, j)) in enumerate(zip(spans_q, spans_k, strict=True)):
        if i.start == i.stop:
            continue
        assert j.start < j.stop
        scores = _scores(query[n, i], key[n, j], scale, custom_mask_type, window_size)
        out[n, i] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), value[n, j].float()).to(out.dtype)
        lse[b, :, : i.stop - i.start] = scores.logsumexp(-1)
    return out, lse, None, None, max_seqlen_q, max_seqlen_k


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: torch.Tensor,
    dropout_p: float,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float,
    num_splits_key: int | None,
    window_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
    """``aten::_efficient_attention_backward``."""
    for x in (query, key, value, out):
        _check(x)
    assert grad_out.shape == out.shape
    assert out.is_contiguous(), "the kernel computes out's row stride from its shape"
    assert grad_out.shape[-1] == value.shape[-1]
    assert logsumexp.dtype == torch.float32
    assert logsumexp.shape[-1] % 32 == 0
    strides = zip(logsumexp.shape[:2], logsumexp.stride()[:2], strict=True)
    assert all(size <= 1 or stride % 8 == 0 for size, stride in strides)  # lse_strideB and lse_strideH
    assert logsumexp.data_ptr() % 16 == 0, "the kernel reads 16 bytes at a time; elsewhere the device is lost"
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (query, key, value))
    spans = zip(_spans(query, cu_seqlens_q, max_seqlen_q), _spans(key, cu_seqlens_k, max_seqlen_k), strict=True)
    for b, ((n, i), (_, j)) in enumerate(spans):
        length = i.stop - i.start
        assert (logsumexp[b, :, length:] == torch.inf).all()
        dq[n, i], dk[n, j], dv[n, j] = 0, 0, 0
        if length == 0:
            continue
        dout, total = grad_out[n, i].float(), logsumexp[b, :, :length, None]
        weights = (_scores(query[n, i], key[n, j], scale, custom_mask_type, window_size) - total).exp()
        delta = (dout * out[n, i].float()).sum(-1).transpose(0, 1).unsqueeze(-1)
        dscores = weights * (torch.einsum("ihd,jhd->hij", dout, value[n, j].float()) - delta) * scale
        dscores = dscores.to(dq.dtype).float()
        dv[n, j] = torch.einsum("hij,ihd->jhd", weights, dout).to(dv.dtype)
        dq[n, i] = torch.einsum("hij,jhd->ihd", dscores, key[n, j].float()).to(dq.dtype)
        dk[n, j] = torch.einsum("hij,ihd->jhd", dscores, query[n, i].float()).to(dk.dtype)
    return dq, dk, dv, None
