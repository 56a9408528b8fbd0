"""Inline assembly of the kernels that converts words: its PTX, run instruction by instruction."""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.kernels.gluon.values import Value, torch_dtype

_BYTES = torch.uint8


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """[..., bytes of an element]."""
    return x.contiguous().unsqueeze(-1).view(_BYTES)


def _permuted(low: torch.Tensor, high: torch.Tensor, selector: str) -> torch.Tensor:
    """``prmt``: byte i of the result is the one of both words that digit i of the selector, from the right, names."""
    digits = [int(digit, 16) for digit in reversed(selector.removeprefix("0x"))]
    assert len(digits) == 4
    assert max(digits) < 8
    return torch.cat([low, high], -1)[..., digits]


def _from_e4m3(x: torch.Tensor) -> torch.Tensor:
    return _bytes(x.contiguous().view(torch.float8_e4m3fn).half()).flatten(-2)


def can_run(assembly: str) -> bool:
    """Whether ``run`` knows its instructions."""
    names = {line.split()[0] for line in assembly.strip("{}\n ").splitlines() if not line.strip().startswith(".reg")}
    return names <= {"mov.b32", "prmt.b32", "cvt.rn.f16x2.e4m3x2"}


def run(assembly: str, constraints: str, given: list[Value], dtypes: tuple[Any, ...]) -> tuple[Value, ...]:
    """The results: as many operands as there are dtypes, then come the inputs.

    Raises:
        KeyError: a register is read that nothing has written.
    """
    kinds = {1: "b", 2: "h", 4: "r"}
    found = [torch_dtype(dtype) for dtype in dtypes]
    sizes = [*(f"={kinds[dtype.itemsize]}" for dtype in found), *(kinds[x.data.element_size()] for x in given)]
    assert constraints == ",".join(sizes)
    registers = {f"${len(found) + i}": _bytes(x.data) for i, x in enumerate(given)}
    for line in assembly.strip("{}\n ").splitlines():
        instruction = line.strip().removesuffix(";")
        if instruction.startswith(".reg"):
            continue
        name, rest = instruction.split(maxsplit=1)
        target, *sources = re.findall(r"\{[^}]*\}|[^\s,]+", rest)
        if name == "prmt.b32":
            result = _permuted(registers[sources[0]], registers[sources[1]], sources[2])
        elif name == "cvt.rn.f16x2.e4m3x2":
            result = _from_e4m3(registers[sources[0]])
        else:
            assert name == "mov.b32", name
            result = registers[sources[0]]
        parts = re.findall(r"[^\s,{}]+", target)
        assert result.shape[-1] == 4
        size = result.shape[-1] // len(parts)
        registers |= {part: result[..., i * size : (i + 1) * size] for i, part in enumerate(parts)}
    values = [registers[f"${i}"].contiguous().view(dtype)[..., 0] for i, dtype in enumerate(found)]
    return tuple(Value(x, given[0].layout) for x in values)
