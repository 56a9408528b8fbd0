"""Every decode backend side by side on this GPU, and how far the resolver's choice is from the best.

    python benchmarks/decode_backends.py              the fused backends
    python benchmarks/decode_backends.py --fallback   sdpa too, which is slow
    python benchmarks/decode_backends.py --quick      a few shapes
    python benchmarks/decode_backends.py --check      exit 1 where the choice is more than 3 % behind the best

Paged cache in random order, kv_lora_rank 512, rope 64, pages of 64, one query token, bfloat16. Each backend runs by
``mla_plugin.decode`` inside a CUDA graph of many calls that go round several sets of inputs, 256 MiB together at
least, so that the L2 cache serves none of them. Milliseconds are medians over rounds that take the backends in turn,
because a GPU's clock drifts. A backend whose error against float64 is more than twice that of plain PyTorch in bfloat16
is not timed. Beside: host time of one call outside a graph, and of a plan of FlashInfer.
Writes benchmarks/results/decode_backends_<gpu>.json after each shape, prints a table last.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import torch
from common import by_graph, error, host_microseconds, in_turn, parser, write

import mla_plugin
from mla_plugin import DecodeLengths, DecodeRequest, device

FUSED = ("triton", "flashinfer", "fa3")
BATCHES, HEADS, KEYS = (1, 8, 32, 128, 256), (16, 32, 64, 128), (4096, 8192)
CASES = tuple((b, h, s) for s in KEYS for h in HEADS for b in BATCHES) + tuple((1, h, 65536) for h in HEADS)
QUICK = ((1, 16, 4096), (32, 16, 4096), (128, 16, 8192), (1, 128, 4096), (32, 128, 4096), (1, 128, 65536))
RANK, ROPE, PAGE = 512, 64, 64
SCALE = 192**-0.5
ROTATED_BYTES = 256 << 20
CALLS = 32  # in a graph, at least
WITHIN = 0.97

Case = tuple[int, int, int]


class Inputs(NamedTuple):
    """One set of inputs."""

    q_nope_abs: torch.Tensor
    q_rope: torch.Tensor
    kv_cache: torch.Tensor
    page_table: torch.Tensor
    lengths: DecodeLengths


def draw(case: Case, seed: int) -> Inputs:
    """Random queries and pages in random order."""
    batch, heads, keys = case
    generator = torch.Generator("cuda").manual_seed(seed)
    options: dict[str, Any] = {"device": "cuda", "generator": generator}
    pages = batch * keys // PAGE
    q = torch.randn(batch, 1, heads, RANK + ROPE, dtype=torch.bfloat16, **options)
    return Inputs(
        q[..., :RANK].contiguous(),
        q[..., RANK:].contiguous(),
        torch.randn(pages, PAGE, RANK + ROPE, dtype=torch.bfloat16, **options),
        torch.randperm(pages, dtype=torch.int32, **options).view(batch, -1),
        DecodeLengths([keys] * batch, device="cuda"),
    )


def plain(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Plain PyTorch in ``dtype``, one sequence after the other: [B, 1, H, RANK]."""
    rows = []
    q = torch.cat([inputs.q_nope_abs, inputs.q_rope], -1)[:, 0].to(dtype)
    for b, pages in enumerate(inputs.page_table.long()):
        keys = inputs.kv_cache[pages].reshape(-1, RANK + ROPE).to(dtype)
        rows.append(((q[b] @ keys.T) * SCALE).softmax(-1) @ keys[:, :RANK])
    return torch.stack(rows)[:, None]


def decode(inputs: Inputs, backend: str) -> torch.Tensor:
    """One call."""
    out = mla_plugin.decode(
        inputs.q_nope_abs,
        inputs.q_rope,
        inputs.kv_cache,
        softmax_scale=SCALE,
        page_table=inputs.page_table,
        seqlens_kv=inputs.lengths,
        backend=backend,
    )
    assert isinstance(out, torch.Tensor)
    return out


def correct(backends: list[str], inputs: Inputs, row: dict[str, Any]) -> list[str]:
    """The backends whose results are right; why the others are not timed is noted in ``row``."""
    exact = plain(inputs, torch.float64)
    limit = 2 * error(plain(inputs, torch.bfloat16), exact)
    found = []
    for name in backends:
        try:
            row["error"][name] = error(decode(inputs, name), exact)
        except Exception as reason:  # of a library, in whatever way it says so
            row["refused"][name] = str(reason)[:400]
            continue
        if row["error"][name] <= limit:
            found.append(name)
        else:
            row["refused"][name] = f"error {row['error'][name]:.1e} > {limit:.1e}, twice plain PyTorch's in bfloat16"
    return found


