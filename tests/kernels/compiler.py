"""Compile kernels without a GPU, and read the resources that they use from the result.

Triton's compiler and its interpreter cannot share a process, so the jobs run in a separate program: ``results``.

Compiling a kernel takes some ten seconds, so results in benchmarks/results/ahead_of_time.json are reused for the same
program: same source, constants, options and compute capability under the same Triton. ``AFRESH`` compiles regardless.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.kernels.assembly import undefined_reads

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "ahead_of_time.json"
KINDS = ("hopper", "projected", "transposed", "wide")
"""What ``RECORDED`` has of kernels in Gluon and of others: ``JOBS`` of tests/kernels/<kind>_compiler.py."""
AFRESH = "--afresh"
# bytes of shared memory: what one block may ask for, and what one multiprocessor has
PER_BLOCK = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
PER_PROCESSOR = {80: 167936, 86: 102400, 89: 102400, 90: 233472, 100: 233472, 120: 102400}
RESERVED_PER_BLOCK = 1024
REGISTERS_PER_PROCESSOR = 65536
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class Usage:
    """The resources of one compiled kernel.

    Attributes:
        shared: bytes of shared memory a block.
        tensor_memory: columns of tensor memory (compute capability 10.0).
        registers: registers a thread.
        spills: instructions that store a register to local memory, in the whole program.
        warpgroup_products: Hopper's matrix instructions.
        steps: the order of some instructions in the program, one letter each, repeated ones once: p a matrix
            instruction, i where warps synchronise to issue asynchronous ones, c a TMA copy, e an exponential.
        undefined_reads: instructions that read a uniform register that was never written, see assembly.py; up to
            compute capability 9.0, as newer ones have another assembler and other instructions.
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


@dataclass(frozen=True)
class Program:
    """A jitted kernel for one compute capability.

    Attributes:
        capability: major * 10 + minor.
        kernel: the jitted function.
        types: names of the types of its arguments, i32 where it says nothing.
        constants: the others' values.
        options: of the launch.
        strides_are_aligned: strides are taken as multiples of 16, as pointers always are.
    """

    capability: int
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    strides_are_aligned: bool = True

    def source(self) -> Any:
        """Triton's source object, to be compiled."""
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        names = self.kernel.arg_names
        signature = {name: "constexpr" if name in self.constants else self.types.get(name, "i32") for name in names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name].startswith("*")
            or (self.strides_are_aligned and signature[name] == "i32" and name.startswith("stride"))
        }
        values = {(names.index(name),): value for name, value in self.constants.items()}
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return kind(self.kernel, signature, values, aligned)

    @property
    def key(self) -> str:
        """Programs with equal keys compile to the same machine code."""
        import triton

        given = (triton.__version__, self.capability, sorted(self.options.items()), self.source().hash())
        return hashlib.sha256(repr(given).encode()).hexdigest()[:20]


def built(program: Program) -> tuple[Any, str, str]:
    """The compiled kernel, the report on its resources, and its assembly."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", program.capability, 32)
    compiled = triton.compile(program.source(), target=target, options=dict(program.options))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        resources, assembly = (
            subprocess.run([tool, flag, cubin.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    return compiled, resources, assembly


def compiled(program: Program) -> Usage:
    """Compile it and read the result."""
    compiled, resources, assembly = built(program)
    registers = re.search(r"REG:(\d+)", resources)
    assert registers is not None
    return Usage(
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        registers=int(registers[1]),
        spills=len(re.findall(r"\bSTL\b", assembly)),
        warpgroup_products=len(re.findall(r"\bHGMMA\b", assembly)),
        steps=_steps(assembly),
        undefined_reads=undefined_reads(assembly) if program.capability <= 90 else [],
    )


class Named(Protocol):
    """A job."""

    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=Named)


def _line(
    program_of: Callable[[J], Program],
    measured: Callable[[Program], Any],
    recorded: Mapping[str, Mapping[str, Any]],
    job: J,
) -> str:
    program = program_of(job)
    key = program.key
    found = recorded.get(key) or asdict(measured(program))
    return json.dumps({"name": job.name, "key": key, **found})


def print_results(
    program_of: Callable[[J], Program], jobs: Iterable[J], measured: Callable[[Program], Any] = compiled
) -> None:
    """Prints one JSON line per job, compiling two jobs at a time; ``--only=NAME`` selects one job.

    ``measured`` compiles a program and returns a dataclass of what it found.
    """
    only = [text.removeprefix("--only=") for text in sys.argv if text.startswith("--only=")]
    chosen = [job for job in jobs if not only or job.name in only]
    recorded = {} if AFRESH in sys.argv else _recorded()
    with ProcessPoolExecutor(2) as pool:
        for line in pool.map(functools.partial(_line, program_of, measured, recorded), chosen):
            print(line, flush=True)


def _recorded() -> dict[str, dict[str, Any]]:
    """Key of a program to its result, from the last run of the benchmark."""
    found = json.loads(RECORDED.read_text())
    names = [field.name for field in fields(Usage)]
    records = (*found["records"], *found["decode"], found["miscompiled"])
    usages = {record["key"]: {name: record[name] for name in names} for record in records}
    return usages | {record["key"]: record["found"] for kind in KINDS for record in found.get(kind, ())}


def results(module: str, *arguments: str, cache: Path) -> dict[str, Usage]:
    """Run ``python -m module``, which ends in ``print_results``, outside the interpreter: name of the job to its usage.

    ``cache``: Triton's cache directory, so that an unchanged kernel is compiled once.
    """
    return {name: usage for name, (_, usage) in keyed_results(module, *arguments, cache=cache).items()}


def keyed_results(module: str, *arguments: str, cache: Path) -> dict[str, tuple[str, Usage]]:
    """The same with the key of each program."""
    found = printed(module, *arguments, cache=cache)
    return {name: (key, Usage(**usage)) for name, (key, usage) in found.items()}


def printed(module: str, *arguments: str, cache: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of the job to the key of its program and the fields of what ``measured`` returned."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = map(json.loads, done.stdout.splitlines())
    return {result.pop("name"): (result.pop("key"), result) for result in found}
