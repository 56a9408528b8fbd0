"""What choosing a backend costs on the host: a cached resolve and a dispatch, beside a plain function call.

    python benchmarks/dispatch.py            prints a table and writes benchmarks/results/dispatch_cpu.json

The backend under the dispatch does nothing, so only the path to it is timed. Microseconds, best of nine runs.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mla_plugin import Accepted, AttentionOutput, AttentionRequest, AttentionTensors, Plan, hookimpl, resolve
from mla_plugin.environment import gates
from mla_plugin.hooks.manager import get_manager
from mla_plugin.operations.attention import dispatch

RESULTS = Path(__file__).parent / "results" / "dispatch_cpu.json"
LIMIT_US = 10.0
OUTPUT = AttentionOutput(torch.empty(0), torch.empty(0))


class Nothing:
    """A backend that returns at once."""

    @hookimpl
    def select_backend(self, request: AttentionRequest) -> Accepted:
        """Accept."""
        return Accepted(priority=1)

    @hookimpl
    def forward(self, plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
        """Return the same output every time."""
        return OUTPUT


def microseconds(function: Callable[[], object], calls: int = 20000) -> float:
    """Best of nine runs, for one call."""
    best = float("inf")
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def main() -> None:
    """Time, print, write; refuse when the path does not lead to the backend."""
    backend = Nothing()
    get_manager().register(backend, "nothing")
    request = AttentionRequest("bshd", torch.bfloat16, "cpu", 2, 16, 16, 2048, 2048, 192, 128, "causal", (-1, 0), False)
    x = torch.empty(0)
    tensors = AttentionTensors(x, x, x, 1.0)
    plan = resolve(request)
    if dispatch.forward(plan, tensors) is not OUTPUT:
        raise SystemExit("the dispatch did not reach the backend; nothing was timed")
    rows = {
        "plain function call": microseconds(lambda: backend.forward(plan, tensors)),
        "environment gates": microseconds(gates),
        "cached resolve": microseconds(lambda: resolve(request)),
        "dispatch through the hook": microseconds(lambda: dispatch.forward(plan, tensors)),
        "cached resolve + dispatch": microseconds(lambda: dispatch.forward(resolve(request), tensors)),
    }
    for name, value in rows.items():
        print(f"{name:<28} {value:6.2f} us")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout
    record = {
        "benchmark": "dispatch",
        "unit": "microseconds",
        "rows": {name: round(value, 3) for name, value in rows.items()},
        "limit": LIMIT_US,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "commit": commit.strip(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")
    if rows["cached resolve + dispatch"] > LIMIT_US:
        raise SystemExit(f"a cached resolve and dispatch take more than {LIMIT_US} us")


if __name__ == "__main__":
    main()
