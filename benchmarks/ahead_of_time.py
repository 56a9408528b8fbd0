"""Registers, spills and shared memory of the kernels on each GPU, compiled ahead of time: no GPU is needed.

    python -m benchmarks.ahead_of_time           compiles, writes benchmarks/results/ahead_of_time.json and the page
    python -m benchmarks.ahead_of_time --hopper  compiles the Hopper kernels, and leaves the rest of the file as it is
    python -m benchmarks.ahead_of_time --projected  the same of the kernels around a decode with W_UK and W_UV
    python -m benchmarks.ahead_of_time --transposed  the same of the transposed decode kernel
    python -m benchmarks.ahead_of_time --wide        the same of the wide one
    python -m benchmarks.ahead_of_time --page    writes docs/kernels_ahead_of_time.md from the JSON file

Which tiles, head dimensions and GPUs: ``jobs`` of tests/kernels/prefill_compiler.py, without --all-targets, and of
tests/kernels/decode_compiler.py; ``JOBS`` of tests/kernels/<kind>_compiler.py for each of ``KINDS``, which the page
does not show.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from tests.kernels import decode_compiler
from tests.kernels.compiler import AFRESH, KINDS, RECORDED, ROOT, Usage, blocks_per_processor, keyed_results, printed
from tests.kernels.prefill_compiler import DEEPSEEK, MISCOMPILED, TYPES, Job, jobs

RESULTS = RECORDED
PAGE = ROOT / "docs" / "kernels_ahead_of_time.md"
GPUS = {80: "A100", 86: "RTX 30, A10", 89: "RTX 40, L4, L40", 90: "H100, H200", 100: "B200", 120: "RTX 50"}
MOST_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
COLUMNS = ("tile", "warps", "stages", "registers", "spilled stores", "shared memory", "blocks", "warps per SM")

TEXT = """\
# The kernels, compiled ahead of time

Written by `python -m benchmarks.ahead_of_time` with Triton {triton}; do not edit. Nothing here was run on a GPU: the
kernels were compiled for it, and the numbers are what the compiler allocated.
`tests/kernels/test_prefill_ahead_of_time.py` and `test_decode_ahead_of_time.py` check them: shared memory against the
GPU's limit per block, spilled stores against stated figures. They compile every entry of the tile tables for every GPU
of its class: prefill for the widest head dimensions that the entry serves and DeepSeek-V3's 192/128 in bfloat16, and
with `--all-targets` for head dimensions from 24/16 to 576/512, with lengths and windows, and by tensor descriptors.

A tile of prefill is queries x keys. Blocks are those that one multiprocessor holds at a time, by registers and shared
memory. Spilled stores are instructions in the whole program. *Causal* is a dense batch under a causal mask, *packed*
has lengths and a window too, *descriptors* loads by tensor descriptors.

## Prefill: A100, head_dim_qk 192, head_dim_v 128, bfloat16

{a100}

### What they predict (a prediction, not a measurement)

Peak is 312 TFLOP/s in bfloat16. A multiprocessor does 1024 multiply-adds, 128 bytes of shared memory, 16 exponentials
and 64 float32 operations a clock.

- **Forward: 120 to 180 TFLOP/s on long sequences.** A tile of 128 x 64 costs 128 * 64 * (192 + 128) / 1024 = 2560
  clocks of products. Each of the 8 warps has 16 rows; it reads all keys and values of the tile from shared memory,
  40 KiB, and its own 6 KiB of queries again, because 255 registers do not hold them: 368 KiB or 2940 clocks. The
  softmax adds 512 clocks of exponentials and about 1000 of float32 arithmetic. If all overlaps, the limit is shared
  memory, at 87 % of peak; if nothing does, 57 %, 180 TFLOP/s; and 8 warps, two for each scheduler, overlap little and
  wait for barriers besides. On an H200 the same kernel reaches 461 to 510 TFLOP/s, 47 to 52 % of 989. There the
  products read shared memory once for 64 rows, which the A100 cannot; but an A100 has twice the exponentials for each
  product. So the H200's share, 120 to 160 TFLOP/s, is the likelier part of the range.
- **Backward: 75 to 120 TFLOP/s.** It counts as 832 columns of products for every query and key (S, dP, dV, dK, dQ) and
  executes 1152, because both kernels compute S and dP: 72 % of what the units do is counted. The H200 executes at 48 to
  65 % of its peak; one block of 8 warps has nothing to change to while it waits for the A100's slower shared memory,
  so 33 to 53 % of 312 is the guess, times 72 %.
- The spilled stores are all outside of the loops. The loop of `backward_kv` reloads 6 registers among its 637
  instructions, that of `forward` none; this does not decide.
- 108 multiprocessors hold one block each: fewer than 108 tiles of 128 queries, over all heads, leave some idle.

## Prefill: the same on every GPU

{gpus}

## Prefill: every entry of the tables

For the first GPU of its class and the widest head dimensions that it serves.

{entries}

## Decode: every entry of the table, on every GPU

A tile is (query, head) rows x keys, in pages of 64; rank and rope are those of the widest cache that the entry serves.

{decode}

### Quantised caches

Of `fp8` and `fp8_ds_mla`, with queries in bfloat16.

{quantised}

### With `batch_invariant=True`

The same tiles in the kernel that splits every sequence at the same keys, for the widest cache.

{invariant}

### What they predict for the A100 (a prediction, not a measurement)

