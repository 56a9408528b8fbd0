"""Writes docs/benchmarks.md from the kept results; a test holds the page to them.

python -m benchmarks.page
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import figures, vllm_engine
from benchmarks.measured_calls import attention_choice
from mla_plugin.resolver.attention_measured import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPU = figures.GPU
PAGES = {
    GPU: ROOT / "docs" / "benchmarks.md",
    "NVIDIA_H100_80GB_HBM3": ROOT / "docs" / "benchmarks_h100.md",
}
"""What is kept, and where it is shown."""
OURS = "mla-plugin"
CAPTIONS = {
    "training": "Throughput of forward and backward against the length, by library",
    "packed": "Speed on packed sequences, by library",
    "decode": "Rate at which the latent cache is read against the batch, 16 heads",
    "decode_128_heads": "Rate at which the latent cache is read against the batch, 128 heads",
    "context_parallel": "Speedup over several GPUs",
    "transformers": "Tokens per second and memory in Hugging Face transformers",
    "vllm": "Tokens per second of vLLM's engine, by decode backend",
}
"""What each figure shows, for those who do not see it."""

Record = dict[str, Any]

HEAD = """\
# Measured on an {gpu}

Written by `python -m benchmarks.page` from `benchmarks/results/`; do not edit. Every library ran in the same process,
in turn; nothing is timed whose error against float64 is more than twice that of plain PyTorch in the same dtype.
Absolute figures hold for that GPU and that run, and drift by some percent from run to run: compare within a table.
"""


def load(name: str, gpu: str = GPU) -> Record:
    """A kept result."""
    record: Record = json.loads((RESULTS / f"{name}_{gpu}.json").read_text())
    return record


def versions(record: Record) -> str:
    """What it was measured with."""
    packages = [f"{name} {record[name]}" for name in ("vllm", "torch", "triton", "transformers") if name in record]
    return f"{record['gpu']}, {', '.join(packages)}, commit {record['commit'][:10]}."


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(values: dict[str, float], name: str, form: str) -> str:
    return format(values[name], form) if name in values else ""


def invariant(record: Record) -> str:
    """Costs of each size of chunk, by batch, mean length and tile of heads."""
    chunks = [name for name in record["rows"][0]["ms"] if name != "without"]
    groups: dict[tuple[int, int, str], list[dict[str, float]]] = {}
    for row in record["rows"]:
        if row["S_q"] == 1:
            heads = "8, 16" if row["H"] <= 16 else "24 to 64" if row["H"] <= 64 else "96, 128"
            groups.setdefault((row["B"], row["mean"], heads), []).append(row["ms"])
    found = [
        [
            *map(str, key),
            *(f"{statistics.geometric_mean(ms[chunk] / ms['without'] for ms in cells):.2f}" for chunk in chunks),
        ]
        for key, cells in groups.items()
    ]
    every = [ms for cells in groups.values() for ms in cells]
    means = [f"{statistics.geometric_mean(ms[chunk] / ms['without'] for ms in every):.2f}" for chunk in chunks]
    return markdown(["B", "mean length", "H", *chunks], [*found, ["all", "", "", *means]])


def prefill(record: Record) -> str:
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


def shares(record: Record) -> str:
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


def _cell(row: Record) -> list[str]:
    """The sizes of a decode call."""
    return [row["lengths"], f"{row['B']},{row['H']}", *(f"{row[key]}" for key in ("mean", "longest", "page", "S_q"))]


_CELL = ["lengths", "B,H", "mean", "longest", "page", "S_q"]


def decode(record: Record) -> str:
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


def not_captured(record: Record) -> str:
    """A sentence about the libraries that were timed by events."""
    names = sorted({name for row in record["rows"] for name in row["not_captured"]})
    return f"{' and '.join(names)} could not be captured and was timed by events. " if names else ""


def figure(name: str, gpu: str = GPU) -> str:
    """A figure in both themes; GitHub and the site show the one that fits the reader's."""
    words, file = CAPTIONS[name], figures.file_name(name, gpu)
    return "\n".join(f"![{words}](figures/{file}_{theme}.svg#gh-{theme}-mode-only)" for theme in figures.INK)


