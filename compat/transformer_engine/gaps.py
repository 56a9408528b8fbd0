"""``MLA_PLUGIN_TE=fill``: what runs where TransformerEngine has no backend for a call, or only its quadratic one.

A gap is filled when its version range holds TransformerEngine's version, its condition holds for the call, the
selection of TransformerEngine itself (or of a plugin in its slot) leaves neither FlashAttention nor cuDNN, and the
backend that this library would choose for the same call anywhere else is one of those that the gap names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mla_plugin.compat.transformer_engine.call import Call

Capability = tuple[int, int]


@dataclass(frozen=True)
class Gap:
    """One thing that TransformerEngine cannot do, or does in memory that grows with the square of the length.

    Attributes:
        name: what is filled, in a few words.
        versions: of TransformerEngine.
        condition: holds for the calls concerned, given the device's compute capability.
        runs: backends of this library that may run instead.
        source: where the gap is described.
    """

    name: str
    versions: SpecifierSet
    condition: Callable[[Call, Capability], bool]
    runs: tuple[str, ...]
    source: str


def _is_padded_thd(call: Call) -> bool:
    return call.request.qkv_format == "thd" and call.request.pad_between_seqs


GAPS: tuple[Gap, ...] = (
    Gap(
        name="padding between packed sequences, before Hopper",
        versions=SpecifierSet(">=2.10"),
        condition=lambda call, capability: _is_padded_thd(call) and capability < (9, 0),
        runs=("triton",),
        source="NVIDIA/TransformerEngine issue 1821",
    ),
    Gap(
        name="padding between packed sequences on Hopper (FlashAttention 3, seqused)",
        versions=SpecifierSet(">=2.10,<2.16"),
        condition=lambda call, capability: _is_padded_thd(call) and capability == (9, 0),
        runs=("fa3",),
        source="NVIDIA/TransformerEngine pull request 2596",
    ),
    Gap(
        name="head_dim_qk != head_dim_v on FlashAttention 2 (V padded)",
        versions=SpecifierSet(">=2.10,<2.17"),
        condition=lambda call, capability: (
            call.request.head_dim_qk != call.request.head_dim_v and not call.request.pad_between_seqs
        ),
        runs=("fa2",),
        source="NVIDIA/TransformerEngine pull request 2629",
    ),
    Gap(
        name="packed causal self-attention, unfused",
        versions=SpecifierSet(">=2.10"),
        condition=lambda call, capability: (
            call.request.attn_mask_type == "padding_causal"
            and call.request.qkv_format == "thd"
            and call.is_self_attention
            and not call.request.pad_between_seqs
        ),
        runs=("triton", "sdpa"),
        source="NVIDIA/TransformerEngine pull request 3063",
    ),
)


def candidates(call: Call, capability: Capability, version: Version) -> list[Gap]:
    """The gaps that the call may fall into."""
    return [gap for gap in GAPS if gap.versions.contains(version, prereleases=True) and gap.condition(call, capability)]


def is_left_unfused(module: Any, call: Call) -> bool:
    """Whether TransformerEngine's own selection leaves the call nothing but its unfused attention, or nothing."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils
    from transformer_engine.pytorch.graph import is_graph_capturing

    request = call.request
    is_packed = request.qkv_format == "thd"
    known = {
        "qkv_type": torch.Tensor,
        "qkv_dtype": request.dtype,
        "qkv_layout": "_".join([request.qkv_format] * 3),
        "batch_size": request.batch_size,
        "num_heads": request.num_heads,
        "num_gqa_groups": request.num_kv_heads,
        "max_seqlen_q": request.max_seqlen_q,
        "max_seqlen_kv": request.max_seqlen_kv,
        "num_tokens_q": call.q.shape[0] if is_packed else 0,
        "num_tokens_kv": call.k.shape[0] if is_packed else 0,
        "head_dim_qk": request.head_dim_qk,
        "head_dim_v": request.head_dim_v,
        "attn_mask_type": request.attn_mask_type,
        "window_size": request.window_size,
        "bottom_right_diagonal": request.bottom_right_diagonal,
        "alibi_slopes_shape": None,
        "core_attention_bias_type": "no_bias",
        "core_attention_bias_shape": None,
        "core_attention_bias_requires_grad": False,
        "pad_between_seqs": request.pad_between_seqs,
        "cp_comm_type": module.cp_comm_type,
        "deterministic": module.deterministic,
        "is_training": module.training,
        "fp8_meta": module.fp8_meta,
        "cuda_graph": is_graph_capturing(),
        "softmax_scale": call.softmax_scale,
    }
    names = {field.name for field in fields(utils.AttentionParams)}
    params = utils.AttentionParams(**{name: value for name, value in known.items() if name in names})
    use_flash, _, use_fused, *_ = utils.get_attention_backend(params)
    return not (use_flash or use_fused)
