"""The package list is explicit, and two packages live outside mla_plugin/: only a test notices a forgotten one."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from tests.repository.project import ROOT, pyproject

LINKS = {"hooks": "../hooks", "compat": "../compat"}


def package_folders(root: Path) -> set[str]:
    """Dotted names of the folders under ``mla_plugin`` that have an ``__init__.py``, through the two links."""
    inits = [
        Path(folder) for folder, _, files in os.walk(root / "mla_plugin", followlinks=True) if "__init__.py" in files
    ]
    return {".".join(folder.relative_to(root).parts) for folder in inits}


def test_package_list_equals_the_folders() -> None:
    packages = pyproject()["tool"]["setuptools"]["packages"]
    assert packages == sorted(packages)
    assert set(packages) == package_folders(ROOT)


def test_package_folders_sees_a_forgotten_package(tmp_path: Path) -> None:
    (tmp_path / "mla_plugin" / "kernels").mkdir(parents=True)
    (tmp_path / "mla_plugin" / "assets").mkdir()
    (tmp_path / "hooks").mkdir()
    (tmp_path / "mla_plugin" / "hooks").symlink_to("../hooks")
    for folder in ("mla_plugin", "mla_plugin/kernels", "hooks"):
        (tmp_path / folder / "__init__.py").touch()
    assert package_folders(tmp_path) == {"mla_plugin", "mla_plugin.kernels", "mla_plugin.hooks"}


def test_every_module_is_in_a_package() -> None:
    for folder in ("mla_plugin", "hooks", "compat"):
        modules = list((ROOT / folder).rglob("*.py"))
        assert modules, f"{folder}/ has no modules"
        homeless = [path for path in modules if not (path.parent / "__init__.py").exists()]
        assert not homeless, f"no __init__.py beside {homeless}; such a module would not be packaged"


@pytest.mark.parametrize(("name", "target"), LINKS.items())
def test_links_are_relative_and_point_to_the_folders(name: str, target: str) -> None:
    link = ROOT / "mla_plugin" / name
    assert link.is_symlink()
    assert str(link.readlink()) == target
    assert link.resolve() == ROOT / name
    assert pyproject()["tool"]["setuptools"]["package-dir"][f"mla_plugin.{name}"] == name


def test_links_are_committed_as_links() -> None:
    command = ["git", "ls-files", "--stage", *(f"mla_plugin/{name}" for name in LINKS)]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    modes = {path: mode for mode, path in re.findall(r"^(\d+) \w+ \d\tmla_plugin/(\w+)$", listing, re.M)}
    assert {path: stat.S_ISLNK(int(mode, 8)) for path, mode in modes.items()} == dict.fromkeys(LINKS, True)


def test_constraints_pin_every_dependency() -> None:
    """What the project is tested with is written down for each dependency that the tests' extra brings."""
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["demo"], *extras["megatron"], *extras["test"], *extras["dev"]]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted} - {project["name"]}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert names - pins.keys() == set()
