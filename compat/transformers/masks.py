"""Masks: what the attention function needs to know of a batch, in the form that costs least."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from mla_plugin.compat.transformers import ranks
from mla_plugin.compat.transformers.causality import is_bidirectional_without_mask
from mla_plugin.compat.transformers.checks import check_longest, check_rows
from mla_plugin.compat.transformers.latent import caches_latents, is_decode, pass_latents_on

MaskFunction: TypeAlias = Callable[..., torch.Tensor]

_bidirectional: Any = getattr(masking_utils, "bidirectional_mask_function", None)  # since 5.0


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
        attention_mask: bool [B, n], True = a token, False = padding. Shorter than the keys, it hides the rest of them.
            A cache cuts a longer one, as transformers does; without one ``kv_length`` is n, and the layer refuses it.
        allow_is_causal_skip: False where the model itself reads the mask, or where ``mask_function`` is more than
            causal and, given a ``local_size``, local.
        **kwargs: the rest of transformers' contract for mask functions: ``batch_size``, ``kv_length`` (a static cache
            counts its unused slots), ``kv_offset`` (absolute position of the first key) and so on.

    Returns:
        One of the forms in the table above. bool [B, n], n <= kv_length: True = a token; the queries are the last of
        these n keys. [B, 1, S_q, kv_length]: bool, True = attend, or additive.

    Raises:
        ValueError: ``attention_mask`` is of another batch size; packed sequences that the model itself mixes.
    """
    if attention_mask is not None:
        check_rows(len(attention_mask), kwargs["batch_size"])
    given = {"mask_function": mask_function, "attention_mask": attention_mask}
    pattern = {**given, "allow_is_causal_skip": False, **kwargs}
    pass_latents_on(config := kwargs.get("config"))
    if (shared := ranks.current()) is not None:
        local_size = kwargs.get("local_size")
        is_wide = local_size is not None and local_size >= kwargs["kv_length"] * shared.group.size
        # A rank's positions jump in the middle, which transformers takes for packed sequences.
        is_causal = mask_function is causal_mask_function or is_wide or _recognize_packing(mask_function) is not None
        is_causal = is_causal and not _layers_deny_causality(config)
        shared.check_mask(attention_mask, is_causal=is_causal, config=config)
        return None
    if getattr(config, "index_topk", None) is not None:
        if _recognize_packing(mask_function) is not None:
            refuse_packing_of_hybrids(config)
        mask = cast(torch.Tensor, _noting(attention_mask, eager_mask(**pattern)))
        mask.is_pattern = True  # type: ignore[attr-defined]
        return mask
    if mask_function is causal_mask_function and _decodes_latents(config, kwargs):
        is_known, compact = _decode_mask(attention_mask, **kwargs)
        if is_known:
            return compact
    if is_bidirectional_without_mask(config):
        # the form that other parts of such a model expect
        return _noting(attention_mask, eager_mask(**pattern))
    if mask_function is _bidirectional and attention_mask is not None:
        return _padded_keys(attention_mask, **kwargs)
    local_size, num_keys = kwargs.get("local_size"), kwargs.get("kv_offset", 0) + kwargs["kv_length"]
    is_plain = mask_function is causal_mask_function or (local_size is not None and num_keys <= local_size)
    are_causal, is_cut = not _layers_deny_causality(config), _cuts_queries(config, kwargs)
    may_be_compact = is_plain and allow_is_causal_skip and are_causal
    is_traced = torch.compiler.is_compiling()  # a graph must not read values of tensors, as the other forms below do
    if may_be_compact and (is_traced or attention_mask is None):
        is_known, compact = _said_by_sizes(attention_mask, **kwargs)
        if is_known and (compact is None or not is_cut):
            return compact
    if is_traced:
        return cast(torch.Tensor, sdpa_mask(**pattern))
    tokens = _tokens(attention_mask, **kwargs) if may_be_compact else None
    if tokens is not None:
        compact = _described(tokens, kwargs)
        if compact is None or not is_cut:
            return compact
    packing = _recognize_packing(mask_function)
    if packing is not None and are_causal and len(packing["cu_seqlens_q"]) == kwargs["batch_size"] + 1:
        return None
    mask = cast(torch.Tensor, _noting(attention_mask, sdpa_mask(**pattern)))
    if packing is not None:
        mask.packing = packing  # type: ignore[attr-defined]
    return mask


