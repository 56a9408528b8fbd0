"""The Triton decode kernels: absorbed MLA over a contiguous or paged cache, any page size, split over the keys."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from mla_plugin import environment
from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.hooks.decode import DecodeOutput, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.kernels.decode.hopper import rule
from mla_plugin.kernels.decode.transposed import rule as transposed_rule
from mla_plugin.kernels.decode.wide import rule as wide_rule
from mla_plugin.kernels.hopper.device import CAPABILITY, unfit_device_because
from mla_plugin.plugins.triton import needs

MAX_COLUMNS = 576
MULTI_PROCESSORS = 132
"""Of an H100 and an H200; assumed for ``explain`` where the platform does not say."""


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 15).bit_length()


def columns(request: DecodeRequest) -> int:
    """Columns that a program holds: each width rounded up to a power of two; a rank that is a sum of two stays."""
    rank, rope = request.kv_lora_rank, request.qk_rope_head_dim
    whole = _power_of_2(rank)
    rest = rank - whole // 2
    if 16 <= rest == _power_of_2(rest) < whole // 2:
        whole = rank
    return whole + (_power_of_2(rope) if rope else 0)


def refusals(request: DecodeRequest, platform: Platform) -> Iterator[str]:
    """Every reason why the kernels cannot compute the request."""
    yield from needs.refusals(request.dtype, platform)
    if request.batch_invariant and request.has_leftpad_kv and request.page_size is not None:
        yield (
            f"batch_invariant=True with leftpad_kv and page_size={request.page_size}, expected a contiguous cache: "
            "chunks begin at the first key that is seen, which in pages is no tile's first"
        )
    if request.kv_cache_format == FP8_DS_MLA and request.dtype == torch.float16:
        yield "dtype=torch.float16 with kv_cache_format='fp8_ds_mla', expected bfloat16 or float32"
    if columns(request) > MAX_COLUMNS:
        yield (
            f"kv_lora_rank={request.kv_lora_rank} and qk_rope_head_dim={request.qk_rope_head_dim} take "
            f"{columns(request)} columns after rounding up, expected up to {MAX_COLUMNS}"
        )


def select(request: DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take every layout of the cache, any page size, several query tokens and left padding."""
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    return Accepted(notes=tuple(_kernel(request, platform)), kv_cache_formats=(FP8, FP8_DS_MLA))


def _kernel(request: DecodeRequest, platform: Platform) -> Iterator[str]:
    """Which kernel runs, on GPUs for which there are several.

    A request does not say whether sequences share a contiguous cache (batch stride 0). The wide kernel does not take
    one, nor does the Hopper kernel in the queries' dtype without batch_invariant.
    Lengths are rounded up to a power of two, so that a batch near the least size that the transposed kernel, with 17 to
    32 (query, head) pairs, or the wide kernel takes may run by another one.
    """
    if platform.device_type != "cuda" or platform.compute_capability != CAPABILITY:
        return
    is_wide = _rows(request) > transposed_rule.MAX_ROWS
    name = "wide" if is_wide else "transposed"
    other = _not_wide_because(request, platform) if is_wide else _not_transposed_because(request, platform)
    if other is None:
        yield f"by the {name} kernel"
        return
    reason = plain_kernel_because(request, platform)
    yield "by the Hopper kernel" if reason is None else f"by the plain kernel: {reason}"
    if request.kv_cache_format == FP8:
        yield f"not by the {name} kernel: {other}"


def _rows(request: DecodeRequest) -> int:
    """(query, head) pairs of a sequence."""
    return request.seqlen_q * request.num_heads


def _facts(request: DecodeRequest) -> dict[str, Any]:
    """Arguments that the rules of all kernels have."""
    return {
        "dtype": request.dtype,
        "kv_lora_rank": request.kv_lora_rank,
        "qk_rope_head_dim": request.qk_rope_head_dim,
        "rows": _rows(request),
        "page_size": request.page_size,
        "kv_cache_format": request.kv_cache_format,
        "has_leftpad_kv": request.has_leftpad_kv,
        "has_aligned_rows": request.has_aligned_rows,
        "batch_invariant": request.batch_invariant,
    }


def _unfit(platform: Platform) -> str | None:
    return unfit_device_because(platform.compute_capability, platform.version("triton"))


def _not_transposed_because(request: DecodeRequest, platform: Platform) -> str | None:
    """Why the transposed kernel does not compute such calls; None: it does."""
    return (
        _unfit(platform)
        or transposed_rule.other_kernel_because(**_facts(request))
        or transposed_rule.few_tiles_because(_rows(request), _tiles(request), _processors(platform))
    )


def _not_wide_because(request: DecodeRequest, platform: Platform) -> str | None:
    """Why the wide kernel does not compute such calls; None: it does."""
    return (
        _unfit(platform)
        or wide_rule.other_kernel_because(**_facts(request), return_lse=request.return_lse)
        or wide_rule.few_tiles_because(_rows(request), _tiles(request), _processors(platform))
    )


def _processors(platform: Platform) -> int:
    return platform.multi_processor_count or MULTI_PROCESSORS


def _tiles(request: DecodeRequest) -> int:
    """At most so many key tiles."""
    return request.batch_size * max(1, -(-request.max_seqlen_kv // rule.TILE))


def plain_kernel_because(request: DecodeRequest, platform: Platform) -> str | None:
    """Why the plain kernel computes such calls; None: the Hopper kernel does."""
    return _unfit(platform) or rule.plain_kernel_because(**_facts(request))


def forward(tensors: DecodeTensors, *, batch_invariant: bool) -> DecodeOutput:
    """The decode kernel and, with more than one split, the kernel that sums; see mla_plugin/kernels/README.md."""
    launch, invariant = _launches()
    if batch_invariant:
        return DecodeOutput(*invariant.decode(tensors, known_of(tensors), environment.batch_invariant_chunk()))
    return DecodeOutput(*launch.decode(tensors, known_of(tensors)))


@functools.cache
def _launches() -> tuple[ModuleType, ModuleType]:
    """The launches of the decode kernels and of the batch-invariant ones; imported late: Triton is slow to import."""
    from mla_plugin.kernels.decode import launch
    from mla_plugin.kernels.decode.invariant import launch as invariant

    return launch, invariant
