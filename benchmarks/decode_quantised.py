"""Decode over quantised caches beside the same call over a bfloat16 one: backend ``triton`` on this GPU.

    python -m benchmarks.decode_quantised

Cells and times are those of ``decode_backends.py``. Before a call is timed it is checked against float64 over the
numbers that its cache holds. Prints the milliseconds of every format; writes
benchmarks/results/decode_quantised_<gpu>.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

import mla_plugin
from benchmarks.common import in_turn, parser, write
from benchmarks.decode_cells import (
    DEVICE,
    RANK,
    ROPE,
    SCALE,
    Call,
    Cell,
    Checked,
    Inputs,
    Step,
    Timer,
    backend_call,
    row_of,
    step_of,
)
from mla_plugin import DecodeLengths, cache
from mla_plugin.arguments.cache_format import TOKEN_BYTES, VALUE_BYTES

FORMATS = ("fp8", "fp8_ds_mla")
BYTES = {"fp8": RANK + ROPE, "fp8_ds_mla": TOKEN_BYTES}
KV_SCALE = 0.02
HEADS = (16, 24, 32, 64, 128)
BATCHES = (
    *(("uniform", 1, 8192), ("ragged", 8, 1024), ("uniform", 32, 4096)),
    *(("ragged", 64, 6144), ("uniform", 128, 8192), ("ragged", 256, 1024)),
)
SMALL_PAGES = (1, 16)


def cells() -> Iterator[tuple[Cell, ...]]:
    """Cells in groups of the same lengths and pages, which share a step."""
    for lengths, batch, mean in BATCHES:
        yield tuple(Cell(lengths, batch, heads, mean) for heads in HEADS)
    for page_size, (lengths, batch, mean) in itertools.product(SMALL_PAGES, BATCHES[3:5]):
        yield tuple(Cell(lengths, batch, heads, mean, page_size) for heads in (16, 128))


def quantised(step: Step, kv_format: str) -> Step:
    """The same caches in another format."""
    layers, pages, page_size, _ = step.caches.shape
    kept = torch.zeros(layers, pages, page_size, BYTES[kv_format], dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(pages * page_size, device=DEVICE)
    for found, rows in zip(kept, step.caches.flatten(1, 2), strict=True):
        cache.append(found, rows[:, :RANK], rows[:, RANK:], slots, **options(kv_format))
    return step._replace(caches=kept)


def options(kv_format: str) -> dict[str, Any]:
    """Of calls over such a cache."""
    scale = {"kv_scale": torch.tensor(KV_SCALE, device=DEVICE)} if kv_format == "fp8" else {}
    return {"kv_cache_format": kv_format, **scale}


def numbers(kept: torch.Tensor, kv_format: str) -> torch.Tensor:
    """What the bytes of a cache stand for, [pages, page_size, 576]; those of ``fp8_ds_mla`` are read as bfloat16."""
    values = kept[..., : RANK + ROPE if kv_format == "fp8" else RANK].view(torch.float8_e4m3fn).float()
    if kv_format == "fp8":
        return values * KV_SCALE
    scales = kept[..., RANK:VALUE_BYTES].contiguous().view(torch.float32).repeat_interleave(128, -1)
    return torch.cat([(values * scales).bfloat16(), kept[..., VALUE_BYTES:].contiguous().view(torch.bfloat16)], -1)


def call_over(inputs: Inputs, kv_format: str) -> Call:
    """``mla_plugin.decode`` over caches in a format."""
    lengths, given = DecodeLengths(inputs.step.host, device=DEVICE), options(kv_format)

    def call(kept: torch.Tensor) -> torch.Tensor:
        out = mla_plugin.decode(
            inputs.q_nope_abs,
            inputs.q_rope,
            kept,
            softmax_scale=SCALE,
            page_table=inputs.step.page_table,
            seqlens_kv=lengths,
            backend="triton",
            **given,
        )
        assert isinstance(out, torch.Tensor)
        return out

    return call


def measure(cell: Cell, steps: dict[str, Step], rounds: int) -> dict[str, Any]:
    """Milliseconds over each format."""
    timers, errors = {}, {}
    for kv_format, step in steps.items():
        inputs = Inputs.of(cell, step)
        call = backend_call(inputs, "triton")[0] if kv_format == "plain" else call_over(inputs, kv_format)
        read = step.caches[:1] if kv_format == "plain" else numbers(step.caches[:1], kv_format)
        checked = Checked(inputs._replace(step=step._replace(caches=read)))
        errors[kv_format] = checked.error(call(step.caches[0]))
        assert errors[kv_format] <= checked.limit, f"error {errors[kv_format]:.1e} > {checked.limit:.1e} at {cell}"
        timers[kv_format] = Timer(call, inputs)
    return {**row_of(cell, steps["plain"]), "error": errors, "ms": in_turn(timers, rounds)}


def main() -> None:
    """Measure every cell, print, write."""
    chosen = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    torch.set_grad_enabled(False)
    rows = []
    for group in cells():
        plain = step_of(group[0])
        steps = {"plain": plain} | {kv_format: quantised(plain, kv_format) for kv_format in FORMATS}
        for cell in group:
            rows.append(measure(cell, steps, chosen.rounds))
            times = "  ".join(f"{name} {ms * 1e3:.1f}" for name, ms in rows[-1]["ms"].items())
            print(f"B {cell.batch:3} H {cell.heads:3} mean {cell.mean:5} page {cell.page_size:3}  {times}", flush=True)
        del steps, plain
        torch.cuda.empty_cache()
    print(write("decode_quantised", {"rows": rows}, chosen.commit))


if __name__ == "__main__":
    main()
