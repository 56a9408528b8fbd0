"""The tables of docs/benchmarks.md, from the kept results."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import figures, vllm_engine
from benchmarks.context_parallel import WAYS
from benchmarks.decode_invariant import ONE_SPLIT
from benchmarks.measured_calls import attention_choice
from mla_plugin.resolver.attention_measured import BACKENDS

OURS = "mla-plugin"
Record = dict[str, Any]

LIBRARIES = ("flash-attn", "flash-attn-3", "flash-attn-4", "flash-mla", "flashinfer-python", "vllm")
"""Distributions with backends; vLLM's carries FlashAttention 3."""


def versions(record: Record) -> str:
    """What it was measured with."""
    packages = {name: record[name] for name in figures.PACKAGES if name in record}
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
    """Costs of each size of chunk, by batch, mean length and tile of heads; then FlashAttention 3's time over ours."""
    chunks = [name for name in record["rows"][0]["ms"] if name.isdigit()]
    over = [(chunk, "without") for chunk in chunks]
    over += [(ONE_SPLIT, chunk) for chunk in chunks if ONE_SPLIT in record["rows"][0]["ms"]]
    groups: dict[tuple[int, int, str], list[dict[str, float]]] = {}
    for row in record["rows"]:
        if row["S_q"] == 1:
            heads = "8, 16" if row["H"] <= 16 else "24 to 64" if row["H"] <= 64 else "96, 128"
            groups.setdefault((row["B"], row["mean"], heads), []).append(row["ms"])
    found = [
        [
            *map(str, key),
            *(f"{statistics.geometric_mean(ms[a] / ms[b] for ms in cells):.2f}" for a, b in over),
        ]
        for key, cells in groups.items()
    ]
    every = [ms for cells in groups.values() for ms in cells]
    means = [f"{statistics.geometric_mean(ms[a] / ms[b] for ms in every):.2f}" for a, b in over]
    titles = [a if b == "without" else f"FlashAttention 3 over {b}" for a, b in over]
    return markdown(["B", "mean length", "H", *titles], [*found, ["all", "", "", *means]])


def quantised(record: Record) -> str:
    """Times over each format of the cache."""
    formats = [name for name in record["rows"][0]["ms"] if name != "plain"]
    rows = []
    for row in record["rows"]:
        plain = row["ms"]["plain"]
        others = [f"{row['ms'][name] * 1e3:.1f} ({plain / row['ms'][name]:.2f})" for name in formats]
        sizes = [row["lengths"], *(str(row[name]) for name in ("B", "mean", "page", "H"))]
        rows.append([*sizes, f"{plain * 1e3:.1f}", *others])
    names = [f"`{name}`" for name in formats]
    return markdown(["lengths", "B", "mean length", "page", "H", "bfloat16", *names], rows)


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


def absorbed(record: Record) -> str:
    """TFLOP/s with absorbed weights."""
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["tflop_per_s"]))
    rows = [
        [
            f"{row['batch']},{row['heads']},{row['seqlen']}",
            "causal" if row["causal"] else "full",
            *(_number(row["tflop_per_s"], name, ".0f") for name in names),
        ]
        for row in record["rows"]
    ]
    return markdown(["B,H,S", "mask", *names], rows)


def tile_costs(record: Record) -> str:
    """The fitted costs of tiles."""
    rows = [
        [
            *(f"{found['dims'][0]}/{found['dims'][1]}", kind, backend),
            *(f"{fit['slope']:.2f}", f"{fit['intercept']:.1f}", f"{fit['residual']:.0%}"),
        ]
        for found in record["windows"]
        for kind, of_kind in found["fit_us"].items()
        for backend, fit in of_kind.items()
    ]
    return markdown(["head dims", "pass", "backend", "per key tile", "fixed per query tile", "residual"], rows)


def short_calls(record: Record) -> str:
    """Microseconds of short calls, and of their kernels alone in the order in which they begin."""
    rows = [
        [
            f"{row['heads']},{row['seqlen']}",
            f"{row['dims'][0]}/{row['dims'][1]}",
            *(kind, backend, f"{1e3 * row[kind][backend]:.1f}"),
            ", ".join(f"{us:.1f}" for us in kernels.values()),
        ]
        for row in record["short"]
        for kind in ("forward", "backward")
        for backend, kernels in row["kernels_us"][kind].items()
    ]
    return markdown(["H,S", "head dims", "pass", "backend", "call", "its kernels"], rows)


def way_of_prefill(record: Record) -> str:
    """How the calls were timed, and which of our kernels the column of ours is."""
    text = (
        "Calls go through each library's public function, so below 4k tokens they are bound by the host. The column "
        "mla-plugin is our plain kernels in this table; our Hopper kernels are under *Attention backends and the "
        "resolver's choice*."
    )
    if "kernels" in record:
        text = (
            "Each library's public function is captured in a CUDA graph; the graphs run in short bursts, in shuffled "
            f"turns. Ours are the {record['kernels']} kernels. FlexAttention is PyTorch's, compiled, which runs on any "
            "GPU, as our plain kernels do."
        )
    return textwrap.fill(text, 120)


_FASTEST = {"FA4": "FlashAttention 4", "cuDNN": "cuDNN"}


def fastest_backward(record: Record) -> str:
    """The libraries whose faster backward ours is compared with."""
    names = [name for key, name in _FASTEST.items() if key in record["rows"][1]["ms"]]
    return names[0] if len(names) == 1 else f"the faster of {' and '.join(names)}"


