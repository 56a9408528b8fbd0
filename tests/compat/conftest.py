"""Fixtures of the tests of decoding over latents."""

from __future__ import annotations

import pytest


@pytest.fixture
def spy(monkeypatch):
    from tests.compat.latent_models import Spy

    return Spy(monkeypatch)


@pytest.fixture
def forget_what_was_said():
    from mla_plugin.compat.transformers import latent

    latent._say_once.cache_clear()
