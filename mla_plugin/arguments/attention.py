"""The tensors of an attention call and their checks; errors say what was given, what is expected and what to do.

Shapes, dtypes and devices are checked when a request is built from them (``AttentionRequest.of``). Values of tensors
(increasing offsets) are checked when the call runs: on the CPU, where that needs no synchronisation, and with
MLA_PLUGIN_CHECK=1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mla_plugin.arguments.checks import DTYPES, MAX_LENGTH, check_choice, check_tensor, records_gradients
from mla_plugin.arguments.layout import LAYOUTS, Layout

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_OPTIONAL = (*LENGTHS, "attention_mask", "bias", "dropout_seed")
_ARGUMENTS = {"bias": "core_attention_bias"}
"""Names of the arguments of ``mla_plugin.attention`` that differ from the attribute's name."""


@dataclass(frozen=True)
class AttentionTensors:
    """The tensors of one call.

    Attributes:
        q: [..., H, head_dim_qk], leading dimensions by the request's ``qkv_format``.
        k: [..., H_kv, head_dim_qk].
        v: [..., H_kv, head_dim_v].
        softmax_scale: multiplies q @ k.T before the softmax.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], cumulative true lengths; padding masks and ``thd``. Any stride.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [B + 1], where each sequence starts in memory; ``thd`` only.
        attention_mask: bool, broadcastable to [B, H, S_q, S_kv], True = masked out; mask type ``arbitrary`` only.
        bias: additive, broadcastable to [B, H, S_q, S_kv].
        dropout_seed: int64 [1] on the CPU; two passes with the same seed drop the same weights.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None

    kept: ClassVar[dict[str, Any] | None] = None
    """Cache of the backends, under keys that begin with their names, for calls that differ only in values, addresses
    and the strides of offsets, bias and mask; None if calls of this kind are not cached. It must not hold a tensor of a
    call."""

    @property
    def needs_gradient(self) -> bool:
        """A backward will follow."""
        if not records_gradients():
            return False
        return _has_gradient(self.q) or _has_gradient(self.k) or _has_gradient(self.v) or _has_gradient(self.bias)

    @property
    def pads_between_sequences(self) -> bool:
        """Padded offsets are given as separate tensors: TransformerEngine's rule, which does not compare values."""
        return (self.cu_seqlens_q_padded is not None and self.cu_seqlens_q_padded is not self.cu_seqlens_q) or (
            self.cu_seqlens_kv_padded is not None and self.cu_seqlens_kv_padded is not self.cu_seqlens_kv
        )

    @property
    def lengths_may_differ(self) -> bool:
        """A sequence may have different numbers of queries and keys.

        False if one tensor, or two views of the same memory, give both lengths; values are not read.
        """
        cu_q, cu_kv = self.cu_seqlens_q, self.cu_seqlens_kv
        if cu_q is None or cu_kv is None or cu_q is cu_kv:
            return False
        is_plain = all(type(x) is torch.Tensor and x.layout == torch.strided for x in (cu_q, cu_kv))
        if torch.compiler.is_compiling() or not is_plain or torch._C._are_functorch_transforms_active():
            return True  # a traced tensor has no address
        return cu_q.data_ptr() != cu_kv.data_ptr() or cu_q.stride() != cu_kv.stride()


def _has_gradient(x: torch.Tensor | None) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def tensors_of_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout_seed: torch.Tensor | None = None,
) -> AttentionTensors:
    """``AttentionTensors`` of the same arguments, for every eager call: 0.4 us instead of 1.2 for a frozen dataclass.

    Traced code calls the class itself, which torch.compile knows.
    """
    tensors = object.__new__(AttentionTensors)
    fields = tensors.__dict__
    fields["q"] = q
    fields["k"] = k
    fields["v"] = v
    fields["softmax_scale"] = softmax_scale
    fields["cu_seqlens_q"] = cu_seqlens_q
    fields["cu_seqlens_kv"] = cu_seqlens_kv
    fields["cu_seqlens_q_padded"] = cu_seqlens_q_padded
    fields["cu_seqlens_kv_padded"] = cu_seqlens_kv_padded
    fields["attention_mask"] = attention_mask
    fields["bias"] = bias
    fields["dropout_seed"] = dropout_seed
    return tensors


