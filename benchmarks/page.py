"""Writes docs/benchmarks.md from the kept results; a test holds the page to them.

python -m benchmarks.page
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
GPU = "NVIDIA_H200"
OURS = "mla-plugin"
CAPTIONS = {
    "training": "Throughput of forward and backward against the length, by library",
    "packed": "Speed on packed sequences, by library",
    "decode": "Rate at which the latent cache is read against the batch, 16 heads",
    "decode_128_heads": "Rate at which the latent cache is read against the batch, 128 heads",
    "context_parallel": "Speedup over several GPUs",
    "transformers": "Tokens per second and memory in Hugging Face transformers",
}
"""What each figure shows, for those who do not see it."""

TEXT = """\
# Measured on an H200

Written by `python -m benchmarks.page` from `benchmarks/results/`; do not edit. Every library ran in the same process,
in turn; nothing is timed whose error against float64 is more than twice that of plain PyTorch in the same dtype.
Absolute figures hold for that GPU and that run, and drift by some percent from run to run: compare within a table.

## Prefill and training

{prefill_versions}

`python benchmarks/prefill.py`: bfloat16, head_dim_qk 192, head_dim_v 128, TFLOP/s: 2 B H S^2 x 320
operations forward and x 832 backward, half of it under a causal mask. Calls go through each library's public function,
so below 4k tokens the time on the host shows.

{prefill}

As shares of the other libraries' speed: forward of FlashAttention 3; forward of PyTorch's memory-efficient kernel;
backward of the faster of FlashAttention 4 and cuDNN; forward and backward of the memory-efficient kernel.

{shares}

{training_figure}

{packed_figure}

## Decode kernels

{decode_versions}

`python -m benchmarks.decode`: the compressed cache in pages (kv_lora_rank 512, rope 64), bfloat16, milliseconds of a
call in a CUDA graph of a step's layers; `ragged` lengths are log-normal with sigma 0.6, `one_long` is one sequence of
32k among shorter ones, `thundermla` the call that its authors report. Every library shares out the work by its own
scheduler, and what it works out once a step is counted. Host us is the time that our call takes on the host outside of
a graph.

{decode_figure}

{decode_128_heads_figure}

{decode}

{decode_not_captured}The host of this run took {add_us} us for PyTorch's own `x.add_(1)`.

## Time on the host

{dispatch_versions}

`python benchmarks/dispatch.py`: microseconds until a call returns, [1, 512, 16, 192/128] in bfloat16, causal, with the
GPU idle; without a gradient, and with q, k and v that need one. Under a backend's name stands `mla_plugin.attention`.

{dispatch}

Of that, everything up to a backend that does nothing takes {entry_us} us.

## Context parallelism

{cp_versions}

`torchrun --nproc-per-node N -m benchmarks.context_parallel`: batch 1, causal, 192/128, over NVLink. Time of the slowest
rank over one GPU's time divided by the ranks, so 1.00 is ideal, and GiB at the peak of forward and backward.

{context_parallel_figure}

{cp}

`all_gather` is for windows. Its calls are right-aligned, which cuDNN does not take: our kernels computed them here,
and cuDNN the whole calls of one GPU. FlashAttention 3 and 4 take both; with them it was not measured.

`torchrun --nproc-per-node 2 -m benchmarks.latent_attention`: the same for `latent_attention`, expansion included. The
ideal is one GPU's attention on K and V that are there already. `all_gather` makes right-aligned calls here too.

{latent}

## First calls

{first_versions}

`python benchmarks/first_call.py`: seconds of a new shape's first call with an empty Triton cache, on a host that took
{first_add_us} us for `x.add_(1)`: the compiler's work. In a new process Triton starts too, and at the first
`torch.autograd.grad` PyTorch loads sympy.

{first}

## Decode backends and the resolver's choice

{backends_versions}

`python -m benchmarks.decode_backends`: calls through `mla_plugin.decode`, milliseconds, the fastest in bold. The
resolver's table is made of this run (`decode_preference_NVIDIA_H200.json`), so it chooses the fastest in every one of
these calls; no second run has checked it.

{backends}

## Decoding in Hugging Face transformers

{transformers_versions}

`python benchmarks/transformers_decode.py`: {layers} layers with DeepSeek-V3's attention, one
sequence, `generate`, tokens per second, and the peak of memory that `generate` adds.

{transformers_figure}

{transformers}

## FlashAttention 2 with V padded

{padding_versions}

