"""Feature differences between releases of a host, by the first release that has each."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from packaging.version import InvalidVersion, Version


def since(package: str, version: str, minimum: str, first: Iterable[str]) -> tuple[bool, ...]:
    """Which features a release has.

    Args:
        package: the host's name.
        version: the release; source builds and release candidates count as the following release.
        minimum: the oldest supported release.
        first: the first release that has each feature.

    Returns:
        for each feature whether the release has it.

    Raises:
        ImportError: the release is older than the oldest supported one, or the version names none.
    """
    try:
        found = _release(version)
    except InvalidVersion:
        raise ImportError(
            f"{package} {version!r} is installed, which names no release; mla_plugin needs >= {minimum}: install a "
            f"release of {package}, or build it with a version"
        ) from None
    if found < Version(minimum):
        raise ImportError(
            f"{package} {version} is installed, mla_plugin needs >= {minimum}: pip install --upgrade {package}"
        )
    return tuple(found >= Version(release) for release in first)


def installed(package: str, minimum: str) -> str:
    """The installed release.

    Raises:
        ImportError: the host is not installed.
    """
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError as error:
        raise ImportError(f"mla_plugin.compat.{package} needs {package} >= {minimum}: pip install {package}") from error


def is_newer(version: str, newest: str) -> bool:
    """The release comes after the newest one that was tested; patch releases count."""
    return _release(version) > Version(newest)


def _release(version: str) -> Version:
    return Version(Version(version).base_version)
