"""What padding costs: V for FlashAttention 2, and the gaps between packed sequences, on this GPU.

    python -m benchmarks.flash_padding
    python -m benchmarks.flash_padding --ways     only prints what ``fa2.SMALL`` is chosen by

FlashAttention 2 has one head dimension, so backend ``fa2`` widens V from 128 to 192 columns, and in the backward out
and dout too; the columns come off again where the result is made contiguous. Measured is each pass as a whole, the
copies alone, and the triton backend for comparison, which does not pad. Then filling the gaps: by the kernel that
writes only the gaps, and by a masked copy of the whole. PyTorch's FlashAttention 2, bfloat16, causal; milliseconds are
medians of ``triton.testing.do_bench``. A backend is timed after it was found correct against the float64 oracle at a
small size. Writes benchmarks/results/flash_padding_<gpu>.json and prints a table.

``--ways``: each way to widen V by zero columns, over its number of elements: microseconds until the call returns, and
microseconds of the device. ``fa2`` concatenates up to ``fa2.SMALL`` elements and copies above.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.common import by_events, by_graph, host_microseconds, write
from mla_plugin import AttentionRequest, resolve
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import Case, checks
from mla_plugin.conformance.attention.call import Call
from mla_plugin.hooks.attention import Residuals
from mla_plugin.kernels.prefill.padding import write_gaps
from mla_plugin.operations.attention import dispatch
from mla_plugin.plugins import fa2

CASES = ((2, 16, 1024), (1, 16, 4096), (1, 128, 4096), (1, 32, 16384))
BACKENDS = ("fa2", "triton")
HEAD_DIM_QK, HEAD_DIM_V = 192, 128
GAP = 64
"""Padding after each of 16 sequences."""


def check(backend: str) -> None:
    """Outputs and gradients of a small case, by the conformance suite's budgets."""
    case = Case("small", dtype=torch.bfloat16, attn_mask_type="causal", seqlens_q=(257,) * 2, seqlens_kv=(257,) * 2)
    request = case.request("cuda")
    call = Call.of(case, request, "cuda", torch.Generator(), 1.0)
    given, dout = call.tensors, call.dout
    plan = resolve(request, backend=backend)
    output = dispatch.forward(plan, given)
    gradients = dispatch.backward(plan, Residuals(given, output.out, output.lse), dout, None)
    checks.check_output(case, call.inputs, output, call.expected())
    checks.check_gradients(case, call.inputs, gradients, call.expected()[1].exact, call.expected_gradients())


def passes(batch: int, heads: int, length: int) -> dict[str, float]:
    """Both passes of both backends, and the copies of fa2 alone."""
    q, k, v, dout = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        for dim in (HEAD_DIM_QK, HEAD_DIM_QK, HEAD_DIM_V, HEAD_DIM_V)
    )
    request = AttentionRequest(
        qkv_format="bshd",
        dtype=q.dtype,
        device_type="cuda",
        batch_size=batch,
        num_heads=heads,
        num_kv_heads=heads,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        head_dim_qk=HEAD_DIM_QK,
        head_dim_v=HEAD_DIM_V,
        attn_mask_type="causal",
        window_size=(-1, 0),
        bottom_right_diagonal=False,
        is_training=True,
    )
    given, row = AttentionTensors(q, k, v, HEAD_DIM_QK**-0.5), {}
    for backend in BACKENDS:
        plan = resolve(request, backend=backend)
        output = dispatch.forward(plan, given)
        residuals = Residuals(given, output.out.contiguous(), output.lse)
        row[f"{backend} forward"] = by_events(lambda plan=plan: dispatch.forward(plan, given).out.contiguous())
        row[f"{backend} backward"] = by_events(
            lambda plan=plan, residuals=residuals: [
                x.contiguous() for x in vars(dispatch.backward(plan, residuals, dout, None)).values() if x is not None
            ]
        )
    wide = q.new_empty(q.shape)
    row["copies forward"] = by_events(lambda: (fa2._widened(v, HEAD_DIM_QK), wide[..., :HEAD_DIM_V].contiguous()))
    row["copies backward"] = by_events(
        lambda: ([fa2._widened(x, HEAD_DIM_QK) for x in (v, v, dout)], wide[..., :HEAD_DIM_V].contiguous())
    )
    return row


def gaps(heads: int, length: int) -> dict[str, float]:
    """Zeroing what lies between 16 packed sequences of an out [T, H, D]."""
    starts = torch.arange(17, dtype=torch.int32, device="cuda") * (length // 16)
    lengths = starts.diff() - GAP
    x = torch.randn(length, heads, HEAD_DIM_V, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(length, device="cuda")
    mask = (rows % (length // 16) >= length // 16 - GAP)[:, None, None]
    return {
        "gaps alone": by_events(lambda: write_gaps(x, starts, lengths)),
        "masked copy": by_events(lambda: x.masked_fill_(mask, 0)),
    }


def padding_ways(elements: int) -> dict[str, tuple[float, float]]:
    """Microseconds of the host and of the device to widen V [1, S, 16, 128] of so many elements to 192 columns."""
    v = torch.randn(1, elements // (16 * HEAD_DIM_V), 16, HEAD_DIM_V, device="cuda", dtype=torch.bfloat16)
    columns = HEAD_DIM_QK - HEAD_DIM_V
    expanded = v.new_zeros(()).expand(*v.shape[:-1], columns)
    zeros = expanded.contiguous()

    def copied() -> torch.Tensor:
        wide = v.new_empty((*v.shape[:-1], HEAD_DIM_QK))
        wide[..., :HEAD_DIM_V] = v
        wide[..., HEAD_DIM_V:] = 0
        return wide

    ways = {
        "concatenated, one zero expanded": lambda: torch.cat((v, expanded), -1),
        "concatenated, zeros in memory": lambda: torch.cat((v, zeros), -1),
        "constant_pad_nd": lambda: torch.constant_pad_nd(v, (0, columns)),
        "two copies": copied,
    }
    for name, way in ways.items():
        if not torch.equal(way(), copied()):
            raise SystemExit(f"{name} is wrong; nothing was timed")
    return {name: (host_microseconds(way), by_graph([way] * 20) * 1e3) for name, way in ways.items()}


def main() -> None:
    if "--ways" in sys.argv[1:]:
        for power in range(15, 28):
            found = padding_ways(1 << power)
            print(f"2**{power}: " + "; ".join(f"{name} {a:.1f} + {b:.1f} us" for name, (a, b) in found.items()))
        return
    for backend in BACKENDS:
        check(backend)
    table: list[dict[str, Any]] = []
    for batch, heads, length in CASES:
        row = {"case": f"{batch},{heads},{length}", **passes(batch, heads, length), **gaps(heads, batch * length)}
        table.append(row)
        print(row, flush=True)
    print(write("flash_padding", {"milliseconds": table}))
    columns = list(table[0])
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in table:
        print("| " + " | ".join(x if isinstance(x, str) else f"{x:.4f}" for x in row.values()) + " |")


if __name__ == "__main__":
    main()
