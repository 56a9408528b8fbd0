"""Hugging Face transformers: the attention implementation ``mla_plugin`` for every model of the library.

Importing this module registers an attention function and a mask function under that name, so that
``from_pretrained(..., attn_implementation="mla_plugin")`` and ``model.set_attn_implementation("mla_plugin")`` work.

Masks, in the form that costs least:

* plain causal without padding: no mask at all, the diagonal ends at the last query and the last key;
* plain causal with padding or with unused cache slots: the 2-D padding mask. The attention function moves the valid
  tokens of each row to the front and runs with lengths, so memory stays linear and the fused backends can run;
* every other pattern: the dense mask that transformers' own ``sdpa`` gets.

A query that sees no key gives 0; transformers' eager attention averages over all values there. Both only at padding.

What differs between the supported versions of transformers:

=====================  ==========================  ==========================================================
                       4.57                        5.x with ``expand_kv`` (5.15 and newer)
=====================  ==========================  ==========================================================
query position         ``cache_position`` tensor   ``q_length``, ``q_offset`` (a tensor for a static cache)
MLA cache              expanded K and V            latents, expanded by the model before attention is called
sparse (DSA) models    none                        ``indices`` [B, S_q, top_k] of the selected keys
=====================  ==========================  ==========================================================

The registries are described in transformers' documentation of ``AttentionInterface``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from packaging.version import Version

import mla_plugin

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(
        'mla_plugin.compat.transformers needs transformers >= 4.57: pip install "mla-plugin[transformers]"'
    ) from error

NAME = "mla_plugin"
MINIMUM_VERSION = "4.57"

_REFUSED = {
    "softcap": 'soft-capped scores; use attn_implementation="eager"',
    "position_bias": 'a relative position bias; use attn_implementation="sdpa"',
    "head_mask": 'a mask over heads; use attn_implementation="eager"',
    "cache": 'continuous batching over a paged cache; use generate() or attn_implementation="paged|sdpa"',
    "output_attentions": 'attention weights, which no fused backend stores; use attn_implementation="eager"',
}


def register() -> None:
    """Register ``mla_plugin`` with transformers; calling it again changes nothing.

    Raises:
        ImportError: transformers is older than 4.57.
    """
    if Version(transformers.__version__) < Version(MINIMUM_VERSION):
        raise ImportError(
            f"transformers {transformers.__version__} is installed, mla_plugin needs >= {MINIMUM_VERSION}: "
            "pip install --upgrade transformers"
        )
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask_for)


def attention_mask_for(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that ``attention_forward`` gets, built once per forward of a model.

    Args:
        batch_size: B.
        kv_length: number of keys that attention will see; a static cache counts its unused slots.
        kv_offset: absolute position of the first key.
        mask_function: transformers' pattern, ``(batch, head, query, key) -> bool``.
        attention_mask: bool [B, <= kv_offset + kv_length], True = a token, False = padding.
        allow_is_causal_skip: False where the model itself reads the mask, so that it has to be dense.
        **kwargs: the rest of transformers' contract for mask functions.

    Returns:
        None (plain causal, nothing padded), bool [B, n] with n <= kv_length (plain causal over the first n keys, whose
        last ones belong to the queries; True = a token), or bool [B, 1, S_q, kv_length] (True = attend).
    """
    # Below, Python reads tensor values, which a traced graph must not do.
    if mask_function is causal_mask_function and allow_is_causal_skip and not torch.compiler.is_compiling():
        q_length, q_offset, device = _query_span(kwargs)
        num_keys = q_offset + q_length - kv_offset
        if q_length <= num_keys <= kv_length:
            if attention_mask is None:
                attention_mask = torch.ones(batch_size, num_keys, dtype=torch.bool, device=device)
            tokens = attention_mask[:, kv_offset : kv_offset + num_keys]
            tokens = torch.nn.functional.pad(tokens, (0, num_keys - tokens.shape[1]))
            return None if num_keys == kv_length and bool(tokens.all()) else tokens
    return sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **kwargs,
    )


