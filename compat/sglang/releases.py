"""Differences between SGLang releases that matter to the backend, in one table."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Generic, TypeVar

from mla_plugin.compat import releases

MINIMUM_VERSION = "0.5.11"
NEWEST = "0.5.23"
"""The newest release that was tested; later ones are not refused."""

T = TypeVar("T")


@dataclass(frozen=True)
class Has(Generic[T]):
    """Differences between releases.

    Attributes:
        batch_hook: a CUDA graph's metadata are asked for with the batch; otherwise with its parts, one method for the
            capture and one for the replay.
        shared_cache: ranks may share the tokens of the cache (decode context parallelism; 0.5.15 has it too, but tells
            it in another way).
        chunk_names: the backends that take a prefix in chunks are named in the module of the server's arguments;
            otherwise in the model runner's module.
    """

    batch_hook: T
    shared_cache: T
    chunk_names: T


SINCE = Has(batch_hook="0.5.13", shared_cache="0.5.16", chunk_names="0.5.16")
"""The first release that has each."""


def of(version: str) -> Has[bool]:
    """The differences of a release.

    Raises:
        ImportError: it is older than 0.5.11.
    """
    return Has(*releases.since("sglang", version, MINIMUM_VERSION, astuple(SINCE)))


def installed() -> Has[bool]:
    """The differences of the installed release.

    Raises:
        ImportError: SGLang is not installed or older than 0.5.11.
    """
    return of(releases.installed("sglang", MINIMUM_VERSION))


def is_tested() -> bool:
    """The installed release is not newer than the newest tested one."""
    return not releases.is_newer(releases.installed("sglang", MINIMUM_VERSION), NEWEST)
