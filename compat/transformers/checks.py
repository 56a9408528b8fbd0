"""What masks and lengths must fit: the rows, keys and tokens of the layer that gets them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version

from mla_plugin.arguments.attention import AttentionTensors, check_length_values, check_lengths, longest_sequence
from mla_plugin.arguments.checks import check_count, check_tensor, may_read
from mla_plugin.arguments.layout import LAYOUTS

_PACKED = LAYOUTS["thd"]
_CUTS_MASKS = Version(transformers.__version__) < Version("5")
"""Eager attention and sdpa of 4.57 cut masks that are wider than the keys; newer ones fail."""
_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


def check_rows(num_rows: int, batch_size: int) -> None:
    """Check that a mask has one row for each sequence of the batch."""
    if num_rows != batch_size:
        raise ValueError(
            f"batch size: the attention mask has {num_rows} and the input has {batch_size}; they must be equal: pass "
            "the mask of the same sequences as input_ids"
        )


def fitted_mask(mask: torch.Tensor, batch_size: int, num_keys: int) -> torch.Tensor:
    """The mask, after the check that it is for this batch and for as many keys as there are. Only sizes are compared.

    A mask over tokens may have fewer columns. Where transformers cuts a wider mask, so does this.
    """
    if not isinstance(mask, torch.Tensor):  # flex attention's BlockMask
        raise TypeError(f"attention_mask is {type(mask).__name__}; expected a torch.Tensor")
    is_dense = mask.ndim == 4 and mask.dtype != torch.int32
    if mask.ndim == 2 or (is_dense and len(mask) != 1):
        check_rows(len(mask), batch_size)
    # One of tokens or ranges ends with the last query; ``masks`` notes for how many keys it was asked.
    num_columns = mask.shape[-1] if is_dense else getattr(mask, "num_keys", 0)
    is_narrow = is_dense and 1 < num_columns < num_keys
    if num_columns <= num_keys and not is_narrow:
        return mask
    if _CUTS_MASKS and not is_narrow:
        return mask[..., :num_keys] if is_dense else mask
    advice = (
        "a model that is not a decoder makes a mask of its input alone; set is_decoder=True in its config"
        if is_narrow
        else "cut attention_mask to the tokens of input_ids, or pass the cache that holds the others as past_key_values"
    )
    raise ValueError(
        f"the attention mask is for {num_columns} keys and this call has {num_keys}; expected one column for each key, "
        f"those in the cache included: {advice}"
    )


def check_compressed_keys(module: Any, mask: torch.Tensor, packing: dict[str, Any] | None) -> None:
    """Refuse packed sequences and bool masks where a layer appends compressed keys, as DeepSeek-V4's do.

    Each such key is made of several tokens, also across the borders of packed sequences. The layer appends a column for
    it to the mask, an additive one.
    """
    if getattr(module, "compressor", None) is None:
        return
    if packing is not None:
        raise ValueError(
            f"packed sequences: {type(module).__name__} compresses keys across their borders, whichever "
            "attn_implementation is set; pad the sequences instead, one in each row, and pass attention_mask"
        )
    if mask.dtype == torch.bool:
        raise ValueError(
            f"a bool 4-D attention mask: {type(module).__name__} appends additive columns to it, which bool turns "
            "into the opposite; pass an additive mask, 0 = attend and the lowest number of the dtype = hide"
        )


def check_longest(name: str, value: Any) -> int | None:
    """The length of the longest sequence as an int; transformers' collators also give it as a tensor."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype in _DTYPES:
        return int(value)
    check_count(name, value)
    return int(value)


def check_packing(packing: dict[str, Any], query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
    """The same packing, after the checks of ``mla_plugin.attention``, for lengths that narrow a dense mask.

    Values are read where the host may read them; a traced model reads them when it runs.

    Args:
        packing: what ``masks.packing_arguments`` returned.
        query: [B, H, S_q, D].
        key: [B, H_kv, S_kv, D].
    """
    cu_q, cu_kv = packing["cu_seqlens_q"], packing["cu_seqlens_kv"]
    for name, cu_seqlens in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
        check_tensor(name, cu_seqlens)
    tensors = _of_tokens(query, query.shape[0] * query.shape[2], key.shape[0] * key.shape[2], cu_q, cu_kv)
    mask = packing["attn_mask_type"]
    check_lengths(tensors, _PACKED, mask)
    num_q, num_kv = len(tensors.q), len(tensors.k)
    longest_q = longest_sequence("max_seqlen_q", packing["max_seqlen_q"], num_q, _PACKED, mask)
    longest_kv = longest_sequence("max_seqlen_kv", packing["max_seqlen_kv"], num_kv, _PACKED, mask)
    if torch.compiler.is_compiling():
        checked = _checked_when_run(cu_q, cu_kv, num_q, num_kv, longest_q, longest_kv)
        return {**packing, "cu_seqlens_q": checked}
    _check_values(tensors, longest_q, longest_kv)
    return packing


def _of_tokens(
    like: torch.Tensor, num_q: int, num_kv: int, cu_q: torch.Tensor, cu_kv: torch.Tensor
) -> AttentionTensors:
    """Lengths with packed tensors of as many tokens, which hold no values."""
    q, k = (like.new_empty((num_tokens, 1, 0)) for num_tokens in (num_q, num_kv))
    return AttentionTensors(q=q, k=k, v=k, softmax_scale=1.0, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)


def _check_values(tensors: AttentionTensors, longest_q: int, longest_kv: int) -> None:
    if may_read(tensors.q):
        check_length_values(tensors, _PACKED.name, (longest_q, longest_kv), pad_between_seqs=False)


@torch.library.custom_op("mla_plugin::transformers_checked_lengths", mutates_args=())
def _checked_when_run(
    cu_q: torch.Tensor, cu_kv: torch.Tensor, num_q: int, num_kv: int, longest_q: int, longest_kv: int
) -> torch.Tensor:
    """A copy of ``cu_q``, after the checks; a graph keeps an operator only if its result is used."""
    _check_values(_of_tokens(cu_q, num_q, num_kv, cu_q, cu_kv), longest_q, longest_kv)
    return cu_q.clone()


@_checked_when_run.register_fake
def _(
    cu_q: torch.Tensor, cu_kv: torch.Tensor, num_q: int, num_kv: int, longest_q: int, longest_kv: int
) -> torch.Tensor:
    return torch.empty_like(cu_q)


def check_no_padding(mask: torch.Tensor) -> None:
    """Refuse a mask of padded rows beside lengths; that of a dense mask is read where the host may read it."""
    tokens = getattr(mask, "tokens", None)
    is_padded = mask.ndim == 2
    if tokens is not None and not torch.compiler.is_compiling() and may_read(tokens):
        is_padded = not bool(tokens.all())
    if is_padded:
        raise ValueError("cu_seq_lens_q and padding together: give either the lengths or an attention mask")
