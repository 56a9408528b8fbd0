"""Absorbed decode with W_UK and W_UV, in fewer launches where the call is one of the Triton kernels'.

Not a hook: what it computes is W_UK, ``mla_plugin.decode`` and W_UV. It answers only where our own Triton backend would
compute that decode, and nobody else would see it.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_plugin import environment
from mla_plugin.arguments import decode_checks
from mla_plugin.arguments.checks import is_traced
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import tensor_layout
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import NoBackendError
from mla_plugin.resolver.decode import resolve_decode

_BACKEND = "triton"
_MAX_LAYOUTS = 4096
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
    seqlens_kv: torch.Tensor | None = None,
    leftpad_kv: torch.Tensor | None = None,
    host: str = "direct",
) -> torch.Tensor | None:
    """Absorbed causal attention of the last S_q positions over latents, from queries to values.

    Args:
        query: [B, H, S_q, dim_nope + Dr]; no gradients are wanted.
        c_kv, k_rope: [B, 1, S_kv, R] and [B, 1, S_kv, Dr].
        weight: [H (dim_nope + dim_v), R]: the rows of W_UK and of W_UV of each head, one below the other.
        dim_nope, dim_v: number of these rows.
        softmax_scale: multiplies the scores.
        seqlens_kv, leftpad_kv: int32 [B], as for ``mla_plugin.decode``.
        host: the framework that calls.

    Returns:
        [B, S_q, H, dim_v], contiguous; None where it has to be computed in parts: another backend is chosen or could
        look on, batch_invariant is requested, more than 16 queries, another dtype than 2-byte ones, a traced call.
    """
    if is_traced(query, c_kv):
        return None
    if seqlens_kv is not None and environment.is_value_check_requested():
        return None
    key = (
        tensor_layout(query),
        tensor_layout(c_kv),
        tensor_layout(k_rope),
        tensor_layout(weight),
        None if seqlens_kv is None else tensor_layout(seqlens_kv),
        None if leftpad_kv is None else tensor_layout(leftpad_kv),
        (c_kv.data_ptr() | k_rope.data_ptr()) % 16,
        (dim_nope, dim_v, host),
        environment.gates(),
        get_manager().generation,
    )
    step = _steps.get(key, _steps)
    if step is _steps:
        if len(_steps) >= _MAX_LAYOUTS:  # a cache that grows has a new shape at every token
            _steps.clear()
        step = _steps[key] = _step_of(query, c_kv, k_rope, weight, dim_nope, dim_v, seqlens_kv, leftpad_kv, host)
    if step is None:
        return None
    from mla_plugin.kernels.decode import projected

    lengths = (seqlens_kv, leftpad_kv)
    return projected.decode(step, query, c_kv, k_rope, weight, dim_nope, *lengths, float(softmax_scale))


def _step_of(
    query: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    weight: torch.Tensor,
    dim_nope: int,
    dim_v: int,
    seqlens_kv: torch.Tensor | None,
    leftpad_kv: torch.Tensor | None,
    host: str,
) -> Any:
    """The launches for this layout; None: computed in parts."""
    batch, heads, seqlen_q, _ = query.shape
    rank = c_kv.shape[3]
    if query.element_size() != 2 or weight.dtype != query.dtype or weight.device != query.device:
        return None
    if weight.shape != (heads * (dim_nope + dim_v), rank) or weight.stride(1) != 1 or query.stride(3) != 1:
        return None
    if not query.numel() or not c_kv.numel() or not get_manager().is_ours(_BACKEND):
        return None
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
    if plan.forward_backend != _BACKEND or plan.request.batch_invariant:
        return None
    from mla_plugin.kernels.decode import projected

    if batch * seqlen_q > projected.ROWS:
        return None
    return projected.step_of(tensors, query, weight, dim_nope, dim_v)
