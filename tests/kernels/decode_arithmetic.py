"""What ``chunks_kernel`` computes with, for each kind of call: ``python -m tests.kernels.decode_arithmetic``.

Bits are the same where operations and layouts are: a layout says which thread adds what in which order. Triton chooses
layouts for each compiled kernel separately, so they are compared: for calls with and without a causal mask, with left
padding, and every way to read the cache. ``--all`` does so for every compute capability and for float32.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator

from mla_plugin.kernels.decode.tiles import DECODE
from mla_plugin.kernels.tiles import GPU_CLASSES
from tests.kernels.compiler import Program
from tests.kernels.decode_compiler import Job, program

_FLOATS = r"tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma|math\.\w+|arith\.(?:mulf|addf|subf|divf|maxnumf|truncf|extf)"
_ALIAS = re.compile(r"^(#\w+) = (#?.*)$", re.MULTILINE)


def operations(text: str) -> Counter[str]:
    """Every operation on floating-point numbers in a kernel, with the types of its operands, layouts spelt out."""
    layouts = dict(_ALIAS.findall(text))
    found: Counter[str] = Counter()
    for line in re.sub(r"loc\([^)]*\)", "", text).splitlines():
        operation = re.search(rf"({_FLOATS})\b.*? : (.*)$", line) or re.search(r"^\s*(\}\)) : (\(tensor.*)$", line)
        if operation:
            spelt = re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), operation[2])
            spelt = re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), spelt)
            found[f"{operation[1]} {spelt}"] += 1
    return found


def calls(capability: int, itemsize: int, columns: int) -> Iterator[tuple[str, str, Program]]:
    """(tile, kind of call, program)."""
    gpu_class = next(name for name, capabilities in GPU_CLASSES.items() if capability in capabilities)
    for most, tile in DECODE[gpu_class, itemsize]:
        if most != columns:
            continue
        plain = Job(capability, itemsize, columns, tile, 64, invariant=True)
        paged = {size: program(dataclasses.replace(plain, page_size=size)) for size in (64, 0, 1, 16)}
        yield f"{tile.block_m}", "pages of 64", paged[64]
        yield f"{tile.block_m}", "one query", _changed(paged[64], CAUSAL=False)
        yield f"{tile.block_m}", "left padding", _changed(paged[0], leftpad_kv=None)
        yield f"{tile.block_m}", "pages of 1", paged[1]
        yield f"{tile.block_m}", "pages of 16", paged[16]
        yield f"{tile.block_m}", "contiguous", paged[0]
        if tile.block_m == 64 and capability >= 90:
            yield f"{tile.block_m}", "descriptors", program(dataclasses.replace(plain, descriptors=True))


def _changed(given: Program, **constants: bool | None) -> Program:
    """With other constants; None: a pointer to int32 instead."""
    kept = {name: value for name, value in given.constants.items() if name not in constants}
    kept |= {name: value for name, value in constants.items() if value is not None}
    pointers = {name: "*i32" for name, value in constants.items() if value is None}
    return dataclasses.replace(given, constants=kept, types={**given.types, **pointers})


def _compiled(given: Program) -> Counter[str]:
    """Compiled until layouts are chosen, which is a fifth of the way."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ir, make_backend

    target, source, stages = GPUTarget("cuda", given.capability, 32), given.source(), {}
    backend = make_backend(target)
    options = backend.parse_options({**given.options, **source.parse_options()})
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, functions, modules, context)
    metadata = {"hash": "", "target": target, **vars(options)}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return operations(str(module))


def main() -> None:
    """One JSON line a call: what it has in addition to the tile's first call, and how often each operation occurs."""
    entries = [(each, size, 576) for capabilities in GPU_CLASSES.values() for each in capabilities for size in (2, 4)]
    for capability, itemsize, columns in entries if "--all" in sys.argv else [(80, 2, 576), (90, 2, 576)]:
        for tile, name, given in calls(capability, itemsize, columns):
            found = _compiled(given)
            print(
                json.dumps({"capability": capability, "itemsize": itemsize, "tile": tile, "call": name, "found": found})
            )


if __name__ == "__main__":
    main()
