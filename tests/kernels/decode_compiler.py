"""Compile the decode kernels without a GPU: ``python -m tests.kernels.decode_compiler``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mla_plugin import environment
from mla_plugin.kernels.decode.tiles import DECODE, DecodeTile, for_batch, stages_for
from mla_plugin.kernels.tiles import GPU_CLASSES
from tests.kernels.compiler import Program, print_results

RANKS = {576: (512, 64), 320: (256, 64)}  # (R, Dr) that take all columns of an entry
_CONVERSIONS = {80: "bits", 86: "bits"}
TYPES = {1: "bf16", 2: "bf16", 4: "fp32"}


@dataclass(frozen=True)
class Job:
    """One entry of the tile table, compiled for one compute capability and kind of cache (page_size 0: contiguous).

    ``invariant``: for ``batch_invariant``. ``kv_cache_format``: of the cache.
    """

    capability: int
    itemsize: int
    columns: int
    tile: DecodeTile
    page_size: int
    descriptors: bool = False
    invariant: bool = False
    kv_cache_format: str = "plain"

    @property
    def name(self) -> str:
        tile = self.tile
        cache = f"pages of {self.page_size}" if self.page_size else "contiguous"
        if self.itemsize == 1:
            cache = f"{self.kv_cache_format} {cache}"
        way = ("descriptors" if self.descriptors else "pointers") + (" invariant" if self.invariant else "")
        return f"sm{self.capability} {self.columns}x{self.itemsize} {tile.block_m}x{tile.block_n} {cache} {way}"


def jobs() -> list[Job]:
    """Every entry for every GPU of its class; the largest caches also contiguous, in pages of 1, by descriptors."""
    found = list(_quantised())
    for (gpu_class, itemsize), entries in DECODE.items():
        if itemsize == 1:
            continue
        for columns, tile in entries:
            for capability in GPU_CLASSES[gpu_class]:
                found.append(Job(capability, itemsize, columns, tile, 64))
            if columns < 576:
                continue
            for capability in GPU_CLASSES[gpu_class]:
                found.append(Job(capability, itemsize, columns, tile, 64, invariant=True))
            if itemsize == 4:
                continue
            found.append(Job(GPU_CLASSES[gpu_class][0], itemsize, columns, tile, 0))
            found.append(Job(GPU_CLASSES[gpu_class][0], itemsize, columns, tile, 1))
            if tile.large_gathered:
                large = for_batch(tile, 1, 1024, 2**20, 132)
                found.append(Job(GPU_CLASSES[gpu_class][0], itemsize, columns, large, 1))
            if tile.block_m == 64 and gpu_class != "163 KiB":
                found.append(Job(GPU_CLASSES[gpu_class][0], itemsize, columns, tile, 64, True))
                found.append(Job(GPU_CLASSES[gpu_class][0], itemsize, columns, tile, 64, True, invariant=True))
    return found


def _quantised() -> Iterator[Job]:
    """Every entry for quantised caches, for every GPU of its class; the largest in both formats, and in small pages."""
    for (gpu_class, itemsize), entries in DECODE.items():
        for columns, tile in entries if itemsize == 1 else ():
            for capability in GPU_CLASSES[gpu_class]:
                yield Job(capability, 1, columns, tile, 64, kv_cache_format="fp8")
                if columns == 576:
                    yield Job(capability, 1, columns, tile, 64, kv_cache_format="fp8_ds_mla")
            if columns == 576:
                for kv_format in ("fp8", "fp8_ds_mla"):
                    yield Job(GPU_CLASSES[gpu_class][0], 1, columns, tile, 1, kv_cache_format=kv_format)


def _arguments(job: Job) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of the kernel's pointers and descriptors, and its constants."""
    from mla_plugin.kernels.decode.device import Device
    from mla_plugin.kernels.decode.launch import e4m3_conversion
    from mla_plugin.kernels.tile_math import split_head_dim

    rank, rope = RANKS[job.columns]
    first, second = split_head_dim(rank)
    dtype, tile = TYPES[job.itemsize], job.tile
    types = dict.fromkeys(("Q_nope_abs", "Q_rope", "C_kv", "K_rope"), f"*{dtype}")
    types |= {"page_table": "*i32", "seqlens_kv": "*i32", "Parts": f"*{dtype}", "Out": f"*{dtype}", "Lse": "*fp32"}
    types["softmax_scale"] = "fp32"
    is_plain, is_ds_mla = job.kv_cache_format == "plain", job.kv_cache_format == "fp8_ds_mla"
    device = Device(
        "227 KiB" if job.capability == 100 else "", 1, True, True, _CONVERSIONS.get(job.capability, "instruction")
    )
    constants: dict[str, Any] = {"FORMAT": job.kv_cache_format, "CONVERSION": e4m3_conversion(device, tile)}
    if is_plain:
        constants["KV_scale"] = None
    else:
        types |= {"C_kv": "*u8", "K_rope": "*bf16" if is_ds_mla else "*u8", "KV_scale": "*fp32"}
    constants |= {"desc_c0": None, "desc_c1": None, "desc_k": None, "leftpad_kv": None}
    if job.descriptors:
        del constants["desc_c0"], constants["desc_k"]
        types["desc_c0"] = f"tensordesc<{dtype}[1, {tile.block_n}, {first}]>"
        types["desc_k"] = f"tensordesc<{dtype}[1, {tile.block_n}, {rope}]>"
    stages = stages_for(tile, job.page_size)
    rows = (656, 328) if is_ds_mla else (rank + rope, rank + rope)
    constants |= {"stride_cn": rows[0], "stride_kn": rows[1], "PAGE_SIZE": job.page_size, "STAGES": stages}
    constants |= {"R": rank, "R0": first, "R1": second, "D_ROPE": rope, "ROPE": rope}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "CAUSAL": True}
    constants["PLANNED"] = tile.planned
    if tile.planned or job.invariant:
        types["Plan"] = "*i32"
    else:
        constants["Plan"] = None
    constants |= {
        "TMA": job.descriptors,
        "HOPPER": job.capability == 90 and tile.block_m == 64 and second == 0 and dtype == "bf16",
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }
    constants["DEPENDENT"] = job.capability >= 90
    if job.invariant:
        constants["CHUNK"] = environment.batch_invariant_chunk()
    return types, constants


def program(job: Job) -> Program:
    """The kernel for the job's compute capability."""
    from mla_plugin.kernels.decode.invariant.kernel import chunks_kernel
    from mla_plugin.kernels.decode.kernel import decode_kernel

    types, constants = _arguments(job)
    options: dict[str, Any] = {"num_warps": job.tile.num_warps, "num_stages": constants["STAGES"]}
    if job.tile.max_registers is not None:
        options["maxnreg"] = job.tile.max_registers
    if constants["DEPENDENT"]:
        options["launch_pdl"] = True
    if job.invariant:
        return Program(job.capability, chunks_kernel, types, constants, options | {"enable_fp_fusion": False})
    return Program(job.capability, decode_kernel, types, constants, options)


if __name__ == "__main__":
    print_results(program, jobs())
