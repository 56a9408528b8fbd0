"""FlashAttention 3 on Hopper: 192/128 natively, padding between sequences by offsets together with true lengths.

For packed sequences ``cu_seqlens`` is where each one starts in memory and ``seqused`` its true length
(TransformerEngine pull request 2596). The kernels leave padded rows uninitialised, so they are set to 0 afterwards.
A dense batch with a padding mask is handled in the same way, with its rows concatenated.

The kernels read whole tiles, also past a sequence's end, and multiply those rows by weights of 0, but 0 x NaN is NaN.
So they get copies whose rows outside the sequences are 0: of V in the forward, where scores are overwritten but values
are multiplied; of Q, K, V and dout in the backward, where each is multiplied by P or dS of such a row. ``out`` is not
copied: the backward reads it only within the sequences.

The backward has no input for the gradient of the log-sum-exp, and at 192/128 no spare column to carry it, so a request
that trains on lse gets its backward from ``sdpa``.

Sources of the refusals: ``mha_fwd`` and ``mha_bwd`` in FlashAttention's ``hopper/flash_api.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.layout import addressable
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.decode import DecodeOutput, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused
from mla_plugin.plugins.fa3 import decode, providers
from mla_plugin.plugins.shared.dense import keep_forward, kept_forward, kept_forward_on_stream
from mla_plugin.plugins.shared.flash_family import empty_like
from mla_plugin.plugins.shared.packed import Rows
from mla_plugin.plugins.shared.refusals import accepted_without_dlse, beyond_flash_attention, refuse_dlse

MAX_HEAD_DIM = 256
MAX_DETERMINISTIC_HEAD_DIM = 192


def _platform_refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    yield from providers.absence(request.device_type, platform)
    provider = providers.find(platform)
    if provider is not None and request.is_training and not provider.has_backward:
        yield f"is_training=True: {provider.distribution} has no backward, flash-attn-3 has"
    if provider is not None and request.has_sliding_window and not provider.has_windows:
        yield (
            f"window_size={request.window_size} with {provider.distribution}, whose kernel leaves tiles of a window "
            "unmasked; expected (-1, -1) or (-1, 0), or flash-attn-3"
        )


def _head_dim_refusals(request: AttentionRequest) -> Iterator[str]:
    dim_qk, dim_v = request.head_dim_qk, request.head_dim_v
    found, longest = f"head_dim_qk={dim_qk}, head_dim_v={dim_v}", max(dim_qk, dim_v)
    if dim_qk % 8 or dim_v % 8:
        yield f"{found}, expected multiples of 8"
    is_expanded = 128 < dim_qk <= 192 and 96 < dim_v <= 128
    is_absorbed = dim_qk <= 64 and dim_v <= 512
    if not (is_expanded or is_absorbed or dim_qk == dim_v <= MAX_HEAD_DIM):
        yield (
            f"{found}, expected equal ones up to {MAX_HEAD_DIM}, head_dim_qk in 129..192 with head_dim_v in "
            "97..128, and head_dim_qk up to 64 with head_dim_v up to 512"
        )
    elif request.is_training and longest > MAX_HEAD_DIM:
        yield f"{found} in training, the backward takes at most {MAX_HEAD_DIM}"
    elif request.is_training and request.deterministic and longest > MAX_DETERMINISTIC_HEAD_DIM:
        yield f"deterministic=True in training with {found}, expected at most {MAX_DETERMINISTIC_HEAD_DIM}"


def refusals(request: AttentionRequest, platform: Platform) -> Iterator[str]:
    """Every reason why this backend cannot compute the request."""
    yield from _platform_refusals(request, platform)
    yield from _head_dim_refusals(request)
    yield from beyond_flash_attention(request)


@hookimpl
def select_backend(request: AttentionRequest | DecodeRequest, platform: Platform) -> Accepted | Refused:
    """Take every layout, padding, window and bottom-right mask that the installed provider can compute on Hopper."""
    if isinstance(request, DecodeRequest):
        return decode.select(request, platform)
    reasons = tuple(refusals(request, platform))
    if reasons:
        return Refused(reasons)
    provider = providers.installed(platform)
    return accepted_without_dlse(request, f"{provider.distribution} {platform.version(provider.distribution)}")


@hookimpl
def forward(plan: Plan, tensors: AttentionTensors | DecodeTensors) -> AttentionOutput | DecodeOutput:
    """Attention, without padding V; or decode."""
    if isinstance(tensors, DecodeTensors):
        return decode.forward(plan.platform, tensors)
    known = kept_forward("fa3", tensors) or kept_forward_on_stream("fa3", tensors)
    if known is not None:
        return known(tensors)
    request, provider = plan.request, providers.installed(plan.platform)
    rows = Rows.of(request, tensors, takes_dense=provider.takes_dense)
    options = provider.options(request, tensors, rows)
    keep_forward("fa3", tensors, rows, lambda: provider.forward_with(options), has_lengths=provider.needs_lengths)
    q, k = addressable(rows.of_tensor(tensors.q)), addressable(rows.of_tensor(tensors.k))
    v = rows.clean_keys(tensors.v)
    out, lse = provider.forward(q, k, v, options)
    return AttentionOutput(rows.queries(out), rows.lse(lse))


@hookimpl
def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Gradients of q, k and v by the library's own backward.

    Raises:
        ValueError: dlse is given; a request with return_lse=True plans its backward on ``sdpa``.
    """
    refuse_dlse("fa3", dlse)
    request, tensors, provider = plan.request, residuals.tensors, providers.installed(plan.platform)
    rows = Rows.of(request, tensors, takes_dense=provider.takes_dense)
    dout, q = rows.clean_queries(dout), rows.clean_queries(tensors.q)
    k, v = rows.clean_keys(tensors.k), rows.clean_keys(tensors.v)
    out = addressable(rows.of_tensor(residuals.out))
    dq, dk, dv = gradients = (empty_like(q), empty_like(k), empty_like(v))
    options = provider.options(request, tensors, rows)
    provider.backward(dout, q, k, v, out, rows.of_lse(residuals.lse), gradients, options)
    return Gradients(rows.queries(dq), rows.keys(dk), rows.keys(dv))
