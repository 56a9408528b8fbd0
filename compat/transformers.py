"""Hugging Face transformers: the attention implementation ``mla_plugin``, for every model of the library.

Importing this module registers an attention function and a mask function under that name, so that
``from_pretrained(..., attn_implementation="mla_plugin")`` and ``model.set_attn_implementation("mla_plugin")`` work.

The mask function describes a batch in the form that costs least:

==========================  ============================  =====================================================
batch                       mask                          runs as
==========================  ============================  =====================================================
causal, nothing padded      None                          causal, the diagonal ends at the last query and key
causal, padding or unused   bool [B, n]                   the tokens of each row moved to the front, with lengths
cache slots
causal, packed sequences    bool [B, 1, S_q, S_kv] with   packed (thd); so do ``cu_seq_lens_q`` without a mask
                            an attribute ``packing``
any other pattern           bool [B, 1, S_q, S_kv]        arbitrary mask; so does a 4-D mask of the caller
sparse (DSA) model          additive, of the same shape   arbitrary mask, narrowed by the keys that the layer chose
==========================  ============================  =====================================================

A query that sees no key gives 0. Eager attention averages over all values there; such queries are padding in both.

What differs between the supported versions of transformers:

====================  ===================================  ============================================================
                      4.57                                 5.15 and newer
====================  ===================================  ============================================================
queries               ``cache_position``, a tensor         ``q_length`` and ``q_offset``, a tensor for a static cache
packed sequences      found in every batch without mask    found where ``position_ids`` start again
cache of an MLA       expanded K and V                     latents; the model expands them before it calls attention
sparse (DSA) models   none                                 pass ``indices``; before they do, they add the mask to other
                                                           scores, or, in newer versions, also take a bool
====================  ===================================  ============================================================

The contract is that of transformers' ``AttentionInterface`` and ``AttentionMaskInterface``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from packaging.version import Version

import mla_plugin

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
except ImportError as error:
    raise ImportError(
        'mla_plugin.compat.transformers needs transformers >= 4.57: pip install "mla-plugin[transformers]"'
    ) from error

NAME = "mla_plugin"
MINIMUM_VERSION = "4.57"

MaskFunction: TypeAlias = Callable[..., torch.Tensor]
Attend: TypeAlias = Callable[..., torch.Tensor]

_REFUSED = {
    "softcap": 'soft-capped scores: use attn_implementation="eager"',
    "position_bias": 'a relative position bias: use attn_implementation="sdpa"',
    "head_mask": 'a mask over heads: use attn_implementation="eager"',
    "cache": 'a paged cache (continuous batching): use generate(), or attn_implementation="sdpa"',
    "output_attentions": 'attention weights, which fused kernels never store: use attn_implementation="eager"',
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
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Build the mask that ``attention_forward`` gets; called once per forward of a model, may wait for the device.

    Args:
        mask_function: transformers' pattern, ``(batch, head, query, key) -> bool``.
        attention_mask: bool [B, at most kv_offset + kv_length], True = a token, False = padding.
        allow_is_causal_skip: False where the model itself reads the mask, or where ``mask_function`` is more than
            causal and, given a ``local_size``, local.
        **kwargs: the rest of transformers' contract for mask functions: ``batch_size``, ``kv_length`` (a static cache
            counts its unused slots), ``kv_offset`` (absolute position of the first key) and so on.

    Returns:
        One of the forms in the table above. bool [B, n], n <= kv_length: True = a token; the queries are the last of
        these n keys. [B, 1, S_q, kv_length]: bool, True = attend, or additive.
    """
    pattern = {
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "allow_is_causal_skip": False,
        **kwargs,
    }
    if getattr(kwargs.get("config"), "index_topk", None) is not None:
        return cast(torch.Tensor, eager_mask(**pattern))
    if torch.compiler.is_compiling():  # a traced graph must not read values of tensors, as the compact forms do
        return cast(torch.Tensor, sdpa_mask(**pattern))
    local_size, num_keys = kwargs.get("local_size"), kwargs.get("kv_offset", 0) + kwargs["kv_length"]
    is_plain = mask_function is causal_mask_function or (local_size is not None and num_keys <= local_size)
    tokens = _tokens(attention_mask, **kwargs) if is_plain and allow_is_causal_skip else None
    if tokens is not None:
        return None if tokens.shape[1] == kwargs["kv_length"] and bool(tokens.all()) else tokens
    packing = _recognize_packing(mask_function)
    if packing is not None and len(packing["cu_seqlens_q"]) == kwargs["batch_size"] + 1:
        return None
    mask = cast(torch.Tensor, sdpa_mask(**pattern))
    if packing is not None:
        mask.packing = packing  # type: ignore[attr-defined]
    return mask


