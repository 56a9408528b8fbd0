"""``mla-plugin bench``: measure every installed backend on one call."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import mla_plugin
from mla_plugin.cli import model_shape
from mla_plugin.cli.model_shape import ModelShape
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.resolver import survey

DESCRIPTION = "Measure every installed backend that can run a call on this machine."
EPILOG = """\
Backends take turns in random order; the median is printed. On a GPU times are
those of CUDA events, so a short call shows its host time. TFLOP/s counts half
of the scores with a causal mask.

example: mla-plugin bench --heads 16 --seqlen 8192"""

ROUNDS = 7


def add_parser(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "bench",
        help="measure every installed backend on one call",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    model_shape.add_arguments(parser)
    parser.add_argument("--seqlen", type=model_shape.count, metavar="N", help="tokens; 4096 by default, 256 on a CPU")
    parser.add_argument("--batch-size", type=model_shape.count, default=1, metavar="N", help="sequences; 1 by default")
    parser.add_argument("--inference", action="store_true", help="no backward")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if this machine has it, else cpu")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")


def accepting(request: AttentionRequest) -> tuple[list[str], str, str]:
    """Backends that take the request, and those that the resolver chooses for the two passes."""
    decision = survey(request)
    if decision.plan is None:
        mla_plugin.resolve(request)  # raises with every reason
        raise AssertionError
    plan = decision.plan
    return [entry.backend for entry in decision.trace if entry.accepted], plan.forward_backend, plan.backward_backend


def milliseconds(call: Callable[[], object], device: str) -> float:
    """One run of a call."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def measure(calls: Mapping[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Median milliseconds of each, after a first run that is not counted."""
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    generator = torch.Generator().manual_seed(0)
    for _ in range(ROUNDS):
        for index in torch.randperm(len(calls), generator=generator).tolist():
            name = list(calls)[index]
            found[name].append(milliseconds(calls[name], device))
    return {name: statistics.median(times) for name, times in found.items()}


def tensors_of(shape: ModelShape, batch: int, seqlen: int, device: str) -> list[torch.Tensor]:
    """q, k, v and dout."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (
        (shape.num_heads, shape.head_dim_qk),
        (shape.num_kv_heads, shape.head_dim_qk),
        (shape.num_kv_heads, shape.head_dim_v),
        (shape.num_heads, shape.head_dim_v),
    )
    return [torch.randn(batch, seqlen, *size, dtype=shape.dtype, device=device, generator=generator) for size in sizes]


def bench(shape: ModelShape, batch: int, seqlen: int, is_training: bool, device: str) -> dict[str, Any]:
    """Milliseconds of both passes by backend, and the resolver's choice."""
    q, k, v, dout = tensors_of(shape, batch, seqlen, device)
    leaves = [x.requires_grad_(is_training) for x in (q, k, v)]
    request = AttentionRequest(
        "bshd",
        shape.dtype,
        device,
        batch_size=batch,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        max_seqlen_q=seqlen,
        max_seqlen_kv=seqlen,
        head_dim_qk=shape.head_dim_qk,
        head_dim_v=shape.head_dim_v,
        attn_mask_type="causal",
        is_training=is_training,
    )
    names, forward, backward = accepting(request)

    calls = {name: functools.partial(_attention, q, k, v, name) for name in names}
    with torch.set_grad_enabled(is_training):
        result: dict[str, Any] = {"forward": measure(calls, device)}
        if is_training:
            gradients = functools.partial(torch.autograd.grad, inputs=leaves, grad_outputs=dout, retain_graph=True)
            backwards = {name: functools.partial(gradients, call()) for name, call in calls.items()}
            result["backward"] = measure(backwards, device)
    pairs = batch * shape.num_heads * seqlen**2
    dims = {
        "forward": shape.head_dim_qk + shape.head_dim_v,
        "backward": 3 * shape.head_dim_qk + 2 * shape.head_dim_v,
    }
    result["choice"] = {"forward": forward, "backward": backward}
    result["tera_operations"] = {name: pairs * dim / 1e12 for name, dim in dims.items()}
    return result


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str) -> torch.Tensor:
    out = mla_plugin.attention(q, k, v, attn_mask_type="causal", backend=backend)
    assert isinstance(out, torch.Tensor)
    return out


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    device = model_shape.device_of(arguments)
    shape = model_shape.of_arguments(arguments)
    seqlen = arguments.seqlen or (4096 if device == "cuda" else 256)
    result = bench(shape, arguments.batch_size, seqlen, not arguments.inference, device)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    where = torch.cuda.get_device_name() if device == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
    print(f"{shape}")
    print(f"causal, batch {arguments.batch_size}, {seqlen} tokens, on {where}; * is what the resolver runs\n")
    passes = [name for name in ("forward", "backward") if name in result]
    print(f"{'':<12}" + "".join(f"{name:>32}" for name in passes))
    for backend in result["forward"]:
        cells = []
        for name in passes:
            ms, operations = result[name][backend], result["tera_operations"][name]
            mark = "*" if result["choice"][name] == backend else " "
            cells.append(f"{ms:>11.3f} ms {operations / ms * 1e3:>8.3g} TFLOP/s{mark}")
        print(f"{backend:<12}" + "".join(cells))
    return 0
