"""The attention function: what a mask and the arguments of a model run as."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

import mla_plugin
from mla_plugin.compat.transformers import few_keys, latent, ranks
from mla_plugin.compat.transformers.bidirectional import padded_keys, sequences
from mla_plugin.compat.transformers.causality import is_causal_without_mask
from mla_plugin.compat.transformers.checks import check_compressed_keys, check_no_padding, check_packing, fitted_mask
from mla_plugin.compat.transformers.latent import NAME
from mla_plugin.compat.transformers.masks import causal_with_lengths, packing_arguments, refuse_packing_of_hybrids
from mla_plugin.compat.transformers.padding import hidden_by, tokens_first
from mla_plugin.compat.transformers.sinks import with_sinks
from mla_plugin.compat.transformers.steps import Reason, record

Attend: TypeAlias = Callable[..., torch.Tensor]

_REFUSED = {
    "softcap": 'soft-capped scores: use attn_implementation="eager"',
    "position_bias": 'a relative position bias: use attn_implementation="eager"',
    "block_indices": 'blocks of keys that each layer selects (MiniMax M3): use attn_implementation="sdpa"',
    "head_mask": 'a mask over heads: use attn_implementation="eager"',
    "cache": 'a paged cache (continuous batching): use generate(), or attn_implementation="sdpa"',
    "output_attentions": 'attention weights, which fused kernels never store: use attn_implementation="eager"',
}


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run one attention layer of a transformers model on the best backend.

    Args:
        module: the attention layer; its ``is_causal`` is the default of ``is_causal``.
        query: [B, H, S_q, head_dim_qk].
        key: [B, H_kv, S_kv, head_dim_qk]; c_kv [B, 1, S_kv, R] of a layer that passes latents on (see ``latent``).
        value: [B, H_kv, S_kv, head_dim_v]; k_rope [B, 1, S_kv, Dr] of such a layer.
        attention_mask: what ``attention_mask_for`` returned, or a 4-D mask of the caller, broadcastable to
            [B, H, S_q, S_kv]: bool (True = attend) or additive. A 4-D mask is the whole pattern.
        scaling: multiplies the scores; default head_dim_qk ** -0.5.
        dropout: probability of dropping an attention weight; the model passes 0 in evaluation.
        is_causal: consulted without a mask and for ``cu_seq_lens_q``.
        sliding_window: keys that a query sees, itself included; a 4-D mask holds it already.
        s_aux: attention sinks [H]: one more score per row, which takes weight and has no value.
        indices: [B, S_q, top_k], keys that a sparse layer selected; they narrow a 4-D mask.
        cu_seq_lens_q, cu_seq_lens_k: int32 [number + 1], packed sequences; they narrow a 4-D mask.
        max_length_q, max_length_k: longest packed sequence.
        **kwargs: whatever else the model passes on, such as ``position_ids``.

    Returns:
        ([B, S_q, H, head_dim_v], None), contiguous.

    Raises:
        ValueError: an argument that no backend computes, arguments that contradict each other, a mask of another form,
            of another batch size or for more keys than there are; lengths that do not fit the tokens; inside of
            ``context_parallel`` also what it refuses.
        TypeError: lengths of another type or dtype, a mask that is no tensor.
    """
    _refuse(kwargs)
    if is_causal is None:
        is_causal = is_causal_without_mask(module) if attention_mask is None else getattr(module, "is_causal", True)
    if (shared := ranks.current_for(module)) is not None:
        masks = {"attention_mask": attention_mask, "indices": indices}
        masks |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        shared.check_call(module, query, key, {**masks, "position_ids": kwargs.get("position_ids")})
        of_ranks = partial(shared.attend, module, query, key, value)
        return of_ranks(is_causal=is_causal, scaling=scaling, dropout=dropout, s_aux=s_aux), None
    packing = None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        packing = packing_arguments(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if attention_mask is not None:
        attention_mask = fitted_mask(attention_mask, len(query), key.shape[2])
        check_compressed_keys(module, attention_mask, packing)
        if packing is not None:
            packing = check_packing(packing, query, key)
            check_no_padding(attention_mask)
    if attention_mask is not None and indices is None and hasattr(attention_mask, "packing"):
        packing, attention_mask, is_causal = packing or attention_mask.packing, None, True
    if indices is not None and (attention_mask is None or attention_mask.ndim != 4):
        raise ValueError("indices narrow a 4-D mask, as sparse models build it for their indexer; got no such mask")
    if packing is not None:
        _check_unmixed(module, packing, query, key, attention_mask, indices)

    if latent.gets_latents(module):
        is_plain = is_causal and packing is None and sliding_window is None and not dropout
        found: torch.Tensor | Reason = latent.NOT_PLAIN
        if is_plain:
            found = latent.attend(module, query, key, value, attention_mask, indices, scaling, s_aux)
        if not isinstance(found, Reason):
            record(module, None)
            return found, None
        record(module, found)
        is_one = found is latent.FEW_KEYS and attention_mask is None and indices is None and s_aux is None
        if is_one and few_keys.takes(query, key, value):
            return few_keys.attend(module, query, key, value, scaling), None
        num_keys = attention_mask.shape[1] if attention_mask is not None and attention_mask.ndim == 2 else None
        key, value = latent.expand(module, key[:, :, :num_keys], value[:, :, :num_keys])
    else:
        latent.pass_later_latents_on(module)

    attend: Callable[..., Any] = mla_plugin.attention
    if s_aux is not None:
        attend = partial(with_sinks, attend, s_aux=s_aux)
    attend = partial(attend, softmax_scale=scaling, dropout_p=dropout, host="transformers")
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if attention_mask is None and packing is not None:
        out = _packed(attend, q, k, v, packing, is_causal, sliding_window)
    elif attention_mask is None:
        out = _unmasked(attend, q, k, v, is_causal, sliding_window)
    elif attention_mask.ndim == 2:
        out = _padded(attend, q, k, v, attention_mask, sliding_window)
    elif packing is None and _is_ranges(attention_mask, len(q)):
        out = _in_ranges(attend, q, k, v, attention_mask, sliding_window)
    elif packing is None and indices is None and not is_causal:
        out = _bidirectional(attend, q, k, v, attention_mask)
    else:
        out = attend(q, k, v, **_dense_mask(attention_mask, indices, packing, q, k))
    return out.contiguous(), None


def _refuse(arguments: dict[str, Any]) -> None:
    for name in _REFUSED.keys() & arguments.keys():
        advice, value = _REFUSED[name], arguments[name]
        if value is not None and value is not False:
            raise ValueError(f'attn_implementation="{NAME}" got {name} and does not compute {advice}')


def _check_unmixed(
    module: torch.nn.Module,
    packing: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    indices: torch.Tensor | None,
) -> None:
    """Refuse packed sequences where another part of the model mixes them, which this function cannot undo."""
    refuse_packing_of_hybrids(getattr(module, "config", None))
    if indices is None:
        return
    assert mask is not None
    across = _across_sequences(packing, len(query), query.shape[2], key.shape[2])
    hidden = hidden_by(mask, query.dtype)
    if torch.compiler.is_compiling() or bool((across & ~hidden).any()):
        raise ValueError(
            f"packed sequences: the mask that {type(module).__name__} selected keys by shows it those of other "
            "sequences; pass position_ids that start again at 0 in each sequence, and no attention_mask"
        )


def _across_sequences(packing: dict[str, Any], batch_size: int, s_q: int, s_kv: int) -> torch.Tensor:
    """Whether a key belongs to another sequence than the query, bool [B, 1, S_q, S_kv]."""
    of_query, of_key = (
        torch.bucketize(torch.arange(batch_size * length, device=offsets.device), offsets, right=True)
        for length, offsets in ((s_q, packing["cu_seqlens_q"]), (s_kv, packing["cu_seqlens_kv"]))
    )
    return of_query.view(-1, 1, s_q, 1) != of_key.view(-1, 1, 1, s_kv)


def _is_ranges(mask: torch.Tensor, batch_size: int) -> bool:
    """Whether it is ``masks``' own form for key ranges, int32 [1, 1, 1 or 2, B]."""
    return mask.dtype == torch.int32 and mask.shape[:2] == (1, 1) and mask.shape[2] <= 2 and mask.shape[3] == batch_size


def _window(sliding_window: int | None, num_keys: int, is_causal: bool) -> dict[str, Any]:
    """The argument for a sliding window; none where every key is inside, so that it keeps no backend out."""
    if sliding_window is None or sliding_window >= num_keys:
        return {}
    return {"window_size": (sliding_window - 1, 0 if is_causal else sliding_window - 1)}


def _unmasked(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, sliding_window: int | None
) -> torch.Tensor:
    s_q, s_kv = q.shape[1], k.shape[1]
    attn_mask_type = "causal" if s_q == s_kv else "causal_bottom_right"
    if s_q == 1 or not is_causal:
        attn_mask_type = "no_mask"
    return attend(q, k, v, attn_mask_type=attn_mask_type, **_window(sliding_window, s_kv, is_causal))


def _padded(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens: torch.Tensor,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention over the keys that ``tokens`` [B, n] marks, wherever the padding is.

    The tokens of each row move to the front in their order, so lengths describe them. Nothing waits for the device.
    Padded queries after the last token of a row attend to all tokens of it, as in every other implementation: a loss
    may read them. Other padded queries give 0, and under a window, which ``masks`` gives another form, all do.
    """
    s_q, num_keys = q.shape[1], tokens.shape[1]
    if tokens.dtype != torch.bool or not s_q <= num_keys <= k.shape[1]:
        raise ValueError(
            f"a 2-D attention mask is bool [B, n], n between {s_q} (the queries) and {k.shape[1]} (the keys); "
            f"got {tokens.dtype} {list(tokens.shape)}: pass it to the model, which prepares it"
        )
    q_tokens = tokens if s_q == num_keys else tokens[:, num_keys - s_q :]
    out = _compacted(attend, q, k, v, q_tokens, tokens, sliding_window)
    if getattr(tokens, "ends_with_tokens", False) or _window(sliding_window, num_keys, is_causal=True):
        return out
    position = torch.arange(num_keys, device=tokens.device)
    last_token = torch.where(tokens, position, -1).amax(1, keepdim=True)
    behind = (position > last_token)[:, num_keys - s_q :]
    return torch.where(
        behind[..., None, None], _compacted(attend, q, k, v, behind, tokens, sliding_window, is_causal=False), out
    )


def _in_ranges(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ranges: torch.Tensor,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention over a range of keys in each row, int32 [1, 1, 1 or 2, B]; the queries are its last ones."""
    end, *padding = ranges[0, 0, :, :, None]  # [B, 1]
    first = padding[0] if padding else torch.zeros_like(end)
    position = torch.arange(k.shape[1], device=k.device)
    tokens = (position >= first) & (position < end)
    q_tokens = end - q.shape[1] + torch.arange(q.shape[1], device=q.device) >= first
    return _compacted(attend, q, k, v, q_tokens, tokens, sliding_window)


def _compacted(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_tokens: torch.Tensor,
    tokens: torch.Tensor,
    sliding_window: int | None,
    is_causal: bool = True,
) -> torch.Tensor:
    rows = torch.arange(len(q), device=q.device)[:, None]
    kv_order, cu_seqlens_kv = tokens_first(tokens)
    q_order, cu_seqlens_q = (kv_order, cu_seqlens_kv) if q_tokens is tokens else tokens_first(q_tokens)
    mask = causal_with_lengths(cu_seqlens_q, cu_seqlens_kv) | ({} if is_causal else {"attn_mask_type": "padding"})
    out = attend(
        q[rows, q_order],
        k[rows, kv_order],
        v[rows, kv_order],
        **mask,
        **_window(sliding_window, tokens.shape[1], is_causal=True),
    )
    return out[rows, q_order.argsort()]


def _packed(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: dict[str, Any],
    is_causal: bool,
    sliding_window: int | None,
) -> torch.Tensor:
    mask = {} if is_causal else {"attn_mask_type": "padding"}
    window = _window(sliding_window, k.shape[0] * k.shape[1], is_causal)
    out = attend(*(x.flatten(0, 1) for x in (q, k, v)), qkv_format="thd", **{**packing, **mask, **window})
    return out.view(*q.shape[:2], *out.shape[1:])


def _bidirectional(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """A 4-D mask of a layer that is not causal: by lengths where it says no more than lengths do."""
    (batch_size, s_q), s_kv = q.shape[:2], k.shape[1]
    keys = padded_keys(mask, s_q)
    if keys is not None:
        order, cu_seqlens_kv = tokens_first(keys.expand(batch_size, s_kv))
        rows = torch.arange(batch_size, device=q.device)[:, None]
        cu_seqlens_q = torch.arange(batch_size + 1, dtype=torch.int32, device=q.device) * s_q
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
        return attend(q, k[rows, order], v[rows, order], attn_mask_type="padding", **lengths)
    is_mask = mask.dtype == torch.bool or mask.is_floating_point()
    packing = (
        sequences(mask, q.dtype) if is_mask and mask.shape[::3] == (batch_size, s_q) == (batch_size, s_kv) else None
    )
    if packing is None:
        return attend(q, k, v, **_dense_mask(mask, None, None, q, k))
    if len(packing["cu_seqlens_q"]) == batch_size + 1:
        return attend(q, k, v, attn_mask_type="no_mask")
    return _packed(attend, q, k, v, packing, False, None)


def _dense_mask(
    mask: torch.Tensor,
    indices: torch.Tensor | None,
    packing: dict[str, Any] | None,
    q: torch.Tensor,
    k: torch.Tensor,
) -> dict[str, Any]:
    """Arguments for a 4-D mask, bool (True = attend) or additive, narrowed by selected keys and packed sequences."""
    if mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            "an attention mask is 4-D, bool (True = attend) or floating point (added to the scores), or one that "
            f"this implementation makes itself; got {mask.dtype} {list(mask.shape)}"
        )
    batch_size, s_q, s_kv = q.shape[0], q.shape[1], k.shape[1]
    arguments: dict[str, Any] = {"attn_mask_type": "arbitrary"}
    hidden = hidden_by(mask, q.dtype)
    if mask.dtype != torch.bool:
        arguments["core_attention_bias_type"] = "post_scale_bias"
        # as a bias, the lowest number would let empty rows average over all keys
        arguments["core_attention_bias"] = mask.masked_fill(hidden, 0.0).to(q.dtype)
    if indices is not None:
        unselected = torch.ones(batch_size, s_q, s_kv, dtype=torch.bool, device=q.device)
        hidden = hidden | unselected.scatter_(-1, indices.long(), False).unsqueeze(1)
    if packing is not None:
        hidden = hidden | _across_sequences(packing, batch_size, s_q, s_kv)
    return {**arguments, "attention_mask": hidden}
