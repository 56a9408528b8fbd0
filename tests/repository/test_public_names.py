"""What the package exports is listed, sorted and documented."""

from __future__ import annotations

import inspect

import pytest

import mla_plugin


def test_all_is_sorted_and_complete() -> None:
    assert mla_plugin.__all__ == sorted(mla_plugin.__all__)
    wanted = {
        "attention",
        "explain",
        "hookimpl",
        "resolve",
        "AttentionRequest",
        "Accepted",
        "Refused",
        "NoBackendError",
    }
    assert wanted <= set(mla_plugin.__all__)


@pytest.mark.parametrize("name", mla_plugin.__all__)
def test_public_name_is_documented(name: str) -> None:
    documentation = inspect.getdoc(getattr(mla_plugin, name))
    assert documentation
    assert len(documentation.split()) >= 3
