"""Fixtures of the tests of decoding over latents."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_caches_decode(request, monkeypatch):
    """Caches here are short; which calls are absorbed then follows the multiplications alone."""
    if "transformers" in request.module.__name__:
        from mla_plugin.compat.transformers import latent

        monkeypatch.setattr(latent, "LEAST_KEYS", 0)


@pytest.fixture
def spy(monkeypatch):
    from tests.compat.latent_models import Spy

    return Spy(monkeypatch)
