"""Memory that the kernels of a call write and read: partial results, and the plan, which the layers of a step share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from mla_plugin.arguments.capture import stream_and_capture
from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors

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
"""Of each round."""


def new_plans(device: torch.device, rounds: int, numbers: int) -> Plans:
    """Memory for plans of so many int32 values, for each round.

    Written under ``inference_mode`` or not, they are read in both.
    """
    if not numbers:
        return (None,) * rounds
    size = -(-numbers // _ALIGNED) * _ALIGNED
    memory = torch.empty(rounds * size, dtype=torch.int32, device=device)
    return (memory,) if rounds == 1 else memory.split(size)


def sharing_lengths(tensors: DecodeTensors) -> DecodeLengths | None:
    """The lengths whose plans other calls can share: those of all that the plan depends on."""
    lengths = tensors.lengths
    if lengths is None or tensors.seqlens_kv is not lengths.seqlens_kv or tensors.leftpad_kv is not None:
        return None
    return lengths


class Sharing(NamedTuple):
    """Where the plans of a call are shared.

    Attributes:
        lengths: which keep them.
        key: their name there.
        version: of the lengths, before this call's kernels read them: another thread may update them.
        plans: of an earlier call; None if this one plans.
    """

    lengths: DecodeLengths
    key: Hashable
    version: Hashable
    plans: Plans | None

    @classmethod
    def of(cls, lengths: DecodeLengths, plan_key: Hashable, device: torch.device) -> Sharing | None:
        """None if the plans cannot be shared.

        Args:
            lengths: of ``sharing_lengths``.
            plan_key: everything that the plans depend on, except the lengths; None: nothing plans.
            device: on which they are computed.
        """
        place = None if plan_key is None else stream_and_capture(device)
        if place is None:
            return None
        key = ("triton", plan_key, device, place)
        plans = lengths.kept(key)
        return cls(lengths, key, lengths.version if plans is None else None, plans)

    def keep(self, plans: Plans) -> None:
        """Share plans that this call's kernels write; they have been launched."""
        self.lengths.keep(self.key, plans, self.version)
