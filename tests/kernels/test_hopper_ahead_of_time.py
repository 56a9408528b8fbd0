"""The Hopper kernels compiled without a GPU: their resources, and that nothing makes their products wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mla_plugin.kernels.hopper.rule import TILES, plain_dq_because
from tests.kernels.compiler import AFRESH, PER_BLOCK, printed
from tests.kernels.hopper_compiler import DECODE_JOBS, JOBS, DecodeJob, Job
from tests.kernels.versions import needs_hopper_kernels

pytestmark = [
    pytest.mark.xdist_group("compiler"),
    needs_hopper_kernels,
]

# spilled stores in all, and spilled loads and stores in a step of a loop without and with a mask: of numbers that are
# the same for a whole tile
SPILLS = {"forward": 60, "backward_kv": 160, "backward_q": 60, "wide backward_kv": 20, "wide backward_q": 100}
LOCAL = {
    "forward": (2, 2),
    "backward_kv": (20, 44),
    "backward_q": (2, 28),
    "wide backward_kv": (0, 0),
    "wide backward_q": (20, 28),
}
KERNELS = ("forward", "backward_kv", "backward_q")


@pytest.fixture(scope="module")
def compiled(triton_cache: Path) -> dict[str, Any]:
    found = printed("tests.kernels.hopper_compiler", cache=triton_cache)
    return {name: result for name, (_, result) in found.items()}


def test_a_sample_compiled_again_is_as_recorded(tmp_path: Path) -> None:
    only = f"--only={Job(64, 64).name}"
    fresh = printed("tests.kernels.hopper_compiler", AFRESH, only, cache=tmp_path)
    assert fresh.keys() == {Job(64, 64).name}
    assert printed("tests.kernels.hopper_compiler", only, cache=tmp_path) == fresh


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_pair_of_head_dimensions_is_compiled(kernel: str) -> None:
    pairs = {pair for pair in TILES if kernel != "backward_q" or plain_dq_because(*pair) is None}
    assert {(job.head_dim_qk, job.head_dim_v) for job in JOBS if job.kernel == kernel} == pairs


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_it_fits(job: Job, compiled: dict[str, Any]) -> None:
    found = compiled[job.name]
    assert found["shared"] <= PER_BLOCK[90]
    assert found["spills"] <= SPILLS[kernel_of(job)]
    assert found["undefined_reads"] == []


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_products_are_not_serialised(job: Job, compiled: dict[str, Any]) -> None:
    """Where the assembler cannot keep products in flight, it waits after each of them (its warning C7512)."""
    found = compiled[job.name]
    expected = {"forward": forward_loop, "backward_kv": kv_loop, "backward_q": q_loop}[job.kernel](job)
    kinds = {"full": 1, "causal": 2, "packed": 2, "window": 3}[job.call]
    if job.kernel == "backward_kv":  # masked before and after the others
        kinds = 3
    is_loop_less = job.kernel == "backward_kv" and job.call == "full"  # at most one tile before: no loop
    owners = 1 if kernel_of(job) == "wide backward_kv" else 2  # of both warpgroups, but dK has no exponentials
    assert len(found["loops"]) == owners * (kinds - is_loop_less)
    for loop in found["loops"]:
        assert (loop["products"], loop["waits"], loop["exponentials"]) == expected
    locals_of = sorted(loop["local"] for loop in found["loops"])
    without, with_mask = LOCAL[kernel_of(job)]
    assert max(locals_of[:2]) <= without
    assert max(locals_of) <= with_mask
    # the first tile, and the last product
    around = {"forward": 2, "backward_kv": 4, "backward_q": 3, "wide backward_kv": 2, "wide backward_q": 3}
    assert found["waits"] == 2 * (around[kernel_of(job)] + kinds * expected[1])


@pytest.mark.parametrize("job", [job for job in JOBS if job.kernel == "forward"], ids=lambda job: job.name)
def test_one_loop_has_no_mask(job: Job, compiled: dict[str, Any]) -> None:
    assert sum(not loop["is_masked"] for loop in compiled[job.name]["loops"]) == 2


def kernel_of(job: Job) -> str:
    """Its code is another one for sums of 256 columns."""
    return f"wide {job.kernel}" if job.head_dim_qk == 256 and job.kernel != "forward" else job.kernel


def forward_loop(job: Job) -> tuple[int, int, int]:
    """Products of 16 columns, waits and exponentials of a step."""
    keys = TILES[job.head_dim_qk, job.head_dim_v].keys
    return (job.head_dim_qk + keys) // 16, 2, keys * 64 // 128 + 2


def kv_loop(job: Job) -> tuple[int, int, int]:
    if kernel_of(job) == "wide backward_kv":  # S and dV
        return (job.head_dim_qk + 64) // 16, 2, 64 * 64 // 128
    parts = 2 if job.head_dim_qk in (96, 192) else 1  # of dK
    return (job.head_dim_qk + job.head_dim_v + 64 + 64 * parts) // 16, 4, 64 * 64 // 128


def q_loop(job: Job) -> tuple[int, int, int]:
    parts = 2 if job.head_dim_qk in (96, 192) else 1  # of dQ
    return (job.head_dim_qk + job.head_dim_v + 64 * parts) // 16, 3, 64 * 64 // 128


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_column_is_copied_once(job: Job, compiled: dict[str, Any]) -> None:
    """For both warpgroups Q, of the backward Q and dO or K and V; then the tiles that they share. 64 columns a copy.

    At 256 columns the first has K and the second V.
    """
    of_queries, of_values = list(range(0, job.head_dim_qk, 64)), list(range(0, job.head_dim_v, 64))
    times = 1 if kernel_of(job) == "wide backward_kv" else 2
    own = [times * of_queries] if job.kernel == "forward" else [times * of_queries, times * of_values]
    assert compiled[job.name]["columns"] == [*own, of_queries, of_values]


@pytest.mark.parametrize("job", DECODE_JOBS, ids=lambda job: job.name)
def test_decode(job: DecodeJob, compiled: dict[str, Any]) -> None:
    """Each warpgroup's loop over two tiles has 36 products of scores, of its own tile, and 4 of each tile's values."""
    found = compiled[job.name]
    assert found["shared"] <= PER_BLOCK[90]
    assert found["spills"] <= 10
    assert found["undefined_reads"] == []
    assert found["waits"] == 9  # three in each loop, and for a last tile alone: two of its owner, one of the other
    assert len(found["loops"]) == 2
    for loop in found["loops"]:
        assert (loop["products"], loop["waits"], loop["exponentials"], loop["local"]) == (44, 3, 36, 0)
    halves = list(range(0, 256, 64)), list(range(256, 512, 64))
    every = halves[0] + halves[1]
    assert found["columns"] == [every, [0], every + halves[1] + halves[0], [0, 0]]
