"""The first call of a new process after ``mla-plugin warm-up``, compared with the second, and what it spends time on.

    python -m benchmarks.warm_call          on this machine's GPU; writes benchmarks/results/warm_call_<gpu>.json
                                            after each row
    python -m benchmarks.warm_call --cpu    small calls in the interpreter, which has no cache: tests this script

``mla-plugin warm-up`` fills an empty Triton cache. Each row is then measured in processes of their own, in which torch
and mla_plugin are imported, CUDA is initialised and the tensors exist; the clock stops when the GPU has finished. The
rows "without the note" are measured after removing what warm-up noted beside the kernels (``mla_plugin.preparation``),
which otherwise lengthens "CUDA starts".
"PyTorch" is its own ``scaled_dot_product_attention``: the part of a first call that is not due to us.

In one more process of each row a thread looks at the other threads' stacks twice a millisecond and adds up the time by
cause: milliseconds of the first call, which this slows down a little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

HEADS, RANK, ROPE, HEAD_DIM_QK, HEAD_DIM_V = 16, 512, 64, 192, 128
PREFILL, TRAINING, DECODE, PYTORCH = "prefill", "prefill and backward", "decode", "PyTorch, prefill and backward"
CASES = (PREFILL, TRAINING, DECODE, PYTORCH)
WAITING = {"wait", "wait_for", "result", "acquire", "join", "_engine_run_backward", "_wait_for_tstate_lock", "map"}
"""Innermost functions of a thread that waits for another; PyTorch runs a backward on a GPU in a thread of its own."""

FUNCTIONS = {
    "triton_key": "Triton's hash of itself",
    "cache_key": "Triton's hash of kernels' sources",
    "get_ptxas_version": "Triton asks ptxas for its version",
    "_init_handles": "kernels onto the GPU",
    "get_group": "kernels from the cache",
    "make_cubin": "compiling",
    "make_ttir": "compiling",
    "ast_to_ttir": "compiling",
    "synchronize": "waiting for the GPU",
}
FILES = {
    "triton/backends/nvidia/driver.py": "Triton's driver and launchers",
    "triton/compiler/compiler.py": "kernels from the cache",
    "triton/": "Triton's launch",
    "mla_plugin/hooks/": "asking the backends",
    "mla_plugin/resolver/": "asking the backends",
    "mla_plugin/device.py": "asking the backends",
    "mla_plugin/plugins/": "our plugins and launches",
    "mla_plugin/kernels/": "our plugins and launches",
    "mla_plugin/": "our checks",
    "torch/": "PyTorch",
}
IMPORTS = {
    "triton.experimental.gluon": "import Gluon",
    "triton": "import Triton",
    "mla_plugin.kernels": "import our kernels",
    "mla_plugin": "import our plugins",
    "sympy": "import sympy for PyTorch",
    "mpmath": "import sympy for PyTorch",
    "torch": "import more of PyTorch",
}


def cause_of(frame: FrameType | None) -> str:
    """What the innermost call that we know is for."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_find_and_load":
            name = f"{frame.f_locals.get('name')}."
            return next((cause for prefix, cause in IMPORTS.items() if name.startswith(f"{prefix}.")), "import others")
        if code.co_name in FUNCTIONS and ("/triton/" in code.co_filename or "/torch/" in code.co_filename):
            return FUNCTIONS[code.co_name]
        found = next((cause for part, cause in FILES.items() if f"/{part}" in code.co_filename), None)
        if found is not None:
            return found
        frame = frame.f_back
    return "rest"


class Sampler(threading.Thread):
    """Adds up the time that the other threads spend, by cause."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: dict[str, float] = defaultdict(float)
        self._main = threading.get_ident()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Sample until ``stop``; a cause that keeps the interpreter's lock gets the time until it lets go."""
        last = time.perf_counter()
        while not self._is_over.wait(0.0005):
            now = time.perf_counter()
            self.found[self._cause()] += now - last
            last = now

    def _cause(self) -> str:
        frames = {thread: frame for thread, frame in sys._current_frames().items() if thread != self.ident}
        main = frames.pop(self._main)
        working = [frame for frame in (main, *frames.values()) if frame.f_code.co_name not in WAITING]
        return cause_of(working[0] if working else main)

    def stop(self) -> dict[str, float]:
        """Milliseconds by cause, the longest first."""
        self._is_over.set()
        self.join()
        order = sorted(self.found.items(), key=lambda item: -item[1])
        return {cause: round(1e3 * seconds, 1) for cause, seconds in order}


