"""What the layers of serving engines are compared with: attention in float64."""

from __future__ import annotations

import torch

ERROR = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of the largest value: two roundings of an output."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = True):
    """Attention of the last tokens: q [S, H, D], k [t, H, D], v [t, H, Dv] to out [S, H, Dv], lse [S, H]."""
    scores = torch.einsum("shd,thd->sht", q.double(), k.double()) * scale
    if causal:
        after = torch.arange(k.shape[0]) > torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
        scores = scores.masked_fill(after[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("sht,thd->shd", weights, v.double()), scores.logsumexp(-1)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, roundings: int = 2) -> None:
    """Assert a result in the dtype, of so many roundings."""
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= ERROR[dtype] * roundings / 2, error
