"""Every entry of the decode kernel's tile table fits the GPUs of its class: compiled for each, without a GPU."""

from pathlib import Path

import pytest

from tests.kernels.compiler import PER_BLOCK, TENSOR_MEMORY_COLUMNS, Usage, blocks_per_processor, results
from tests.kernels.decode_compiler import Job, jobs
from tests.kernels.versions import IS_RECORDED

pytestmark = pytest.mark.xdist_group("compiler")

JOBS = {job.name: job for job in jobs()}
# spilled stores in the whole program; those of 64 rows keep the state of a run while the loop over a piece works
SPILLS = 24
SPILLS_OF_64_ROWS = {90: 100, 80: 40, 100: 200}
SPILLS_OF_QUANTISED = {16: 26, 32: 160, 64: 120}
"""By rows: 32 rows hold a converted tile besides their state, in the loop too."""


@pytest.fixture(scope="module")
def compiled(triton_cache: Path) -> dict[str, Usage]:
    return results("tests.kernels.decode_compiler", cache=triton_cache)


def test_every_gpu_is_compiled_for() -> None:
    assert {job.capability for job in JOBS.values()} == set(PER_BLOCK)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_an_entry_fits_its_gpu(job: Job, compiled: dict[str, Usage]) -> None:
    result = compiled[job.name]
    assert result.shared <= PER_BLOCK[job.capability]
    assert result.tensor_memory * job.tile.programs <= TENSOR_MEMORY_COLUMNS
    assert job.tile.programs <= blocks_per_processor(result, job.tile.num_warps, job.capability)
    assert result.undefined_reads == []
    if not IS_RECORDED:
        return
    if job.kv_cache_format != "plain":
        assert result.spills <= SPILLS_OF_QUANTISED[job.tile.block_m]
    else:
        assert result.spills <= (SPILLS_OF_64_ROWS[job.capability] if job.tile.block_m == 64 else SPILLS)


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.capability == 90])
def test_hopper_uses_warpgroup_products_from_64_rows_on(name: str, compiled: dict[str, Usage]) -> None:
    assert (compiled[name].warpgroup_products > 0) == (JOBS[name].tile.block_m == 64)


FULL_TILES = [name for name, job in JOBS.items() if job.capability == 90 and job.descriptors and not job.invariant]


@pytest.mark.parametrize("name", FULL_TILES)
def test_each_warpgroup_computes_half_of_the_scores_of_a_full_tile(name: str, compiled: dict[str, Usage]) -> None:
    """Of the tile at the end, which is read by pointers, too."""
    job = JOBS[name]
    scores, values = job.columns // 16, job.tile.block_n // 16
    assert compiled[name].warpgroup_products == 2 * (scores + values)


@pytest.mark.parametrize("name", FULL_TILES)
def test_a_full_tile_is_asked_for_before_the_softmax_of_the_one_before(name: str, compiled: dict[str, Usage]) -> None:
    """And the assembler lets products run on together: one issue for each of a tile's three, in either loop."""
    steps = compiled[name].steps
    assert "ipipceip" in steps
    assert steps.count("i") == 6
