"""The adapter's tests once more, on older versions of transformers and together with the packages that train with it.

Each is installed in a separate directory, built once and then kept in pytest's cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The attention function itself calls nothing of transformers; caches hold latents since 5.15, of sparse models 5.18.
MODULES = {
    "4.57.6": ("masks", "models", "bidirectional", "ranks", "checks"),
    "5.15.0": (
        *("masks", "models", "bidirectional", "latent", "few_keys", "latent_layers", "latent_masks", "checks"),
        *("compressed", "shared_keys"),
    ),
}
TRAINING = ("accelerate==1.15.0", "peft==0.21.2", "torchao==0.18.0", "psutil", "pyyaml")
# The newest TRL and datasets need a huggingface_hub that transformers 4.57 does not take.
TRL = (
    *("trl==1.16.0", "datasets==5.2.0", "pyarrow", "pandas", "dill", "multiprocess", "xxhash", "aiohttp"),
    *("aiosignal", "attrs", "frozenlist", "multidict", "yarl", "propcache", "aiohappyeyeballs", "python-dateutil"),
    *("six", "requests", "jinja2", "markupsafe", "charset-normalizer", "urllib3"),
)


def install(name: str, requirements: Sequence[str], cache: pytest.Cache, *options: str) -> Path:
    """A directory with these packages, and what they depend on unless ``options`` say otherwise."""
    parent = Path(cache.mkdir("transformers"))
    target = parent / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not target.exists():
        building = parent / f"{target.name}.building-{os.getpid()}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(building)]
        subprocess.run([*command, *options, *requirements], check=True, timeout=300)
        with contextlib.suppress(OSError):  # another process was faster
            building.rename(target)
        shutil.rmtree(building, ignore_errors=True)
    return target


def run_tests(version: str, paths: Sequence[Path], *arguments: str) -> None:
    """pytest in a process that finds packages in ``paths`` first, and this version of transformers."""
    search = f"import sys; sys.path[:0] = {[str(path) for path in (*paths, ROOT)]!r}; import transformers, pytest; "
    check = (
        f"assert transformers.__version__ == {version!r}, transformers.__file__; sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=short"]
    command = [sys.executable, "-c", search + check, *options, *arguments]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1]


@pytest.mark.parametrize("version", MODULES)
def test_an_older_transformers(version, request):
    target = install(version, [f"transformers=={version}"], request.config.cache)
    files = [f"{ROOT}/tests/compat/test_transformers_{module}.py" for module in MODULES[version]]
    run_tests(version, [target], *files, "-k", "not refuses_other_masks")  # compiles for ten seconds


def test_as_users_run_it(request):
    import transformers

    cache = request.config.cache
    paths = [install("training", TRAINING, cache, "--no-deps"), install("trl", TRL, cache, "--no-deps")]
    run_tests(transformers.__version__, paths, f"{ROOT}/tests/compat/transformers_users.py")


def test_as_users_run_the_oldest_transformers(request):
    cache, version = request.config.cache, next(iter(MODULES))
    older = install(version, [f"transformers=={version}"], cache)
    paths = [older, install("training", TRAINING, cache, "--no-deps")]
    run_tests(version, paths, "-k", "not trl", f"{ROOT}/tests/compat/transformers_users.py")