Rank 512, rope 64, bfloat16. Per processor and clock an A100 of 80 GB loads 13 bytes from memory (2039 GB/s over 108
processors at 1.41 GHz) and 128 from shared memory, and does 1024 multiply-adds.

- **16 heads: limited by memory, up to 1750 GB/s on large batches.** A tile of 64 keys is 72 KiB, 5500 clocks of memory.
  Its products take 1088 clocks; its keys, values and queries about 1700 of shared memory. More than half of the time is
  left over. An H200 reaches 4170 of its 4800 GB/s with two such blocks a processor.
- **128 heads: limited by products and shared memory, 60 to 130 TFLOP/s.** A tile of 64 x 32 is 2176 clocks of products.
  With 8 warps as 4 x 2, keys and values are read four times and queries twice, about 425 KB or 3300 clocks: 66 % of 312
  TFLOP/s if all overlaps, 40 % if nothing does, less what the softmax and the barriers take. An H200 reaches 400 of its
  989 TFLOP/s; the same share would be 126, the top of the range.
"""


def measure() -> dict[str, Any]:
    """Compile; one record a job."""
    cache = Path(triton.knobs.cache.dir)
    found = keyed_results("tests.kernels.prefill_compiler", AFRESH, cache=cache)
    prefill = [_record(job, *found[job.name]) for job in jobs(all_targets=False)]
    miscompiled = _record(MISCOMPILED, *found[MISCOMPILED.name])
    found = keyed_results("tests.kernels.decode_compiler", AFRESH, cache=cache)
    decode = [_record(job, *found[job.name]) for job in decode_compiler.jobs()]
    kept = {"triton": triton.__version__, "records": prefill, "miscompiled": miscompiled, "decode": decode}
    return kept | {kind: measure_kind(kind) for kind in KINDS}


def measure_kind(kind: str) -> list[dict[str, Any]]:
    """The same of the Hopper kernels, of those around a decode with W_UK and W_UV, or of one over bytes."""
    found = printed(f"tests.kernels.{kind}_compiler", AFRESH, cache=Path(triton.knobs.cache.dir))
    return [{"name": name, "key": key, "found": result} for name, (key, result) in found.items()]


def _record(job: Job | decode_compiler.Job, key: str, usage: Usage) -> dict[str, Any]:
    blocks = blocks_per_processor(usage, job.tile.num_warps, job.capability)
    return {**asdict(job), "tile": job.tile._asdict(), "key": key, **asdict(usage), "blocks": blocks}


def _cells(record: dict[str, Any]) -> Iterator[str]:
    tile = record["tile"]
    block_m, block_n, num_warps = tile["block_m"], tile["block_n"], tile["num_warps"]
    num_stages = tile["paged_stages"] if record.get("page_size") else tile["num_stages"]
    yield f"{block_m} x {block_n}"
    yield from (str(number) for number in (num_warps, num_stages, record["registers"], record["spills"]))
    yield f"{record['shared'] / 1024:.0f} KiB"
    yield str(record["blocks"])
    yield f"{record['blocks'] * num_warps} of {MOST_WARPS[record['capability']]}"


def _table(records: Iterable[dict[str, Any]], *names: str) -> str:
    """A Markdown table whose first columns are ``names``, functions of a record below."""
    describe = {
        "kernel": lambda r: f"`{r['kernel']}`",
        "call": lambda r: r["call"],
        "GPU": lambda r: f"{GPUS[r['capability']]} (sm{r['capability']})",
        "class": lambda r: r["gpu_class"],
        "cache": lambda r: f"`{r['kv_cache_format']}`",
        "rank, rope": lambda r: (
            f"{'/'.join(map(str, decode_compiler.RANKS[r['columns']]))} {decode_compiler.TYPES[r['itemsize']]}"
        ),
        "head dims": lambda r: f"{r['head_dim_qk']}/{r['head_dim_v']} {TYPES[r['itemsize']]}",
    }
    header = (*names, *COLUMNS)
    rows = [(*(describe[name](record) for name in names), *_cells(record)) for record in records]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def render(found: dict[str, Any]) -> str:
    """The page."""
    records = found["records"]
    deepseek = [r for r in records if (r["head_dim_qk"], r["head_dim_v"], r["itemsize"]) == (*DEEPSEEK, 2)]
    entries: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    for record in records:
        if record["call"] == "causal":  # the first GPU of a class comes first
            entries.setdefault((record["kernel"], record["gpu_class"], record["itemsize"], record["columns"]), record)
    return TEXT.format(
        triton=found["triton"],
        a100=_table((r for r in deepseek if r["capability"] == 80), "kernel", "call"),
        gpus=_table((r for r in deepseek if r["call"] != "packed"), "kernel", "GPU", "call"),
        entries=_table(entries.values(), "kernel", "class", "head dims"),
        decode=_decode_table(found, invariant=False),
        quantised=_decode_table(found, "cache", invariant=False, quantised=True),
        invariant=_decode_table(found, invariant=True),
    )


def _decode_table(found: dict[str, Any], *names: str, invariant: bool, quantised: bool = False) -> str:
    records = (r for r in found["decode"] if r["page_size"] == 64 and not r["descriptors"])
    kept = (r for r in records if r["invariant"] == invariant and (r["kv_cache_format"] != "plain") == quantised)
    return _table(kept, "GPU", "rank, rope", *names)


def main() -> None:
    if "--page" not in sys.argv:
        again = [kind for kind in KINDS if f"--{kind}" in sys.argv]
        kept = json.loads(RESULTS.read_text()) | {kind: measure_kind(kind) for kind in again} if again else measure()
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(render(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