def _query_span(arguments: dict[str, Any]) -> tuple[int, int, torch.device | str]:
    """Number of queries, absolute position of the first, and their device."""
    if "q_length" in arguments:
        return arguments["q_length"], int(arguments.get("q_offset", 0)), arguments.get("device", "cpu")
    position = arguments["cache_position"]
    return position.shape[0], int(position[0]), position.device


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
        key: [B, H_kv, S_kv, head_dim_qk].
        value: [B, H_kv, S_kv, head_dim_v].
        attention_mask: what ``attention_mask_for`` returned, or a 4-D mask of the caller, broadcastable to
            [B, H, S_q, S_kv]: bool (True = attend) or additive. A 4-D mask is the whole pattern.
        scaling: multiplies the scores; head_dim_qk ** -0.5 by default.
        dropout: probability of dropping an attention weight; the model passes 0 in evaluation.
        is_causal: used without a mask only.
        sliding_window: keys that a query sees, itself included; used without a 4-D mask only.
        s_aux: attention sinks [H], one more score per row that takes weight and has no value.
        indices: [B, S_q, top_k], the keys that a sparse layer selected; the mask still holds.
        cu_seq_lens_q, cu_seq_lens_k: int32 [n + 1], packed sequences; they replace the mask.
        max_length_q, max_length_k: longest packed sequence.
        **kwargs: whatever else the model passes on, such as ``position_ids``.

    Returns:
        ([B, S_q, H, head_dim_v], None), contiguous.

    Raises:
        ValueError: an argument that no backend computes, or a mask of an unknown form.
    """
    _refuse(kwargs)
    q, k, v = (x.transpose(1, 2) for x in _cast_for_autocast(query, key, value))
    is_packed = cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if indices is not None and (is_packed or attention_mask is None or attention_mask.ndim != 4):
        raise ValueError(
            "indices, the selection of a sparse attention layer, need the 4-D mask that the model builds for its "
            "indexer: describe packed sequences to this model by position_ids, without cu_seq_lens_q and cu_seq_lens_k"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    attend = partial(
        _attend,
        s_aux=s_aux,
        softmax_scale=scaling,
        dropout_p=dropout,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    if is_packed:
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        out = _packed(attend, q, k, v, lengths, is_causal, sliding_window)
    elif attention_mask is None:
        out = _unmasked(attend, q, k, v, is_causal, sliding_window)
    elif attention_mask.ndim == 2:
        out = _padded(attend, q, k, v, attention_mask, sliding_window)
    else:
        out = attend(q, k, v, **_dense_mask(attention_mask, indices, q, k.shape[1]))
    return out.contiguous(), None


def _refuse(arguments: dict[str, Any]) -> None:
    for name, advice in _REFUSED.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise ValueError(f'attn_implementation="{NAME}" does not compute {name}={_brief(value)}: {advice}')


def _brief(value: object) -> str:
    return f"<tensor {list(value.shape)}>" if isinstance(value, torch.Tensor) else repr(value)


def _cast_for_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast float32 to autocast's dtype, as autocast does for PyTorch's own attention.

    RoPE in float32 leaves q in float32 beside a bfloat16 k; eager attention multiplies them because autocast casts both.
    """
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, s_aux: torch.Tensor | None, **arguments: Any
) -> torch.Tensor:
    """``mla_plugin.attention``, followed by the attention sinks.

    A sink adds exp(s_aux) to the softmax's denominator exp(lse), which scales the row by sigmoid(lse - s_aux).
    """
    if s_aux is None:
        return mla_plugin.attention(q, k, v, **arguments)
    out, lse = mla_plugin.attention(q, k, v, return_lse=True, **arguments)
    weight = torch.sigmoid(lse.transpose(-1, -2) - s_aux)  # [..., S_q, H]
    return out * weight.unsqueeze(-1).to(out.dtype)


