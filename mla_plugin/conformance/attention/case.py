"""One conformance case: an attention call described by plain values, which makes its request and its random tensors."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import LAYOUTS, Layout, lse_dtype
from mla_plugin.arguments.mask import canonical_mask
from mla_plugin.conformance.attention.draw import Draw, Storage
from mla_plugin.conformance.attention.scores import Scores, scaled
from mla_plugin.hooks.attention import AttentionRequest

Side = Literal["q", "kv"]
_SIDES: tuple[Side, Side] = ("q", "kv")

PADDING_POISON = 32.0
"""What padded rows of the inputs are multiplied by.

Not NaN: a backend may well load a padded row and multiply it by a weight of zero, and 0 * NaN is NaN. Finite and large:
one padded key that gets through outweighs all the others, while q @ k stays far from float16's largest number.
"""

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Case:
    """One call. Everything has a default, so that a case names only what it is about.

    Attributes:
        name: unique, without blanks; ``refuses`` may name it.
        qkv_format, dtype, attn_mask_type, window_size: as in ``AttentionRequest``.
        seqlens_q, seqlens_kv: true length of each sequence.
        rows_q, rows_kv: rows that each sequence takes in memory; None for its length. A dense layout needs equal ones.
        lead, tail: ``thd`` only: rows of q, k and v before the first sequence (with ``rows_q``) and after the last.
        lead_kv: rows of k and v before the first sequence; None for ``lead``.
        max_seqlen: what the caller says of the longest sequence: ``exact``, or ``extent`` of the tensor, which is no
            less, or with ``thd`` ``beyond`` it, as a graph captured for longer sequences has it. Padding masks in a
            dense layout say the extent unless told otherwise: ``exact`` is below it.
        num_heads, num_kv_heads, head_dim_qk, head_dim_v: as in ``AttentionRequest``.
        bottom_right_diagonal: where the diagonal of a window is; with a causal mask the mask type decides.
        bias_type, bias_shape, bias_requires_grad: the shape has a letter for each dimension, ``1`` where it is
            broadcast: ``bhss``, ``1hss``, ``bhs1``, or fewer dimensions, ``hss``, ``ss``.
        mask_shape: shape of the mask of mask type ``arbitrary``, spelled as a bias shape.
        softmax_scale: None for ``head_dim_qk ** -0.5``.
        scores: see ``scores``; those of ``overflow`` have a scale that tames them.
        storage: memory of q, k and v, see ``draw``; ``packed`` is one tensor whose last dimension holds the three. The
            last dimension is always contiguous.
        storage_q, storage_k, storage_v: of one of them; None for ``storage``.
        dout_storage: ``expanded`` is one number with all strides 0, as ``out.sum().backward()`` gives; ``strided`` has
            the last stride 2.
        dlse_storage, bias_storage, offsets_storage: of dlse, of the bias or the mask, of the cumulative lengths.
        needs_gradient: which of q, k and v require a gradient in training, such as ``"qv"``.
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
    dout_storage: Storage = "contiguous"
    return_lse: bool = False
    deterministic: bool = False
    is_large: bool = False
    lead: int = 0
    lead_kv: int | None = None
    max_seqlen: Literal["exact", "extent", "beyond"] | None = None
    scores: Scores = "normal"
    storage_q: Storage | None = None
    storage_k: Storage | None = None
    storage_v: Storage | None = None
    dlse_storage: Storage = "contiguous"
    bias_storage: Storage = "contiguous"
    offsets_storage: Storage = "contiguous"
    needs_gradient: str = "qkv"

    def __str__(self) -> str:
        return self.name

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.seqlens_q)

    @property
    def is_packed(self) -> bool:
        """True for ``thd``."""
        return self._layout.is_packed

    @property
    def _layout(self) -> Layout:
        return LAYOUTS[self.qkv_format]

    @property
    def storages(self) -> tuple[Storage, Storage, Storage]:
        """Memory of q, of k and of v."""
        given = (self.storage_q, self.storage_k, self.storage_v)
        if self.storage == "expanded_heads":
            given = (self.storage_q or "contiguous", *given[1:])
        return tuple(own or self.storage for own in given)  # type: ignore[return-value]

    @property
    def merged_storages(self) -> tuple[Storage, Storage]:
        """Memory of the out and the lse that a backward is given which another backend made; the name chooses."""
        storages: tuple[tuple[Storage, Storage], ...] = (
            ("offset", "sliced_tokens"),
            ("transposed", "sliced_dims"),
            ("sliced_dims", "transposed"),
            ("sliced_tokens", "offset"),
        )
        return storages[zlib.crc32(self.name.encode()) % len(storages)]

    @property
    def cost(self) -> float:
        """Million multiplications of the forward, to choose cases for a slow interpreter by."""
        pairs = sum(a * b for a, b in zip(self.seqlens_q, self.seqlens_kv, strict=True))
        return pairs * self.num_heads * (self.head_dim_qk + self.head_dim_v) / 1e6

    @property
    def tags(self) -> frozenset[str]:
        """What the case is about, derived from its values; ``cases`` selects by them, ``refuses`` names them."""
        (mask, window, bottom_right), ratio = self._mask, self.num_heads // self.num_kv_heads
        has_bias, has_window = self.bias_type != "no_bias", window[0] != -1 or window[1] not in (-1, 0)
        strided = {*self.storages, self.dout_storage, self.dlse_storage} - {"contiguous"}
        facts = {
            "large" if self.is_large else "small": True,
            "padding_masks": "padding" in mask,
            "causal_masks": "causal" in mask,
            "window": has_window,
            "window_without_causal_mask": window != (-1, -1) and "causal" not in mask,
            "top_left_diagonal": not bottom_right and window != (-1, -1),
            "gqa": ratio > 1,
            "mqa": ratio > 1 and self.num_kv_heads == 1,
            "head_dim_qk!=head_dim_v": self.head_dim_qk != self.head_dim_v,
            "head_dim>256": max(self.head_dim_qk, self.head_dim_v) > 256,
            "unequal_lengths": self.seqlens_q != self.seqlens_kv,
            "unequal_extents": self._max_seqlen("q") != self._max_seqlen("kv"),
            "more_queries": self._max_seqlen("q") > self._max_seqlen("kv"),
            "one_token": 1 in (*self.seqlens_q, *self.seqlens_kv),
            "empty_sequences": 0 in (*self.seqlens_q, *self.seqlens_kv),
            "no_tokens": 0 in (self.batch_size, self._max_seqlen("q"), self._max_seqlen("kv")),
            "pad_between_seqs": self._pads_between_sequences,
            "lead": self.lead > 0 or bool(self.lead_kv),
            "tail": self.tail > 0,
            "max_seqlen_of_extent": self.is_packed and self.max_seqlen in ("extent", "beyond"),
            "bias": has_bias,
            f"bias_{self.bias_shape}": has_bias,
            "bias_requires_grad": self.bias_requires_grad,
            "non_contiguous": bool(strided),
            f"dout_{self.dout_storage}": self.dout_storage != "contiguous",
            f"dlse_{self.dlse_storage}": self.dlse_storage != "contiguous" and self.return_lse,
            f"scores_{self.scores}": self.scores != "normal",
            "some_gradients": self.needs_gradient != "qkv",
            "softmax_scale": self.softmax_scale is not None,
            "return_lse": self.return_lse,
            "deterministic": self.deterministic,
        }
        named = {"all", self.qkv_format, DTYPE_NAMES[self.dtype], mask, self.bias_type, *self.storages}
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
        rows = self._rows(side)
        return self._lead(side) + sum(rows) + self.tail if self.is_packed else max(rows, default=5)

    def _lead(self, side: Side) -> int:
        return self.lead if side == "q" or self.lead_kv is None else self.lead_kv

    def _max_seqlen(self, side: Side) -> int:
        if self.is_packed and self.max_seqlen == "beyond":
            return self._extent(side) + 37
        if not self.has_padding or (self.max_seqlen or ("exact" if self.is_packed else "extent")) == "extent":
            return self._extent(side)
        return max(self._lengths(side), default=0)

    @property
    def _shares_offsets(self) -> bool:
        """One tensor of offsets serves both sides, which is how a caller says that lengths agree."""
        return self.has_padding and self.seqlens_q == self.seqlens_kv

    def request(self, device: torch.device | str = "cpu", *, is_training: bool = True) -> AttentionRequest:
        """The call as a value."""
        device = torch.device(device)
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
            bias_shape=self._bias_letters() if self.bias_type != "no_bias" else None,
            bias_requires_grad=self.bias_requires_grad and is_training,
            is_training=is_training,
            deterministic=self.deterministic,
            return_lse=self.return_lse,
            lengths_may_differ=self.has_padding and not self._shares_offsets,
        )

    def _bias_letters(self) -> str:
        shape = self._score_shape(self.bias_shape)
        sizes = ((1,) * (4 - len(shape)) + shape)[:3]
        return "".join("1" if size == 1 else letter for size, letter in zip(sizes, "bhs", strict=True)) + "s"

    def other(self) -> Case:
        """A call of the same request: other lengths, where possible, and another scale, which no request contains."""
        turned = {name: getattr(self, name) for name in ("seqlens_q", "seqlens_kv", "rows_q", "rows_kv")}
        scale = None if self.scores == "overflow" else 0.8 * self._scale
        return replace(self, softmax_scale=scale, **{name: x and x[::-1] for name, x in turned.items()})

    def is_padding(self, side: Side) -> torch.Tensor:
        """Rows that belong to no sequence: bool, with as many dimensions as q, broadcastable to it (on the CPU)."""
        if self.is_packed:
            flags = [
                row >= length
                for length, rows in zip(self._lengths(side), self._rows(side), strict=True)
                for row in range(rows)
            ]
            flags = [*[True] * self._lead(side), *flags, *[True] * self.tail]
            padding = torch.tensor(flags, dtype=torch.bool)[None]  # [1, T]
        else:
            padding = torch.arange(self._extent(side)) >= torch.tensor(self._lengths(side))[:, None]  # [B, S]
        return self._layout.from_bhsd(padding[:, None, :, None])

    def tensors(
        self,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        *,
        padding_poison: float = PADDING_POISON,
        is_guarded: bool = True,
    ) -> AttentionTensors:
        """Random normal q, k, v and whatever else the case needs.

        Args:
            device: where the tensors lie.
            generator: CPU generator; None for PyTorch's own.
            padding_poison: factor of the padded rows, see ``PADDING_POISON``.
            is_guarded: as in ``Draw``.
        """
        draw = Draw(self.dtype, torch.device(device), generator, is_guarded=is_guarded)
        q, k, v = self._qkv(draw, padding_poison)
        cu_q, cu_kv, padded_q, padded_kv = self._offsets(draw)
        has_mask, has_bias = self.attn_mask_type == "arbitrary", self.bias_type != "no_bias"
        bias = draw.placed(draw.normal(self._score_shape(self.bias_shape)), self.bias_storage) if has_bias else None
        mask = draw.placed(draw.mask(self._score_shape(self.mask_shape)), self.bias_storage) if has_mask else None
        return AttentionTensors(
            q=q,
            k=k,
            v=v,
            softmax_scale=self._scale,
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_kv,
            cu_seqlens_q_padded=padded_q,
            cu_seqlens_kv_padded=padded_kv,
            attention_mask=mask,
            bias=bias,
        )

    @property
    def _scale(self) -> float:
        if self.scores == "overflow":
            return float(1.7 / (64.0 * 64.0 * self.head_dim_qk**0.5))
        return float(self.head_dim_qk**-0.5 if self.softmax_scale is None else self.softmax_scale)

    def cotangents(
        self,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        *,
        padding_poison: float = PADDING_POISON,
        is_guarded: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Random dout, and dlse (lse's dtype) when the case uses lse; padded rows as in ``tensors``."""
        draw = Draw(self.dtype, torch.device(device), generator, is_guarded=is_guarded)
        layout, poison = self._layout, self._factor("q", padding_poison).to(device)
        dout = draw.normal(self._shape("q", self.num_heads, self.head_dim_v))
        if self.dout_storage != "expanded":
            dout = dout * poison.to(self.dtype)
        dout = draw.placed(dout, self.dout_storage, layout)
        if not self.return_lse:
            return dout, None
        dtype = lse_dtype(self.dtype)
        # numbers of the case's dtype: a backend may round them to it, which for all keys of a row is the same error
        dlse = draw.normal(layout.lse_shape(self._shape("q", self.num_heads, 1))).to(dtype)
        if self.dlse_storage != "expanded":
            factor = layout.to_bhsd(poison)[..., 0].to(dtype)  # [B, 1, S] or [1, 1, T]
            dlse = dlse * (factor[0] if self.is_packed else factor)
        return dout, draw.placed(dlse, self.dlse_storage)

    def _shape(self, side: Side, heads: int, head_dim: int) -> tuple[int, ...]:
        return self._layout.shape(self.batch_size, heads, self._extent(side), head_dim)

    def _score_shape(self, letters: str) -> tuple[int, ...]:
        sizes = (self.batch_size, self.num_heads, self._extent("q"), self._extent("kv"))
        return tuple(1 if letter == "1" else size for letter, size in zip(letters, sizes[-len(letters) :], strict=True))

    def _factor(self, side: Side, padding_poison: float) -> torch.Tensor:
        """``padding_poison`` on padded rows and 1 elsewhere, broadcastable to q or k."""
        padding = self.is_padding(side)
        return torch.ones(padding.shape, dtype=torch.float64).masked_fill(padding, padding_poison)

    def _qkv(self, draw: Draw, padding_poison: float) -> list[torch.Tensor]:
        sizes: tuple[tuple[Side, int, int], ...] = (
            ("q", self.num_heads, self.head_dim_qk),
            ("kv", self.num_kv_heads, self.head_dim_qk),
            ("kv", self.num_kv_heads, self.head_dim_v),
        )
        values = [draw.normal(self._shape(side, heads, head_dim)) for side, heads, head_dim in sizes]
        scaled(self.scores, values[0], values[1], self._layout.tokens, self._scale, draw)
        for x, (side, _, _) in zip(values, sizes, strict=True):
            x.mul_(self._factor(side, padding_poison).to(draw.device, self.dtype))
        if self.storages == ("packed",) * 3:
            return draw.split(values)
        return draw.all_placed(values, self.storages, self._layout)

    def _offsets(self, draw: Draw) -> list[torch.Tensor | None]:
        """cu_seqlens_q, cu_seqlens_kv and both padded ones, as far as the case has them; between guards, equal ones are
        one tensor.
        """
        if not self.has_padding:
            return [None] * 4
        known: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}

        def offsets(lengths: tuple[int, ...], start: int) -> torch.Tensor:
            if (lengths, start) not in known or not draw.is_guarded:
                values = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=draw.device) + start
                known[lengths, start] = draw.placed(values, self.offsets_storage)
            return known[lengths, start]

        cu_q = offsets(self.seqlens_q, 0)
        cu_kv = cu_q if self._shares_offsets else offsets(self.seqlens_kv, 0)
        if not self._pads_between_sequences:
            return [cu_q, cu_kv, None, None]
        return [cu_q, cu_kv, *(offsets(self._rows(side), self._lead(side)) for side in _SIDES)]
