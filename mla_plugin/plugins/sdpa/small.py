"""Calls of few scores and unequal head dims on the CPU: plain products of matrices, queries block by block.

PyTorch's CPU flash kernel wants equal head dims, and its backward is slow: for 2 x 128 tokens of 8 heads, 192/128, it
takes 1.3 times as long as this in float32, one core, and the forward 1.2 to 1.5 times. A causal block leaves out the
keys behind its last query, and all of its scores are there at once.

Computed in float32 (float64 for float64). The backward takes its weights from the log-sum-exp that it is given, as the
other routes do: out and lse may be those of more keys than these.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.plugins.sdpa.ragged import is_ragged
from mla_plugin.plugins.sdpa.terms import ScoreTerms

MOST_SCORES = 1 << 19
"""2 MB in float32."""
LEAST_QUERIES, LEAST_KEYS = 64, 128
"""With fewer of both the flash kernel is the faster one: 1.05 to 1.4 times at 1, 16 and 32 queries of 4 and 8 heads."""
MOST_ELEMENTS = {2: 1 << 21, 4: 1 << 23, 8: 1 << 22}
"""Of the keys or values, by bytes of an element: those of 2 bytes are copied to float32. One query of 8 heads over 1000
keys takes 0.25 (float32) and 0.45 (bfloat16) of the time that the flash kernel takes for the parts of such a call."""
LEAST_OF_SEQUENCE = 1 << 16
"""A sequence whose queries have as many elements is computed by itself: its heads are then a view of the call's tensors
in any layout, without a copy."""
MOST_COPIED = 1 << 17
"""Elements of a part's queries where inputs are copied to float32: more at once, and the allocator gives the memory of
its largest copies back to the system in every layer. The page faults took 0.05 of a training step of 2 x 128 tokens."""
ROWS = 32
"""Queries of a block of a causal call."""


@functools.lru_cache(maxsize=4096)
def takes(request: AttentionRequest) -> bool:
    """Dense, unequal head dims, few scores, every key with one query head, and no row without keys.

    With equal head dims, which need no padding, the flash kernel takes as long or less.
    """
    len_q, len_kv, band = request.max_seqlen_q, request.max_seqlen_kv, request.band
    if request.head_dim_qk == request.head_dim_v or request.num_heads != request.num_kv_heads or is_ragged(request):
        return False
    if 1 < len_q < LEAST_QUERIES and len_kv < LEAST_KEYS:
        return False
    sequences = request.batch_size * request.num_heads
    largest = sequences * max(len_q, len_kv) * max(request.head_dim_qk, request.head_dim_v)
    is_small = sequences * len_q * len_kv <= MOST_SCORES and largest <= MOST_ELEMENTS[request.dtype.itemsize]
    sees_keys = band.right < 0 or len_q == len_kv or (band.bottom_right and len_q < len_kv)
    return is_small and sees_keys


def _blocks(len_q: int, len_kv: int, terms: ScoreTerms) -> Iterator[tuple[int, int, int]]:
    """First row, number of rows, and number of keys that they see."""
    if terms.band.right < 0:
        yield 0, len_q, len_kv
        return
    for first in range(0, len_q, ROWS):
        rows = min(ROWS, len_q - first)
        yield first, rows, len_kv - len_q + first + rows


@functools.lru_cache(maxsize=2 * ROWS)
def _above_diagonal(rows: int) -> torch.Tensor:
    return torch.ones(rows, rows, dtype=torch.bool, device="cpu").triu_(1)


def _scores(q: torch.Tensor, k: torch.Tensor, terms: ScoreTerms) -> torch.Tensor:
    """Of a block's rows [n H, rows, D], which are scaled, and the keys that they see: -inf where a row does not."""
    scores = torch.bmm(q, k.transpose(1, 2))
    rows = q.shape[1]
    if terms.band.right >= 0 and rows > 1:
        scores[:, :, -rows:].masked_fill_(_above_diagonal(rows), -torch.inf)
    return scores


def _flat(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n, H, ..] as [n H, ..], in this dtype; of one sequence a view, of several contiguous."""
    if x.dtype != dtype:
        x = x.to(dtype=dtype, memory_format=torch.contiguous_format)
    return x.flatten(0, 1)


def _scaled(q: torch.Tensor, dtype: torch.dtype, softmax_scale: float) -> torch.Tensor:
    flat = _flat(q, dtype)
    return flat * softmax_scale if q.dtype == dtype else flat.mul_(softmax_scale)


def _flat_or_new(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n H, S, D] to compute [n, H, S, D] in: a view of ``x`` where a product may be written there, else new memory."""
    if x.dtype == dtype and (x.shape[0] == 1 or x.is_contiguous()):
        return x.flatten(0, 1)
    return x.new_empty((x.shape[0] * x.shape[1], *x.shape[2:]), dtype=dtype)


def _hand_over(wide: torch.Tensor, x: torch.Tensor) -> None:
    """What was computed in ``_flat_or_new(x)`` into x."""
    if not (wide.dtype == x.dtype and (x.shape[0] == 1 or x.is_contiguous())):
        x.copy_(wide.view(x.shape))


