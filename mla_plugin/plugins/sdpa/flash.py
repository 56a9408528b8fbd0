"""PyTorch's CPU flash kernel, one call for a batch of equal lengths: memory is linear in the sequence length.

The kernel needs equal head dims, so the smaller of (Q, K) and V is padded with zero columns. Inputs are converted to
float32: the kernel's bfloat16 backward accumulates dK and dV block by block in bfloat16, with an error at 4,096 tokens
of 7.5 times that of plain PyTorch in bfloat16 (float32: 0.9 times, in the same time).

Q is multiplied by the scale beforehand, because the kernel applies it at different places in the two passes: the
backward's scores would differ by a rounding from those of its log-sum-exp, which triples the error at large scores.
Only a forward with a power of two as scale, which does not round, leaves the scale to the kernel and avoids the copy.

The causal flag is only used with as many queries as keys, where top-left and bottom-right alignment agree. Any other
causal shape is split into a square and a rectangle without a mask, see ``pieces``. In the forward, rows covered by two
pieces are merged by their log-sum-exp; in the backward each piece uses the row's final log-sum-exp, so that its
probabilities are final and the gradients add up.

The kernel treats a row whose scores are all NaN or -inf as one that sees no key: NaN does not always replace its
running maximum, and where that is still -inf at the end, out and lse are 0. Every row of a piece sees a key, so a row
of zeros means that the scores have to be checked; see ``wide_forward``.

The gradient of the log-sum-exp needs no kernel support. The backward computes ``delta = rowsum(dout * out)`` and ``dS =
P * (dout @ V.T - delta)``. One more column with V = 1, out = 0, dout = dlse does not change delta and adds dlse to
``dout @ V.T``, so dS gains ``P * dlse``, which is the chain rule through lse since ``d lse / dS = P``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.arguments.mask import Band
from mla_plugin.plugins.sdpa import blocked
from mla_plugin.plugins.sdpa.terms import ScoreTerms

_forward = getattr(  # where PyTorch has a Python binding, it is 2 us faster than the operator
    torch,
    "_scaled_dot_product_flash_attention_for_cpu",
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class Piece:
    """A rectangle of the score matrix: fully visible, or a square whose lower triangle is visible.

    Attributes:
        queries, keys: its rows and columns.
        is_causal: a square's lower triangle.
        has_all_queries, has_all_keys: it has every row, or column, of the matrix; False may also mean unknown.
    """

    queries: slice
    keys: slice
    is_causal: bool = False
    has_all_queries: bool = False
    has_all_keys: bool = False


@functools.lru_cache(maxsize=4096)
def pieces(len_q: int, len_kv: int, band: Band) -> tuple[Piece, ...]:
    """Cut what the queries see, none or a causal band, into rectangles and squares without empty ones."""
    if band.right < 0:
        rectangle, square = Piece(slice(0, len_q), slice(0, len_kv)), None
    else:
        side = min(len_q, len_kv)
        row, column = (len_q - side, len_kv - side) if band.bottom_right else (0, 0)
        square = Piece(slice(row, row + side), slice(column, column + side), is_causal=True)
        if band.bottom_right:  # the keys before the square, seen by its rows
            rectangle = Piece(square.queries, slice(0, column))
        else:  # the rows below the square, which see all its keys
            rectangle = Piece(slice(side, len_q), square.keys)
    found = (piece for piece in (rectangle, square) if piece)
    return tuple(
        replace(x, has_all_queries=x.queries == slice(0, len_q), has_all_keys=x.keys == slice(0, len_kv))
        for x in found
        if x.queries.start < x.queries.stop and x.keys.start < x.keys.stop
    )


def _widened(x: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """x [n, H, S, D] in the compute dtype with zero columns up to head_dim; x itself when nothing changes."""
    x = x if x.dtype == dtype else x.to(dtype=dtype)  # as a keyword: a positional argument takes longer to parse
    return torch.constant_pad_nd(x, (0, head_dim - x.shape[-1])) if x.shape[-1] < head_dim else x


def _scaled(q: torch.Tensor, dtype: torch.dtype, softmax_scale: float) -> torch.Tensor:
    """A new tensor q * softmax_scale in the compute dtype."""
    return q * softmax_scale if q.dtype == dtype else q.to(dtype=dtype).mul_(softmax_scale)


def _grouped(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[n, H, ...] of the queries as the kernel's batch and heads: [n * H_kv, H / H_kv, ...] unless H is H_kv."""
    return x if x.shape[1] == num_kv_heads else x.reshape(x.shape[0] * num_kv_heads, -1, *x.shape[2:])


