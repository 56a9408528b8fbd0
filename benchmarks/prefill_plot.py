"""A picture of a prefill result: throughput against sequence length, forward and backward, one curve a library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def plot(result: Path) -> Path:
    """Draw the causal single-sequence rows with the fewest heads; returns the PNG's path, beside the result."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    record: dict[str, Any] = json.loads(result.read_text())
    rows = [row for row in record["rows"] if row["causal"]]
    heads = min(row["heads"] for row in rows)
    rows = sorted((row for row in rows if row["heads"] == heads), key=lambda row: row["seqlen"])
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    names = list(dict.fromkeys(name for row in rows for name in row["tflop_per_s"]))
    colors = dict(zip(names, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for axis, which in zip(axes, ("forward", "backward"), strict=True):
        for name in names:
            points = [(r["seqlen"], r["tflop_per_s"][name]) for r in rows if r["pass"] == which and name in r["ms"]]
            if points:
                width = 2.6 if name == names[0] else 1.3
                axis.plot(*zip(*points, strict=True), "o-", label=name, linewidth=width, color=colors[name])
        axis.set_title(f"{which}, causal, 1 sequence, {heads} heads, 192/128, bfloat16")
        axis.set_xscale("log", base=2)
        axis.set_xticks([row["seqlen"] for row in rows], [str(row["seqlen"]) for row in rows])
        axis.minorticks_off()
        axis.set_xlabel("tokens")
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    versions = f"torch {record['torch']}, triton {record['triton']}, commit {record['commit'][:10]}"
    figure.suptitle(f"{record['gpu']}, {versions}", fontsize=9)
    figure.tight_layout()
    path = result.with_suffix(".png")
    figure.savefig(path, dpi=130)
    return path
