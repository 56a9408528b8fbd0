"""TransformerEngine's selection: the shape of a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Removal:
    """One backend that a rule removed."""

    rule: str
    backend: str
    reason: str


@dataclass(frozen=True)
class CascadeDecision:
    """What TransformerEngine would decide."""

    selected: str
    survivors: tuple[str, ...] = ()
    removals: tuple[Removal, ...] = ()


def decide(params: Mapping[str, object], env: Mapping[str, str], platform: Mapping[str, object]) -> CascadeDecision:
    """Everything survives."""
    return CascadeDecision("unfused", ("unfused",))
