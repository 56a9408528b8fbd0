"""Every fused decode backend side by side on this GPU, and how far the resolver's choice is from the best.

    python -m benchmarks.decode_backends                    every cell; about two minutes
    python -m benchmarks.decode_backends --name decode_preference    keeps the result that the resolver's table is of
    python -m benchmarks.decode_table                       writes that table
    python -m benchmarks.decode_backends --check            exit 1 where the choice is below 0.95 of the best installed

bfloat16, kv_lora_rank 512, rope 64, calls by ``mla_plugin.decode`` in CUDA graphs: see ``decode_cells.py``. A backend
whose error against float64 is more than twice that of plain PyTorch in bfloat16 is not timed. Milliseconds are medians
over rounds that take the backends in turn, because a GPU's clock drifts; a plan on the host counts by a layer's share.
Prints a line for each cell, a summary last, and writes benchmarks/results/<name>_<gpu>.json.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

import mla_plugin
from benchmarks.common import parser, write
from benchmarks.decode_cells import RANK, ROPE, Cell, Inputs, backend_call, measure_backends, row_of, step_of
from mla_plugin import DecodeRequest, device
from mla_plugin.arguments.decode import Profile

FUSED = ["triton", "flashmla", "flashinfer", "fa3"]
BATCHES, MEANS, HEADS = (1, 8, 64, 256), (1024, 6144, 32768), (8, 16, 24, 32, 48, 64, 96, 128)
WITHIN = 0.95


def cells() -> Iterator[tuple[Cell, ...]]:
    """Cells in groups of the same lengths and pages, which share a step."""
    for batch, mean in itertools.product(BATCHES, MEANS):
        for lengths in ("uniform", "ragged") if batch > 1 else ("uniform",):
            several = [(2, h) for h in (8, 16, 32, 64, 128)] + [(4, h) for h in (8, 16, 32, 64, 128)]
            more = several if mean == 6144 and batch < 256 else []
            yield tuple(Cell(lengths, batch, h, mean, 64, s) for s, h in (*((1, h) for h in HEADS), *more))
    yield tuple(Cell("one_long", 32, h, 1024) for h in HEADS)
    yield (Cell("thundermla", 4, 16, 0, 64, 4),)
    for page_size, batch in itertools.product((1, 16), BATCHES):
        yield tuple(Cell("ragged" if batch > 1 else "uniform", batch, h, 6144, page_size) for h in (16, 32, 64, 128))


def choice(inputs: Inputs) -> str:
    """What the resolver takes for the cell."""
    cell = inputs.cell
    request = DecodeRequest(
        dtype=torch.bfloat16,
        device_type="cuda",
        device_index=torch.cuda.current_device(),
        batch_size=cell.batch,
        seqlen_q=cell.seqlen_q,
        num_heads=cell.heads,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        max_seqlen_kv=inputs.step.page_table.shape[1] * cell.page_size,
        page_size=cell.page_size,
        causal=cell.seqlen_q > 1,
        has_seqlens_kv=True,
        has_host_lengths=True,
        profile=Profile.of(inputs.step.host),
    )
    return mla_plugin.resolve(request).forward_backend


def warm_up() -> None:
    """Compile: FlashInfer's kernels by nvcc in a thread, in parallel with ours, of every kind that the cells have."""
    kinds = sorted({(cell.page_size, cell.heads, cell.seqlen_q) for group in cells() for cell in group})
    sizes = [(page_size, batch) for page_size in sorted({kind[0] for kind in kinds}) for batch in (2, 64)]
    steps = {size: step_of(Cell("uniform", size[1], 16, 1024, size[0])) for size in sizes}

    def call(backend: str, page_size: int, heads: int, seqlen_q: int) -> None:
        for batch in (2, 64):
            step = steps[page_size, batch]
            inputs = Inputs.of(Cell("uniform", batch, heads, 1024, page_size, seqlen_q), step)
            try:
                backend_call(inputs, backend)[0](step.caches[0])
            except Exception as reason:  # it is kept with the cell
                print(f"{backend}: {str(reason)[:100]}", flush=True)
                return

    with torch.no_grad():
        other = threading.Thread(target=torch.no_grad()(call), args=("flashinfer", 64, 16, 1))
        other.start()
        for kind in kinds:
            call("triton", *kind)
        other.join()
    torch.cuda.synchronize()


def line(row: dict[str, Any]) -> str:
    """A cell in words: the choice, its speed as a share of the best installed, microseconds of all."""
    sizes = (
        f"{row['lengths']:10} B {row['B']:3} H {row['H']:3} mean {row['mean']:5} page {row['page']:2} S_q {row['S_q']}"
    )
    times = "  ".join(f"{name} {ms * 1e3:.1f}" for name, ms in sorted(row["ms"].items(), key=lambda item: item[1]))
    share = "-" if row["of_the_best"] is None else f"{row['of_the_best']:.3f}"
    return f"{sizes}  {row['choice']:10} {share}  {times}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Geometric means: of the choice, and of our kernels over the best other backend."""
    shares = [row["of_the_best"] for row in rows if row["of_the_best"]]
    mean = statistics.geometric_mean(shares)
    lines = [f"{len(rows)} cells; the choice over the best installed: mean {mean:.3f}, least {min(shares):.3f}"]
    kinds = sorted({(row["lengths"], row["page"], row["S_q"]) for row in rows})
    for kind in kinds:
        of_kind = [row for row in rows if (row["lengths"], row["page"], row["S_q"]) == kind and "triton" in row["ms"]]
        found = [
            min(others) / row["ms"]["triton"]
            for row in of_kind
            if (others := [ms for name, ms in row["ms"].items() if name != "triton"])
        ]
        if found:
            lines.append(
                f"{kind[0]:10} page {kind[1]:2} S_q {kind[2]}: triton over the best other, {len(found)} cells: "
                f"{statistics.geometric_mean(found):.3f}, least {min(found):.3f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure every cell, write, print."""
    arguments = parser(__doc__)
    arguments.add_argument("--fallback", action="store_true", help="sdpa too, which is slow")
    arguments.add_argument("--name", default="decode_backends", help="of the result: decode_preference for the table's")
    arguments.add_argument("--check", action="store_true", help="exit 1 where the choice is below 0.95 of the best")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    torch.set_grad_enabled(False)
    names, rows, started = [*FUSED, *(["sdpa"] if options.fallback else [])], [], time.monotonic()
    warm_up()
    print(f"{time.monotonic() - started:.0f} s: compiled", flush=True)
    for group in cells():
        step = step_of(group[0])
        for cell in group:
            inputs = Inputs.of(cell, step)
            row = row_of(cell, step)
            measure_backends(inputs, row, names, {}, options.rounds)
            row["choice"] = choice(inputs)
            best = min(row["ms"].values(), default=None)
            row["of_the_best"] = best / row["ms"][row["choice"]] if row["choice"] in row["ms"] else None
            rows.append(row)
            print(line(row), flush=True)
        path = write(options.name, {"packages": dict(device.installed_packages()), "rows": rows}, options.commit)
        del step, inputs
        torch.cuda.empty_cache()
    print(path)
    print(f"{time.monotonic() - started:.0f} s\n{summary(rows)}")
    behind = [row for row in rows if row["of_the_best"] is None or row["of_the_best"] < WITHIN]
    for row in behind:
        print(f"below {WITHIN}: {line(row)}")
    if options.check and behind:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