def lengths_of_both(
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_kv: torch.Tensor | None,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The four offsets in the order of ``LENGTHS``; the keys' default to the queries'."""
    if cu_seqlens_kv is None:
        cu_seqlens_kv = cu_seqlens_q
    if cu_seqlens_kv is cu_seqlens_q and cu_seqlens_kv_padded is None:
        cu_seqlens_kv_padded = cu_seqlens_q_padded
    return cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded


def check_types(tensors: AttentionTensors) -> None:
    """Check that q, k and v are given and that every tensor is dense and on one device."""
    for name in ("q", "k", "v", *_OPTIONAL):
        x = getattr(tensors, name)
        if x is None and name in _OPTIONAL:
            continue
        name = _ARGUMENTS.get(name, name)
        check_tensor(name, x)
    if tensors.dropout_seed is not None and tensors.dropout_seed.device.type != "cpu":
        raise ValueError(f"dropout_seed is on {tensors.dropout_seed.device}; expected a CPU tensor: .cpu()")


def check_shapes(tensors: AttentionTensors, layout: Layout) -> None:
    """Check that q, k and v match each other and the layout."""
    q, k, v = tensors.q, tensors.k, tensors.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != layout.num_dims:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; {layout.name} is {layout.axes}, {layout.num_dims} dimensions"
            )
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        accepted = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one dtype of {accepted}")
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; move them to one device")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; all but the last dimension must be equal"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"head_dim_qk: q has {q.shape[-1]} and k has {k.shape[-1]}; they must be equal")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"head_dim_qk={q.shape[-1]}, head_dim_v={v.shape[-1]}; both must be at least 1")
    (batch_q, heads_q, _), (batch_kv, heads_kv, _) = layout.pick(q.shape), layout.pick(k.shape)
    if heads_q == 0 or heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(f"{heads_q} query heads over {heads_kv} key-value heads; expected a multiple")
    if batch_q != batch_kv:
        raise ValueError(f"batch size: q has {batch_q} and k has {batch_kv}; they must be equal ({layout.axes})")


def check_lengths(tensors: AttentionTensors, layout: Layout, mask: str) -> None:
    """Check that cu_seqlens_* are given exactly when needed, as int32 [B + 1] on q's device."""
    lengths = {name: x for name in LENGTHS if (x := getattr(tensors, name)) is not None}
    if "padding" not in mask:
        if lengths:
            raise ValueError(f"{', '.join(lengths)} given with attn_mask_type={mask!r}; lengths need a padding mask")
        return
    needed = [name for name in LENGTHS[:2] if name not in lengths]
    if needed:
        raise ValueError(f"attn_mask_type={mask!r} with qkv_format={layout.name!r} needs {needed[0]} (int32, [B + 1])")
    cu_q = lengths["cu_seqlens_q"]
    if cu_q.dim() != 1 or cu_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q has shape {tuple(cu_q.shape)}; expected (B + 1,)")
    entries = cu_q.shape[0] if layout.is_packed else layout.pick(tensors.q.shape)[0] + 1
    for name, x in lengths.items():
        if x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}; expected torch.int32: {name}.to(torch.int32)")
        if x.dim() != 1 or x.shape[0] != entries:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected ({entries},): one more than the batch size")
        if x.device != tensors.q.device:
            raise ValueError(f"{name} is on {x.device} and q on {tensors.q.device}; move it to {tensors.q.device}")
    padded = [name for name in LENGTHS[2:] if name in lengths]
    if padded and not layout.is_packed:
        raise ValueError(f"padded offsets are for qkv_format='thd'; {layout.name!r} rows start at their first token")
    if len(padded) == 1:
        (missing,) = set(LENGTHS[2:]) - set(padded)
        raise ValueError(f"only one of the two padded offsets was given; {missing} is missing: pass both")


def longest_sequence(name: str, given: int | None, extent: int, layout: Layout, mask: str) -> int:
    """The value of a max_seqlen argument; defaults to the tensor's extent.

    Backends size their grids and choose kernels by it, so a wrong value gives a wrong result.
    """
    if given is None:
        return extent
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
        raise TypeError(f"{name}={given!r}; expected an int or None")
    has_lengths = layout.is_packed or "padding" in mask
    if has_lengths and 0 <= given <= (MAX_LENGTH if layout.is_packed else extent):
        return given
    if given != extent:
        accepted = f"{extent}, the tensor's length, or None"
        if has_lengths:
            accepted = "the longest sequence" if layout.is_packed else f"the longest sequence, 0 to {extent},"
        raise ValueError(f"{name}={given}; expected {accepted} with qkv_format={layout.name!r}, {mask!r}")
    return given


