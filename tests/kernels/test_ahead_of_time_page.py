"""docs/kernels_ahead_of_time.md is what the script writes, of the tables as they are."""

import json

from benchmarks import ahead_of_time
from tests.kernels.prefill_compiler import jobs

FOUND = json.loads(ahead_of_time.RESULTS.read_text())


def test_the_page_is_the_generated_one() -> None:
    assert ahead_of_time.PAGE.read_text() == ahead_of_time.render(FOUND), (
        "run python -m benchmarks.ahead_of_time --page"
    )


def test_the_results_are_those_of_the_present_tables() -> None:
    names = ("kernel", "card", "itemsize", "columns", "capability", "head_dim_qk", "head_dim_v", "call")
    measured = [(*(record[name] for name in names), tuple(record["tile"])) for record in FOUND["records"]]
    present = [(*(getattr(job, name) for name in names), tuple(job.tile)) for job in jobs(all_targets=False)]
    assert measured == present, "run python -m benchmarks.ahead_of_time"
