"""``MLA_PLUGIN_TE=fill``: what runs where TransformerEngine has no backend for a call, or only its quadratic one.

A gap is filled if all of this holds: its version range includes TransformerEngine's version; its condition holds for
the call; the selection of TransformerEngine itself (or of a plugin in its slot) leaves neither FlashAttention nor
cuDNN. And the backend that this library would choose outside TransformerEngine is one of those that the gap names.

Over several ranks TransformerEngine's backends use its own context parallelism, so a call that it cannot run fails
whatever was selected. Those gaps are filled by ours, with any backend for its sections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mla_plugin.compat.transformer_engine.call import Call


@dataclass(frozen=True)
class Gap:
    """A kind of call that TransformerEngine cannot run, computes wrongly, or runs with quadratic memory.

    Attributes:
        name: what is filled, in a few words.
        versions: of TransformerEngine.
        without: what TransformerEngine does with such calls if its selection has left neither FlashAttention nor
            cuDNN.
        condition: holds for the calls concerned.
        runs: backends of this library that may run instead.
        source: where the gap is described.
        is_selected_too: TransformerEngine fails even if its selection has left a backend.
    """

    name: str
    versions: SpecifierSet
    without: str
    condition: Callable[[Call], bool]
    runs: tuple[str, ...]
    source: str
    is_selected_too: bool = False


def _is_padded(call: Call) -> bool:
    return call.request.pad_between_seqs


def _is_unpadded_mla(call: Call) -> bool:
    return call.request.head_dim_qk != call.request.head_dim_v and not call.request.pad_between_seqs


def _is_packed_causal_self_attention(call: Call) -> bool:
    request = call.request
    is_causal = request.attn_mask_type == "padding_causal"
    return request.layout.is_packed and is_causal and call.is_self_attention and not request.pad_between_seqs


def _is_grouped_mla(call: Call) -> bool:
    request, ranks = call.request, call.ranks
    is_mla = request.head_dim_qk != request.head_dim_v
    is_ring = ranks is not None and ranks.comm_type == "p2p"
    return is_mla and is_ring and request.num_heads != request.num_kv_heads


def _is_mla_without_ring(call: Call) -> bool:
    ranks = call.ranks
    return call.request.head_dim_qk != call.request.head_dim_v and ranks is not None and ranks.comm_type != "p2p"


_NO_BACKEND = "ValueError: no dot product attention backend is available"
_UNFUSED = "unfused attention, which holds all scores in memory"

GAPS: tuple[Gap, ...] = (
    Gap(
        name="padding between packed sequences, 2.10",
        versions=SpecifierSet(">=2.10,<2.11"),
        without=_NO_BACKEND,
        condition=_is_padded,
        runs=("fa3", "fa4", "triton", "sdpa"),
        source="NVIDIA/TransformerEngine issue 1821",
    ),
    Gap(
        name="padding between packed sequences, 2.11 to 2.15",
        versions=SpecifierSet(">=2.11,<2.16"),
        without="a wrong answer: unfused attention reads the sequences as if nothing lay between them, and returns "
        "fewer rows than q has when they end before it does",
        condition=_is_padded,
        runs=("fa3", "fa4", "triton", "sdpa"),
        source="NVIDIA/TransformerEngine pull request 2596",
    ),
    Gap(
        name="padding between packed sequences, 2.16 and newer",
        versions=SpecifierSet(">=2.16"),
        without=_NO_BACKEND,
        condition=_is_padded,
        runs=("fa3", "fa4", "triton", "sdpa"),
        source="NVIDIA/TransformerEngine issue 1821",
    ),
    Gap(
        name="head_dim_qk != head_dim_v, unfused",
        versions=SpecifierSet(">=2.10,<2.17"),
        without=f"{_UNFUSED}; for packed sequences 2.10 has no backend",
        condition=_is_unpadded_mla,
        runs=("fa2", "triton"),
        source="NVIDIA/TransformerEngine pull request 2629",
    ),
    Gap(
        name="packed causal self-attention, unfused",
        versions=SpecifierSet(">=2.10"),
        without=f"{_UNFUSED}; 2.10 has no backend",
        condition=_is_packed_causal_self_attention,
        runs=("triton", "sdpa"),
        source="NVIDIA/TransformerEngine pull request 3063",
    ),
)

GAPS_OVER_RANKS: tuple[Gap, ...] = (
    Gap(
        name="grouped heads with head_dim_qk != head_dim_v, p2p",
        versions=SpecifierSet(">=2.10,<2.15"),
        without="RuntimeError: it views the output as V's heads",
        condition=_is_grouped_mla,
        runs=(),
        source="NVIDIA/TransformerEngine issue 2868",
        is_selected_too=True,
    ),
    Gap(
        name="head_dim_qk != head_dim_v, all_gather and a2a",
        versions=SpecifierSet(">=2.10,<2.15"),
        without="AssertionError: context parallelism does not support MLA with these",
        condition=_is_mla_without_ring,
        runs=(),
        source="NVIDIA/TransformerEngine issue 1552",
        is_selected_too=True,
    ),
    Gap(
        name="padding between packed sequences",
        versions=SpecifierSet(">=2.10"),
        without=_NO_BACKEND,
        condition=_is_padded,
        runs=(),
        source="NVIDIA/TransformerEngine pull request 2596",
    ),
)
"""Gaps of calls over several ranks; backends are not named, for a call has several sections."""


def candidates(call: Call, version: Version) -> list[Gap]:
    """The gaps that the call may fall into."""
    gaps = GAPS if call.ranks is None else GAPS_OVER_RANKS
    return [gap for gap in gaps if gap.versions.contains(version, prereleases=True) and gap.condition(call)]


def parameters(module: Any, call: Call) -> dict[str, Any]:
    """The parameters of TransformerEngine's selection for the call, for every version; all values are hashable."""
    from transformer_engine.pytorch.graph import is_graph_capturing

    request, tensors, ranks = call.request, call.tensors, call.ranks
    is_packed, size = request.layout.is_packed, 1 if ranks is None else ranks.size
    times = 1 if is_packed else size  # offsets are of whole sequences already
    return {
        "qkv_type": torch.Tensor,
        "qkv_dtype": request.dtype,
        "qkv_layout": "_".join([request.qkv_format] * 3),
        "batch_size": request.batch_size,
        "num_heads": request.num_heads,
        "num_gqa_groups": request.num_kv_heads,
        "max_seqlen_q": request.max_seqlen_q * times,
        "max_seqlen_kv": request.max_seqlen_kv * times,
        "num_tokens_q": tensors.q.shape[0] if is_packed else 0,
        "num_tokens_kv": tensors.k.shape[0] if is_packed else 0,
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
        "context_parallel": size > 1,
        "cp_comm_type": module.cp_comm_type,
        "cp_size": size,
        "deterministic": module.deterministic,
        "is_training": module.training,
        "cuda_graph": is_graph_capturing(),
        "softmax_scale": tensors.softmax_scale,
    }


def is_left_unfused(module: Any, known: dict[str, Any]) -> bool:
    """Whether TransformerEngine's own selection leaves only its unfused attention, or nothing."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    names = {field.name for field in fields(utils.AttentionParams)}
    given = {**known, "fp8_meta": module.fp8_meta}
    params = utils.AttentionParams(**{name: value for name, value in given.items() if name in names})
    use_flash, _, use_fused, *_ = utils.get_attention_backend(params)
    return not (use_flash or use_fused)
