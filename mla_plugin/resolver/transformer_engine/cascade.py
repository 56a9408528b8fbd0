"""Reproduces TransformerEngine's selection of an attention backend, rule by rule.

The rules are one table in three parts (``rules_platform``, ``rules_shapes``, ``rules_masks``);
``docs/te_selection.md`` explains them by their numbers, and each says for which releases of TransformerEngine it holds.
``te_decide`` applies the rules of one release in order and then selects one of the backends that are left.

Source: ``get_attention_backend`` of TransformerEngine 2.10 to 2.20.2, without its FP8 branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from mla_plugin.resolver.transformer_engine import rules_masks, rules_platform, rules_shapes
from mla_plugin.resolver.transformer_engine.inputs import read_query
from mla_plugin.resolver.transformer_engine.query import FLASH_VERSIONS, Query
from mla_plugin.resolver.transformer_engine.release import NEWEST, read_release
from mla_plugin.resolver.transformer_engine.rule import SUBJECTS, Rule

RULES: tuple[Rule, ...] = rules_platform.RULES + rules_shapes.RULES + rules_masks.RULES
"""Every filter of every release, in the order of application."""


@dataclass(frozen=True)
class Removal:
    """A backend that a rule removed.

    Attributes:
        rule: number of the rule in ``docs/te_selection.md``, such as ``"12e"``; ``"0.1"`` for a missing package.
        backend: ``flash2``, ``flash3``, ``flash4``, ``fused`` or ``unfused``.
        reason: why, with the value found and the limit.
    """

    rule: str
    backend: str
    reason: str


@dataclass(frozen=True)
class CascadeDecision:
    """What TransformerEngine would select.

    Attributes:
        release: of TransformerEngine, such as ``"2.20.2"``.
        selected: ``flash2``, ``flash3``, ``flash4``, ``fused``, ``unfused`` or ``none``.
        flash_attention_backend: ``"2"``, ``"3"``, ``"4"`` or None: the FlashAttention that is left, even when another
            backend is selected.
        available_backends: whether FlashAttention, cuDNN and unfused are left after the filters.
        deterministic: whether only deterministic backends were allowed.
        reasons: one sentence for each message that TransformerEngine logs, in its order and naming the same backends.
        survivors: the backends that are left, in TransformerEngine's order of preference.
        removals: why each of the others was removed, possibly by several rules.
    """

    release: str
    selected: str
    flash_attention_backend: str | None
    available_backends: tuple[bool, bool, bool]
    deterministic: bool
    reasons: tuple[str, ...]
    survivors: tuple[str, ...]
    removals: tuple[Removal, ...]


def te_decide(
    params: Mapping[str, Any],
    env: Mapping[str, str],
    platform: Mapping[str, Any],
    *,
    release: str | Version = NEWEST,
) -> CascadeDecision:
    """Decide as a release of TransformerEngine does.

    Args:
        params: the fields of TransformerEngine's ``AttentionParams``; dtype as text (``"bfloat16"``). ``deterministic``
            may be missing or ``"env"``: then NVTE_ALLOW_NONDETERMINISTIC_ALGO decides. ``bottom_right_diagonal`` may be
            ``"auto"``: then the mask decides. ``core_attention_bias_shape`` is in letters (``"1hss"``) or numbers in
            every release. ``softcap`` may be missing.
        env: environment variables.
        platform: ``compute_capability``; ``cudnn_version``, None without cuDNN; ``flash_attn``, the version (as
            TransformerEngine compares it) or None by ``"2"``, ``"3"``, ``"4"``; ``fused_supported``, cuDNN's answer, or
            ``"cudnn"`` to work it out; optionally ``nvidia_cutlass_dsl``, the version of that package, and
            ``fa3_softcap``, whether FlashAttention 3's functions take ``softcap``.
        release: from 2.10 on, such as ``"2.14"`` or ``"2.14.1"``; a local part (``+abc``) does not count.

    Raises:
        ValueError: a value is not accepted (``EnvironmentVariableError`` for a variable), the release is not known or
            cannot express the request.
        AssertionError: as in TransformerEngine, for a window that does not fit the mask.
    """
    name, minor = read_release(release)
    query = read_query(params, env, platform, minor)
    removals = [Removal("0.1", backend, reason) for backend, reason in query.absent.items()]
    reasons: list[str] = []
    on = set(SUBJECTS)
    if "flash" in query.switched_off:
        on.remove("flash")
    for rule in RULES:
        if rule.holds_in(minor):
            _apply(rule, query, on, reasons, removals)
    return _prefer(name, query, on, reasons, removals)


def _apply(rule: Rule, query: Query, on: set[str], reasons: list[str], removals: list[Removal]) -> None:
    """Remove the rule's backends if its condition holds, and record the reason."""
    asked = rule.asked_while(query, on) if rule.asked_while else not on.isdisjoint(rule.removes)
    if not asked or not rule.when(query):
        return
    present = on - query.absent.keys()
    on.difference_update(rule.removes)
    named = rule.removes if rule.asked_while else [name for name in rule.removes if name in present]
    if not named:
        return
    why = rule.reason(query)
    subjects = (rule.subject,) if rule.subject else [SUBJECTS[name] for name in named]
    reasons += [f"Disabling {subject}: {why} (rule {rule.number})" for subject in subjects]
    backends = [backend for name in named for backend in (FLASH_VERSIONS if name == "flash" else (name,))]
    removals += [Removal(rule.number, backend, why) for backend in backends if backend in present]


def _prefer(release: str, query: Query, on: set[str], reasons: list[str], removals: list[Removal]) -> CascadeDecision:
    """Rules 43 to 47: order what is left; on compute capability 9.0 and later cuDNN comes before FlashAttention."""
    flash = [
        version for version in reversed(FLASH_VERSIONS) if {"flash", version} <= on and version not in query.absent
    ]
    fused = ["fused"] if "fused" in on else []
    unfused = ["unfused"] if "unfused" in on else []
    fused_first = query.cc >= (9, 0)
    if fused_first and flash and fused:
        reasons.append(
            f"Disabling {SUBJECTS['flash']}: cuDNN is preferred on compute capability 9.0 and later (rule 45)"
        )
    survivors = tuple(fused + flash + unfused if fused_first else flash + fused + unfused)
    return CascadeDecision(
        release=release,
        selected=survivors[0] if survivors else "none",
        flash_attention_backend=flash[0].removeprefix("flash") if flash else None,
        available_backends=(bool(flash), bool(fused), bool(unfused)),
        deterministic=query.deterministic,
        reasons=tuple(reasons),
        survivors=survivors,
        removals=tuple(removals),
    )