def _window(sliding_window: int | None, num_keys: int, is_causal: bool) -> dict[str, Any]:
    """Arguments for a sliding window; none where every key is inside, so that it keeps no backend out."""
    if sliding_window is None or sliding_window >= num_keys:
        return {}
    reach = sliding_window - 1
    return {"window_size": (reach, 0 if is_causal else reach), "bottom_right_diagonal": True}


def _unmasked(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    sliding_window: int | None,
) -> torch.Tensor:
    s_q, s_kv = q.shape[1], k.shape[1]
    attn_mask_type = "causal" if s_q == s_kv else "causal_bottom_right"
    if not is_causal or s_q == 1:
        attn_mask_type = "no_mask"
    return attend(q, k, v, attn_mask_type=attn_mask_type, **_window(sliding_window, s_kv, is_causal))


def _packed(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[torch.Tensor | None, torch.Tensor | None, int | None, int | None],
    is_causal: bool,
    sliding_window: int | None,
) -> torch.Tensor:
    cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv = lengths
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        missing = "cu_seq_lens_q" if cu_seqlens_q is None else "cu_seq_lens_k"
        raise ValueError(f"{missing} is missing: packed sequences need both, int32 [number of sequences + 1]")
    out = attend(
        *(x.flatten(0, 1) for x in (q, k, v)),
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right" if is_causal else "padding",
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        **_window(sliding_window, k.shape[0] * k.shape[1], is_causal),
    )
    return out.unflatten(0, q.shape[:2])


def _padded(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens: torch.Tensor,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention over the keys that ``tokens`` [B, n] marks, wherever the padding is; padded queries give 0.

    The tokens of each row move to the front in their order, so lengths describe the mask. Nothing waits for the device.
    """
    s_q, num_keys = q.shape[1], tokens.shape[1]
    if tokens.dtype != torch.bool or not s_q <= num_keys <= k.shape[1]:
        raise ValueError(
            f"a 2-D attention mask is bool [B, n], n between the number of queries {s_q} and of keys {k.shape[1]}; "
            f"got {tokens.dtype} {list(tokens.shape)}"
        )
    q_tokens = tokens[:, num_keys - s_q :]
    rows = torch.arange(q.shape[0], device=q.device)[:, None]
    q_order, kv_order = _tokens_first(q_tokens), _tokens_first(tokens)
    out = attend(
        q[rows, q_order],
        k[rows, kv_order],
        v[rows, kv_order],
        attn_mask_type="padding_causal_bottom_right",
        cu_seqlens_q=_cumulative_lengths(q_tokens),
        cu_seqlens_kv=_cumulative_lengths(tokens),
        **_window(sliding_window, num_keys, is_causal=True),
    )
    return out[rows, q_order.argsort()]


def _tokens_first(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.to(torch.int8).argsort(dim=1, descending=True, stable=True)


def _cumulative_lengths(tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tokens.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _dense_mask(mask: torch.Tensor, indices: torch.Tensor | None, q: torch.Tensor, num_keys: int) -> dict[str, Any]:
    """Arguments for a 4-D mask, bool (True = attend) or additive, and for the keys that a sparse layer selected."""
    if mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            "an attention mask is 4-D and bool (True = attend) or floating point (added to the scores), or the 2-D "
            f"mask that this implementation makes itself; got {mask.dtype} {list(mask.shape)}"
        )
    mask = mask[..., :num_keys]
    arguments: dict[str, Any] = {"attn_mask_type": "arbitrary"}
    if mask.dtype == torch.bool:
        hidden = ~mask
    else:
        # The lowest number means "masked" in transformers; as a bias it would average over the keys of an empty row.
        bias = mask.to(q.dtype)
        hidden = bias <= torch.finfo(bias.dtype).min
        arguments.update(core_attention_bias_type="post_scale_bias", core_attention_bias=bias.masked_fill(hidden, 0.0))
    if indices is not None:
        batch_size, s_q = q.shape[:2]
        unselected = torch.ones(batch_size, s_q, num_keys, dtype=torch.bool, device=q.device)
        hidden = hidden | unselected.scatter_(-1, indices.long(), False).unsqueeze(1)
    return {**arguments, "attention_mask": hidden}


register()
