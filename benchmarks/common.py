"""What the GPU benchmarks share: other libraries' loaders, timing, errors, and the record that is kept."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from benchmarks import checkout

RESULTS = Path(__file__).parent / "results"
OURS = "mla-plugin"
BURST_MS = 4.0
MOST_CALLS = 20

Call = Callable[[], Any]
Loader = tuple[str, tuple[str, ...]]  # a function of a peers.py, and its arguments


def load_peers(folders: Sequence[Path], loaders: Mapping[str, Loader]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the loaders in the folders' ``peers.py`` return, by library; and why the other libraries are not there.

    The first folder whose loader succeeds is taken.
    """
    modules = [_module(folder / "peers.py") for folder in folders]
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, (loader, arguments) in loaders.items():
        missing[name] = "no folder given"
        for module in modules:
            try:
                found[name] = getattr(module, loader)(*arguments)
            except Exception as reason:  # of a library that is not there, of any type
                missing[name] = type(reason).__name__  # its text may have paths of this machine
                continue
            del missing[name]
            break
    return found, missing


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_of_{path.parent.name}", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the norm of the exact result."""
    return ((x.double() - exact).norm() / exact.norm()).item()


def by_events(call: Call) -> float:
    """Median milliseconds of ``triton.testing.do_bench``, which clears the L2 cache before each call."""
    return float(triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median"))


def by_graph(calls: Sequence[Call], replays: int = 20) -> float:
    """Median milliseconds of one call, all of them captured one after the other in one CUDA graph: no host time."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / len(calls))
    return statistics.median(found)


def host_microseconds(call: Call, calls: int = 50) -> float:
    """Time on the host until a call returns, the GPU idle at first; best of twenty runs, as others share the host."""
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / calls * 1e6


def in_turn(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median over rounds that go through all libraries in turn, because a GPU's clock drifts between them."""
    found: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            found[name].append(timer())
    return {name: statistics.median(times) for name, times in found.items()}


def milliseconds(call: Callable[[], Any], calls: int) -> float:
    """Of one call in a burst."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def in_shuffled_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds; a graph of each, so that the host's time does not count.

    Graphs are captured on the current stream, unless it is the default one: autograd runs a backward on the stream of
    its forward.
    """
    current = torch.cuda.current_stream()
    stream = None if current == torch.cuda.default_stream() else current
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    sizes: dict[str, int] = {}
    for name, call in calls.items():
        once = milliseconds(call, 2)
        sizes[name] = max(1, min(MOST_CALLS, int(BURST_MS / once)))
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            for _ in range(sizes[name]):
                call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            found[name].append(milliseconds(graphs[name].replay, 1) / sizes[name])
    return {name: statistics.median(times) for name, times in found.items()}


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--peers", type=Path, nargs="*", default=[], help="folders with a peers.py")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--commit", help="recorded in the result; default: of this checkout")
    return found


def write(name: str, content: dict[str, Any], commit: str | None = None) -> Path:
    """Keep a result with the GPU, the versions and the commit that it was measured with.

    ``add_us``: time on the host of PyTorch's own x.add_(1), to judge host times by; 4 us on a fast host, 10 on a slow.
    """
    gpu = torch.cuda.get_device_name()
    one = torch.ones(1, device="cuda")
    record = {
        "benchmark": name,
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": checkout.commit(commit),
        "add_us": host_microseconds(lambda: one.add_(1)),
        **content,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{gpu.replace(' ', '_')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
