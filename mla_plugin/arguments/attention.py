"""What a call must satisfy before anything runs: every error says what was given, what is accepted, what to do.

Shapes, dtypes and devices are checked before the operator, so torch.compile sees them. Values of tensors (growing
offsets) are checked inside the operator: on the CPU, where that costs no synchronisation, and with MLA_PLUGIN_CHECK=1.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch

from mla_plugin.hooks.types import ATTN_MASK_TYPES, BIAS_TYPES, HOSTS, QKV_FORMATS, AttentionRequest, AttentionTensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LENGTH_NAMES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_AXES = {"bshd": "[B, S, H, D]", "sbhd": "[S, B, H, D]", "bhsd": "[B, H, S, D]", "thd": "[T, H, D]"}
TOKENS = {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}
_BATCH = {"bshd": 0, "sbhd": 1, "bhsd": 0}


def check_types(**tensors: torch.Tensor | None) -> None:
    """Everything that is given is a tensor; q, k and v are given."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) and (x is not None or name in ("q", "k", "v")):
            raise TypeError(f"{name} is {type(x).__name__}; a torch.Tensor is needed")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qkv_format: str) -> None:
    """q, k and v fit each other and the layout."""
    if qkv_format not in QKV_FORMATS:
        raise ValueError(f"qkv_format={qkv_format!r}; accepted: {', '.join(QKV_FORMATS)}")
    ndim = 3 if qkv_format == "thd" else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.layout != torch.strided:
            raise TypeError(
                f"{name} has the memory layout {x.layout}; torch.strided is needed, and for sequences of different "
                "lengths qkv_format='thd' with cu_seqlens_q"
            )
        if x.dim() != ndim:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; {qkv_format} is {_AXES[qkv_format]}, {ndim} dimensions"
            )
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        accepted = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; one dtype of {accepted} is needed")
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; move them to one device")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; all but the last dimension must be equal"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"head_dim_qk: q has {q.shape[-1]} and k has {k.shape[-1]}; they must be equal")
    if 0 in (q.shape[-1], v.shape[-1]):
        raise ValueError(f"head_dim_qk={q.shape[-1]}, head_dim_v={v.shape[-1]}; both must be at least 1")
    heads = 1 if qkv_format == "bhsd" else -2
    num_heads, num_kv_heads = q.shape[heads], k.shape[heads]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads over {num_kv_heads} key-value heads; a multiple is needed")
    if qkv_format != "thd" and q.shape[_BATCH[qkv_format]] != k.shape[_BATCH[qkv_format]]:
        batch = _BATCH[qkv_format]
        raise ValueError(f"batch size: q has {q.shape[batch]} and k has {k.shape[batch]} ({_AXES[qkv_format]})")


def normalize_mask(
    attn_mask_type: str, window_size: tuple[int, int] | None, bottom_right_diagonal: bool | None, qkv_format: str
) -> tuple[str, tuple[int, int], bool]:
    """The mask's canonical name, window and diagonal.

    Commas become underscores and ``causal_padding`` becomes ``padding_causal``, as in TransformerEngine; ``thd`` gets
    the padding form; a window (-1, 0) without a causal mask is a causal mask, as in FlashAttention.
    """
    mask = str(attn_mask_type).replace(",", "_").replace("causal_padding", "padding_causal")
    if mask not in ATTN_MASK_TYPES:
        raise ValueError(f"attn_mask_type={attn_mask_type!r}; accepted: {', '.join(ATTN_MASK_TYPES)}")
    if qkv_format == "thd" and mask == "arbitrary":
        raise ValueError("attn_mask_type='arbitrary' needs a dense layout; thd accepts the padding masks")
    if qkv_format == "thd" and "padding" not in mask:
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    try:
        left, right = (-1, -1) if window_size is None else map(operator.index, window_size)
    except (TypeError, ValueError):
        left = right = -2
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size={window_size!r}; (left, right) is needed, each -1 (unlimited) or a count of tokens"
        )
    if "causal" not in mask and (left, right) == (-1, 0) and mask != "arbitrary":
        stem = "causal" if mask == "no_mask" else "padding_causal"
        mask = stem if bottom_right_diagonal is False else f"{stem}_bottom_right"
    if "causal" in mask:
        expected = mask.endswith("bottom_right")
        if bottom_right_diagonal is not None and bottom_right_diagonal != expected:
            raise ValueError(
                f"bottom_right_diagonal={bottom_right_diagonal} contradicts attn_mask_type={mask!r}; leave it out"
            )
        return mask, (left, 0), expected
    return mask, (left, right), True if bottom_right_diagonal is None else bottom_right_diagonal


