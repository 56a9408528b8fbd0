"""What each release of a host has: a table of the first releases, compared with the installed one."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from packaging.version import Version


def since(package: str, version: str, minimum: str, first: Iterable[str]) -> tuple[bool, ...]:
    """Which differences a release has.

    Args:
        package: the host's name.
        version: the release; builds from source and release candidates count as the release that they lead to.
        minimum: the oldest supported release.
        first: the first release that has each difference.

    Returns:
        for each difference whether the release has it.

    Raises:
        ImportError: the release is older than the oldest supported one.
    """
    found = Version(Version(version).base_version)
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
