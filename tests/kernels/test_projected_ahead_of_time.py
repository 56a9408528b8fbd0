"""The kernels around a decode with W_UK and W_UV fit every generation of GPUs: compiled for each, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.compiler import PER_BLOCK, PER_PROCESSOR, Usage, results
from tests.kernels.projected_compiler import JOBS, WIDE, Job

pytestmark = pytest.mark.xdist_group("compiler")


@pytest.fixture(scope="module")
def compiled(triton_cache: Path) -> dict[str, Usage]:
    return results("tests.kernels.projected_compiler", cache=triton_cache)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_it_fits(job: Job, compiled: dict[str, Usage]) -> None:
    """Two programs on a multiprocessor, as there are more of them than multiprocessors; one with dims of no model."""
    found = compiled[job.name]
    assert found.shared <= PER_BLOCK[job.capability]
    assert job.dims == WIDE or 2 * found.shared <= PER_PROCESSOR[job.capability]
    assert found.spills <= 4
    assert found.undefined_reads == []