def _check_cu_seqlens(name: str, x: torch.Tensor, device: torch.device, entries: int) -> None:
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; torch.int32 is needed: {name}.to(torch.int32)")
    if x.dim() != 1 or x.shape[0] != entries:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; ({entries},) is needed: one more than the batch size")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and q on {device}; move it to {device}")


def check_lengths(
    q: torch.Tensor, k: torch.Tensor, qkv_format: str, mask: str, lengths: Sequence[torch.Tensor | None]
) -> None:
    """cu_seqlens_* are there when they are needed, absent when not, int32 [B + 1] on q's device."""
    cu_q, _, cu_q_padded, cu_kv_padded = lengths
    given = [name for name, x in zip(_LENGTH_NAMES, lengths, strict=True) if x is not None]
    if "padding" not in mask:
        if given:
            raise ValueError(f"{', '.join(given)} given with attn_mask_type={mask!r}; lengths need a padding mask")
        return
    if cu_q is None:
        raise ValueError(f"attn_mask_type={mask!r} with qkv_format={qkv_format!r} needs cu_seqlens_q (int32, [B + 1])")
    if cu_q.dim() != 1 or cu_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q has shape {tuple(cu_q.shape)}; (B + 1,) is needed")
    entries = cu_q.shape[0] if qkv_format == "thd" else q.shape[_BATCH[qkv_format]] + 1
    for name, x in zip(_LENGTH_NAMES, lengths, strict=True):
        if x is not None:
            _check_cu_seqlens(name, x, q.device, entries)
    if qkv_format != "thd" and (cu_q_padded is not None or cu_kv_padded is not None):
        raise ValueError(f"padded offsets are for qkv_format='thd'; {qkv_format!r} rows start at their first token")
    if (cu_q_padded is None) != (cu_kv_padded is None):
        missing = "cu_seqlens_q_padded" if cu_q_padded is None else "cu_seqlens_kv_padded"
        raise ValueError(f"only one pair of padded offsets was given; {missing} is missing")


def longest_sequence(name: str, given: int | None, extent: int, qkv_format: str, mask: str) -> int:
    """The value of a max_seqlen argument: the tensor's extent unless lengths say otherwise.

    Backends take their grids and choose their kernels by it, so a wrong one is a wrong result.
    """
    if given is None:
        return extent
    has_lengths = qkv_format == "thd" or "padding" in mask
    if has_lengths and given >= 0 and (qkv_format == "thd" or given <= extent):
        return given
    if given != extent:
        accepted = f"{extent}, the tensor's length, or nothing"
        if has_lengths:
            accepted = "the longest sequence" if qkv_format == "thd" else f"the longest sequence, 0 to {extent},"
        raise ValueError(f"{name}={given}; {accepted} is needed with qkv_format={qkv_format!r}, {mask!r}")
    return given


