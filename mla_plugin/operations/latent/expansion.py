"""Expands K and V of a group of heads from the latents, and computes the gradients of that.

With x = [c_kv, k_rope], [tokens, R + Dr], and for each head h

    W_aug_h = [[W_UK_h, 0], [0, I]]      [qk_nope_head_dim + Dr, R + Dr]

K_h = x W_aug_h^T includes the rope part, so that one matmul writes all of K without a copy. (On an H200, K
and V of 32k tokens and 128 heads take 2.26 ms this way, and 3.46 ms with a matmul and a copy.) The gradients are

    dx = sum over h of dK_h W_aug_h + [dV_h W_UV_h, 0]      dW_UK_h = dK_nope_h^T c_kv      dW_UV_h = dV_h^T c_kv

summed over tokens and heads in float32 (float64 for float64) and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mla_plugin.arguments.latent import LatentSizes
from mla_plugin.arguments.layout import lse_dtype

MAX_EXPANDED_BYTES = 5 * 2**28
"""Most memory for K and V of one group of heads: 1.25 GiB. The backward takes the same again for dK and dV.

It is 16 heads of 192/128 over 128k tokens in 16 bits: enough work to fill a GPU in each product and each attention
call, little memory compared with K and V of all heads.
"""


@dataclass(frozen=True)
class Heads:
    """A group of heads: index of the first, and number of heads."""

    first: int
    count: int

    @property
    def slice(self) -> slice:
        """The group as a slice of all heads."""
        return slice(self.first, self.first + self.count)


def groups_of_heads(sizes: LatentSizes, tokens: int, dtype: torch.dtype) -> Iterator[Heads]:
    """The groups in which a call's heads are expanded: as few and as equal as ``MAX_EXPANDED_BYTES`` allows.

    Args:
        sizes: of the call.
        tokens: number of expanded tokens of all sequences.
        dtype: of K and V.
    """
    bytes_per_head = max(1, tokens * sizes.numbers_per_head * dtype.itemsize)
    groups = -(-sizes.num_heads // max(1, MAX_EXPANDED_BYTES // bytes_per_head))
    first = 0
    for left in range(groups, 0, -1):
        count = (sizes.num_heads - first) // left
        yield Heads(first, count)
        first += count


class Buffers(NamedTuple):
    """Memory for K and V of a group of heads, reused by each group: [tokens, heads * width]."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, like: torch.Tensor, tokens: int, sizes: LatentSizes, heads: int) -> Buffers:
        """Uninitialised, with the dtype and the device of a tensor."""
        return cls(
            like.new_empty(tokens, heads * sizes.head_dim_qk),
            like.new_empty(tokens, heads * sizes.head_dim_v),
        )

    def of_heads(self, sizes: LatentSizes, heads: int) -> Buffers:
        """The same memory for no more heads, contiguous."""
        tokens = self.k.shape[0]
        shapes = ((tokens, heads * sizes.head_dim_qk), (tokens, heads * sizes.head_dim_v))
        return Buffers(*(x.view(-1)[: a * b].view(a, b) for x, (a, b) in zip(self, shapes, strict=True)))


class Expansion:
    """The weights of one group of heads, as operands of the matmuls.

    Args:
        w_uk: [H, qk_nope_head_dim, R], of all heads.
        w_uv: [H, head_dim_v, R].
        sizes: of the call.
        heads: the group.
    """

    def __init__(self, w_uk: torch.Tensor, w_uv: torch.Tensor, sizes: LatentSizes, heads: Heads) -> None:
        self.sizes, self.heads = sizes, heads
        nope, rank = sizes.qk_nope_head_dim, sizes.kv_lora_rank
        w_aug = w_uk.new_zeros(heads.count, sizes.head_dim_qk, rank + sizes.qk_rope_head_dim)
        w_aug[:, :nope, :rank] = w_uk[heads.slice]
        w_aug[:, nope:, rank:].diagonal(dim1=1, dim2=2).fill_(1)
        self.w_aug, self.w_uv = w_aug.flatten(0, 1), w_uv[heads.slice].reshape(-1, rank)

    def expand(self, x: torch.Tensor, into: Buffers) -> None:
        """Write K and V of the rows of x, [tokens, R + Dr]."""
        torch.mm(x, self.w_aug.t(), out=into.k)
        torch.mm(x[:, : self.sizes.kv_lora_rank], self.w_uv.t(), out=into.v)

    def add_latent_gradient(self, dx: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add the contribution of dk and dv, [tokens, heads * width], to dx [tokens, R + Dr]."""
        dx += exact_product(dk, self.w_aug)
        dx[:, : self.sizes.kv_lora_rank] += exact_product(dv, self.w_uv)

    def weight_gradients(
        self, x: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dW_UK and dW_UV of the group, [heads, width, R], in float32 (float64)."""
        sizes, c_kv = self.sizes, x[:, : self.sizes.kv_lora_rank]
        dw_aug = exact_product(dk.t(), c_kv).view(self.heads.count, sizes.head_dim_qk, sizes.kv_lora_rank)
        dw_uv = exact_product(dv.t(), c_kv).view(self.heads.count, sizes.head_dim_v, sizes.kv_lora_rank)
        return dw_aug[:, : sizes.qk_nope_head_dim], dw_uv


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32 (float64 for float64), not rounded to the dtype of a and b."""
    wide = lse_dtype(a.dtype)
    if a.dtype == wide:
        return torch.mm(a, b)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=wide)
    return torch.mm(a.to(wide), b.to(wide))  # PyTorch has no matmul of mixed dtypes on the CPU
