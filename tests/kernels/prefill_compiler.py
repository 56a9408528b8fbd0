"""Compile the prefill kernels without a GPU: ``python -m tests.kernels.prefill_compiler``.

Every entry of the tile tables is compiled for every compute capability of its GPU class. Without --all-targets: for the
widest head dimensions that it serves; and DeepSeek-V3's 192/128 in bfloat16, on the first capability of each class also
with lengths and a window, from 9.0 on also through tensor descriptors. With it: for all of ``HEAD_DIMS``, with lengths
and a window everywhere. And always ``MISCOMPILED``, which is never launched.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mla_plugin.kernels.tiles import GPU_CLASSES, TABLES, Tile
from tests.kernels.compiler import Program, print_results

TYPES = {2: "bf16", 4: "fp32"}
DEEPSEEK = (192, 128)
# (head_dim_qk, head_dim_v); of equally wide ones the first represents its entry
HEAD_DIMS = (
    *((24, 16), (64, 32), (96, 64), (128, 64)),
    *((128, 128), (192, 64), (64, 192)),
    *(DEEPSEEK, (256, 64), (64, 256), (192, 256)),
    *((256, 256), (384, 128), (128, 384)),
    *((512, 256), (576, 512)),
)
HEAD_DIMS_FLOAT32 = ((24, 16), (128, 128), (256, 256), (512, 256), (576, 512))
Call: TypeAlias = Literal["causal", "descriptors", "packed", "unaligned"]


@dataclass(frozen=True)
class Job:
    """One entry of a tile table, compiled for one compute capability, pair of head dimensions and kind of call.

    Attributes:
        kernel: name of the kernel and its table.
        gpu_class, itemsize, columns: the entry: GPU class, bytes of an element, most columns that it serves.
        tile: the entry's.
        capability: major * 10 + minor.
        head_dim_qk, head_dim_v: compiled for these.
        call: ``causal``; ``descriptors``: causal, loads by tensor descriptor; ``packed``: lengths, and a window too;
            ``unaligned``: causal, with strides that are no multiple of 16.
    """

    kernel: str
    gpu_class: str
    itemsize: int
    columns: int
    tile: Tile
    capability: int
    head_dim_qk: int
    head_dim_v: int
    call: Call = "causal"

    @property
    def entry(self) -> tuple[str, str, int, int]:
        """Identifies the entry."""
        return self.kernel, self.gpu_class, self.itemsize, self.columns

    @property
    def name(self) -> str:
        """Unique among all jobs."""
        head_dims = f"{self.head_dim_qk}/{self.head_dim_v}"
        return f"sm{self.capability} {self.kernel} {head_dims} {TYPES[self.itemsize]} {self.call}"


def _entry_jobs(kernel: str, gpu_class: str, itemsize: int, capability: int) -> Iterator[Job]:
    """Every pair of head dimensions that some entry serves, in ascending order of columns."""
    from mla_plugin.kernels.prefill.packing import columns_of

    for head_dims in HEAD_DIMS if itemsize == 2 else HEAD_DIMS_FLOAT32:
        for columns, tile in TABLES[kernel][gpu_class, itemsize]:
            if sum(columns_of(*head_dims)) <= columns:
                yield Job(kernel, gpu_class, itemsize, columns, tile, capability, *head_dims)
                break


def _calls(job: Job) -> Iterator[Job]:
    """The job for every kind of call that is compiled differently."""
    calls: tuple[Call, ...] = ("causal", "packed")
    if job.kernel != "forward" and job.capability in (90, 100) and job.tile.suits_descriptors:
        calls = (*calls, "descriptors")
    for call in calls:
        yield Job(**{**vars(job), "call": call})


def _representatives(found: list[Job], is_first: bool) -> Iterator[Job]:
    """The jobs that are always compiled, of one kernel, element size and compute capability."""
    for job in found:
        if job.itemsize == 2 and (job.head_dim_qk, job.head_dim_v) == DEEPSEEK:
            yield from (call for call in _calls(job) if is_first or call.call != "packed")
        elif job == max((other for other in found if other.entry == job.entry), key=_columns):
            yield job


def _columns(job: Job) -> int:
    return job.head_dim_qk + job.head_dim_v


def jobs(all_targets: bool) -> Iterator[Job]:
    """What is compiled, see the top of this file."""
    for kernel, table in TABLES.items():
        for gpu_class, itemsize in table:
            for capability in GPU_CLASSES[gpu_class]:
                found = list(_entry_jobs(kernel, gpu_class, itemsize, capability))
                if all_targets:
                    yield from (call for job in found for call in _calls(job))
                else:
                    yield from _representatives(found, capability == GPU_CLASSES[gpu_class][0])


MISCOMPILED = Job("forward", "Hopper", 2, 0, Tile(128, 64, 8, 3), 90, 24, 16, "unaligned")
"""``packing.with_aligned_rows`` prevents its launch: ptxas leaves a register unset."""


def _descriptor_types(dtype: str, tile: Tile, columns: dict[str, int]) -> dict[str, str]:
    """Both blocks of columns of each source; where there is one block, it is used for the second too."""
    types = {}
    for first, second, rows, head_dim in (
        ("Q", "Q1", tile.block_m, "QK"),
        ("K", "K1", tile.block_n, "QK"),
        ("V", "V1_", tile.block_n, "V"),
        ("DOut", "DOut1", tile.block_m, "V"),
    ):
        width = columns[f"{head_dim}0"]
        types[first] = f"tensordesc<{dtype}[1, 1, {rows}, {width}]>"
        types[second] = f"tensordesc<{dtype}[1, 1, {rows}, {columns[f'{head_dim}1'] or width}]>"
    return types


def _arguments(job: Job, names: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of the kernel's pointers and descriptors, and its constants."""
    from mla_plugin.kernels.prefill.packing import columns_of

    dtype, tile = TYPES[job.itemsize], job.tile
    columns = dict(zip(("QK0", "QK1", "V0", "V1"), columns_of(job.head_dim_qk, job.head_dim_v), strict=True))
    packed, descriptors = job.call == "packed", job.call == "descriptors"
    types = dict.fromkeys(("Q", "Q1", "K", "K1", "V", "V1_", "DOut", "DOut1", "Out", "DQ", "DK", "DV"), f"*{dtype}")
    types |= dict.fromkeys(("Lse", "LseLog2", "Delta"), "*fp32") | {"softmax_scale": "fp32"}
    offsets = [name for name in names if name.startswith("cu_seqlens")]
    types |= dict.fromkeys(offsets, "*i32")
    if descriptors:
        types |= _descriptor_types(dtype, tile, columns)
    constants: dict[str, Any] = {} if packed else dict.fromkeys(offsets)
    constants |= columns | {"D_QK": job.head_dim_qk, "D_V": job.head_dim_v, "GROUP": 1, "WIDE": False}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    constants |= {
        "PACKED": packed,
        "HAS_LENGTHS": packed,
        "SOME_SEE_NO_KEY": packed,
        "BOTTOM_RIGHT": True,
        "HAS_LEFT": packed,
        "HAS_RIGHT": True,
    }
    constants |= {"EVEN_M": not packed, "EVEN_N": not packed, "HEADS_TOGETHER": 8, "TMA": descriptors}
    return types, {name: value for name, value in constants.items() if name in names}


def program(job: Job) -> Program:
    """The job's kernel for its compute capability."""
    from mla_plugin.kernels.prefill.backward_kv import attention_backward_kv_kernel
    from mla_plugin.kernels.prefill.backward_q import attention_backward_q_kernel
    from mla_plugin.kernels.prefill.forward import attention_forward_kernel
    from mla_plugin.kernels.prefill.packing import launch_options

    kernel = {
        "forward": attention_forward_kernel,
        "backward_kv": attention_backward_kv_kernel,
        "backward_q": attention_backward_q_kernel,
    }[job.kernel]
    types, constants = _arguments(job, kernel.arg_names)
    is_aligned = job.call != "unaligned"
    return Program(job.capability, kernel, types, constants, launch_options(job.tile), is_aligned)


if __name__ == "__main__":
    print_results(program, [*jobs("--all-targets" in sys.argv), MISCOMPILED])
