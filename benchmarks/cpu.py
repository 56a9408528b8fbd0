"""The CPU path compared with PyTorch's attention on the same tokens: time, time of the host, memory.

    python -m benchmarks.cpu            prints a table and writes benchmarks/results/cpu.json

``mla_plugin.attention`` by its default backend, against ``F.scaled_dot_product_attention`` on [B, H, S, D] tensors. For
packed sequences of different lengths PyTorch gets the better of two ways, packing and unpacking included: a padded
batch, or a loop over the sequences. The two take turns in shuffled order, each figure is the best of the turns, because
others use the machine. Memory is the peak of what PyTorch allocates during a call, with and without its inputs.
Nothing is timed whose error against float64 is more than twice that of plain PyTorch in the same dtype and a few
roundings. The exit status is 1 where a call takes more than 1.5 times PyTorch's time, or memory with its inputs.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import mla_plugin
from benchmarks import checkout

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
ROUNDINGS = 4
TURNS = 7
MOST = 1.5
"""Times and memory compared with PyTorch's; above it the benchmark fails."""
SECONDS_PER_TURN = 0.02
RAGGED = tuple(random.Random(0).choices(range(24, 41), k=128))
TO_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}
FROM_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}

Tensors = tuple[torch.Tensor, ...]
Way = Callable[[Tensors], torch.Tensor]


@dataclass(frozen=True)
class Point:
    """One call: sequences of these lengths, heads, head dims, dtype, mask."""

    layout: str
    lengths: Sequence[int]
    heads: int
    dims: tuple[int, int]
    dtype: torch.dtype
    mask: str = "causal"

    @property
    def name(self) -> str:
        """What the table shows."""
        low, high = min(self.lengths), max(self.lengths)
        span = str(high) if low == high else f"{low}..{high}"
        dims, dtype = "/".join(map(str, self.dims)), str(self.dtype).removeprefix("torch.")
        return f"{self.layout} {len(self.lengths)} x {span}, {self.heads} heads {dims}, {dtype} {self.mask}"


F32, BF16, MLA, EQUAL = torch.float32, torch.bfloat16, (192, 128), (64, 64)
TIMES = (
    *(
        Point("bshd", (length,) * batch, 4, dims, dtype, mask)
        for batch, length in ((256, 16), (64, 32))
        for dims in (MLA, EQUAL)
        for dtype in (F32, BF16)
        for mask in ("causal", "no_mask")
    ),
    *(Point(layout, (16,) * 256, 4, MLA, F32) for layout in ("sbhd", "bhsd")),
    *(
        Point("thd", lengths, 4, dims, dtype, mask)
        for lengths in ((32,) * 128, RAGGED)
        for dims in (MLA, EQUAL)
        for dtype in (F32, BF16)
        for mask in ("causal", "no_mask")
    ),
    *(Point("bshd", (512,) * 4, 4, dims, dtype) for dims in (MLA, EQUAL) for dtype in (F32, BF16)),
)
MEMORY = (
    *(
        Point("thd", lengths, heads, dims, BF16)
        for dims in (MLA, (128, 128))
        for lengths, heads in (((32,) * 128, 16), ((512,) * 8, 16), ((1024,) * 4, 16), ((4096,), 16))
    ),
    *(Point("thd", lengths, 2, dims, BF16) for dims in ((128, 128), EQUAL) for lengths in ((4096,), (1024,) * 4)),
)


def packed(x: torch.Tensor, point: Point) -> torch.Tensor:
    """[B, H, S, D] in the point's layout."""
    if point.layout != "thd":
        return x.permute(FROM_BHSD[point.layout]).contiguous()
    return torch.cat([row[:, :length].transpose(0, 1) for row, length in zip(x, point.lengths, strict=True)])


def dense(x: torch.Tensor, point: Point) -> torch.Tensor:
    """The inverse of ``packed``; zeros after a sequence."""
    if point.layout != "thd":
        return x.permute(TO_BHSD[point.layout])
    rows = x.split(list(point.lengths))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2)


