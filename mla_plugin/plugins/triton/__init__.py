"""Our Triton kernels: forward, backward and decode on every NVIDIA device from compute capability 8.0 on.

Refusals are about the request and the device alone; nothing here imports Triton before a forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from mla_plugin import environment
from mla_plugin.arguments.attention import LENGTHS, AttentionTensors
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.decode import DecodeOutput, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.shared.refusals import beyond_the_tensors
from mla_plugin.plugins.triton import decode, needs

if TYPE_CHECKING:
    from mla_plugin.kernels.prefill.packing import Packing

MAX_HEAD_DIM_QK = 576
MAX_HEAD_DIM_V = 512
FULL_FLOAT32_SHARED_MEMORY = 163 * 1024


def _memory_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    memory = platform.shared_memory_per_block
    if memory is None or not needs.MIN_SHARED_MEMORY <= memory < FULL_FLOAT32_SHARED_MEMORY:
        return
    widths = sorted((request.head_dim_qk, request.head_dim_v))
    if request.dtype == torch.float32 and (widths[0] > 256 or widths[1] > 512):
        yield (
            f"head_dim_qk={request.head_dim_qk}, head_dim_v={request.head_dim_v} in float32 with "
            f"shared_memory_per_block={memory}, expected one up to 512 and the other up to 256"
        )


def _shape_refusals(request: AttentionRequest) -> Iterator[str]:
    if request.head_dim_qk % 8 or request.head_dim_qk > MAX_HEAD_DIM_QK:
        yield f"head_dim_qk={request.head_dim_qk}, expected a multiple of 8 up to {MAX_HEAD_DIM_QK}"
    if request.head_dim_v % 8 or request.head_dim_v > MAX_HEAD_DIM_V:
        yield f"head_dim_v={request.head_dim_v}, expected a multiple of 8 up to {MAX_HEAD_DIM_V}"
    if 512 < request.head_dim_qk < MAX_HEAD_DIM_QK and request.head_dim_qk not in (528, 544):
        # anything else is padded to 1024 columns
        yield f"head_dim_qk={request.head_dim_qk}, accepted above 512 is 528, 544 or 576"


def _feature_refusals(request: AttentionRequest) -> Iterator[str]:
    if request.attn_mask_type == "arbitrary":
        yield "attn_mask_type='arbitrary', expected the masks that lengths, causality and windows describe"
    if request.bias_type != "no_bias":
        yield f"bias_type={request.bias_type!r}, expected 'no_bias'"
    if request.dropout_p:
        yield f"dropout_p={request.dropout_p}, expected 0"


def refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    """Every reason why the kernels cannot compute the request."""
    yield from needs.refusals(request.dtype, platform)
    if platform.device_type == "cuda":
        yield from _memory_refusals(request, platform)
    yield from _shape_refusals(request)
    yield from _feature_refusals(request)
    yield from beyond_the_tensors(request)


@hookimpl
def select_backend(request: AttentionRequest | DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take every layout, length, causal mask, window and grouping of heads; no bias, no dropout."""
    if isinstance(request, DecodeRequest):
        return decode.select(request, platform)
    reasons = tuple(refusals(request, platform))
    return Refused(reasons) if reasons else Accepted(notes=tuple(_kernel(request, platform)))


def _kernel(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    """Which kernels run, on GPUs for which there is more than one set."""
    from mla_plugin.kernels.hopper.device import CAPABILITY
    from mla_plugin.kernels.hopper.rule import (
        V_IN_K,
        is_latent,
        plain_backward_because,
        plain_dq_because,
        plain_kernel_because,
    )

    if platform.device_type != "cuda" or platform.compute_capability != CAPABILITY:
        return
    widths = request.head_dim_qk, request.head_dim_v
    given = (CAPABILITY, platform.version("triton"), request.dtype, *widths)
    window_left = request.band.within(request.max_seqlen_q + request.max_seqlen_kv).left
    reason = plain_kernel_because(*given, window_left=window_left, batch_invariant=request.batch_invariant)
    if reason is not None:
        yield f"forward by the plain kernel: {reason}"
    elif is_latent(*widths):
        yield f"forward by the Hopper kernel if v is {V_IN_K}, otherwise by the plain kernel"
    else:
        yield "forward by the Hopper kernel"
    if request.is_training:
        reason = plain_backward_because(*widths) or plain_kernel_because(*given)
        if reason is not None:
            yield f"backward by the plain kernels: {reason}"
        else:
            reason = plain_dq_because(*widths)
            plain = "" if reason is None else f", dQ by the plain kernel: {reason}"
            yield f"backward by the Hopper kernels{plain}"


@functools.cache
def _launches() -> tuple[ModuleType, ModuleType]:
    """The launches of the forward and of the backward; imported at the first call, because Triton is slow to import."""
    from mla_plugin.kernels.prefill import launch_backward, launch_forward

    return launch_forward, launch_backward


def _packing(request: AttentionRequest, tensors: AttentionTensors) -> Packing:
    return _dense_packing(request) if tensors.cu_seqlens_q is None else _packing_of(request, tensors)


@functools.lru_cache(maxsize=4096)
def _dense_packing(request: AttentionRequest) -> Packing:
    """Of calls without lengths: it holds no tensor."""
    return _packing_of(request, None)


def _packing_of(request: AttentionRequest, tensors: AttentionTensors | None) -> Packing:
    from mla_plugin.kernels.prefill.packing import Packing

    lengths = {} if tensors is None else {name: getattr(tensors, name) for name in LENGTHS}
    longest = (request.max_seqlen_q, request.max_seqlen_kv)
    if tensors is not None and request.layout.is_packed:  # any bound is allowed, but kernels count its tiles in int32
        longest = (min(longest[0], tensors.q.shape[0]), min(longest[1], tensors.k.shape[0]))
    return Packing(
        qkv_format=request.qkv_format,
        max_seqlen_q=longest[0],
        max_seqlen_kv=longest[1],
        mask=request.band,
        same_lengths=not request.lengths_may_differ,
        **lengths,
    )


@hookimpl
def forward(plan: Plan, tensors: AttentionTensors | DecodeTensors) -> AttentionOutput | DecodeOutput:
    """One kernel, or the decode kernels; see mla_plugin/kernels/README.md."""
    if isinstance(tensors, DecodeTensors):
        return decode.forward(tensors, batch_invariant=plan.request.batch_invariant)
    launch_forward, _ = _launches()
    # a row's bits follow the tile, which the table chooses by dtype and widths alone, measurements by the lengths too
    batch_invariant = plan.request.batch_invariant
    out, lse = launch_forward.forward(
        tensors.q,
        tensors.k,
        tensors.v,
        tensors.softmax_scale,
        _packing(plan.request, tensors),
        tuned=environment.is_autotuning_requested() and not batch_invariant,
        kept=tensors.kept,
        batch_invariant=batch_invariant,
    )
    return AttentionOutput(out, lse)


@hookimpl
def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Three kernels without atomics: bitwise deterministic."""
    tensors = residuals.tensors
    _, launch_backward = _launches()
    return Gradients(
        *launch_backward.backward(
            tensors.q,
            tensors.k,
            tensors.v,
            residuals.out,
            residuals.lse,
            dout,
            dlse,
            tensors.softmax_scale,
            _packing(plan.request, tensors),
            tuned=environment.is_autotuning_requested(),
        )
    )
