"""The wheel and the sdist, built as a release is, and the wheel used in a separate environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.repository.project import ROOT, pyproject


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from it; the checkout is left as it is."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listing.rstrip("\0").split("\0"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def environment(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel installed; torch and pluggy come from the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (wheel,) = distributions.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(site) / "torch_of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def run(environment: Path, *command: str) -> str:
    """What a program of the environment prints, started outside the checkout."""
    program = [environment / "bin" / command[0], *command[1:]]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=environment, env={"HOME": "/tmp"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_module_and_nothing_else(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {
        "mla_plugin/" + str(path.relative_to(ROOT / folder if folder == "mla_plugin" else ROOT))
        for folder in ("mla_plugin", "hooks", "compat")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert names == modules | {"mla_plugin/py.typed", "mla_plugin_pytest.py"}


def test_the_wheel_ships_the_licence(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (licence,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_holds_what_the_project_promises(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "constraints.txt",
        "hooks/spec.py",
        "compat/transformers/latent.py",
    ]
    assert {*wanted, "tests/repository/test_wheel.py", "examples/third_party_backend/pyproject.toml"} <= names
    assert not {name for name in names if name.endswith(".pyc") or "__pycache__" in name}


def test_the_installed_wheel_imports(environment: Path) -> None:
    code = (
        "import mla_plugin, mla_plugin.hooks.manager, mla_plugin.compat, mla_plugin.conformance, mla_plugin.cli; "
        "print(mla_plugin.__file__, mla_plugin.__version__)"
    )
    file, version = run(environment, "python", "-c", code).split()
    assert Path(file).is_relative_to(environment)
    assert version == pyproject()["project"]["version"]


def test_the_installed_suite_is_one_command(environment: Path) -> None:
    """pytest finds the options by the wheel's entry point."""
    suite = ("--pyargs", "mla_plugin.conformance", "--backend", "sdpa", "--quick", "--collect-only", "-q")
    out = run(environment, "python", "-m", "pytest", "-p", "no:cacheprovider", *suite)
    assert "test_backend.py::TestAttention::test_backward[" in out
    assert "test_backend.py::TestDecode::test_decode[" in out


def test_the_installed_command_explains(environment: Path) -> None:
    out = run(environment, "mla-plugin", "explain", "--device", "cpu", "--dtype", "float32")
    assert out.splitlines()[-1] == "=> forward: sdpa, backward: sdpa"


def test_the_installed_demo_finds_its_text(environment: Path) -> None:
    code = "from mla_plugin.cli.demo import license_text; print(license_text()[:200])"
    assert "Apache License" in run(environment, "python", "-c", code)
