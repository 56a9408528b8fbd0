"""Differences between vLLM releases that matter to the backends, in one table."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Generic, TypeVar

from mla_plugin.compat import releases

MINIMUM_VERSION = "0.25.1"
NEWEST = "0.33.0"
"""The newest release that was tested; later ones are not refused."""

T = TypeVar("T")


@dataclass(frozen=True)
class Has(Generic[T]):
    """Differences between releases.

    Attributes:
        causal: the metadata of a step say whether its queries see only what is before them; otherwise they do.
        chunk: prefill gets a chunk of the context as an object; otherwise as an index into the metadata's lists.
        names: the registries take new names; otherwise their one free name is CUSTOM.
        packed: prefill of dense models reads its context from caches of ``fp8_ds_mla``.
    """

    causal: T
    chunk: T
    names: T
    packed: T


SINCE = Has(causal="0.27", chunk="0.28", names="0.32", packed="0.28")
"""The first release that has each."""


def of(version: str) -> Has[bool]:
    """The differences of a release.

    Raises:
        ImportError: it is older than 0.25.1.
    """
    return Has(*releases.since("vllm", version, MINIMUM_VERSION, astuple(SINCE)))


def installed() -> Has[bool]:
    """The differences of the installed release.

    Raises:
        ImportError: vLLM is not installed or older than 0.25.1.
    """
    return of(releases.installed("vllm", MINIMUM_VERSION))


def is_tested() -> bool:
    """The installed release is not newer than the newest tested one."""
    return not releases.is_newer(releases.installed("vllm", MINIMUM_VERSION), NEWEST)


def name(has: Has[bool]) -> str:
    """The name of both backends in vLLM's registries."""
    return "MLA_PLUGIN" if has.names else "CUSTOM"
