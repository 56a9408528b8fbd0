"""Compile the Hopper kernels without a GPU: ``python -m tests.kernels.hopper_compiler`` prints their resources."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

from mla_plugin import environment
from mla_plugin.kernels.decode.hopper.rule import must_gather
from tests.kernels.assembly import Instruction, programs, undefined_reads
from tests.kernels.compiler import Program, built, print_results


@dataclass(frozen=True)
class Job:
    """One kind of call.

    Attributes:
        head_dim_qk, head_dim_v: a pair of ``rule.TILES``, or ``rule.LATENT``.
        dtype: Triton's name.
        call: ``full``, ``causal`` and ``window`` over dense batches, ``lengths`` full with lengths, ``packed`` causal.
        kernel: ``forward``, ``backward_kv`` or ``backward_q``; over latents ``latent_forward``.
        sums: dk and dv are float32, as for copies of heads, see ``shared_heads.py``.
    """

    head_dim_qk: int = 192
    head_dim_v: int = 128
    dtype: str = "bf16"
    call: str = "causal"
    kernel: str = "forward"
    sums: bool = False

    @property
    def name(self) -> str:
        """Unique among all jobs."""
        sums = " float32 sums" if self.sums else ""
        return f"{self.kernel} {self.head_dim_qk}/{self.head_dim_v} {self.dtype} {self.call}{sums}"


JOBS = (
    *(Job(call=call) for call in ("full", "window", "packed", "lengths")),
    *(Job(128, 128, "fp16"), Job(64, 64), Job(256, 256, call="packed"), Job(96, 64, "fp16", "full")),
    *(Job(call=call, kernel="backward_kv") for call in ("window", "packed")),
    *(Job(128, 128, "fp16", kernel="backward_kv"), Job(64, 64, call="full", kernel="backward_kv")),
    *(Job(96, 64, kernel=kernel) for kernel in ("backward_kv", "backward_q")),
    *(Job(256, 256, call="full", kernel="backward_kv"), Job(256, 256, "fp16", kernel="backward_q")),
    *(Job(call="packed", kernel="backward_kv", sums=True), Job(256, 256, call="full", kernel="backward_kv", sums=True)),
    *(Job(call="window", kernel="backward_q"), Job(128, 128, "fp16", "packed", kernel="backward_q")),
)


LATENT_JOBS = tuple(
    Job(576, 512, dtype, call, "latent_forward")
    for dtype, call in (("bf16", "full"), ("bf16", "causal"), ("fp16", "packed"), ("bf16", "lengths"))
)


@dataclass(frozen=True)
class DecodeJob:
    """One kind of call of the decode kernel; page_size 0: contiguous.

    ``invariant``: for ``batch_invariant``. ``is_planned``: a kernel before it writes its plan. ``query_block``: of
    ``QueryRows``.
    """

    dtype: str = "bf16"
    page_size: int = 64
    is_causal: bool = False
    kv_cache_format: str = "plain"
    invariant: bool = False
    is_planned: bool = True
    query_block: tuple[int, ...] = (64,)

    @property
    def name(self) -> str:
        """Unique among all jobs."""
        kind = "invariant decode" if self.invariant else "decode"
        kind += "" if self.is_planned else " of few"
        cache = f"pages of {self.page_size}" if self.page_size else "contiguous"
        if self.kv_cache_format != "plain":
            cache = f"{self.kv_cache_format} {cache}"
        copies = "" if len(self.query_block) == 1 else f", {' x '.join(map(str, self.query_block))} rows a copy"
        return f"{kind} {self.dtype} {'causal' if self.is_causal else 'full'} {cache}{copies}"

    @property
    def gathers(self) -> bool:
        """Whether it has a gathering warpgroup in place of the loading warp."""
        return must_gather(self.kv_cache_format, self.page_size or None)


def copies_of_a_panel(query_block: tuple[int, ...]) -> int:
    """How often TMA copies rows to a panel of 64 rows of queries."""
    return 64 // math.prod(query_block)


DECODE_JOBS = (
    *(DecodeJob(), DecodeJob(is_causal=True), DecodeJob("fp16", 0)),
    *(DecodeJob(page_size=16), DecodeJob("fp16", 1, True), DecodeJob(page_size=48)),
    *(DecodeJob("bf16", page_size, kv_cache_format="fp8") for page_size in (0, 64)),
    DecodeJob("fp16", 16, True, kv_cache_format="fp8"),
    *(DecodeJob("bf16", 1, True, kv_cache_format="fp8_ds_mla"), DecodeJob("bf16", 16, kv_cache_format="fp8_ds_mla")),
    *(DecodeJob(invariant=True), DecodeJob("fp16", 0, True, invariant=True), DecodeJob(page_size=16, invariant=True)),
    *(DecodeJob("bf16", page_size, True, kv_cache_format="fp8", invariant=True) for page_size in (0, 64)),
    *(DecodeJob(is_planned=False), DecodeJob("fp16", 16, True, is_planned=False)),
    DecodeJob("bf16", 64, True, kv_cache_format="fp8", is_planned=False),
    DecodeJob("bf16", 16, kv_cache_format="fp8_ds_mla", is_planned=False),
    DecodeJob(invariant=True, is_planned=False),
    DecodeJob("bf16", 0, True, kv_cache_format="fp8", invariant=True, is_planned=False),
    *(DecodeJob(is_causal=True, query_block=block) for block in ((4, 16), (1, 8))),
    DecodeJob("fp16", 16, True, kv_cache_format="fp8", query_block=(1, 32)),
)


@dataclass(frozen=True)
class Loop:
    """A loop with matrix instructions that has no other such loop in it: counts of its instructions.

    Attributes:
        products, waits: matrix instructions, and where a warpgroup waits for some.
        exponentials, local: powers of 2, and loads and stores of spilled registers.
        is_masked: it selects among scores.
    """

    products: int
    waits: int
    exponentials: int
    local: int
    is_masked: bool


@dataclass(frozen=True)
class GatheringLoop:
    """The gathering warpgroup's loop over key tiles: counts of its instructions.

    Attributes:
        copies, loads, stores: asynchronous copies, loads, and stores to shared memory, of 16 bytes each.
        conversions: of e4m3, two numbers each.
        local: loads and stores of spilled registers.
        order: of proxy fences (f), barriers of the warpgroup (b) and arrivals (a), repeated ones once.
    """

    copies: int
    loads: int
    stores: int
    conversions: int
    local: int
    order: str


@dataclass(frozen=True)
class Found:
    """The resources and instructions of a compiled kernel.

    Attributes:
        shared: bytes of shared memory.
        spills: spilled stores.
        products, waits: matrix instructions, and where a warpgroup waits for some.
        undefined_reads: see assembly.py.
        loops: those over key tiles, or over query tiles for dK and dV.
        columns: for each descriptor in the order of its first use, the first column of each copy.
        gathering: the gathering warpgroup's loops.
        loose_arrivals: arrivals at a barrier, by one thread for all its warps, before which they do not synchronise.
        dependences: how it depends on the kernel before and lets the next one begin: PTX's griddepcontrol, in order.
    """

    shared: int
    spills: int
    products: int
    waits: int
    undefined_reads: list[str]
    loops: list[Loop]
    columns: list[list[int]]
    gathering: list[GatheringLoop]
    loose_arrivals: int
    dependences: list[str]


def _count(instructions: list[Instruction], *opcodes: str) -> int:
    return sum(x.opcode.startswith(opcodes) for x in instructions)


def loops(program: list[Instruction]) -> list[Loop]:
    """The loops over tiles."""
    found: dict[tuple[int, int], Loop] = {}
    for end in program:
        if end.target is None or end.target >= end.address:
            continue
        body = [x for x in program if end.target <= x.address <= end.address]
        exponentials = _count(body, "MUFU.EX2")
        # the loop over a program's tiles and what the assembler moves out of line have the exponentials of several
        if not 0 < exponentials < 100 or not _count(body, "HGMMA") or _count(body, "EXIT", "STG"):
            continue
        is_masked = _count(body, "FSEL") > exponentials // 2
        local = _count(body, "STL", "LDL")
        waits = _count(body, "WARPGROUP.DEPBAR")
        found[end.target, end.address] = Loop(_count(body, "HGMMA"), waits, exponentials, local, is_masked)
    places = list(found)
    return [
        loop
        for (start, end), loop in found.items()
        if not any(start <= a and b <= end for a, b in places if (a, b) != (start, end))
    ]


def gathering(program: list[Instruction]) -> list[GatheringLoop]:
    """The gathering warpgroup's loops over tiles; that over pieces has TMA copies, of the queries."""
    found = []
    for end in program:
        if end.target is None or end.target >= end.address:
            continue
        body = [x for x in program if end.target <= x.address <= end.address]
        if not _count(body, "LDGSTS", "F2FP.F16.E4M3") or _count(body, "HGMMA", "UTMALDG"):
            continue
        names = [x.opcode for x in body]
        wide = [sum(x.startswith(kind) and ".128" in x for x in names) for kind in ("LDGSTS", "LDG.", "STS")]
        letters = {"FENCE.VIEW": "f", "BAR.SYNC": "b", "SYNCS.ARRIVE": "a"}
        steps = [letter for name in names for kind, letter in letters.items() if name.startswith(kind)]
        order = "".join(letter for letter, _ in itertools.groupby(steps))
        found.append(GatheringLoop(*wide, _count(body, "F2FP.F16.E4M3"), _count(body, "STL", "LDL"), order))
    return found