def choice(case: Case) -> str:
    """What the resolver takes for the case."""
    batch, heads, keys = case
    request = DecodeRequest(
        dtype=torch.bfloat16,
        device_type="cuda",
        device_index=torch.cuda.current_device(),
        batch_size=batch,
        seqlen_q=1,
        num_heads=heads,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        max_seqlen_kv=keys,
        page_size=PAGE,
        has_seqlens_kv=True,
        has_host_lengths=True,
    )
    return mla_plugin.resolve(request).forward_backend


def measure(case: Case, backends: list[str], rounds: int) -> dict[str, Any]:
    """One row of the table."""
    batch, heads, keys = case
    cache_bytes = batch * keys * (RANK + ROPE) * 2
    sets = [draw(case, seed) for seed in range(max(1, min(64, -(-ROTATED_BYTES // cache_bytes))))]
    row: dict[str, Any] = {"B": batch, "H": heads, "S_kv": keys, "input_sets": len(sets), "error": {}, "refused": {}}
    names = correct(backends, sets[0], row)
    turns = -(-CALLS // len(sets))
    calls = {name: [functools.partial(decode, inputs, name) for inputs in sets] * turns for name in names}
    row["ms"] = in_turn({name: functools.partial(by_graph, calls[name]) for name in names}, rounds)
    row["gb_per_s"] = {name: cache_bytes / ms * 1e-6 for name, ms in row["ms"].items()}
    row["tflop_per_s"] = {
        name: 2 * batch * heads * keys * (2 * RANK + ROPE) / ms * 1e-9 for name, ms in row["ms"].items()
    }
    row["host_us"] = {name: host_microseconds(lambda name=name: decode(sets[0], name), 25) for name in names}
    if "flashinfer" in names:
        row["plan_us"] = host_microseconds(lambda: sets[0].lengths.update([keys] * batch), 5)
    row["choice"] = choice(case)
    best = min(row["ms"].values(), default=float("nan"))
    row["of_the_best"] = best / row["ms"][row["choice"]] if row["choice"] in row["ms"] else None
    return row


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Markdown: milliseconds, the resolver's choice in bold, its speed as a share of the best."""
    lines = ["| B,H,S_kv | " + " | ".join(names) + " | best GB/s | best TFLOP/s | choice of the best | host us |"]
    lines.append("|---" * (len(names) + 5) + "|")
    for row in rows:
        cells = [f"{row['B']},{row['H']},{row['S_kv']}"]
        for name in names:
            text = f"{row['ms'][name]:.4f}" if name in row["ms"] else ""
            cells.append(f"**{text}**" if name == row["choice"] else text)
        share = row["of_the_best"]
        cells += [f"{max(row[key].values(), default=0):.0f}" for key in ("gb_per_s", "tflop_per_s")]
        cells.append("" if share is None else f"{share:.3f}")
        cells.append("/".join(f"{row['host_us'][name]:.0f}" if name in row["host_us"] else "" for name in names))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every case, write, print."""
    arguments = parser(__doc__)
    arguments.add_argument("--fallback", action="store_true", help="sdpa too")
    arguments.add_argument("--quick", action="store_true", help="a few shapes")
    arguments.add_argument("--check", action="store_true", help="exit 1 where the choice is more than 3 %% behind")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    names = [*FUSED, *(["sdpa"] if options.fallback else [])]
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for case in QUICK if options.quick else CASES:
            rows.append(measure(case, names, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
            path = write(
                "decode_backends", {"packages": dict(device.installed_packages()), "rows": rows}, options.commit
            )
            torch.cuda.empty_cache()
    print(path)
    print(table(rows, names))
    behind = [row for row in rows if row["of_the_best"] is None or row["of_the_best"] < WITHIN]
    for row in behind:
        best = min(row["ms"], key=row["ms"].get, default=None)
        print(f"B={row['B']} H={row['H']} S_kv={row['S_kv']}: {row['choice']} was chosen, {best} is faster")
    if options.check and behind:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
