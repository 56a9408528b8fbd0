"""Views between the four memory layouts. Nothing here copies but ``aligned``.

``bshd`` [B, S, H, D], ``sbhd`` [S, B, H, D], ``bhsd`` [B, H, S, D], ``thd`` [T, H, D] (packed sequences).
"""

from __future__ import annotations

import torch

_TO_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}
_FROM_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}


def to_bhsd(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """View a dense tensor as [B, H, S, D]; ``thd`` as [1, H, T, D]."""
    if qkv_format == "thd":
        return x.transpose(0, 1).unsqueeze(0)
    return x.permute(_TO_BHSD[qkv_format])


def from_bhsd(x: torch.Tensor, qkv_format: str) -> torch.Tensor:
    """The inverse of ``to_bhsd``."""
    if qkv_format == "thd":
        return x.squeeze(0).transpose(0, 1)
    return x.permute(_FROM_BHSD[qkv_format])


def empty_output(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """An uninitialised output: q's leading dimensions, head_dim_v, contiguous in q's layout, q's dtype and device."""
    return q.new_empty((*q.shape[:-1], head_dim_v))


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself when it suits kernels that read 16 bytes at a time, otherwise a contiguous copy.

    Suitable: the last dimension is contiguous, every other stride is a multiple of 8 elements, and x starts on a
    16-byte boundary of memory; storage that another library hands over may itself start off one. A copy is suitable
    when the last dimension is a multiple of 8.
    """
    starts_aligned = x.data_ptr() % 16 == 0
    if starts_aligned and x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)
