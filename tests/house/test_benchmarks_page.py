"""docs/benchmarks.md is what benchmarks/page.py writes from the kept results."""

from benchmarks import page


def test_the_page_is_the_generated_one() -> None:
    assert page.PAGE.read_text() == page.render(), "run python -m benchmarks.page"


def test_every_kept_figure_is_of_a_known_commit_and_card() -> None:
    for path in page.RESULTS.glob(f"*_{page.GPU}.json"):
        record = page.load(path.name.removesuffix(f"_{page.GPU}.json"))
        assert record["gpu"] == "NVIDIA H200", path.name
        assert len(record["commit"]) >= 7, path.name
