"""docs/benchmarks.md and benchmarks_h100.md are what benchmarks/page.py writes from the kept results."""

import pytest

from benchmarks import page


@pytest.mark.parametrize("gpu", page.PAGES)
def test_the_page_is_the_generated_one(gpu: str) -> None:
    assert page.PAGES[gpu].read_text() == page.render(gpu), "run python -m benchmarks.page"


def test_every_kept_figure_is_of_a_known_commit_and_gpu() -> None:
    for path in page.RESULTS.glob(f"*_{page.GPU}.json"):
        record = page.load(path.name.removesuffix(f"_{page.GPU}.json"))
        assert record["gpu"] == "NVIDIA H200", path.name
        assert len(record["commit"]) >= 7, path.name
