"""The shape of one rule of TransformerEngine's backend selection."""

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
"""The six switches that rules turn off, with TransformerEngine's names. ``flash`` stands above the three versions."""

EVERYTHING = ("flash", "fused", "unfused")
"""What a rule turns off that leaves no backend."""


@dataclass(frozen=True)
class Rule(Span):
    """One line of the table, for the releases from ``since`` to ``until``.

    Attributes:
        number: its number in ``docs/te_selection.md``; clauses of one rule share it.
        removes: the switches that it turns off.
        when: the condition.
        reason: why, with the value found and the limit.
        subject: what the reason names; None to name each removed switch in a reason of its own.
        asked_while: which switches must be on for the rule to be asked. None: one of those that it removes; then it
            gives its reason only for what is installed.
    """

    number: str
    removes: tuple[str, ...]
    when: Callable[[Query], bool]
    reason: Callable[[Query], str]
    subject: str | None = None
    asked_while: Callable[[Query, Set[str]], bool] | None = None


def always(query: Query, on: Set[str]) -> bool:
    """Ask, and give the reason, even when there is nothing left to remove."""
    return True


def while_on(switch: str) -> Callable[[Query, Set[str]], bool]:
    """Ask while one switch is on, and give the reason even for what is not installed."""
    return lambda query, on: switch in on


def any_version_on(query: Query, on: Set[str]) -> bool:
    """Whether a version of FlashAttention is on, installed or not, whatever the switch above it says."""
    return not on.isdisjoint(FLASH_VERSIONS)


def any_flash_switch_on(query: Query, on: Set[str]) -> bool:
    """Whether FlashAttention or one of its versions is on."""
    return "flash" in on or any_version_on(query, on)


def any_installed_version_on(query: Query, on: Set[str]) -> bool:
    """Whether an installed version of FlashAttention is on, whatever the switch above it says."""
    return any(version in on and query.has(version) for version in FLASH_VERSIONS)


def installed_fa2_on(query: Query, on: Set[str]) -> bool:
    """Whether FlashAttention 2 is installed and on, whatever the switch above it says."""
    return "flash2" in on and query.has("flash2")
