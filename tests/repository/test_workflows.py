"""The workflows call scripts that exist, and the kit names versions as the rest of the project does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repository.project import ROOT, pyproject

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(workflow: Path) -> list[str]:
    """What its steps run."""
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_scripts_and_extras_exist(workflow: Path) -> None:
    found = "\n".join(commands(workflow))
    assert found
    for script in re.findall(r"bash (\S+)", found):
        assert (ROOT / script).is_file(), script
    for extra in re.findall(r'-e "\.\[(\w+)\]"', found):
        assert extra in pyproject()["project"]["optional-dependencies"], extra


def test_the_whole_check_is_one_of_them() -> None:
    assert any("bash .ci/run" in commands(workflow) for workflow in WORKFLOWS)


def test_every_python_is_tested_and_declared() -> None:
    (tests,) = (path for path in WORKFLOWS if path.stem == "tests")
    tested = yaml.safe_load(tests.read_text())["jobs"]["python"]["strategy"]["matrix"]["python"]
    declared = [c.rpartition(" :: ")[2] for c in pyproject()["project"]["classifiers"] if "Python :: 3." in c]
    assert tested == declared
    assert pyproject()["project"]["requires-python"] == f">={tested[0]}"


def test_pre_commit_has_the_ruff_of_ci() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())["ruff"]
    assert f"rev: v{pinned} " in (ROOT / ".pre-commit-config.yaml").read_text()


def test_the_citation_has_the_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == pyproject()["project"]["version"]