def parts(q: torch.Tensor) -> list[tuple[slice, slice]]:
    """Sequences and heads of q [n, H, S_q, D] to compute at a time; none if it is all of them."""
    batch_size, num_heads = q.shape[:2]
    of_sequence = q.numel() // batch_size
    num_sequences = 1 if of_sequence >= LEAST_OF_SEQUENCE else batch_size
    count = num_heads
    if q.dtype.itemsize < 4:
        pieces = -(-num_sequences * of_sequence // MOST_COPIED)
        count = -(-num_heads // pieces)
    if num_sequences == batch_size and count >= num_heads:
        return []
    return [
        (slice(sequence, sequence + num_sequences), slice(head, min(head + count, num_heads)))
        for sequence in range(0, batch_size, num_sequences)
        for head in range(0, num_heads, count)
    ]


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: ScoreTerms, out: torch.Tensor) -> torch.Tensor:
    """Attention of a batch, written into ``out``.

    Args:
        q: [n, H, S_q, head_dim_qk].
        k: [n, H, S_kv, head_dim_qk].
        v: [n, H, S_kv, head_dim_v].
        terms: scale and band are read.
        out: [n, H, S_q, head_dim_v], any strides and dtype.

    Returns:
        lse [n, H, S_q], float32 or float64; NaN where a score is NaN or +inf, or all of a row's are -inf.
    """
    dtype, shape = lse_dtype(q.dtype), q.shape[:3]
    q, k, v = _scaled(q, dtype, terms.softmax_scale), _flat(k, dtype), _flat(v, dtype)
    lse = q.new_empty(q.shape[:2])
    wide = _flat_or_new(out, dtype)
    for first, rows, keys in _blocks(q.shape[1], k.shape[1], terms):
        scores = _scores(q[:, first : first + rows], k[:, :keys], terms)
        weights = torch.softmax(scores, -1)
        torch.bmm(weights, v[:, :keys], out=wide[:, first : first + rows])
        # the highest weight is 1 / sum(exp(scores - the highest score))
        torch.sub(scores.amax(-1), weights.amax(-1).log_(), out=lse[:, first : first + rows])
    _hand_over(wide, out)
    return lse.view(shape)


def forward_of_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``forward`` of one query for each head, with fewer operators; over few keys they take most of the time.

    Returns:
        out [n, H, 1, head_dim_v] in float32 or float64, contiguous, and lse [n, H, 1].
    """
    dtype, (n, num_heads, _, _) = lse_dtype(q.dtype), q.shape
    if q.dtype != dtype:
        q, k, v = q.to(dtype=dtype), k.to(dtype=dtype), v.to(dtype=dtype)
    scores = torch.bmm(q.flatten(0, 1) * softmax_scale, k.flatten(0, 1).transpose(1, 2))
    weights = torch.softmax(scores, -1)
    out = torch.bmm(weights, v.flatten(0, 1))
    lse = torch.sub(scores.amax(-1), weights.amax(-1).log_())  # as in ``forward``
    return out.view(n, num_heads, 1, -1), lse.view(n, num_heads, 1)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    terms: ScoreTerms,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Gradients of a batch; shapes as ``forward``, lse and dlse [n, H, S_q].

    They are written into ``dq``, ``dk`` and ``dv``, of any strides and dtype.
    """
    dtype, len_q = lse_dtype(q.dtype), q.shape[2]
    q, k, v, flat_dout = _scaled(q, dtype, terms.softmax_scale), *(_flat(x, dtype) for x in (k, v, dout))
    delta = (flat_dout.view(dout.shape) * out).sum(-1).flatten(0, 1).unsqueeze(-1)
    lse = lse.flatten(0, 1).unsqueeze(-1)
    if dlse is not None:
        delta -= dlse.flatten(0, 1).unsqueeze(-1)
    wide_q, wide_k, wide_v = (_flat_or_new(x, dtype) for x in (dq, dk, dv))
    for first, rows, keys in reversed(list(_blocks(len_q, k.shape[1], terms))):  # the last block sees all keys
        of_rows, is_last = slice(first, first + rows), first + rows == len_q
        q_block, dout_block = q[:, of_rows], flat_dout[:, of_rows]
        weights = _scores(q_block, k[:, :keys], terms).sub_(lse[:, of_rows]).exp_()
        dscores = torch.bmm(dout_block, v[:, :keys].transpose(1, 2)).sub_(delta[:, of_rows]).mul_(weights)
        # with beta=0 it is not read what the memory holds
        wide_q[:, of_rows].baddbmm_(dscores, k[:, :keys], beta=0, alpha=terms.softmax_scale)
        beta = 0 if is_last else 1
        wide_k[:, :keys].baddbmm_(dscores.transpose(1, 2), q_block, beta=beta)
        wide_v[:, :keys].baddbmm_(weights.transpose(1, 2), dout_block, beta=beta)
    for wide, x in ((wide_q, dq), (wide_k, dk), (wide_v, dv)):
        _hand_over(wide, x)
