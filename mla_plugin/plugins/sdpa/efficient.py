"""PyTorch's memory-efficient CUDA kernel: takes head_dim_qk != head_dim_v, dense or packed; memory is linear in S.

Ragged batches are packed by indices that are computed on the device, so the host does not synchronise. Queries that see
no key are left out of the packing, so that the kernel never gets a row without keys. Rows after the last sequence,
which the kernel leaves uninitialised, are replaced when the result is unpacked.

The kernel needs equal head counts, and head dims and strides that are multiples of 8 elements: keys and values are
repeated, zero columns appended and other strides copied, all linear in S. Its backward reads ``out`` as contiguous,
whatever its strides. Three of its bugs are avoided: in the backward its window ignores the bottom-right shift, rows
without keys give NaN, and in float16 a small scale makes dq and dk 0, see ``small_scale``.

The gradient of the log-sum-exp uses one more column with V = 1, out = 0, dout = dlse; see ``flash`` for the proof.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import aligned, contiguous_from_16_bytes, has_addressable_strides, start_aligned
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Residuals
from mla_plugin.plugins.sdpa.ragged import Ragged, is_ragged, ragged
from mla_plugin.plugins.shared import small_scale

_forward = torch.ops.aten._efficient_attention_forward.default._op
_backward = torch.ops.aten._efficient_attention_backward.default._op

ALIGNMENT = 8
LSE_ALIGNMENT = 32
"""The kernel pads the rows of its log-sum-exp to a multiple of this with +inf, which makes their weights 0."""
NO_MASK, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2


def takes_band(request: AttentionRequest) -> bool:
    """The kernel supports causal masks, and causal windows without a shift that leave every row a key."""
    band = request.band
    if band.is_plain:
        return True
    is_square = request.max_seqlen_q == request.max_seqlen_kv
    is_below = not band.bottom_right and request.max_seqlen_q <= request.max_seqlen_kv
    return band.right == 0 and not is_ragged(request) and (is_square or is_below)


@dataclass(frozen=True)
class _Call:
    """Converts the tensors of one call to the kernel's layout and back.

    Attributes:
        request: the call.
        q, k: index tensors of a ragged batch; None for a dense one.
        skip: leading queries of a dense batch that see no key.
        softmax_scale: multiplies the scores.
    """

    request: AttentionRequest
    q: Ragged | None
    k: Ragged | None
    skip: int
    softmax_scale: float

    @classmethod
    def of(cls, request: AttentionRequest, tensors: AttentionTensors) -> _Call:
        if not is_ragged(request):
            return _dense_call(request, tensors.softmax_scale)
        q, k = ragged(request, tensors)
        if not q.is_packed:
            skip = (q.lengths - k.lengths).clamp(min=0) if _hides_rows(request) else torch.zeros_like(q.lengths)
            q = q.after(skip, torch.where(k.lengths > 0, q.lengths - skip, 0))
        return cls(request, q, k, 0, tensors.softmax_scale)

    @functools.cached_property
    def mask(self) -> int:
        band = self.request.band
        if band.right < 0:
            return NO_MASK
        return BOTTOM_RIGHT if band.bottom_right else TOP_LEFT

    @functools.cached_property
    def options(self) -> dict[str, float | int | None]:
        """Keyword arguments that both kernels take; the kernel's window includes the diagonal, ours does not."""
        left = self.request.band.left
        return {"scale": self.softmax_scale, "window_size": None if left < 0 else left + 1}

    def offsets(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.q is None or self.k is None:
            return None, None
        return self.q.offsets, self.k.offsets

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """View of the caller's layout as [N, S, H, D]."""
        return self.request.layout.to_bshd(x)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Queries (or out, dout) of the caller's layout as the kernel's [N, rows, H, D]."""
        x = self.tokens(x)
        if self.q is None:
            return x[:, self.skip :] if self.skip else x
        return self.q.pack(x).unsqueeze(0)

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values as the kernel's [N, columns, H, D], repeated for every query head."""
        x = self.tokens(x)
        x = x if self.k is None else self.k.pack(x).unsqueeze(0)
        group = self.request.num_heads // self.request.num_kv_heads
        if group == 1:
            return x
        return x.unsqueeze(3).expand(-1, -1, -1, group, -1).flatten(2, 3)  # a view for one head

    def from_rows(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of ``rows``: like's layout and leading dimensions, 0 where the kernel had no row."""
        if self.q is None:
            x = F.pad(x, (0, 0, 0, 0, self.skip, 0)) if self.skip else x
        else:
            x = self.q.unpack(x[0], self.tokens(like).shape)
        return self.request.layout.from_bshd(x).contiguous()

    def from_columns(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Gradients of the repeated keys or values, added up and back in like's layout."""
        num_kv_heads = self.request.num_kv_heads
        if x.shape[2] != num_kv_heads:
            x = x.view(*x.shape[:2], num_kv_heads, -1, x.shape[-1]).sum(3, dtype=torch.float32).to(like.dtype)
        if self.k is not None:
            x = self.k.unpack(x[0], self.tokens(like).shape)
        return self.request.layout.from_bshd(x).contiguous()

    def from_kernel_lse(self, lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """The kernel's [B, H, aligned rows] as the caller's [B, H, S_q] or [H, T]."""
        if self.q is None:
            lse = _first(lse, q.shape[self.request.layout.tokens] - self.skip)
            return (F.pad(lse, (self.skip, 0), value=-torch.inf) if self.skip else lse).contiguous()
        lse = self.q.unpad(lse.transpose(1, 2), self.tokens(q).shape, -torch.inf).transpose(1, 2)
        return (lse.squeeze(0) if self.request.layout.is_packed else lse).contiguous()

    def kernel_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """The caller's lse, padded for the kernel's backward, which reads 16 bytes at a time."""
        if self.q is None:
            lse = lse[..., self.skip :] if self.skip else lse
        else:
            lse = lse.unsqueeze(0) if self.request.layout.is_packed else lse
            lse = self.q.pad(lse.transpose(1, 2), torch.inf).transpose(1, 2)
        missing = -lse.shape[-1] % LSE_ALIGNMENT
        return contiguous_from_16_bytes(F.pad(lse, (0, missing), value=torch.inf) if missing else lse)


@functools.lru_cache(maxsize=4096)
def _dense_call(request: AttentionRequest, softmax_scale: float) -> _Call:
    """The call of a dense request; cached, because it holds no tensor."""
    skip = max(0, request.max_seqlen_q - request.max_seqlen_kv) if _hides_rows(request) else 0
    return _Call(request, None, None, skip, softmax_scale)


def _hides_rows(request: AttentionRequest) -> bool:
    """Leading queries see no key, because there are more queries than keys."""
    return request.band.bottom_right and request.is_causal


def _first(x: torch.Tensor, columns: int) -> torch.Tensor:
    """The first columns of x; x itself where it has no others."""
    return x if x.shape[-1] == columns else x[..., :columns]


def _widened(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """x with zero columns up to head_dim, on aligned rows."""
    return F.pad(x, (0, head_dim - x.shape[-1])) if x.shape[-1] < head_dim else aligned(x)


def _rounded(head_dim: int) -> int:
    return -(-head_dim // ALIGNMENT) * ALIGNMENT


def forward_of(
    request: AttentionRequest, tensors: AttentionTensors
) -> Callable[[AttentionRequest, AttentionTensors], AttentionOutput]:
    """``forward`` specialised for calls that differ from this one in values and addresses only."""
    is_whole = request.num_heads == request.num_kv_heads and not (request.head_dim_qk | request.head_dim_v) % ALIGNMENT
    if is_ragged(request) or not is_whole or not has_addressable_strides(tensors.q, tensors.k, tensors.v):
        return forward
    call, layout = _dense_call(request, tensors.softmax_scale), request.layout
    if call.skip:
        return forward
    len_q, len_kv = (x.shape[layout.tokens] for x in (tensors.q, tensors.k))
    arguments = (None, None, None, len_q, len_kv, 0.0, call.mask, True)
    options = {name: value for name, value in call.options.items() if value is not None}

    def dense_forward(request: AttentionRequest, tensors: AttentionTensors) -> AttentionOutput:
        q, k, v = tensors.q, tensors.k, tensors.v
        if not start_aligned(q, k, v):
            return forward(request, tensors)
        found = _forward(layout.to_bshd(q), layout.to_bshd(k), layout.to_bshd(v), *arguments, **options)
        out, lse = layout.from_bshd(found[0]).contiguous(), found[1]
        return AttentionOutput(out, lse[..., :len_q].contiguous() if len_q % LSE_ALIGNMENT else lse)

    return dense_forward


def forward(request: AttentionRequest, tensors: AttentionTensors) -> AttentionOutput:
    """Attention of a batch: float32, bfloat16 or float16 on a CUDA device."""
    call = _Call.of(request, tensors)
    head_dim_qk, head_dim_v = _rounded(request.head_dim_qk), _rounded(request.head_dim_v)
    q = _widened(call.rows(tensors.q), head_dim_qk)
    k, v = _widened(call.columns(tensors.k), head_dim_qk), _widened(call.columns(tensors.v), head_dim_v)
    lengths = (*call.offsets(), *_longest(call, q, k))
    out, lse, *_ = _forward(q, k, v, None, *lengths, 0.0, call.mask, True, **call.options)
    out = call.from_rows(_first(out, request.head_dim_v), tensors.q)
    return AttentionOutput(out, call.from_kernel_lse(lse, tensors.q))


def _longest(call: _Call, q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
    if call.q is None or call.k is None:
        return q.shape[1], k.shape[1]
    return call.q.max_length, call.k.max_length


def backward(
    request: AttentionRequest, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """Gradients of a batch; a deterministic request uses one split of the keys, which is bitwise deterministic."""
    tensors, head_dim_v = residuals.tensors, request.head_dim_v
    call = _Call.of(request, tensors)
    wide_qk, wide_v = _rounded(request.head_dim_qk), _rounded(head_dim_v + (dlse is not None))
    q, k = _widened(call.rows(tensors.q), wide_qk), _widened(call.columns(tensors.k), wide_qk)
    v, out, dout = [_widened(x, wide_v) for x in (call.columns(tensors.v), call.rows(residuals.out), call.rows(dout))]
    if dlse is not None:  # wide_v > head_dim_v, so v and dout are new tensors
        v[..., head_dim_v] = 1
        dlse = dlse.unsqueeze(0) if request.layout.is_packed else dlse
        dout[..., head_dim_v] = call.rows(request.layout.from_bhsd(dlse.unsqueeze(-1))).squeeze(-1)
    lowered = small_scale.factor_of_q(request.dtype, tensors.softmax_scale)
    if lowered != 1.0:
        q = q * lowered
    no_seed = torch.empty((), dtype=torch.int64)  # read with dropout only
    dq, dk, dv, _ = _backward(
        dout,
        q,
        k,
        v,
        None,
        out.contiguous(),
        *call.offsets(),
        *_longest(call, q, k),
        call.kernel_lse(residuals.lse),
        0.0,
        no_seed,
        no_seed,
        call.mask,
        False,
        num_splits_key=1 if request.deterministic else None,
        **{**call.options, "scale": tensors.softmax_scale / lowered},
    )
    if lowered != 1.0:
        dq = dq * lowered
    return Gradients(
        call.from_rows(_first(dq, request.head_dim_qk), tensors.q),
        call.from_columns(_first(dk, request.head_dim_qk), tensors.k),
        call.from_columns(_first(dv, head_dim_v), tensors.v),
    )
