"""Compile the transposed decode kernel, no GPU: ``python -m tests.kernels.transposed_compiler`` prints what it has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mla_plugin.kernels.decode.hopper.rule import lies_in_several_pages
from mla_plugin.kernels.decode.transposed.rule import FEW_ROWS
from tests.kernels.assembly import Instruction, programs, undefined_reads
from tests.kernels.compiler import Program, built, print_results
from tests.kernels.hopper_compiler import loose_arrivals


@dataclass(frozen=True)
class Job:
    """One kind of call; page_size 0: contiguous; ``is_planned``: a kernel before it writes its plan.

    ``has_lse``: it wants the log-sum-exp; otherwise 32 rows of bfloat16 are multiplied in e4m3.
    """

    rows: int
    page_size: int
    is_causal: bool
    dtype: str = "bf16"
    is_planned: bool = True
    has_lse: bool = True

    @property
    def gathers(self) -> bool:
        """Whether gathering warps copy the rows."""
        return lies_in_several_pages(self.page_size or None)

    @property
    def has_scores_in_e4m3(self) -> bool:
        """Whether its scores are products over e4m3."""
        return self.dtype == "bf16" and self.rows > FEW_ROWS and not self.has_lse

    @property
    def name(self) -> str:
        """Unique among all jobs."""
        cache = f"pages of {self.page_size}" if self.page_size else "contiguous"
        few = "" if self.is_planned else " of few"
        few += "" if self.has_lse else " without lse"
        return f"{self.rows} rows{few} {self.dtype} {'causal' if self.is_causal else 'full'} {cache}"


JOBS = (
    *(Job(16, 64, False), Job(16, 0, True, "fp16"), Job(16, 16, True), Job(16, 1, False, "fp16")),
    *(Job(32, 64, True), Job(32, 0, False), Job(32, 192, True, "fp16")),
    *(Job(16, 64, True, is_planned=False), Job(16, 16, False, is_planned=False), Job(32, 0, True, is_planned=False)),
    *(Job(32, 64, True, has_lse=False), Job(32, 0, False, is_planned=False, has_lse=False)),
    Job(16, 64, False, has_lse=False),
)


@dataclass(frozen=True)
class Found:
    """The resources and instructions of a compiled kernel.

    Attributes:
        shared: bytes of shared memory.
        registers: of a thread, on average.
        spills: spilled stores.
        undefined_reads: see assembly.py.
        products, waits: matrix instructions of the loop over key tiles, and where it waits for some.
        scores: of the products those over e4m3.
        from_registers: of the products those whose left operand is in registers.
        conversions: of e4m3 in the loop, two numbers each.
        wide_loads, loads: from shared memory in the loop, of 16 bytes and of fewer.
        local: loads and stores of spilled registers in the loop.
        copies, row_copies: by TMA, and of 16 bytes a thread, in the program.
        loose_arrivals, dependences: see hopper_compiler.py.
    """

    shared: int
    registers: int
    spills: int
    undefined_reads: list[str]
    products: int
    scores: int
    waits: int
    from_registers: int
    conversions: int
    wide_loads: int
    loads: int
    local: int
    copies: int
    row_copies: int
    loose_arrivals: int
    dependences: list[str]


def program(job: Job) -> Program:
    """The kernel as ``attend_launch`` launches it."""
    from triton.experimental.gluon import language as gl

    from mla_plugin.kernels.decode.transposed.kernel import transposed_decode_kernel
    from mla_plugin.kernels.decode.transposed.launch import _GATHERING_REGISTERS, _REGISTERS
    from mla_plugin.kernels.hopper.tickets import LOADING_REGISTERS

    types = dict.fromkeys(("Parts", "Out", "Q_nope_abs", "Q_rope"), f"*{job.dtype}")
    types |= {"Lse": "*fp32", "KV_scale": "*fp32", "page_table": "*i32", "seqlens_kv": "*i32", "softmax_scale": "fp32"}
    constants: dict[str, Any] = {"PAGE_SIZE": job.page_size, "ROWS": job.rows, "CAUSAL": job.is_causal}
    constants |= {"DEPENDENT": True, "PLANNED": job.is_planned}
    if job.is_planned:
        types["Plan"] = "*i32"
    else:
        constants["Plan"] = None
    if job.gathers:
        types |= dict.fromkeys(("C_kv", "K_rope"), "*u8")
        constants |= {"desc_c": None, "desc_k": None, "stride_cn": 36, "stride_kn": 36}
        constants["REGISTERS"] = _GATHERING_REGISTERS
    else:
        for name, columns in (("desc_c", 128), ("desc_k", 64)):
            types[name] = f"tensordesc<u8[1, 64, {columns}],{gl.NVMMASharedLayout(columns, 8, 3)!r}>"
        constants |= dict.fromkeys(("C_kv", "K_rope"), None) | dict.fromkeys(("stride_cn", "stride_kn"), 0)
        constants["REGISTERS"] = LOADING_REGISTERS
    if not job.page_size:
        constants["page_table"] = None
    if not job.has_lse:
        types.pop("Lse")
        constants["Lse"] = None
    options = {"num_warps": 4, "launch_pdl": True, "maxnreg": _REGISTERS}
    return Program(90, transposed_decode_kernel, types, constants, options, strides_are_aligned=False)


def loop_over_tiles(instructions: list[Instruction]) -> list[Instruction]:
    """The smallest loop with matrix instructions."""
    loops = [
        [x for x in instructions if end.target <= x.address <= end.address]
        for end in instructions
        if end.target is not None and end.target < end.address
    ]
    return min((body for body in loops if any(x.opcode.startswith("HGMMA") for x in body)), key=len)


def measured(program: Program) -> Found:
    """Compile it and read the result."""
    compiled, resources, assembly = built(program)
    registers = re.search(r"REG:(\d+)", resources)
    assert registers is not None
    (instructions,) = programs(assembly)
    names = [x.opcode for x in loop_over_tiles(instructions)]
    products = [x.text for x in loop_over_tiles(instructions) if x.opcode.startswith("HGMMA")]
    ptx = compiled.asm["ptx"]

    def count(*opcodes: str) -> int:
        return sum(name.startswith(opcodes) for name in names)

    return Found(
        shared=compiled.metadata.shared,
        registers=int(registers[1]),
        spills=sum(x.opcode.startswith("STL") for x in instructions),
        undefined_reads=undefined_reads(assembly),
        products=len(products),
        scores=count("QGMMA"),
        waits=count("WARPGROUP.DEPBAR"),
        from_registers=sum(re.search(r"HGMMA\S* R\d+, R\d+,", text) is not None for text in products),
        conversions=count("F2FP.F16.E4M3"),
        wide_loads=sum(name.startswith("LDS") and ".128" in name for name in names),
        loads=sum(name.startswith("LDS") and ".128" not in name for name in names),
        local=count("STL", "LDL"),
        copies=sum(x.opcode.startswith("UTMALDG") for x in instructions),
        row_copies=sum(x.opcode.startswith("LDGSTS") for x in instructions),
        loose_arrivals=loose_arrivals(ptx),
        dependences=re.findall(r"griddepcontrol\.(\w+)", ptx),
    )


if __name__ == "__main__":
    print_results(program, JOBS, measured)
