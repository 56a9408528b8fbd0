"""Reasons that several backends share, for their ``select_backend``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.refusals import BATCH_DEPENDENT
from mla_plugin.hooks.refusals import beyond_plain_attention as beyond_plain_attention
from mla_plugin.hooks.refusals import beyond_the_tensors as beyond_the_tensors
from mla_plugin.hooks.types import FORWARD_ONLY, Accepted, Refused

NO_DECODE = Refused(("DecodeRequest, expected AttentionRequest: this backend reads expanded keys and values",))
"""The answer to a decode request of a backend that computes none."""

MAX_GRID = 65_535
"""Most blocks of a CUDA grid in y or z, where FlashAttention's kernels and PyTorch's have sequences and heads."""

NO_ATTENTION = Refused(("AttentionRequest, expected DecodeRequest: this backend reads a compressed cache",))
"""The answer to an attention request of a backend of decode."""


def batch_dependence(request: DecodeRequest, why: str) -> Iterator[str]:
    """The reason of a backend of decode that does not promise ``batch_invariant``, and ``why`` not."""
    if request.batch_invariant:
        yield f"{BATCH_DEPENDENT}, as {why}"


def accepted_without_dlse(request: AttentionRequest, *notes: str) -> Accepted:
    """The acceptance of a backend whose kernel takes no gradient of lse.

    Requested by name, ``sdpa`` runs the backward that has one; otherwise the fastest backend that takes it does.
    """
    if request.is_training and request.return_lse:
        notes += (f"{FORWARD_ONLY}the kernel takes no gradient of lse",)
        return Accepted(backward_by="sdpa", notes=notes)
    return Accepted(notes=notes)


def refuse_dlse(backend: str, dlse: torch.Tensor | None) -> None:
    """For the backward of such a backend.

    Raises:
        ValueError: dlse is given: the plan was made for a request without ``return_lse``.
    """
    if dlse is not None:
        raise ValueError(
            f"{backend}'s backward takes no dlse; plan the request with return_lse=True, sdpa then runs it"
        )


def off_cuda(*device_types: str) -> Iterator[str]:
    """The reason of a CUDA backend for a request or a platform of another device type."""
    for device_type in dict.fromkeys(device_types):
        if device_type != "cuda":
            yield f"device_type={device_type!r}, expected 'cuda'"


def beyond_grid(request: AttentionRequest) -> Iterator[str]:
    """The reason of kernels that have sequences and heads in y and z of their grid."""
    for name in ("batch_size", "num_heads"):
        if getattr(request, name) > MAX_GRID:
            yield f"{name}={getattr(request, name)} > {MAX_GRID}"


def beyond_flash_attention(request: AttentionRequest) -> Iterator[str]:
    """Reasons that FlashAttention 2, 3 and 4 share, whoever provides them."""
    if request.dtype not in (torch.bfloat16, torch.float16):
        yield f"dtype={request.dtype}, expected bfloat16 or float16"
    if request.dropout_p:
        yield f"dropout_p={request.dropout_p}, expected 0: FlashAttention's generator does not follow dropout_seed"
    if request.bias_type != "no_bias":
        yield f"bias_type={request.bias_type!r}, expected 'no_bias'"
    if request.attn_mask_type == "arbitrary":
        yield "attn_mask_type='arbitrary', expected the masks that lengths, causality and windows describe"
    sizes = (request.batch_size, request.max_seqlen_q, request.max_seqlen_kv)
    if not all(sizes):
        yield f"batch_size={sizes[0]}, max_seqlen_q={sizes[1]}, max_seqlen_kv={sizes[2]}, expected at least 1 each"
    yield from beyond_grid(request)
    yield from beyond_plain_attention(request)
    yield from _other_diagonal(request)


def _other_diagonal(request: AttentionRequest) -> Iterator[str]:
    """FlashAttention's diagonal ends at the last query and the last key; top-left is the same where lengths agree."""
    if request.band.bottom_right or request.band.is_open:
        return
    found = f"attn_mask_type={request.attn_mask_type!r} with window_size={request.window_size} aligned top-left"
    if request.max_seqlen_q != request.max_seqlen_kv:
        yield (
            f"{found}, max_seqlen_q={request.max_seqlen_q} and max_seqlen_kv={request.max_seqlen_kv}: FlashAttention "
            "aligns bottom-right, so equal lengths are expected"
        )
    elif request.lengths_may_differ:
        yield (
            f"{found} and lengths_may_differ=True: FlashAttention aligns bottom-right, so each sequence must have as "
            "many queries as keys; pass one tensor as cu_seqlens_q and cu_seqlens_kv, or a bottom_right mask"
        )


def beyond_packed_sequences(request: AttentionRequest) -> Iterator[str]:
    """Reasons of a kernel that knows offsets, and no true lengths besides them."""
    if request.pad_between_seqs:
        yield "pad_between_seqs=True, expected False: the kernel takes one sequence to end where the next one starts"
    if request.has_padding and not request.layout.is_packed:
        yield (
            f"attn_mask_type={request.attn_mask_type!r} with qkv_format={request.qkv_format!r}: the kernel takes no "
            "lengths of padded rows, expected qkv_format='thd'"
        )