def shares(record: Record) -> str:
    """Our speed over the others', of the four large cases."""
    pytorch = [name for name in ("memory-efficient", "FlexAttention") if name in record["rows"][0]["ms"]]
    rows = []
    for forward, backward in zip(record["rows"][0:8:2], record["rows"][1:8:2], strict=True):
        fast, back = forward["ms"], backward["ms"]
        rows.append(
            [
                f"{forward['batch']},{forward['heads']},{forward['seqlen']}",
                "causal" if forward["causal"] else "full",
                *(
                    f"{fast[name] / fast[OURS]:{form}}"
                    for name, form in (("FA3", ".2f"), *((x, ".1f") for x in pytorch))
                ),
                f"{min(back[name] for name in _FASTEST if name in back) / back[OURS]:.2f}",
                *(f"{(fast[name] + back[name]) / (fast[OURS] + back[OURS]):.1f}" for name in pytorch),
            ]
        )
    header = ["B,H,S", "mask", *(f"forward, of {name}" for name in ("FA3", *pytorch)), "backward"]
    return markdown([*header, *(f"both, of {name}" for name in pytorch)], rows)


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
    """Tokens per second of all sequences, over lengths seen before and, where kept, over new ones; added memory."""
    names = list(record["rows"][0]["tokens_per_s"])
    has_first = "ms_per_step_of_first_round" in record["rows"][0]
    rows = []
    for row in record["rows"]:
        cache = "growing" if row["cache"] == "dynamic" else row["cache"]
        cells = [_number(row["tokens_per_s"], name, ".0f") for name in names]
        if has_first:
            first = {name: row["batch"] * 1e3 / ms for name, ms in row["ms_per_step_of_first_round"].items()}
            cells += [_number(first, name, ".0f") for name in names]
        cells += [_number(row["peak_above_start_gib"], name, ".2f") for name in names]
        rows.append([cache, str(row["batch"]), str(row["context"]), *cells])
    columns = ("tokens/s", *(["tokens/s, first time"] if has_first else []), "GiB")
    titles = [f"{name} {column}" for column in columns for name in names]
    return markdown(["cache", "sequences", "context", *titles], rows)


def engines(record: Record) -> dict[str, object]:
    """Tokens per second and milliseconds of a step, how greedy tokens agree, and a step of several query tokens."""
    found = [vllm_engine.named(engine) for engine in record["engines"]]
    drafted = [engine for engine in found if engine["drafts"]]
    plain, quantised = (
        [engine for engine in found if ("+" in engine["backend"]) is has_dtype] for has_dtype in (False, True)
    )
    over = f"Over a cache of the dtype after the `+`:\n\n{vllm_engine.decode_table(quantised, 0)}\n\n"
    return {
        "decode": vllm_engine.decode_table(plain, 0),
        "quantised": over if quantised else "",
        "prefill": _engine_prefill(found),
        "drafted": vllm_engine.decode_table(found, drafted[0]["drafts"]),
        "agreement": "\n".join(
            f"- {line}" for group in (plain, quantised) for line in list(vllm_engine.agreement_lines(group))[1:]
        ),
        "layers": record["model"]["layers"] or 27,
        "kind": "dense MLPs" if record["model"]["dense"] else "a mixture of experts",
        "queries": drafted[0]["drafts"] + 1,
    }


def _engine_prefill(found: list[Record]) -> str:
    """Milliseconds until the first token, by backend and prompt length."""
    timed = [engine for engine in found if engine.get("prefill_ms")]
    lengths = sorted({length for engine in timed for length in engine["prefill_ms"]}, key=int)
    rows = [
        [engine["backend"], *(_number(engine["prefill_ms"], length, ".0f") for length in lengths)] for engine in timed
    ]
    return markdown(["backend", *(f"{length} tokens" for length in lengths)], rows)


def training_steps(record: Record) -> str:
    """Milliseconds of a step and the peak of memory, without us and with us."""
    rows = []
    for workload, found in record["workloads"].items():
        without, ours = found["variants"]["plain"], found["variants"]["fill" if workload == "packed" else "one"]
        cells = [
            f"{each[field]:{form}}"
            for field, form in (("step_ms", ".2f"), ("peak_gib", ".2f"))
            for each in (without, ours)
        ]
        rows.append([f"`{workload}`", *cells])
    return markdown(["workload", "ms without", "ms with", "GiB without", "GiB with"], rows)


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


def warm_calls(record: Record) -> str:
    """Milliseconds of the start of CUDA, and of the first two calls."""
    columns = ("CUDA starts", "first", "second", "first - second")
    digits = (".0f", ".1f", ".1f", ".1f")
    rows = [
        [name, *(_number(ms, column, form) for column, form in zip(columns, digits, strict=True))]
        for name, ms in record["milliseconds"].items()
    ]
    return markdown(["call", "CUDA starts", "first call", "second call", "difference"], rows)


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
        for x in sorted(record["times"], key=lambda x: (x["heads"], x["tokens"], WAYS.index(x["way"])))
    ]
    titles = ["GPUs", "tokens", "heads", "way", "forward", "forward and backward", "GiB a rank", "GiB, one GPU"]
    later = Counter((x["way"], x["commit"]) for record in records for x in record["times"] if "commit" in x)
    notes = [f"{n} of `{way}` at commit {commit[:10]}" for (way, commit), n in later.items()]
    table = markdown(titles, rows)
    text = f"Measured later, beside times of one GPU of their own: {', '.join(notes)}."
    return "\n\n".join([table, text]) if notes else table


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
    return "\n\n".join([table, textwrap.fill(f"{'; '.join(notes)}.", 120)]) if notes else table
