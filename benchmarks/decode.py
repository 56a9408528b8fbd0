"""Decode over a paged compressed cache: our kernels compared with the libraries, as engines call them, on this GPU.

    python -m benchmarks.decode                 ours, FlashMLA, FlashAttention 3 and FlashInfer where they are installed
    python -m benchmarks.decode --peers DIR     also vLLM's Triton kernel, by DIR/peers.py

bfloat16, kv_lora_rank 512, rope 64; uniform and ragged lengths, pages of 1, 16 and 64, 1, 2 and 4 query tokens, and the
call that ThunderMLA's authors report. FlashMLA, FlashAttention 3 and FlashInfer run by their own schedulers, vLLM's
kernel with the splits that vLLM takes, next_power_of_2(capacity / 512) but at most twice the multiprocessors. How
calls are made and timed: ``decode_cells.py``. Writes benchmarks/results/decode_<gpu>.json, prints a table last.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import OURS, host_microseconds, load_peers, parser, write
from benchmarks.decode_cells import (
    RANK,
    ROPE,
    SCALE,
    Call,
    Cell,
    Inputs,
    backend_call,
    measure_backends,
    row_of,
    step_of,
)

LIBRARIES = {"triton": OURS, "flashmla": "FlashMLA", "fa3": "FA3", "flashinfer": "FlashInfer"}
"""Our backends, and the libraries that they call."""
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {"vLLM Triton": ("vllm_triton_decode", ())}


def cells() -> Iterator[tuple[Cell, ...]]:
    """Cells in groups of the same lengths and pages, which share a step."""
    for lengths, batch in itertools.product(("uniform", "ragged"), (1, 8, 32, 64, 128, 256)):
        if lengths == "uniform" or batch > 1:
            several = [(s, h) for s in (2, 4) for h in (16, 128)] if batch == 32 else []
            yield tuple(Cell(lengths, batch, h, 6144, 64, s) for s, h in ((1, 16), (1, 128), *several))
    for batch, mean in itertools.product((32, 128), (4096, 8192)):
        yield tuple(Cell("uniform", batch, h, mean) for h in (16, 128))
    yield tuple(Cell("one_long", 32, h, 1024) for h in (16, 128))
    for page_size in (1, 16):
        yield tuple(Cell("ragged", 64, h, 6144, page_size) for h in (16, 128))
    yield (Cell("thundermla", 4, 16, 0, 64, 4),)


def as_peer(prepare: Callable[..., Callable[[], torch.Tensor]]) -> Callable[[Inputs], Call]:
    """A library of peers.py, prepare(q [B, H, 576], kv, page_table, seqlens, scale), over the cache of any layer."""

    def of_cell(inputs: Inputs) -> Call:
        if inputs.cell.seqlen_q > 1:
            raise ValueError(f"seqlen_q={inputs.cell.seqlen_q}, expected 1")
        q = torch.cat([inputs.q_nope_abs, inputs.q_rope], -1)[:, 0]
        seqlens = torch.tensor(inputs.step.host, dtype=torch.int32, device=q.device)
        prepared: dict[int, Callable[[], torch.Tensor]] = {}

        def call(cache: torch.Tensor) -> torch.Tensor:
            place = cache.data_ptr()
            if place not in prepared:
                prepared[place] = prepare(q, cache, inputs.step.page_table, seqlens, SCALE)
            return prepared[place]()[:, None]

        return call

    return of_cell


def measure(cell: Cell, inputs: Inputs, peers: dict[str, Callable[[Inputs], Call]], rounds: int) -> dict[str, Any]:
    """One row of the table."""
    row = row_of(cell, inputs.step)
    measure_backends(inputs, row, list(LIBRARIES), peers, rounds)
    for key in ("ms", "error", "refused", "not_captured", "plan_us"):
        row[key] = {LIBRARIES.get(name, name): value for name, value in row[key].items()}
    keys = sum(inputs.step.host)
    operations = 2 * keys * cell.seqlen_q * cell.heads * (2 * RANK + ROPE)
    row["gb_per_s"] = {name: keys * (RANK + ROPE) * 2 / ms * 1e-6 for name, ms in row["ms"].items()}
    row["tflop_per_s"] = {name: operations / ms * 1e-9 for name, ms in row["ms"].items()}
    if OURS in row["ms"]:
        call, _ = backend_call(inputs, "triton")
        row["host_us"] = host_microseconds(lambda: call(inputs.step.caches[0]))
        others = [ms for name, ms in row["ms"].items() if name != OURS]
        row["of_the_best"] = min(others) / row["ms"][OURS] if others else None
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds of every library, our rates, our speed as a share of the best library's."""
    names = [name for name in (*LIBRARIES.values(), *PEERS) if any(name in row["ms"] for row in rows)]
    titles = ["lengths", "B,H", "mean", "longest", "page", "S_q", *names, "GB/s", "TFLOP/s", "of the best", "host us"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [
            row["lengths"],
            f"{row['B']},{row['H']}",
            *(str(row[key]) for key in ("mean", "longest", "page", "S_q")),
        ]
        cells += [f"{row['ms'][name]:.4f}" if name in row["ms"] else "" for name in names]
        if OURS in row["ms"]:
            share = row["of_the_best"]
            cells += [f"{row['gb_per_s'][OURS]:.0f}", f"{row['tflop_per_s'][OURS]:.0f}"]
            cells += ["" if share is None else f"{share:.2f}", f"{row['host_us']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every cell, write, draw, print."""
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    torch.set_grad_enabled(False)
    peers, missing = load_peers(options.peers, PEERS)
    libraries = {name: as_peer(prepare) for name, prepare in peers.items()}
    rows = []
    for group in cells():
        step = step_of(group[0])
        for cell in group:
            rows.append(measure(cell, Inputs.of(cell, step), libraries, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
        del step
        torch.cuda.empty_cache()
    path = write("decode", {"rows": rows, "not_loaded": missing}, options.commit)
    print(path)
    for name, reason in missing.items():
        print(f"{name}: {reason}")
    print(table(rows))
    if any(OURS not in row["ms"] for row in rows):
        raise SystemExit("our own result was refused; see 'refused' above")


if __name__ == "__main__":
    main()