def backends(record: Record) -> str:
    """Milliseconds of every backend, the fastest in bold."""
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["ms"]))
    rows = []
    for row in record["rows"]:
        cells = {name: _number(row["ms"], name, ".4f") for name in names}
        fastest = min(row["ms"], key=row["ms"].__getitem__)
        cells[fastest] = f"**{cells[fastest]}**"
        rows.append([*_cell(row), *cells.values()])
    return markdown([*_CELL, *names], rows)


def transformers(record: Record) -> str:
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


def engines(record: Record) -> dict[str, object]:
    """Tokens per second and milliseconds of a step, how greedy tokens agree, and a step of several query tokens."""
    found = [vllm_engine.named(engine) for engine in record["engines"]]
    drafted = [engine for engine in found if engine["drafts"]]
    return {
        "decode": vllm_engine.decode_table(found, 0),
        "drafted": vllm_engine.decode_table(found, drafted[0]["drafts"]),
        "agreement": "\n".join(f"- {line}" for line in list(vllm_engine.agreement_lines(found))[1:]),
        "layers": record["model"]["layers"] or 27,
        "kind": "dense MLPs" if record["model"]["dense"] else "a mixture of experts",
        "queries": drafted[0]["drafts"] + 1,
    }


def padding(record: Record) -> str:
    """Milliseconds of the backend, of its copies, of ours."""
    names = [
        name for name in record["milliseconds"][0] if name != "case" and name.split()[-1] in ("forward", "backward")
    ]
    return markdown(
        ["B,H,S", *names], [[row["case"], *(f"{row[name]:.3f}" for name in names)] for row in record["milliseconds"]]
    )


def first_calls(record: Record) -> str:
    """Seconds."""
    columns = [(start, kind) for start in ("new shape", "new process") for kind in ("forward", "backward")]
    rows = [
        [name, *(_number(seconds[start], kind, ".1f") for start, kind in columns)]
        for name, seconds in record["seconds"].items()
    ]
    titles = [f"{start}: {'first backward' if kind == 'backward' else kind}" for start, kind in columns]
    return markdown(["call", *titles], rows)


def dispatch(record: Record) -> str:
    """Microseconds without gradients and with them."""
    trained = record["calls_with_gradients"]
    rows = [[name, f"{us:.0f}", _number(trained, name, ".0f")] for name, us in record["calls"].items()]
    return markdown(["call", "forward", "with gradients"], rows)


def context_parallel(*records: Record) -> str:
    """Times over the ideal, and memory of a rank compared with one GPU's."""
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


def latents(record: Record) -> str:
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


def choices(record: Record) -> str:
    """Milliseconds of every backend's two passes, the resolver's choice in bold."""
    measured = {name for row in record["rows"] for name in (*row["forward"], *row["backward"])}
    names = [name for name in (*BACKENDS, "sdpa") if name in measured]
    rows = []
    for row in record["rows"]:
        for which in ("forward", "backward"):
            chosen = attention_choice(row, record["gpu"], which)
            cells = {name: _number(row[which], name, ".3f") for name in names}
            cells[chosen] = f"**{cells[chosen]}**"
            heads = f"{row['heads']}" if row["heads"] == row["kv_heads"] else f"{row['heads']}/{row['kv_heads']}"
            kinds = [kind for kind in ("packed", "deterministic") if row[kind]]
            mask = row["mask"] if row["mask"] in ("causal", "full") else f"window {row['mask']}"
            sizes = f"{row['batch']},{heads},{row['seqlen']}", "/".join(map(str, row["dims"]))
            rows.append([*sizes, ", ".join((mask, *kinds)), which, *cells.values()])
    notes = [f"{what} measured again at commit {commit[:10]}" for what, commit in record.get("again", {}).items()]
    superseded = {what for row in record["rows"] for what in row.get("superseded", ())}
    notes += [f"{what} left out where it was measured before its kernel changed" for what in sorted(superseded)]
    table = markdown(["B,H,S", "head dims", "mask", "pass", *names], rows)
    return "\n\n".join([table, *(f"{'; '.join(notes)}." for _ in notes[:1])])


