"""Calls in the form that FlashAttention takes: tokens in one dimension, offsets beside them, all on the device.

A packed call (``thd``) is in that form already. A dense call becomes one by laying its rows end to end; its padding
mask is then padding between sequences. No offset is read by the host, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_plugin.layout import aligned, from_bhsd, to_bhsd
from mla_plugin.types import AttentionRequest, AttentionTensors


def addressable(x: torch.Tensor) -> torch.Tensor:
    """x itself where hardware that copies tiles by their strides can read it, otherwise a contiguous copy.

    It wants what ``aligned`` wants, and no dimension that is broadcast.
    """
    is_broadcast = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if is_broadcast else aligned(x)


def kernel_window(request: AttentionRequest) -> tuple[bool, tuple[int, int]]:
    """(causal, (left, right)) in FlashAttention's words: causal closes the right side."""
    left, right = request.window_size
    is_causal = "causal" in request.attn_mask_type
    return is_causal, (left, 0 if is_causal else right)


@dataclass(frozen=True)
class Side:
    """Where the sequences of the queries, or of the keys and values, lie.

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
            from mla_plugin.kernels.padding import fill_gaps  # imports triton, so not before a call needs it

            fill_gaps(x, self.starts, self.lengths, value)
        return x


@dataclass(frozen=True)
class Packed:
    """One call laid end to end.

    Attributes:
        request: the call.
        q, kv: where its sequences lie.
    """

    request: AttentionRequest
    q: Side
    kv: Side

    @classmethod
    def of(cls, request: AttentionRequest, tensors: AttentionTensors) -> Packed:
        """From offsets, or from the extents of dense tensors."""
        return cls(
            request,
            _side(request, tensors.q, tensors.cu_seqlens_q, tensors.cu_seqlens_q_padded),
            _side(request, tensors.k, tensors.cu_seqlens_kv, tensors.cu_seqlens_kv_padded),
        )

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] of a tensor in the caller's layout; a view of ``thd`` and of contiguous ``bshd``."""
        if self.request.qkv_format == "thd":
            return addressable(x)
        return addressable(to_bhsd(x, self.request.qkv_format).transpose(1, 2).flatten(0, 1))

    def from_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of ``rows``, a view."""
        if self.request.qkv_format == "thd":
            return x
        return from_bhsd(x.view(self.request.batch_size, -1, *x.shape[1:]).transpose(1, 2), self.request.qkv_format)

    def lse_rows(self, lse: torch.Tensor) -> torch.Tensor:
        """[H, T], contiguous, of lse in the caller's layout."""
        return lse.contiguous() if self.request.qkv_format == "thd" else lse.transpose(0, 1).flatten(1, 2)

    def from_lse_rows(self, lse: torch.Tensor) -> torch.Tensor:
        """The inverse of ``lse_rows``; -inf for rows that see no key, which FlashAttention may give as +inf.

        Args:
            lse: float32 [H, T], a kernel's own: it is changed in place.
        """
        lse = minus_infinity(lse)
        self.q.clear(lse.t().unsqueeze(-1), -torch.inf)
        if self.request.qkv_format == "thd":
            return lse
        return lse.view(lse.shape[0], self.request.batch_size, -1).transpose(0, 1)


def minus_infinity(lse: torch.Tensor) -> torch.Tensor:
    """A kernel's own lse with +inf, its mark of a row that sees no key, replaced by -inf in place."""
    return lse.masked_fill_(lse == torch.inf, -torch.inf)


def _side(
    request: AttentionRequest, x: torch.Tensor, offsets: torch.Tensor | None, padded: torch.Tensor | None
) -> Side:
    if request.qkv_format == "thd":
        assert offsets is not None  # mla_plugin.checks
        if padded is None or padded is offsets:
            return Side(offsets.contiguous(), None, True)
        return Side(padded.contiguous(), offsets.diff(), True)
    extent = to_bhsd(x, request.qkv_format).shape[2]
    starts = torch.arange(request.batch_size + 1, dtype=torch.int32, device=x.device) * extent
    return Side(starts, None if offsets is None else offsets.diff(), offsets is not None)
