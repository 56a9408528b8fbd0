"""Seconds of a new shape's first call on this GPU, with nothing compiled before: what the static tile tables are for.

    python benchmarks/first_call.py

Each case runs in a process of its own with an empty Triton cache. CUDA and our modules are loaded before the clock
starts; it stops when the GPU has finished. Writes benchmarks/results/first_call_<gpu>.json, prints it last.
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
from common import parser, write

from mla_plugin.kernels import mla_attention, mla_decode_attention

PREFILL = {"prefill 192/128": (16, 4096, 192, 128), "prefill 128/128": (16, 1000, 128, 128)}  # H, S, head dims
DECODE = {"decode H 16": (32, 16, 4096), "decode H 128": (32, 128, 4096)}  # B, H, S_kv
RANK, ROPE = 512, 64


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


def in_new_process(name: str) -> dict[str, float]:
    """``first_call`` where nothing is compiled yet."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure every case in its process, write, print."""
    arguments = parser(__doc__)
    arguments.add_argument("--case", choices=[*PREFILL, *DECODE], help="this case alone, in this process")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    if options.case is not None:
        print(json.dumps(first_call(options.case)))
        return
    found = {name: in_new_process(name) for name in (*PREFILL, *DECODE)}
    print(write("first_call", {"seconds": found}, options.commit))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