def ways(point: Point) -> dict[str, tuple[Way, bool]]:
    """Ours, and PyTorch's: what they do to (q, k, v), and whether that is in the point's layout or in [B, H, S, D]."""
    is_causal, longest = point.mask == "causal", max(point.lengths)
    options: dict[str, Any] = {"qkv_format": point.layout, "attn_mask_type": point.mask}
    if point.layout == "thd":
        offsets = torch.tensor([0, *point.lengths]).cumsum(0).to(torch.int32)
        options |= {"cu_seqlens_q": offsets, "max_seqlen_q": longest, "max_seqlen_kv": longest}

    def torch_dense(x: Tensors) -> torch.Tensor:
        return F.scaled_dot_product_attention(*x, is_causal=is_causal)

    is_key = torch.arange(longest) < torch.tensor(point.lengths)[:, None, None, None]

    def torch_padded(x: Tensors) -> torch.Tensor:
        mask = None if is_causal else is_key
        q, k, v = (dense(y, point) for y in x)
        return packed(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal), point)

    def torch_loop(x: Tensors) -> torch.Tensor:
        parts = zip(*(y.transpose(0, 1).split(list(point.lengths), 1) for y in x), strict=True)
        return torch.cat([torch_dense((q[None], k[None], v[None]))[0] for q, k, v in parts], 1).transpose(0, 1)

    def ours(x: Tensors) -> torch.Tensor:
        out = mla_plugin.attention(*x, **options)
        assert isinstance(out, torch.Tensor)
        return out

    if len(set(point.lengths)) == 1:
        return {"ours": (ours, True), "torch": (torch_dense, False)}
    return {"ours": (ours, True), "torch, padded": (torch_padded, True), "torch, loop": (torch_loop, True)}


def inputs(point: Point) -> tuple[Tensors, torch.Tensor]:
    """(q, k, v) and dout as [B, H, S, D]."""
    torch.manual_seed(0)
    shape = (len(point.lengths), point.heads, max(point.lengths))
    qk, v = point.dims
    q, k, values, dout = (torch.randn(*shape, dim).to(point.dtype) for dim in (qk, qk, v, v))
    return (q, k, values), dout


def passes(point: Point) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Of each way the forward, and the forward with the backward."""
    qkv, dout = inputs(point)
    found = {}
    for name, (way, in_layout) in ways(point).items():
        given = tuple(packed(x, point) if in_layout else x for x in qkv)
        leaves = tuple(x.detach().clone().requires_grad_() for x in given)
        gradient = packed(dout, point) if in_layout else dout

        def forward(way: Way = way, given: Tensors = given) -> Any:
            return way(given)

        def both(way: Way = way, leaves: Tensors = leaves, gradient: torch.Tensor = gradient) -> Any:
            out = way(leaves)
            return out, *torch.autograd.grad(out, leaves, gradient)

        found[name] = (forward, both)
    return found


def check(point: Point) -> None:
    """Refuse to time what is wrong: every error is at most twice plain PyTorch's, plus a few roundings."""
    qkv, dout = inputs(point)
    ours = passes(point)["ours"][1]()
    is_key = torch.arange(max(point.lengths)) < torch.tensor(point.lengths)[:, None]
    hidden = ~is_key[:, None, None]
    if point.mask == "causal":
        hidden = hidden | torch.ones(hidden.shape[-1], hidden.shape[-1], dtype=torch.bool).triu(1)
    results = []
    for dtype in (torch.float64, point.dtype):
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        scores = leaves[0] @ leaves[1].transpose(-1, -2) * point.dims[0] ** -0.5
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
        gradient = dout.to(dtype).masked_fill(~is_key[:, None, :, None], 0)
        results.append([packed(x.detach(), point).double() for x in (out, *torch.autograd.grad(out, leaves, gradient))])
    for name, found, exact, plain in zip(("out", "dq", "dk", "dv"), ours, *results, strict=True):
        error, budget = (float((x.detach().double() - exact).abs().max()) for x in (found, plain))
        budget = 2 * budget + ROUNDINGS * torch.finfo(point.dtype).eps * float(exact.detach().abs().max())
        if not error <= budget:
            raise SystemExit(f"{point.name}: the error of {name} is {error:.2g} > {budget:.2g}; nothing was measured")


