"""The Hopper kernels compiled without a GPU: their resources, and that nothing makes their products wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mla_plugin.kernels.hopper.rule import TILES, plain_dq_because
from tests.kernels.compiler import AFRESH, PER_BLOCK, printed
from tests.kernels.hopper_compiler import (
    DECODE_JOBS,
    JOBS,
    LATENT_JOBS,
    DecodeJob,
    Job,
    copies_of_a_panel,
    loose_arrivals,
)
from tests.kernels.versions import needs_hopper_kernels

pytestmark = [
    pytest.mark.xdist_group("compiler"),
    needs_hopper_kernels,
]

# spilled stores in all, and spilled loads and stores in a step of a loop without and with a mask: of numbers that are
# the same for a whole tile
SPILLS = {"forward": 60, "backward_kv": 160, "backward_q": 60, "wide backward_kv": 20, "wide backward_q": 100}
LOCAL = {
    "forward": (2, 4),
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
def test_dq_may_begin_with_dk_and_dv(job: Job, compiled: dict[str, Any]) -> None:
    expected = {"backward_kv": ["launch_dependents"], "backward_q": ["wait"]}
    assert compiled[job.name]["dependences"] == expected.get(job.kernel, [])


@pytest.mark.parametrize("job", [*JOBS, *LATENT_JOBS, *DECODE_JOBS], ids=lambda job: job.name)
def test_what_is_released_has_been_read(job: Job | DecodeJob, compiled: dict[str, Any]) -> None:
    """One thread arrives for all warps of its group, after these have synchronised."""
    assert compiled[job.name]["loose_arrivals"] == 0


def test_an_arrival_before_its_warps_is_found() -> None:
    read, arrive = "ld.shared.b32 %r1, [%r2];", "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];"
    assert loose_arrivals(f"{read}\nbar.sync 2, 128;\n{arrive}\n{read}\nbar.warp.sync -1;\n{arrive}") == 0
    assert loose_arrivals(f"bar.sync 2, 128;\n{read}\n{arrive}\n{arrive}") == 2
    for access in ("stmatrix.sync.aligned.m8n8.x4.shared.b16", "ld.volatile.shared.b32", "atom.acq_rel.shared.add.u32"):
        assert loose_arrivals(f"bar.sync 2, 128;\n{access} %r1, [%r2];\n{arrive}") == 1
    assert loose_arrivals(f"{read}\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 64;") == 0


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_products_are_not_serialised(job: Job, compiled: dict[str, Any]) -> None:
    """Where the assembler cannot keep products in flight, it waits after each of them (its warning C7512)."""
    found = compiled[job.name]
    expected = {"forward": forward_loop, "backward_kv": kv_loop, "backward_q": q_loop}[job.kernel](job)
    kinds = {"full": 1, "causal": 2, "lengths": 2, "packed": 2, "window": 3}[job.call]
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

    At 256 columns the first has K and the second V. Where the forward loads K ahead of V, the compiler copies the code
    for K before the loop.
    """
    of_queries, of_values = list(range(0, job.head_dim_qk, 64)), list(range(0, job.head_dim_v, 64))
    is_ahead = job.kernel == "forward" and TILES[job.head_dim_qk, job.head_dim_v].ahead
    times = 1 if kernel_of(job) == "wide backward_kv" else 2
    own = [times * of_queries] if job.kernel == "forward" else [times * of_queries, times * of_values]
    assert compiled[job.name]["columns"] == [*own, (1 + is_ahead) * of_queries, of_values]


# for a tile: copies, loads and stores of 16 bytes, conversions of two numbers; then those of spilled registers
GATHERED = {"plain": (36, 0, 0, 0), "fp8": (0, 18, 36, 144), "fp8_ds_mla": (0, 20, 36, 128)}
GATHERED_LOCAL = {"plain": 1, "fp8": 2, "fp8_ds_mla": 6}


def assert_two_loops_over_two_tiles(found: dict[str, Any], spills: int, local: int) -> None:
    """Each warpgroup's loop over two tiles has 36 products of scores, of its own tile, and 4 of each tile's values."""
    assert found["shared"] <= PER_BLOCK[90]
    assert found["spills"] <= spills
    assert found["undefined_reads"] == []
    assert found["waits"] == 9  # three in each loop, and for a last tile alone: two of its owner, one of the other
    assert len(found["loops"]) == 2
    for loop in found["loops"]:
        assert (loop["products"], loop["waits"], loop["exponentials"]) == (44, 3, 36)
        assert loop["local"] <= local


@pytest.mark.parametrize("job", LATENT_JOBS, ids=lambda job: job.name)
def test_forward_over_latents(job: Job, compiled: dict[str, Any]) -> None:
    found = compiled[job.name]
    assert_two_loops_over_two_tiles(found, 10, 0)
    low, high = list(range(0, 256, 64)), list(range(256, 512, 64))
    # the half that the owner of a tile needs first comes first, with the rope columns
    assert found["columns"] == [[*low, 512, *high, *high, 512, *low], [*low, *high, 512]]


@pytest.mark.parametrize("job", DECODE_JOBS, ids=lambda job: job.name)
def test_decode(job: DecodeJob, compiled: dict[str, Any]) -> None:
    found = compiled[job.name]
    # over fp8 the reference and the highest one of each row take registers
    over_fp8 = (32, 8 if not job.is_planned else 0) if job.invariant else (24, 0)
    # a part worked out by the program itself leaves numbers in registers, which a gathering kernel has fewer of
    gathering = (28, 2 if job.is_planned else 6)
    # the part's chunks and what is known of a chunk are spilled outside of the loops over tiles
    plain = (20 if job.invariant else 10, 0)
    spills, local = over_fp8 if job.kv_cache_format == "fp8" else gathering if job.gathers else plain
    copies = copies_of_a_panel(job.query_block)
    assert_two_loops_over_two_tiles(found, spills + (8 if copies > 1 else 0), local)  # before a piece, where it loads
    halves = list(range(0, 256, 64)), list(range(256, 512, 64))
    every = halves[0] + halves[1]
    queries = [[column for column in every for _ in range(copies)], copies * [0]]
    keys = [every + halves[1] + halves[0], [0, 0]]
    assert found["columns"] == (queries if job.gathers else queries + keys)


@pytest.mark.parametrize("job", DECODE_JOBS, ids=lambda job: job.name)
def test_tiles_are_gathered_by_16_bytes(job: DecodeJob, compiled: dict[str, Any]) -> None:
    found = compiled[job.name]["gathering"]
    assert len(found) == job.gathers
    for loop in found:
        counts = (loop["copies"], loop["loads"], loop["stores"], loop["conversions"])
        assert counts == GATHERED[job.kv_cache_format]
        assert loop["local"] <= GATHERED_LOCAL[job.kv_cache_format]
        # one arrival for all threads of the warpgroup, after the fence of each: the interpreter cannot see that
        assert loop["order"].count("a") == loop["order"].count("fba") == 2
