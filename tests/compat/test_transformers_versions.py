"""The adapter's tests once more, on the oldest supported versions of transformers, each in a directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The attention function itself calls nothing of transformers; caches hold latents since 5.15, of sparse models 5.18.
MODULES = {"4.57.6": ("masks", "models"), "5.15.0": ("masks", "models", "latent", "latent_layers", "latent_masks")}


def install(version: str, cache: pytest.Cache) -> Path:
    """A directory with that version and what it depends on, built once and then kept in pytest's cache."""
    parent = Path(cache.mkdir("transformers"))
    target = parent / f"{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not target.exists():
        building = parent / f"{target.name}.building-{os.getpid()}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(building)]
        subprocess.run([*command, f"transformers=={version}"], check=True, timeout=300)
        building.rename(target)
    return target


@pytest.mark.parametrize("version", MODULES)
def test_an_older_transformers(version, request):
    target = install(version, request.config.cache)
    tests = [str(ROOT / "tests" / "compat" / f"test_transformers_{module}.py") for module in MODULES[version]]
    search = f"import sys; sys.path[:0] = [{str(target)!r}, {str(ROOT)!r}]; import transformers, pytest; "
    check = (
        f"assert transformers.__version__ == {version!r}, transformers.__file__; sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=short"]
    command = [sys.executable, "-c", search + check, *options, *tests]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1]
