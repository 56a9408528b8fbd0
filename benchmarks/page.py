"""Writes docs/benchmarks.md from the kept results; a test holds the page to them.

python -m benchmarks.page
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
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

Written by `python -m benchmarks.page` from `benchmarks/results/`; do not edit. The libraries of a table ran in turns in
one process. A library is timed only if its error against float64 is at most twice that of plain PyTorch in the same
dtype. Times vary by some percent from run to run: compare figures within a table, not between tables. GPU, versions and
commit stand above each table.
"""


def load(name: str, gpu: str = GPU) -> Record:
    """A kept result."""
    record: Record = json.loads((RESULTS / f"{name}_{gpu}.json").read_text())
    return record


LIBRARIES = ("flash-attn", "flash-attn-3", "flash-attn-4", "flash-mla", "flashinfer-python", "vllm")
"""Distributions with backends; vLLM's carries FlashAttention 3."""


def versions(record: Record) -> str:
    """What it was measured with."""
    packages = {name: record[name] for name in ("vllm", "torch", "triton", "transformers") if name in record}
    packages |= {name: found for name, found in record.get("packages", {}).items() if name in LIBRARIES}
    named = ", ".join(f"{name} {found}" for name, found in packages.items())
    return f"{record['gpu']}, {named}, commit {record['commit'][:10]}."


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
    """A figure in both themes; GitHub and the site show the one that fits the reader's. Empty without its results."""
    if name not in figures.drawable(gpu):
        return ""
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
    again = Counter(given for row in record["rows"] for given in row.get("again", {}).items())
    notes = [f"{what} measured again at commit {commit[:10]} ({n} calls)" for (what, commit), n in again.items()]
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
        more: names of further results, whose records follow where they were kept.
    """

    results: tuple[str, ...]
    text: str
    fields: Callable[..., dict[str, str]]
    more: tuple[str, ...] = ()


SECTIONS = (
    Section(
        ("prefill",),
        """\
## Prefill and training

{versions}

`python -m benchmarks.prefill`: TFLOP/s in bfloat16, head_dim_qk 192, head_dim_v 128. A forward counts as
2 B H S^2 x 320 operations and a backward as 2 B H S^2 x 832, half of that under a causal mask. Calls go through each
library's public function, so below 4k tokens they are bound by the host. The column mla-plugin is our plain kernels in
this table; our Hopper kernels are under *Attention backends and the resolver's choice*.

{prefill}

The same as ratios, our speed over that of another library: the forward over FlashAttention 3's and over that of
PyTorch's memory-efficient kernel; the backward over the faster of FlashAttention 4 and cuDNN; both passes over the
memory-efficient kernel.

{shares}
""",
        lambda record: {"prefill": prefill(record), "shares": shares(record)},
    ),
    Section(
        ("decode",),
        """\
## Decode kernels

{versions}

`python -m benchmarks.decode`: milliseconds of a call in a CUDA graph of a step's layers, over a paged compressed
cache (kv_lora_rank 512, rope 64) in bfloat16. `ragged` lengths are log-normal with sigma 0.6, `one_long` is one
sequence of 32k among shorter ones, and `thundermla` is the call that ThunderMLA's authors report. Every library uses
its own scheduler; the time of scheduling once per step is included. "host us" is the host time of our call outside of
a graph. The table is older than our Hopper kernel for many heads: for that see the figures, which are of the current
kernels, and *Decode backends and the resolver's choice*.

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

`python -m benchmarks.decode_invariant`: the time with `batch_invariant=True` divided by the time without it, on
backend `triton` in bfloat16, with pages of 64, log-normal lengths (for one sequence uniform) and one query token. A
column is a chunk size in keys (`MLA_PLUGIN_BATCH_INVARIANT_CHUNK`), a row the geometric mean over its head counts.
Small chunks keep a small batch parallel; large chunks cost less per key.

{invariant}
""",
        lambda record: {"invariant": invariant(record)},
    ),
    Section(
        ("prefill_backends",),
        """\
## Attention backends and the resolver's choice

{versions}

`python -m benchmarks.prefill_backends`: milliseconds of each backend's forward and backward in bfloat16, from CUDA
graphs, so without time on the host. The resolver's choice is in bold; forward and backward are chosen separately.
Packed lengths are log-normal.

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