def check_mask_and_bias(tensors: AttentionTensors, layout: Layout, mask: str, bias_type: str) -> None:
    """Check that attention_mask comes only with ``arbitrary``, the bias with its type, and that both broadcast."""
    attention_mask, bias, q, k = tensors.attention_mask, tensors.bias, tensors.q, tensors.k
    if (mask == "arbitrary") != (attention_mask is not None):
        what = (
            "attn_mask_type='arbitrary' needs attention_mask"
            if attention_mask is None
            else f"attention_mask given with attn_mask_type={mask!r}; pass attn_mask_type='arbitrary'"
        )
        raise ValueError(f"{what} (bool, broadcastable to [B, H, S_q, S_kv], True = masked out)")
    check_choice("core_attention_bias_type", bias_type, BIAS_TYPES)
    if (bias_type in ("pre_scale_bias", "post_scale_bias")) != (bias is not None):
        given = "no core_attention_bias" if bias is None else "a core_attention_bias"
        raise ValueError(f"{given} given with core_attention_bias_type={bias_type!r}; give both or neither")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask has dtype {attention_mask.dtype}; expected torch.bool (True = masked out); "
            "an additive mask goes into core_attention_bias with core_attention_bias_type='post_scale_bias'"
        )
    if bias is not None and bias.dtype != q.dtype:
        raise TypeError(f"core_attention_bias has dtype {bias.dtype} and q {q.dtype}; they must be equal")
    if attention_mask is None and bias is None:
        return
    if layout.is_packed:
        raise ValueError("core_attention_bias needs a dense layout (bshd, sbhd, bhsd); qkv_format is 'thd'")
    full = (*layout.lse_shape(q.shape), layout.pick(k.shape)[2])
    for name, x in (("attention_mask", attention_mask), ("core_attention_bias", bias)):
        if x is None:
            continue
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; move it to {q.device}")
        shape = (1,) * (4 - x.dim()) + tuple(x.shape)
        if x.dim() > 4 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must broadcast to [B, H, S_q, S_kv] = {full}")


def bias_shape(bias: torch.Tensor | None) -> str | None:
    """The bias's shape in TransformerEngine's letters: ``1`` for a broadcast dimension, else b, h, s, s."""
    if bias is None:
        return None
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    return "".join("1" if size == 1 else letter for size, letter in zip(shape[:3], "bhs", strict=True)) + "s"


def check_length_values(
    tensors: AttentionTensors, qkv_format: str, longest: tuple[int, int], *, pad_between_seqs: bool
) -> None:
    """Check that cumulative lengths start at 0, never decrease, and fit the tensors and the longest sequence.

    It reads values, which synchronises with a CUDA device: there it runs only with MLA_PLUGIN_CHECK=1.

    Args:
        tensors: of the call.
        qkv_format: their layout.
        longest: max_seqlen_q and max_seqlen_kv.
        pad_between_seqs: sequences start where the padded offsets say.
    """
    layout = LAYOUTS[qkv_format]
    for side, x, most, cu, padded in (
        ("q", tensors.q, longest[0], tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded),
        ("kv", tensors.k, longest[1], tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded),
    ):
        if cu is None:
            continue
        offsets, extent = cu.tolist(), x.shape[layout.tokens]
        lengths = [after - before for before, after in itertools.pairwise(offsets)]
        if offsets[0] != 0 or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens_{side}={offsets}; cumulative lengths start at 0 and never decrease")
        if not layout.is_packed and max(lengths, default=0) > extent:
            raise ValueError(f"cu_seqlens_{side} gives lengths {lengths}; the tensor holds {extent} tokens per row")
        if layout.is_packed and offsets[-1] > extent:
            raise ValueError(f"cu_seqlens_{side}={offsets} ends at {offsets[-1]}; the tensor holds {extent} tokens")
        if max(lengths, default=0) > most:
            raise ValueError(
                f"max_seqlen_{side}={most} and cu_seqlens_{side} gives lengths {lengths}; raise max_seqlen_{side}"
            )
        if not layout.is_packed:
            continue
        starts = offsets if padded is None else padded.tolist()
        if not pad_between_seqs and starts[:-1] != offsets[:-1]:
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
                f"(side {side}); cu_seqlens_{side}_padded must leave enough room for each sequence"
            )