def call_of(case: str, device: str, backend: str | None) -> Callable[[], object]:
    """The call of a case, on tensors that are allocated before it."""
    import torch
    import torch.nn.functional as F

    import mla_plugin

    heads, tokens, batch = (HEADS, 4096, 8) if device == "cuda" else (1, 16, 1)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    if case == DECODE:
        pages = tokens // 64 or 1
        cache = torch.zeros(batch * pages, 64, RANK + ROPE, **options)
        table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        queries = [torch.zeros(batch, 1, heads, width, **options) for width in (RANK, ROPE)]
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
        scale = HEAD_DIM_QK**-0.5
        return lambda: mla_plugin.decode(
            *queries, cache, softmax_scale=scale, page_table=table, seqlens_kv=lengths, backend=backend
        )
    trains, layout = case in (TRAINING, PYTORCH), (1, heads, tokens) if case == PYTORCH else (1, tokens, heads)
    widths = (HEAD_DIM_V,) * 3 if case == PYTORCH else (HEAD_DIM_QK, HEAD_DIM_QK, HEAD_DIM_V)
    tensors = [torch.zeros(*layout, width, requires_grad=trains, **options) for width in widths]
    dout = torch.zeros(*layout, HEAD_DIM_V, **options)

    def forward() -> torch.Tensor:
        if case == PYTORCH:
            return F.scaled_dot_product_attention(*tensors, is_causal=True)
        out = mla_plugin.attention(*tensors, backend=backend)
        assert isinstance(out, torch.Tensor)
        return out

    return (lambda: torch.autograd.grad(forward(), tensors, dout)) if trains else forward


def measure(case: str, device: str, backend: str | None, is_sampled: bool) -> dict[str, Any]:
    """Milliseconds of the start, the first and the second call of this process."""
    import torch

    start = time.perf_counter()
    import mla_plugin  # noqa: F401  (its time is measured)

    found: dict[str, Any] = {"import mla_plugin": 1e3 * (time.perf_counter() - start)}

    def timed(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    if device == "cuda":
        found["CUDA starts"] = timed(torch.cuda.init)
    call = call_of(case, device, backend)
    if device == "cuda":
        torch.cuda.synchronize()
    sampler = Sampler() if is_sampled else None
    if sampler is not None:
        sys.setswitchinterval(0.0005)
        sampler.start()
    found["first"] = timed(call)
    if sampler is not None:
        found["causes"] = sampler.stop()
    found["second"] = timed(call)
    return found


def in_new_process(case: str, *options: str, environment: dict[str, str]) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.warm_call", "--case", case, *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(case: str, runs: int, options: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Medians over ``runs`` processes, and the causes in one more."""
    measured = [in_new_process(case, *options, environment=environment) for _ in range(runs)]
    found: dict[str, Any] = {name: round(statistics.median(one[name] for one in measured), 1) for name in measured[0]}
    found["first - second"] = round(found["first"] - found["second"], 1)
    found["causes"] = in_new_process(case, "--sample", *options, environment=environment)["causes"]
    return found


def warm_up(environment: dict[str, str]) -> None:
    """Run ``mla-plugin warm-up`` for the model of the cases."""
    command = [sys.executable, "-m", "mla_plugin.cli", "warm-up", "--heads", str(HEADS)]
    subprocess.run(command, env=environment, check=True)


def main() -> None:
    """Warm up, measure every case with and without the note, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small calls in Triton's interpreter")
    parser.add_argument("--backend", metavar="NAME", help="of our calls; default: the resolver's choice")
    parser.add_argument("--runs", type=int, default=3, help="processes of a row")
    parser.add_argument("--commit", help="recorded in the result; default: of this checkout")
    parser.add_argument("--case", choices=CASES, help="this case alone, in this process")
    parser.add_argument("--sample", action="store_true", help="with --case: by cause")
    given = parser.parse_args()
    device = "cpu" if given.cpu else "cuda"
    import torch  # before the clock starts

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --cpu tests this script without one")
    backend = given.backend or ("triton" if given.cpu else None)
    if given.case is not None:
        print(json.dumps(measure(given.case, device, backend, given.sample)))
        return
    options = [*["--cpu"] * given.cpu, *(["--backend", backend] if backend else [])]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        if given.cpu:
            environment["TRITON_INTERPRET"] = "1"
        else:
            warm_up(environment)
        for which in ("",) if given.cpu else ("", ", without the note"):
            if which:
                for note in Path(cache).glob("mla_plugin_*.json"):
                    note.unlink()
            for case in CASES[: -1 if which else None]:  # PyTorch's own does not depend on the note
                rows[case + which] = row(case, given.runs, options, environment)
                print(case + which, json.dumps(rows[case + which]), flush=True)
                if not given.cpu:
                    from benchmarks.common import write  # it imports Triton

                    write("warm_call", {"milliseconds": rows}, given.commit)


if __name__ == "__main__":
    main()
