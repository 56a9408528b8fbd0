"""One conformance case: an attention call described by plain values, which makes its request and its random tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import LAYOUTS, from_bhsd, to_bhsd
from mla_plugin.arguments.mask import canonical_mask
from mla_plugin.hooks.attention import AttentionRequest

Side = Literal["q", "kv"]
Storage = Literal["contiguous", "transposed", "sliced_heads", "packed", "expanded_heads"]
DoutStorage = Literal["contiguous", "transposed", "expanded"]

PADDING_POISON = 32.0
"""What padded rows of the inputs are multiplied by.

Not NaN: a backend may well load a padded row and multiply it by a weight of zero, and 0 * NaN is NaN. Finite and large:
one padded key that gets through outweighs all the others, while q @ k stays far from float16's largest number.
"""

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}

_BIAS_AXES = {"bhss": (True, True, True), "1hss": (False, True, True), "b1ss": (True, False, True)} | {
    "11ss": (False, False, True),
    "111s": (False, False, False),
}


@dataclass(frozen=True)
class Case:
    """One call. Everything has a default, so that a case names only what it is about.

    Attributes:
        name: unique, without blanks; ``refuses`` may name it.
        qkv_format, dtype, attn_mask_type, window_size: as in ``AttentionRequest``.
        seqlens_q, seqlens_kv: true length of each sequence.
        rows_q, rows_kv: rows that each sequence takes in memory; None for its length. A dense layout needs equal ones.
        tail: ``thd`` only: rows of q, k and v behind the last sequence.
        num_heads, num_kv_heads, head_dim_qk, head_dim_v: as in ``AttentionRequest``.
        bottom_right_diagonal: where the diagonal of a window is; with a causal mask the mask type decides.
        bias_type, bias_shape, bias_requires_grad: shape is one of ``bhss``, ``1hss``, ``b1ss``, ``11ss``, ``111s``.
        mask_shape: shape of the mask of mask type ``arbitrary``, spelled as a bias shape.
        softmax_scale: None for ``head_dim_qk ** -0.5``.
        storage: memory of q, k and v. ``transposed``: tokens and heads swapped. ``sliced_heads``: every second head of
            a larger tensor. ``packed``: the last dimension of one tensor holds q, k and v. ``expanded_heads``: the
            heads of k and v are one head with stride 0. The last dimension is always contiguous.
        dout_storage: ``expanded`` is one number with all strides 0, as ``out.sum().backward()`` gives.
        return_lse: the caller uses lse, so the backward gets a ``dlse``.
        deterministic: as in ``AttentionRequest``.
        is_large: a real size, for CUDA devices only.
    """

    name: str
    qkv_format: str = "bshd"
    dtype: torch.dtype = torch.float32
    seqlens_q: tuple[int, ...] = (67, 67)
    seqlens_kv: tuple[int, ...] = (67, 67)
    rows_q: tuple[int, ...] | None = None
    rows_kv: tuple[int, ...] | None = None
    tail: int = 0
    num_heads: int = 3
    num_kv_heads: int = 3
    head_dim_qk: int = 192
    head_dim_v: int = 128
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] = (-1, -1)
    bottom_right_diagonal: bool = True
    bias_type: str = "no_bias"
    bias_shape: str = "1hss"
    bias_requires_grad: bool = False
    mask_shape: str = "b1ss"
    softmax_scale: float | None = None
    storage: Storage = "contiguous"
    dout_storage: DoutStorage = "contiguous"
    return_lse: bool = False
    deterministic: bool = False
    is_large: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.seqlens_q)

    @property
    def is_packed(self) -> bool:
        """True for ``thd``."""
        return LAYOUTS[self.qkv_format].is_packed

    @property
    def tags(self) -> frozenset[str]:
        """What the case is about, derived from its values; ``cases`` selects by them, ``refuses`` names them."""
        (mask, window, _), ratio = self._mask, self.num_heads // self.num_kv_heads
        facts = {
            "large" if self.is_large else "small": True,
            "padding_masks": "padding" in mask,
            "causal_masks": "causal" in mask,
            "window": window[0] != -1 or window[1] not in (-1, 0),
            "window_without_causal_mask": window != (-1, -1) and "causal" not in mask,
            "gqa": ratio > 1,
            "mqa": ratio > 1 and self.num_kv_heads == 1,
            "head_dim_qk!=head_dim_v": self.head_dim_qk != self.head_dim_v,
            "unequal_lengths": self.seqlens_q != self.seqlens_kv,
            "one_token": 1 in (*self.seqlens_q, *self.seqlens_kv),
            "empty_sequences": 0 in (*self.seqlens_q, *self.seqlens_kv),
            "pad_between_seqs": self._pads_between_sequences,
            "tail": self.tail > 0,
            "bias": self.bias_type != "no_bias",
            f"bias_{self.bias_shape}": self.bias_type != "no_bias",
            "bias_requires_grad": self.bias_requires_grad,
            "non_contiguous": self.storage != "contiguous" or self.dout_storage != "contiguous",
            f"dout_{self.dout_storage}": self.dout_storage != "contiguous",
            "return_lse": self.return_lse,
            "deterministic": self.deterministic,
        }
        named = {"all", self.qkv_format, DTYPE_NAMES[self.dtype], mask, self.bias_type, self.storage}
        sizes = {f"head_dims={self.head_dim_qk}/{self.head_dim_v}"}
        return frozenset(named | sizes | {name for name, holds in facts.items() if holds})

    @property
    def _mask(self) -> tuple[str, tuple[int, int], bool]:
        """The mask in the spelling that a request has: name, window, where the diagonal is."""
        bottom_right = None if "causal" in self.attn_mask_type else self.bottom_right_diagonal
        return canonical_mask(self.attn_mask_type, self.window_size, bottom_right, is_packed=self.is_packed)

    @property
    def _pads_between_sequences(self) -> bool:
        return self.is_packed and (self.rows_q is not None or self.rows_kv is not None)

    @property
    def has_padding(self) -> bool:
        """True when offsets say where the sequences lie."""
        return self.is_packed or "padding" in self.attn_mask_type

    def _lengths(self, side: Side) -> tuple[int, ...]:
        return self.seqlens_q if side == "q" else self.seqlens_kv

    def _rows(self, side: Side) -> tuple[int, ...]:
        return (self.rows_q if side == "q" else self.rows_kv) or self._lengths(side)

    def _extent(self, side: Side) -> int:
        """Tokens along the tensor: the packed total, or the rows of one sequence."""
        return sum(self._rows(side)) + self.tail if self.is_packed else max(self._rows(side))

    def _max_seqlen(self, side: Side) -> int:
        return max(self._lengths(side)) if self.is_packed else self._extent(side)

    def request(self, device: torch.device | str = "cpu", *, is_training: bool = True) -> AttentionRequest:
        """The call as a value."""
        device = torch.device(device)
        has_bias = self.bias_type != "no_bias"
        mask, window, bottom_right = self._mask
        return AttentionRequest(
            qkv_format=self.qkv_format,
            dtype=self.dtype,
            device_type=device.type,
            device_index=device.index,
            batch_size=self.batch_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            max_seqlen_q=self._max_seqlen("q"),
            max_seqlen_kv=self._max_seqlen("kv"),
            head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v,
            attn_mask_type=mask,
            window_size=window,
            bottom_right_diagonal=bottom_right,
            pad_between_seqs=self._pads_between_sequences,
            bias_type=self.bias_type,
            bias_shape=self.bias_shape if has_bias else None,
            bias_requires_grad=self.bias_requires_grad and is_training,
            is_training=is_training,
            deterministic=self.deterministic,
            return_lse=self.return_lse,
            lengths_may_differ=self.has_padding and self.seqlens_q != self.seqlens_kv,
        )

    def is_padding(self, side: Side) -> torch.Tensor:
        """Rows that belong to no sequence: bool, with as many dimensions as q, broadcastable to it (on the CPU)."""
        if self.is_packed:
            flags = [
                row >= length
                for length, rows in zip(self._lengths(side), self._rows(side), strict=True)
                for row in range(rows)
            ]
            padding = torch.tensor([*flags, *[True] * self.tail], dtype=torch.bool)[None]  # [1, T]
        else:
            padding = torch.arange(self._extent(side)) >= torch.tensor(self._lengths(side))[:, None]  # [B, S]
        return from_bhsd(padding[:, None, :, None], self.qkv_format)

    def tensors(
        self,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        *,
        padding_poison: float = PADDING_POISON,
    ) -> AttentionTensors:
        """Random normal q, k, v and whatever else the case needs.

        Args:
            device: where the tensors lie.
            generator: CPU generator; None for PyTorch's own.
            padding_poison: factor of the padded rows, see ``PADDING_POISON``.
        """
        draw = _Draw(self, torch.device(device), generator, padding_poison)
        q, k, v = draw.qkv()
        return AttentionTensors(
            q=q,
            k=k,
            v=v,
            softmax_scale=self.head_dim_qk**-0.5 if self.softmax_scale is None else self.softmax_scale,
            cu_seqlens_q=_offsets(self.seqlens_q, device) if self.has_padding else None,
            cu_seqlens_kv=_offsets(self.seqlens_kv, device) if self.has_padding else None,
            cu_seqlens_q_padded=_offsets(self._rows("q"), device) if self._pads_between_sequences else None,
            cu_seqlens_kv_padded=_offsets(self._rows("kv"), device) if self._pads_between_sequences else None,
            attention_mask=draw.attention_mask() if self.attn_mask_type == "arbitrary" else None,
            bias=draw.normal(self._score_shape(self.bias_shape)) if self.bias_type != "no_bias" else None,
        )

    def cotangents(
        self,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        *,
        padding_poison: float = PADDING_POISON,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Random dout, and dlse (lse's dtype) when the case uses lse; padded rows as in ``tensors``."""
        draw = _Draw(self, torch.device(device), generator, padding_poison)
        if self.dout_storage == "expanded":
            dout = draw.normal(()).expand(self._shape("q", self.num_heads, self.head_dim_v))
        else:
            dout = draw.strided("q", self.num_heads, self.head_dim_v, self.dout_storage)
        if not self.return_lse:
            return dout, None
        lse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        poison = to_bhsd(draw.factor("q"), self.qkv_format)[..., 0].to(lse_dtype)  # [B, 1, S] or [1, 1, T]
        dlse = draw.normal((poison.shape[0], self.num_heads, poison.shape[2]), lse_dtype) * poison
        return dout, dlse.squeeze(0) if self.is_packed else dlse

    def _shape(self, side: Side, heads: int, head_dim: int) -> tuple[int, ...]:
        return LAYOUTS[self.qkv_format].shape(self.batch_size, heads, self._extent(side), head_dim)

    def _score_shape(self, name: str) -> tuple[int, int, int, int]:
        has_batch, has_heads, has_queries = _BIAS_AXES[name]
        return (
            self.batch_size if has_batch else 1,
            self.num_heads if has_heads else 1,
            self._max_seqlen("q") if has_queries else 1,
            self._max_seqlen("kv"),
        )


