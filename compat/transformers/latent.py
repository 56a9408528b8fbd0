"""Decoding over the latent cache: absorbed attention for the MLA models of transformers >= 5.15.

Their cache holds c_kv and k_rope, and their method ``expand_kv`` makes K and V of them, at every step, of all tokens,
for all heads, right before attention is called (transformers PR 47460). ``pass_latents_on`` replaces that method: the
attention function gets the latents and decides, call by call, which of two equal computations it runs:

    expanded   K_nope = c_kv W_UK^T, V = c_kv W_UV^T;  softmax(q_nope K_nope^T + q_rope k_rope^T) V
    absorbed   softmax((q_nope W_UK) c_kv^T + q_rope k_rope^T) c_kv W_UV^T      (DeepSeek-V2, arXiv 2405.04434, 2.1.2)

Nothing is kept between calls: W_UK and W_UV are views of ``kv_b_proj.weight`` as it is at that moment, so training,
loading another state and ``.to(...)`` need no notice.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import transformers
from packaging.version import Version

import mla_plugin
from mla_plugin.arguments.checks import records_gradients
from mla_plugin.compat.transformers.padding import tokens_first
from mla_plugin.compat.transformers.projection import dtype_of, obstacle, plain_weight_of, projection_of
from mla_plugin.compat.transformers.sinks import with_sinks
from mla_plugin.compat.transformers.steps import Reason
from mla_plugin.operations.decode.projected import decode_projected

NAME = "mla_plugin"

COST_OF_ABSORBED = 2
"""Measured with DeepSeek-V3's dims over 1024 keys on a CPU, bfloat16: both take the same time at 64 queries."""

LEAST_KEYS = 64
"""Measured likewise, with one query: below, the two products around absorbed attention cost more than it saves."""

_VERSION = Version(transformers.__version__)
_DENSE_CACHE_LATENTS = Version("5.15") <= _VERSION
_SPARSE_CACHE_LATENTS = Version("5.18") <= _VERSION

FEW_KEYS = Reason("so few keys are faster expanded")
MANY_QUERIES = Reason("so many queries are faster over expanded keys: a prompt, or a chunk of one")
WITH_GRADIENTS = Reason("gradients are wanted, and decode has no backward", "call it under torch.no_grad()")
DENSE_MASK = Reason("a 4-D mask of the caller", "pass the attention_mask [B, S] of the tokens")
PADDED_QUERIES = Reason("several queries, of which some are padding", "pad on the left")
NOT_PLAIN = Reason(
    "more than causal attention: packed sequences, a sliding window, dropout, or tokens that see later ones"
)


class Keys(NamedTuple):
    """What the queries attend to, as ``mla_plugin.decode`` takes it."""

    c_kv: torch.Tensor
    k_rope: torch.Tensor
    lengths: dict[str, torch.Tensor]


def is_decode(s_q: int, s_kv: int, kv_lora_rank: int, qk_nope_head_dim: int, v_head_dim: int) -> bool:
    """Whether to attend over latents, absorbed, rather than to expand the keys and attend to them.

    Multiplications per head, with R = kv_lora_rank and D = qk_nope_head_dim + v_head_dim, k_rope's small part left out:

        expanded   S_kv R D + S_q S_kv D
        absorbed   S_q R D + S_q S_kv 2 R

    The expanded ones are large matrix products, which run about ``COST_OF_ABSORBED`` times as fast. With DeepSeek-V3's
    dims the limit is 63 queries at 1024 keys, and 73 at most. Over fewer than ``LEAST_KEYS`` keys nothing is a decode.
    """
    if s_kv < LEAST_KEYS:
        return False
    expanded_dims = qk_nope_head_dim + v_head_dim
    expanded = s_kv * expanded_dims * (kv_lora_rank + s_q)
    absorbed = s_q * kv_lora_rank * (expanded_dims + 2 * s_kv)
    return COST_OF_ABSORBED * absorbed < expanded


def caches_latents(config: Any) -> bool:
    """Whether the cache of this model holds latents; before 5.18 sparse (DSA) models kept K and V, for all heads."""
    return _SPARSE_CACHE_LATENTS or (_DENSE_CACHE_LATENTS and getattr(config, "index_topk", None) is None)


_replaced: set[str] = set()
"""Modules of models whose layers pass their latents on."""


def pass_latents_on(config: Any) -> None:
    """Let the layers of this model pass their latents to the attention function; called before any of them runs.

    The method ``expand_kv`` of their classes is replaced, once in a process, by one that asks ``gets_latents``. So
    copies and pickles need no care, and a traced layer is the same in its first call and in later ones.
    """
    if caches_latents(config):
        _replace_methods(type(config).__module__.replace(".configuration_", ".modeling_"))


