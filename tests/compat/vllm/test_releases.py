"""The adapter on the real Python of several releases of vLLM, one process each."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_plugin.compat.vllm import releases
from tests.compat.real_python import cache, run
from tests.compat.vllm import host

HERE = Path(__file__).parent
CACHED = [version for version in host.KEPT if (cache("vllm") / version).is_dir()]
"""Tens of megabytes each, so fetched by hand alone: ``python -m tests.compat.vllm.host VERSION``."""


@pytest.mark.parametrize("version", [*host.FETCHED, *CACHED])
def test_a_release(version):
    ended = run(host.__name__, version, *(str(HERE / f"inside_{name}.py") for name in ("choice", "layer")))
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    skipped = "1 skipped" in ended.stdout.splitlines()[-1]
    assert skipped != releases.of(version).causal


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("0.25.1", (False, False, False, False)),
        ("0.27.0", (True, False, False, False)),
        ("0.28.0rc1", (True, True, False, True)),
        ("0.32.1.dev7+g1234567.cpu", (True, True, True, True)),
        ("1.0", (True, True, True, True)),
    ],
)
def test_what_a_release_has(version, has):
    assert releases.of(version) == releases.Has(*has)


def test_without_vllm_it_says_what_to_install():
    with pytest.raises(ImportError, match=r"needs vllm >= 0\.25\.1: pip install vllm"):
        releases.installed()