@dataclass(frozen=True)
class _Draw:
    """Draws a case's tensors on one device."""

    case: Case
    device: torch.device
    generator: torch.Generator | None
    padding_poison: float

    def normal(self, shape: Iterable[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        x = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)
        return x.to(self.device, dtype or self.case.dtype)

    def factor(self, side: Side) -> torch.Tensor:
        """``padding_poison`` on padded rows and 1 elsewhere, broadcastable to q or k."""
        padding = self.case.is_padding(side).to(self.device)
        return torch.ones(padding.shape, dtype=self.case.dtype, device=self.device).masked_fill(
            padding, self.padding_poison
        )

    def strided(self, side: Side, heads: int, head_dim: int, storage: str) -> torch.Tensor:
        """A tensor in the case's layout whose memory is laid out as ``storage`` says."""
        layout = LAYOUTS[self.case.qkv_format]
        in_memory = {"sliced_heads": 2 * heads, "expanded_heads": 1}.get(storage, heads)
        shape = list(self.case._shape(side, in_memory, head_dim))
        if storage == "transposed":
            a, b = layout.tokens, layout.heads
            shape[a], shape[b] = shape[b], shape[a]
            return self.normal(shape).transpose(a, b).mul_(self.factor(side))
        x = self.normal(shape).mul_(self.factor(side))
        if storage == "sliced_heads":
            return x[(slice(None),) * layout.heads + (slice(None, None, 2),)]
        return x.expand(self.case._shape(side, heads, head_dim))

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        case = self.case
        if case.storage == "packed":
            dims = (case.head_dim_qk, case.head_dim_qk, case.head_dim_v)
            q, k, v = torch.split_with_sizes(self.strided("q", case.num_heads, sum(dims), "contiguous"), dims, -1)
            return q, k, v
        storage_q = "contiguous" if case.storage == "expanded_heads" else case.storage
        return (
            self.strided("q", case.num_heads, case.head_dim_qk, storage_q),
            self.strided("kv", case.num_kv_heads, case.head_dim_qk, case.storage),
            self.strided("kv", case.num_kv_heads, case.head_dim_v, case.storage),
        )

    def attention_mask(self) -> torch.Tensor:
        """A third of the positions hidden, and of each sequence the first, a middle and the last row entirely."""
        shape = self.case._score_shape(self.case.mask_shape)
        mask = torch.rand(shape, generator=self.generator) < 1 / 3
        for row in {0, shape[2] // 2, shape[2] - 1}:
            mask[:, :, row] = True
        return mask.to(self.device)


def _offsets(lengths: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