`python benchmarks/flash_padding.py`: milliseconds, causal: the backend `fa2` as a whole, what of it
are the copies that pad and trim, and our Triton kernels beside it.

{padding}
"""


def load(name: str) -> dict[str, Any]:
    """A kept result."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}_{GPU}.json").read_text())
    return record


def versions(record: dict[str, Any]) -> str:
    """What it was measured with."""
    packages = [f"{name} {record[name]}" for name in ("torch", "triton", "transformers") if name in record]
    return f"{record['gpu']}, {', '.join(packages)}, commit {record['commit'][:10]}."


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(values: dict[str, float], name: str, form: str) -> str:
    return format(values[name], form) if name in values else ""


def prefill(record: dict[str, Any]) -> str:
    """TFLOP/s of every library."""
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["tflop_per_s"]))
    rows = [
        [
            f"{row['batch']},{row['heads']},{row['seqlen']}",
            "causal" if row["causal"] else "full",
            row["pass"],
            *(_number(row["tflop_per_s"], name, ".0f") for name in names),
        ]
        for row in record["rows"]
    ]
    return markdown(["B,H,S", "mask", "pass", *names], rows)


def shares(record: dict[str, Any]) -> str:
    """Our speed over the others', of the four large cases."""
    rows = []
    for forward, backward in zip(record["rows"][0:8:2], record["rows"][1:8:2], strict=True):
        fast, back = forward["tflop_per_s"], backward["tflop_per_s"]
        both = [sum(row["ms"][name] for row in (forward, backward)) for name in ("memory-efficient", OURS)]
        rows.append(
            [
                f"{forward['batch']},{forward['heads']},{forward['seqlen']}",
                "causal" if forward["causal"] else "full",
                f"{fast[OURS] / fast['FA3']:.2f}",
                f"{fast[OURS] / fast['memory-efficient']:.1f}",
                f"{back[OURS] / max(back['FA4'], back['cuDNN']):.2f}",
                f"{both[0] / both[1]:.1f}",
            ]
        )
    header = ["B,H,S", "mask", "of FA3", "of memory-efficient", "backward", "both passes, of memory-efficient"]
    return markdown(header, rows)


def _cell(row: dict[str, Any]) -> list[str]:
    """The sizes of a decode call."""
    return [row["lengths"], f"{row['B']},{row['H']}", *(f"{row[key]}" for key in ("mean", "longest", "page", "S_q"))]


_CELL = ["lengths", "B,H", "mean", "longest", "page", "S_q"]


def decode(record: dict[str, Any]) -> str:
    """Milliseconds of every library."""
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["ms"]))
    rows = [
        [
            *_cell(row),
            *(_number(row["ms"], name, ".4f") for name in names),
            f"{row['gb_per_s'][OURS]:.0f}",
            f"{row['tflop_per_s'][OURS]:.0f}",
            f"{row['of_the_best']:.2f}",
            f"{row['host_us']:.0f}",
        ]
        for row in record["rows"]
    ]
    return markdown([*_CELL, *names, "GB/s", "TFLOP/s", "of the best", "host us"], rows)


def not_captured(record: dict[str, Any]) -> str:
    """A sentence about the libraries that were timed by events."""
    names = sorted({name for row in record["rows"] for name in row["not_captured"]})
    return f"{' and '.join(names)} could not be captured and was timed by events. " if names else ""


def figure(name: str) -> str:
    """A figure in both themes; GitHub and the site show the one that fits the reader's."""
    words = CAPTIONS[name]
    return "\n".join(f"![{words}](figures/{name}_{theme}.svg#gh-{theme}-mode-only)" for theme in figures.INK)


def backends(record: dict[str, Any]) -> str:
    """Milliseconds of every backend, the fastest in bold."""
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["ms"]))
    rows = []
    for row in record["rows"]:
        cells = {name: _number(row["ms"], name, ".4f") for name in names}
        fastest = min(row["ms"], key=row["ms"].__getitem__)
        cells[fastest] = f"**{cells[fastest]}**"
        rows.append([*_cell(row), *cells.values()])
    return markdown([*_CELL, *names], rows)


def transformers(record: dict[str, Any]) -> str:
    """Tokens per second and added memory."""
    names = list(record["rows"][0]["tokens_per_s"])
    rows = [
        [
            str(row["context"]),
            *(_number(row["tokens_per_s"], name, ".0f") for name in names),
            *(_number(row["peak_above_start_gib"], name, ".2f") for name in names),
        ]
        for row in record["rows"]
    ]
    return markdown(["context", *(f"{name} tokens/s" for name in names), *(f"{name} GiB" for name in names)], rows)


