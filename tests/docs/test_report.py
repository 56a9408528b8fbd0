"""The report of a GPU machine: what it would run, and the page that it writes of kept results."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import figures, report


@pytest.mark.parametrize("gpu", figures.GPUS)
def test_the_kept_page_is_of_the_kept_results(gpu: str) -> None:
    kept = report.report_path(gpu).read_text()
    assert f'content="{report.digest(gpu)}"' in kept, f"run python -m benchmarks.report --draw --gpu {gpu}"


@pytest.mark.parametrize("gpu", figures.GPUS)
def test_the_page_needs_no_other_file(gpu: str) -> None:
    kept = report.report_path(gpu).read_text()
    assert not re.findall(r"<(?:img|script|link)\b", kept)
    assert kept.count("<svg") == len(figures.INK) * len(figures.drawable(gpu)) - without_place(gpu)


def without_place(gpu: str) -> int:
    """The README's figure is not on the page."""
    return len(figures.INK) * ("first_page" in figures.drawable(gpu))


def test_what_is_run() -> None:
    one, four = report.commands(1, figures.GPU), report.commands(4, figures.GPU)
    assert set(one) == set(report.RUNS)
    assert {"context_parallel_x2", "context_parallel_x4", "latent_attention_x4"} <= set(four)
    assert "--nproc-per-node=2" in four["context_parallel_x2"]
    assert list(report.commands(2, figures.GPU, ["dispatch"])) == ["dispatch"]


def test_a_host_that_is_not_installed_is_said_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "NEEDED", {"host": "a_host_that_nobody_has", "other": "pytest"})
    python = [sys.executable, "-c"]
    assert report.measure({"host": [*python, "raise SystemExit(1)"], "other": [*python, "raise SystemExit(1)"]}) == [
        "other"
    ]
    assert "not run: a_host_that_nobody_has is not installed" in capsys.readouterr().out


def test_every_result_is_kept_where_the_page_looks_for_it() -> None:
    path = figures.RESULTS / "transformer_engine_NVIDIA_H200.json"
    assert report.commands(1, figures.GPU)["transformer_engine"][-2:] == ["--json", str(path)]
    assert path.exists()


def test_a_benchmark_that_fails_is_named_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    python = [sys.executable, "-c"]
    assert report.measure({"bad": [*python, "raise SystemExit('no GPU')"], "good": [*python, "pass"]}) == ["bad"]
    out = capsys.readouterr().out
    assert "no GPU" in out
    assert "1/2  good" in out
