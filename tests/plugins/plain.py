"""Attention as plain PyTorch writes it, one sequence after the other: a second oracle, independent of the library's.

It keeps PyTorch's NaN: a row that sees keys, all of whose scores are -inf, or one of them NaN, has NaN. Each row's
softmax is over the keys that it sees and no others, so what is hidden cannot spoil a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest

Tensors = tuple[torch.Tensor, ...]
_TO_BSHD = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


def _rows(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """[N, S, H, D]; ``thd`` is one row of N."""
    return x[None] if qkv_format == "thd" else x.permute(_TO_BSHD[qkv_format])


def places(request: AttentionRequest, tensors: AttentionTensors) -> Iterator[tuple[int, slice, slice]]:
    """(N, queries, keys) of each sequence."""
    sides = []
    for x, offsets, starts in (
        (tensors.q, tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded),
        (tensors.k, tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded),
    ):
        if offsets is None:
            shape = _rows(x, request.qkv_format).shape
            sides.append([slice(0, shape[1])] * shape[0])
            continue
        lengths = (offsets[1:] - offsets[:-1]).tolist()
        first = [0] * len(lengths)
        if request.qkv_format == "thd":
            first = (offsets if starts is None else starts).tolist()
        sides.append([slice(a, a + n) for a, n in zip(first, lengths, strict=False)])
    for index, (queries, keys) in enumerate(zip(*sides, strict=True)):
        yield 0 if request.qkv_format == "thd" else index, queries, keys


def sees(request: AttentionRequest, len_q: int, len_kv: int) -> torch.Tensor:
    """bool [len_q, len_kv] by mask type and window."""
    seen = torch.ones(len_q, len_kv, dtype=torch.bool)
    is_causal = "causal" in request.attn_mask_type
    at_end = "bottom_right" in request.attn_mask_type if is_causal else request.bottom_right_diagonal
    for i in range(len_q):
        middle = i + (len_kv - len_q if at_end else 0)
        for j in range(len_kv):
            left, right = request.window_size
            hidden = (
                (is_causal and j > middle) or (left >= 0 and j < middle - left) or (right >= 0 and j > middle + right)
            )
            seen[i, j] = not hidden
    return seen


def _part(x: torch.Tensor | None, index: int, head: int, len_q: int, len_kv: int) -> torch.Tensor | None:
    if x is None:
        return None
    x = x[(None,) * (4 - x.dim())]
    x = x[index if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]
    return x[: len_q if x.shape[0] > 1 else 1, :len_kv].expand(len_q, -1 if x.shape[1] > 1 else len_kv)


def attention(
    request: AttentionRequest, given: AttentionTensors, dtype: torch.dtype = torch.float64, *, kept: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out in the layout of q, and lse; differentiable. ``kept=False``: hidden scores are -inf, hidden weights 0."""
    q, k, v = (_rows(x.to(dtype), request.qkv_format) for x in (given.q, given.k, given.v))
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
    group = q.shape[2] // k.shape[2]
    for index, (n, queries, keys) in enumerate(places(request, given)):
        len_q, len_kv = queries.stop - queries.start, keys.stop - keys.start
        seen_by_band = sees(request, len_q, len_kv)
        for head in range(q.shape[2]):
            mask = _part(given.attention_mask, index, head, len_q, len_kv)
            seen = seen_by_band if mask is None else seen_by_band & ~mask
            bias = _part(given.bias, index, head, len_q, len_kv)
            keys_here, values = k[n, keys, head // group], v[n, keys, head // group]
            for i in range(len_q):
                if not seen[i].any():
                    continue
                columns = seen[i] if kept else torch.ones_like(seen[i])
                row = keys_here[columns] @ q[n, queries.start + i, head]
                of_bias = 0 if bias is None else bias[i][columns].to(dtype)
                if request.bias_type == "pre_scale_bias":
                    row = (row + of_bias) * given.softmax_scale
                else:
                    row = row * given.softmax_scale + of_bias
                row = row.masked_fill(~seen[i][columns], -torch.inf)
                out[n, queries.start + i, head] = row.softmax(-1) @ values[columns]
                lse[n, head, queries.start + i] = row.logsumexp(-1)
    back = out[0] if request.qkv_format == "thd" else out.permute(_TO_BSHD[request.qkv_format])
    return back, lse[0] if request.qkv_format == "thd" else lse
