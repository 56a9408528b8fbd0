"""Decode over the compressed cache, a sequence at a time, in plain PyTorch: a backend in a separate package."""

from collections.abc import Iterator

import torch

import mla_plugin as mla


def refusals(request: mla.DecodeRequest) -> Iterator[str]:
    if request.device_type != "cpu":
        yield f"device_type={request.device_type!r}, expected 'cpu': the lengths are read on the host"
    if request.has_leftpad_kv:
        yield "has_leftpad_kv=True, expected False"
    if request.batch_invariant:
        yield "batch_invariant=True, expected False: how a CPU's product rounds may depend on the memory"


@mla.hookimpl
def select_backend(
    request: mla.AttentionRequest | mla.DecodeRequest, platform: mla.Platform
) -> mla.Accepted | mla.Refused:
    if not isinstance(request, mla.DecodeRequest):
        return mla.Refused((f"{type(request).__name__}, expected DecodeRequest",))
    reasons = tuple(refusals(request))
    return mla.Refused(reasons) if reasons else mla.Accepted(priority=1)


def keys_of(t: mla.DecodeTensors, b: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """c_kv and k_rope of one sequence, [length, R] and [length, Dr], whether the cache is in pages or not."""
    if t.page_table is None:
        return t.c_kv[b, :length].to(dtype), t.k_rope[b, :length].to(dtype)
    pages = t.page_table[b, : -(-length // t.c_kv.shape[1])].long()
    c_kv, k_rope = (x[pages].flatten(0, 1)[:length].to(dtype) for x in (t.c_kv, t.k_rope))
    return c_kv, k_rope


@mla.hookimpl
def forward(plan: mla.DecodePlan, tensors: mla.DecodeTensors) -> mla.DecodeOutput:
    t = tensors
    batch, seqlen_q, heads, _ = t.q_nope_abs.shape
    exact = torch.promote_types(t.c_kv.dtype, torch.float32)
    out = t.q_nope_abs.new_zeros(t.q_nope_abs.shape)  # a query that sees no key gives 0 and -inf
    lse = t.q_nope_abs.new_full((batch, heads, seqlen_q), -torch.inf, dtype=exact)
    lengths = [t.c_kv.shape[1]] * batch if t.seqlens_kv is None else t.seqlens_kv.tolist()
    for b, length in enumerate(lengths):
        c_kv, k_rope = keys_of(t, b, length, exact)
        for i in range(seqlen_q):
            seen = max(0, length - seqlen_q + i + 1) if t.causal else length
            if seen:
                q, q_rope = t.q_nope_abs[b, i].to(exact), t.q_rope[b, i].to(exact)
                scores = (q @ c_kv[:seen].T + q_rope @ k_rope[:seen].T) * t.softmax_scale
                out[b, i] = (scores.softmax(-1) @ c_kv[:seen]).to(out.dtype)
                lse[b, :, i] = scores.logsumexp(-1)
    return mla.DecodeOutput(out, lse if t.return_lse else None)
