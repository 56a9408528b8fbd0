"""Which keys a query may see: the diagonal band that causal masks and sliding windows share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_plugin.hooks.types import AttentionRequest


@dataclass(frozen=True)
class Band:
    """Query i sees key j when ``i + offset - left <= j <= i + offset + right``; -1 leaves a side open.

    ``offset`` is 0 when the diagonal starts at the first query and the first key (top-left), and ``len_kv - len_q`` of
    each sequence when it ends at the last ones (bottom-right).
    """

    left: int
    right: int
    bottom_right: bool

    @classmethod
    def of(cls, request: AttentionRequest) -> Band:
        """A causal mask closes the right side and fixes the alignment; any other takes both from the window."""
        left, right = request.window_size
        mask = request.attn_mask_type
        if "causal" in mask:
            return cls(left, 0, mask.endswith("bottom_right"))
        return cls(left, right, request.bottom_right_diagonal)

    @property
    def is_open(self) -> bool:
        """Every query sees every key."""
        return self.left < 0 and self.right < 0

    @property
    def is_open_or_causal(self) -> bool:
        """No window beyond what a causal flag says."""
        return self.left < 0 and self.right <= 0

    def offset(self, len_q: int, len_kv: int) -> int:
        """Column of the diagonal in row 0."""
        return len_kv - len_q if self.bottom_right else 0

    def keys(self, rows: slice, offset: int, len_kv: int) -> slice:
        """The keys that at least one of the rows sees; empty (stop <= start) when there are none."""
        start = 0 if self.left < 0 else max(0, rows.start + offset - self.left)
        stop = len_kv if self.right < 0 else min(len_kv, rows.stop + offset + self.right)
        return slice(start, stop)

    def hides(self, query: torch.Tensor, key: torch.Tensor, offset: int | torch.Tensor) -> torch.Tensor | None:
        """True where a query does not see a key.

        Args:
            query: positions within the sequence, [..., rows, 1].
            key: positions within the sequence, [..., 1, keys].
            offset: column of the diagonal in row 0, or a tensor of them that broadcasts against the positions.

        Returns:
            bool, broadcast shape of the arguments; None when the band is open.
        """
        distance = key - query - offset
        if self.left < 0:
            return None if self.right < 0 else distance > self.right
        before = distance < -self.left
        return before if self.right < 0 else before | (distance > self.right)
