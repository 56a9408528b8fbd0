"""How to install the packages of a backend, for ``mla-plugin doctor`` and ``explain(..., why=...)``."""

from __future__ import annotations

from typing import NamedTuple

FLASH_ATTENTION_3 = (
    'pip install --no-build-isolation "git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper"'
)
"""FlashAttention 3 is not on PyPI."""
FLASH_MLA = 'pip install --no-build-isolation "git+https://github.com/deepseek-ai/FlashMLA.git@9241ae3"'
"""FlashMLA is not on PyPI; the commit is of 2026-04-29, before dense decode was removed."""


class Package(NamedTuple):
    """A package that a backend needs.

    Attributes:
        name: of the distribution.
        version: a known release, assumed when asking what would run if the package were installed.
        command: installs it.
        upgrade: upgrades an old version.
    """

    name: str
    version: str
    command: str
    upgrade: str


PACKAGES: dict[str, tuple[Package, ...]] = {
    "triton": (Package("triton", "3.7.1", "pip install triton", "pip install --upgrade triton"),),
    "fa2": (
        Package(
            "flash-attn",
            "2.8.3",
            'pip install "mla-plugin[fa2]"',
            'pip install "flash-attn>=2.7.3,<2.8.4" --no-build-isolation',
        ),
    ),
    "fa3": (Package("flash-attn-3", "3.0.0", FLASH_ATTENTION_3, f"{FLASH_ATTENTION_3} --upgrade"),),
    "fa4": (
        Package(
            "flash-attn-4",
            "4.0.0b36",
            'pip install "mla-plugin[fa4]"',
            'pip install --upgrade "flash-attn-4>=4.0.0b36"',
        ),
    ),
    "flashinfer": (
        Package(
            "flashinfer-python",
            "0.7.2",
            'pip install "mla-plugin[flashinfer]"',
            'pip install --upgrade "flashinfer-python>=0.6.12"',
        ),
        Package(
            "flashinfer-jit-cache",
            "0.7.2",
            "pip install flashinfer-jit-cache",
            "pip install --upgrade flashinfer-jit-cache",
        ),
    ),
    "flashmla": (Package("flash-mla", "1.0.0", FLASH_MLA, f"{FLASH_MLA} --upgrade"),),
}
"""By backend; each package is tried together with the ones before it."""
