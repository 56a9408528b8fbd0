"""Prefill and training attention (head_dim_qk 192, head_dim_v 128, bfloat16) on this GPU, forward and backward.

    python -m benchmarks.prefill                   ours and PyTorch's own kernels, compiled FlexAttention among them
    python -m benchmarks.prefill --peers DIR ...   also FlashAttention 3 and 4 where a DIR/peers.py loads them

A result (out; dq, dk, dv) whose error against float64, in the first and the last head, is more than twice that of plain
PyTorch in bfloat16 is not timed. Milliseconds are of the GPU, from CUDA graphs in short bursts, the libraries in
shuffled turns, the L2 cache as the call before leaves it; ``host_us`` is the time on the host of one of our forward
calls. TFLOP/s count 2 B H S^2 x 320 operations forward and x 832 backward, half of it under a causal mask. ``kernels``
says which of our kernels ran. Writes benchmarks/results/prefill_<gpu>.json, prints a table last.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.common import OURS, error, host_microseconds, in_shuffled_turns, load_peers, parser, write
from mla_plugin.kernels import mla_attention
from mla_plugin.kernels.hopper.rule import plain_kernel_because

HEAD_DIM_QK, HEAD_DIM_V = 192, 128
SCALE = HEAD_DIM_QK**-0.5
FORWARD_WORK, BACKWARD_WORK = HEAD_DIM_QK + HEAD_DIM_V, 3 * HEAD_DIM_QK + 2 * HEAD_DIM_V
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {"FA3": ("fa3_varlen", ()), "FA4": ("fa4", ())}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


class Case(NamedTuple):
    """B sequences of S tokens with H heads."""

    batch: int
    heads: int
    seqlen: int
    causal: bool


CASES = (
    Case(1, 16, 4096, True),
    Case(1, 128, 4096, True),
    Case(1, 32, 16384, True),
    Case(1, 128, 4096, False),
    *(Case(1, 16, seqlen, True) for seqlen in (512, 1024, 2048, 8192, 16384)),
)
FORWARD_ONLY = ("FA3",)  # the build at hand has no backward


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return mla_attention(q, k, v, softmax_scale=SCALE, is_causal=causal)


def sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """One of PyTorch's kernels; FlashAttention 2 takes equal head dims, so V gets 64 columns of zeros there."""
    padding = HEAD_DIM_QK - HEAD_DIM_V if backend == SDPBackend.FLASH_ATTENTION else 0
    v = torch.nn.functional.pad(v, (0, padding)) if padding else v
    with sdpa_kernel([backend]):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE)
    return out.transpose(1, 2)[..., :HEAD_DIM_V]


def _flex() -> Attention:
    """FlexAttention as PyTorch's users run it: compiled, its block mask made once."""
    attention = torch.compile(flex_attention, dynamic=False)

    @functools.cache
    def block_mask(seqlen: int) -> BlockMask:
        return create_block_mask(lambda _b, _h, i, j: i >= j, None, None, seqlen, seqlen, device="cuda")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        mask = block_mask(q.shape[1]) if causal else None
        out: torch.Tensor = attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, scale=SCALE)
        return out.transpose(1, 2)

    return attend


def _fa3(run: Callable[..., Any]) -> Attention:
    @functools.cache
    def offsets(batch: int, seqlen: int) -> torch.Tensor:
        return torch.arange(0, batch * seqlen + 1, seqlen, device="cuda", dtype=torch.int32)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        batch, seqlen = q.shape[:2]
        cu, packed = offsets(batch, seqlen), (x.flatten(0, 1) for x in (q, k, v))
        out: torch.Tensor = run(*packed, cu, cu, None, None, seqlen, seqlen, SCALE, causal)[0]
        return out.unflatten(0, (batch, seqlen))

    return attend


def _fa4(run: Callable[..., Any]) -> Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        out: torch.Tensor = run(q, k, v, causal, SCALE)[0]
        return out

    return attend


def libraries(folders: list[Path]) -> tuple[dict[str, Attention], dict[str, str]]:
    """Everything that can be measured here, and why the rest cannot."""
    loaded, missing = load_peers(folders, PEERS)
    found: dict[str, Attention] = {OURS: ours}
    for name, adapt in (("FA3", _fa3), ("FA4", _fa4)):
        if name in loaded:
            found[name] = adapt(loaded[name])
    found["cuDNN"] = functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION)
    found["memory-efficient"] = functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION)
    found["FA2, V padded"] = functools.partial(sdpa, SDPBackend.FLASH_ATTENTION)
    found["FlexAttention"] = _flex()
    return found, missing


