"""PyTorch's CPU flash kernel, one sequence a call: memory grows with the sequence, not with its square.

The kernel wants equal head dims, so the smaller of (Q, K) and V gets zero columns. It is fed float32 whatever the
inputs' dtype: its own bfloat16 backward adds dK and dV block by block in bfloat16, whose error at 4,096 tokens is 7.5
times that of plain PyTorch in bfloat16 (0.9 times this way, in the same time).

The scale is multiplied into Q, because the kernel applies it in another place in each pass: the backward's scores would
differ from those that its log-sum-exp came from by a rounding, which costs three times the error at large scores.

Its causal flag is only ever used on a square of as many queries as keys, where every alignment means the same. Any
other causal shape is cut into a square and a rectangle that needs no mask, see ``pieces``. A row that two pieces cover
is merged by its log-sum-exp in the forward; in the backward each piece uses the row's final log-sum-exp, so that its
probabilities are the final ones and the gradients just add up.

The kernel takes a row whose scores are all NaN or -inf for one that sees no key: it keeps a running maximum that NaN
does not always replace, and where that is still -inf at the end, out and lse are 0. No row of a piece is without keys,
so a row of zeros says that the scores must be looked at; see ``forward``.

The gradient of the log-sum-exp needs no kernel support. The backward computes ``delta = rowsum(dout * out)`` and ``dS =
P * (dout @ V.T - delta)``. One more column with V = 1, out = 0, dout = dlse leaves delta as it is and adds dlse to
``dout @ V.T``, so dS gains ``P * dlse``, which is the chain rule through lse since ``d lse / dS = P``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mla_plugin.arguments.mask import Band
from mla_plugin.plugins.sdpa import blocked
from mla_plugin.plugins.sdpa.terms import Terms

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class Piece:
    """A rectangle of the score matrix: all of it is visible, or, as a square, its lower triangle."""

    queries: slice
    keys: slice
    is_causal: bool = False


def pieces(len_q: int, len_kv: int, band: Band) -> Iterator[Piece]:
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
    for piece in (rectangle, square):
        if piece and piece.queries.start < piece.queries.stop and piece.keys.start < piece.keys.stop:
            yield piece


def _widened(x: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """x [H, S, D] in the compute dtype with zero columns up to head_dim; x itself when nothing changes."""
    x = x.to(dtype)
    return F.pad(x, (0, head_dim - x.shape[-1])) if x.shape[-1] < head_dim else x


def _grouped(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """View [H, ...] of the queries as [H_kv, H / H_kv, ...]: the kernel's batch and heads."""
    return x.view(num_kv_heads, -1, *x.shape[1:])


def _shared(x: torch.Tensor, group: int) -> torch.Tensor:
    """View [H_kv, S, D] of the keys or values as [H_kv, H / H_kv, S, D] without a copy."""
    return x.unsqueeze(1).expand(-1, group, -1, -1)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence.

    Args:
        q: [1, H, S_q, head_dim_qk], last dimension contiguous.
        k: [1, H_kv, S_kv, head_dim_qk].
        v: [1, H_kv, S_kv, head_dim_v].
        terms: scale and band (open or causal) are read, the rest must be absent.

    Returns:
        out [1, H, S_q, head_dim_v] and lse [1, H, S_q], float32 or float64; a row without keys has 0 and -inf. Where
        the kernel may have lost NaN, the blocks' mathematics gives all of the result; a query and a value of zeros
        in a row that sees one key look the same, and are right both ways.
    """
    given = (q, k, v)
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_heads, len_q = q.shape[1:3]
    num_kv_heads, len_kv, head_dim_v = v.shape[1:]
    head_dim = max(q.shape[-1], head_dim_v)
    q, k, v = (_widened(x[0], dtype, head_dim) for x in (q, k, v))
    q = q * terms.softmax_scale
    out = q.new_zeros(num_heads, len_q, head_dim_v)
    lse = q.new_full((num_heads, len_q), -torch.inf)
    for piece in pieces(len_q, len_kv, terms.band):
        part_out, part_lse = _forward(
            _grouped(q[:, piece.queries], num_kv_heads),
            _shared(k[:, piece.keys], num_heads // num_kv_heads),
            _shared(v[:, piece.keys], num_heads // num_kv_heads),
            0.0,
            piece.is_causal,
            scale=1.0,
        )
        part_out, part_lse = part_out.flatten(0, 1)[..., :head_dim_v], part_lse.flatten(0, 1)
        if _may_have_lost_nan(part_out, part_lse):
            return blocked.forward(*given, terms)
        _merge(out[:, piece.queries], lse[:, piece.queries], part_out, part_lse)
    lse.masked_fill_(lse == torch.inf, torch.nan)  # a score of +inf: out is NaN, and the backward's weights must be too
    return out.unsqueeze(0), lse.unsqueeze(0)


def _may_have_lost_nan(out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Some row has the zeros that the kernel gives to scores of nothing but NaN and -inf; out is rarely looked at."""
    suspects = lse == 0
    return bool(suspects.any()) and bool((out[suspects] == 0).all(-1).any())


def _merge(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add the attention over further keys to out [H, S, D] and lse [H, S], in place."""
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
    terms: Terms,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of one sequence; shapes as ``forward``, lse and dlse [1, H, S_q], results in float32 or float64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_kv_heads, len_kv, head_dim_v = v.shape[1:]
    len_q, head_dim_qk = q.shape[2:]
    group = q.shape[1] // num_kv_heads
    head_dim = max(head_dim_qk, head_dim_v + (dlse is not None))
    q, k, v, out, dout = (_widened(x[0], dtype, head_dim) for x in (q, k, v, out, dout))
    if dlse is not None:  # head_dim > head_dim_v, so v and dout are fresh tensors
        v[..., head_dim_v] = 1
        dout[..., head_dim_v] = dlse[0]
    q = q * terms.softmax_scale
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for piece in pieces(len_q, len_kv, terms.band):
        dout_part, q_part, out_part, lse_part = (
            _grouped(x[:, piece.queries], num_kv_heads) for x in (dout, q, out, lse[0])
        )
        k_part, v_part = (_shared(x[:, piece.keys], group) for x in (k, v))
        dq_part, dk_part, dv_part = _backward(
            dout_part, q_part, k_part, v_part, out_part, lse_part, 0.0, piece.is_causal, scale=1.0
        )
        dq[:, piece.queries] += dq_part.flatten(0, 1)
        dk[:, piece.keys] += dk_part.sum(1)
        dv[:, piece.keys] += dv_part.sum(1)
    dq *= terms.softmax_scale
    return dq[None, ..., :head_dim_qk], dk[None, ..., :head_dim_qk], dv[None, ..., :head_dim_v]
