"""Every entry of the decode kernel's tile table fits its cards: compiled for each of them, without any of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.decode_compiler import Job, jobs

JOBS = {job.name: job for job in jobs()}
# bytes: of shared memory that one block may ask for, and that one multiprocessor has
PER_BLOCK = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
PER_PROCESSOR = {80: 167936, 86: 102400, 89: 102400, 90: 233472, 100: 233472, 120: 102400}
RESERVED_PER_BLOCK = 1024
REGISTERS_PER_PROCESSOR = 65536
TENSOR_MEMORY_COLUMNS = 512
# spilled stores in the whole program; none of them is inside the loop over full tiles
SPILLS = 24
SPILLS_OF_64_ROWS = 120


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    root = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.decode_compiler"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {result["name"]: result for result in map(json.loads, done.stdout.splitlines())}


def test_every_card_is_compiled_for() -> None:
    assert {job.capability for job in JOBS.values()} == set(PER_BLOCK)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_an_entry_fits_its_card(job: Job, compiled: dict[str, dict[str, int]]) -> None:
    result = compiled[job.name]
    assert result["shared"] <= PER_BLOCK[job.capability]
    assert job.tile.programs * (result["shared"] + RESERVED_PER_BLOCK) <= PER_PROCESSOR[job.capability]
    registers = -(-result["registers"] // 8) * 8  # the hardware gives them in eights
    assert job.tile.programs * job.tile.num_warps * 32 * registers <= REGISTERS_PER_PROCESSOR
    assert result["tensor_memory"] * job.tile.programs <= TENSOR_MEMORY_COLUMNS
    assert result["spills"] <= (SPILLS_OF_64_ROWS if job.tile.block_m == 64 and job.columns > 320 else SPILLS)


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if job.capability == 90])
def test_hopper_uses_warpgroup_products_from_64_rows_on(name: str, compiled: dict[str, dict[str, int]]) -> None:
    assert (compiled[name]["warpgroup_products"] > 0) == (JOBS[name].tile.block_m == 64)
