"""FlashAttention 3's decode on Hopper: ``qv`` adds a second product to the scores, against the values themselves.

softmax(scale (q k^T + qv v^T)) v, with q the rope part, qv the absorbed part and v the latents, so c_kv is both. Its
own package, vLLM and SGLang carry the same kernel. It decides about splits on the device: a call can be captured in a
CUDA graph and replayed with other lengths. Source of the refusals: ``mha_fwd`` in FlashAttention's
``hopper/flash_api.cpp``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.arguments.layout import aligned
from mla_plugin.hooks.decode import DecodeOutput, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.fa3 import providers
from mla_plugin.plugins.shared.dense import key_of_stream
from mla_plugin.plugins.shared.refusals import batch_dependence

RANKS = (256, 512)
MAX_ROPE = 64


def refusals(request: DecodeRequest, platform: Platform) -> Iterator[str]:
    """Every reason why this backend cannot compute the request."""
    yield from providers.absence(request.device_type, platform)
    if request.dtype not in (torch.bfloat16, torch.float16):
        yield f"dtype={request.dtype}, expected bfloat16 or float16"
    if request.kv_lora_rank not in RANKS:
        yield f"kv_lora_rank={request.kv_lora_rank}, expected 256 or 512"
    rope = request.qk_rope_head_dim
    if rope % 8 or not 0 < rope <= MAX_ROPE:
        yield f"qk_rope_head_dim={rope}, expected a multiple of 8 from 8 to {MAX_ROPE}"
    yield from batch_dependence(request, "FlashAttention 3 chooses the number of splits by batch and lengths")
    if request.has_leftpad_kv:
        yield "has_leftpad_kv=True, expected False"
    if not request.has_aligned_rows:
        yield "has_aligned_rows=False: it reads 16 bytes at a time, rows of c_kv and k_rope must start on 16 bytes"


def select(request: DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take 16-bit decode of ranks 256 and 512 on Hopper, contiguous or paged."""
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    provider = providers.installed(platform)
    # FlashAttention 3 leaves out splits whose sums are NaN, so the row is 0
    return Accepted(notes=(f"{provider.distribution} {platform.version(provider.distribution)}, qv",), drops_nan=True)


def forward(platform: Platform, tensors: DecodeTensors) -> DecodeOutput:
    """One launch, and a second that sums where the keys are split."""
    provider = providers.installed(platform)
    q_nope_abs, q_rope = aligned(tensors.q_nope_abs), aligned(tensors.q_rope)
    c_kv, k_rope = tensors.c_kv.unsqueeze(2), tensors.k_rope.unsqueeze(2)  # [pages or B, rows, 1, columns]
    seqlens_kv = _whole_cache(tensors) if tensors.seqlens_kv is None else tensors.seqlens_kv
    if isinstance(provider, providers.Vllm):
        queries_and_cache = (q_rope, k_rope, c_kv, q_nope_abs, seqlens_kv, tensors.page_table)
        found = _vllm_operator(provider.operator())(*queries_and_cache, tensors.softmax_scale, tensors.causal)
        return DecodeOutput(found[0], _lse(found[1]) if tensors.return_lse else None)
    result = provider.library().flash_attn_with_kvcache(
        q_rope,
        k_rope,
        c_kv,
        qv=q_nope_abs,
        cache_seqlens=seqlens_kv,
        page_table=tensors.page_table,
        softmax_scale=tensors.softmax_scale,
        causal=tensors.causal,
        return_softmax_lse=tensors.return_lse,
    )
    if not tensors.return_lse:
        return DecodeOutput(result[0] if isinstance(result, tuple) else result, None)
    return DecodeOutput(result[0], _lse(result[1]))


def _whole_cache(tensors: DecodeTensors) -> torch.Tensor:
    """The lengths [B], int32, of sequences that fill a contiguous cache: one launch for all layers of a step."""
    c_kv, kept = tensors.c_kv, known_of(tensors).kept
    key = key_of_stream("fa3 lengths", c_kv)
    found = None if key is None else kept.get(key)
    if found is None:
        found = torch.full(c_kv.shape[:1], c_kv.shape[1], dtype=torch.int32, device=c_kv.device)
        if key is not None:
            kept[key] = found
    return found


def _lse(lse: torch.Tensor) -> torch.Tensor:
    """Some builds give +inf for a query that sees no key."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


@functools.cache
def _vllm_operator(operator: Any) -> providers.ByPlace:
    """vLLM's operator, which chooses the number of splits itself."""
    names = ("q", "k", "v", "q_v", "seqused_k", "page_table", "softmax_scale", "is_causal")
    return providers.ByPlace(operator, names, window_size_left=-1, window_size_right=-1, num_splits=0)
