"""The README is short, its commands install what exists, and its links work in the checkout and on PyPI."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections.abc import Callable

import pytest
import setuptools

from mla_plugin import environment
from tests.docs.project_pages import blocks
from tests.repository.project import ROOT, pyproject

README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "examples" / "third_party_backend"


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_two_commands_install_what_exists() -> None:
    first, second = (block.text for block in blocks(ROOT / "README.md", "sh"))
    extras = pyproject()["project"]["optional-dependencies"]
    for command, extra in ((first, "demo"), (second, "dev")):
        assert f'pip install -c constraints.txt -e ".[{extra}]"' in command
        assert extra in extras
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
    assert first.strip().endswith("&& mla-plugin demo")
    assert second.strip().endswith("&& python -m pytest")


def targets(text: str) -> list[str]:
    """Addresses of links and images."""
    return [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|srcset)="([^"]+)"', text)]


def test_links_lead_somewhere() -> None:
    found = targets(README)
    assert len(found) > 15
    for target in found:
        assert "://" in target or (ROOT / target).exists(), target


@pytest.fixture
def with_absolute_links(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(ROOT / "setup.py"))["with_absolute_links"]


def test_on_pypi_every_link_is_absolute(with_absolute_links: Callable[[str], str]) -> None:
    """And leads to what the relative one leads to: files of the repository, figures of the site."""
    found = targets(with_absolute_links(README))
    assert len(found) == len(targets(README))
    for before, after in zip(targets(README), found, strict=True):
        assert after.startswith("https://")
        assert after.endswith(before.removeprefix("docs/"))
        assert "://" in before or ("github.io" in after) == before.endswith(".svg")


def test_badges_are_of_workflows_that_exist() -> None:
    badges = re.findall(r"!\[\w+\]\(https://github\.com/mla-plugin/mla-plugin/actions/(\S+)/badge\.svg\)", README)
    assert badges
    for badge in badges:
        assert (ROOT / ".github" / badge).is_file(), badge


def test_the_table_of_variables_is_the_generated_one() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    (table,) = re.findall(r"<!-- variables -->\n(.*?)\n<!-- /variables -->", page, re.S)
    assert table == environment.markdown_table()


def test_the_backend_shown_is_the_example() -> None:
    """Pasted as it stands; tests/test_third_party.py runs it."""
    page = ROOT / "docs" / "write_a_backend.md"
    python = [block.text for block in blocks(page, "python")]
    (entry_point,) = (block.text for block in blocks(page, "toml"))
    assert (EXAMPLE / "mla_plugin_blockwise.py").read_text() in python
    assert (EXAMPLE / "tests" / "test_conformance.py").read_text() in python
    assert entry_point in (EXAMPLE / "pyproject.toml").read_text()
