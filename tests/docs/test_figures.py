"""The figures are drawn from the results that are kept today."""

from __future__ import annotations

import pytest

from benchmarks import figures


@pytest.mark.parametrize("name", figures.FIGURES_BY_NAME)
@pytest.mark.parametrize("theme", figures.INK)
def test_a_figure_is_of_the_kept_results(name: str, theme: str) -> None:
    drawn = (figures.FIGURES / f"{name}_{theme}.svg").read_text()
    expected = f"results {figures.digest(figures.FIGURES_BY_NAME[name])}"
    assert f"<dc:source>{expected}</dc:source>" in drawn, "run python -m benchmarks.figures"


def test_there_is_no_other_figure() -> None:
    expected = {f"{name}_{theme}.svg" for name in figures.FIGURES_BY_NAME for theme in figures.INK}
    assert {path.name for path in figures.FIGURES.iterdir()} == expected