def _tokens(
    attention_mask: torch.Tensor | None, *, batch_size: int, kv_length: int, kv_offset: int = 0, **kwargs: Any
) -> torch.Tensor | None:
    """Which of the keys up to the last query are tokens, bool [B, n]; None unless the queries are the last of them."""
    if "q_length" in kwargs:
        q_length, q_offset, device = kwargs["q_length"], int(kwargs.get("q_offset", 0)), kwargs.get("device", "cpu")
    else:
        position = kwargs["cache_position"]
        q_length, q_offset, device = position.shape[0], int(position[0]), position.device
    num_keys = q_offset + q_length - kv_offset
    if not q_length <= num_keys <= kv_length:
        return None
    if attention_mask is None:
        return torch.ones(batch_size, num_keys, dtype=torch.bool, device=device)
    tokens = attention_mask[:, kv_offset : kv_offset + num_keys]
    return torch.nn.functional.pad(tokens, (0, num_keys - tokens.shape[1]))


def _recognize_packing(mask_function: MaskFunction) -> dict[str, Any] | None:
    """The packed sequences, where the pattern is causal attention within each of them and nothing else; else None.

    transformers composes a pattern from closures, whose free variables are the only description of it.
    """
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    found = {part.__qualname__.partition(".")[0]: inspect.getclosurevars(part).nonlocals for part in parts}
    ids = found.pop("packed_sequence_mask_function", {}).get("packed_sequence_mask")
    # The newer versions also count positions anew in each sequence, which leaves the causal order as it is.
    renumbered = found.pop("remap_positions_for_packed_sequence", {}).get("mask_function")
    is_causal = renumbered is causal_mask_function or causal_mask_function in parts
    if ids is None or not is_causal or found.keys() - {"causal_mask_function"}:
        return None
    starts = torch.ones_like(ids, dtype=torch.bool)  # [B, S]
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    cu_seqlens = torch.nn.functional.pad(starts.flatten().nonzero().flatten(), (0, 1), value=ids.numel())
    longest = int(cu_seqlens.diff().max())
    cu_seqlens = cu_seqlens.to(torch.int32)
    return _packing(cu_seqlens, cu_seqlens, longest, longest)


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
        ValueError: an argument that no backend computes, arguments that contradict each other, a mask of another form.
    """
    _refuse(kwargs)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    attend = partial(_attend, s_aux=s_aux, softmax_scale=scaling, dropout_p=dropout, host="transformers")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    packing = None
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        packing = _packing(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if attention_mask is not None and indices is None and hasattr(attention_mask, "packing"):
        packing, attention_mask, is_causal = packing or attention_mask.packing, None, True
    if indices is not None and (attention_mask is None or attention_mask.ndim != 4):
        raise ValueError("indices narrow a 4-D mask, as sparse models build it for their indexer; got no such mask")

    if attention_mask is None and packing is not None:
        out = _packed(attend, q, k, v, packing, is_causal, sliding_window)
    elif attention_mask is None:
        out = _unmasked(attend, q, k, v, is_causal, sliding_window)
    elif attention_mask.ndim == 2:
        if packing is not None:
            raise ValueError("cu_seq_lens_q and padding together: give either the lengths or an attention mask")
        out = _padded(attend, q, k, v, attention_mask, sliding_window)
    else:
        out = attend(q, k, v, **_dense_mask(attention_mask, indices, packing, q, k))
    return out.contiguous(), None


def _refuse(arguments: dict[str, Any]) -> None:
    for name, advice in _REFUSED.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise ValueError(f'attn_implementation="{NAME}" got {name} and does not compute {advice}')


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, s_aux: torch.Tensor | None, **arguments: Any
) -> torch.Tensor:
    """``mla_plugin.attention``, then the attention sinks.

    A sink adds exp(s_aux) to the softmax's denominator exp(lse), which scales the row by sigmoid(lse - s_aux).
    """
    if s_aux is None:
        return cast(torch.Tensor, mla_plugin.attention(q, k, v, **arguments))
    out, lse = mla_plugin.attention(q, k, v, return_lse=True, **arguments)
    weight = torch.sigmoid(lse.transpose(-1, -2) - s_aux)  # [..., S_q, H]
    return out * weight.unsqueeze(-1).to(out.dtype)


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


def _causal_with_lengths(cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor) -> dict[str, Any]:
    """Causal within sequences of these lengths; more backends know the top-left form, equal where q and k are alike."""
    alike = cu_seqlens_q is cu_seqlens_kv
    return {
        "attn_mask_type": "padding_causal" if alike else "padding_causal_bottom_right",
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
    }


def _padded(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens: torch.Tensor,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention over the keys that ``tokens`` [B, n] marks, wherever the padding is; padded queries give 0.

    The tokens of each row move to the front in their order, so lengths describe them. Nothing waits for the device.
    """
    s_q, num_keys = q.shape[1], tokens.shape[1]
    if tokens.dtype != torch.bool or not s_q <= num_keys <= k.shape[1]:
        raise ValueError(
            f"a 2-D attention mask is bool [B, n], n between {s_q} (the queries) and {k.shape[1]} (the keys); "
            f"got {tokens.dtype} {list(tokens.shape)}: pass it to the model, which prepares it"
        )
    rows = torch.arange(len(q), device=q.device)[:, None]
    kv_order, cu_seqlens_kv = _tokens_first(tokens)
    q_order, cu_seqlens_q = kv_order, cu_seqlens_kv
    if s_q < num_keys:
        q_order, cu_seqlens_q = _tokens_first(tokens[:, num_keys - s_q :])
    out = attend(
        q[rows, q_order],
        k[rows, kv_order],
        v[rows, kv_order],
        **_causal_with_lengths(cu_seqlens_q, cu_seqlens_kv),
        **_window(sliding_window, num_keys, is_causal=True),
    )
    return out[rows, q_order.argsort()]