def plain(inputs: list[torch.Tensor], head: int, causal: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """out, dq, dk, dv of one head of the first sequence by plain PyTorch in ``dtype``."""
    q, k, v, dout = (x[0, :, head].detach().to(dtype) for x in inputs)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = (q @ k.T) * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def is_right(found: list[torch.Tensor], inputs: list[torch.Tensor], causal: bool) -> tuple[bool, float]:
    """Whether each tensor's error stays within twice plain PyTorch's, in two heads; and the largest error."""
    right, largest = True, 0.0
    for head in (0, inputs[0].shape[2] - 1):
        exact = plain(inputs, head, causal, torch.float64)
        bfloat16 = plain(inputs, head, causal, torch.bfloat16)
        for x, wanted, reference in zip(found, exact, bfloat16, strict=False):
            this = error(x[0, :, head], wanted)
            right &= this <= 2 * error(reference, wanted)  # False for NaN too
            largest = max(largest, this)
    return right, largest


def measure(case: Case, attentions: dict[str, Attention], rounds: int) -> list[dict[str, Any]]:
    """The forward's and the backward's row."""
    shape = (case.batch, case.seqlen, case.heads)
    q, k, v, dout = (
        torch.randn(*shape, width, device="cuda", dtype=torch.bfloat16)
        for width in (HEAD_DIM_QK, HEAD_DIM_QK, HEAD_DIM_V, HEAD_DIM_V)
    )
    pairs = case.batch * case.heads * case.seqlen**2 * (0.5 if case.causal else 1)
    rows: list[dict[str, Any]] = []
    for name, work in (("forward", FORWARD_WORK), ("backward", BACKWARD_WORK)):
        rows.append({**case._asdict(), "pass": name, "operations": 2 * pairs * work, "error": {}, "refused": {}})
    calls: list[dict[str, Callable[[], Any]]] = [{}, {}]
    for name, attend in attentions.items():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        try:
            passes = [functools.partial(_without_grad, attend, q, k, v, case.causal)]
            results: list[list[torch.Tensor]] = [[passes[0]()]]
            if name not in FORWARD_ONLY:
                out = attend(*leaves, case.causal)
                passes.append(functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True))
                results.append([results[0][0], *passes[1]()])
        except Exception as reason:  # of a library that does not take the shape
            rows[0]["refused"][name] = rows[1]["refused"][name] = repr(reason)[:200]
            continue
        for row, of_pass, found, call in zip(rows, calls, results, passes, strict=False):
            right, row["error"][name] = is_right(found, [q, k, v, dout], case.causal)
            if right:
                of_pass[name] = call
            else:
                row["refused"][name] = f"error {row['error'][name]:.1e} is more than twice plain PyTorch's"
    for row, of_pass in zip(rows, calls, strict=True):
        row["ms"] = in_shuffled_turns(of_pass, rounds)
        row["tflop_per_s"] = {name: row["operations"] / ms * 1e-9 for name, ms in row["ms"].items()}
    with torch.no_grad():
        rows[0]["host_us"] = host_microseconds(lambda: ours(q, k, v, case.causal), calls=12)
    return rows


def _without_grad(attend: Attention, *arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return attend(*arguments)


def _kernels() -> str:
    """Which of our kernels compute these calls here."""
    dims = (torch.bfloat16, HEAD_DIM_QK, HEAD_DIM_V)
    reason = plain_kernel_because(torch.cuda.get_device_capability(), triton.__version__, *dims)
    return "Hopper" if reason is None else "plain"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: TFLOP/s of every library."""
    names = list(dict.fromkeys(name for row in rows for name in row["ms"]))
    lines = ["| B,H,S | mask | pass | " + " | ".join(names) + " |", "|---" * (len(names) + 3) + "|"]
    for row in rows:
        cells = [f"{row['batch']},{row['heads']},{row['seqlen']}", "causal" if row["causal"] else "full", row["pass"]]
        cells += [f"{row['tflop_per_s'][name]:.0f}" if name in row["ms"] else "" for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every case, write, print."""
    arguments = parser(__doc__)
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    attentions, missing = libraries(options.peers)
    rows = []
    for case in CASES:
        torch.compiler.reset()  # else FlexAttention's recompilations reach PyTorch's limit
        with torch.cuda.stream(torch.cuda.Stream()):
            rows += measure(case, attentions, options.rounds)
        for row in rows[-2:]:
            print(json.dumps(row), flush=True)
    print(write("prefill", {"kernels": _kernels(), "rows": rows, "not_loaded": missing}, options.commit))
    print(table(rows))
    if any(OURS not in row["ms"] for row in rows):
        raise SystemExit("our own result was refused; see 'refused' above")


if __name__ == "__main__":
    main()
