"""The adapter on the real Python of several releases of SGLang, one process each."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_plugin.compat.sglang import releases
from tests.compat.real_python import cache, run
from tests.compat.sglang import host

HERE = Path(__file__).parent
CACHED = [version for version in host.KEPT if (cache("sglang") / version).is_dir()]
"""Tens of megabytes each, so fetched by hand alone: ``python -m tests.compat.sglang.host VERSION``."""


@pytest.mark.parametrize("version", [*host.FETCHED, *CACHED])
def test_a_release(version):
    ended = run(host.__name__, version, *(str(HERE / f"inside_{name}.py") for name in ("choice", "layer")))
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    skipped = "4 skipped" in ended.stdout.splitlines()[-1]
    assert skipped != releases.of(version).shared_cache


def test_the_ends_are_those_that_are_named():
    assert host.FETCHED == (releases.MINIMUM_VERSION, releases.NEWEST)


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("0.5.11", (False, False, False)),
        ("0.5.12.post1", (False, False, False)),
        ("0.5.13", (True, False, False)),
        ("0.5.16rc1", (True, True, True)),
        ("0.6", (True, True, True)),
    ],
)
def test_what_a_release_has(version, has):
    assert releases.of(version) == releases.Has(*has)


def test_without_sglang_it_says_what_to_install():
    with pytest.raises(ImportError, match=r"mla_plugin\.compat\.sglang needs sglang >= 0\.5\.11: pip install sglang"):
        releases.installed()
