"""FlashInfer's paged MLA decode, 0.6.12 and newer, on NVIDIA devices from compute capability 8.0 on.

Its kernels split the work by a plan that is made on the host, from lengths that the host must know: pass
``seqlens_kv=DecodeLengths(...)``. Facts of the library are from its sources, 0.6.13 and 0.7.2
(``flashinfer/mla``, ``attention/scheduler.cuh``). Nothing here imports it before a call runs: it takes seconds, and
imports on machines where it cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from packaging.version import Version

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.flashinfer import plan as planning
from mla_plugin.plugins.shared.refusals import NO_ATTENTION, batch_dependence, off_cuda

DISTRIBUTION = "flashinfer-python"
MIN_VERSION = Version("0.6.12")
FIRST_WITHOUT_ROPE = Version("0.7")
FA3_RANKS = (512,)
"""Its Hopper kernel is wrong for ranks 128 and 256 and reads out of bounds, seen on an H200 with 0.6.13."""
FA3_MOST_ROPE = 64
"""With 128 columns its launch fails on an H200 (0.6.13): the queries and two tiles of keys exceed the shared memory."""
MAX_WORK_ITEMS = 16_384
"""Capacity of a plan: tiles of rows over all sequences, and their splits."""


def kernel(request: DecodeRequest, capability: tuple[int, int] | None) -> str:
    """FlashInfer's name of the kernel: its Hopper kernel if it supports the rank and the rotary columns."""
    # fa2 is include/flashinfer/attention/mla.cuh, which sums rows of 16-bit weights: lse is off by up to 1e-3
    # fa2 has no room on Hopper for what fa3 has none for, so its shared memory refuses that
    fits = request.kv_lora_rank in FA3_RANKS and request.qk_rope_head_dim <= FA3_MOST_ROPE
    return "fa3" if capability == (9, 0) and fits else "fa2"


def _package_refusals(platform: Platform) -> Iterator[str]:
    found = platform.version(DISTRIBUTION)
    if found is None:
        yield 'flashinfer-python is not installed: pip install "mla-plugin[flashinfer]"'
        return
    if Version(found) < MIN_VERSION:
        yield f"flashinfer-python={found} < {MIN_VERSION}"
    for companion in ("flashinfer-jit-cache", "flashinfer-cubin"):
        version = platform.version(companion)
        if version is not None and Version(version).public != Version(found).public:
            yield f"{companion}={version} with flashinfer-python={found}: it does not import unless they agree"
    if platform.version("flashinfer-jit-cache") is None:
        for tool in sorted({"nvcc", "ninja"} - platform.tools):
            yield f"{tool} is not found, with which it compiles its kernels; install it or flashinfer-jit-cache"


def _device_refusals(request: DecodeRequest, platform: Platform) -> Iterator[str]:
    capability, memory = platform.compute_capability, platform.shared_memory_per_block
    off_device = tuple(off_cuda(request.device_type, platform.device_type))
    if off_device:
        yield from off_device
    elif capability is None or capability < (8, 0):
        yield f"compute_capability={capability} < (8, 0)"
    elif memory is not None and kernel(request, capability) == "fa2":
        needed = fa2_shared_memory(request.kv_lora_rank, request.qk_rope_head_dim, memory)
        if needed > memory:
            widths = f"kv_lora_rank={request.kv_lora_rank}, qk_rope_head_dim={request.qk_rope_head_dim}"
            yield f"shared_memory_per_block={memory} < {needed}, for {widths}"


def fa2_shared_memory(rank: int, rope: int, available: int) -> int:
    """Bytes of shared memory of a thread block; how many keys are in flight depends on the multiprocessor's."""
    per_multiprocessor = available + 1024
    keys = 128 if per_multiprocessor >= 221_696 else 64 if per_multiprocessor >= 147_968 else 16
    return max(64 * (rank + rope) * 2 + keys * (rank + max(rope, 64)) * 2 + 544, 64 * rank * 2)


def _shape_refusals(request: DecodeRequest, platform: Platform) -> Iterator[str]:
    rank, rope, found = request.kv_lora_rank, request.qk_rope_head_dim, platform.version(DISTRIBUTION)
    if request.dtype not in (torch.bfloat16, torch.float16):
        yield f"dtype={request.dtype}, expected bfloat16 or float16"
    if rank % 128:
        yield f"kv_lora_rank={rank}, expected a multiple of 128"
    if rope % 64:
        yield f"qk_rope_head_dim={rope}, expected a multiple of 64"
    if not rope and found is not None and Version(found) < FIRST_WITHOUT_ROPE:
        yield f"qk_rope_head_dim=0 with flashinfer-python={found} < {FIRST_WITHOUT_ROPE}"
    if request.page_size is None:
        yield "page_size=None, expected a paged cache"
    if not request.has_host_lengths:
        yield "has_host_lengths=False: it plans on the host, pass seqlens_kv=DecodeLengths(host_lengths, ...)"
    if request.return_lse and kernel(request, platform.compute_capability) == "fa2":
        yield "return_lse=True, expected False: its fa2 kernel sums weights that were rounded to the cache's dtype"
    yield from batch_dependence(request, "FlashInfer's plan splits sequences by the lengths of all")
    if request.has_leftpad_kv:
        yield "has_leftpad_kv=True, expected False"
    if not request.has_aligned_rows:
        yield "has_aligned_rows=False: it reads 16 bytes at a time, rows of c_kv and k_rope must start on 16 bytes"
    rows = request.seqlen_q * request.num_heads
    tile = 128 if rows > 64 else 64
    if request.causal and rows > tile and tile % request.num_heads:
        yield (
            f"causal with seqlen_q={request.seqlen_q}, num_heads={request.num_heads}: a tile of {tile} rows ends "
            f"within a query and may lose its last key; expected divisors of {tile} heads"
        )
    if request.batch_size * -(-rows // tile) > MAX_WORK_ITEMS // 2:
        yield f"batch_size={request.batch_size} of {rows} rows is more than {MAX_WORK_ITEMS // 2} tiles of {tile}"


def refusals(request: DecodeRequest, platform: Platform) -> Iterator[str]:
    """Every reason why this backend cannot compute the request."""
    yield from _package_refusals(platform)
    yield from _device_refusals(request, platform)
    yield from _shape_refusals(request, platform)


@hookimpl
def select_backend(request: AttentionRequest | DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take 16-bit paged decode whose lengths the host knows."""
    if isinstance(request, AttentionRequest):
        return NO_ATTENTION
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    return Accepted(notes=(f"FlashInfer's {kernel(request, platform.compute_capability)} kernel",))


@hookimpl
def forward(plan: DecodePlan, tensors: DecodeTensors) -> DecodeOutput:
    """Run with the plan stored in the lengths; the first call for these lengths creates it."""
    name = kernel(plan.request, plan.platform.compute_capability)
    return planning.run(name, tensors)
