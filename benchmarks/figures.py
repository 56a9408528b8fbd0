"""The figures of README.md and docs/, drawn from the kept results, for light and for dark pages.

    python -m benchmarks.figures            writes docs/figures/*.svg; needs matplotlib

Each names its GPU, versions and commit, and keeps a hash of its results, by which a test sees that it is current.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import vllm_engine_model
from benchmarks.measured_calls import attention_choice, decode_choice
from benchmarks.prefill_cases import Case, lengths_of

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
GPU = "NVIDIA_H200"
GPUS = (GPU, "NVIDIA_H100_80GB_HBM3")
DATA_SHEET = {
    "NVIDIA_H200": {"product_tflop_per_s": 989, "read_gb_per_s": 4800},
    "NVIDIA_H100_80GB_HBM3": {"product_tflop_per_s": 989, "read_gb_per_s": 3350},
}
"""Dense bfloat16 products, and memory, by NVIDIA: the ceiling of a GPU whose own ``ceilings`` were not measured."""

OURS, KERNELS = "mla-plugin", "mla-plugin's Triton kernels"
NAMES = {
    "triton": KERNELS,
    "fa2": "FlashAttention 2, V padded",
    "fa3": "FlashAttention 3",
    "fa4": "FlashAttention 4",
    "cudnn": "cuDNN",
    "sdpa": "PyTorch, memory-efficient",
    "flashmla": "FlashMLA",
    "flashinfer": "FlashInfer",
}
"""Backend to what people know it as."""
VLLM_NAMES = {
    "CUSTOM": OURS,
    "TRITON_MLA": "vLLM's Triton kernel",
    "FLASHMLA": "FlashMLA",
    "FLASH_ATTN_MLA": "FlashAttention 3",
}
"""vLLM's names."""
COLORS = {
    OURS: "#e4572e",
    KERNELS: "#f2a65a",
    "FlashAttention 2, V padded": "#8a8f98",
    "FlashAttention 3": "#3b82c4",
    "FlashAttention 4": "#7a5cc4",
    "cuDNN": "#4ba35b",
    "PyTorch, memory-efficient": "#b08968",
    "FlashMLA": "#1f9e9e",
    "FlashInfer": "#c2508f",
    "vLLM's Triton kernel": "#8a8f98",
    "mla_plugin": "#e4572e",
    "sdpa": "#3b82c4",
    "eager": "#8a8f98",
    "p2p": "#3b82c4",
    "all_gather": "#4ba35b",
    "a2a": "#7a5cc4",
}
PACKAGES = ("vllm", "transformer_engine", "torch", "triton", "transformers")
"""Whose versions stand below figures and above tables, where the results have them."""
GREY = "#8a8f98"
INK = {"light": "#24292f", "dark": "#d7dce2"}

Record = dict[str, Any]
Curves = dict[str, list[tuple[float, float]]]


class Ceiling(NamedTuple):
    """The most that a GPU reaches.

    Attributes:
        value: in the unit of the axis; infinite where it is not known, and then not drawn.
        what: it reaches it in, such as a matrix product.
        source: ``measured`` or ``data sheet``.
    """

    value: float
    what: str
    source: str


@dataclass(frozen=True)
class Figure:
    """A picture of kept results.

    Attributes:
        results: names in ``benchmarks/results/`` without GPU and suffix.
        draw: gets the records and one axis a panel.
        panels: how many stand side by side.
    """

    results: tuple[str, ...]
    draw: Callable[..., None]
    panels: int = 2


def paths(figure: Figure, gpu: str = GPU) -> list[Path]:
    """The results that the figure shows."""
    return [RESULTS / f"{name}_{gpu}.json" for name in figure.results]


def digest(figure: Figure, gpu: str = GPU) -> str:
    """A hash of what the figure shows."""
    shown = [*paths(figure, gpu), *filter(Path.exists, [RESULTS / f"ceilings_{gpu}.json"])]
    return hashlib.sha256(b"".join(path.read_bytes() for path in shown)).hexdigest()[:16]


def file_name(name: str, gpu: str = GPU) -> str:
    """Without the theme; figures of other GPUs than the first say which."""
    return name if gpu == GPU else f"{name}_{gpu}"


def drawable(gpu: str = GPU) -> list[str]:
    """Figures whose results were kept for a GPU; the first page's is of the first GPU alone."""
    return [
        name
        for name, figure in FIGURES_BY_NAME.items()
        if all(path.exists() for path in paths(figure, gpu)) and (gpu == GPU or name != "first_page")
    ]


