"""TransformerEngine's rules on FlashAttention: which packages count as installed, which head dimensions they take.

Rule numbers are those of ``docs/te_selection.md``. Sources: ``backends.py`` and ``utils.py`` of TransformerEngine's
``dot_product_attention``, release by release; for FlashAttention 4 the head-dimension check of its own releases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from packaging.version import Version

from mla_plugin.resolver.transformer_engine.release import Release, Span

ComputeCapability = tuple[int, int]

_FA4_FIRST = "4.0.0b5"
_FA4_NEEDS_NEW_CUTLASS = "4.0.0b24"
_CUTLASS_MINIMUM = "4.6.2"
_WITHOUT_LOCAL_PART = Span(since="2.15", until="2.18")


@lru_cache(maxsize=256)
def _version(text: str) -> Version:
    return Version(text)


def at_least(version: str, minimum: str) -> bool:
    """Whether a package version is at least ``minimum``, by the order of PEP 440 (``2.8.3+cu12`` counts as 2.8.3)."""
    return _version(version) >= _version(minimum)


@dataclass(frozen=True)
class Package(Span):
    """A reason why an installed FlashAttention counts as absent (rule 0.1), and the releases that apply it.

    Attributes:
        backend: ``"flash2"``, ``"flash3"`` or ``"flash4"``.
        when: the condition: a function of its version, the compute capability and the version of
            ``nvidia-cutlass-dsl``, None when unknown.
        reason: text; ``{minimum}`` is replaced by the oldest FlashAttention 2 for the device.
    """

    backend: str
    when: Callable[[str, ComputeCapability, str | None], bool]
    reason: str


def _fa2_minimum(cc: ComputeCapability) -> str:
    return "2.7.3" if cc >= (10, 0) else "2.1.1"


PACKAGES: tuple[Package, ...] = (
    Package("flash2", lambda version, cc, _: not at_least(version, _fa2_minimum(cc)), "needs {minimum}"),
    # by PEP 440, 2.8.3.post1 and 2.8.3+cu12 are newer than 2.8.3
    Package(
        "flash2",
        lambda version, cc, _: not at_least("2.8.3", version),
        "is newer than 2.8.3",
        until="2.18",
    ),
    Package("flash2", lambda version, cc, _: at_least(version, "2.8.4"), "is not below 2.8.4"),
    Package("flash4", lambda *_: True, "is not known to TransformerEngine before 2.15", until="2.14"),
    Package(
        "flash4",
        lambda version, cc, _: not at_least(version, _FA4_FIRST),
        f"< {_FA4_FIRST} lacks the head-dimension check that selection calls",
    ),
    Package(
        "flash4",
        lambda version, cc, dsl: (
            version == _FA4_NEEDS_NEW_CUTLASS and dsl is not None and not at_least(dsl, _CUTLASS_MINIMUM)
        ),
        f"needs nvidia-cutlass-dsl >= {_CUTLASS_MINIMUM}",
        since="2.19",
    ),
)
"""Rule 0.1. Every version of FlashAttention 3 counts as installed."""

DISTRIBUTIONS = {"flash2": "flash-attn", "flash3": "flash-attn-3", "flash4": "flash-attn-4"}


def why_not_installed(
    backend: str, version: str | None, cc: ComputeCapability, cutlass_dsl: str | None = None, *, release: Release
) -> str | None:
    """Rule 0.1: why TransformerEngine treats a FlashAttention version as absent; None when it counts as installed.

    Args:
        backend: ``"flash2"``, ``"flash3"`` or ``"flash4"``.
        version: version of the distribution, as TransformerEngine compares it; None if it is not installed.
        cc: compute capability of the device.
        cutlass_dsl: version of ``nvidia-cutlass-dsl``; None if unknown, which counts as new enough.
        release: of TransformerEngine.
    """
    if version is None:
        return f"{DISTRIBUTIONS[backend]} is not installed"
    for package in PACKAGES:
        if package.backend == backend and package.holds_in(release) and package.when(version, cc, cutlass_dsl):
            return f"{DISTRIBUTIONS[backend]} {version} {package.reason.format(minimum=_fa2_minimum(cc))}"
    return None


def compared_version(backend: str, version: str | None, release: Release) -> str | None:
    """A FlashAttention version as TransformerEngine compares it: 2.15 to 2.18 drop the local part of version 2."""
    if version is None or backend != "flash2" or not _WITHOUT_LOCAL_PART.holds_in(release):
        return version
    return _version(version).public


def fa2_takes(head_dim: int, cc: ComputeCapability) -> bool:
    """Rule 15: the head dimensions of FlashAttention 2."""
    # only these exact capabilities: (8, 6), (8, 9), (10, 3), (11, 0) and (12, 1) take at most 192
    return head_dim % 8 == 0 and (head_dim <= 192 or (head_dim <= 256 and cc in ((8, 0), (9, 0), (10, 0), (12, 0))))


def fa3_takes(dq: int, dv: int, num_heads: int, num_kv_heads: int, dtype: str) -> bool:
    """Rule 16: FlashAttention 3 takes equal head dimensions and two MLA families; it has no multiple-of-8 rule here."""
    if dq > 256 or num_heads % num_kv_heads != 0:
        return False
    if dq == dv:
        return True
    expanded = 128 < dq <= 192 and 96 < dv <= 128
    absorbed = dq <= 64 and dv <= 512
    return (expanded or absorbed) and (dv <= 256 or dtype in ("bfloat16", "float16"))


def fa4_takes(dq: int, dv: int, cc: ComputeCapability, version: str) -> bool:
    """Rule 17: the head-dimension check of a FlashAttention 4 release, for 16-bit types.

    Only compute capability 9, 10 and 11 are checked.
    """
    if cc[0] not in (9, 10, 11):
        return True
    if dq % 8 or dv % 8:
        return False
    if cc[0] == 9:
        return 8 <= dq <= 256 and 8 <= dv <= 256
    special = {(192, 128): _FA4_FIRST, (64, 512): "4.0.0b9", (256, 256): "4.0.0b11", (512, 512): "4.0.0b16"}
    since = special.get((dq, dv))
    return (8 <= dq <= 128 and 8 <= dv <= 128) or (since is not None and at_least(version, since))


def fa4_takes_unasked(dq: int, dv: int, cc: ComputeCapability) -> bool:
    """Rule 17 in 2.15, which does not call FlashAttention 4's own check."""
    if (10, 0) <= cc < (12, 0):
        return max(dq, dv) <= 128 or (dq, dv) == (192, 128)
    return max(dq, dv) <= 256


def fa4_backward_misaligned(dq: int, dv: int) -> bool:
    """Rule 20: FlashAttention 4's backward stores dV in steps derived from dK; True if they do not divide dV."""
    tile_q, tile_v = -(-dq // 16) * 16, -(-dv // 16) * 16
    return (tile_v // 2) % gcd(32, tile_q // 2) != 0