def columns(ptx: str) -> list[list[int]]:
    """See ``Found.columns``; columns are constants, held in registers."""
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    found: dict[str, list[int]] = {}
    for descriptor, column in re.findall(r"cp\.async\.bulk\.tensor\.\S+ \[%r\d+\], \[(%rd\d+), \{(%r\d+),", ptx):
        found.setdefault(descriptor, []).append(int(constants[column]))
    return list(found.values())


_ACCESS = re.compile(r"\b(ld|st|atom|red)\S*\.shared|[ls][dt]matrix|wgmma|cp\.async|^\$")
"""Of shared memory, or a label, to which a jump may come."""


def loose_arrivals(ptx: str) -> int:
    """See ``Found.loose_arrivals``: another warp may not have read, or written, what the arrival releases.

    An arrival that announces the bytes of a copy releases nothing, and asynchronous ones are made by every thread.
    """
    lines = ptx.splitlines()
    found = 0
    for index, line in enumerate(lines):
        if not re.search(r"mbarrier\.arrive\.(?!expect_tx|noinc)", line):
            continue
        before = itertools.takewhile(lambda text: not _ACCESS.search(text), reversed(lines[:index]))
        found += not any(re.search(r"\bbar(rier)?\.(warp\.)?sync", text) for text in before)
    return found


