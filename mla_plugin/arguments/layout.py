"""The memory layouts of q, k, v and out: which axis is which, and views between them.

Only ``aligned`` and ``addressable`` copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Layout:
    """One memory layout.

    Attributes:
        name: TransformerEngine's name for it.
        axes: the axes as text, such as ``"[B, S, H, D]"``.
        batch: axis of the sequences; None if they are packed along the tokens.
        heads, tokens: axis of the heads and of the tokens. The head dimension is always the last axis.
        is_packed: sequences are concatenated along the tokens and separated only by offsets.
    """

    name: str
    axes: str
    batch: int | None
    heads: int
    tokens: int

    is_packed: bool = field(init=False)

    def __post_init__(self) -> None:
        # a cached property would do, but before Python 3.12 torch.compile cannot trace the first access to one
        object.__setattr__(self, "is_packed", self.batch is None)

    @property
    def num_dims(self) -> int:
        """Dimensions of a tensor in this layout."""
        return 3 if self.batch is None else 4

    def pick(self, values: Sequence[int]) -> tuple[int, int, int]:
        """(sequence, head, token) of a shape or of strides; 0 for the sequences of a packed layout."""
        return 0 if self.batch is None else values[self.batch], values[self.heads], values[self.tokens]

    def shape(self, batch: int, heads: int, tokens: int, head_dim: int) -> tuple[int, ...]:
        """Shape of a tensor; in a packed layout ``tokens`` is the total over all sequences."""
        sizes = [0] * self.num_dims
        if self.batch is not None:
            sizes[self.batch] = batch
        sizes[self.heads], sizes[self.tokens], sizes[-1] = heads, tokens, head_dim
        return tuple(sizes)

    def to_bhsd(self, x: torch.Tensor) -> torch.Tensor:
        """View a tensor as [B, H, S, D]; a packed one as [1, H, T, D]."""
        if self.batch is None:
            return x.transpose(0, 1).unsqueeze(0)
        if self.batch == 0:
            return x if self.heads == 1 else x.transpose(1, 2)
        return x.permute(self.batch, self.heads, self.tokens, 3)

    def to_bshd(self, x: torch.Tensor) -> torch.Tensor:
        """View a tensor as [B, S, H, D]; a packed one as [1, T, H, D]."""
        if self.batch is None:
            return x.unsqueeze(0)
        if self.batch == 0:
            return x if self.heads == 2 else x.transpose(1, 2)
        return x.permute(self.batch, self.tokens, self.heads, 3)

    def from_bshd(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of ``to_bshd``."""
        if self.batch is None:
            return x.squeeze(0)
        if self.batch == 0:
            return x if self.heads == 2 else x.transpose(1, 2)
        order = [0, 0, 0, 3]
        order[self.batch], order[self.tokens], order[self.heads] = 0, 1, 2
        return x.permute(order)

    def from_bhsd(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of ``to_bhsd``."""
        if self.batch is None:
            return x.squeeze(0).transpose(0, 1)
        if self.batch == 0:
            return x if self.heads == 1 else x.transpose(1, 2)
        order = [0, 0, 0, 3]
        order[self.batch], order[self.heads], order[self.tokens] = 0, 1, 2
        return x.permute(order)

    def contiguous_strides(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """(sequence, head, token) strides of a contiguous tensor of this shape."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        return self.pick(strides[::-1])

    def lse_shape(self, q_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the log-sum-exp: [B, H, S_q], packed [H, T_q]."""
        batch, heads, tokens = self.pick(q_shape)
        return (heads, tokens) if self.batch is None else (batch, heads, tokens)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("bshd", "[B, S, H, D]", 0, 2, 1),
        Layout("sbhd", "[S, B, H, D]", 1, 2, 0),
        Layout("bhsd", "[B, H, S, D]", 0, 1, 2),
        Layout("thd", "[T, H, D]", None, 1, 0),
    )
}
"""Every layout by its name."""


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the log-sum-exp for inputs of this dtype: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """An uninitialised output: q's leading dimensions, head_dim_v, contiguous in q's layout, q's dtype and device."""
    return q.new_empty((*q.shape[:-1], head_dim_v))


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself if kernels that read 16 bytes at a time can use it, otherwise a contiguous copy.

    They can if the last dimension is contiguous, every other stride is a multiple of 8 elements, and x starts on a
    16-byte boundary; storage from another library may not. They can use a copy if the last dimension is a multiple
    of 8.
    """
    if x.data_ptr() % 16 == 0 and _are_aligned(x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def contiguous_from_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """x itself if it is contiguous and starts on a 16-byte boundary, otherwise such a copy."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def addressable(x: torch.Tensor) -> torch.Tensor:
    """x itself if hardware that copies tiles by strides (TMA) can read it, otherwise a contiguous copy.

    It needs what ``aligned`` needs, and no broadcast dimension.
    """
    if x.data_ptr() % 16 == 0 and _are_addressable(x.shape, x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format) if x.is_contiguous() else x.contiguous()


def has_addressable_strides(*tensors: torch.Tensor) -> bool:
    """``addressable`` returns the tensors themselves wherever they start on 16 bytes."""
    return all(_are_addressable(x.shape, x.stride()) for x in tensors)


def start_aligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """All three start on a 16-byte boundary."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0


@functools.lru_cache(maxsize=4096)
def _are_aligned(strides: tuple[int, ...]) -> bool:
    return strides[-1] == 1 and all(stride % 8 == 0 for stride in strides[:-1])


@functools.lru_cache(maxsize=4096)
def _are_addressable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    is_broadcast = any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))
    return _are_aligned(strides) and not is_broadcast


def are_joined(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Each row of ``right`` follows that of ``left`` in memory: both are columns of one tensor."""
    if not right.shape[-1]:
        return True
    if left.is_meta:  # no addresses: storage offsets show whether both are views of one tensor
        offset = (right.storage_offset() - left.storage_offset()) * left.element_size()
    else:
        offset = right.data_ptr() - left.data_ptr()
    return offset == left.shape[-1] * left.element_size() and left.stride() == right.stride()


def joined(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Both concatenated along the last dimension: a view if they are columns of one tensor, otherwise a copy."""
    if are_joined(left, right):
        return left.as_strided((*left.shape[:-1], left.shape[-1] + right.shape[-1]), left.stride())
    return torch.cat([left, right], -1)
