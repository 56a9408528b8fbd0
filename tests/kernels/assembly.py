"""Reading NVIDIA's assembly (SASS): does a program read a uniform register that nothing has written?

Hopper's matrix instructions take the addresses of their tiles from uniform registers. The assembler of CUDA 12.8 can
forget to set one; the product then reads whatever the register holds, which no source says and no interpreter shows.
A register that is saved before anything was in it, and never used after, is reported too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_WRITES_A_PAIR = (".64", ".WIDE")
_NO_DESTINATION = ("UTMA", "UBLK", "UCGA", "USETMAXREG")


@dataclass(frozen=True)
class Instruction:
    """One instruction and the uniform registers that it reads and writes."""

    address: int
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    is_predicated: bool

    @property
    def opcode(self) -> str:
        return _PREDICATE.sub("", self.text).split(" ", 1)[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"0x([0-9a-f]+)$", self.text)
        return int(found[1], 16) if self.opcode.startswith("BRA") and found else None

    @property
    def may_fall_through(self) -> bool:
        if self.opcode.startswith(("EXIT", "RET")):
            return self.is_predicated
        # a branch may have its condition after the opcode too: BRA.U UP0, 0x10; or in it: BRA.DIV UR4, 0x10
        return self.opcode != "BRA" or self.is_predicated or "P" in self.text.split("BRA", 1)[1]


def _registers(opcode: str, operands: list[str]) -> tuple[set[int], set[int]]:
    """(read, written)."""
    reads: set[int] = set()
    writes: set[int] = set()
    # R2UR in a loop over the values that a warp's threads have; ULOP3 with a predicate of whether its result is 0
    if opcode.startswith(("R2UR", "ULOP3")) and re.fullmatch(r"U?P\d", operands[0]):
        operands = operands[1:]
    is_pair = any(mark in opcode for mark in _WRITES_A_PAIR)
    for place, operand in enumerate(operands):
        tiles = re.search(r"gdesc\[UR(\d+)\]", operand)
        if tiles:  # the tiles of a and of b, two registers each; an a in ordinary registers leaves its two unread
            first = int(tiles[1])
            has_a_in_registers = place >= 2 and re.match(r"R\d", operands[place - 1]) is not None
            reads |= {first + 2, first + 3} if has_a_in_registers else set(range(first, first + 4))
            continue
        found = [int(number) for number in _UNIFORM.findall(operand)]
        is_written = (
            place == 0
            and _UNIFORM.fullmatch(operand) is not None
            and opcode.startswith(("U", "R2UR", "S2UR", "REDUX", "CREDUX", "VOTEU"))
            and not opcode.startswith(_NO_DESTINATION)
        )
        if is_written:
            writes |= {found[0], *([found[0] + 1] if is_pair else [])}
            continue
        has_pairs = "desc[" in operand or opcode.startswith("UIADD3.64")
        reads |= {*found, *(number + 1 for number in found if has_pairs)}
    return reads, writes


def programs(assembly: str) -> Iterator[list[Instruction]]:
    """The kernels of what ``cuobjdump -sass`` prints."""
    found: list[Instruction] = []
    for address, text in _INSTRUCTION.findall(assembly):
        if int(address, 16) == 0 and found:
            yield found
            found = []
        opcode, _, rest = _PREDICATE.sub("", text).partition(" ")
        reads, writes = _registers(opcode, [operand.strip() for operand in rest.split(",")])
        is_predicated = _PREDICATE.match(text) is not None
        found.append(Instruction(int(address, 16), text, frozenset(reads), frozenset(writes), is_predicated))
    if found:
        yield found


def _written_before(program: list[Instruction]) -> list[frozenset[int] | None]:
    """What every path to an instruction has written; None: no path leads there."""
    places = {instruction.address: place for place, instruction in enumerate(program)}
    written: list[frozenset[int] | None] = [None] * len(program)
    written[0] = frozenset()
    waiting = [0]
    while waiting:
        place = waiting.pop()
        instruction, before = program[place], written[place]
        assert before is not None
        after = before | instruction.writes
        following = [places[instruction.target]] if instruction.target in places else []
        if instruction.may_fall_through and place + 1 < len(program):
            following.append(place + 1)
        for other in following:
            known = written[other]
            new = after if known is None else known & after
            if new != known:
                written[other] = new
                waiting.append(other)
    return written


def undefined_reads(assembly: str) -> list[str]:
    """The instructions that read a uniform register which some path to them has not written."""
    return [
        instruction.text
        for program in programs(assembly)
        for instruction, before in zip(program, _written_before(program), strict=True)
        if before is not None and not instruction.reads <= before
    ]