def _shared(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[n, H_kv, S, D] of the keys or values to match ``_grouped`` queries, repeated for every head."""
    ratio = num_heads // x.shape[1]
    return x if ratio == 1 else x.reshape(-1, 1, *x.shape[2:]).expand(-1, ratio, -1, -1)


def _ungrouped(x: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """The inverse of ``_grouped``."""
    return x if x.shape[0] == num_sequences else x.reshape(num_sequences, -1, *x.shape[2:])


def _unshared(x: torch.Tensor, num_kv_heads: int, num_sequences: int) -> torch.Tensor:
    """The gradient of ``_shared``: [n, H_kv, S, D]."""
    return x if x.shape[:2] == (num_sequences, num_kv_heads) else x.sum(1).unflatten(0, (num_sequences, num_kv_heads))


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: ScoreTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """``wide_forward`` without the columns that it adds to out."""
    out, lse = wide_forward(q, k, v, terms)
    return out[..., : v.shape[3]] if out.shape[3] > v.shape[3] else out, lse


def wide_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: ScoreTerms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a batch.

    Args:
        q: [n, H, S_q, head_dim_qk], last dimension contiguous.
        k: [n, H_kv, S_kv, head_dim_qk].
        v: [n, H_kv, S_kv, head_dim_v].
        terms: scale and band (open or causal) are read, the rest must be absent.

    Returns:
        out [n, H, S_q, head_dim_v or more] and lse [n, H, S_q], float32 or float64; a row without keys has 0 and -inf.
        The padding columns of out are undefined. A sequence for which the kernel may have lost NaN is recomputed by
        ``blocked``; so is one where a row has only zeros for other reasons, with the same result.
    """
    given_q, given_k, given_v = q, k, v
    dtype = lse_dtype(q.dtype)
    len_q, len_kv, head_dim_v = q.shape[2], v.shape[2], v.shape[3]
    head_dim, scale = max(q.shape[3], head_dim_v), terms.softmax_scale
    if q.dtype != dtype or math.frexp(scale)[0] != 0.5:
        q, scale = _scaled(q, dtype, scale), 1.0
    q, k, v = _widened(q, dtype, head_dim), _widened(k, dtype, head_dim), _widened(v, dtype, head_dim)
    parts = pieces(len_q, len_kv, terms.band)
    if len(parts) == 1 and parts[0].has_all_queries:
        out, lse = _attend(q, k, v, parts[0], scale)
        lost = _lost_nan(out, lse)
    else:
        out = q.new_zeros(*q.shape[:3], head_dim_v)
        lse = q.new_full(q.shape[:3], -torch.inf)
        lost = []
        for piece in parts:
            part_out, part_lse = _attend(q, k, v, piece, scale)
            lost += _lost_nan(part_out, part_lse)
            rows = (slice(None), slice(None), piece.queries)
            merge(out[rows], lse[rows], part_out[..., :head_dim_v], part_lse)
    for i in dict.fromkeys(lost):
        one = slice(i, i + 1)
        out[one][..., :head_dim_v], lse[one] = blocked.forward(given_q[one], given_k[one], given_v[one], terms)
    lse.nan_to_num_(
        torch.nan, torch.nan, -torch.inf
    )  # a score of +inf: out is NaN, and so must be the backward's weights
    return out, lse


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's out [n, H, rows, D] and lse [n, H, rows] of a piece."""
    num_sequences, num_heads, num_kv_heads = q.shape[0], q.shape[1], k.shape[1]
    if num_heads == num_kv_heads:
        if not piece.has_all_queries:
            q = _rows(q, piece.queries)
        if not piece.has_all_keys:
            k, v = _rows(k, piece.keys), _rows(v, piece.keys)
        return _forward(q, k, v, 0.0, piece.is_causal, scale=scale)  # type: ignore[no-any-return]
    out, lse = _forward(
        _grouped(_rows(q, piece.queries), num_kv_heads),
        _shared(_rows(k, piece.keys), num_heads),
        _shared(_rows(v, piece.keys), num_heads),
        0.0,
        piece.is_causal,
        scale=scale,
    )
    return _ungrouped(out, num_sequences), _ungrouped(lse, num_sequences)


def _rows(x: torch.Tensor, part: slice) -> torch.Tensor:
    return x if part == slice(0, x.shape[2]) else x[:, :, part]


def _lost_nan(out: torch.Tensor, lse: torch.Tensor) -> list[int]:
    """Sequences that have a row of zeros, which the kernel gives to rows whose scores are all NaN or -inf."""
    if int(lse.count_nonzero()) == lse.numel():  # takes half the time of all()
        return []
    suspects = lse == 0
    found: list[int] = suspects.nonzero()[:, 0][(out[suspects] == 0).all(-1)].unique().tolist()
    return found


def merge(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add the attention over further keys to out [n, H, S, D] and lse [n, H, S], in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(part_out, (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    terms: ScoreTerms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a batch; shapes as ``forward``, lse and dlse [n, H, S_q], results in float32 or float64."""
    dtype = lse_dtype(q.dtype)
    len_q, head_dim_qk = q.shape[2:]
    len_kv, head_dim_v = v.shape[2:]
    head_dim = max(head_dim_qk, head_dim_v + (dlse is not None))
    q = _widened(_scaled(q, dtype, terms.softmax_scale), dtype, head_dim)
    k, v, out, dout = (_widened(x, dtype, head_dim) for x in (k, v, out, dout))
    if dlse is not None:  # head_dim > head_dim_v, so v and dout are new tensors
        v[..., head_dim_v] = 1
        dout[..., head_dim_v] = dlse
    parts = pieces(len_q, len_kv, terms.band)
    if len(parts) == 1 and parts[0].has_all_queries and parts[0].has_all_keys:
        dq, dk, dv = _gradients(q, k, v, out, lse, dout, parts[0])
    else:
        dq, dk, dv = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for piece in parts:
            dq_part, dk_part, dv_part = _gradients(q, k, v, out, lse, dout, piece)
            dq[:, :, piece.queries] += dq_part
            dk[:, :, piece.keys] += dk_part
            dv[:, :, piece.keys] += dv_part
    dq *= terms.softmax_scale
    return dq[..., :head_dim_qk], dk[..., :head_dim_qk], dv[..., :head_dim_v]


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    piece: Piece,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel's gradients of a piece's rows: [n, H, rows, D], [n, H_kv, keys, D] twice."""
    num_sequences, num_heads, num_kv_heads = q.shape[0], q.shape[1], k.shape[1]
    dout, q, out, lse = (_grouped(_rows(x, piece.queries), num_kv_heads) for x in (dout, q, out, lse))
    k, v = (_shared(_rows(x, piece.keys), num_heads) for x in (k, v))
    dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, piece.is_causal, scale=1.0)
    return (
        _ungrouped(dq, num_sequences),
        _unshared(dk, num_kv_heads, num_sequences),
        _unshared(dv, num_kv_heads, num_sequences),
    )