`python -m benchmarks.dispatch`: microseconds until a call returns, [1, 512, 16, 192/128] in bfloat16, causal, with
the GPU idle; without gradients, and with q, k and v that require them. A row with a backend's name is
`mla_plugin.attention` on that backend.

{dispatch}

Of that, everything up to a backend that does nothing takes {entry_us} us.
""",
        lambda record: {"dispatch": dispatch(record), "entry_us": f"{record['layers']['all of it']:.0f}"},
    ),
    Section(
        ("context_parallel_x2",),
        """\
## Context parallelism

{versions}

`torchrun --nproc-per-node N -m benchmarks.context_parallel`: batch 1, causal, 192/128, over NVLink. Times are those
of the slowest rank, divided by the ideal: one GPU's time over the number of ranks. Memory is the peak of forward and
backward in GiB.

{context_parallel_figure}

{cp}

Use `all_gather` for windows.
""",
        lambda *records: {"cp": context_parallel(*records)},
        more=("context_parallel_x4",),
    ),
    Section(
        ("latent_attention_x2",),
        """## Latents over several GPUs

{versions}

`torchrun --nproc-per-node 2 -m benchmarks.latent_attention`: the same for `latent_attention`, with the expansion. The
ideal is one GPU's attention on K and V that are already expanded.

{latent}
""",
        lambda record: {"latent": latents(record)},
    ),
    Section(
        ("first_call",),
        """\
## First calls

{versions}

`python -m benchmarks.first_call`: seconds of a new shape's first call with an empty Triton cache, which is mostly
compile time, on a host that took {first_add_us} us for `x.add_(1)`. In a new process Triton has to start too, and the
first `torch.autograd.grad` imports sympy.

{first}
""",
        lambda record: {"first": first_calls(record), "first_add_us": f"{record['add_us']:.1f}"},
    ),
    Section(
        ("decode_preference",),
        """\
## Decode backends and the resolver's choice

{versions}

`python -m benchmarks.decode_backends`: milliseconds of `mla_plugin.decode` on each backend, the fastest in bold. The
resolver's table is made from this run (`decode_preference_NVIDIA_H200.json`), so the resolver chooses the fastest for
every one of these calls. That was not checked in a second run.

{backends}
""",
        lambda record: {"backends": backends(record)},
    ),
    Section(
        ("transformers_decode",),
        """\
## Decoding in Hugging Face transformers

{versions}

`python -m benchmarks.transformers_decode`: tokens per second of `generate` with one sequence
and {layers} layers of DeepSeek-V3's attention, and the peak memory that `generate` adds.

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

`python -m benchmarks.vllm_engine`: tokens per second, and in brackets the milliseconds of an engine step and of the
CUDA graph that it replays. The model has DeepSeek-V2-Lite's shape with {layers} layers and {kind}, and random
weights. The backends are vLLM's own and `{ours}`, this library. Requests decode over a cache of random latents.

{vllm_figure}

{decode}

Steps of {queries} query tokens per request, as in speculative decoding. With random weights no drafted n-gram is
accepted, and the search for n-grams takes host time; compare the times of the graphs:

{drafted}

Greedy decoding of five prompts of 5 to 8000 tokens with random weights: how many of 48 tokens are equal before the
first that differs. After that the contexts differ too. Any two backends differ to this extent:

{agreement}
""",
        lambda record: {**engines(record), "ours": vllm_engine.OURS},
    ),
    Section(
        ("flash_padding",),
        """\
## FlashAttention 2 with V padded

{versions}

`python -m benchmarks.flash_padding`: milliseconds of causal calls: the backend `fa2` as a whole, its copies that
pad and trim, and our Triton kernels.

{padding}
""",
        lambda record: {"padding": padding(record)},
    ),
)


def render(gpu: str = GPU) -> str:
    """The whole page of a GPU: the sections whose results were kept."""
    parts = [HEAD.format(gpu=gpu.replace("_", " "))]
    for section in SECTIONS:
        kept = [name for name in (*section.results, *section.more) if (RESULTS / f"{name}_{gpu}.json").exists()]
        if set(section.results) <= set(kept):
            records = [load(name, gpu) for name in kept]
            shown = {f"{name}_figure": figure(name, gpu) for name in CAPTIONS}
            parts.append(section.text.format(versions=versions(records[0]), **shown, **section.fields(*records)))
    return "\n".join(parts)


if __name__ == "__main__":
    for gpu, page in PAGES.items():
        page.write_text(render(gpu))
