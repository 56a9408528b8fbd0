"""Peak memory of attention forward and backward on the CPU against the sequence length.

    python -m benchmarks.memory            prints a table and writes benchmarks/results/memory_cpu.json

Our fallback, backend ``sdpa``, compared with TransformerEngine's unfused attention: the whole mask, the whole score
matrix, softmax in float32, and packed sequences unpacked to a padded batch (its ``UnfusedDotProductAttention``, before
its PR #3063). DeepSeek-V3's head dims, bfloat16, two heads. Each point is a fresh process; its number is the resident
set's high-water mark (VmHWM) above what was resident when the inputs stood. Nothing is measured that is not first found
correct against the float64 oracle at a small size. Linux only; about three minutes and 12 GiB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import checkout
from mla_plugin import resolve
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest, Residuals
from mla_plugin.operations.attention import dispatch
from mla_plugin.reference import attention_with_gradients

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "memory_cpu.json"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
LIMIT = 24 << 30
"""Address space of one process, in bytes; what does not fit is reported as such."""
BYTES_PER_SCORE = 12
"""What ``unfused`` holds at least at once: scores in bfloat16 and float32, masked scores, weights in bfloat16."""
HEADS, HEAD_DIM_QK, HEAD_DIM_V = 2, 192, 128
FRACTIONS = (1, 2, 4, 4)
"""The packed batch: one sequence of the full length, one of a half, two of a quarter."""
CALLS = ("bshd causal", "thd padding_causal")
EXCEEDS = "exceeds 24 GiB"

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Way = Callable[[AttentionRequest, AttentionTensors, torch.Tensor], tuple[torch.Tensor, Gradients]]


def make(call: str, length: int) -> tuple[AttentionRequest, AttentionTensors, torch.Tensor]:
    """The request, its random tensors and dout."""
    qkv_format, mask = call.split()
    is_packed = qkv_format == "thd"
    lengths = torch.tensor([length // fraction for fraction in FRACTIONS]) if is_packed else torch.tensor([length])
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
    tokens = (int(cu_seqlens[-1]),) if is_packed else (1, length)
    dims = (HEAD_DIM_QK, HEAD_DIM_QK, HEAD_DIM_V, HEAD_DIM_V)
    q, k, v, dout = (torch.randn(*tokens, HEADS, dim, dtype=torch.bfloat16) for dim in dims)
    request = AttentionRequest(
        qkv_format=qkv_format,
        dtype=q.dtype,
        device_type="cpu",
        batch_size=len(lengths),
        num_heads=HEADS,
        num_kv_heads=HEADS,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        head_dim_qk=HEAD_DIM_QK,
        head_dim_v=HEAD_DIM_V,
        attn_mask_type=mask,
        window_size=(-1, 0),
        bottom_right_diagonal=False,
        is_training=True,
    )
    offsets = cu_seqlens if is_packed else None
    return request, AttentionTensors(q, k, v, HEAD_DIM_QK**-0.5, offsets, offsets), dout


def sdpa(request: AttentionRequest, tensors: AttentionTensors, dout: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
    """The backend, as the library runs it."""
    plan = resolve(request, backend="sdpa")
    output = dispatch.forward(plan, tensors)
    gradients = dispatch.backward(plan, Residuals(tensors, output.out, output.lse), dout, None)
    return output.out, (gradients.dq, gradients.dk, gradients.dv)


def unfused(request: AttentionRequest, tensors: AttentionTensors, dout: torch.Tensor) -> tuple[torch.Tensor, Gradients]:
    """Whole matrices, by autograd."""
    leaves = [x.detach().requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
    cu_seqlens, length = tensors.cu_seqlens_q, request.max_seqlen_q
    hidden = torch.ones(request.batch_size, 1, length, length, dtype=torch.bool).triu_(1)
    q, k, v = leaves
    if cu_seqlens is not None:
        q, k, v = (_unpacked(x, cu_seqlens, length) for x in leaves)
        beyond = torch.arange(length) >= cu_seqlens.diff().view(-1, 1, 1, 1)
        hidden |= beyond | beyond.transpose(-1, -2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2)) * tensors.softmax_scale
    weights = scores.float().masked_fill(hidden, -10000.0).softmax(-1).to(q.dtype)
    out = (weights @ v).transpose(1, 2)
    if cu_seqlens is not None:
        out = torch.cat([row[:n] for row, n in zip(out, cu_seqlens.diff().tolist(), strict=True)])
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    return out.detach(), (dq, dk, dv)


def _unpacked(x: torch.Tensor, cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """[T, H, D] as [B, S, H, D], zeros after each sequence."""
    parts = x.split(cu_seqlens.diff().tolist())
    return torch.stack([torch.nn.functional.pad(part, (0, 0, 0, 0, 0, length - part.shape[0])) for part in parts])


WAYS: dict[str, Way] = {"sdpa": sdpa, "unfused": unfused}


def check(way: str, call: str, length: int = 96) -> None:
    """Refuse to measure what is wrong: every error is at most twice plain bfloat16's, plus a rounding."""
    request, tensors, dout = make(call, length)
    exact, exact_gradients = attention_with_gradients(request, tensors, dout)
    plain, plain_gradients = attention_with_gradients(request, tensors, dout, compute_dtype=torch.bfloat16)
    out, gradients = WAYS[way](request, tensors, dout)
    names = ("dq", "dk", "dv")
    rows = [("out", out, exact.out, plain.out)]
    rows += [
        (n, x, getattr(exact_gradients, n), getattr(plain_gradients, n)) for n, x in zip(names, gradients, strict=True)
    ]
    for name, got, wanted, low in rows:
        error, budget = (float((x.double() - wanted).abs().max()) for x in (got, low))
        budget = 2 * budget + 2**-8 * float(wanted.abs().max())
        if not error <= budget:
            raise SystemExit(f"{way}, {call}: the error of {name} is {error:.2g} > {budget:.2g}; nothing was measured")


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert match is not None, field
    return int(match[1]) << 10


