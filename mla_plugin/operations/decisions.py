"""Remembers the decisions of an operator's forwards for their backwards.

A backward uses its forward's decision, even if the environment has changed in between. It is looked up by the forward's
lse, or by the kind of call if lse has been copied since (activation offloading).
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
        """Remember the decision of a forward by its kind and its lse."""
        for key in (kind, (kind, lse.data_ptr())):
            self._kept.pop(key, None)  # moves it to the end
            self._kept[key] = decision
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)

    def find(self, kind: Hashable, lse: torch.Tensor) -> Decision | None:
        """The decision of the forward that returned this lse, or of the last one of this kind."""
        return self._kept.get((kind, lse.data_ptr())) or self._kept.get(kind)
