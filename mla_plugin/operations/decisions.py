"""What forwards behind an operator decided, for the backwards that follow.

A backward keeps to its forward's decision, even if the environment has changed in between. It is found by the forward's
lse, or by the kind of call where somebody has copied lse meanwhile (activation offloading).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

_MAX_KEPT = 4096

Decision = TypeVar("Decision")


class Decisions(Generic[Decision]):
    """The last decisions of one operator."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Decision] = OrderedDict()

    def keep(self, kind: Hashable, lse: torch.Tensor, decision: Decision) -> None:
        """What the backward of a call of this kind, whose forward gave this lse, will keep to."""
        for key in (kind, (kind, lse.data_ptr())):
            self._kept.pop(key, None)  # so that it goes to the end
            self._kept[key] = decision
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)

    def find(self, kind: Hashable, lse: torch.Tensor) -> Decision | None:
        """The decision of the forward that gave this lse, or of the last one of this kind."""
        return self._kept.get((kind, lse.data_ptr())) or self._kept.get(kind)
