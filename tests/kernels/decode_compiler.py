"""Compile the decode kernels for cards that are not here and print what they take, one JSON line a job.

Run as a program (``python -m tests.kernels.decode_compiler``), because Triton's compiler and its interpreter do not
share a process.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mla_plugin.kernels.decode_tiles import CARDS, DECODE, DecodeTile

RANKS = {576: (512, 64), 320: (256, 64)}  # (R, Dr) that take all columns of an entry
TYPES = {2: "bf16", 4: "fp32"}


@dataclass(frozen=True)
class Job:
    """One entry of the tile table, compiled for one card and one kind of cache (page_size 0: contiguous)."""

    capability: int
    itemsize: int
    columns: int
    tile: DecodeTile
    page_size: int
    descriptors: bool = False

    @property
    def name(self) -> str:
        tile = self.tile
        cache = f"pages of {self.page_size}" if self.page_size else "contiguous"
        way = "descriptors" if self.descriptors else "pointers"
        return f"sm{self.capability} {self.columns}x{self.itemsize} {tile.block_m}x{tile.block_n} {cache} {way}"


def jobs() -> list[Job]:
    """Every entry for every card it is for; the largest caches also contiguous, in small pages, through descriptors."""
    found = []
    for (kind, itemsize), entries in DECODE.items():
        for columns, tile in entries:
            for capability in CARDS[kind]:
                found.append(Job(capability, itemsize, columns, tile, 64))
            if columns < 576 or itemsize == 4:
                continue
            found.append(Job(CARDS[kind][0], itemsize, columns, tile, 0))
            if tile.block_m == 16:
                found.append(Job(CARDS[kind][0], itemsize, columns, tile, 1))
            if tile.block_m == 64 and kind != "163 KiB":
                found.append(Job(CARDS[kind][0], itemsize, columns, tile, 64, descriptors=True))
    return found


def _arguments(job: Job) -> tuple[dict[str, str], dict[str, Any]]:
    """Types of the kernel's pointers and descriptors, and its constants."""
    from mla_plugin.kernels.tile_math import split_head_dim

    rank, rope = RANKS[job.columns]
    first, second = split_head_dim(rank)
    dtype, tile = TYPES[job.itemsize], job.tile
    types = dict.fromkeys(("Q_nope_abs", "Q_rope", "C_kv", "K_rope"), f"*{dtype}")
    types |= {"page_table": "*i32", "seqlens_kv": "*i32", "Out": "*fp32", "Lse": "*fp32", "softmax_scale": "fp32"}
    constants: dict[str, Any] = {"desc_c0": None, "desc_c1": None, "desc_k": None}
    if job.descriptors:
        del constants["desc_c0"], constants["desc_k"]
        types["desc_c0"] = f"tensordesc<{dtype}[1, {tile.block_n}, {first}]>"
        types["desc_k"] = f"tensordesc<{dtype}[1, {tile.block_n}, {rope}]>"
    stages = tile.paged_stages if job.page_size else tile.num_stages
    constants |= {"stride_cn": rank + rope, "stride_kn": rank + rope, "PAGE_SIZE": job.page_size, "STAGES": stages}
    constants |= {"R": rank, "R0": first, "R1": second, "D_ROPE": rope, "ROPE": rope}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "CAUSAL": True, "ONE_SPLIT": False}
    constants |= {"TMA": job.descriptors, "PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    return types, constants


def compile_job(job: Job) -> dict[str, Any]:
    """Shared memory in bytes, tensor memory in columns, registers a thread and spilled stores of one job."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mla_plugin.kernels.decode import decode_kernel

    types, constants = _arguments(job)
    names = decode_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name.startswith("stride"))
    }
    options = {"num_warps": job.tile.num_warps, "num_stages": constants["STAGES"]}
    if job.tile.max_registers is not None:
        options["maxnreg"] = job.tile.max_registers
    source = ASTSource(decode_kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", job.capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage, assembly = (
            subprocess.run([tool, flag, cubin.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    return {
        "name": job.name,
        "shared": kernel.metadata.shared,
        "tensor_memory": getattr(kernel.metadata, "tmem_size", None) or 0,
        "registers": int(registers[1]),
        "spills": assembly.count("STL"),
        "warpgroup_products": assembly.count("HGMMA"),
        "tile": asdict(job)["tile"],
    }


def main() -> None:
    """Compile all jobs, two at a time."""
    with ProcessPoolExecutor(2) as pool:
        for result in pool.map(compile_job, jobs()):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
