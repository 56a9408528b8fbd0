"""One query over few latents on the CPU: expanded, but K is never put together and nothing is looked up.

There operators take the time, not numbers. Making K [B, H, S_kv, head_dim_qk] takes five of them, and a call of
``mla_plugin.attention`` finds its decision by the shapes, which are new in every step. So the two products of the
scores stay apart, as in absorbed attention, and the values stay as ``kv_b_proj`` gives them:

    softmax(q_nope K_nope^T + q_rope k_rope^T) V

``kv_b_proj`` is called as the module that it is: hooks, adapters and quantised weights act as they do in the model.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_plugin import environment
from mla_plugin.hooks.manager import get_manager

_is_decided: tuple[int, bool] = (-1, False)
"""A generation of the set of plugins, and whether it has nothing but our backends, without wrappers."""


def takes(query: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor) -> bool:
    """Whether ``attend`` may compute this call.

    Not if somebody else may want to compute or see it: another backend, a variable that chooses one or asks for logs,
    a tracer. Not under autocast, which would round the scores.
    """
    if query.shape[2] != 1 or not query.is_cpu or not query.dtype == c_kv.dtype == k_rope.dtype:
        return False
    is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return not (is_traced or torch._C._is_any_autocast_enabled() or environment.gates()) and _are_backends_ours()


def _are_backends_ours() -> bool:
    """On the CPU ``sdpa`` is then the only backend, and it computes what ``attend`` does."""
    global _is_decided
    manager = get_manager()
    generation, are_ours = _is_decided
    if generation != manager.generation:
        generation = manager.generation
        are_ours = all(manager.is_ours(name) for name in manager.backends())
        _is_decided = (generation, are_ours)
    return are_ours


def attend(
    module: Any, query: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of one query in each row, to all keys; differentiable.

    Args:
        module: the layer, with ``qk_nope_head_dim``, ``v_head_dim`` and ``kv_b_proj``.
        query: [B, H, 1, qk_nope_head_dim + qk_rope_head_dim].
        c_kv: [B, 1, S_kv, kv_lora_rank].
        k_rope: [B, 1, S_kv, qk_rope_head_dim].
        scaling: multiplies the scores; default head_dim_qk ** -0.5.

    Returns:
        [B, 1, H, v_head_dim], contiguous. Scores, weights and sums are float32 (float64 for float64).
    """
    dtype, dim_nope, dim_v = query.dtype, module.qk_nope_head_dim, module.v_head_dim
    batch_size, num_heads, _, head_dim_qk = query.shape
    kv = module.kv_b_proj(c_kv)
    if dtype.itemsize < 4:
        query, kv, k_rope = query.float(), kv.float(), k_rope.float()
    q = query.flatten(0, 1) * (head_dim_qk**-0.5 if scaling is None else scaling)
    q_nope, q_rope = q.split_with_sizes((dim_nope, head_dim_qk - dim_nope), -1)
    kv = kv.view(batch_size, -1, num_heads, dim_nope + dim_v).transpose(1, 2).flatten(0, 1)
    k_nope, v = kv.split_with_sizes((dim_nope, dim_v), -1)
    scores = torch.bmm(q_rope.view(batch_size, num_heads, -1), k_rope.squeeze(1).transpose(1, 2))
    scores = torch.baddbmm(scores.view(batch_size * num_heads, 1, -1), q_nope, k_nope.transpose(1, 2))
    out = torch.bmm(torch.softmax(scores, -1), v).view(batch_size, 1, num_heads, dim_v)
    return out if out.dtype == dtype else out.to(dtype)
