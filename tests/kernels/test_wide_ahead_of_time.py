"""The wide decode kernel compiled without a GPU: it fits, products wait as written, loops spill no register."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compiler import PER_PROCESSOR, RESERVED_PER_BLOCK, printed
from tests.kernels.hopper_compiler import copies_of_a_panel
from tests.kernels.versions import needs_hopper_kernels
from tests.kernels.wide_compiler import JOBS, Job

pytestmark = [pytest.mark.xdist_group("compiler"), needs_hopper_kernels]

SPILLS, SPILLS_OF_COPIES = 80, 50
"""At the start and the end of pieces; more in the loading warp where the queries take many copies."""
EVERY_JOB = pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)


@pytest.fixture(scope="module")
def compiled(triton_cache: Path) -> dict[str, Any]:
    found = printed("tests.kernels.wide_compiler", cache=triton_cache)
    return {name: result for name, (_, result) in found.items()}


@EVERY_JOB
def test_a_program_fits_a_multiprocessor(job: Job, compiled: dict[str, Any]) -> None:
    found = compiled[job.name]
    assert found["shared"] + RESERVED_PER_BLOCK <= PER_PROCESSOR[90]
    assert found["spills"] <= SPILLS + (SPILLS_OF_COPIES if copies_of_a_panel(job.query_block) > 1 else 0)
    assert found["undefined_reads"] == []


@EVERY_JOB
def test_loops_over_pairs_of_tiles(job: Job, compiled: dict[str, Any]) -> None:
    """Of each warpgroup: the scores of one tile by two terms, values of two; the assembler adds no wait."""
    loops = compiled[job.name]["loops"]
    assert len(loops) == 2
    for loop in loops:
        assert loop["scores"] == 2 * (512 + 64) // 32
        assert loop["products"] == 2 * (256 // 64) * (64 // 16)
        assert loop["conversions"] == 2 * 64 * 256 // 2 // 128
        assert loop["waits"] == 1 + 2 * 4  # scores; of each tile the steps of 16 keys but the first, and the last again
        assert loop["local"] <= 8


@EVERY_JOB
def test_values_reach_products_through_registers(job: Job, compiled: dict[str, Any]) -> None:
    found = compiled[job.name]
    assert found["products"] == found["from_registers"] > 0


@EVERY_JOB
def test_copies_lie_between_arrivals_of_whole_warps(job: Job, compiled: dict[str, Any]) -> None:
    found = compiled[job.name]
    # of a key tile, and of the queries in two slots
    assert found["copies"] == 5 + 2 * 5 * copies_of_a_panel(job.query_block)
    assert found["loose_arrivals"] == 0
    assert sorted(found["dependences"]) == [*(2 * ["launch_dependents"]), *(3 * ["wait"])]
    assert found["dependences"][0] == "wait"
