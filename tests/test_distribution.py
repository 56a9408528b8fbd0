"""Tests of a file, and of a group, run in one process, and what takes longest starts first."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests import distribution
from tests.repository.project import ROOT

pytest_plugins = ("pytester",)


def test_what_takes_longest_is_there() -> None:
    groups = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r'xdist_group\("(\w+)"\)', path.read_text())
    }
    for name in distribution.LONGEST:
        assert name in groups or (ROOT / name).is_file(), name


CONFTEST = """
from tests import distribution
distribution.LONGEST = ("test_last.py",)
def pytest_xdist_make_scheduler(config, log):
    return distribution.ByFile(config, log)
"""
FILE = "import pytest\n@pytest.mark.parametrize('n', range({}))\ndef test_it(n): pass\n"
GROUPED = f"{FILE}\npytestmark = pytest.mark.xdist_group('together')\n"


def test_files_and_groups_stay_together(pytester: pytest.Pytester) -> None:
    """pytest-xdist 3.8 and older know no group under pytest 9.2 and newer, and say nothing."""
    pytester.makeconftest(CONFTEST)
    sources = {"test_a": GROUPED.format(60), "test_b": FILE.format(20), "test_c": GROUPED.format(2)}
    pytester.makepyfile(**sources, test_last="def test_it(): pass")
    result = pytester.runpytest_inprocess("-v", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=83)
    ran: defaultdict[str, list[str]] = defaultdict(list)
    for process, file in re.findall(r"^\[(gw\d)\] .* PASSED (\w+)\.py::", result.stdout.str(), re.MULTILINE):
        ran[process].append(file)
    assert sorted(sorted(set(files)) for files in ran.values()) == [["test_a", "test_c"], ["test_b", "test_last"]]
    assert "test_last" in (files[0] for files in ran.values())
