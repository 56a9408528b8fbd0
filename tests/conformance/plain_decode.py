"""A correct decode backend in plain PyTorch, one step a line, so that ``broken_decode`` can break it line by line."""

import torch

from mla_plugin import Accepted, DecodeOutput, DecodeRequest, Refused, hookimpl

EXACT = None
WEIGHTS = None
STATE = {}


@hookimpl
def select_backend(request, platform):
    if not isinstance(request, DecodeRequest):
        return Refused(("AttentionRequest, expected DecodeRequest",))
    if request.batch_invariant:  # how a CPU's product rounds may depend on the memory
        return Refused(("batch_invariant=True, expected False",))
    return Accepted(kv_cache_formats=("fp8", "fp8_ds_mla"))


def rows_of(cache, t, b, length):
    if t.page_table is None:
        return cache[b, :length]
    used = -(-length // cache.shape[1])
    pages = t.page_table[b, :used]
    return cache[pages.long()].flatten(0, 1)[:length]


def e4m3(cache, t, b, length):
    return rows_of(cache, t, b, length).contiguous().view(torch.float8_e4m3fn)


def lengths_of(t):
    if t.seqlens_kv is None:
        return [t.c_kv.shape[1]] * t.c_kv.shape[0]
    return t.seqlens_kv.tolist()


@hookimpl
def forward(plan, tensors):
    t, request = tensors, plan.request  # noqa: F841, a fault may use it
    exact = EXACT or torch.promote_types(t.q_nope_abs.dtype, torch.float32)
    batch, seqlen_q, heads, rank = t.q_nope_abs.shape  # noqa: RUF059
    out = t.q_nope_abs.new_zeros(t.q_nope_abs.shape)
    lse = torch.full((batch, heads, seqlen_q), -torch.inf, dtype=torch.promote_types(t.q_nope_abs.dtype, torch.float32))
    lengths = lengths_of(t)
    starts = [0] * batch if t.leftpad_kv is None else t.leftpad_kv.tolist()
    for b in range(batch):
        length, start = lengths[b], starts[b]
        values = rows_of(t.c_kv, t, b, length).to(exact)
        ropes = rows_of(t.k_rope, t, b, length).to(exact)
        if t.kv_cache_format == "fp8":
            values, ropes = e4m3(t.c_kv, t, b, length).to(exact), e4m3(t.k_rope, t, b, length).to(exact)
            values = values * t.kv_scale.to(exact)
            ropes = ropes * t.kv_scale.to(exact)
        if t.kv_cache_format == "fp8_ds_mla":
            scales = rows_of(t.kv_scale, t, b, length).to(exact)
            tiles = e4m3(t.c_kv, t, b, length).to(exact).unflatten(-1, (4, 128))
            values = (tiles * scales[..., None]).flatten(-2)
        for i in range(seqlen_q):
            end = length - seqlen_q + i + 1 if t.causal else length
            if end <= start:
                continue
            v, r = values[start:end], ropes[start:end]
            scores = t.q_nope_abs[b, i].to(exact) @ v.T + t.q_rope[b, i].to(exact) @ r.T
            scores = scores * t.softmax_scale
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp()
            total = weights.sum(-1, keepdim=True)
            weights = weights.to(WEIGHTS or t.q_nope_abs.dtype).to(exact)
            out[b, i] = (weights @ v / total).to(out.dtype)
            lse[b, :, i] = (top + total.log()).squeeze(-1).to(lse.dtype)
    return DecodeOutput(out, lse if t.return_lse else None)
