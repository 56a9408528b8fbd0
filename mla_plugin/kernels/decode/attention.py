"""``mla_decode_attention``: the decode kernels as one function without graph breaks under torch.compile."""

from __future__ import annotations

from typing import Any

import torch

from mla_plugin.arguments import decode_checks
from mla_plugin.arguments.checks import is_traced
from mla_plugin.arguments.decode import OPERATOR_FIELDS, DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.arguments.schema import schema_of
from mla_plugin.arguments.transforms import loop_under_vmap, refuse_derivatives
from mla_plugin.kernels.decode import launch
from mla_plugin.kernels.decode.run import DTYPES

_FIXED = ("return_lse", "kv_scale", "kv_cache_format")
_FIELDS = {name: hint for name, hint in OPERATOR_FIELDS.items() if name not in _FIXED}

_library = torch.library.Library("mla_plugin_kernels", "FRAGMENT")
_library.define(f"decode_attention{schema_of(_FIELDS)} -> (Tensor out, Tensor lse)")


def _tensors_of(arguments: tuple[Any, ...]) -> DecodeTensors:
    return DecodeTensors(**dict(zip(_FIELDS, arguments, strict=True)), return_lse=True)


def _run(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    tensors = _tensors_of(arguments)
    known = known_of(tensors, DTYPES)
    decode_checks.check_values(tensors)
    return launch.decode(tensors, known)


def _fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = _tensors_of(arguments)
    decode_checks.check_tensors(tensors, DTYPES)
    decode_checks.check_query_strides(tensors)
    q = tensors.q_nope_abs
    return q.new_empty(q.shape), q.new_empty(tensors.lse_shape, dtype=torch.float32)


_library.impl("decode_attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("mla_plugin_kernels::decode_attention", _fake, lib=_library)
refuse_derivatives(_library, "decode_attention", decode_checks.NO_DERIVATIVE)
loop_under_vmap(_library, "decode_attention")
_operator = torch.ops.mla_plugin_kernels.decode_attention.default


def mla_decode_attention(
    q_nope_abs: torch.Tensor,
    q_rope: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    softmax_scale: float,
    is_causal: bool = False,
    page_table: torch.Tensor | None = None,
    seqlens_kv: torch.Tensor | None = None,
    leftpad_kv: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """MLA decode with weight absorption: softmax(scale (q_nope_abs c_kv^T + q_rope k_rope^T)) c_kv.

    c_kv is read once, as keys and as values; per-head keys and values are never materialised. Algorithms: weight
    absorption (DeepSeek-V2, 2024), keys split over programs and combined by a second kernel (Flash-Decoding, Dao et
    al., 2023). There is no device-to-host synchronisation, so a call can be captured in a CUDA graph and replayed with
    other lengths and page tables. Results are bitwise deterministic. There is no backward.

    Args:
        q_nope_abs: [B, S_q, H, R], the queries without rope multiplied by W_UK. bfloat16, float16 or float32.
        q_rope: [B, S_q, H, Dr], the queries' rope part; Dr may be 0.
        c_kv: [B, S_kv, R], the normalised latent; [pages, page_size, R] with ``page_table``. R and Dr rounded up to
            powers of two (R to a sum of two) take at most 576 columns.
        k_rope: [B, S_kv, Dr], or [pages, page_size, Dr]. c_kv and k_rope may be views of one tensor. The last
            dimension of every tensor is contiguous, all other strides are free.
        softmax_scale: positive; required, because R is not the original head_dim_qk.
        is_causal: right-aligned: query i of S_q sees keys up to seqlens_kv[b] - S_q + i.
        page_table: int32 [B, n], pages of each sequence in order; entries beyond its length are never read. Any
            page_size; multiples of 64 are fastest.
        seqlens_kv: int32 [B], keys of each sequence, at most n * page_size or S_kv; None: S_kv (not with a page table).
            What the cache holds beyond a length has no influence.
        leftpad_kv: int32 [B], keys at the start of each sequence that no query sees, as in a left-padded batch; they
            count in seqlens_kv, and what the cache holds there has no influence. None: 0.
        return_lse: also return the log-sum-exp.

    Returns:
        out [B, S_q, H, R], dtype of q_nope_abs, to be multiplied by W_UV; with ``return_lse`` also lse [B, H, S_q],
        float32, natural logarithm. A query that sees no key gives out 0 and lse -inf.

    Raises:
        ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
        NotImplementedError: an argument requires grad.
    """
    decode_checks.check_options(softmax_scale, is_causal, return_lse, "is_causal")
    tensors = DecodeTensors(
        q_nope_abs, q_rope, c_kv, k_rope, softmax_scale, is_causal, return_lse, page_table, seqlens_kv, leftpad_kv
    )
    if is_traced(q_nope_abs, q_rope, c_kv, k_rope):
        # the dispatcher takes as much host time as a launch, so the operator is used only while tracing
        if not torch.compiler.is_compiling():
            decode_checks.check_tensors(tensors, DTYPES)
        decode_checks.check_no_gradient(tensors)
        out, lse = _operator(*(getattr(tensors, name) for name in _FIELDS))
    else:
        known = known_of(tensors, DTYPES)
        decode_checks.check_no_gradient(tensors)
        decode_checks.check_values(tensors)
        out, lse = launch.decode(tensors, known)
    return (out, lse) if return_lse and lse is not None else out
