"""Writes docs/benchmarks.md and benchmarks_h100.md from the kept results; a test holds the pages to them.

python -m benchmarks.page
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import figures
from benchmarks import page_tables as tables
from benchmarks.page_sections import SECTIONS
from benchmarks.page_tables import Record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPU = figures.GPU
PAGES = {
    GPU: ROOT / "docs" / "benchmarks.md",
    "NVIDIA_H100_80GB_HBM3": ROOT / "docs" / "benchmarks_h100.md",
}
"""What is kept, and where it is shown."""
CAPTIONS = {
    "training": "Throughput of forward and backward against the length, by library",
    "packed": "Throughput of forward and backward on packed sequences, by library",
    "decode": "Rate at which the latent cache is read against the batch, 16 heads",
    "decode_128_heads": "Rate at which the latent cache is read against the batch, 128 heads",
    "context_parallel": "Speedup over several GPUs",
    "transformers": "Tokens per second and memory in Hugging Face transformers",
    "vllm": "Tokens per second of vLLM's engine, by decode backend",
}
"""What each figure shows, for those who do not see it."""

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


def figure(name: str, gpu: str = GPU) -> str:
    """A figure in both themes; GitHub and the site show the one that fits the reader's. Empty without its results."""
    if name not in figures.drawable(gpu):
        return ""
    words, file = CAPTIONS[name], figures.file_name(name, gpu)
    return "\n".join(f"![{words}](figures/{file}_{theme}.svg#gh-{theme}-mode-only)" for theme in figures.INK)


def render(gpu: str = GPU) -> str:
    """The whole page of a GPU: the sections whose results were kept."""
    parts = [HEAD.format(gpu=gpu.replace("_", " "))]
    for section in SECTIONS:
        kept = [name for name in (*section.results, *section.more) if (RESULTS / f"{name}_{gpu}.json").exists()]
        if set(section.results) <= set(kept):
            records = [load(name, gpu) for name in kept]
            shown = {f"{name}_figure": figure(name, gpu) for name in CAPTIONS}
            parts.append(section.text.format(versions=tables.versions(records[0]), **shown, **section.fields(*records)))
    return "\n".join(parts)


if __name__ == "__main__":
    for gpu, page in PAGES.items():
        page.write_text(render(gpu))
