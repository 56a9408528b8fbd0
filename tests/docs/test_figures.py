"""The figures are drawn from the results that are kept today."""

from __future__ import annotations

import pytest

from benchmarks import figures

DRAWN = [(gpu, name) for gpu in figures.GPUS for name in figures.drawable(gpu)]


@pytest.mark.parametrize(("gpu", "name"), DRAWN)
@pytest.mark.parametrize("theme", figures.INK)
def test_a_figure_is_of_the_kept_results(gpu: str, name: str, theme: str) -> None:
    drawn = (figures.FIGURES / f"{figures.file_name(name, gpu)}_{theme}.svg").read_text()
    expected = f"results {figures.digest(figures.FIGURES_BY_NAME[name], gpu)}"
    assert f"<dc:source>{expected}</dc:source>" in drawn, "run python -m benchmarks.figures"


def test_there_is_no_other_figure() -> None:
    expected = {f"{figures.file_name(name, gpu)}_{theme}.svg" for gpu, name in DRAWN for theme in figures.INK}
    assert {path.name for path in figures.FIGURES.iterdir()} == expected
    assert len(DRAWN) == 13, "all figures of the H200; of the H100 neither the first page, vLLM nor context parallelism"
