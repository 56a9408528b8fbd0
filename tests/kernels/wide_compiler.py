"""Compile the wide decode kernel, no GPU: ``python -m tests.kernels.wide_compiler`` prints what it has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tests.kernels.assembly import Instruction, programs, undefined_reads
from tests.kernels.compiler import Program, built, print_results
from tests.kernels.hopper_compiler import loose_arrivals


@dataclass(frozen=True)
class Job:
    """One kind of call; page_size 0: contiguous; ``is_planned``: a kernel before it writes its plan.

    ``query_block``: of ``QueryRows``.
    """

    page_size: int
    is_causal: bool
    is_planned: bool = True
    query_block: tuple[int, ...] = (64,)

    @property
    def name(self) -> str:
        """Unique among all jobs."""
        cache = f"pages of {self.page_size}" if self.page_size else "contiguous"
        copies = "" if len(self.query_block) == 1 else f", {' x '.join(map(str, self.query_block))} rows a copy"
        return f"{'causal' if self.is_causal else 'full'} {cache}{'' if self.is_planned else ' of few'}{copies}"


JOBS = (
    *(Job(64, False), Job(0, True), Job(192, True), Job(64, True, is_planned=False)),
    *(Job(64, True, query_block=block) for block in ((4, 16), (1, 8))),
)


@dataclass(frozen=True)
class Loop:
    """A loop over pairs of key tiles: counts of its instructions.

    Attributes:
        scores, products: matrix instructions over e4m3, and over values.
        waits: where a warpgroup waits for some.
        conversions: of e4m3, two numbers each.
        local: loads and stores of spilled registers.
    """

    scores: int
    products: int
    waits: int
    conversions: int
    local: int


@dataclass(frozen=True)
class Found:
    """The resources and instructions of a compiled kernel.

    Attributes:
        shared: bytes of shared memory.
        spills: spilled stores.
        undefined_reads: see assembly.py.
        loops: of each computing warpgroup.
        from_registers: of all products over values those whose left operand is in registers.
        products: of all of those.
        copies: by TMA.
        loose_arrivals, dependences: see hopper_compiler.py.
    """

    shared: int
    spills: int
    undefined_reads: list[str]
    loops: list[Loop]
    from_registers: int
    products: int
    copies: int
    loose_arrivals: int
    dependences: list[str]


def program(job: Job) -> Program:
    """The kernel as ``attend_launch`` launches it."""
    from triton.experimental.gluon import language as gl

    from mla_plugin.kernels.decode.wide.kernel import wide_decode_kernel

    types = {"Parts": "*bf16", "Out": "*bf16", "KV_scale": "*fp32", "page_table": "*i32"}
    types |= {"seqlens_kv": "*i32", "softmax_scale": "fp32"}
    for name, element, bits, columns in (
        *(("desc_q", "bf16", 16, 64), ("desc_r", "bf16", 16, 32)),
        *(("desc_c", "u8", 8, 128), ("desc_k", "u8", 8, 64)),
    ):
        block = [1, *(job.query_block if element == "bf16" else (64,)), columns]
        layout = gl.NVMMASharedLayout(columns * bits // 8, bits, len(block))
        types[name] = f"tensordesc<{element}{block},{layout!r}>"
    constants: dict[str, Any] = {"PAGE_SIZE": job.page_size, "CAUSAL": job.is_causal}
    constants |= {"DEPENDENT": True, "PLANNED": job.is_planned}
    if job.is_planned:
        types["Plan"] = "*i32"
    else:
        constants["Plan"] = None
    if not job.page_size:
        constants["page_table"] = None
    return Program(90, wide_decode_kernel, types, constants, {"num_warps": 4, "launch_pdl": True})


def _loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Of each computing warpgroup the smallest loop with products of both kinds: over pairs of tiles."""
    found = [
        [x for x in instructions if end.target <= x.address <= end.address]
        for end in instructions
        if end.target is not None and end.target < end.address
    ]
    found = [body for body in found if {"HGMMA", "QGMMA"} <= {x.opcode.split(".")[0] for x in body}]
    smallest: list[list[Instruction]] = []
    for body in sorted(found, key=len):
        if all(body[-1].address < other[0].address or other[-1].address < body[0].address for other in smallest):
            smallest.append(body)
    return smallest[:2]


def measured(program: Program) -> Found:
    """Compile it and read the result."""
    compiled, _, assembly = built(program)
    (instructions,) = programs(assembly)
    products = [x.text for x in instructions if x.opcode.startswith("HGMMA")]
    ptx = compiled.asm["ptx"]

    def loop(body: list[Instruction]) -> Loop:
        def count(*opcodes: str) -> int:
            return sum(x.opcode.startswith(opcodes) for x in body)

        return Loop(
            scores=count("QGMMA"),
            products=count("HGMMA"),
            waits=count("WARPGROUP.DEPBAR"),
            conversions=count("F2FP.F16.E4M3"),
            local=count("STL", "LDL"),
        )

    return Found(
        shared=compiled.metadata.shared,
        spills=sum(x.opcode.startswith("STL") for x in instructions),
        undefined_reads=undefined_reads(assembly),
        loops=[loop(body) for body in _loops(instructions)],
        from_registers=sum(re.search(r"HGMMA\S* R\d+, R\d+,", text) is not None for text in products),
        products=len(products),
        copies=sum(x.opcode.startswith("UTMALDG") for x in instructions),
        loose_arrivals=loose_arrivals(ptx),
        dependences=re.findall(r"griddepcontrol\.(\w+)", ptx),
    )


if __name__ == "__main__":
    print_results(program, JOBS, measured)
