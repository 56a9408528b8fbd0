"""``blocked`` on a CUDA device: ragged batches are padded there, so the host never reads a length."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Residuals
from mla_plugin.plugins.sdpa import blocked
from mla_plugin.plugins.sdpa.ragged import Ragged, is_ragged, ragged
from mla_plugin.plugins.sdpa.terms import ScoreTerms


class _Padding:
    """Converts tensors of the caller's layout to [B, H, S, ...] and back, with padding if ragged."""

    def __init__(self, request: AttentionRequest, tensors: AttentionTensors) -> None:
        self.layout = request.layout
        self.q: Ragged | None = None
        self.k: Ragged | None = None
        if is_ragged(request):
            self.q, self.k = ragged(request, tensors)

    def terms(self, terms: ScoreTerms) -> ScoreTerms:
        if self.q is None or self.k is None:
            return terms
        return replace(terms, lens_q=self.q.lengths, lens_kv=self.k.lengths)

    def pad(self, x: torch.Tensor, where: Ragged | None) -> torch.Tensor:
        """[B, H, S, D]; zeros beyond a sequence's length."""
        x = self.layout.to_bhsd(x)
        return x if where is None else where.pad(x.transpose(1, 2)).transpose(1, 2)

    def unpad(self, x: torch.Tensor, where: Ragged | None, like: torch.Tensor) -> torch.Tensor:
        """[B, H, S, D] back to like's layout and dtype, contiguous."""
        if where is not None:
            shape = self.layout.to_bshd(like).shape
            x = where.unpad(x.transpose(1, 2), shape).transpose(1, 2)
        return self.layout.from_bhsd(x).to(like.dtype).contiguous()

    def pad_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """[B, H, S_q] from the caller's [B, H, S_q] or [H, T]; 0 beyond a sequence's length."""
        lse = lse.unsqueeze(0) if self.layout.is_packed else lse
        return lse if self.q is None else self.q.pad(lse.transpose(1, 2)).transpose(1, 2)

    def unpad_lse(self, lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """The inverse of ``pad_lse``."""
        if self.q is not None:
            shape = self.layout.to_bshd(q).shape
            lse = self.q.unpad(lse.transpose(1, 2), shape, -torch.inf).transpose(1, 2)
        return (lse.squeeze(0) if self.layout.is_packed else lse).contiguous()


def forward(request: AttentionRequest, tensors: AttentionTensors) -> AttentionOutput:
    """Attention of a batch."""
    padding = _Padding(request, tensors)
    q, k, v = (padding.pad(tensors.q, padding.q), *(padding.pad(x, padding.k) for x in (tensors.k, tensors.v)))
    out, lse = blocked.forward(q, k, v, padding.terms(ScoreTerms.of(request, tensors, wants_dbias=False)))
    return AttentionOutput(padding.unpad(out, padding.q, tensors.q), padding.unpad_lse(lse, tensors.q))


def backward(
    request: AttentionRequest, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """Gradients of a batch."""
    tensors = residuals.tensors
    padding = _Padding(request, tensors)
    terms = padding.terms(ScoreTerms.of(request, tensors, wants_dbias=request.bias_requires_grad))
    dq, dk, dv = blocked.backward(
        padding.pad(tensors.q, padding.q),
        padding.pad(tensors.k, padding.k),
        padding.pad(tensors.v, padding.k),
        padding.pad(residuals.out, padding.q),
        padding.pad_lse(residuals.lse),
        padding.pad(dout, padding.q),
        None if dlse is None else padding.pad_lse(dlse),
        terms,
    )
    return Gradients(
        padding.unpad(dq, padding.q, tensors.q),
        padding.unpad(dk, padding.k, tensors.k),
        padding.unpad(dv, padding.k, tensors.v),
        dbias=terms.dbias_like(tensors.bias),
    )
