"""docs/kernels_ahead_of_time.md is what the script writes, of the tables as they are."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from benchmarks import ahead_of_time
from tests.kernels import decode_compiler, hopper_compiler, prefill_compiler, transposed_compiler, wide_compiler

FOUND = json.loads(ahead_of_time.RESULTS.read_text())


def test_the_page_is_the_generated_one() -> None:
    assert ahead_of_time.PAGE.read_text() == ahead_of_time.render(FOUND), (
        "run python -m benchmarks.ahead_of_time --page"
    )


PREFILL = ("kernel", "gpu_class", "itemsize", "columns", "capability", "head_dim_qk", "head_dim_v", "call")
DECODE = ("capability", "itemsize", "columns", "page_size", "descriptors", "invariant", "kv_cache_format")


@pytest.mark.parametrize(
    ("kept", "jobs", "names"),
    [("records", prefill_compiler.jobs(all_targets=False), PREFILL), ("decode", decode_compiler.jobs(), DECODE)],
    ids=["prefill", "decode"],
)
def test_the_results_are_those_of_the_present_tables(
    kept: str, jobs: Iterable[prefill_compiler.Job | decode_compiler.Job], names: tuple[str, ...]
) -> None:
    measured = [(*(record[name] for name in names), record["tile"]) for record in FOUND[kept]]
    # as JSON keeps them: lists for tuples
    present = [(*(getattr(job, name) for name in names), json.loads(json.dumps(job.tile._asdict()))) for job in jobs]
    assert measured == present, "run python -m benchmarks.ahead_of_time"


def test_the_results_hold_every_hopper_kernel() -> None:
    jobs = (*hopper_compiler.JOBS, *hopper_compiler.LATENT_JOBS, *hopper_compiler.DECODE_JOBS)
    assert [record["name"] for record in FOUND["hopper"]] == [job.name for job in jobs], (
        "run python -m benchmarks.ahead_of_time --hopper"
    )


@pytest.mark.parametrize(("kind", "jobs"), [("transposed", transposed_compiler.JOBS), ("wide", wide_compiler.JOBS)])
def test_the_results_hold_every_kernel_over_bytes(kind: str, jobs: Iterable[Any]) -> None:
    assert [record["name"] for record in FOUND[kind]] == [job.name for job in jobs], (
        f"run python -m benchmarks.ahead_of_time --{kind}"
    )
