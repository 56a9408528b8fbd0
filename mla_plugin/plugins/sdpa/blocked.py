"""Attention in plain PyTorch over blocks of query rows, for what no kernel supports: bias, dropout, masks, windows.

A block has [rows, keys] scores, only for the range of keys that the window and the causal mask leave visible, so memory
grows with S_kv and not with S_q * S_kv. Low-precision inputs are computed in float32. The order of
the blocks is fixed, which makes the result deterministic and lets the backward draw the same dropout as the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mla_plugin.plugins.sdpa.terms import ScoreTerms, window

BLOCK_ELEMENTS = 1 << 22
"""Target number of scores of a block: 16 MB in float32, so that four such temporaries fit a large CPU cache."""
MIN_BLOCK_ROWS = 16


@dataclass(frozen=True)
class Block:
    """Some sequences of the batch, some of their query rows, and the range of keys that these may see."""

    batch: slice
    rows: slice
    keys: slice


def blocks(q: torch.Tensor, len_kv: int, terms: ScoreTerms) -> Iterator[Block]:
    """The blocks of q [B, H, S_q, D], always in the same order; blocks whose rows see no key are omitted."""
    batch_size, num_heads, len_q, _ = q.shape
    if not (batch_size and num_heads and len_q and len_kv):
        return
    rows = min(len_q, max(MIN_BLOCK_ROWS, BLOCK_ELEMENTS // (num_heads * len_kv)))
    batch = max(1, BLOCK_ELEMENTS // (num_heads * rows * len_kv)) if rows == len_q else 1
    has_device_offset = terms.lens_q is not None and terms.band.bottom_right
    for first in range(0, batch_size, batch):
        sequences = slice(first, min(first + batch, batch_size))
        for row in range(0, len_q, rows):
            part = slice(row, min(row + rows, len_q))
            keys = slice(0, len_kv)
            if not has_device_offset:
                keys = terms.band.keys(part, terms.band.offset(len_q, len_kv), len_kv)
            if keys.start < keys.stop:
                yield Block(sequences, part, keys)


def _hidden(block: Block, terms: ScoreTerms, lens: tuple[int, int], device: torch.device) -> torch.Tensor | None:
    """True where a row of the block does not see a key, broadcastable to [b, H, rows, keys]; None when all are seen."""
    query = torch.arange(block.rows.start, block.rows.stop, device=device).unsqueeze(-1)
    key = torch.arange(block.keys.start, block.keys.stop, device=device)
    offset: int | torch.Tensor = terms.band.offset(*lens)
    masks = [window(terms.hidden, block.batch, None, block.rows, block.keys)]
    if terms.lens_q is not None and terms.lens_kv is not None:
        len_q, len_kv = (x[block.batch].view(-1, 1, 1, 1) for x in (terms.lens_q, terms.lens_kv))
        masks += [query >= len_q, key >= len_kv]
        offset = len_kv - len_q if terms.band.bottom_right else 0
    masks.append(terms.band.hides(query, key, offset))
    hidden = None
    for mask in masks:
        if mask is not None:
            hidden = mask if hidden is None else hidden | mask
    return hidden


def _scores(
    q: torch.Tensor, k: torch.Tensor, block: Block, terms: ScoreTerms, len_q: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scores of a block, [b, H, rows, keys], -inf where a key is hidden, and which of them are hidden.

    q [b, H, rows, D] belongs to the block; k [B, H_kv, S_kv, D] is whole. A bias of -inf masks a key.
    """
    hidden = _hidden(block, terms, (len_q, k.shape[2]), q.device)
    scores = _per_kv_head(q, k.shape[1]) @ k[block.batch, :, block.keys].transpose(-1, -2)
    scores = scores.view(*q.shape[:3], -1)
    bias = window(terms.bias, block.batch, None, block.rows, block.keys)
    if bias is not None and terms.bias_before_scale:
        scores += bias
    scores *= terms.softmax_scale
    if bias is not None:
        if not terms.bias_before_scale:
            scores += bias
        hidden = bias == -torch.inf if hidden is None else hidden | (bias == -torch.inf)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    return scores, hidden


