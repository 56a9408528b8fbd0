"""Compile kernels for cards that are not here, and read what they take from the result.

Triton's compiler and its interpreter do not share a process, so the jobs run in their own program: ``results``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.kernels.assembly import undefined_reads

ROOT = Path(__file__).resolve().parents[2]
# bytes of shared memory: what one block may ask for, and what one multiprocessor has
PER_BLOCK = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
PER_PROCESSOR = {80: 167936, 86: 102400, 89: 102400, 90: 233472, 100: 233472, 120: 102400}
RESERVED_PER_BLOCK = 1024
REGISTERS_PER_PROCESSOR = 65536
TENSOR_MEMORY_COLUMNS = 512

J = TypeVar("J")


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes.

    Attributes:
        shared: bytes of shared memory a block.
        tensor_memory: columns of tensor memory (compute capability 10.0).
        registers: registers a thread.
        spills: instructions that store a register to local memory, in the whole program.
        warpgroup_products: Hopper's matrix instructions.
        steps: what the program does in the order of its text, a letter each, repeated ones once: p such an instruction,
            i where the warps meet to issue some that run on together, c a tile asked for through a descriptor, e an
            exponential.
        undefined_reads: up to compute capability 9.0, instructions that read a uniform register which nothing has
            written, see assembly.py; what comes after has another assembler and other instructions.
    """

    shared: int
    tensor_memory: int
    registers: int
    spills: int
    warpgroup_products: int
    steps: str
    undefined_reads: list[str]


def _steps(assembly: str) -> str:
    letters = {"HGMMA": "p", "WARPGROUP.ARRIVE": "i", "UTMALDG": "c", "MUFU.EX2": "e"}
    found = re.findall(r"\b(HGMMA|WARPGROUP\.ARRIVE|UTMALDG|MUFU\.EX2)\b", assembly)
    return "".join(letters[name] for name, _ in itertools.groupby(found))


def blocks_per_processor(usage: Usage, num_warps: int, capability: int) -> int:
    """Blocks that one multiprocessor holds at a time, by registers (given in eights a thread) and shared memory."""
    registers = -(-usage.registers // 8) * 8 * 32 * num_warps
    by_memory = PER_PROCESSOR[capability] // (usage.shared + RESERVED_PER_BLOCK)
    return min(REGISTERS_PER_PROCESSOR // registers, by_memory)


def compile_for(
    capability: int,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    strides_are_aligned: bool = True,
) -> Usage:
    """Compile a jitted kernel for one compute capability (major * 10 + minor).

    ``types`` names the types of the arguments, i32 where it says nothing; ``constants`` holds the others' values.
    Pointers are taken as multiples of 16, and strides if ``strides_are_aligned``.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
        or (strides_are_aligned and signature[name] == "i32" and name.startswith("stride"))
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        resources, assembly = (
            subprocess.run([tool, flag, cubin.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers = re.search(r"REG:(\d+)", resources)
    assert registers is not None
    return Usage(
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        registers=int(registers[1]),
        spills=len(re.findall(r"\bSTL\b", assembly)),
        warpgroup_products=len(re.findall(r"\bHGMMA\b", assembly)),
        steps=_steps(assembly),
        undefined_reads=undefined_reads(assembly) if capability <= 90 else [],
    )


def print_results(compile_job: Callable[[J], Usage], jobs: Iterable[J], name: Callable[[J], str]) -> None:
    """What a compiling program prints: one JSON line a job, two jobs at a time."""
    jobs = list(jobs)
    with ProcessPoolExecutor(2) as pool:
        for job, usage in zip(jobs, pool.map(compile_job, jobs), strict=True):
            print(json.dumps({"name": name(job), **asdict(usage)}), flush=True)


def results(module: str, *arguments: str, cache: Path) -> dict[str, Usage]:
    """Run ``python -m module``, which ends in ``print_results``, outside the interpreter: name of the job to its usage.

    ``cache`` keeps what Triton compiles, so that an unchanged kernel is compiled once.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = map(json.loads, done.stdout.splitlines())
    return {result.pop("name"): Usage(**result) for result in found}
