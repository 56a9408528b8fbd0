"""What TransformerEngine knows of FlashAttention: which packages count as installed, which head dimensions they take.

Rule numbers are those of ``docs/te_selection.md``. Sources: ``backends.py`` and ``utils.py`` of TransformerEngine's
``dot_product_attention`` at ``d0067d0da6cb``; for FlashAttention 4 the head-dimension check of its own releases.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from packaging.version import Version

ComputeCapability = tuple[int, int]

_FA2_BELOW = "2.8.4"
_FA4_FIRST = "4.0.0b5"
_FA4_NEEDS_NEW_CUTLASS = "4.0.0b24"
_CUTLASS_MINIMUM = "4.6.2"


@lru_cache(maxsize=256)
def _version(text: str) -> Version:
    return Version(text)


def at_least(version: str, minimum: str) -> bool:
    """Whether a package version is at least ``minimum``, by the order of PEP 440 (``2.8.3+cu12`` counts as 2.8.3)."""
    return _version(version) >= _version(minimum)


def why_not_installed(
    backend: str, version: str | None, cc: ComputeCapability, cutlass_dsl: str | None = None
) -> str | None:
    """Rule 0.1: why TransformerEngine treats a FlashAttention version as absent; None when it counts as installed.

    Args:
        backend: ``"flash2"``, ``"flash3"`` or ``"flash4"``.
        version: version of the distribution; None when it is not there.
        cc: compute capability of the device.
        cutlass_dsl: version of ``nvidia-cutlass-dsl``; None when unknown, which counts as new enough.
    """
    distribution = {"flash2": "flash-attn", "flash3": "flash-attn-3", "flash4": "flash-attn-4"}[backend]
    if version is None:
        return f"{distribution} is not installed"
    if backend == "flash2":
        minimum = "2.7.3" if cc >= (10, 0) else "2.1.1"
        if not at_least(version, minimum) or at_least(version, _FA2_BELOW):
            return f"{distribution} {version} is not in {minimum} <= version < {_FA2_BELOW}"
    if backend == "flash4":
        if not at_least(version, _FA4_FIRST):
            return f"{distribution} {version} < {_FA4_FIRST} lacks the head-dimension check that selection calls"
        if (
            version == _FA4_NEEDS_NEW_CUTLASS
            and cutlass_dsl is not None
            and not at_least(cutlass_dsl, _CUTLASS_MINIMUM)
        ):
            return f"{distribution} {version} needs nvidia-cutlass-dsl >= {_CUTLASS_MINIMUM}, found {cutlass_dsl}"
    return None


def fa2_takes(dq: int, dv: int, cc: ComputeCapability) -> bool:
    """Rule 15: FlashAttention 2 runs with the smaller head dimension padded to the larger."""
    padded = max(dq, dv)
    # The architectures are compared exactly: (8, 6), (8, 9), (10, 3), (11, 0) and (12, 1) stop at 192.
    return padded % 8 == 0 and (padded <= 192 or (padded <= 256 and cc in ((8, 0), (9, 0), (10, 0), (12, 0))))


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

    It checks nothing on other than compute capability 9, 10 and 11.
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


def fa4_backward_misaligned(dq: int, dv: int) -> bool:
    """Rule 20: FlashAttention 4's backward stores dV in steps that it derives from dK; do they miss the end of dV?"""
    tile_q, tile_v = -(-dq // 16) * 16, -(-dv // 16) * 16
    return (tile_v // 2) % gcd(32, tile_q // 2) != 0
