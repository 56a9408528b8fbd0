"""What ``batch_invariant=True`` costs: backend ``triton`` with and without it on this GPU.

    python -m benchmarks.decode_invariant                        84 ragged cells, S_q 1; some of S_q 2 and 4
    python -m benchmarks.decode_invariant --chunks 128 256 512   the same for chunks of other sizes, to choose one by
    python -m benchmarks.decode_invariant --wide                 with a page table that has room for 128k tokens

Cells and times are those of ``decode_backends.py``. Where vLLM's FlashAttention 3 is installed it runs, too, with one
split for every sequence, as vLLM calls it for bits that do not depend on the batch. Prints for each cell the
milliseconds without, and for each size of chunk with it, then geometric means by head count; writes
benchmarks/results/decode_invariant_<gpu>.json.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.common import in_turn, parser, write
from benchmarks.decode_cells import (
    DEVICE,
    RANK,
    SCALE,
    Call,
    Cell,
    Checked,
    Inputs,
    Timer,
    backend_call,
    row_of,
    step_of,
)
from mla_plugin import environment
from mla_plugin.device import version
from mla_plugin.plugins.fa3 import providers

BATCHES, MEANS, HEADS = (1, 8, 64, 256), (1024, 6144, 32768), (8, 16, 24, 32, 64, 96, 128)
WIDE = 128 << 10
ONE_SPLIT = "FlashAttention 3, one split"
"""Its name in the results."""


def cells(heads: Sequence[int]) -> Iterator[tuple[Cell, ...]]:
    """Cells in groups of the same lengths, which share a step."""
    for batch, mean in itertools.product(BATCHES, MEANS):
        several = [(s, h) for s in (2, 4) for h in (16, 128)] if mean == 6144 and batch < 256 else []
        lengths = "ragged" if batch > 1 else "uniform"
        yield tuple(Cell(lengths, batch, h, mean, 64, s) for s, h in (*((1, h) for h in heads), *several))


def with_one_split(inputs: Inputs) -> Call | None:
    """vLLM's FlashAttention 3 with num_splits=1; None where it is not installed."""
    vllm = next(found for found in providers.PROVIDERS if isinstance(found, providers.Vllm))
    if version(vllm.distribution) is None:
        return None
    names = ("q", "k", "v", "q_v", "seqused_k", "page_table", "softmax_scale", "is_causal")
    off = {"window_size_left": -1, "window_size_right": -1}
    run = providers.ByPlace(vllm.operator(), names, **off, num_splits=1)
    seqlens_kv = torch.tensor(inputs.step.host, dtype=torch.int32, device=DEVICE)
    causal = inputs.cell.seqlen_q > 1

    def call(cache: torch.Tensor) -> torch.Tensor:
        c_kv, k_rope = cache[:, :, None, :RANK], cache[:, :, None, RANK:]
        lengths_and_pages = (seqlens_kv, inputs.step.page_table)
        found = run(inputs.q_rope, k_rope, c_kv, inputs.q_nope_abs, *lengths_and_pages, SCALE, causal)
        out: torch.Tensor = found[0]
        return out

    return call


def timer_of(call: Call, inputs: Inputs, checked: Checked) -> Timer:
    """Captured after its result was found right."""
    found = checked.error(call(inputs.step.caches[0]))
    assert found <= checked.limit, f"error {found:.1e} > {checked.limit:.1e} at {inputs.cell}"
    return Timer(call, inputs)


def measure(inputs: Inputs, chunks: list[int], rounds: int) -> dict[str, Any]:
    """Milliseconds without, and with chunks of each size; of FlashAttention 3 with one split if it is installed."""
    checked = Checked(inputs)
    timers = {"without": timer_of(backend_call(inputs, "triton")[0], inputs, checked)}
    for chunk in chunks:
        os.environ["MLA_PLUGIN_BATCH_INVARIANT_CHUNK"] = str(chunk)
        timers[str(chunk)] = timer_of(backend_call(inputs, "triton", batch_invariant=True)[0], inputs, checked)
    if (one_split := with_one_split(inputs)) is not None:
        timers[ONE_SPLIT] = timer_of(one_split, inputs, checked)
    return {**row_of(inputs.cell, inputs.step), "ms": in_turn(timers, rounds)}


def summary(rows: list[dict[str, Any]], chunks: list[int]) -> Iterator[str]:
    """Time with it over time without: geometric mean and most, by head count, then of all."""
    for seqlen_q, heads in [*sorted({(row["S_q"], row["H"]) for row in rows}), (1, None)]:
        of_kind = [row for row in rows if row["S_q"] == seqlen_q and heads in (row["H"], None)]
        for chunk in chunks:
            costs = [row["ms"][str(chunk)] / row["ms"]["without"] for row in of_kind]
            name = "all H" if heads is None else f"H {heads:3}"
            mean = statistics.geometric_mean(costs)
            yield f"S_q {seqlen_q} {name} chunks of {chunk}: {len(costs)} cells {mean:.3f}, most {max(costs):.3f}"
            shares = [row["ms"][ONE_SPLIT] / row["ms"][str(chunk)] for row in of_kind if ONE_SPLIT in row["ms"]]
            if shares:
                yield f"{ONE_SPLIT}: {statistics.geometric_mean(shares):.2f} of its time, least {min(shares):.2f}"


def main() -> None:
    """Measure every cell, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--chunks", type=int, nargs="+", default=[environment.batch_invariant_chunk()], help="keys of a chunk"
    )
    arguments.add_argument("--heads", type=int, nargs="+", default=HEADS, help="head counts")
    arguments.add_argument("--wide", action="store_true", help="a page table with room for 128k tokens")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    torch.set_grad_enabled(False)
    rows = []
    for group in cells(options.heads):
        step = step_of(group[0])
        if options.wide:
            more = max(0, WIDE // group[0].page_size - step.page_table.shape[1])
            step = step._replace(page_table=torch.nn.functional.pad(step.page_table, (0, more)))
        for cell in group:
            rows.append(measure(Inputs.of(cell, step), options.chunks, options.rounds))
            times = "  ".join(f"{name} {ms * 1e3:.1f}" for name, ms in rows[-1]["ms"].items())
            print(f"B {cell.batch:3} H {cell.heads:3} mean {cell.mean:5} S_q {cell.seqlen_q}  {times}", flush=True)
        del step
        torch.cuda.empty_cache()
    print("\n".join(summary(rows, options.chunks)))
    print(write("decode_invariant" + "_wide" * options.wide, {"rows": rows}, options.commit))


if __name__ == "__main__":
    main()
