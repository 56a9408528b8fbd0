"""Decode calls as engines make them: lengths, caches of several layers, correct results, time in a CUDA graph.

A step has the same lengths and page table in every layer and another cache in each. So a cell has one page table, one
``DecodeLengths`` and as many caches as it takes to fill ``ROTATED_BYTES``, which the L2 cache does not hold, at most
those of ``LAYERS`` layers. A graph holds that many calls, or fewer where they are long; what a library works out once a
step is in the graph once, or was timed on the host and is counted by its share of a layer.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import mla_plugin
from benchmarks.common import by_events, error
from mla_plugin import DecodeLengths

DEVICE = "cuda"
RANK, ROPE = 512, 64
SCALE = 192**-0.5
SIGMA = 0.6
LAYERS = 61
"""Of DeepSeek-V3."""
ROTATED_BYTES = 256 << 20
GRAPH_MS = 3.0
"""A graph's calls take about so long together, and are at least four."""
CHECKED = 4
"""Sequences of a cell whose results are compared with float64."""
THUNDER_MLA = (4641, 45118, 1730, 1696)
"""The lengths that ThunderMLA's authors report (HazyResearch, 2025), with 4 query tokens and 16 heads."""

Call = Callable[[torch.Tensor], torch.Tensor]
"""A call over the cache of one layer, [pages, page_size, 576]; gives [B, S_q, H, 512]."""


class Cell(NamedTuple):
    """One call.

    Attributes:
        lengths: ``uniform``, ``ragged`` (log-normal, sigma 0.6), ``one_long`` (one of 32k, the others of ``mean``) or
            ``thundermla``.
        batch, heads, seqlen_q, page_size: sizes.
        mean: mean length, of all but the long one.
    """

    lengths: str
    batch: int
    heads: int
    mean: int
    page_size: int = 64
    seqlen_q: int = 1


class Step(NamedTuple):
    """What cells of the same lengths and pages share.

    Attributes:
        host: keys of each sequence.
        page_table: [B, n], pages in random order.
        caches: [layers, pages, page_size, 576].
    """

    host: list[int]
    page_table: torch.Tensor
    caches: torch.Tensor


def lengths_of(cell: Cell) -> list[int]:
    """The keys of each sequence; the same ones in each run."""
    if cell.lengths == "thundermla":
        return list(THUNDER_MLA)
    if cell.lengths == "one_long":
        return [32768] + [cell.mean] * (cell.batch - 1)
    if cell.lengths == "uniform":
        return [cell.mean] * cell.batch
    generator = torch.Generator().manual_seed(cell.batch * 131071 + cell.mean)
    drawn = (SIGMA * torch.randn(cell.batch, generator=generator)).exp()
    return (drawn * (cell.mean / drawn.mean())).round().clamp(min=1).int().tolist()


