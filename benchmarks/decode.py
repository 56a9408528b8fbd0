"""Decode over a paged compressed cache (kv_lora_rank 512, rope 64, page 64, one query token, bfloat16) on this GPU.

    python benchmarks/decode.py                  our kernels alone
    python benchmarks/decode.py --peers DIR      also the libraries for which DIR/peers.py has a loader

A loader takes no tensor and returns prepare(q [B, H, 576], kv [pages, 64, 576], page_table, seqlens, scale), which
returns a callable without arguments that gives [B, H, 512]. What a loader raises is noted and that library left out.
A result whose error against float64 is more than twice that of plain PyTorch in bfloat16 is not timed. Milliseconds are
of calls in a CUDA graph, as serving engines make them, over several sets of inputs in turn, so that the L2 cache does
not serve; a library that cannot be captured is timed by events. Writes benchmarks/results/decode_<gpu>.json, prints a
table last.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import OURS, by_events, by_graph, error, host_microseconds, in_turn, load_peers, parser, write

from mla_plugin.kernels import mla_decode_attention

CASES = (
    *((batch, heads, seqlen) for heads in (16, 128) for batch in (1, 32, 128) for seqlen in (4096, 8192)),
    *((1, 16, 65536), (1, 128, 65536)),
)
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "FlashMLA": ("flashmla_decode", ()),
    "FA3": ("fa3_decode", ()),
    "FlashInfer fa3": ("flashinfer_decode", ("fa3",)),
    "vLLM Triton": ("vllm_triton_decode", ()),
}
RANK, ROPE, PAGE = 512, 64, 64
SCALE = 192**-0.5
ROTATED_BYTES = 256 << 20  # inputs that are smaller together come in several sets
MOST_SETS = 16
CALLS = 32  # in a graph, at least, as the layers of a step: the start of the graph is no call's

Call = Callable[[], torch.Tensor]


class Inputs(NamedTuple):
    """Arguments of one call, as ``prepare`` takes them."""

    q: torch.Tensor
    kv: torch.Tensor
    page_table: torch.Tensor
    seqlens: torch.Tensor
    scale: float


Prepare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], Call]


def draw(case: tuple[int, int, int], device: str, seed: int) -> Inputs:
    """Random queries and pages in random order."""
    batch, heads, seqlen = case
    generator = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"device": device, "generator": generator}
    pages = batch * seqlen // PAGE
    return Inputs(
        torch.randn(batch, heads, RANK + ROPE, dtype=torch.bfloat16, **options),
        torch.randn(pages, PAGE, RANK + ROPE, dtype=torch.bfloat16, **options),
        torch.randperm(pages, dtype=torch.int32, **options).view(batch, -1),
        torch.full((batch,), seqlen, dtype=torch.int32, device=device),
        SCALE,
    )


def plain(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Plain PyTorch in ``dtype``, one sequence after the other: [B, H, RANK]."""
    rows = []
    for q, pages in zip(inputs.q.to(dtype), inputs.page_table.long(), strict=True):
        keys = inputs.kv[pages].reshape(-1, RANK + ROPE).to(dtype)
        rows.append(((q @ keys.T) * inputs.scale).softmax(-1) @ keys[:, :RANK])
    return torch.stack(rows)


def ours(q: torch.Tensor, kv: torch.Tensor, page_table: torch.Tensor, seqlens: torch.Tensor, scale: float) -> Call:
    """Our kernels, on views of the same tensors."""
    q_nope_abs, q_rope = q.unsqueeze(1).split([RANK, ROPE], -1)
    c_kv, k_rope = kv.split([RANK, ROPE], -1)

    def call() -> torch.Tensor:
        out = mla_decode_attention(
            q_nope_abs, q_rope, c_kv, k_rope, softmax_scale=scale, page_table=page_table, seqlens_kv=seqlens
        )
        assert isinstance(out, torch.Tensor)
        return out[:, 0]

    return call


