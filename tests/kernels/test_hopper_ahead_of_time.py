"""The Hopper kernel compiled without a Hopper card: what it takes, and that nothing makes its products wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from mla_plugin.kernels.hopper.rule import TILES, TRITON_VERSIONS
from tests.kernels.compiler import PER_BLOCK, ROOT
from tests.kernels.hopper_compiler import JOBS, Job

pytestmark = [
    pytest.mark.xdist_group("compiler"),
    pytest.mark.skipif(
        ".".join(triton.__version__.split(".")[:2]) not in TRITON_VERSIONS, reason="the rule leaves this Triton out"
    ),
]

SPILLS = 60  # of numbers that are the same for a whole query tile, outside of the loops over keys


@pytest.fixture(scope="module")
def compiled(triton_cache: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(triton_cache)
    command = [sys.executable, "-m", "tests.kernels.hopper_compiler"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = map(json.loads, done.stdout.splitlines())
    return {result.pop("name"): result for result in found}


def test_every_pair_of_head_dimensions_is_compiled() -> None:
    assert {(job.head_dim_qk, job.head_dim_v) for job in JOBS} == set(TILES)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_it_fits(job: Job, compiled: dict[str, Any]) -> None:
    found = compiled[job.name]
    assert found["shared"] <= PER_BLOCK[90]
    assert found["spills"] <= SPILLS
    assert found["undefined_reads"] == []


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_products_are_not_serialised(job: Job, compiled: dict[str, Any]) -> None:
    """Where the assembler cannot keep products in flight, it waits after each of them (its warning C7512)."""
    found = compiled[job.name]
    tile = TILES[job.head_dim_qk, job.head_dim_v]
    steps = (job.head_dim_qk + tile.keys) // 16  # products of 16 columns: of the scores, and of the values
    kinds_of_loops = {"full": 1, "causal": 2, "packed": 2, "window": 3}[job.call]
    assert len(found["loops"]) == 2 * kinds_of_loops  # of both warpgroups
    assert sum(not loop["is_masked"] for loop in found["loops"]) == 2
    for loop in found["loops"]:
        assert (loop["products"], loop["waits"]) == (steps, 2)
        assert loop["exponentials"] == tile.keys * 64 // 128 + 2
        assert loop["local"] <= 2
    assert found["waits"] == 2 * (2 + 2 * kinds_of_loops)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_column_is_copied_once(job: Job, compiled: dict[str, Any]) -> None:
    """Q for both warpgroups, K and V: copies of 64 columns."""
    of_queries, of_values = list(range(0, job.head_dim_qk, 64)), list(range(0, job.head_dim_v, 64))
    assert compiled[job.name]["columns"] == [2 * of_queries, of_queries, of_values]
