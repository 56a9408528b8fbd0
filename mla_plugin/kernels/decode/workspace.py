"""Memory that the kernels of a call write and read: partial results, and the plan, which the layers of a step share."""

from __future__ import annotations

from typing import NamedTuple

import torch

_ALIGNED = 4  # int32 values in 16 bytes, at which launches expect every tensor to start


class Scratch(NamedTuple):
    """What one round of a call has.

    Attributes:
        parts: partial results, see ``combine_kernel`` and ``combine_chunks_kernel``; in the dtype of the queries.
        plan: int32, see ``plan_kernel`` and ``plan_chunks_kernel``; None if the attention kernel works it out.
    """

    parts: torch.Tensor
    plan: torch.Tensor | None


Plans = tuple[torch.Tensor | None, ...]
"""``Scratch.plan`` of each round."""


def new_plans(device: torch.device, rounds: int, numbers: int) -> Plans:
    """Memory for the plan of each round, of so many int32 values."""
    if not numbers:
        return (None,) * rounds
    size = -(-numbers // _ALIGNED) * _ALIGNED
    memory = torch.empty(rounds * size, dtype=torch.int32, device=device)
    return (memory,) if rounds == 1 else memory.split(size)