def pass_later_latents_on(module: Any) -> None:
    """The same from the next call on, for a layer of a model that makes no mask (GLM-5 Next)."""
    method = getattr(type(module), "expand_kv", None)
    if method is not None and not hasattr(method, "passes_latents_on") and caches_latents(module.config):
        _replace_methods(method.__module__)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it is run while tracing
def _replace_methods(modeling: str) -> None:
    if modeling in _replaced:
        return
    _replaced.add(modeling)
    for kind in list(vars(sys.modules.get(modeling, object)).values()):
        if isinstance(kind, type) and "expand_kv" in vars(kind):
            kind.expand_kv = _passing_latents_on(kind.expand_kv)  # type: ignore[attr-defined]


def _passing_latents_on(original: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def expand_kv(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (kv_nope, k_rot) if gets_latents(module) else original(module, kv_nope, k_rot)

    expand_kv.passes_latents_on = True  # type: ignore[attr-defined]
    return expand_kv


def expand(module: Any, c_kv: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K [B, H, S_kv, head_dim_qk] and V [B, H, S_kv, head_dim_v] of the latents, by the model's own code."""
    return cast(tuple[torch.Tensor, torch.Tensor], type(module).expand_kv.__wrapped__(module, c_kv, k_rope))


def gets_latents(module: Any) -> bool:
    """Whether this layer passes latents on: its method is the one above, nobody replaced it, and we attend."""
    method = getattr(type(module), "expand_kv", None)
    if not hasattr(method, "passes_latents_on") or "expand_kv" in vars(module):
        return False
    config = module.config
    # the property of this value takes three times as long, and this runs twice in a layer
    return config._attn_implementation_internal == NAME and caches_latents(config)


def _want_gradients(module: Any, *tensors: torch.Tensor) -> bool:
    if not records_gradients():
        return False
    return any(x.requires_grad for x in (*tensors, *module.kv_b_proj.parameters()))


def attend(
    module: Any,
    query: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    attention_mask: torch.Tensor | None,
    indices: torch.Tensor | None,
    scaling: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor | Reason:
    """Absorbed causal attention of the last S_q positions over latents.

    Args:
        module: the layer, with ``qk_nope_head_dim``, ``v_head_dim`` and ``kv_b_proj``.
        query: [B, H, S_q, qk_nope_head_dim + qk_rope_head_dim].
        c_kv: [B, 1, S_kv, kv_lora_rank], any strides.
        k_rope: [B, 1, S_kv, qk_rope_head_dim], any strides.
        attention_mask: None, key ranges or tokens (see ``masks``) or, with ``indices``, a 4-D pattern.
        indices: [B, S_q, top_k], the keys that a sparse layer selected.
        scaling: multiplies the scores; default head_dim_qk ** -0.5.
        s_aux: attention sinks [H].

    Returns:
        [B, S_q, H, v_head_dim], contiguous; or why K and V have to be made instead: another mask, gradients (decode has
        no backward), more queries than ``is_decode`` wants, or a ``kv_b_proj`` that cannot be absorbed.
    """
    dim_nope, dim_v = module.qk_nope_head_dim, module.v_head_dim
    if not is_decode(query.shape[2], c_kv.shape[2], c_kv.shape[3], dim_nope, dim_v):
        return FEW_KEYS if c_kv.shape[2] < LEAST_KEYS else MANY_QUERIES
    if _want_gradients(module, query, c_kv, k_rope):
        return WITH_GRADIENTS
    dtype = dtype_of(query)
    if (found := obstacle(module, dtype, query, c_kv, k_rope)) is not None:
        return found
    if indices is None and s_aux is None and _may_fuse(query):
        out = _fused(module, query, c_kv, k_rope, attention_mask, dtype, scaling)
        if out is not None:
            return out
    if indices is None and attention_mask is not None:
        indices = _indices_within(module, attention_mask)
    if indices is None:
        keys = _keys_of(query, c_kv, k_rope, attention_mask)
    else:
        keys = _selected_keys(module, query, c_kv, k_rope, attention_mask, indices)
    if isinstance(keys, Reason):
        return keys
    batch_size, num_heads, s_q, head_dim_qk = query.shape
    c_kv, k_rope, lengths = keys
    if not query.dtype == c_kv.dtype == k_rope.dtype == dtype:
        query, c_kv, k_rope = query.to(dtype), c_kv.to(dtype), k_rope.to(dtype)
    projection = projection_of(module, num_heads, dtype)
    q_nope, q_rope = query.split_with_sizes((dim_nope, head_dim_qk - dim_nope), -1)
    q_nope_abs, q_rope = projection.absorbed(q_nope), q_rope.transpose(1, 2)
    if indices is not None:  # each query has its own keys: a batch of single queries
        q_nope_abs, q_rope = (q.flatten(0, 1).unsqueeze(1) for q in (q_nope_abs, q_rope))
    decode: Callable[..., Any] = mla_plugin.decode
    if s_aux is not None:
        decode = functools.partial(with_sinks, decode, s_aux=s_aux)
    out = decode(
        q_nope_abs,
        q_rope,
        (c_kv, k_rope),
        softmax_scale=head_dim_qk**-0.5 if scaling is None else scaling,
        host="transformers",
        **lengths,
    )
    return projection.values(out, batch_size, s_q)


def _keys_of(
    query: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor, attention_mask: torch.Tensor | None
) -> Keys | Reason:
    """All keys, a range of them in each row, or copies of the tokens among them; else why not."""
    if attention_mask is None:
        return Keys(c_kv.select(1, 0), k_rope.select(1, 0), {})  # half the time of an index
    if attention_mask.dtype == torch.int32:
        ranges = dict(zip(("seqlens_kv", "leftpad_kv"), attention_mask[0, 0], strict=False))
        return Keys(c_kv[:, 0], k_rope[:, 0], ranges)
    if attention_mask.ndim != 2:
        return DENSE_MASK
    # One query sees every token up to it, be it padding itself; several ones have to be the last tokens of their rows.
    if query.shape[2] > 1 and not getattr(attention_mask, "queries_are_tokens", False):
        return PADDED_QUERIES
    order, _ = tokens_first(attention_mask)
    rows = torch.arange(len(order), device=order.device)[:, None]
    lengths = {"seqlens_kv": attention_mask.sum(1, dtype=torch.int32)}
    return Keys(c_kv[rows, 0, order], k_rope[rows, 0, order], lengths)


def _may_fuse(query: torch.Tensor) -> bool:
    return query.is_cuda


def _fused(
    module: Any,
    query: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dtype: torch.dtype,
    scaling: float | None,
) -> torch.Tensor | None:
    """The same by kernels that also multiply by W_UK and W_UV; None if this call has to be computed in parts."""
    weight = plain_weight_of(module, dtype)
    if weight is None or not query.dtype == c_kv.dtype == k_rope.dtype == dtype:
        return None
    if attention_mask is not None and attention_mask.dtype != torch.int32:
        return None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return decode_projected(
        query,
        c_kv,
        k_rope,
        weight,
        module.qk_nope_head_dim,
        module.v_head_dim,
        softmax_scale=scale,
        ranges=attention_mask,
        host="transformers",
    )


def _makes_its_mask(module: Any) -> bool:
    """GLM-5 Next: its layers make an additive mask of the keys that they select, and pass that instead of indices."""
    return hasattr(module, "build_attention_mask_from_topk")


def most_selected(module: Any) -> int:
    """Keys that a sparse layer selects for a query, if there are as many."""
    config = module.config
    if not _makes_its_mask(module):
        return int(config.index_topk)
    return int(config.index_topk + config.index_kpool - 1)  # whole pools, and the last one as far as it goes


def _indices_within(module: Any, mask: torch.Tensor) -> torch.Tensor | None:
    if not _makes_its_mask(module):
        return None
    return mask[:, 0].topk(min(most_selected(module), mask.shape[-1])).indices


def _is_pattern(module: Any, mask: torch.Tensor | None) -> bool:
    """Whether the mask does nothing but show and hide keys, from all heads alike."""
    if mask is None or mask.ndim != 4 or mask.shape[1] != 1:
        return False
    return mask.dtype == torch.bool or hasattr(mask, "is_pattern") or _makes_its_mask(module)


def _selected_keys(
    module: Any,
    query: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    indices: torch.Tensor,
) -> Keys | Reason:
    """Copies [B S_q, top_k, ..] of the latents that each query selected, those that the mask shows it first.

    Not where the mask may add to the scores, nor where the copies would take more memory than K and V.
    """
    if not _is_pattern(module, mask):
        return DENSE_MASK
    mask = cast(torch.Tensor, mask)
    (batch_size, num_heads, s_q, head_dim_qk), s_kv = query.shape, c_kv.shape[2]
    top_k, latent_dim = indices.shape[-1], c_kv.shape[-1] + k_rope.shape[-1]
    if s_q * top_k * latent_dim > s_kv * num_heads * (head_dim_qk + module.v_head_dim):
        return MANY_QUERIES
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    indices = indices.long()
    visible = visible[:, 0].expand(batch_size, s_q, s_kv).gather(-1, indices)
    order = visible.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    chosen = indices.gather(-1, order).flatten(1)  # [B, S_q top_k]
    rows = torch.arange(batch_size, device=chosen.device)[:, None]
    c_kv, k_rope = (x[rows, 0, chosen].view(batch_size * s_q, top_k, x.shape[-1]) for x in (c_kv, k_rope))
    return Keys(c_kv, k_rope, {"seqlens_kv": visible.sum(-1, dtype=torch.int32).flatten()})