def _lines(axis: Any, curves: Curves, unit: str, of: str, title: str, limit: Ceiling | None = None) -> None:
    for name, points in curves.items():
        is_ours = name in (OURS, "mla_plugin")
        style = {"linewidth": 3.0, "zorder": 3, "markersize": 6} if is_ours else {"linewidth": 1.5, "markersize": 4}
        axis.plot(*zip(*sorted(points), strict=True), "o-", label=name, color=COLORS[name], **style)
    if limit is not None:
        _draw_ceiling(axis, limit, unit)
    ticks = sorted({x for points in curves.values() for x, _ in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [_short(x) for x in ticks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel(of)
    axis.set_ylabel(unit)
    axis.set_title(title, fontsize=10.5)


def _draw_ceiling(axis: Any, limit: Ceiling, unit: str) -> None:
    if math.isinf(limit.value):
        return
    axis.axhline(limit.value, linestyle=":", linewidth=1.2, color=GREY)
    label = f"{limit.what}, {limit.source}: {limit.value:,.0f} {unit.split(' of ')[0]}"
    axis.annotate(label, (0.02, limit.value), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)


def ceiling(record: Record, which: str) -> Ceiling:
    """``product_tflop_per_s`` or ``read_gb_per_s`` of the record's GPU, measured or by its data sheet."""
    gpu = record["gpu"].replace(" ", "_")
    path = RESULTS / f"ceilings_{gpu}.json"
    measured = json.loads(path.read_text()) if path.exists() else {}
    what = {"product_tflop_per_s": "matrix product", "read_gb_per_s": "reading memory"}[which]
    if which in measured:
        return Ceiling(measured[which], what, "measured")
    return Ceiling(DATA_SHEET.get(gpu, {}).get(which, math.inf), what, "data sheet")


def _bars(axis: Any, groups: dict[str, dict[str, float]], unit: str, title: str) -> None:
    """Groups of bars side by side; a name has its colour in all of them."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [(place, bars[name]) for place, bars in enumerate(groups.values()) if name in bars]
        left = [place - 0.4 + (i + 0.5) * width for place, _ in places]
        axis.bar(left, [height for _, height in places], width, label=name, color=COLORS[name])
    axis.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axis.set_ylabel(unit)
    axis.set_title(title, fontsize=10.5)


def _short(number: float) -> str:
    return f"{number / 1024:g}k" if number >= 1024 else f"{number:g}"


def _operations(row: Record, which: str) -> float:
    """TFLOP of a call: 2 products forward, 5 backward; of a causal mask half of them."""
    dim_qk, dim_v = row["dims"]
    dims = {"forward": dim_qk + dim_v, "backward": 3 * dim_qk + 2 * dim_v}[which]
    case = Case(**{name: row[name] for name in Case._fields})
    lengths = lengths_of(case) if case.packed else [case.seqlen] * case.batch
    pairs = case.heads * sum(length**2 for length in lengths)
    return 2 * pairs * dims * (0.5 if row["mask"] == "causal" else 1.0) / 1e12


def _prefill_rows(record: Record, **wanted: Any) -> list[Record]:
    fixed = {"dims": [192, 128], "packed": False, "deterministic": False, **wanted}
    return [row for row in record["rows"] if all(row[name] == value for name, value in fixed.items())]


def _passes(record: Record, row: Record, which: str) -> dict[str, float]:
    """Milliseconds of each backend's pass and, first, of the pass that mla-plugin chooses."""
    choice = attention_choice(row, record["gpu"], which)
    return {OURS: row[which][choice], **{NAMES[name]: ms for name, ms in row[which].items()}}


def _training(record: Record, axes: Iterable[Any]) -> None:
    for axis, which in zip(axes, ("forward", "backward"), strict=True):
        curves: Curves = {}
        for row in _prefill_rows(record, heads=16, batch=1, mask="causal"):
            for name, ms in _passes(record, row, which).items():
                curves.setdefault(name, []).append((row["seqlen"], _operations(row, which) / (ms / 1e3)))
        title = f"{which.capitalize()}: one causal sequence, 16 heads, 192/128"
        _lines(axis, curves, "TFLOP/s", "tokens", title, ceiling(record, "product_tflop_per_s"))


def _packed(record: Record, axes: Iterable[Any]) -> None:
    rows = [row for row in _prefill_rows(record, packed=True, mask="causal") if row["heads"] in (16, 128)]
    for axis, which in zip(axes, ("forward", "backward"), strict=True):
        groups = {}
        for row in rows:
            name = f"{row['heads']} heads\n{row['batch']} x {row['seqlen']:,}"
            work = _operations(row, which)
            groups[name] = {each: work / (ms / 1e3) for each, ms in _passes(record, row, which).items()}
        _draw_ceiling(axis, ceiling(record, "product_tflop_per_s"), "TFLOP/s")
        _bars(axis, groups, "TFLOP/s", f"{which.capitalize()}: packed causal sequences, 192/128")


def _decode(record: Record, axes: Iterable[Any]) -> None:
    for axis, lengths in zip(axes, ("uniform", "ragged"), strict=True):
        _decode_panel(axis, record, lengths, heads=16)


def _decode_of_many_heads(record: Record, axes: Iterable[Any]) -> None:
    for axis, lengths in zip(axes, ("uniform", "ragged"), strict=True):
        _decode_panel(axis, record, lengths, heads=128)


def _decode_panel(axis: Any, record: Record, lengths: str, heads: int) -> None:
    """The rate at which the cache is read: 576 numbers of 2 bytes a token, with 576 + 512 products for each head."""
    curves: Curves = {}
    for row in record["rows"]:
        if (row["lengths"], row["H"], row["S_q"], row["page"], row["mean"]) != (lengths, heads, 1, 64, 6144):
            continue
        gigabytes = row["B"] * row["mean"] * 576 * 2 / 1e9
        chosen = row["ms"][decode_choice(row, record["gpu"])]
        for name, ms in {OURS: chosen, **{NAMES[n]: ms for n, ms in row["ms"].items()}}.items():
            curves.setdefault(name, []).append((row["B"], gigabytes / (ms / 1e3)))
    memory, products = ceiling(record, "read_gb_per_s"), ceiling(record, "product_tflop_per_s")
    of_products = Ceiling(products.value * 1e3 * 576 * 2 / (2 * heads * (576 + 512)), *products[1:])
    title = f"Decode: {lengths} lengths, 6k tokens each in the mean, {heads} heads"
    _lines(axis, curves, "GB/s of latent cache", "sequences", title, min(memory, of_products))


def _first_page(prefill: Record, decode: Record, axes: Iterable[Any]) -> None:
    """Training as a whole, and decode as servers do it."""
    training, decoding = axes
    curves: Curves = {}
    for row in _prefill_rows(prefill, heads=16, batch=1, mask="causal"):
        both = _operations(row, "forward") + _operations(row, "backward")
        forward, backward = (_passes(prefill, row, which) for which in ("forward", "backward"))
        for name in forward.keys() & backward.keys():
            curves.setdefault(name, []).append((row["seqlen"], both / ((forward[name] + backward[name]) / 1e3)))
    order = [OURS, *NAMES.values()]
    curves = {name: curves[name] for name in order if name in curves}
    title = "Training: forward and backward, causal, 16 heads, 192/128"
    _lines(training, curves, "TFLOP/s", "tokens", title, ceiling(prefill, "product_tflop_per_s"))
    _decode_panel(decoding, decode, "ragged", heads=16)


def _transformers(record: Record, axes: Iterable[Any]) -> None:
    units = {
        "tokens_per_s": ("tokens/s", "Generating, one sequence"),
        "peak_above_start_gib": ("GiB", "Memory that generating adds"),
    }
    for axis, (field, (unit, title)) in zip(axes, units.items(), strict=True):
        curves: Curves = {}
        for row in _growing_alone(record):
            for name, value in row[field].items():
                curves.setdefault(name, []).append((row["context"], value))
        _lines(axis, curves, unit, "tokens of context", title)
        of_longest = _hugging_face_ceiling(record, max(row["context"] for row in _growing_alone(record)))
        if field == "tokens_per_s" and math.isfinite(of_longest.value):
            # far above the curves, because the host bounds a step of few layers: words instead of a line
            label = f"reading weights and the longest cache ({of_longest.source}): {of_longest.value:,.0f} {unit}"
            axis.annotate(label, (0.02, 0.02), xycoords="axes fraction", fontsize=8)


def _growing_alone(record: Record) -> list[Record]:
    """The rows of one sequence over a growing cache."""
    return [row for row in record["rows"] if (row["cache"], row["batch"]) == ("dynamic", 1)]


def _hugging_face_ceiling(record: Record, context: int) -> Ceiling:
    """Tokens per second of one sequence if a step read its weights and the latent cache, and nothing else."""
    model, memory = record["model"], ceiling(record, "read_gb_per_s")
    latent = 2 * (model["kv_lora_rank"] + model["qk_rope_head_dim"]) * model["num_hidden_layers"]
    return Ceiling(memory.value * 1e9 / (record["weight_bytes"] + context * latent), *memory[1:])


def _vllm(record: Record, axes: Iterable[Any]) -> None:
    memory, model = ceiling(record, "read_gb_per_s"), record["model"]
    config = vllm_engine_model.config(model["layers"], model["dense"], model["tiny"])
    engines = [engine for engine in record["engines"] if not engine["drafts"] and "+" not in engine["backend"]]
    contexts = sorted({cell["context"] for engine in engines for cell in engine["decode"]})[-2:]
    for axis, context in zip(axes, contexts, strict=True):
        groups: dict[str, dict[str, float]] = {}
        limits: dict[str, float] = {}
        for engine in engines:
            name = VLLM_NAMES.get(engine["backend"], engine["backend"])
            for cell in engine["decode"]:
                if cell["context"] == context:
                    group, read = f"batch {cell['batch']}", vllm_engine_model.step_bytes(config, cell["batch"], context)
                    groups.setdefault(group, {})[name] = cell["tokens_per_s"] / cell["batch"]
                    limits[group] = memory.value * 1e9 / read
        _bars(axis, groups, "tokens/s of a request", f"vLLM, {context // 1024}k tokens of context")
        if math.isfinite(memory.value):
            label = f"reading weights and cache ({memory.source})"
            axis.hlines(list(limits.values()), *_ends(len(limits)), linestyles=":", colors=GREY, label=label)


def _ends(groups: int) -> tuple[list[float], list[float]]:
    """Left and right of each group of bars."""
    return [group - 0.45 for group in range(groups)], [group + 0.45 for group in range(groups)]


def _context_parallel(two: Record, four: Record, axes: Iterable[Any]) -> None:
    for axis, record in zip(axes, (two, four), strict=True):
        groups: dict[str, dict[str, float]] = {}
        for row in sorted(record["times"], key=lambda row: (row["heads"], row["tokens"])):
            name = f"{row['tokens'] // 1024}k tokens\n{row['heads']} heads"
            groups.setdefault(name, {})[row["way"]] = 1 / row["both_over_ideal"]
        axis.axhline(1.0, linestyle=":", linewidth=1.2, color=GREY)
        title = f"Forward and backward over {record['ranks']} GPUs, 1 = perfect scaling"
        _bars(axis, groups, "speedup / number of GPUs", title)


FIGURES_BY_NAME = {
    "first_page": Figure(("prefill_backends", "decode_preference"), _first_page),
    "training": Figure(("prefill_backends",), _training),
    "packed": Figure(("prefill_backends",), _packed),
    "decode": Figure(("decode_preference",), _decode),
    "decode_128_heads": Figure(("decode_preference",), _decode_of_many_heads),
    "transformers": Figure(("transformers_decode",), _transformers),
    "vllm": Figure(("vllm_engine",), _vllm),
    "context_parallel": Figure(("context_parallel_x2", "context_parallel_x4"), _context_parallel),
}


def versions(records: Iterable[Record]) -> str:
    """What was measured with what, a line a record."""
    lines = []
    for record in records:
        packages = [f"{name} {record[name]}" for name in PACKAGES if name in record]
        lines.append(f"{record['gpu']}, {', '.join(packages)}, commit {record['commit'][:10]}")
    return "; ".join(dict.fromkeys(lines))


def draw(name: str, theme: str, gpu: str = GPU, folder: Path = FIGURES) -> Path:
    """Write one figure for light or dark pages."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure = FIGURES_BY_NAME[name]
    records = [json.loads(path.read_text()) for path in paths(figure, gpu)]
    ink = INK[theme]
    style = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.25,
        "grid.color": ink,
        "axes.facecolor": "none",
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9,
    }
    with pyplot.rc_context(style):
        canvas, axes = pyplot.subplots(1, figure.panels, figsize=(11, 4.4))
        figure.draw(*records, axes)
        handles: dict[str, Any] = {}
        for axis in axes:
            handles.update({label: line for line, label in zip(*axis.get_legend_handles_labels(), strict=True)})
        canvas.tight_layout(rect=(0, 0.13, 1, 1))
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.035), "frameon": False, "fontsize": 8.5}
        canvas.legend(list(handles.values()), list(handles), ncols=min(len(handles), 5), **place)
        canvas.text(0.5, 0.01, versions(records), ha="center", fontsize=7, alpha=0.75)
        path = folder / f"{file_name(name, gpu)}_{theme}.svg"
        canvas.savefig(path, transparent=True, metadata={"Date": None, "Source": f"results {digest(figure, gpu)}"})
        pyplot.close(canvas)
    return path


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    for gpu in GPUS:
        for each in drawable(gpu):
            for shade in INK:
                print(draw(each, shade, gpu))