def _tokens_first(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that moves the tokens of each row to its front, and cumulative numbers of tokens."""
    order = tokens.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return order, torch.nn.functional.pad(tokens.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _packing(
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_kv: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> dict[str, Any]:
    """Arguments that describe packed sequences."""
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        missing = "cu_seq_lens_q" if cu_seqlens_q is None else "cu_seq_lens_k"
        raise ValueError(f"{missing} is missing: packed sequences need both, int32 [number of sequences + 1]")
    return {
        **_causal_with_lengths(cu_seqlens_q, cu_seqlens_kv),
        "max_seqlen_q": None if max_seqlen_q is None else int(max_seqlen_q),
        "max_seqlen_kv": None if max_seqlen_kv is None else int(max_seqlen_kv),
    }


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
    mask = mask[..., :s_kv]
    arguments: dict[str, Any] = {"attn_mask_type": "arbitrary"}
    if mask.dtype == torch.bool:
        hidden = ~mask
    else:
        # transformers writes the lowest number for "masked"; as a bias it would let empty rows average over all keys.
        hidden = mask <= max(torch.finfo(mask.dtype).min, torch.finfo(q.dtype).min)
        arguments["core_attention_bias_type"] = "post_scale_bias"
        arguments["core_attention_bias"] = mask.masked_fill(hidden, 0.0).to(q.dtype)
    if indices is not None:
        unselected = torch.ones(batch_size, s_q, s_kv, dtype=torch.bool, device=q.device)
        hidden = hidden | unselected.scatter_(-1, indices.long(), False).unsqueeze(1)
    if packing is not None:
        of_query, of_key = (
            torch.bucketize(torch.arange(batch_size * length, device=q.device), packing[name], right=True)
            for length, name in ((s_q, "cu_seqlens_q"), (s_kv, "cu_seqlens_kv"))
        )
        hidden = hidden | (of_query.view(-1, 1, s_q, 1) != of_key.view(-1, 1, 1, s_kv))
    return {**arguments, "attention_mask": hidden}


register()
