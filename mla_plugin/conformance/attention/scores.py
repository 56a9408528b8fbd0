"""Sizes of the scores: what q and k are made of, besides random numbers, so that faults of a softmax show."""

from __future__ import annotations

import math
from typing import Literal

import torch

from mla_plugin.conformance.attention.draw import Draw

Scores = Literal["normal", "large", "overflow", "peaked", "unlike", "faint_queries", "faint_keys", "falling"]
"""``large`` are 100 and more. The terms of ``overflow`` are beyond float16. ``faint_queries`` are large over a scale,
``FAINT``, that makes keys too small for float16 if they are multiplied by it; ``faint_keys`` do so to queries. With
``peaked`` two keys in ``PERIOD`` leave the others small weights, which still count together. With ``unlike`` the maxima
of neighbouring rows are far apart. With ``falling`` all keys but the first ``HIGH`` are ``FALL`` lower, and count
together."""

_FACTORS = {"large": (40.0, 1.0), "overflow": (64.0, 64.0), "faint_queries": (4096.0, 1.0), "faint_keys": (1.0, 4096.0)}
"""What q and k are multiplied by."""
FAINT = 2.0**-14
"""A power of two, so that multiplying by it seems to lose nothing."""
OF_ONE_KEY = ("peaked", "unlike")
"""Where a weight may be almost 1: out is rounded to v itself, in all rows alike, and the gain takes rows for
independent. Such cases have few rows."""
PEAK, PERIOD = 13.0, 512
"""The score of the two above the others, and the distance of two such pairs in keys. A single one would make out the
same number in all rows, and so its rounding, which the gain takes for independent."""

HIGH, FALL = 128, 12.5


def scaled(scores: Scores, q: torch.Tensor, k: torch.Tensor, tokens: int, softmax_scale: float, draw: Draw) -> None:
    """Give q and k such scores, in place.

    Args:
        scores: which.
        q: [..., D].
        k: [..., D].
        tokens: axis of k's tokens.
        softmax_scale: of the call.
        draw: the source of random numbers.
    """
    for x, factor in zip((q, k), _FACTORS.get(scores, (1.0, 1.0)), strict=True):
        x.mul_(factor)
    if scores == "peaked":
        q[..., 0], k[..., 0] = 1.0, 0.0
        for first in (0, 1):
            k[..., 0].movedim(tokens, 0)[first::PERIOD] = PEAK / softmax_scale
    if scores == "falling":
        q[..., 0], k[..., 0] = 1.0, 0.0
        k[..., 0].movedim(tokens, 0)[HIGH:] = -FALL / softmax_scale
    if scores == "unlike":
        exponents = 9.0 * draw.uniform(q.shape[:-1]) - 2.0
        q.mul_((math.log(2.0) * exponents).exp().to(q.dtype)[..., None])
