"""The kernels that calls launch, in order."""

from __future__ import annotations

import pytest

from mla_plugin.kernels.launch import Launch

PLANS = ("plan_kernel", "plan_chunks_kernel")


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that every launch adds its kernel's name to."""
    names: list[str] = []
    launch = Launch.__call__

    def record(self: Launch, *arguments: object) -> None:
        names.append(self.kernel.__name__)
        launch(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", record)
    return names


def plans(names: list[str]) -> int:
    """How many of the kernels plan."""
    return sum(name in PLANS for name in names)
