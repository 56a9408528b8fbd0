"""``python -m mla_plugin.conformance NAME --pages FOLDER``: one page for a backend and a device."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mla_plugin.conformance import __main__ as program
from mla_plugin.conformance import pages, test_backend
from mla_plugin.conformance.decode.suite import DecodeConformance
from mla_plugin.conformance.matrix import Matrix, Recorder
from tests.repository.project import ROOT


def matrix(outcomes: dict[str, tuple[str, ...]]) -> Matrix:
    found = Matrix("mine", "cuda")
    for outcome, tags in outcomes.items():
        found.add("attention", tags, outcome, ("head_dim_qk=320 > 256",) if outcome == "refused" else ())
    return found


def page_of(found: Matrix, **more: object) -> str:
    data = found.as_json() | {"packages": {"PyTorch": "2.13.0"}} | more
    return pages.page(data, found.as_markdown(), name="NVIDIA H200", selection=None)


def test_a_page() -> None:
    text = page_of(
        matrix({"computed": ("bshd",), "refused": ("thd",), "failed": ("gqa",)}), failures=["test_forward[x]"]
    )
    assert text.startswith("# What `mine` computes on NVIDIA H200\n")
    assert "PyTorch 2.13.0." in text
    assert "1 cases computed, 1 refused, 1 failed." in text
    assert "| attention | `thd` | refused | 0 of 1 | head_dim_qk=320 > 256 |" in text
    assert "- `test_forward[x]`" in text


def test_a_backend_that_computes_nothing_says_why() -> None:
    text = page_of(matrix({"refused": ("thd",)}))
    assert "It computes nothing on this device:\n\n- head_dim_qk=320 > 256\n" in text
    assert "|" not in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cpu", "sdpa_cpu"), ("NVIDIA H200", "sdpa_h200"), ("NVIDIA A100-SXM4-80GB", "sdpa_a100_sxm4_80gb")],
)
def test_a_file_is_named_after_backend_and_device(name: str, expected: str) -> None:
    assert pages.file_name("sdpa", name) == expected


def test_one_run_of_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Over a few cases; those of all backends differ in the name alone."""
    status = program.main(["sdpa", "--quick", "--pages", str(tmp_path), "-k", "heads_40_5 or batch_17"])
    assert status == 0
    found = json.loads((tmp_path / "sdpa_cpu.json").read_text())
    assert found["total"]["computed"] > 5
    assert found["failures"] == []
    assert found["packages"]["PyTorch"] == torch.__version__
    text = (tmp_path / "sdpa_cpu.md").read_text()
    assert "A selection of the cases, because it was asked for." in text
    assert "sdpa on cpu: " in capfd.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".log"}


def suite_with(lowest_score: float | None) -> type[DecodeConformance]:
    """The suite of a command with ``--lowest-score``."""

    class Suite(DecodeConformance):
        pass

    options = {"backend": "sdpa", "device": "cpu", "quick": True, "few_repeats": False, "lowest_score": lowest_score}
    config = SimpleNamespace(getoption=lambda name, default=None: options[name])
    test_backend._prepare(Suite, cast("pytest.Config", config))
    return Suite


@pytest.mark.parametrize(("given", "expected"), [(None, -65536.0), (-2048.0, -2048.0)])
def test_the_lowest_score_of_a_run(given: float | None, expected: float) -> None:
    assert suite_with(given).lowest_score == expected


def test_another_lowest_score_stands_on_the_page() -> None:
    found = matrix({"computed": ("paged",)})
    assert "have -2048 instead of -65536" in page_of(found, lowest_score=-2048.0)
    assert "-65536" not in page_of(found, lowest_score=None)


@pytest.mark.parametrize("given", [0.0, 3.0, -1e7, math.nan, -math.inf])
def test_a_score_that_tests_nothing_or_overflows(given: float) -> None:
    with pytest.raises(pytest.UsageError, match="expected -65536 to below 0"):
        suite_with(given)


@pytest.mark.parametrize(("when", "name"), [("call", "test_surroundings"), ("setup", "test_x"), ("???", "test_crash")])
def test_what_fails_beside_the_cases_is_counted(when: str, name: str) -> None:
    """A test of many calls, a fixture, and what pytest-xdist reports of a process that died."""
    recorder = Recorder(SimpleNamespace(getoption=lambda _: "mine"))
    case = ("conformance", {"operation": "decode", "tags": ["paged"], "reasons": []})
    for nodeid, outcome, at, properties in (
        ("suite.py::TestDecode::test_decode[x]", "passed", "call", [case]),
        ("suite.py::TestDecode::test_decode[x]", "passed", "teardown", [case]),
        (f"suite.py::TestDecode::{name}", "failed", when, []),
    ):
        report = pytest.TestReport(nodeid, ("suite.py", 1, ""), {}, outcome, None, at, user_properties=properties)
        recorder.pytest_runtest_logreport(report)
    assert recorder.matrix.failures == [f"TestDecode::{name}"]
    assert recorder.matrix.as_json()["total"] == {"computed": 1, "refused": 0, "failed": 1}
    assert recorder.matrix.as_json()["features"]["decode paged"]["computed"] == 1


def test_all_runs_every_registered_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(pages, "write", lambda names, *_, **__: seen.extend(names) or 0)
    assert program.main(["all", "--pages", str(tmp_path)]) == 0
    assert seen == ["triton", "fa3", "fa4", "fa2", "flashinfer", "flashmla", "cudnn", "sdpa"]
    assert program.main(["sdap", "--pages", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    "options", [("--pages", "x", "--json", "y"), ("--pages", "x", "--markdown", "y"), ("--processes", "2")]
)
def test_options_that_do_not_go_together_are_an_error(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program.main(["sdpa", *options])
    assert "--pages" in capsys.readouterr().err


def test_the_options_of_a_run_are_those_of_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(pages.subprocess, "run", lambda command, **_: commands.append(command))
    program.main(["sdpa", "--pages", str(tmp_path), "--few-repeats", "--quick", "--lowest-score", "-2048", "-k", "x"])
    assert {"--few-repeats", "--quick", "--lowest-score=-2048.0", "-k", "x"} <= set(commands[0])


def test_a_plain_checkout_has_a_page_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise pages.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pages.metadata, "version", missing)
    assert pages.packages("sdpa")["mla-plugin"] == "0+unknown"


def test_a_run_that_ends_early_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--no-such-option-of-pytest"]
    assert pages.write(["sdpa"], "cpu", tmp_path, processes=0, is_quick=True, rest=rest) == 1
    assert "ended early" in capsys.readouterr().out


KNOWN_FAILURES = {f"flashinfer_{gpu}": ["TestDecode::test_unlike_calls"] for gpu in ("h100_80gb_hbm3", "h200")}
"""Of libraries; docs/limits.md has the reason."""


@pytest.mark.parametrize("path", sorted((ROOT / "docs/conformance").glob("*.json")), ids=lambda path: path.stem)
def test_the_pages_in_docs_are_the_tools_own(path: Path) -> None:
    found = json.loads(path.read_text())
    assert path.stem == pages.file_name(found["backend"], found["device"])
    text = path.with_suffix(".md").read_text()
    assert text.startswith(f"# What `{found['backend']}` computes on {found['device']}\n")
    known = KNOWN_FAILURES.get(path.stem, [])
    assert found["failures"] == known
    assert found["total"]["failed"] == len(known)
    total = f"{found['total']['computed']} cases computed, {found['total']['refused']} refused, {len(known)} failed."
    assert total in text
