"""``many_seeds`` runs what it is asked for, prints what fails, and repeats it by the seed that it prints."""

from __future__ import annotations

import re
import time

import pytest

from tests.conformance import many_seeds, whole_table
from tests.conformance.broken_attention import RETURN_OUT

ONLY = "attention/plain/test_forward[pairs-000"


def test_so_many_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert many_seeds.main(["3", "attention", "--only", ONLY]) == 0
    assert capsys.readouterr().out == "0 failures in 3 runs: attention/plain/test_forward 3\n"


def test_two_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert many_seeds.main(["3", "decode", "--only", "plain/test_decode[pairs-00", "--processes", "2"]) == 0
    assert "0 failures in 3 runs: decode/plain/test_decode 3\n" in capfd.readouterr().out


@pytest.mark.parametrize(("least", "low", "high"), [(0.0, 5.0, 100.0), (0.05, 0.9, 3.0)])
def test_so_many_seconds_are_shared_by_the_kinds(
    least: float, low: float, high: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run counts as ``least`` seconds or more, so that what is over at once does not run thousands of times."""
    tests = [("test_forward[x]", lambda: time.sleep(0.003)), ("test_surroundings", lambda: time.sleep(0.1))]
    monkeypatch.setattr(many_seeds, "runs_of", lambda *_: tests)
    monkeypatch.setattr(many_seeds, "LEAST_SECONDS", least)
    assert many_seeds.main(["attention", "--seconds", "2", "--only", "attention/plain/"]) == 0
    found = re.search(r"plain/test_forward (\d+), attention/plain/test_surroundings (\d+)", capsys.readouterr().out)
    assert found
    assert low * int(found[2]) < int(found[1]) < high * int(found[2])


def test_nothing_to_run_is_an_error() -> None:
    assert many_seeds.main(["1", "decode", "--only", "no such test"]) == 1


def test_a_failure_is_printed_and_repeated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One element is wrong where the data say so."""
    wrong = "    out.view(-1)[0] += float(out.double().abs().sum()) * 1e6 % 1 * 100 + 1\n"
    before = ((RETURN_OUT, wrong + RETURN_OUT),)
    monkeypatch.setitem(whole_table.CORRECT["attention"], "plain", {"before": before})
    assert many_seeds.main(["2", "attention", "--only", ONLY]) == 1
    lines = capsys.readouterr().out.splitlines()
    first, second = lines[0], lines[2]
    assert first.startswith(ONLY)
    assert first != second, "fresh data"
    again = re.fullmatch(r"  again: python -m tests.conformance.many_seeds 1 --only '(.*)' --seed (\d+)", lines[1])
    assert again
    assert many_seeds.main(["1", "--only", again[1], "--seed", again[2]]) == 1
    assert capsys.readouterr().out.splitlines()[0] == first
