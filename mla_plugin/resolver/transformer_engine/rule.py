"""The type of the rules of TransformerEngine's backend selection."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from mla_plugin.resolver.transformer_engine.query import FLASH_VERSIONS, Query
from mla_plugin.resolver.transformer_engine.release import Span

SUBJECTS = {
    "flash": "FlashAttention",
    "flash2": "FlashAttention 2",
    "flash3": "FlashAttention 3",
    "flash4": "FlashAttention 4",
    "fused": "FusedAttention",
    "unfused": "UnfusedDotProductAttention",
}
"""The six flags that rules turn off, with TransformerEngine's names. ``flash`` covers all three versions."""

EVERYTHING = ("flash", "fused", "unfused")
"""Flags of a rule that leaves no backend."""


@dataclass(frozen=True)
class Rule(Span):
    """One rule of the table, for the releases from ``since`` to ``until``.

    Attributes:
        number: its number in ``docs/te_selection.md``; clauses of one rule share it.
        removes: the flags that it turns off.
        when: the condition.
        reason: why, with the value found and the limit.
        subject: what the reason names; None for one reason per removed flag.
        asked_while: which flags must be on for the rule to be evaluated. None: one of those that it removes; then it
            gives its reason only for installed packages.
    """

    number: str
    removes: tuple[str, ...]
    when: Callable[[Query], bool]
    reason: Callable[[Query], str]
    subject: str | None = None
    asked_while: Callable[[Query, Set[str]], bool] | None = None


def always(query: Query, on: Set[str]) -> bool:
    """Evaluate the rule, and give its reason, even if there is nothing left to remove."""
    return True


def while_on(switch: str) -> Callable[[Query, Set[str]], bool]:
    """Evaluate the rule while one flag is on, and give its reason even for packages that are not installed."""
    return lambda query, on: switch in on


def any_version_on(query: Query, on: Set[str]) -> bool:
    """Whether a version of FlashAttention is on, installed or not, whatever the state of ``flash``."""
    return not on.isdisjoint(FLASH_VERSIONS)


def any_flash_switch_on(query: Query, on: Set[str]) -> bool:
    """Whether FlashAttention or one of its versions is on."""
    return "flash" in on or any_version_on(query, on)


def any_installed_version_on(query: Query, on: Set[str]) -> bool:
    """Whether an installed version of FlashAttention is on, whatever the state of ``flash``."""
    return any(version in on and query.has(version) for version in FLASH_VERSIONS)


def installed_fa2_on(query: Query, on: Set[str]) -> bool:
    """Whether FlashAttention 2 is installed and on, whatever the state of ``flash``."""
    return "flash2" in on and query.has("flash2")
