"""Converts between tokens as ranks hold them and whole sequences in order, for ``a2a`` and ``all_gather``."""

from __future__ import annotations

import torch

from mla_plugin.arguments.layout import Layout


def packed_order(cu_seqlens_padded: torch.Tensor, size: int, tokens: int) -> torch.Tensor:
    """The index of each slot of the packed batch among the ranks' tokens, which are concatenated by rank.

    Computed on the device without a synchronisation. Slots after the last sequence are divided evenly.

    Args:
        cu_seqlens_padded: int32 [B + 1], where sequences start; lengths are multiples of 2 size.
        size: ranks.
        tokens: slots of each rank.

    Returns:
        int64 [size * tokens]: rank * tokens + slot of the rank; a permutation.
    """
    device = cu_seqlens_padded.device
    offsets = torch.cat([cu_seqlens_padded.long(), torch.full((1,), size * tokens, device=device)])
    slot = torch.arange(size * tokens, device=device)
    number = torch.searchsorted(offsets, slot, right=True).sub_(1).clamp_(max=offsets.shape[0] - 2)
    start, length = offsets[number], offsets.diff()[number]
    within, chunk = slot - start, (length // (2 * size)).clamp_(min=1)
    which = within // chunk
    rank = torch.minimum(which, 2 * size - 1 - which)
    local = within % chunk + torch.where(which < size, 0, chunk)
    # the slots after the last sequence need not be a multiple of 2 size: a rank's are one chunk
    is_behind = number == offsets.shape[0] - 2
    share = (length // size).clamp_(min=1)
    rank, local = torch.where(is_behind, within // share, rank), torch.where(is_behind, within % share, local)
    return rank * tokens + start // size + local


def order_of(
    x: torch.Tensor, layout: Layout, cu_seqlens: torch.Tensor | None, cu_seqlens_padded: torch.Tensor | None, size: int
) -> torch.Tensor | None:
    """``packed_order`` of a rank's packed tokens x, by the offsets of whole sequences; None in dense layouts."""
    if not layout.is_packed:
        return None
    starts = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    assert starts is not None  # packed sequences have offsets
    return packed_order(starts, size, x.shape[0])


def in_order(parts: torch.Tensor, layout: Layout, order: torch.Tensor | None) -> torch.Tensor:
    """Whole sequences from every rank's tokens.

    Args:
        parts: [size, ...], each rank's tokens in the layout, any strides.
        layout: of what follows the first dimension.
        order: of packed sequences, as ``packed_order`` gives it.

    Returns:
        size times the tokens, contiguous.
    """
    if order is not None:
        return parts.reshape(-1, *parts.shape[2:]).index_select(0, order)
    size, axis = parts.shape[0], layout.tokens
    shape = list(parts.shape[1:])
    shape[axis] *= size
    whole = parts.new_empty(shape)
    chunks = whole.chunk(2 * size, axis)
    for rank, part in enumerate(parts):
        front, back = part.chunk(2, axis)
        chunks[rank].copy_(front)
        chunks[2 * size - 1 - rank].copy_(back)
    return whole


def by_rank(whole: torch.Tensor, layout: Layout, size: int, inverse: torch.Tensor | None) -> torch.Tensor:
    """The inverse of ``in_order``: [size, ...], contiguous; ``inverse`` is ``order.argsort()``."""
    if inverse is not None:
        return whole.index_select(0, inverse).view(size, -1, *whole.shape[1:])
    axis = layout.tokens
    shape = list(whole.shape)
    shape[axis] //= size
    parts = whole.new_empty((size, *shape))
    chunks = whole.chunk(2 * size, axis)
    for rank, part in enumerate(parts):
        front, back = part.chunk(2, axis)
        front.copy_(chunks[rank])
        back.copy_(chunks[2 * size - 1 - rank])
    return parts


def of_rank(whole: torch.Tensor, size: int, rank: int, inverse: torch.Tensor) -> torch.Tensor:
    """``by_rank(...)[rank]`` of packed sequences alone, in its own memory."""
    return whole.index_select(0, inverse.view(size, -1)[rank])