def _softmax(scores: torch.Tensor, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and lse [b, H, rows, 1]: 0 and -inf for a row that sees no key.

    A row that sees keys but has a score of +inf, or only scores of -inf, has NaN as weights and as lse, from which the
    backward computes the weights.
    """
    lse, weights = scores.logsumexp(-1, keepdim=True), scores.softmax(-1)
    has_no_softmax = lse.isinf()
    if hidden is not None:
        sees_no_key = hidden.all(-1, keepdim=True)
        weights.masked_fill_(sees_no_key, 0)
        has_no_softmax &= ~sees_no_key
    return weights, lse.masked_fill_(has_no_softmax, torch.nan)


def _per_kv_head(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[b, H, rows, n] as [b, H_kv, H / H_kv * rows, n]: the query heads of a key-value head become rows."""
    return x.reshape(x.shape[0], num_kv_heads, -1, x.shape[-1])


def _kept(like: torch.Tensor, terms: ScoreTerms) -> torch.Tensor | None:
    """The next block of dropout factors: 0 or 1 / (1 - dropout_p); None without dropout."""
    if terms.generator is None:
        return None
    keep = 1 - terms.dropout_p
    return torch.empty_like(like).bernoulli_(keep, generator=terms.generator).div_(keep)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: ScoreTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a batch.

    Args:
        q: [B, H, S_q, head_dim_qk], any strides.
        k: [B, H_kv, S_kv, head_dim_qk].
        v: [B, H_kv, S_kv, head_dim_v].
        terms: everything else.

    Returns:
        out [B, H, S_q, head_dim_v] and lse [B, H, S_q], float32 or float64; a row without keys has 0 and -inf.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(dtype), v.to(dtype)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
    for block in blocks(q, k.shape[2], terms):
        scores, hidden = _scores(q[block.batch, :, block.rows].to(dtype), k, block, terms, q.shape[2])
        weights, part_lse = _softmax(scores, hidden)
        kept = _kept(weights, terms)
        if kept is not None:
            weights *= kept
        part = (_per_kv_head(weights, v.shape[1]) @ v[block.batch, :, block.keys]).view(*weights.shape[:3], -1)
        # 0 * NaN is NaN: a row that sees no key must not read the keys of other rows
        out[block.batch, :, block.rows] = part.masked_fill_(part_lse == -torch.inf, 0)
        lse[block.batch, :, block.rows] = part_lse.squeeze(-1)
    return out, lse


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
    """Gradients of a batch; shapes as ``forward``, lse and dlse [B, H, S_q], results in float32 or float64.

    The weights are ``exp(score - lse)`` with the given lse, not a new softmax: in context parallelism lse and out are
    of the keys of all ranks, and k and v of one.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(dtype), v.to(dtype)
    num_kv_heads = k.shape[1]
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    for block in blocks(q, k.shape[2], terms):
        q_block, out_block, dout_block = (x[block.batch, :, block.rows].to(dtype) for x in (q, out, dout))
        lse_block = lse[block.batch, :, block.rows].unsqueeze(-1)
        sees_no_key = lse_block == -torch.inf
        q_block, dout_block = (x.masked_fill(sees_no_key, 0) for x in (q_block, dout_block))
        scores, _ = _scores(q_block, k, block, terms, q.shape[2])
        weights = scores.sub_(lse_block).exp_().masked_fill_(sees_no_key, 0)
        dout_rows = _per_kv_head(dout_block, num_kv_heads)
        dweights = (dout_rows @ v[block.batch, :, block.keys].transpose(-1, -2)).view_as(weights)
        kept = _kept(weights, terms)
        dropped = weights
        if kept is not None:
            dweights *= kept
            dropped = weights * kept
        dv[block.batch, :, block.keys] += _per_kv_head(dropped, num_kv_heads).transpose(-1, -2) @ dout_rows
        delta = (dout_block * out_block).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= dlse[block.batch, :, block.rows].unsqueeze(-1).masked_fill(sees_no_key, 0)
        dscores = weights.mul_(dweights.sub_(delta))
        _add_dbias(dscores, block, terms)
        rows = _per_kv_head(dscores.mul_(terms.softmax_scale), num_kv_heads)
        dq_block = (rows @ k[block.batch, :, block.keys]).view_as(q_block)
        dq[block.batch, :, block.rows] = dq_block.masked_fill_(sees_no_key, 0)
        dk[block.batch, :, block.keys] += rows.transpose(-1, -2) @ _per_kv_head(q_block, num_kv_heads)
    return dq, dk, dv


def _add_dbias(dscores: torch.Tensor, block: Block, terms: ScoreTerms) -> None:
    dbias = window(terms.dbias, block.batch, None, block.rows, block.keys)
    if dbias is not None:
        dbias.add_(dscores.sum_to_size(dbias.shape), alpha=terms.softmax_scale if terms.bias_before_scale else 1.0)
