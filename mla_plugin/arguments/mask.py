"""The meaning of a mask: which keys a query sees, by causality, window and alignment."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch

from mla_plugin.arguments.checks import MAX_LENGTH

ATTN_MASK_TYPES = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)


class Band(NamedTuple):
    """The keys around the diagonal that a query sees: i sees j when ``i + offset - left <= j <= i + offset + right``.

    Attributes:
        left, right: keys seen on each side of the diagonal; -1 leaves the side open. A causal mask is right 0.
        bottom_right: where the diagonal is in each sequence: through the first query and the first key (False,
            ``offset`` 0), or through the last query and the last key (True, ``offset`` is len_kv - len_q).
    """

    left: int
    right: int
    bottom_right: bool

    @property
    def is_open(self) -> bool:
        """Every query sees every key."""
        return self.left < 0 and self.right < 0

    @property
    def is_causal(self) -> bool:
        """No query sees a key beyond the diagonal."""
        return self.right == 0

    @property
    def is_plain(self) -> bool:
        """No window other than a causal mask."""
        return not self.has_window

    @property
    def has_window(self) -> bool:
        """The band is narrower than a causal mask makes it."""
        return self.left >= 0 or self.right > 0

    def within(self, tokens: int) -> Band:
        """The same band for sequences of at most this many queries and keys in total: a side that long is open."""
        left, right = (side if side < tokens else -1 for side in (self.left, self.right))
        return Band(left, right, self.bottom_right)

    def offset(self, len_q: int, len_kv: int) -> int:
        """Column of the diagonal in row 0."""
        return len_kv - len_q if self.bottom_right else 0

    def shows_every_query_a_key(self, len_q: int, len_kv: int) -> bool:
        """True if every query of a sequence of these lengths sees a key."""
        offset = self.offset(len_q, len_kv)
        ends = (self.keys(slice(row, row + 1), offset, len_kv) for row in (0, len_q - 1))
        return all(keys.start < keys.stop for keys in ends)

    def keys(self, rows: slice, offset: int, len_kv: int) -> slice:
        """The keys that at least one of the rows sees; empty (stop <= start) when there are none."""
        start = 0 if self.left < 0 else max(0, rows.start + offset - self.left)
        stop = len_kv if self.right < 0 else min(len_kv, rows.stop + offset + self.right)
        return slice(start, stop)

    def hides(self, query: torch.Tensor, key: torch.Tensor, offset: int | torch.Tensor) -> torch.Tensor | None:
        """Mask of the band: True where a query does not see a key.

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


OPEN = Band(left=-1, right=-1, bottom_right=False)
"""Every query sees every key."""


def canonical_mask(
    attn_mask_type: str,
    window_size: tuple[int, int] | None,
    bottom_right_diagonal: bool | None,
    *,
    is_packed: bool,
) -> tuple[str, tuple[int, int], bool]:
    """The mask's canonical name, window and diagonal; equivalent masks give the same result.

    Commas become underscores and ``causal_padding`` becomes ``padding_causal``, as in TransformerEngine. A packed
    layout gets the padding form. A window (-1, 0) without a causal mask is a causal mask, as in FlashAttention. A
    causal mask closes the window's right side and fixes the diagonal.

    Args:
        attn_mask_type: one of ``ATTN_MASK_TYPES``, or a spelling that becomes one.
        window_size: (left, right); None for no window.
        bottom_right_diagonal: None for the default: False for ``causal`` and ``padding_causal``, True otherwise.
        is_packed: the layout is ``thd``.

    Raises:
        ValueError, TypeError: the mask is unknown, the window is not a pair of counts, or the diagonal contradicts the
            mask.
    """
    if not isinstance(attn_mask_type, str):
        raise TypeError(f"attn_mask_type={attn_mask_type!r}; expected one of {', '.join(ATTN_MASK_TYPES)}")
    mask = attn_mask_type.replace(",", "_").replace("causal_padding", "padding_causal")
    if mask not in ATTN_MASK_TYPES:
        raise ValueError(f"attn_mask_type={attn_mask_type!r}; expected one of {', '.join(ATTN_MASK_TYPES)}")
    if is_packed and mask == "arbitrary":
        raise ValueError("attn_mask_type='arbitrary' needs a dense layout; thd accepts the padding masks")
    if bottom_right_diagonal is not None and not isinstance(bottom_right_diagonal, bool):
        raise TypeError(f"bottom_right_diagonal={bottom_right_diagonal!r}; expected True, False or None")
    if is_packed and "padding" not in mask:
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    left, right = (-1, -1) if window_size is None else window_pair(window_size)
    if "causal" not in mask and (left, right) == (-1, 0) and mask != "arbitrary":
        stem = "causal" if mask == "no_mask" else "padding_causal"
        mask = stem if bottom_right_diagonal is False else f"{stem}_bottom_right"
    if "causal" not in mask:
        return mask, (left, right), bottom_right_diagonal is not False
    is_bottom_right = mask.endswith("bottom_right")
    if bottom_right_diagonal is not None and bottom_right_diagonal != is_bottom_right:
        raise ValueError(
            f"bottom_right_diagonal={bottom_right_diagonal} contradicts attn_mask_type={mask!r}; leave it out"
        )
    return mask, (left, 0), is_bottom_right


def window_pair(window_size: tuple[int, int]) -> tuple[int, int]:
    """(left, right) as ints.

    Raises:
        ValueError: it is not a pair of counts or -1 (unlimited).
    """
    try:
        if not isinstance(window_size, (tuple, list)) or any(isinstance(x, (bool, torch.Tensor)) for x in window_size):
            raise TypeError  # a set has no order, and a tensor's values may be on another device
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError):
        left = right = -2
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size={window_size!r}; expected (left, right), each -1 (unlimited) or a number of tokens"
        )
    return min(left, MAX_LENGTH), min(right, MAX_LENGTH)  # no sequence is longer, so a larger side sees no more