def padding(record: dict[str, Any]) -> str:
    """Milliseconds of the backend, of its copies, of ours."""
    names = [
        name for name in record["milliseconds"][0] if name != "case" and name.split()[-1] in ("forward", "backward")
    ]
    return markdown(
        ["B,H,S", *names], [[row["case"], *(f"{row[name]:.3f}" for name in names)] for row in record["milliseconds"]]
    )


def first_calls(record: dict[str, Any]) -> str:
    """Seconds."""
    columns = [(start, kind) for start in ("new shape", "new process") for kind in ("forward", "backward")]
    rows = [
        [name, *(_number(seconds[start], kind, ".1f") for start, kind in columns)]
        for name, seconds in record["seconds"].items()
    ]
    titles = [f"{start}: {'first backward' if kind == 'backward' else kind}" for start, kind in columns]
    return markdown(["call", *titles], rows)


def dispatch(record: dict[str, Any]) -> str:
    """Microseconds without gradients and with them."""
    trained = record["calls_with_gradients"]
    rows = [[name, f"{us:.0f}", _number(trained, name, ".0f")] for name, us in record["calls"].items()]
    return markdown(["call", "forward", "with gradients"], rows)


def context_parallel(*records: dict[str, Any]) -> str:
    """Times over the ideal, and memory of a rank beside one GPU's."""
    rows = [
        [
            *(f"{record['ranks']}", f"{x['tokens']:,}", f"{x['heads']}", f"`{x['way']}`"),
            *(f"{x['forward_over_ideal']:.2f}", f"{x['both_over_ideal']:.2f}"),
            *(f"{x['peak_gib']:.1f}", f"{x['one_gpu']['peak_gib']:.1f}"),
        ]
        for record in records
        for x in sorted(record["times"], key=lambda x: (x["heads"], x["tokens"]))
    ]
    titles = ["GPUs", "tokens", "heads", "way", "forward", "forward and backward", "GiB a rank", "GiB, one GPU"]
    return markdown(titles, rows)


def latents(record: dict[str, Any]) -> str:
    """The same of latents; one GPU's row is without a group."""
    rows = [
        [
            *("1" if x["way"] == "one GPU" else f"{record['ranks']}", f"{x['tokens']:,}", f"{x['heads']}"),
            *("" if x["way"] == "one GPU" else f"`{x['way']}`",),
            *(f"{x['forward_over_ideal']:.2f}", f"{x['both_over_ideal']:.2f}"),
            *(f"{x['peak_gib']:.1f}", f"{x['on_k_and_v']['peak_gib']:.1f}"),
        ]
        for x in sorted(record["times"], key=lambda x: (x["heads"], x["tokens"]))
    ]
    titles = [
        "GPUs",
        "tokens",
        "heads",
        "way",
        "forward",
        "forward and backward",
        "GiB a rank",
        "GiB, K and V, one GPU",
    ]
    return markdown(titles, rows)


def render() -> str:
    """The whole page."""
    sections = {
        "prefill": load("prefill"),
        "decode": load("decode"),
        "backends": load("decode_preference"),
        "transformers": load("transformers_decode"),
        "padding": load("flash_padding"),
        "first": load("first_call"),
        "dispatch": load("dispatch"),
        "cp": load("context_parallel_x2"),
    }
    tables = {
        name: table(sections[name])
        for name, table in (
            ("prefill", prefill),
            ("decode", decode),
            ("backends", backends),
            ("transformers", transformers),
            ("padding", padding),
            ("first", first_calls),
            ("dispatch", dispatch),
        )
    }
    return TEXT.format(
        **{f"{name}_versions": versions(record) for name, record in sections.items()},
        **tables,
        **{f"{name}_figure": figure(name) for name in CAPTIONS},
        decode_not_captured=not_captured(sections["decode"]),
        cp=context_parallel(sections["cp"], load("context_parallel_x4")),
        latent=latents(load("latent_attention_x2")),
        entry_us=f"{sections['dispatch']['layers']['all of it']:.0f}",
        shares=shares(sections["prefill"]),
        add_us=f"{sections['decode']['add_us']:.1f}",
        first_add_us=f"{sections['first']['add_us']:.1f}",
        layers=sections["transformers"]["model"]["num_hidden_layers"],
    )


if __name__ == "__main__":
    PAGE.write_text(render())
