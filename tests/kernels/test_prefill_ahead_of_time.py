"""Every entry of the prefill kernels' tile tables fits the GPUs of its class: compiled for each, without a GPU.

Which jobs run always and which with --all-targets: prefill_compiler.py.
"""

from pathlib import Path

import pytest

from mla_plugin.kernels.tiles import GPU_CLASSES, TABLES
from tests.kernels.compiler import PER_BLOCK, TENSOR_MEMORY_COLUMNS, Usage, blocks_per_processor, results
from tests.kernels.prefill_compiler import DEEPSEEK, MISCOMPILED, Job, jobs
from tests.kernels.versions import IS_RECORDED

pytestmark = pytest.mark.xdist_group("compiler")

# spilled stores in the whole program, those outside of the loop over unmasked tiles included
SPILLS = 20
SPILLS_OF = {
    ("backward_kv", "Hopper", 2, 320): 49,  # the fastest on an H200 all the same: 17, and 32 more with a window
    ("backward_kv", "Hopper", 2, 1088): 27,
    ("forward", "Hopper", 2, 1088): 36,
    ("forward", "227 KiB", 2, 1088): 41,
}
SPILLS_OF_OTHER_HEAD_DIMS = 72  # what --all-targets adds


REPRESENTATIVES = tuple(jobs(all_targets=False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "job" in metafunc.fixturenames:
        found = list(jobs(metafunc.config.getoption("--all-targets")))
        metafunc.parametrize("job", found, ids=[job.name for job in found])


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, triton_cache: Path) -> dict[str, Usage]:
    chosen = ["--all-targets"] if request.config.getoption("--all-targets") else []
    return results("tests.kernels.prefill_compiler", *chosen, cache=triton_cache)


def test_an_entry_fits_its_gpu(job: Job, compiled: dict[str, Usage]) -> None:
    usage = compiled[job.name]
    assert usage.shared <= PER_BLOCK[job.capability]
    assert usage.undefined_reads == []
    assert usage.tensor_memory <= TENSOR_MEMORY_COLUMNS
    assert blocks_per_processor(usage, job.tile.num_warps, job.capability) >= 1
    most = SPILLS_OF.get(job.entry, SPILLS)
    assert not IS_RECORDED or usage.spills <= (most if job in REPRESENTATIVES else max(most, SPILLS_OF_OTHER_HEAD_DIMS))


def test_the_fault_of_the_assembler_is_found_where_it_is(compiled: dict[str, Usage]) -> None:
    """CUDA 12.8's, which Triton 3.6 and 3.7 bring; the one of Triton 3.9 does not have it.

    Once no supported Triton has it, the copies of ``packing.with_aligned_rows`` can go.
    """
    assert (compiled[MISCOMPILED.name].undefined_reads != []) == IS_RECORDED


@pytest.mark.parametrize("all_targets", [False, True])
def test_no_entry_is_left_out(all_targets: bool) -> None:
    found = list(jobs(all_targets))
    assert len({job.name for job in found}) == len(found)
    entries = {
        (kernel, gpu_class, itemsize, columns): set(GPU_CLASSES[gpu_class])
        for kernel, table in TABLES.items()
        for (gpu_class, itemsize), rows in table.items()
        for columns, _ in rows
    }
    assert entries.keys() == {job.entry for job in found}
    for entry, capabilities in entries.items():
        assert {job.capability for job in found if job.entry == entry} == capabilities


def test_deepseek_is_always_compiled_for_every_gpu() -> None:
    found = [job for job in REPRESENTATIVES if (job.head_dim_qk, job.head_dim_v) == DEEPSEEK and job.itemsize == 2]
    for kernel in TABLES:
        assert {job.capability for job in found if job.kernel == kernel} == set(PER_BLOCK)
    assert {job.capability for job in found if job.call == "descriptors"} == {90, 100}
    assert {job.gpu_class for job in found if job.call == "packed"} == set(GPU_CLASSES)


def test_all_kernels_serve_the_same_head_dimensions() -> None:
    widest = [{key: rows[-1][0] for key, rows in table.items()} for table in TABLES.values()]
    assert widest[0] == widest[1] == widest[2]
    assert set(widest[0]) == {(gpu_class, itemsize) for gpu_class in GPU_CLASSES for itemsize in (2, 4)}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_rows_are_in_ascending_order(table: dict[tuple[str, int], tuple[tuple[int, object], ...]]) -> None:
    for rows in table.values():
        columns = [widest for widest, _ in rows]
        assert columns == sorted(set(columns))


def test_hopper_uses_warpgroup_products_for_deepseek(compiled: dict[str, Usage]) -> None:
    found = [job for job in REPRESENTATIVES if job.capability == 90 and (job.head_dim_qk, job.head_dim_v) == DEEPSEEK]
    assert found
    assert all(compiled[job.name].warpgroup_products > 0 for job in found if job.itemsize == 2)
