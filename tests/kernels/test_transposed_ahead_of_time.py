"""The transposed decode kernel compiled without a GPU: two programs fit a multiprocessor, products wait as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mla_plugin.kernels.decode.transposed.rule import TILES
from tests.kernels.compiler import PER_PROCESSOR, REGISTERS_PER_PROCESSOR, RESERVED_PER_BLOCK, printed
from tests.kernels.transposed_compiler import JOBS, Job
from tests.kernels.versions import needs_hopper_kernels

pytestmark = [pytest.mark.xdist_group("compiler"), needs_hopper_kernels]

WARPS = 8  # four that compute, and four of which one loads or all gather
SPILLS = {16: 28, 32: 110}
LOCAL = {16: 0, 32: 86}
"""Loads and stores of spilled registers for a tile: with Triton 3.6 up to 86, with 3.7 up to 76."""
EVERY_JOB = pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)


@pytest.fixture(scope="module")
def compiled(triton_cache: Path) -> dict[str, Any]:
    found = printed("tests.kernels.transposed_compiler", cache=triton_cache)
    return {name: result for name, (_, result) in found.items()}


@EVERY_JOB
def test_two_programs_fit_a_multiprocessor(job: Job, compiled: dict[str, Any]) -> None:
    found = compiled[job.name]
    assert TILES.programs == 2
    assert 2 * (found["shared"] + RESERVED_PER_BLOCK) <= PER_PROCESSOR[90]
    assert 2 * 32 * WARPS * found["registers"] <= REGISTERS_PER_PROCESSOR
    assert found["spills"] <= SPILLS[job.rows]
    assert found["undefined_reads"] == []


@EVERY_JOB
def test_each_byte_is_loaded_and_converted_once_for_a_product(job: Job, compiled: dict[str, Any]) -> None:
    """A tile of 64 keys for the scores and for the sums, by 128 threads, 16 bytes a load and two a conversion."""
    found = compiled[job.name]
    used = (0 if job.has_scores_in_e4m3 else 64 * (512 + 64)) + 64 * 512
    zeroed = 64 * 512
    assert found["conversions"] == used // 2 // 128
    assert found["wide_loads"] == (used + zeroed) // 16 // 128
    assert found["loads"] <= 13  # the barrier's, and those of sums over threads
    assert found["local"] <= LOCAL[job.rows]


@EVERY_JOB
def test_products_wait_where_the_kernel_says_so(job: Job, compiled: dict[str, Any]) -> None:
    """The assembler lets each one wait for the previous one where registers are not free: here it adds no wait."""
    found = compiled[job.name]
    scores, sums = (512 + 64) // 16, (512 // 64) * (64 // 16)
    assert found["products"] == found["from_registers"] == sums + (0 if job.has_scores_in_e4m3 else scores)
    assert found["scores"] == (scores // 2 if job.has_scores_in_e4m3 else 0)
    # after k_rope's product and those of four panels, or after all over e4m3; of 16 keys of V
    assert found["waits"] == (1 if job.has_scores_in_e4m3 else 5) + 4


@EVERY_JOB
def test_a_tile_is_copied_by_five_panels_between_arrivals_of_whole_warps(job: Job, compiled: dict[str, Any]) -> None:
    """By gathering threads 16 bytes each; of k_rope, half as wide, by every second one."""
    found = compiled[job.name]
    assert found["copies"] == (0 if job.gathers else 5)
    assert found["row_copies"] == (4 * 4 + 4 if job.gathers else 0)
    assert found["loose_arrivals"] == 0
    # the warps of each role wait; the assembler writes the roles in any order
    assert sorted(found["dependences"]) == ["launch_dependents", "wait", "wait"]
    assert found["dependences"][0] == "wait"
