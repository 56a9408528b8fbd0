"""Shards tokens over the ranks of a context-parallel group, and reassembles them.

The placement is TransformerEngine's and Megatron-Core's: a sequence is split into 2 size chunks, and rank r holds chunk
r and chunk 2 size - 1 - r, in this order, so that all ranks have equal work under a causal mask. Packed sequences
(``thd``) are split one by one; each has a padded length that is a multiple of 2 size.
"""

from __future__ import annotations

import itertools
import numbers
from typing import Any

import torch

from mla_plugin.arguments.checks import check_choice, check_count, check_tensor
from mla_plugin.arguments.layout import LAYOUTS


def shard(
    x: torch.Tensor, size: int, rank: int, *, dim: int = 1, cu_seqlens_padded: torch.Tensor | None = None
) -> torch.Tensor:
    """The tokens of one rank, taken from whole sequences.

    Args:
        x: any tensor with a dimension of tokens: token ids [B, S], hidden states [S, B, D], q [B, S, H, D], packed
            [T, ...].
        size, rank: of the context-parallel group.
        dim: the dimension of tokens; ``token_dim`` says which it is in a layout.
        cu_seqlens_padded: int32 [B + 1], where packed sequences start, padding included; None: one sequence a row.

    Returns:
        x with 1 / size of the tokens, contiguous, in new memory, differentiable.

    Raises:
        ValueError: a length is not a multiple of 2 size, offsets do not cover the tokens, or there is no such rank.
        TypeError: an argument is of another type.
    """
    check_rank(size, rank)
    _check_dim("x", x, dim)
    if cu_seqlens_padded is not None:
        indices = packed_indices(cu_seqlens_padded, size, rank)
        _check_tokens(x.shape[dim], cu_seqlens_padded)
        return x.index_select(dim, indices.to(x.device))
    _check_multiple(f"dimension {dim} of shape {tuple(x.shape)}", x.shape[dim], size)
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def unshard(
    parts: list[torch.Tensor] | tuple[torch.Tensor, ...],
    *,
    dim: int = 1,
    cu_seqlens_padded: torch.Tensor | None = None,
) -> torch.Tensor:
    """The inverse of ``shard``: whole sequences from every rank's tokens, in the order of the ranks.

    Args:
        parts: one tensor of each rank, all of the same shape.
        dim, cu_seqlens_padded: as in ``shard``.

    Raises:
        ValueError: there are no parts, or their shapes differ; otherwise as ``shard``.
    """
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"parts is {type(parts).__name__}; expected a list of tensors, one of each rank")
    for rank, part in enumerate(parts):
        _check_dim(f"parts[{rank}]", part, dim)
    if len({part.shape for part in parts}) != 1:
        raise ValueError(f"parts have shapes {[tuple(part.shape) for part in parts]}; expected one shape for all ranks")
    if cu_seqlens_padded is not None:
        indices = [packed_indices(cu_seqlens_padded, len(parts), rank) for rank in range(len(parts))]
        whole = torch.cat(list(parts), dim)
        _check_tokens(whole.shape[dim], cu_seqlens_padded)
        return whole.index_select(dim, torch.cat(indices).argsort().to(whole.device))
    _check_multiple("the tokens of all parts", sum(part.shape[dim] for part in parts), len(parts))
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([front for front, _ in halves] + [back for _, back in reversed(halves)], dim)


def position_ids(tokens: int, size: int, rank: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Positions of a rank's tokens in a sequence of ``tokens``: int64 [tokens / size]; errors as ``shard``."""
    check_count("tokens", tokens)
    return shard(torch.arange(tokens, device=device), size, rank, dim=0)


def packed_position_ids(cu_seqlens_padded: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Positions of a rank's packed tokens, each within its sequence: int64 [T / size]; errors as ``shard``."""
    indices = packed_indices(cu_seqlens_padded, size, rank)
    starts = cu_seqlens_padded.to(indices.dtype).cpu()
    return indices - starts[torch.searchsorted(starts, indices.cpu(), right=True) - 1].to(indices.device)


def packed_indices(cu_seqlens_padded: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Indices of a rank's tokens among packed sequences, as TransformerEngine's ``thd_get_partitioned_indices``.

    It reads the offsets, which synchronises with a CUDA device: call it once per batch, if possible with CPU offsets.

    Returns:
        int64 [T / size] on the offsets' device.

    Raises:
        ValueError: a padded length is not a multiple of 2 size, or offsets decrease.
    """
    check_rank(size, rank)
    parts = []
    for start, chunk in packed_chunks(cu_seqlens_padded, size):
        for which in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + which * chunk, start + (which + 1) * chunk, device="cpu"))
    return torch.cat(parts or [torch.arange(0, device="cpu")]).to(cu_seqlens_padded.device)


def packed_chunks(cu_seqlens_padded: torch.Tensor, size: int) -> list[tuple[int, int]]:
    """(first token, tokens of a chunk) of each sequence; errors as ``packed_indices``."""
    _check_offsets("cu_seqlens_padded", cu_seqlens_padded)
    offsets = cu_seqlens_padded.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens_padded={offsets}; offsets of packed sequences start at 0")
    chunks = []
    for number, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end < start:
            raise ValueError(f"cu_seqlens_padded={offsets}; offsets never decrease")
        _check_multiple(f"sequence {number} with its padding", end - start, size)
        chunks.append((start, (end - start) // (2 * size)))
    return chunks


def pad_lengths(cu_seqlens: torch.Tensor, size: int) -> torch.Tensor:
    """Offsets of sequences padded to multiples of 2 size: int32 [B + 1], computed on the device of ``cu_seqlens``."""
    _check_offsets("cu_seqlens", cu_seqlens)
    check_count("size", size, 1)
    lengths = cu_seqlens.diff()
    padded = (lengths + 2 * size - 1) // (2 * size) * (2 * size)
    return torch.nn.functional.pad(padded.cumsum(0, dtype=torch.int32), (1, 0))


def token_dim(qkv_format: str) -> int:
    """The dimension of tokens in ``bshd``, ``sbhd``, ``bhsd`` or ``thd``."""
    check_choice("qkv_format", qkv_format, LAYOUTS)
    return LAYOUTS[qkv_format].tokens


def check_rank(size: int, rank: int) -> None:
    """Check that the group has this rank."""
    check_count("size", size, 1)
    check_count("rank", rank)
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} of size={size}; expected 0 <= rank < size")


def _check_offsets(name: str, x: torch.Tensor) -> None:
    check_tensor(name, x, "int32 [B + 1]")
    if x.dim() != 1 or not x.numel() or x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; expected int32 [B + 1]")


def _check_dim(name: str, x: torch.Tensor, dim: Any) -> None:
    check_tensor(name, x)
    is_index = isinstance(dim, numbers.Integral) and not isinstance(dim, bool)
    if not is_index or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim!r} and {name} has shape {tuple(x.shape)}; expected the dimension of its tokens")


def _check_multiple(what: str, tokens: int, size: int) -> None:
    if tokens % (2 * size):
        raise ValueError(
            f"{what} has {tokens} tokens; context parallelism over {size} ranks needs a multiple of {2 * size}: pad to "
            f"{-(-tokens // (2 * size)) * 2 * size}"
        )


def _check_tokens(tokens: int, cu_seqlens_padded: torch.Tensor) -> None:
    if tokens != (end := int(cu_seqlens_padded[-1])):
        raise ValueError(f"{tokens} tokens and cu_seqlens_padded ends at {end}; they must be equal")
