"""The figures are drawn from the results that are kept today."""

from __future__ import annotations

import json
from pathlib import Path

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
    assert len(DRAWN) == 14, "all figures of the H200; of the H100 neither the first page nor context parallelism"


@pytest.mark.parametrize("name", ["training", "packed", "decode", "transformers", "vllm"])
def test_a_gpu_whose_ceilings_nobody_knows_has_its_figures_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``benchmarks.report`` draws them on any machine."""
    for path in figures.paths(figures.FIGURES_BY_NAME[name]):
        record = json.loads(path.read_text()) | {"gpu": "NVIDIA A100"}
        (tmp_path / path.name.replace(figures.GPU, "NVIDIA_A100")).write_text(json.dumps(record))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    drawn = figures.draw(name, "light", "NVIDIA_A100", tmp_path).read_text()
    assert "NVIDIA A100" in drawn
    assert "measured:" not in drawn
    assert "data sheet" not in drawn
