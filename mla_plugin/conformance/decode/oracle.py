"""Decode in float64 with the error that roundings explain; see ``budget``."""

from __future__ import annotations

import torch

from mla_plugin.arguments.cache_format import PLAIN
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.conformance.budget import Roundings, Yardstick
from mla_plugin.reference import decode_rows


def expected(tensors: DecodeTensors) -> tuple[Yardstick, Yardstick]:
    """out [B, S_q, H, R] and lse [B, H, S_q]; a query that sees no key gives 0 and -inf."""
    q = torch.cat([tensors.q_nope_abs, tensors.q_rope], -1).double()
    batch, seqlen_q, heads, _ = q.shape
    rank = tensors.c_kv.shape[-1]
    roundings = Roundings.of(tensors.q_nope_abs.dtype)
    out, out_variance = (q.new_zeros((batch, seqlen_q, heads, rank)) for _ in range(2))
    lse = q.new_full((batch, heads, seqlen_q), -torch.inf)
    lse_error = torch.zeros_like(lse)
    leftpads = [0] * batch if tensors.leftpad_kv is None else tensors.leftpad_kv.tolist()
    for b, leftpad in enumerate(leftpads):
        rows = decode_rows(tensors, b, torch.float64)
        for i in range(seqlen_q):
            end = len(rows) - seqlen_q + i + 1 if tensors.causal else len(rows)
            if end <= leftpad:
                continue
            keys = rows[leftpad:end]
            found = _attend(q[b, i], keys, rank, tensors.softmax_scale, roundings, tensors.kv_cache_format != PLAIN)
            out[b, i], out_variance[b, i], lse[b, :, i], lse_error[b, :, i] = found
    return Yardstick(out, out_variance.sqrt()), Yardstick(lse, lse_error)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, rank: int, softmax_scale: float, roundings: Roundings, is_quantised: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One query token: q [H, R + Dr], keys [S_kv, R + Dr] to out, its variance, lse and its error.

    The numbers of a quantised cache may be rounded to the dtype of the queries.
    """
    values = keys[:, :rank]
    scores = (q @ keys.T) * softmax_scale
    sums = roundings.sum * (softmax_scale * (q.abs() @ keys.abs().T) + scores.abs())
    if is_quantised:
        sums += roundings.step * softmax_scale * (q.square() @ keys.square().T).sqrt()
    weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    out = weights @ values
    spread = weights.square() * ((2 * roundings.step * scores).square() + sums.square())
    rounded = 2 * (roundings.step * weights).square() + roundings.tiny**2
    squares = values.square()
    variance = rounded @ squares + (roundings.step * out).square() + roundings.tiny**2
    variance += (spread @ squares - 2 * out * (spread @ values) + out.square() * spread.sum(-1, keepdim=True)).clamp(0)
    if is_quantised:
        variance += (roundings.step * weights).square() @ squares
    # PyTorch's own softmax of 66,000 keys is off by 200 roundings: small weights are rounded alike when they are added
    sum_of_keys = roundings.sum_of(len(values))
    common = sum_of_keys * (1 + lse.abs())[:, None]  # of exp(score - lse), when nothing divides by the sum again
    variance += (sum_of_keys * (weights @ values.abs())).square() + (common * out).square()
    return out, variance, lse, (weights * sums).sum(-1) + roundings.sum * (lse.abs() + 1)