def decode_program(job: DecodeJob) -> Program:
    """The decode kernel for this job."""
    from triton.experimental.gluon import language as gl

    from mla_plugin.kernels.decode.hopper.kernel import hopper_decode_kernel
    from mla_plugin.kernels.decode.hopper.launch import registers_of

    types = {}
    for names, rows in ((("desc_q", "desc_r"), job.query_block), (("desc_c", "desc_k"), (64,))):
        block = [1, *rows, 64]
        described = f"tensordesc<{job.dtype}{block},{gl.NVMMASharedLayout(128, 16, len(block))!r}>"
        types |= dict.fromkeys(names, described)
    types |= {"Parts": f"*{job.dtype}", "Out": f"*{job.dtype}", "Lse": "*fp32"}
    types |= {"page_table": "*i32", "seqlens_kv": "*i32", "softmax_scale": "fp32"}
    constants: dict[str, Any] = {"R": 512, "PAGE_SIZE": job.page_size, "CAUSAL": job.is_causal}
    registers = registers_of(job.kv_cache_format, gathers=job.gathers)
    constants |= {"CHUNK": environment.batch_invariant_chunk() if job.invariant else 0, "PLANNED": job.is_planned}
    if job.invariant or job.is_planned:
        types["Plan"] = "*i32"
    else:
        constants["Plan"] = None
    if job.invariant and not job.page_size:
        types["leftpad_kv"] = "*i32"
    else:
        constants["leftpad_kv"] = None
    constants |= {"DEPENDENT": True, "FORMAT": job.kv_cache_format, "REGISTERS": registers}
    if job.gathers:
        element = job.dtype if job.kv_cache_format == "plain" else "u8"
        rope = "bf16" if job.kv_cache_format == "fp8_ds_mla" else element
        types |= {"C_kv": f"*{element}", "K_rope": f"*{rope}", "KV_scale": "*fp32"}
        units = {"plain": 72, "fp8": 36, "fp8_ds_mla": 41}[job.kv_cache_format]  # of a token
        constants |= {"stride_cn": units, "stride_kn": units, "desc_c": None, "desc_k": None}
    else:
        constants |= dict.fromkeys(("C_kv", "K_rope"), None) | dict.fromkeys(("stride_cn", "stride_kn"), 0)
    if job.kv_cache_format == "plain":
        constants["KV_scale"] = None
    if not job.page_size:
        constants["page_table"] = None
    options = {"num_warps": 4, "launch_pdl": True}
    if job.invariant:
        options["enable_fp_fusion"] = False
    # it is not compiled anew for strides of some kind, so the compiler knows nothing of them
    return Program(90, hopper_decode_kernel, types, constants, options, strides_are_aligned=not job.gathers)