def correct_calls(libraries: dict[str, Prepare], sets: list[Inputs], row: dict[str, Any]) -> dict[str, list[Call]]:
    """Prepared calls of the libraries whose results are right; the others are noted in ``row``."""
    exact = plain(sets[0], torch.float64)
    limit = 2 * error(plain(sets[0], torch.bfloat16), exact)
    calls = {}
    for name, prepare in libraries.items():
        try:
            prepared = [prepare(*inputs) for inputs in sets]
            found = error(prepared[0](), exact)
        except Exception as reason:  # of a library that does not take the shape
            row["refused"][name] = repr(reason)[:200]
            continue
        row["error"][name] = found
        if found <= limit:
            calls[name] = prepared
        else:
            row["refused"][name] = f"error {found:.1e} > {limit:.1e}, twice plain PyTorch's in bfloat16"
    return calls


def timer(name: str, calls: list[Call], row: dict[str, Any]) -> Callable[[], float]:
    """By a graph, or by events for a library that cannot be captured, which is noted in ``row``."""
    try:
        by_graph(calls, replays=1)
    except RuntimeError as reason:
        row["not_captured"][name] = repr(reason)[:200]
        return functools.partial(by_events, calls[0])
    return functools.partial(by_graph, calls * -(-CALLS // len(calls)))


def measure(case: tuple[int, int, int], libraries: dict[str, Prepare], rounds: int) -> dict[str, Any]:
    """One row of the table."""
    batch, heads, seqlen = case
    cache_bytes = batch * seqlen * (RANK + ROPE) * 2
    count = max(2, min(MOST_SETS, -(-ROTATED_BYTES // cache_bytes)))
    sets = [draw(case, "cuda", seed) for seed in range(count)]
    row: dict[str, Any] = {"B": batch, "H": heads, "S_kv": seqlen, "input_sets": count, "error": {}}
    row |= {"refused": {}, "not_captured": {}}
    calls = correct_calls(libraries, sets, row)
    row["ms"] = in_turn({name: timer(name, prepared, row) for name, prepared in calls.items()}, rounds)
    row["gb_per_s"] = {name: cache_bytes / ms * 1e-6 for name, ms in row["ms"].items()}
    operations = 2 * batch * heads * seqlen * (2 * RANK + ROPE)
    row["tflop_per_s"] = {name: operations / ms * 1e-9 for name, ms in row["ms"].items()}
    if OURS in calls:
        row["host_us"] = host_microseconds(calls[OURS][0])
        others = [ms for name, ms in row["ms"].items() if name != OURS]
        row["of_the_best"] = min(others) / row["ms"][OURS] if others else None
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds of every library, our rates, our speed as a share of the best library's."""
    names = [OURS, *PEERS]
    names = [name for name in names if any(name in row["ms"] for row in rows)]
    lines = ["| B,H,S_kv | " + " | ".join(names) + " | GB/s | TFLOP/s | of the best | host us |"]
    lines.append("|---" * (len(names) + 5) + "|")
    for row in rows:
        cells = [f"{row['B']},{row['H']},{row['S_kv']}"]
        cells += [f"{row['ms'][name]:.4f}" if name in row["ms"] else "" for name in names]
        if OURS in row["ms"]:
            share = row["of_the_best"]
            cells += [f"{row['gb_per_s'][OURS]:.0f}", f"{row['tflop_per_s'][OURS]:.0f}"]
            cells += ["" if share is None else f"{share:.2f}", f"{row['host_us']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every case, write, print."""
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    peers, missing = load_peers(options.peers, PEERS)
    rows = []
    for case in CASES:
        rows.append(measure(case, {OURS: ours, **peers}, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    print(write("decode", {"rows": rows, "not_loaded": missing}, options.commit))
    for name, reason in missing.items():
        print(f"{name}: {reason}")
    print(table(rows))
    if any(OURS not in row["ms"] for row in rows):
        raise SystemExit("our own result was refused; see 'refused' above")


if __name__ == "__main__":
    main()
