"""On which devices the Gluon kernels run, prefill's and decode's. Does not import Triton."""

from __future__ import annotations

TRITON_VERSIONS = ("3.6", "3.7")
"""Gluon is experimental and changes: these are the versions that the kernels were tested with."""
CAPABILITY = (9, 0)


def unfit_device_because(capability: tuple[int, int] | None, version: str | None) -> str | None:
    """Why no Gluon kernel runs on a device; None: they do.

    Args:
        capability: of the device; None without one.
        version: Triton's; None without it.
    """
    if capability != CAPABILITY:
        return f"compute capability {capability}, the Hopper kernel needs {CAPABILITY}"
    if version is None or ".".join(version.split(".")[:2]) not in TRITON_VERSIONS:
        return f"Triton {version}, the Hopper kernel needs {' or '.join(TRITON_VERSIONS)}"
    return None