def program(job: Job | DecodeJob) -> Program:
    """The kernel for this job."""
    if isinstance(job, DecodeJob):
        return decode_program(job)
    from mla_plugin.kernels.hopper.backward_kv import attention_backward_kv_kernel
    from mla_plugin.kernels.hopper.backward_q import attention_backward_q_kernel
    from mla_plugin.kernels.hopper.forward import attention_forward_kernel
    from mla_plugin.kernels.hopper.forward_latent import latent_forward_kernel
    from mla_plugin.kernels.hopper.tickets import LOADING_REGISTERS

    packed, has_lengths = job.call == "packed", job.call in ("packed", "lengths")
    constants: dict[str, Any] = {"REGISTERS": LOADING_REGISTERS}
    constants |= {"DYNAMIC": job.call != "full", "PACKED": packed, "HAS_LENGTHS": has_lengths}
    constants |= {"BOTTOM_RIGHT": True, "HAS_RIGHT": job.call not in ("full", "lengths")}
    if job.kernel != "latent_forward":
        constants["HAS_LEFT"] = job.call == "window"
    if job.kernel == "latent_forward":
        kernel, others, own = latent_forward_kernel, _outputs_of_forward(job), {}
        described = dict.fromkeys("QK", (64, 64))
    elif job.kernel == "forward":
        kernel, described, others, own = attention_forward_kernel, *_of_forward(job)
    else:
        kernel = attention_backward_kv_kernel if job.kernel == "backward_kv" else attention_backward_q_kernel
        described, others, own = _of_backward(job)
    types = {name: _descriptor(job, *tile) for name, tile in described.items()} | others
    types |= {"Work": "*i32", "softmax_scale": "fp32"}
    offsets = [name for name in kernel.arg_names if name.startswith("cu_seqlens")]
    types |= dict.fromkeys(offsets, "*i32")
    absent = [name for name in offsets if not has_lengths or (name.endswith("_padded") and not packed)]
    constants |= own | dict.fromkeys(absent)
    if not (packed or constants["DYNAMIC"]):
        constants["Work"] = None
    options = {"num_warps": 4} | ({"launch_pdl": True} if job.kernel == "backward_q" else {})
    return Program(90, kernel, types, constants, options)


def _descriptor(job: Job, rows: int, columns: int) -> str:
    from triton.experimental.gluon import language as gl

    return f"tensordesc<{job.dtype}[1, 1, {rows}, {columns}],{gl.NVMMASharedLayout(128, 16, 4)!r}>"


_Arguments = tuple[dict[str, tuple[int, int]], dict[str, str], dict[str, Any]]
"""Rows and columns of descriptors, types of the other tensors, constants."""


def _outputs_of_forward(job: Job) -> dict[str, str]:
    return {"Out": f"*{job.dtype}", "Lse": "*fp32"}


def _of_forward(job: Job) -> _Arguments:
    from mla_plugin.kernels.hopper.rule import QUERIES, TILES

    tile = TILES[job.head_dim_qk, job.head_dim_v]
    described = {"Q": (QUERIES // 2, 64), "K": (tile.keys, 64), "V": (tile.keys, job.head_dim_v)}
    constants = {"D_V": job.head_dim_v, "V_COLUMNS": job.head_dim_v, "D_QK": job.head_dim_qk}
    constants |= {"BLOCK_N": tile.keys, "STAGES": tile.stages, "AHEAD": tile.ahead}
    return described, _outputs_of_forward(job), constants


def _of_backward(job: Job) -> _Arguments:
    described = dict.fromkeys(("Q", "K", "V", "DOut"), (64, 64))
    outputs = ("DK", "DV") if job.kernel == "backward_kv" else ("DQ",)
    others = {"Lse": "*fp32", "Delta": "*fp32"} | dict.fromkeys(outputs, "*fp32" if job.sums else f"*{job.dtype}")
    first = 1 << job.head_dim_qk.bit_length() - 1
    return described, others, {"QK0": first, "QK1": job.head_dim_qk - first, "V_PANELS": job.head_dim_v // 64}


def measured(program: Program) -> Found:
    """Compile it and read the result."""
    compiled, _, assembly = built(program)
    (instructions,) = programs(assembly)
    return Found(
        compiled.metadata.shared,
        _count(instructions, "STL"),
        _count(instructions, "HGMMA"),
        _count(instructions, "WARPGROUP.DEPBAR"),
        undefined_reads(assembly),
        loops(instructions),
        columns(compiled.asm["ptx"]),
        gathering(instructions),
        loose_arrivals(compiled.asm["ptx"]),
        re.findall(r"griddepcontrol\.(\w+)", compiled.asm["ptx"]),
    )


if __name__ == "__main__":
    print_results(program, (*JOBS, *LATENT_JOBS, *DECODE_JOBS), measured)
