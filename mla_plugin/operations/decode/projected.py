"""Absorbed decode with W_UK and W_UV, in fewer launches where the call is one of the Triton kernels'.

Not a hook: what it computes is W_UK, ``mla_plugin.decode`` and W_UV. It answers only where our own Triton backend would
compute that decode, and nobody else would see it.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import torch

from mla_plugin import environment
from mla_plugin.arguments import decode_checks
from mla_plugin.arguments.checks import is_traced, plain_number
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import starts_aligned, tensor_layout
from mla_plugin.arguments.layout import are_joined
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import NoBackendError
from mla_plugin.resolver.decode import resolve_decode

_BACKEND = "triton"
_MAX_LAYOUTS = 4096
_UNKNOWN = object()
_steps: dict[tuple[Any, ...], Any] = {}
"""The launches of a layout, or None where they are not possible."""


def decode_projected(
    query: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    weight: torch.Tensor,
    dim_nope: int,
    dim_v: int,
    *,
    softmax_scale: float,
    ranges: torch.Tensor | None = None,
    host: str = "direct",
) -> torch.Tensor | None:
    """Absorbed causal attention of the last S_q positions over latents, from queries to values.

    Args:
        query: [B, H, S_q, dim_nope + Dr]. The caller has found out that no gradients are wanted.
        c_kv, k_rope: [B, 1, S_kv, R] and [B, 1, S_kv, Dr].
        weight: [H (dim_nope + dim_v), R]: the rows of W_UK and of W_UV of each head, one below the other.
        dim_nope, dim_v: number of these rows.
        softmax_scale: multiplies the scores; positive.
        ranges: int32 [1, 1, 1 or 2, B]: ``seqlens_kv`` of ``mla_plugin.decode``, then perhaps ``leftpad_kv``.
        host: the framework that calls.

    Returns:
        [B, S_q, H, dim_v], contiguous; None where it has to be computed in parts: another backend is chosen or could
        look on, batch_invariant is requested, more than 16 queries, another dtype than 2-byte ones, a traced call.

    Raises:
        ValueError, TypeError: the scale is not positive and finite, or the tensors do not match; as in parts.
    """
    if type(softmax_scale) is not float or not 0.0 < softmax_scale < math.inf:
        softmax_scale = plain_number(softmax_scale)
        decode_checks.check_options(softmax_scale, True, False)
    if is_traced(query, c_kv, k_rope) or (ranges is not None and environment.is_value_check_requested()):
        return None
    key = (
        tensor_layout(query),
        tensor_layout(c_kv),
        tensor_layout(k_rope),
        tensor_layout(weight),
        None if ranges is None else tensor_layout(ranges),
        starts_aligned(c_kv, k_rope),
        are_joined(c_kv, k_rope),
        (dim_nope, dim_v, host),
        environment.gates(),
        get_manager().generation,
    )
    step = _steps.get(key, _UNKNOWN)
    if step is _UNKNOWN:
        if len(_steps) >= _MAX_LAYOUTS:  # a cache that grows has a new shape at every token
            _steps.clear()
        step = _steps[key] = _step_of(query, c_kv, k_rope, weight, dim_nope, dim_v, ranges, host)
    if step is None:
        return None
    out: torch.Tensor = _launch().decode(step, query, c_kv, k_rope, weight, dim_nope, ranges, float(softmax_scale))
    return out


@functools.cache
def _launch() -> ModuleType:
    """The launch of the kernels; imported late: Triton is slow to import."""
    from mla_plugin.kernels.decode.projected import launch

    return launch


def _step_of(
    query: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    weight: torch.Tensor,
    dim_nope: int,
    dim_v: int,
    ranges: torch.Tensor | None,
    host: str,
) -> Any:
    """The launches for this layout; None: computed in parts."""
    batch, heads, seqlen_q, _ = query.shape
    rank = c_kv.shape[3]
    if query.element_size() != 2 or weight.dtype != query.dtype or weight.device != query.device:
        return None
    if weight.shape != (heads * (dim_nope + dim_v), rank) or weight.stride(1) != 1 or query.stride(3) != 1:
        return None
    if not query.numel() or not c_kv.numel() or c_kv.shape[1] != 1 or k_rope.shape[1] != 1:
        return None
    if not 0 < dim_nope <= query.shape[3]:
        raise ValueError(f"dim_nope={dim_nope}; expected 1 to {query.shape[3]}, the columns of the queries")
    seqlens_kv: torch.Tensor | None = None
    leftpad_kv: torch.Tensor | None = None
    if ranges is not None:
        count = ranges.shape[2] if ranges.ndim == 4 else 0
        if ranges.shape != (1, 1, count, batch) or not 1 <= count <= 2 or ranges.stride(3) != 1:
            return None
        if count == 2 and ranges.stride(2) < batch:
            return None
        seqlens_kv = ranges[0, 0, 0]
        leftpad_kv = ranges[0, 0, 1] if count == 2 else None
    tensors = DecodeTensors(
        query.new_empty(batch, seqlen_q, heads, rank),
        query[..., dim_nope:].transpose(1, 2),
        c_kv[:, 0],
        k_rope[:, 0],
        1.0,  # of no importance here
        seqlen_q > 1,
        False,
        None,
        seqlens_kv,
        leftpad_kv,
    )
    decode_checks.check_tensors(tensors)
    try:
        plan = resolve_decode(DecodeRequest.of(tensors, host=host))
    except NoBackendError:
        return None
    # asked after the choice, which imports plug-ins that a variable has held back
    if plan.forward_backend != _BACKEND or plan.request.batch_invariant or not get_manager().is_ours(_BACKEND):
        return None
    from mla_plugin.kernels.decode.projected import launch

    if batch * seqlen_q > launch.ROWS:
        return None
    return launch.step_of(tensors, query, weight, dim_nope, dim_v, ranges)