def check_mask_and_bias(
    q: torch.Tensor,
    k: torch.Tensor,
    qkv_format: str,
    mask: str,
    attention_mask: torch.Tensor | None,
    bias_type: str,
    bias: torch.Tensor | None,
) -> None:
    """attention_mask goes with ``arbitrary`` alone, the bias with its type, and both broadcast to [B, H, S_q, S_kv]."""
    if (mask == "arbitrary") != (attention_mask is not None):
        what = (
            "attn_mask_type='arbitrary' needs attention_mask"
            if attention_mask is None
            else (f"attention_mask given with attn_mask_type={mask!r}; pass attn_mask_type='arbitrary'")
        )
        raise ValueError(f"{what} (bool, broadcastable to [B, H, S_q, S_kv], True = masked out)")
    if bias_type not in BIAS_TYPES:
        raise ValueError(f"core_attention_bias_type={bias_type!r}; accepted: {', '.join(BIAS_TYPES)}")
    if (bias_type in ("pre_scale_bias", "post_scale_bias")) != (bias is not None):
        given = "no core_attention_bias" if bias is None else "a core_attention_bias"
        raise ValueError(f"{given} given with core_attention_bias_type={bias_type!r}; give both or neither")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask has dtype {attention_mask.dtype}; torch.bool is needed (True = masked out); "
            "an additive mask goes into core_attention_bias with core_attention_bias_type='post_scale_bias'"
        )
    if bias is not None and bias.dtype != q.dtype:
        raise TypeError(f"core_attention_bias has dtype {bias.dtype} and q {q.dtype}; they must be equal")
    if attention_mask is None and bias is None:
        return
    if qkv_format == "thd":
        raise ValueError("core_attention_bias needs a dense layout (bshd, sbhd, bhsd); qkv_format is 'thd'")
    heads, tokens = (1 if qkv_format == "bhsd" else 2), TOKENS[qkv_format]
    full = (q.shape[_BATCH[qkv_format]], q.shape[heads], q.shape[tokens], k.shape[tokens])
    for name, x in (("attention_mask", attention_mask), ("core_attention_bias", bias)):
        if x is None:
            continue
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move it to {q.device}")
        shape = (1,) * (4 - x.dim()) + tuple(x.shape)
        if x.dim() > 4 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must broadcast to [B, H, S_q, S_kv] = {full}")


def check_options(softmax_scale: float, dropout_p: float, host: str) -> None:
    """Plain values are in range."""
    if not 0.0 < softmax_scale < float("inf"):
        raise ValueError(f"softmax_scale={softmax_scale}; a positive number is needed")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p}; 0 <= dropout_p < 1 is needed")
    if host not in HOSTS:
        raise ValueError(f"host={host!r}; accepted: {', '.join(HOSTS)}")


def check_length_values(tensors: AttentionTensors, request: AttentionRequest) -> None:
    """Cumulative lengths start at 0, never fall, stay inside the tensors and max_seqlen.

    It reads values, which makes the host wait for a CUDA device: there it runs with MLA_PLUGIN_CHECK=1 only.
    """
    qkv_format = request.qkv_format
    tokens = TOKENS[qkv_format]
    for side, x, longest, cu, padded in (
        ("q", tensors.q, request.max_seqlen_q, tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded),
        ("kv", tensors.k, request.max_seqlen_kv, tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded),
    ):
        if cu is None:
            continue
        offsets, extent = cu.tolist(), x.shape[tokens]
        lengths = [after - before for before, after in itertools.pairwise(offsets)]
        if offsets[0] != 0 or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens_{side}={offsets}; cumulative lengths start at 0 and never fall")
        if qkv_format != "thd" and max(lengths, default=0) > extent:
            raise ValueError(f"cu_seqlens_{side} gives lengths {lengths}; the tensor holds {extent} tokens a row")
        if max(lengths, default=0) > longest:
            raise ValueError(f"max_seqlen_{side}={longest} and cu_seqlens_{side} gives lengths {lengths}; raise it")
        if qkv_format != "thd":
            continue
        starts = offsets if padded is None else padded.tolist()
        if not request.pad_between_seqs and starts[:-1] != offsets[:-1]:
            raise ValueError(
                f"pad_between_seqs=False with cu_seqlens_{side}={offsets} and cu_seqlens_{side}_padded={starts}: "
                "sequences start elsewhere in memory; pass pad_between_seqs=True, or leave it out"
            )
        room = [after - before for before, after in itertools.pairwise(starts)]
        if (
            starts[0] < 0
            or starts[-1] > extent
            or any(length > slot for length, slot in zip(lengths, room, strict=True))
        ):
            raise ValueError(
                f"sequences of lengths {lengths} do not fit slots of {room} tokens from {starts[0]} in {extent} tokens "
                f"(side {side}); cu_seqlens_{side}_padded must leave each sequence its length"
            )
