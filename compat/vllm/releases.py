"""What each release of vLLM has, of that which differs between them and matters here: one table."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from mla_plugin.compat import releases

MINIMUM_VERSION = "0.25.1"

T = TypeVar("T")


class Has(NamedTuple, Generic[T]):
    """Differences between releases.

    Attributes:
        causal: the metadata of a step say whether its queries see only what is before them; otherwise they do.
        chunk: prefill gets a chunk of the context as an object; otherwise as an index into the metadata's lists.
        names: the registries take new names; otherwise their one free name is CUSTOM.
    """

    causal: T
    chunk: T
    names: T


SINCE = Has(causal="0.27", chunk="0.28", names="0.32")
"""The first release that has each."""


def of(version: str) -> Has[bool]:
    """What a release has.

    Raises:
        ImportError: it is older than 0.25.1.
    """
    return Has(*releases.since("vllm", version, MINIMUM_VERSION, SINCE))


def installed() -> Has[bool]:
    """What the installed release has.

    Raises:
        ImportError: vLLM is not installed or older than 0.25.1.
    """
    return of(releases.installed("vllm", MINIMUM_VERSION))


def name(has: Has[bool]) -> str:
    """The name of both backends in vLLM's registries."""
    return "MLA_PLUGIN" if has.names else "CUSTOM"
