"""Decode calls whose key tiles the Hopper kernel has to gather: quantised caches, and pages of any size."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_plugin.arguments import cache_format
from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN, RANK, ROPE
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.kernels.decode import launch
from tests.kernels.decode_cases import DEVICE, Inputs, assert_as_good_as_pytorch, contiguous, paged

_SCALE = 0.0123
Lengths = list[int]


def _nan_rows(*shape: int, kv_format: str) -> torch.Tensor:
    """A cache of rows in which every number and every scale is NaN."""
    if kv_format == FP8:
        return torch.full((*shape, RANK + ROPE), 0x7F, dtype=torch.uint8)
    parts = (
        torch.full((RANK,), 0x7F, dtype=torch.uint8),
        torch.full((cache_format.SCALES,), torch.nan).view(torch.uint8),
        torch.full((ROPE,), torch.nan, dtype=torch.bfloat16).view(torch.uint8),
    )
    return torch.cat(parts).repeat(*shape, 1)


def _quantised(inputs: Inputs, kv_format: str) -> tuple[Inputs, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The call with the numbers that a quantised cache holds for its tokens, and that cache, ``split_quantised``."""
    scale = torch.tensor(_SCALE, device=DEVICE) if kv_format == FP8 else None
    batch, seqlen_kv, width = inputs.tokens.shape
    # of unlike sizes, so that a wrong scale shows
    tokens = inputs.tokens.float().view(-1, width) * torch.logspace(-1, 1, batch * seqlen_kv, device=DEVICE)[:, None]
    tokens[:, :RANK] *= torch.tensor([0.5, 1, 2, 4], device=DEVICE).repeat_interleave(RANK // 4)
    c_rows, k_rows = cache_format.quantised_rows(tokens[:, :RANK], tokens[:, RANK:], scale, kv_format, False)
    rows = torch.cat([c_rows, k_rows], -1).view(batch, seqlen_kv, -1)
    found = _nan_rows(*inputs.c_kv.shape[:2], kv_format=kv_format).to(DEVICE)
    for b, length in enumerate(inputs.lengths()):
        if inputs.page_table is None:
            found[b, :length] = rows[b, :length]
            continue
        page_size = inputs.c_kv.shape[1]
        keys = torch.arange(length, device=DEVICE)
        found[inputs.page_table[b, keys // page_size].long(), keys % page_size] = rows[b, :length]
    held = cache_format.dequantised(
        *cache_format.split_quantised(rows.contiguous(), RANK, kv_format, scale), kv_format, torch.float64
    )
    tokens = torch.cat(held, -1)
    if kv_format == FP8_DS_MLA:
        tokens = tokens.bfloat16()  # as the kernels multiply them
    cache = cache_format.split_quantised(found, RANK, kv_format, scale)
    return replace(inputs, tokens=tokens), cache


def call_of(
    shape: tuple[int, int, int, int],
    page_size: int | None,
    kv_format: str,
    dtype: torch.dtype,
    lengths: Lengths,
    seed: int = 0,
    is_causal: bool = False,
) -> tuple[Inputs, DecodeTensors]:
    """A call of B, S_q, H and room for S_kv keys; all that lies behind the lengths and in unused pages is NaN."""
    *leading, seqlen_kv = shape
    whole = (*leading, RANK, ROPE, seqlen_kv)
    if page_size is None:
        inputs = contiguous(whole, dtype, lengths, seed)
    else:
        inputs = paged(whole, page_size, dtype, lengths, seed)
    options = inputs.options()
    cache: tuple[torch.Tensor, ...] = (inputs.c_kv, inputs.k_rope)
    if kv_format != PLAIN:
        inputs, (*cache, options["kv_scale"]) = _quantised(inputs, kv_format)
    softmax_scale = options.pop("softmax_scale")
    tensors = DecodeTensors(
        *(inputs.q_nope_abs, inputs.q_rope, *cache, softmax_scale, is_causal, True),
        kv_cache_format=kv_format,
        **options,
    )
    return inputs, tensors


def with_queries(
    inputs: Inputs, tensors: DecodeTensors, q_nope_abs: torch.Tensor, q_rope: torch.Tensor
) -> tuple[Inputs, DecodeTensors]:
    """The same call with other queries."""
    return (
        replace(inputs, q_nope_abs=q_nope_abs, q_rope=q_rope),
        tensors._replace(q_nope_abs=q_nope_abs, q_rope=q_rope),
    )


def is_taken(tensors: DecodeTensors) -> bool:
    """Whether the kernel that gathers computes a call."""
    described = launch.make_launches(tensors).described
    return isinstance(described, launch.hopper.Descriptors) and described.gathers


def check(inputs: Inputs, tensors: DecodeTensors) -> None:
    """As good as PyTorch over the same numbers, by the kernel that gathers."""
    assert is_taken(tensors)
    out, lse = launch.decode(tensors, known_of(tensors))
    assert lse is not None
    assert_as_good_as_pytorch(out, lse, inputs, tensors.causal)
