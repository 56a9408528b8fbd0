"""What the README shows is run: its code, its commands, its output, its table, its links."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
import torch

from mla_plugin import device, environment
from mla_plugin.cli import main
from tests.house.project import ROOT, pyproject

README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "examples" / "third_party_backend"


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def sessions() -> list[tuple[str, str]]:
    """(command, output) of every console block."""
    return [re.fullmatch(r"\$ ([^\n]+)\n(.*)", block, re.S).groups() for block in blocks("console")]


def test_the_table_of_variables_is_the_generated_one() -> None:
    (table,) = re.findall(r"<!-- variables -->\n(.*?)\n<!-- /variables -->", README, re.S)
    assert table == environment.markdown_table()


def test_the_backend_shown_is_the_example() -> None:
    assert (EXAMPLE / "mla_plugin_blockwise.py").read_text() in blocks("python")
    (entry_point,) = blocks("toml")
    assert entry_point in (EXAMPLE / "pyproject.toml").read_text()


def test_the_test_file_shown_is_the_example() -> None:
    """It is pasted as it stands, and tests/test_third_party.py runs it."""
    assert (EXAMPLE / "tests" / "test_conformance.py").read_text() in blocks("python")


@pytest.mark.parametrize("code", blocks("python"), ids=range(len(blocks("python"))))
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_there_is_code_and_output_to_check() -> None:
    assert len(blocks("python")) == 6
    assert len(sessions()) == 2


@pytest.mark.parametrize(("command", "output"), sessions())
def test_output_is_what_the_command_prints(
    command: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without CUDA that has none of the optional kernel packages but Triton, which comes with PyTorch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "installed_packages", lambda: (("torch", torch.__version__), ("triton", "3.7.1")))
    monkeypatch.setattr(device, "build_tools", frozenset)
    program, *arguments = shlex.split(command)
    assert program == "mla-plugin"
    main(arguments)
    out, err = capsys.readouterr()
    assert err + out == output


def test_the_two_commands_install_what_exists() -> None:
    first, second, suite = blocks("sh")
    assert suite == "python -m mla_plugin.conformance blockwise --quick\n"
    extras = pyproject()["project"]["optional-dependencies"]
    for command, extra in ((first, "demo"), (second, "dev")):
        assert f'pip install -c constraints.txt -e ".[{extra}]"' in command
        assert extra in extras
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
    assert first.strip().endswith("&& mla-plugin demo")
    assert second.strip().endswith("&& python -m pytest")


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", README)
    assert targets
    headings = {
        re.sub(r"[^\w-]", "", line.lower().replace(" ", "-")) for line in re.findall(r"^#+ (.+)$", README, re.M)
    }
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (ROOT / target).exists(), target
