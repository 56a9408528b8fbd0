"""Calls in FlashAttention's packed form: tokens in one dimension, with offsets, all on the device.

A packed call (``thd``) is in that form already. A dense call is converted by concatenating its rows; its padding mask
is then padding between sequences. The host reads no offset, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import addressable, contiguous_from_16_bytes
from mla_plugin.hooks.attention import AttentionRequest


@dataclass(frozen=True)
class Side:
    """Where the sequences of the queries, or of the keys and values, are in memory.

    Attributes:
        starts: int32 [B + 1], first row of each sequence, and the end of the last one's place.
        lengths: int32 [B], true lengths; None when every sequence fills its place.
        may_leave_gaps: there may be rows outside the sequences.
    """

    starts: torch.Tensor
    lengths: torch.Tensor | None
    may_leave_gaps: bool

    def clear(self, x: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """Set the rows of x [T, H, D] outside the sequences to ``value``, in place."""
        if self.may_leave_gaps:
            from mla_plugin.kernels.prefill.padding import write_gaps  # imports triton, so not before a call needs it

            write_gaps(x, self.starts, self.lengths, value)
        return x


@dataclass(frozen=True)
class Rows:
    """One call as the kernel sees it: dense [B, S, H, D], or packed [T, H, D] with a description of both sides.

    Attributes:
        request: the call.
        q, kv: where the sequences lie; None for dense tensors without padding.
    """

    request: AttentionRequest
    q: Side | None
    kv: Side | None

    @classmethod
    def of(cls, request: AttentionRequest, tensors: AttentionTensors, *, takes_dense: bool = True) -> Rows:
        """From the call's offsets, or from the extents of dense tensors.

        Args:
            request: the call.
            tensors: its tensors.
            takes_dense: the kernel takes dense tensors; otherwise they are laid end to end too.
        """
        if takes_dense and not request.layout.is_packed and not request.has_padding:
            return _dense(request)
        q = _side(request, tensors.q, tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded)
        if not request.has_padding and request.max_seqlen_q == request.max_seqlen_kv:
            return cls(request, q, q)  # rows of one length: making their offsets once saves a launch
        return cls(request, q, _side(request, tensors.k, tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded))

    def of_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor in the caller's layout; a view, unless another layout than bshd is laid end to end."""
        layout = self.request.layout
        if layout.is_packed:
            return x
        x = layout.to_bshd(x)
        return x if self.q is None else x.flatten(0, 1)

    def clean_queries(self, x: torch.Tensor) -> torch.Tensor:
        """As many rows as queries, from the caller's layout, addressable, 0 outside the sequences.

        For kernels that multiply whole tiles: NaN outside the sequences survives a weight of 0. It is a copy where
        there may be such rows.
        """
        return self._clean(x, self.q)

    def clean_keys(self, x: torch.Tensor) -> torch.Tensor:
        """``clean_queries`` for as many rows as keys."""
        return self._clean(x, self.kv)

    def _clean(self, x: torch.Tensor, side: Side | None) -> torch.Tensor:
        rows = addressable(self.of_tensor(x))
        if side is None or not side.may_leave_gaps:
            return rows
        if rows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            rows = rows.clone(memory_format=torch.contiguous_format)
        return side.clear(rows)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the kernel's own, as many as queries, in the caller's layout; 0 outside the sequences."""
        return self._back(x, self.q)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the kernel's own, as many as keys, in the caller's layout; 0 outside the sequences."""
        return self._back(x, self.kv)

    def _back(self, x: torch.Tensor, side: Side | None) -> torch.Tensor:
        if side is not None:
            side.clear(x)
        if self.request.layout.is_packed:
            return x
        if side is not None:
            x = x.view(self.request.batch_size, -1, *x.shape[1:])
        return self.request.layout.from_bshd(x)

    def of_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """Contiguous lse for the kernel, from a 16-byte boundary on: [B, H, S_q], or [H, T] when packed."""
        if self.q is None or self.request.layout.is_packed:
            return contiguous_from_16_bytes(lse)
        return contiguous_from_16_bytes(lse.transpose(0, 1).flatten(1, 2))  # flatten may give a view with strides

    def lse(self, lse: torch.Tensor) -> torch.Tensor:
        """The inverse of ``of_lse``, and -inf for every row that sees no key, where kernels give +inf or nothing.

        Args:
            lse: float32, the kernel's own: it is changed in place.
        """
        if not self.request.every_query_sees_a_key:
            lse = lse.masked_fill_(lse == torch.inf, -torch.inf)
        if self.q is not None and self.q.may_leave_gaps:
            self.q.clear(lse.t().unsqueeze(-1), -torch.inf)
        if self.q is None or self.request.layout.is_packed:
            return lse
        if self.request.batch_size == 1:
            return lse.unsqueeze(0)
        return lse.view(lse.shape[0], self.request.batch_size, -1).transpose(0, 1)


@functools.lru_cache(maxsize=4096)
def _dense(request: AttentionRequest) -> Rows:
    """Of dense calls without padding: it holds no tensor."""
    return Rows(request, None, None)


def _side(
    request: AttentionRequest, x: torch.Tensor, offsets: torch.Tensor | None, padded: torch.Tensor | None
) -> Side:
    if request.layout.is_packed:
        assert offsets is not None  # arguments.attention.check_lengths
        # Without padding between sequences padded offsets differ in their last entry at most, the end of the tail;
        # kernels that know no true lengths would take that for the end of the last sequence.
        if padded is None or not request.pad_between_seqs:
            return Side(offsets.contiguous(), None, True)
        return Side(padded.contiguous(), offsets.diff(), True)
    extent = x.shape[request.layout.tokens]
    starts = _row_starts(request.batch_size, extent, x.device)
    return Side(starts, None if offsets is None else offsets.diff(), offsets is not None)


def row_lengths(batch_size: int, extent: int, device: torch.device) -> torch.Tensor:
    """int32 [B], the lengths of the rows of a dense batch without padding. Not to be changed.

    Making them is a launch, so they are kept: on the default stream, whose later work sees them written. Not on others:
    a CUDA graph must own what it reads, and torch.compile's warm-up for one, on a stream of its own, allocates from the
    graph's memory.
    """
    return _kept(_new_row_lengths, batch_size, extent, device)


def _row_starts(batch_size: int, extent: int, device: torch.device) -> torch.Tensor:
    """int32 [B + 1], where the rows of a dense batch start when they are laid end to end. Kept as ``row_lengths``."""
    return _kept(_new_row_starts, batch_size, extent, device)


def _new_row_lengths(batch_size: int, extent: int, device: torch.device) -> torch.Tensor:
    return torch.full((batch_size,), extent, dtype=torch.int32, device=device)


def _new_row_starts(batch_size: int, extent: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, batch_size * extent + 1, extent, dtype=torch.int32, device=device)


def _kept(new: Callable[..., torch.Tensor], batch_size: int, extent: int, device: torch.device) -> torch.Tensor:
    is_kept = device.type == "cuda" and not torch._C._cuda_getCurrentRawStream(device.index)
    if not is_kept or torch.cuda.is_current_stream_capturing():
        return new(batch_size, extent, device)
    return _kept_on_default_stream(new, batch_size, extent, device)


@functools.lru_cache(maxsize=512)
def _kept_on_default_stream(
    new: Callable[..., torch.Tensor], batch_size: int, extent: int, device: torch.device
) -> torch.Tensor:
    return new(batch_size, extent, device)
