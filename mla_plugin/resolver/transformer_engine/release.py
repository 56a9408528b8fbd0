"""TransformerEngine's releases: which are known, and to which of them an entry of a table applies.

Releases are identified by their first two numbers. Patch releases select like their minor release: 2.14 and 2.14.1,
2.16 and 2.16.1, 2.17 and 2.17.1 have been compared.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

logger = logging.getLogger("mla_plugin")

Release = tuple[int, int]

RELEASES: tuple[Release, ...] = tuple((2, minor) for minor in range(10, 21))
"""The releases whose selection is known, the oldest first."""

NEWEST = "2.20.2"
"""The newest release whose selection is known, in full."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """The releases to which an entry of a table applies.

    Attributes:
        since: the first release, such as ``"2.15"``; None for every one up to ``until``.
        until: the last release; None for every one from ``since`` on.
    """

    since: str | None = None
    until: str | None = None

    def holds_in(self, release: Release) -> bool:
        """Whether the entry applies to a release."""
        return (self.since is None or release >= _numbers(self.since)) and (
            self.until is None or release <= _numbers(self.until)
        )


@functools.cache
def _numbers(text: str) -> Release:
    major, minor = Version(text).release[:2]
    return major, minor


def read_release(given: str | Version) -> tuple[str, Release]:
    """Parse a known release: its name without local and development parts, and its first two numbers.

    Raises:
        ValueError: not a version, or a release whose selection is not known.
    """
    try:
        version = Version(given) if isinstance(given, str) else given
        release = _first_two(version)
    except (InvalidVersion, AttributeError) as error:
        raise ValueError(f"release={given!r}: expected a version of TransformerEngine, {_known()}") from error
    if release not in RELEASES:
        raise ValueError(f"release={str(given)!r}: TransformerEngine's selection is known for {_known()}")
    return version.base_version, release


@functools.cache
def nearest_release(installed: str | None) -> str:
    """The known release for an installed one: itself, else the nearest, with a warning; the newest for None."""
    if installed is None:
        return NEWEST
    release = _first_two(Version(installed))
    if release in RELEASES:
        return read_release(installed)[0]
    nearest = NEWEST if release > RELEASES[-1] else _text(RELEASES[0])
    logger.warning("TransformerEngine %s: its selection is known for %s; taken for %s", installed, _known(), nearest)
    return nearest


def _first_two(version: Version) -> Release:
    major, minor = (*version.release, 0)[:2]
    return major, minor


def _text(release: Release) -> str:
    return ".".join(map(str, release))


def _known() -> str:
    return f"{_text(RELEASES[0])} to {NEWEST}"