def _noting(attention_mask: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Attach ``attention_mask`` to the dense mask made of it: padding beside lengths is refused. Not in a graph."""
    if mask is not None and not torch.compiler.is_compiling():
        mask.tokens = attention_mask  # type: ignore[attr-defined]
    return mask


def _described(tokens: torch.Tensor, sizes: dict[str, Any]) -> torch.Tensor | None:
    """The mask that ``_tokens`` says, with what its layers ask of it; None where every key is a token. Reads values."""
    queries = tokens[:, tokens.shape[1] - _num_queries(sizes) :]
    is_full, ends_with_tokens, queries_are_tokens = torch.stack(
        (tokens.all(), tokens[:, -1].all(), queries.all())
    ).tolist()
    if is_full and tokens.shape[1] == sizes["kv_length"]:
        return None
    tokens.ends_with_tokens = ends_with_tokens  # type: ignore[attr-defined]
    tokens.queries_are_tokens = queries_are_tokens  # type: ignore[attr-defined]
    if tokens.shape[1] < sizes["kv_length"]:
        tokens.num_keys = sizes["kv_length"]  # type: ignore[attr-defined]
    return tokens


def _layers_deny_causality(config: Any) -> bool:
    """Whether ``is_causal`` of the layers is False though the model asks for causal masks (PaliGemma's Gemma)."""
    return getattr(config, "use_bidirectional_attention", None) in (True, "all")


def _cuts_queries(config: Any, sizes: dict[str, Any]) -> bool:
    """Whether layers may get a part of the mask: Gemma 4 leaves out queries before layers that share keys and values.

    A mask over tokens has no queries that could be cut out. Without a mask the queries that are left count as the last
    ones. Gemma 3n shares keys and values too, and leaves no query out.
    """
    shares = getattr(config, "num_kv_shared_layers", 0) and config.model_type != "gemma3n_text"
    return bool(shares) and _num_queries(sizes) > 1


def _padded_keys(
    attention_mask: torch.Tensor,
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Keys that are tokens, expanded over the queries without memory; None where all are and the model allows that."""
    tokens = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    tokens = torch.nn.functional.pad(tokens, (0, kv_length - tokens.shape[1]))
    if allow_is_bidirectional_skip and not torch.compiler.is_compiling() and bool(tokens.all()):
        return None
    return tokens[:, None, None].expand(batch_size, 1, _num_queries(kwargs), kv_length)


def _num_queries(sizes: dict[str, Any]) -> int:
    return int(sizes["q_length"]) if "q_length" in sizes else int(sizes["cache_position"].shape[0])


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


def _said_by_sizes(
    attention_mask: torch.Tensor | None, *, q_length: int | None = None, kv_length: int, **kwargs: Any
) -> tuple[bool, torch.Tensor | None]:
    """What ``_tokens`` says where sizes alone tell it: whether that is so, and None where every key is a token."""
    q_offset, kv_offset = kwargs.get("q_offset", 0), kwargs.get("kv_offset", 0)
    if q_length is None or isinstance(q_offset, torch.Tensor) or q_offset + q_length - kv_offset != kv_length:
        return False, None
    if attention_mask is None:
        return True, None
    tokens = attention_mask[:, kv_offset : kv_offset + kv_length]
    return (True, tokens) if tokens.shape[1] == kv_length else (False, None)


def _decodes_latents(config: Any, sizes: dict[str, Any]) -> bool:
    """Whether the layers of this model attend to latents in a forward of these sizes."""
    dims: list[Any] = [getattr(config, name, None) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")]
    return caches_latents(config) and None not in dims and is_decode(sizes["q_length"], sizes["kv_length"], *dims)


def _decode_mask(
    attention_mask: torch.Tensor | None,
    *,
    batch_size: int,
    q_length: int,
    q_offset: int | torch.Tensor,
    kv_length: int,
    kv_offset: int = 0,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> tuple[bool, torch.Tensor | None]:
    """The mask of a forward that decodes over latents: whether it has a compact form, and that.

    The form is None if the rows have neither left padding nor unused slots. Otherwise it gives the keys of each row,
    int32 [1, 1, 1 or 2, B]: at [0, 0, 0] the end of the last query's keys, and with padding at [0, 0, 1] the first key
    that is a token. It has four dimensions because transformers takes a mask of two for tokens, when ``generate`` makes
    it ahead of the model.

    The ranges stay on the device. Whether there is padding is read from it once per forward, and with padding once more
    whether that is at the left; without an ``attention_mask`` nothing is read, and the position in a static cache never
    is.
    """
    end = q_offset + q_length - kv_offset
    first: int | torch.Tensor = 0
    is_padded = False
    if attention_mask is not None:
        if torch.compiler.is_compiling():
            return False, None
        tokens = attention_mask[:, kv_offset : kv_offset + kv_length]
        # A step over short contexts takes the host's time for its operations: few of them where there is no padding.
        if not _are_all_tokens(tokens, end):
            position = torch.arange(tokens.shape[1], device=tokens.device)
            tokens = tokens & (position < end)
            first = end - tokens.sum(1)
            in_range = (position >= first[:, None]) & (position < end)
            is_range, is_padded = torch.stack(((tokens == in_range).all(), first.any())).tolist()
            if not is_range:
                return False, None
    if not is_padded and not isinstance(end, torch.Tensor) and end == kv_length:
        return True, None
    # Each row begins at a multiple of 16 bytes: with another address a launch takes Triton's slow path.
    room = -(-batch_size // 4) * 4
    ranges = torch.empty(1, 1, 2 if is_padded else 1, room, dtype=torch.int32, device=device)[..., :batch_size]
    ranges[:, :, 0] = end
    if is_padded:
        ranges[:, :, 1] = first
    if attention_mask is not None and (isinstance(end, torch.Tensor) or end < kv_length):
        ranges.num_keys = kv_length  # type: ignore[attr-defined]
    return True, ranges


def _are_all_tokens(tokens: torch.Tensor, end: int | torch.Tensor) -> bool:
    """Whether there is a token at every position up to ``end``, as far as a mask without a padded position tells it."""
    reaches = end <= tokens.shape[1]
    if isinstance(reaches, torch.Tensor):
        return bool(tokens.all() & reaches)
    return reaches and bool(tokens.all())


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
    return packing_arguments(cu_seqlens, cu_seqlens, longest, longest)


def refuse_packing_of_hybrids(config: Any) -> None:
    """Raise where an MLA model has linear-attention layers, which take neither lengths nor positions."""
    has_linear = "linear_attention" in (getattr(config, "layer_types", None) or ())
    # In this order: Dots3 Note has one rank for each kind of layer, and its config raises if it is asked for one.
    if not has_linear or getattr(config, "kv_lora_rank", None) is None:
        return
    raise ValueError(
        f"packed sequences: the linear-attention layers of {config.model_type} run across their borders, whichever "
        "attn_implementation is set; pad the sequences instead, one in each row, and pass attention_mask"
    )


def causal_with_lengths(cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor) -> dict[str, Any]:
    """Causal within sequences of these lengths; more backends know the top-left form, equal where q and k are alike."""
    alike = cu_seqlens_q is cu_seqlens_kv
    return {
        "attn_mask_type": "padding_causal" if alike else "padding_causal_bottom_right",
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
    }


def packing_arguments(
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
        **causal_with_lengths(cu_seqlens_q, cu_seqlens_kv),
        "max_seqlen_q": check_longest("max_length_q", max_seqlen_q),
        "max_seqlen_kv": check_longest("max_length_k", max_seqlen_kv),
    }
