"""Small scales in float16, for backwards that multiply the gradients of the scores by the scale before rounding them.

PyTorch's memory-efficient kernel and cuDNN do. With a scale of 2**-14 and thousands of keys the products are below
float16's smallest number, and dq and dk become 0 (seen on an H200, dq and dk 0.4 of what they are).
"""

from __future__ import annotations

import math

import torch

LEAST_EXPONENT = -6
"""Scales from two to the power of this on are given to the kernel as they are: that of 4096 columns is 2**-6."""
MOST_LOWERED = 14
"""Float16's smallest normal number is 2**-14: below, q itself would lose digits."""


def factor_of_q(dtype: torch.dtype, softmax_scale: float) -> float:
    """What a backward multiplies q by, divides the scale by, and multiplies the resulting dq by; 1 for most calls.

    A power of two, which does not round, so the scores stay the same.
    """
    if dtype != torch.float16 or not softmax_scale:
        return 1.0
    missing = LEAST_EXPONENT + 1 - math.frexp(softmax_scale)[1]
    return 1.0 if missing <= 0 else 2.0 ** -min(missing, MOST_LOWERED)