def measure(way: str, call: str, length: int) -> None:
    """In the fresh process: print the bytes that the call added to the resident set at its highest."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    WAYS[way](*make(call, 128))  # what a first call loads is not the call's
    arguments = make(call, length)
    before = _status("VmRSS")
    try:
        WAYS[way](*arguments)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        print(json.dumps(None))
        return
    print(json.dumps(max(0, _status("VmHWM") - before)))


def point(way: str, call: str, length: int) -> float | None:
    """Mebibytes of one point, or None when it does not fit; what cannot fit is not tried, to spare the machine."""
    batch_size = len(FRACTIONS) if call.startswith("thd") else 1
    if way == "unfused" and batch_size * HEADS * length**2 * BYTES_PER_SCORE >= LIMIT:
        return None
    command = [sys.executable, __file__, "--point", way, call, str(length)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise SystemExit(f"{way}, {call}, {length} tokens failed:\n{done.stderr}")
    value = json.loads(done.stdout)
    return None if value is None else round(value / 2**20, 1)


def _exponent(points: dict[int, float | None]) -> float:
    """The slope of log(memory) against log(tokens) over the two longest that fit: 1 is linear, 2 quadratic."""
    (s, a), (t, b) = [(length, value) for length, value in points.items() if value][-2:]
    return round(math.log(b / a) / math.log(t / s), 2)


def _show(call: str, rows: dict[str, dict[int, float | None]]) -> None:
    print(f"\n{call}: peak MiB above the inputs, {HEADS} heads, {HEAD_DIM_QK}/{HEAD_DIM_V}, bfloat16")
    print(f"{'tokens':>8}" + "".join(f"{way:>16}" for way in rows))
    for length in LENGTHS:
        cells = (rows[way][length] for way in rows)
        print(f"{length:>8}" + "".join(f"{EXCEEDS if cell is None else format(cell, '.1f'):>16}" for cell in cells))
    print(f"{'exponent':>8}" + "".join(f"{_exponent(points):>16}" for points in rows.values()))


def _cpu() -> str:
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return match[1] if match else platform.machine()


def main() -> None:
    """Check, measure, print, write."""
    torch.manual_seed(0)
    results: dict[str, dict[str, dict[int, float | None]]] = {}
    for call in CALLS:
        for way in WAYS:
            check(way, call)
        results[call] = {way: {length: point(way, call, length) for length in LENGTHS} for way in WAYS}
        _show(call, results[call])
    record = {
        "benchmark": "memory",
        "unit": "MiB of peak resident set above the inputs, forward and backward; null exceeds the limit",
        "limit_bytes": LIMIT,
        "heads": HEADS,
        "head_dim_qk": HEAD_DIM_QK,
        "head_dim_v": HEAD_DIM_V,
        "dtype": "bfloat16",
        "packed_lengths": [f"S/{fraction}" for fraction in FRACTIONS],
        "points": results,
        "exponent": {call: {way: _exponent(rows[way]) for way in rows} for call, rows in results.items()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu(),
        "threads": 1,
        "commit": checkout.commit(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", nargs=3, metavar=("WAY", "CALL", "LENGTH"), help="measure one point and exit")
    given = parser.parse_args().point
    if given:
        measure(given[0], given[1], int(given[2]))
    else:
        main()