def best(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each call, the best of the turns, which are taken in shuffled order."""
    repeats, found = {}, {name: float("inf") for name in calls}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, int(SECONDS_PER_TURN / (time.perf_counter() - start)))
    order = list(calls)
    for _ in range(TURNS):
        random.shuffle(order)
        for name in order:
            start = time.perf_counter()
            for _ in range(repeats[name]):
                calls[name]()
            found[name] = min(found[name], (time.perf_counter() - start) / repeats[name])
    return found


def timed(point: Point) -> dict[str, Any]:
    """Milliseconds of both passes and the ratios of ours to the better of PyTorch's ways."""
    check(point)
    row: dict[str, Any] = {"call": point.name}
    for index, name in enumerate(("forward", "both")):
        seconds = best({way: pair[index] for way, pair in passes(point).items()})
        others = {way: value for way, value in seconds.items() if way != "ours"}
        other = min(others, key=lambda way: others[way])
        row[name] = {way: round(value * 1e3, 3) for way, value in seconds.items()}
        row[name] |= {"ratio": round(seconds["ours"] / others[other], 2), "to": other}
    return row


def host() -> dict[str, Any]:
    """Microseconds of a tiny call without gradients: nothing but the host's time."""
    row: dict[str, Any] = {}
    one = torch.ones(1)
    for qk, v in (MLA, EQUAL):
        q, k, values = (torch.randn(1, 2, 16, dim) for dim in (qk, qk, v))
        given = [x.transpose(1, 2) for x in (q, k, values)]
        with torch.no_grad():
            seconds = best(
                {
                    "ours": lambda q=q, k=k, v=values: mla_plugin.attention(q, k, v),
                    "torch": lambda given=given: F.scaled_dot_product_attention(*given, is_causal=True),
                    "x.add_": lambda one=one: one.add_(1),
                }
            )
        row[f"{qk}/{v}"] = {name: round(value * 1e6, 1) for name, value in seconds.items()}
    return row


def peak(call: Callable[[], Any]) -> int:
    """Bytes that a call allocated at most at once, what it returns included."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    assert profile.profiler is not None
    held = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    del result
    return highest


def memory(point: Point) -> dict[str, Any]:
    """Mebibytes of both passes, above the inputs, and the ratios with and without them."""
    row: dict[str, Any] = {"call": point.name}
    qkv, dout = inputs(point)
    given = [sum(x.numel() * x.element_size() for x in y) for y in (qkv, (*qkv, dout))]
    for index, name in enumerate(("forward", "both")):
        bytes_of = {way: peak(pair[index]) for way, pair in passes(point).items()}
        ours, other = bytes_of["ours"], bytes_of["torch"]
        row[name] = {way: round(value / 2**20, 1) for way, value in bytes_of.items()}
        row[name] |= {
            "ratio": round(ours / other, 2),
            "with_inputs": round((ours + given[index]) / (other + given[index]), 2),
        }
    return row


def show(record: dict[str, Any]) -> None:
    """The short table."""
    print(f"{'ours / torch, milliseconds':<58}{'forward':>24}{'both passes':>26}")
    for row in record["times"]:
        cells = [row[name] for name in ("forward", "both")]
        texts = [f"{x['ours']:.2f} / {x[x['to']]:.2f} = {x['ratio']:.2f}" for x in cells]
        print(f"{row['call']:<58}{texts[0]:>24}{texts[1]:>26}")
    print(f"\n{'peak MiB above the inputs (ratio with them)':<58}")
    for row in record["memory"]:
        cells = [row[name] for name in ("forward", "both")]
        texts = [f"{x['ours']} / {x['torch']} = {x['ratio']:.2f} ({x['with_inputs']:.2f})" for x in cells]
        print(f"{row['call']:<58}{texts[0]:>30}{texts[1]:>30}")
    print()
    for dims, row in record["host"].items():
        print(f"a call of [1, 2, 16, {dims}]: {row['ours']} us, PyTorch's {row['torch']} us, x.add_ {row['x.add_']} us")


def main() -> None:
    """Check, measure, print, write."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    random.seed(0)
    record = {"times": [timed(x) for x in TIMES], "memory": [memory(x) for x in MEMORY], "host": host()}
    show(record)
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    record = {
        "benchmark": "cpu",
        "unit": "milliseconds (times), MiB (memory), microseconds (host); ratios are ours / PyTorch's",
        **record,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu[1] if cpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "commit": checkout.commit(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    above = [
        f"{row['call']}, {kind}: {row[kind][name]}"
        for rows, name in ((record["times"], "ratio"), (record["memory"], "with_inputs"))
        for row in rows
        for kind in ("forward", "both")
        if row[kind][name] > MOST
    ]
    if above:
        raise SystemExit(f"above {MOST} of PyTorch's: {'; '.join(above)}")


if __name__ == "__main__":
    sys.exit(main())
