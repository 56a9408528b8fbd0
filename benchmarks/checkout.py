"""The commit that a benchmark's result is kept with."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit(given: str | None = None) -> str:
    """``given``, as where the checkout is a copy without its history, or what git says."""
    if given is not None:
        return given
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
