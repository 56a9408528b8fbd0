"""The check for uniform registers that are read before they are written."""

from __future__ import annotations

import pytest

from tests.kernels.assembly import undefined_reads


def assembly(*instructions: str) -> str:
    """As cuobjdump prints it: the address, the instruction, its code; the code's second half on a separate line."""
    lines = ["\t\tFunction : kernel"]
    for place, text in enumerate(instructions):
        lines.append(f"        /*{place * 16:04x}*/                   {text} ;   /* 0x000000001a1a7890 */")
        lines.append("                                                 /* 0x000fe2000f91e03f */")
    return "\n".join(lines)


def test_a_register_that_only_adds_to_itself_is_found() -> None:
    """As the assembler leaves the second tile of v."""
    lost = "UIADD3 UR26, UP0, UR26, 0x20, URZ"
    found = undefined_reads(assembly("UMOV UR34, 0x1", "UMOV UR35, 0x2", lost, "EXIT"))
    assert found == [lost]


def test_a_register_that_one_path_leaves_out_is_found() -> None:
    product = "HGMMA.64x16x16.F32.BF16 R56, R28, gdesc[UR20].tnspB, R56"
    skips = ("@P0 BRA 0x30", "UMOV UR22, 0x1", "UMOV UR23, 0x1", product, "EXIT")
    assert undefined_reads(assembly(*skips)) == [product]
    assert undefined_reads(assembly("UMOV UR22, 0x2", "UMOV UR23, 0x2", *skips[:1], *skips[3:])) == []


def test_a_loop_may_read_what_was_written_before_it() -> None:
    body = ("UMOV UR4, 0x0", "UIADD3 UR4, UR4, 0x1, URZ", "@P0 BRA 0x10", "EXIT")
    assert undefined_reads(assembly(*body)) == []
    assert undefined_reads(assembly(body[1], "@P0 BRA 0x0", "EXIT")) == [body[1]]


@pytest.mark.parametrize(
    ("reader", "registers"),
    [
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", {8, 9, 10, 11}),
        ("HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8].tnspB, R24", {10, 11}),
        ("LDG.E.U16 R104, desc[UR18][R106.64]", {18, 19}),
        ("STS.U16 [R65+UR13+0x200], R36", {13}),
        ("UIADD3.64 UR10, UR4, -UR6, URZ", {4, 5, 6, 7}),
        ("FMUL R40, R51, UR25", {25}),
        ("@UP0 UTMALDG.3D [UR24], [UR4]", {24, 4}),
    ],
)
def test_what_an_instruction_reads(reader: str, registers: set[int]) -> None:
    writers = {number: f"UMOV UR{number}, 0x1" for number in registers}
    assert undefined_reads(assembly(*writers.values(), reader, "EXIT")) == []
    for number in registers:
        others = [writer for other, writer in writers.items() if other != number]
        assert undefined_reads(assembly(*others, reader, "EXIT")) == [reader]


@pytest.mark.parametrize(
    "writer",
    [
        "R2UR UR4, R0",
        "@P1 R2UR P0, UR4, R0",
        "ULOP3.LUT UP1, UR4, URZ, 0x1, URZ, 0xc0, !UPT",
        "ULDC.64 UR4, c[0x0][0x208]",
        "@UP0 UMOV UR4, 0x1",
        "S2UR UR4, SR_CTAID.X",
    ],
)
def test_what_writes(writer: str) -> None:
    assert undefined_reads(assembly(writer, "FMUL R40, R51, UR4", "EXIT")) == []


@pytest.mark.parametrize("branch", ["BRA.DIV UR4, 0x30", "BRA.U UP0, 0x30", "BRA P0, 0x30", "@P0 BRA 0x30"])
def test_what_follows_a_branch_with_a_condition_is_reached(branch: str) -> None:
    reader = "FMUL R40, R51, UR9"
    assert undefined_reads(assembly("UMOV UR4, 0x1", branch, reader, "EXIT")) == [reader]


def test_each_kernel_starts_with_nothing_written() -> None:
    first, second = assembly("UMOV UR4, 0x1", "EXIT"), assembly("FMUL R40, R51, UR4", "EXIT")
    assert undefined_reads(f"{first}\n{second}") == ["FMUL R40, R51, UR4"]


def test_what_no_path_reaches_does_not_count() -> None:
    assert undefined_reads(assembly("EXIT", "FMUL R40, R51, UR4", "BRA 0x20")) == []