@dataclass(frozen=True)
class Section:
    """A part of the page, which stands there when its results were kept.

    Attributes:
        results: names of the results; the first one's versions are shown.
        text: with fields in braces.
        fields: gets the records, returns what the text names; ``versions`` and figures are there anyway.
    """

    results: tuple[str, ...]
    text: str
    fields: Callable[..., dict[str, str]]


SECTIONS = (
    Section(
        ("prefill",),
        """\
## Prefill and training

{versions}

`python -m benchmarks.prefill`: bfloat16, head_dim_qk 192, head_dim_v 128, TFLOP/s: 2 B H S^2 x 320
operations forward and x 832 backward, half of it under a causal mask. Calls go through each library's public function,
so below 4k tokens the time on the host shows. Ours are the plain kernels here; the Hopper kernels are in the table of
all backends below.

{prefill}

As shares of the other libraries' speed: forward of FlashAttention 3; forward of PyTorch's memory-efficient kernel;
backward of the faster of FlashAttention 4 and cuDNN; forward and backward of the memory-efficient kernel.

{shares}
""",
        lambda record: {"prefill": prefill(record), "shares": shares(record)},
    ),
    Section(
        ("decode",),
        """\
## Decode kernels

{versions}

`python -m benchmarks.decode`: the compressed cache in pages (kv_lora_rank 512, rope 64), bfloat16, milliseconds of a
call in a CUDA graph of a step's layers; `ragged` lengths are log-normal with sigma 0.6, `one_long` is one sequence of
32k among shorter ones, `thundermla` the call that its authors report. Every library divides the work by its own
scheduler, and what it works out once a step is counted. Host us is the time that our call takes on the host outside of
a graph.

{decode_figure}

{decode_128_heads_figure}

{decode}

{decode_not_captured}The host of this run took {add_us} us for PyTorch's own `x.add_(1)`.
""",
        lambda record: {
            "decode": decode(record),
            "decode_not_captured": not_captured(record),
            "add_us": f"{record['add_us']:.1f}",
        },
    ),
    Section(
        ("decode_invariant",),
        """\
## Decode with the same bits whatever the batch

{versions}

`python -m benchmarks.decode_invariant`: the time of `batch_invariant=True` over the time without it, backend `triton`,
bfloat16, pages of 64, log-normal lengths (one sequence: uniform), S_q 1; means over the head counts, by the keys of a
chunk (`MLA_PLUGIN_BATCH_INVARIANT_CHUNK`). Small chunks keep a small batch parallel; large ones cost less per key.

{invariant}
""",
        lambda record: {"invariant": invariant(record)},
    ),
    Section(
        ("prefill_backends",),
        """\
## Attention backends and the resolver's choice

{versions}

`python -m benchmarks.prefill_backends`: milliseconds of `mla_plugin.attention` through each backend, bfloat16; in bold
what the resolver's table puts first, forward and backward chosen apart. Packed lengths are log-normal.

{training_figure}

{packed_figure}

{choices}
""",
        lambda record: {"choices": choices(record)},
    ),
    Section(
        ("dispatch",),
        """\
## Time on the host

{versions}

`python -m benchmarks.dispatch`: microseconds until a call returns, [1, 512, 16, 192/128] in bfloat16, causal, with the
GPU idle; without a gradient, and with q, k and v that need one. Under a backend's name stands `mla_plugin.attention`.

{dispatch}

Of that, everything up to a backend that does nothing takes {entry_us} us.
""",
        lambda record: {"dispatch": dispatch(record), "entry_us": f"{record['layers']['all of it']:.0f}"},
    ),
    Section(
        ("context_parallel_x2", "context_parallel_x4", "latent_attention_x2"),
        """\
## Context parallelism

{versions}

`torchrun --nproc-per-node N -m benchmarks.context_parallel`: batch 1, causal, 192/128, over NVLink. Time of the slowest
rank over one GPU's time divided by the ranks, so 1.00 is ideal, and GiB at the peak of forward and backward.

{context_parallel_figure}

{cp}

`all_gather` is for windows. The backward of its right-aligned calls ran on our kernels here, and one GPU's on cuDNN.
FlashAttention 3 and 4 take both; with them it was not measured.

`torchrun --nproc-per-node 2 -m benchmarks.latent_attention`: the same for `latent_attention`, expansion included. The
ideal is one GPU's attention on K and V that are there already. `all_gather` makes right-aligned calls here too.

{latent}
""",
        lambda two, four, latent: {"cp": context_parallel(two, four), "latent": latents(latent)},
    ),
    Section(
        ("first_call",),
        """\
## First calls

{versions}

`python -m benchmarks.first_call`: seconds of a new shape's first call with an empty Triton cache, on a host that took
{first_add_us} us for `x.add_(1)`: the compiler's work. In a new process Triton starts too, and at the first
`torch.autograd.grad` PyTorch loads sympy.

{first}
""",
        lambda record: {"first": first_calls(record), "first_add_us": f"{record['add_us']:.1f}"},
    ),
    Section(
        ("decode_preference",),
        """\
## Decode backends and the resolver's choice

{versions}

`python -m benchmarks.decode_backends`: calls through `mla_plugin.decode`, milliseconds, the fastest in bold. The
resolver's table is made of this run (`decode_preference_NVIDIA_H200.json`), so it chooses the fastest in every one of
these calls; no second run has checked it.

{backends}
""",
        lambda record: {"backends": backends(record)},
    ),
    Section(
        ("transformers_decode",),
        """\
## Decoding in Hugging Face transformers

{versions}

`python -m benchmarks.transformers_decode`: {layers} layers with DeepSeek-V3's attention, one
sequence, `generate`, tokens per second, and the peak of memory that `generate` adds.

{transformers_figure}

{transformers}
""",
        lambda record: {
            "transformers": transformers(record),
            "layers": record["model"]["num_hidden_layers"],
        },
    ),
    Section(
        ("vllm_engine",),
        """\
## vLLM's engine

{versions}

`python -m benchmarks.vllm_engine`: DeepSeek-V2-Lite's shape with {layers} layers and {kind}, random weights, CUDA
graphs; tokens per second, in brackets milliseconds of an engine's step and of the graph that it replays. The backends
are vLLM's own and `{ours}`, this library. Requests decode over a cache of random latents.

{vllm_figure}

{decode}

Steps of {queries} query tokens a request, as in speculative decoding. The n-grams of a random model are not accepted,
and are searched on the host; compare the graphs:

{drafted}

Greedy tokens of five prompts of 5 to 8000 tokens, random weights: how many of 48 are equal before the first that
differs, after which the contexts differ too. Every two backends differ like this:

{agreement}
""",
        lambda record: {**engines(record), "ours": vllm_engine.OURS},
    ),
    Section(
        ("flash_padding",),
        """\
## FlashAttention 2 with V padded

{versions}

`python -m benchmarks.flash_padding`: milliseconds, causal: the backend `fa2` as a whole, what of it
are the copies that pad and trim, and our Triton kernels next to it.

{padding}
""",
        lambda record: {"padding": padding(record)},
    ),
)


def render(gpu: str = GPU) -> str:
    """The whole page of a GPU: the sections whose results were kept."""
    parts = [HEAD.format(gpu=gpu.replace("_", " "))]
    for section in SECTIONS:
        if all((RESULTS / f"{name}_{gpu}.json").exists() for name in section.results):
            records = [load(name, gpu) for name in section.results]
            shown = {f"{name}_figure": figure(name, gpu) for name in CAPTIONS}
            parts.append(section.text.format(versions=versions(records[0]), **shown, **section.fields(*records)))
    return "\n".join(parts)


if __name__ == "__main__":
    for gpu, page in PAGES.items():
        page.write_text(render(gpu))
