"""Measure everything on this machine's GPUs and write one page of it.

    python -m benchmarks.report                   runs every benchmark, then writes the page
    python -m benchmarks.report --only decode     these alone
    python -m benchmarks.report --draw            measures nothing: writes the page of what was kept

Each benchmark keeps its JSON in benchmarks/results/. The page, benchmarks/results/report_<gpu>.html, holds tables and
figures, and needs no other file. It takes about half an hour and needs ``pip install "mla-plugin[bench]"``. A benchmark
that fails is named at the end, and the exit status is then 1. Those of vLLM, TransformerEngine and transformers are
run where these are installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import figures, page

TRAINING = "transformer_engine"
RUNS: dict[str, tuple[str, ...]] = {
    "ceilings": ("-m", "benchmarks.ceilings"),
    "prefill": ("-m", "benchmarks.prefill"),
    "prefill_backends": ("-m", "benchmarks.prefill_backends"),
    "decode": ("-m", "benchmarks.decode"),
    "decode_preference": ("-m", "benchmarks.decode_backends", "--name", "decode_preference"),
    "transformers_decode": ("-m", "benchmarks.transformers_decode"),
    "dispatch": ("-m", "benchmarks.dispatch"),
    "first_call": ("-m", "benchmarks.first_call"),
    "warm_call": ("-m", "benchmarks.warm_call"),
    "flash_padding": ("-m", "benchmarks.flash_padding"),
    "vllm_engine": ("-m", "benchmarks.vllm_engine"),
    TRAINING: ("-m", "benchmarks.transformer_engine_training", "--json", "{path}"),
}
"""Name of the result to the program that keeps it, in ``{path}`` if it must be told."""
NEEDED = {"transformers_decode": "transformers", "vllm_engine": "vllm", TRAINING: "transformer_engine"}
"""Hosts that a benchmark runs: without them it is not run."""
OVER_RANKS: dict[str, str] = {
    "context_parallel": "benchmarks.context_parallel",
    "latent_attention": "benchmarks.latent_attention",
}
"""These run once for 2 GPUs and once for 4, where there are as many."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 13px; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }
svg { max-width: 100%; height: auto; }
.dark { display: none; }
@media (prefers-color-scheme: dark) { .dark { display: block; } .light { display: none; } }
"""
_IMAGE = re.compile(r'<img alt="[^"]*" src="figures/(?P<file>[^"#]+?_(?P<theme>light|dark)\.svg)#[^"]*" ?/?>')


def missing(name: str) -> str | None:
    """The host that a benchmark needs, where it is not installed."""
    host = NEEDED.get(name)
    return host if host is not None and importlib.util.find_spec(host) is None else None


def commands(gpus: int, gpu: str, only: Sequence[str] = ()) -> dict[str, list[str]]:
    """What is run, by a name for the reader."""
    found = {
        name: [sys.executable, *(word.format(path=figures.RESULTS / f"{name}_{gpu}.json") for word in program)]
        for name, program in RUNS.items()
    }
    for name, module in OVER_RANKS.items():
        for ranks in (2, 4):
            if ranks <= gpus:
                launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
                found[f"{name}_x{ranks}"] = [*launcher, "-m", module]
    return {name: command for name, command in found.items() if not only or name in only}


def measure(todo: dict[str, list[str]]) -> list[str]:
    """Run each; the names of those that failed."""
    failed = []
    for done, (name, command) in enumerate(todo.items()):
        print(f"[{'#' * done}{'.' * (len(todo) - done)}] {done}/{len(todo)}  {name} ...", flush=True)
        if host := missing(name):
            print(f"    not run: {host} is not installed", flush=True)
            continue
        start = time.perf_counter()
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            failed.append(name)
            print(f"    failed:\n{run.stderr[-2000:]}", flush=True)
        print(f"    {time.perf_counter() - start:.0f} s", flush=True)
    return failed


def digest(gpu: str) -> str:
    """A hash of what the page says."""
    return hashlib.sha256(page.render(gpu).encode()).hexdigest()[:16]


def report_path(gpu: str) -> Path:
    """Where the page is kept."""
    return figures.RESULTS / f"report_{gpu}.html"


def html(gpu: str) -> str:
    """The whole page of what was kept for a GPU, with its figures inside."""
    import markdown

    body = markdown.markdown(page.render(gpu), extensions=["tables"])
    with tempfile.TemporaryDirectory() as folder:
        drawn = {}
        for name in figures.drawable(gpu):
            for theme in figures.INK:
                path = figures.draw(name, theme, gpu, Path(folder))
                drawn[path.name] = path.read_text()

    def inline(image: re.Match[str]) -> str:
        svg = drawn.get(image["file"], "")
        return f'<div class="{image["theme"]}">{svg[svg.find("<svg") :]}</div>' if svg else ""

    body = _IMAGE.sub(inline, body)
    title = f"mla-plugin on {gpu.replace('_', ' ')}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head += f'<meta name="results" content="{digest(gpu)}">'
    return f"<!doctype html>\n<html lang=en><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n"


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count()
    parser.add_argument("--only", nargs="+", default=[], choices=list(commands(4, figures.GPU)), metavar="NAME")
    parser.add_argument("--draw", action="store_true", help="write the page of the kept results, without a GPU too")
    parser.add_argument("--gpu", help="with --draw: whose results, such as NVIDIA_H200; default: this machine's")
    options = parser.parse_args()
    gpu = options.gpu or (torch.cuda.get_device_name().replace(" ", "_") if gpus else figures.GPU)
    if not options.draw and not gpus:
        parser.error("there is no CUDA device; --draw writes the page of kept results")
    failed = [] if options.draw else measure(commands(gpus, gpu, options.only))
    path = report_path(gpu)
    path.write_text(html(gpu))
    print(path)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
