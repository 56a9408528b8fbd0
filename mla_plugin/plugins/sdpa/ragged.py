"""Index tensors that locate the tokens of sequences of different lengths.

The host never reads the lengths of a CUDA call: it knows every size without them, and padding is removed and restored
by gather and scatter with indices that are computed on the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest


def is_ragged(request: AttentionRequest) -> bool:
    """Whether the sequences are located by offsets."""
    return request.layout.is_packed or request.has_padding


def cu_seqlens(request: AttentionRequest, tensors: AttentionTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulative true lengths of the queries and of the keys.

    Raises:
        ValueError: one of them is missing.
    """
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_kv is None:
        raise ValueError(
            f"qkv_format={request.qkv_format!r} with attn_mask_type={request.attn_mask_type!r} needs cu_seqlens_q and "
            "cu_seqlens_kv, int32 [B + 1]; give both, or a mask type without padding"
        )
    return tensors.cu_seqlens_q, tensors.cu_seqlens_kv


@dataclass(frozen=True)
class Ragged:
    """Index tensors of B sequences in a tensor of ``num_rows`` token rows, flattened from [N, S, ...].

    Attributes:
        starts: int64 [B], row of each sequence's first token, ascending.
        lengths: int64 [B], true lengths.
        num_rows: N * S.
        max_length: no sequence is longer; at least 1.
        is_packed: the sequences start at row 0 and have no gaps, so that packing is the identity.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    num_rows: int
    max_length: int
    is_packed: bool

    def after(self, skip: torch.Tensor, lengths: torch.Tensor) -> Ragged:
        """The sequences without their first ``skip`` tokens, of ``lengths`` tokens; both int64 [B]."""
        return Ragged(self.starts + skip, lengths, self.num_rows, self.max_length, is_packed=False)

    @functools.cached_property
    def offsets(self) -> torch.Tensor:
        """int32 [B + 1], cumulative lengths: what a kernel for packed sequences takes."""
        return torch.cat((self.lengths.new_zeros(1), self.lengths.cumsum(0))).to(torch.int32)

    @functools.cached_property
    def positions(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For every row its sequence and position, int64 and in bounds, and whether it is a true token."""
        rows = torch.arange(self.num_rows, device=self.starts.device)
        sequence = (torch.searchsorted(self.starts, rows, right=True) - 1).clamp_(min=0)
        position = rows - self.starts[sequence]
        valid = (position >= 0) & (position < self.lengths[sequence])
        return sequence, position.clamp_(0, self.max_length - 1), valid

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[N, S, ...] to [num_rows, ...]: true tokens without gaps; rows after the last one are undefined."""
        if self.is_packed:
            return x.flatten(0, 1)
        offsets = self.offsets
        rows = torch.arange(self.num_rows, device=x.device)
        sequence = torch.searchsorted(offsets[1:], rows, right=True).clamp_(max=self.lengths.numel() - 1)
        return self._take(x, rows - offsets[sequence] + self.starts[sequence])

    def unpack(self, packed: torch.Tensor, shape: torch.Size, padding: float = 0.0) -> torch.Tensor:
        """The inverse of ``pack``: [num_rows, ...] to [N, S, ...]; ``padding`` in rows without a true token."""
        sequence, position, valid = self.positions
        if not self.is_packed:
            packed = packed[(self.offsets[sequence] + position).clamp_(max=self.num_rows - 1)]
        return _where(valid, packed, padding).view(*shape[:2], *packed.shape[1:])

    def pad(self, x: torch.Tensor, padding: float = 0.0) -> torch.Tensor:
        """[N, S, ...] to [B, max_length, ...], every sequence from position 0; ``padding`` beyond its length."""
        position = torch.arange(self.max_length, device=x.device)
        padded = self._take(x, self.starts.unsqueeze(1) + position)
        return _where(position < self.lengths.unsqueeze(1), padded, padding)

    def unpad(self, padded: torch.Tensor, shape: torch.Size, padding: float = 0.0) -> torch.Tensor:
        """The inverse of ``pad``: [B, max_length, ...] to [N, S, ...]; ``padding`` in rows without a true token."""
        sequence, position, valid = self.positions
        return _where(valid, padded[sequence, position], padding).view(*shape[:2], *padded.shape[2:])

    def _take(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clamp(0, self.num_rows - 1)
        return x[rows // x.shape[1], rows % x.shape[1]]


def _where(valid: torch.Tensor, x: torch.Tensor, padding: float) -> torch.Tensor:
    """x where valid, else ``padding``; multiplying would keep NaN. ``valid`` has x's leading dimensions."""
    return x.masked_fill(~valid[(...,) + (None,) * (x.dim() - valid.dim())], padding)


def ragged(request: AttentionRequest, tensors: AttentionTensors) -> tuple[Ragged, Ragged]:
    """Index tensors of the queries and of the keys of a ragged batch."""
    cu_q, cu_kv = cu_seqlens(request, tensors)
    is_thd, lengths_q, lengths_kv = request.layout.is_packed, cu_q.diff().long(), cu_kv.diff().long()
    if not is_thd:
        return _rectangle(request, tensors.q, lengths_q), _rectangle(request, tensors.k, lengths_kv)
    starts_q, starts_kv = tensors.cu_seqlens_q_padded, tensors.cu_seqlens_kv_padded
    # without reading them, every row is known to see a key only if queries and keys share one tensor of offsets
    is_packed = cu_q is cu_kv and starts_q is None and starts_kv is None
    q = _packed(tensors.q, lengths_q, cu_q if starts_q is None else starts_q, request.max_seqlen_q, is_packed)
    k = _packed(tensors.k, lengths_kv, cu_kv if starts_kv is None else starts_kv, request.max_seqlen_kv, is_packed)
    return q, k


def _packed(x: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, longest: int, is_packed: bool) -> Ragged:
    return Ragged(starts[:-1].long(), lengths, x.shape[0], max(1, min(longest, x.shape[0])), is_packed)


def _rectangle(request: AttentionRequest, x: torch.Tensor, lengths: torch.Tensor) -> Ragged:
    batch_size, _, extent, _ = request.layout.to_bhsd(x).shape
    starts = torch.arange(batch_size, device=x.device) * extent
    return Ragged(starts, lengths, batch_size * extent, extent, is_packed=False)
