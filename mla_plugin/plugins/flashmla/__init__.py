"""FlashMLA's dense decode on Hopper: pages of 64 that hold c_kv and k_rope side by side, kv_lora_rank 512, rope 64.

It distributes tiles of 64 keys evenly over the SMs by a schedule that a kernel computes from the lengths, so a call can
be captured and replayed with other lengths: each graph holds that kernel once. Facts of the library are from its
sources, ``csrc/api/dense_decode.h`` and ``csrc/sm90/decode/dense`` of deepseek-ai/FlashMLA; dense decode exists only
for compute capability 9.0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.layout import aligned, joined
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.flashmla import providers
from mla_plugin.plugins.shared.refusals import NO_ATTENTION, batch_dependence

PAGE_SIZE, RANK, ROPE = 64, 512, 64
TILE = 64
"""Query rows, S_q H of them, that a program holds."""
MAX_BATCH = 4096
"""The schedule's kernel keeps all sequences in one block's memory; the first releases reserved it for this many."""
MAX_PARTS = 2**31 - 1
"""Elements of partial results, whose addresses the kernel counts in 32 bits."""
MULTI_PROCESSORS = 132
"""SMs of an H100 or H200, for a platform that does not say."""
LEAST_SCALE = 2**-10
"""The kernel hides a key by a score of -1e33 times the scale, which must stay below the -1e30 of a row without keys."""


def refusals(request: DecodeRequest, platform: Platform) -> Iterator[str]:
    """Every reason why this backend cannot compute the request."""
    yield from providers.absence(request.device_type, platform)
    if request.dtype not in (torch.bfloat16, torch.float16):
        yield f"dtype={request.dtype}, expected bfloat16 or float16"
    if request.kv_lora_rank != RANK:
        yield f"kv_lora_rank={request.kv_lora_rank}, expected {RANK}"
    if request.qk_rope_head_dim != ROPE:
        yield f"qk_rope_head_dim={request.qk_rope_head_dim}, expected {ROPE}"
    if request.page_size != PAGE_SIZE:
        yield f"page_size={request.page_size}, expected pages of {PAGE_SIZE}"
    elif not request.max_seqlen_kv:
        yield "max_seqlen_kv=0: it reads the first entry of a sequence's pages, expected at least 1"
    yield from batch_dependence(request, "FlashMLA's schedule splits sequences by the lengths of all")
    if request.has_leftpad_kv:
        yield "has_leftpad_kv=True, expected False"
    if not request.has_joined_rows:
        yield "has_joined_rows=False: it reads c_kv and k_rope as one row, expected columns of one tensor"
    if not request.has_aligned_rows:
        yield "has_aligned_rows=False: it reads 16 bytes at a time, rows of the cache must start on 16 bytes"
    yield from _size_refusals(request, platform.multi_processor_count or MULTI_PROCESSORS)


def _size_refusals(request: DecodeRequest, multi_processors: int) -> Iterator[str]:
    batch, rows = request.batch_size, request.seqlen_q * request.num_heads
    if batch > MAX_BATCH:
        yield f"batch_size={batch} > {MAX_BATCH}"
    if -(-rows // TILE) > multi_processors:
        yield (
            f"seqlen_q={request.seqlen_q}, num_heads={request.num_heads}: {rows} query rows of a sequence, expected "
            f"up to {TILE * multi_processors}, one tile of {TILE} for each multiprocessor"
        )
    parts = (batch + multi_processors) * rows * RANK
    if parts > MAX_PARTS:
        yield (
            f"batch_size={batch}, seqlen_q={request.seqlen_q}, num_heads={request.num_heads}: {parts} elements of "
            f"partial results > {MAX_PARTS}"
        )


@hookimpl
def select_backend(request: AttentionRequest | DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take 16-bit decode of DeepSeek's widths over pages of 64 on Hopper."""
    if isinstance(request, AttentionRequest):
        return NO_ATTENTION
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    provider = providers.installed(platform)
    return Accepted(notes=(f"{provider.distribution} {platform.version(provider.distribution)}",))


@hookimpl
def forward(plan: DecodePlan, tensors: DecodeTensors) -> DecodeOutput:
    """Launch the kernel, a reduction if sequences are split, and the schedule kernel if there is no schedule yet."""
    provider = providers.installed(plan.platform)
    q = aligned(joined(tensors.q_nope_abs, tensors.q_rope))
    cache = joined(tensors.c_kv, tensors.k_rope).unsqueeze(2)
    page_table, seqlens_kv = tensors.page_table, tensors.seqlens_kv
    assert page_table is not None
    assert seqlens_kv is not None
    if page_table.stride(1) != 1:  # of one column
        page_table = page_table.as_strided(page_table.shape, (page_table.stride(0), 1))
    lengths, (seqlen_q, heads) = tensors.shared_lengths, q.shape[1:3]
    shared = None if lengths is None else lengths.shared(("flashmla", provider, seqlen_q, heads, tensors.causal))
    schedule = None if shared is None else shared.value
    is_new = schedule is None
    if schedule is None:
        schedule = provider.schedule(seqlens_kv, seqlen_q * heads)
    out, lse = provider.decode(q, cache, page_table, seqlens_kv, schedule, tensors.softmax_scale, tensors.causal)
    if shared is not None and is_new:
        shared.keep(schedule)  # which later releases write in their first call
    if tensors.causal and tensors.softmax_scale < LEAST_SCALE:
        seqlen_q = q.shape[1]
        sees_none = torch.arange(seqlen_q, device=q.device) < seqlen_q - seqlens_kv[:, None]  # [B, S_q]
        out = out.masked_fill(sees_none[..., None, None], 0.0)
        lse = lse.masked_fill(sees_none[:, None], torch.inf)
    if not tensors.return_lse:
        return DecodeOutput(out, None)
    return DecodeOutput(out, lse.masked_fill(lse == torch.inf, -torch.inf))
