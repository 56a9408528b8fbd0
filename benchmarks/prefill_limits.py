"""What limits prefill with windows and with short sequences on this GPU: the cost of a tile, and of each kernel.

    python -m benchmarks.prefill_limits          backends triton and, where it is installed, fa4

bfloat16, causal, 16 heads, times as in ``prefill_backends.py``.

- ``windows``: 16,384 tokens that see themselves and W before them. A tile of 128 queries meets W / 128 + 1 tiles of 128
  keys, so times of several W, fitted by a straight line, give what a tile of keys costs (``slope``) and what a tile of
  queries costs beyond that (``intercept``): microseconds of one SM. For the backward's dK and dV a tile of keys meets
  as many tiles of queries; its kernels are fitted together.
- ``short``: microseconds of every kernel of a call by PyTorch's profiler, the GPU otherwise idle.

Writes benchmarks/results/prefill_limits_<gpu>.json, prints a table last.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import in_shuffled_turns, parser, write
from benchmarks.prefill_backends import Problem, passes
from benchmarks.prefill_cases import EVEN, MLA, SMALL, Case

BACKENDS = ("triton", "fa4")
HEADS, TOKENS, TILE = 16, 16384, 128
WINDOWS = (128, 256, 512, 1024, 2048, 4096)
LENGTHS = (256, 512, 1024, 2048)
PROFILED_CALLS = 20


def windows(dims: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Milliseconds by window, and the fitted costs, of each pass and backend."""
    found: dict[str, Any] = {"dims": dims, "ms": {}, "refused": {}, "fit_us": {}}
    for window in WINDOWS:
        problem = Problem(Case(dims, HEADS, HEADS, 1, TOKENS, window))
        for kind, calls in passes(problem, found, backends=BACKENDS).items():
            for backend, ms in in_shuffled_turns(calls, rounds).items():
                found["ms"].setdefault(kind, {}).setdefault(backend, {})[window] = ms
    share = torch.cuda.get_device_properties().multi_processor_count / (HEADS * TOKENS / TILE)
    for kind, of_kind in found["ms"].items():
        for backend, ms in of_kind.items():
            line = statistics.linear_regression([window / TILE + 1 for window in ms], list(ms.values()))
            slope, intercept = (1e3 * share * x for x in (line.slope, line.intercept))
            found["fit_us"].setdefault(kind, {})[backend] = {"slope": slope, "intercept": intercept}
    return found


def kernels_of(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of one call's kernels by name, the median of several calls."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED_CALLS):
            call()
            torch.cuda.synchronize()
    times = collections.defaultdict(list)
    for event in profiled.events() or ():
        times[event.name].append(event.device_time)
    return {
        name[:80]: statistics.median(of_name) * len(of_name) / PROFILED_CALLS
        for name, of_name in times.items()
        if len(of_name) >= PROFILED_CALLS
    }


def short(case: Case, rounds: int) -> dict[str, Any]:
    """Milliseconds of each pass and backend, and of their kernels."""
    row: dict[str, Any] = {**case._asdict(), "refused": {}, "kernels_us": {}}
    for kind, calls in passes(Problem(case), row, backends=BACKENDS).items():
        row[kind] = in_shuffled_turns(calls, rounds)
        row["kernels_us"][kind] = {backend: kernels_of(call) for backend, call in calls.items()}
    return row


def main() -> None:
    """Measure, write, print."""
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    with torch.no_grad():
        fitted = [windows(dims, options.rounds) for dims in (MLA, EVEN)]
        cases = [Case(dims, HEADS, HEADS, 1, length) for dims in (MLA, EVEN) for length in LENGTHS]
        cases += [Case(SMALL, HEADS, HEADS, 1, 1024)]
        cases += [Case(dims, HEADS, HEADS, 1, 1024, deterministic=True) for dims in (MLA, EVEN)]
        calls = [short(case, options.rounds) for case in cases]
    print(write("prefill_limits", {"windows": fitted, "short": calls}, options.commit))
    for found in fitted:
        print(found["dims"], "refused:", found["refused"])
        for kind, of_kind in found["fit_us"].items():
            for backend, fit in of_kind.items():
                ms = " ".join(f"{window}: {x:.4f}" for window, x in found["ms"][kind][backend].items())
                print(f"  {kind} {backend}: tile {fit['slope']:.2f} us, beside {fit['intercept']:.2f} us; ms {ms}")
    for row in calls:
        print(Case(**{name: row[name] for name in Case._fields}).name)
        for kind in ("forward", "backward"):
            for backend, ms in row[kind].items():
                parts = ", ".join(f"{name[:40]} {us:.1f}" for name, us in row["kernels_us"][kind][backend].items())
                print(f"  {kind} {backend} {1e3 * ms:.1f} us: {parts}")


if __name__ == "__main__":
    main()