def step_of(cell: Cell) -> Step:
    """Random caches and a random page table."""
    host = lengths_of(cell)
    counts = [-(-length // cell.page_size) for length in host]
    pages = sum(counts)
    one = pages * cell.page_size * (RANK + ROPE) * 2
    layers = max(1, min(LAYERS, -(-ROTATED_BYTES // one)))
    generator = torch.Generator(DEVICE).manual_seed(0)
    caches = torch.empty(layers, pages, cell.page_size, RANK + ROPE, dtype=torch.bfloat16, device=DEVICE)
    for cache in caches:
        cache.normal_(generator=generator)
    order = torch.randperm(pages, dtype=torch.int32, device=DEVICE, generator=generator)
    page_table = torch.nn.utils.rnn.pad_sequence(order.split(counts), batch_first=True)
    return Step(host, page_table.contiguous(), caches)


class Inputs(NamedTuple):
    """The queries of a cell, and its step."""

    cell: Cell
    step: Step
    q_nope_abs: torch.Tensor
    q_rope: torch.Tensor

    @classmethod
    def of(cls, cell: Cell, step: Step) -> Inputs:
        """Random queries, their two parts apart, as the product with W_UK and the rotation leave them."""
        generator = torch.Generator(DEVICE).manual_seed(1)
        shape = (cell.batch, cell.seqlen_q, cell.heads)
        q_nope_abs, q_rope = (
            torch.randn(*shape, width, dtype=torch.bfloat16, device=DEVICE, generator=generator)
            for width in (RANK, ROPE)
        )
        return cls(cell, step, q_nope_abs, q_rope)


def backend_call(inputs: Inputs, backend: str, *, batch_invariant: bool = False) -> tuple[Call, DecodeLengths]:
    """``mla_plugin.decode`` by one backend, with its own lengths, which hold its plan."""
    lengths = DecodeLengths(inputs.step.host, device=DEVICE)

    def call(cache: torch.Tensor) -> torch.Tensor:
        out = mla_plugin.decode(
            inputs.q_nope_abs,
            inputs.q_rope,
            cache,
            softmax_scale=SCALE,
            page_table=inputs.step.page_table,
            seqlens_kv=lengths,
            backend=backend,
            batch_invariant=batch_invariant,
        )
        assert isinstance(out, torch.Tensor)
        return out

    return call, lengths


def plain(inputs: Inputs, sequences: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Plain PyTorch in ``dtype`` over the first cache: [sequences, S_q, H, RANK]."""
    step, rows = inputs.step, []
    for b in sequences:
        length = step.host[b]
        pages = step.page_table[b, : -(-length // inputs.cell.page_size)].long()
        keys = step.caches[0][pages].flatten(0, 1)[:length].to(dtype)
        q = torch.cat([inputs.q_nope_abs[b], inputs.q_rope[b]], -1).to(dtype)  # [S_q, H, 576]
        scores = (q @ keys.T) * SCALE
        last = length - q.shape[0] + torch.arange(q.shape[0], device=q.device)
        hidden = torch.arange(length, device=q.device) > last[:, None]
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        rows.append(scores.softmax(-1).nan_to_num() @ keys[:, :RANK])
    return torch.stack(rows)


class Checked:
    """The exact results of some sequences, and the error that plain PyTorch in bfloat16 makes."""

    def __init__(self, inputs: Inputs) -> None:
        host = inputs.step.host
        self._sequences = sorted({host.index(max(host)), host.index(min(host)), *range(len(host))[: CHECKED - 2]})
        self._exact = plain(inputs, self._sequences, torch.float64)
        self.limit = 2 * error(plain(inputs, self._sequences, torch.bfloat16), self._exact)

    def error(self, out: torch.Tensor) -> float:
        """Relative error of a call's result."""
        return error(out[self._sequences], self._exact)


class Timer:
    """Milliseconds of one call, captured once in a CUDA graph with as many layers as ``count`` says.

    A library that cannot be captured is timed by events; ``why`` says why.
    """

    def __init__(self, call: Call, inputs: Inputs) -> None:
        self.why: str | None = None
        self._uncaptured = functools.partial(call, inputs.step.caches[0])
        caches, cell = inputs.step.caches, inputs.cell
        keys = sum(inputs.step.host)
        likely = max(0.012, keys * (RANK + ROPE) * 2 / 3.5e9, keys * cell.heads * cell.seqlen_q * 2.2e3 / 3e11)
        self.count = max(4, min(LAYERS, int(GRAPH_MS / likely)))
        for cache in caches[: self.count]:
            call(cache)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph):
                for layer in range(self.count):
                    call(caches[layer % len(caches)])
        except RuntimeError as reason:
            self.why = str(reason)[:200]
            return
        self._graph.replay()

    def __call__(self) -> float:
        """Median of three replays."""
        if self.why is not None:
            return by_events(self._uncaptured)
        found = []
        for _ in range(3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self._graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / self.count)
        return statistics.median(found)


def plan_microseconds(lengths: DecodeLengths, host: list[int]) -> float:
    """What a new step costs on the host where the backend plans there: best of five."""
    best = math.inf
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        lengths.update(host)
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best * 1e6


def row_of(cell: Cell, step: Step) -> dict[str, Any]:
    """The cell's sizes, as a result keeps them."""
    return {
        "lengths": cell.lengths,
        "B": cell.batch,
        "H": cell.heads,
        "S_q": cell.seqlen_q,
        "mean": round(sum(step.host) / len(step.host)),
        "longest": max(step.host),
        "page": cell.page_size,
    }


def measure_backends(
    inputs: Inputs, row: dict[str, Any], names: list[str], libraries: dict[str, Callable[[Inputs], Call]], rounds: int
) -> None:
    """Fill ``row`` with errors, refusals, milliseconds of backends and of other libraries, and plans on the host."""
    checked, timers = Checked(inputs), {}
    row |= {"error": {}, "refused": {}, "not_captured": {}, "plan_us": {}, "ms": {}}
    held: dict[str, DecodeLengths] = {}
    for name in (*names, *libraries):
        try:
            if name in libraries:
                call = libraries[name](inputs)
            else:
                call, held[name] = backend_call(inputs, name)
            row["error"][name] = checked.error(call(inputs.step.caches[0]))
            if row["error"][name] <= checked.limit:
                timers[name] = Timer(call, inputs)
                row["not_captured"] |= {name: why} if (why := timers[name].why) else {}
            else:
                row["refused"][name] = f"error {row['error'][name]:.1e} > {checked.limit:.1e}"
        except mla_plugin.NoBackendError as reason:
            row["refused"][name] = next("; ".join(x.reasons) for x in reason.trace if x.backend == name)
        except Exception as reason:  # of a library, of any type
            row["refused"][name] = str(reason)[:300]
    found: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            found[name].append(timer())
    for name, times in found.items():
        row["ms"][name] = statistics.median(times)
        if name == "flashinfer":
            row["plan_us"][name] = plan_microseconds(held[name], inputs.step.host)
            row["ms"][name] += row["plan_us"][name] / 1e3 / LAYERS
