"""Which part of the scores (queries of a rank) x (keys of a rank) is visible, and where its tokens are.

A sequence of P slots is split into 2 size chunks of c = P / (2 size) tokens; rank r holds chunk r, its front, and chunk
2 size - 1 - r, its back. Under a causal mask a rank's queries see of the keys of another rank

- all, where the owner is the rank itself: causal, because front and back are in order (``diagonal``);
- the front half, where the owner has the lower rank: both queries' chunks lie between the owner's chunks (``lower``);
- all, but by the back half of the queries alone, where the owner has the higher rank (``upper``).

So every rank computes as many scores as the others, and no section needs more than a causal flag.

Of a sequence with L <= P tokens, rank r holds a = clamp(L - r c, 0, c) in its front and
b = clamp(L - (2 size - 1 - r) c, 0, c) in its back. b > 0 only where a = c: its tokens are always a prefix of its 2 c
slots, and a section of packed sequences is a packed call with padded offsets. Nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Section:
    """The keys of an owner that the queries of a rank see.

    Attributes:
        name: ``diagonal``, ``lower``, ``upper``, or ``all`` without a causal mask.
        queries: ``back`` for the second half of the rank's tokens.
        keys: ``front`` for the first half of the owner's tokens.
        is_causal: top-left, over queries and keys of equal lengths.
    """

    name: str
    queries: Literal["all", "back"] = "all"
    keys: Literal["all", "front"] = "all"
    is_causal: bool = False


DIAGONAL = Section("diagonal", is_causal=True)
LOWER = Section("lower", keys="front")
UPPER = Section("upper", queries="back")
ALL = Section("all")


def section(rank: int, owner: int, *, is_causal: bool) -> Section:
    """The section of a rank's queries and an owner's keys."""
    if not is_causal:
        return ALL
    if owner == rank:
        return DIAGONAL
    return LOWER if owner < rank else UPPER


def sections_of(size: int, rank: int, *, is_causal: bool) -> tuple[Section, ...]:
    """Every section that a rank computes, each once."""
    return tuple(dict.fromkeys(section(rank, (rank - step) % size, is_causal=is_causal) for step in range(size)))


def half(x: torch.Tensor, which: Literal["all", "front", "back"], axis: int) -> torch.Tensor:
    """A view of the first or the second half of the tokens."""
    if which == "all":
        return x
    tokens = x.shape[axis] // 2
    return x.narrow(axis, 0 if which == "front" else tokens, tokens)


@dataclass(frozen=True)
class Lengths:
    """The location of the sequences of queries or keys on each rank, computed on the device; the host reads nothing.

    Attributes:
        chunk: [B], tokens of a chunk with its padding.
        front, back: [size, B], true tokens of each rank in its front and its back.
        starts: int32 [B + 1], first slot of each sequence within a rank's tokens; the last entry is their number. None
            for dense layouts, where each sequence starts at the first token of its row.
        middles: the same for the back; only the last entry stays.
    """

    chunk: torch.Tensor
    front: torch.Tensor
    back: torch.Tensor
    starts: torch.Tensor | None = None
    middles: torch.Tensor | None = None

    @classmethod
    def dense(cls, cu_seqlens: torch.Tensor, size: int, tokens: int) -> Lengths:
        """For rows of ``tokens`` slots on each rank; cu_seqlens are the true lengths of whole sequences."""
        lengths = cu_seqlens.diff()
        return cls._of(lengths, torch.full_like(lengths, tokens // 2), size)

    @classmethod
    def packed(cls, cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor, size: int, tokens: int) -> Lengths:
        """For packed sequences, ``tokens`` slots on each rank; both offsets are int32 [B + 1], of whole sequences."""
        chunk = cu_seqlens_padded.diff() // (2 * size)
        starts = cu_seqlens_padded // size
        starts[-1:].fill_(tokens)  # assigned as starts[-1] it would be copied from the host
        middles = starts.clone()
        middles[:-1] += chunk
        return cls._of(cu_seqlens.diff(), chunk, size, starts, middles)

    @classmethod
    def _of(
        cls,
        lengths: torch.Tensor,
        chunk: torch.Tensor,
        size: int,
        starts: torch.Tensor | None = None,
        middles: torch.Tensor | None = None,
    ) -> Lengths:
        ranks = torch.arange(size, dtype=lengths.dtype, device=lengths.device)[:, None]
        none = torch.zeros_like(chunk)
        front = torch.clamp(lengths - ranks * chunk, none, chunk)
        back = torch.clamp(lengths - (2 * size - 1 - ranks) * chunk, none, chunk)
        return cls(chunk, front, back, starts, middles)

    def of(self, rank: int, which: Literal["all", "front", "back"]) -> Offsets:
        """Lengths and starts of a rank's tokens, or of one half of them."""
        lengths = {"front": self.front, "back": self.back}.get(which, self.front + self.back)[rank]
        return Offsets(cumulative(lengths), self.middles if which == "back" else self.starts)


@dataclass(frozen=True)
class Offsets:
    """The offsets of a section's queries or keys, as a call takes them.

    Attributes:
        cu_seqlens: int32 [B + 1], cumulative true lengths.
        starts: int32 [B + 1], where each sequence starts; None for dense layouts.
    """

    cu_seqlens: torch.Tensor
    starts: torch.Tensor | None

    def without_starts(self) -> Offsets:
        """The same for sequences without gaps."""
        return Offsets(self.cu_seqlens, None)


def cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [B + 1] of lengths [B]: 0 and the sums so far."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
