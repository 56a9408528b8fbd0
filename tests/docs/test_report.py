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
    one, four = report.commands(1), report.commands(4)
    assert set(one) == set(report.RUNS)
    assert {"context_parallel_x2", "context_parallel_x4", "latent_attention_x4"} <= set(four)
    assert "--nproc-per-node=2" in four["context_parallel_x2"]
    assert list(report.commands(2, ["dispatch"])) == ["dispatch"]


def test_a_benchmark_that_fails_is_named_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    python = [sys.executable, "-c"]
    assert report.measure({"bad": [*python, "raise SystemExit('no GPU')"], "good": [*python, "pass"]}) == ["bad"]
    out = capsys.readouterr().out
    assert "no GPU" in out
    assert "1/2  good" in out
