"""What limits prefill with windows and with short sequences on this GPU: the cost of a tile, and of each kernel.

    python -m benchmarks.prefill_limits          backends triton and, where it is installed, fa4

bfloat16, causal, 16 heads, times as in ``prefill_backends.py``.

- ``windows``: 16,384 tokens that see themselves and W before them. A tile of 128 queries meets W / 128 + 1 tiles of 128
  keys, the first ones fewer (``key_tiles``). So times of several W, fitted by a straight line, give what a tile of keys
  costs (``slope``) and what is fixed for a tile of queries (``intercept``), in microseconds of one SM; ``residual`` is
  the largest deviation from the line, of the time. In the backward a slope is the sum over dK, dV and dQ of a pair of
  tiles, and the intercept has the preprocessing.
- ``short``: microseconds from begin to end of every kernel of a call, by PyTorch's profiler, the GPU otherwise idle.
  Our dQ overlaps dK and dV, so their times add up to more than the call takes.

Writes benchmarks/results/prefill_limits_<gpu>.json, prints a table last.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import in_shuffled_turns, parser, write
from benchmarks.prefill_backends import Problem, passes
from benchmarks.prefill_cases import EVEN, MLA, SMALL, Case

BACKENDS = ("triton", "fa4")
HEADS, TOKENS, TILE = 16, 16384, 128
WINDOWS = (128, 256, 512, 1024, 2048, 4096)
LENGTHS = (256, 512, 1024, 2048)
PROFILED_CALLS = 20


def key_tiles(window: int) -> float:
    """Mean number of key tiles that a query tile meets; those of the first ``window`` tokens meet fewer."""
    before = window // TILE
    return before + 1 - before * (before + 1) / (2 * TOKENS // TILE)


def fitted(ms: dict[int, float], share: float) -> dict[str, float]:
    """Slope, intercept and residual of milliseconds by window; ``share``: SMs for each query tile."""
    tiles = [key_tiles(window) for window in ms]
    line = statistics.linear_regression(tiles, list(ms.values()))
    residual = max(
        abs(line.slope * count + line.intercept - x) / x for count, x in zip(tiles, ms.values(), strict=True)
    )
    return {"slope": 1e3 * share * line.slope, "intercept": 1e3 * share * line.intercept, "residual": residual}


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
            found["fit_us"].setdefault(kind, {})[backend] = fitted(ms, share)
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
        if event.device_type == DeviceType.CUDA:
            times[event.name[:80]].append(event.device_time)
    return {
        name: statistics.median(of_name) * len(of_name) / PROFILED_CALLS
        for name, of_name in times.items()
        if len(of_name) >= PROFILED_CALLS  # else it ran in some calls only
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
        of_windows = [windows(dims, options.rounds) for dims in (MLA, EVEN)]
        cases = [Case(dims, HEADS, HEADS, 1, length) for dims in (MLA, EVEN) for length in LENGTHS]
        calls = [short(case, options.rounds) for case in (*cases, Case(SMALL, HEADS, HEADS, 1, 1024))]
    print(write("prefill_limits", {"windows": of_windows, "short": calls}, options.commit))
    for found in of_windows:
        print(found["dims"], "refused:", found["refused"])
        for kind, of_kind in found["fit_us"].items():
            for backend, fit in of_kind.items():
                ms = " ".join(f"{window}: {x:.4f}" for window, x in found["ms"][kind][backend].items())
                print(f"  {kind} {backend}: key tile {fit['slope']:.2f} us, fixed {fit['intercept']:.1f} us; ms {ms}")
    for row in calls:
        print(Case(**{name: row[name] for name in Case._fields}).name)
        for kind in ("forward", "backward"):
            for backend, ms in row[kind].items():
                parts = ", ".join(f"{name[:40]} {us:.1f}" for name, us in row["kernels_us"][kind][backend].items())
                print(f"  {kind} {backend} {1e3 * ms:.1f} us: {parts}")


if __name__ == "__main__":
    main()
