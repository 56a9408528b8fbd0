"""A picture of a decode result: how fast each library reads the cache, or computes, against the batch.

python -m benchmarks.decode_plot
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PANELS = ((16, "gb_per_s", "GB/s of cache read"), (128, "tflop_per_s", "TFLOP/s"))
"""Heads, and what limits them: memory, or products."""


def plot(result: Path) -> Path:
    """Draw the rows of one query token, pages of 64 and a mean of 6k keys; returns the path of the PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    record: dict[str, Any] = json.loads(result.read_text())
    rows = [row for row in record["rows"] if row["S_q"] == 1 and row["page"] == 64 and 6000 < row["mean"] < 6300]
    names = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    colors = dict(zip(names, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.4), sharex=True, sharey="row")
    for line, (heads, rate, unit) in zip(axes, PANELS, strict=True):
        for axis, lengths in zip(line, ("uniform", "ragged"), strict=True):
            here = sorted((r for r in rows if (r["lengths"], r["H"]) == (lengths, heads)), key=lambda row: row["B"])
            for name in names:
                points = [(r["B"], r[rate][name]) for r in here if name in r["ms"]]
                if points:
                    width = 2.6 if name == names[0] else 1.3
                    axis.plot(*zip(*points, strict=True), "o-", label=name, linewidth=width, color=colors[name])
            axis.set_title(f"{heads} heads, {lengths} lengths, mean 6,144")
            axis.set_xscale("log", base=2)
            axis.set_xticks(batches := [row["B"] for row in here], [str(batch) for batch in batches])
            axis.minorticks_off()
            axis.set_xlabel("sequences")
            axis.set_ylabel(unit)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
    versions = f"torch {record['torch']}, triton {record['triton']}, commit {record['commit'][:10]}"
    figure.suptitle(f"{record['gpu']}, {versions}", fontsize=9)
    figure.tight_layout()
    path = result.with_suffix(".png")
    figure.savefig(path, dpi=130)
    return path


if __name__ == "__main__":
    for kept in sorted((Path(__file__).parent / "results").glob("decode_NVIDIA_*.json")):
        print(plot(kept))
