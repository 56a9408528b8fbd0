"""Seconds of a new shape's first call on this GPU, with nothing tuned: what the static tile tables are for.

    python -m benchmarks.first_call

Each case runs in a separate process with an empty Triton cache. CUDA and our modules are loaded before the clock
starts; it stops when the GPU has finished. Each is taken twice:

- "new shape": the process has compiled another kernel, of one line, and called PyTorch's autograd before.
- "new process": it has not. Triton compiles its interface to CUDA and hashes itself, once a machine and once a process,
  and PyTorch's first ``autograd.grad`` loads sympy.

Writes benchmarks/results/first_call_<gpu>.json, prints it last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.common import parser, write
from mla_plugin.kernels import mla_attention, mla_decode_attention

PREFILL = {"prefill 192/128": (16, 4096, 192, 128), "prefill 128/128": (16, 1000, 128, 128)}  # H, S, head dims
DECODE = {"decode H 16": (32, 16, 4096), "decode H 128": (32, 128, 4096)}  # B, H, S_kv
RANK, ROPE = 512, 64


@triton.jit
def add_one(x):  # noqa: ANN001, ANN201  (Triton would look the types up)
    """Another kernel."""
    tl.store(x, tl.load(x) + 1.0)


def load_compiler() -> None:
    """What any kernel and any backward before the clock's call would have loaded."""
    x = torch.zeros(1, device="cuda", requires_grad=True)
    add_one[(1,)](x.detach())
    torch.autograd.grad(x * 2.0, x, torch.ones_like(x))


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Until the GPU has finished, and what the call returned."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def first_call(name: str) -> dict[str, float]:
    """The case's first call, and the first backward after it."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    if name in DECODE:
        batch, heads, seqlen = DECODE[name]
        q = torch.randn(batch, 1, heads, RANK + ROPE, **options).split([RANK, ROPE], -1)
        cache = torch.randn(batch, seqlen, RANK + ROPE, **options).split([RANK, ROPE], -1)
        return {"forward": seconds(lambda: mla_decode_attention(*q, *cache, softmax_scale=192**-0.5))[0]}
    heads, seqlen, head_dim_qk, head_dim_v = PREFILL[name]
    widths = (head_dim_qk, head_dim_qk, head_dim_v)
    tensors = [torch.randn(1, seqlen, heads, width, requires_grad=True, **options) for width in widths]
    forward, out = seconds(lambda: mla_attention(*tensors, is_causal=True))
    dout = torch.randn_like(out)
    backward, _ = seconds(lambda: torch.autograd.grad(out, tensors, dout))
    return {"forward": forward, "backward": backward}


def in_new_process(name: str, *options: str) -> dict[str, float]:
    """``first_call`` where nothing of ours is compiled yet."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--case", name, *options]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure every case in its process, write, print."""
    arguments = parser(__doc__)
    arguments.add_argument("--case", choices=[*PREFILL, *DECODE], help="this case alone, in this process")
    arguments.add_argument("--loaded", action="store_true", help="with --case: after another kernel and a backward")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    if options.case is not None:
        if options.loaded:
            load_compiler()
        print(json.dumps(first_call(options.case)))
        return
    found = {
        name: {"new shape": in_new_process(name, "--loaded"), "new process": in_new_process(name)}
        for name in (*PREFILL, *DECODE)
    }
    print(write("first_call", {"seconds": found}, options.commit))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
