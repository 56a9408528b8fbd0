"""Time on the host of an attention call, layer by layer, compared with each backend's library called directly.

    python -m benchmarks.dispatch            on this machine's GPU, or its CPU; prints a table, writes
                                             benchmarks/results/dispatch_<device>.json

bfloat16, causal, 192/128: on a GPU [1, 512, 16, D], the time until a call returns, with the GPU idle at first; on a CPU
[1, 16, 2, D], which computes meanwhile. Under the layers lies a backend that does nothing, so that only the way to it
is timed; each layer's figure is what it adds. Microseconds, best of many short runs in shuffled turns, without
gradients and with them. ``x.add_`` says how fast the host is.

For each backend there are its library's own function, our whole call, its backward, and what of the call is the way to
the hook and what the hook takes above the library's function: less than nothing where the plugin calls something below
it. FlashAttention 2's is PyTorch's operator between the two copies that unequal head dims take: V with zero columns,
and out without them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mla_plugin
from benchmarks import checkout
from mla_plugin import Accepted, AttentionOutput, AttentionRequest, AttentionTensors, Gradients, Plan, hookimpl, resolve
from mla_plugin.arguments.options import CallOptions
from mla_plugin.device import installed_packages as device_packages
from mla_plugin.hooks.attention import Residuals
from mla_plugin.hooks.manager import get_manager
from mla_plugin.operations.attention import dispatch
from mla_plugin.operations.attention.known import known_of, plain_known_of
from mla_plugin.operations.attention.run import is_observed, run_known

RESULTS = Path(__file__).parent / "results"
LIMIT_US = 10.0
"""Of a cached resolve and a hook."""
WHOLE_US, TRAINED_US = 45.0, 80.0
"""Of a whole call on a GPU's host that takes ``HOST_US`` for ``x.add_``, without gradients and with them."""
HOST_US = 6.6
HEAD_DIM_QK, HEAD_DIM_V = 192, 128
BACKENDS = ("triton", "fa3", "fa4", "fa2", "cudnn", "sdpa")


class Nothing:
    """A backend that returns the same results at once."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        self.output = AttentionOutput(out, q.new_empty((1, q.shape[2], q.shape[1]), dtype=torch.float32))
        self.gradients = Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))

    @hookimpl
    def select_backend(self, request: AttentionRequest) -> Accepted:
        """Accept, behind every other backend."""
        return Accepted(priority=-1)

    @hookimpl
    def forward(self, plan: Plan, tensors: AttentionTensors) -> AttentionOutput:
        """Return the same output every time."""
        return self.output

    @hookimpl
    def backward(self, plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        """Return the same gradients every time."""
        return self.gradients


def microseconds(function: Callable[[], object], calls: int = 100, runs: int = 30) -> float:
    """Best of many runs, for one call."""
    best = float("inf")
    for _ in range(runs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def in_turns(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """``microseconds`` of each, in shuffled turns: a host has slow moments, which then meet one turn of each."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(6):
        for name in random.sample(list(functions), len(functions)):
            best[name] = min(best[name], microseconds(functions[name], runs=8))
    return best


def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    """What each layer between the caller and an empty backend adds."""
    backend = Nothing(q, k, v)
    get_manager().register(backend, "nothing")
    tensors, options = AttentionTensors(q, k, v, HEAD_DIM_QK**-0.5), CallOptions()
    known = known_of(tensors, options, "nothing")
    plan = known.plan
    assert plan is not None
    if dispatch.forward(plan, tensors) is not backend.output:
        raise SystemExit("the dispatch did not reach the backend; nothing was timed")
    whole = microseconds(lambda: mla_plugin.attention(q, k, v, backend="nothing"))
    if plain_known_of(q, k, v, None, options, "nothing")[1] is not known:
        raise SystemExit("the call is not known by its arguments; nothing was timed")
    observed = microseconds(lambda: is_observed(q, k, v))
    lookup = microseconds(lambda: plain_known_of(q, k, v, None, options, "nothing"))
    run = microseconds(lambda: run_known(known, tensors))
    hook = microseconds(lambda: dispatch.forward(plan, tensors))
    plain = microseconds(lambda: backend.forward(plan, tensors))
    return {
        "arguments to tensors and options": whole - observed - lookup - run,
        "is the call observed, traced or transformed": observed,
        "look-up of the request and the decision": lookup,
        "guards around the hook and checks of its results": run - hook,
        "the hook": hook - plain,
        "all of it": whole,
        "a cached resolve and the hook": hook + microseconds(lambda: resolve(known.request, backend="nothing")),
    }


ATTEND = "F.scaled_dot_product_attention"
OWN = {
    "triton": "mla_plugin.kernels.mla_attention",
    "fa3": "flash_attn_interface.flash_attn_func",
    "fa4": "flash_attn.cute.flash_attn_func",
    "fa2": "aten._flash_attention_forward",
    "cudnn": "aten._scaled_dot_product_cudnn_attention",
    "sdpa": "aten._scaled_dot_product_efficient_attention",
}
"""What each backend calls on a GPU, as a user would call it."""


def padded_flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The fewest launches that make FlashAttention 2's result of these head dims: three."""
    wide = torch.cat((v, zeros), -1)
    found = torch.ops.aten._flash_attention_forward.default(
        q, k, wide, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=HEAD_DIM_QK**-0.5
    )
    return torch.narrow_copy(found[0], -1, 0, HEAD_DIM_V)


def own_function(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object] | None:
    """A call of the library's own function; None where it is not there."""
    module, _, name = OWN[backend].rpartition(".")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    if backend == "fa2":
        return functools.partial(padded_flash_attention, q, k, v, v.new_zeros(*v.shape[:-1], HEAD_DIM_QK - HEAD_DIM_V))
    if module == "aten":
        return functools.partial(getattr(torch.ops.aten, name).default, *heads_first, None, True, 0.0, True)
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as reason:
        print(f"{OWN[backend]}: {reason}")
        return None
    if backend == "triton":
        return functools.partial(function, q, k, v, is_causal=True)
    return functools.partial(function, q, k, v, causal=True)


def functions(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, refused: dict[str, str] | None = None
) -> dict[str, Callable[[], object]]:
    """Whole calls by name, a library's own function before our call of the backend; ``refused`` gets the reasons."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    found: dict[str, Callable[[], object]] = {ATTEND: functools.partial(attend, *heads_first, is_causal=True)}
    for name in BACKENDS:
        ours = functools.partial(mla_plugin.attention, q, k, v, backend=name)
        try:
            ours()
        except mla_plugin.NoBackendError as reasons:
            if refused is not None:
                refused[name] = str(reasons)
            continue
        own = own_function(name, q, k, v) if q.is_cuda else None
        if own is not None:
            found[OWN[name]] = own
        found[f"mla_plugin.attention, {name}"] = ours
    return found


def shares(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, calls: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Of each backend's call: the way to its hook, the hook, and the hook above the library's own function."""
    found = {}
    tensors = AttentionTensors(q, k, v, HEAD_DIM_QK**-0.5)
    for name in BACKENDS:
        whole = calls.get(f"mla_plugin.attention, {name}")
        if whole is None:
            continue
        known = known_of(tensors, CallOptions(), name)
        assert known.plan is not None
        vars(tensors)["kept"] = known.kept
        hook = microseconds(functools.partial(dispatch.forward, known.plan, tensors))
        found[name] = {"the way to the hook": whole - hook, "the hook": hook}
        own = calls.get(OWN[name] if q.is_cuda else ATTEND)
        if own is not None:
            found[name]["the hook above the library's own function"] = hook - own
    return found


def backward(call: Callable[[], object], inputs: Sequence[torch.Tensor]) -> float:
    """The backward of one call, again and again."""
    out = call()
    out = out[0] if isinstance(out, tuple) else out
    assert isinstance(out, torch.Tensor)
    dout = torch.randn_like(out)
    return microseconds(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True, allow_unused=True))


def main() -> None:
    """Time, print, write; exit 1 where choosing costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="recorded in the result; default: of this checkout")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (1, 512, 16) if device == "cuda" else (1, 16, 2)
    q, k, v = (
        torch.randn(*shape, width, device=device, dtype=torch.bfloat16)
        for width in (HEAD_DIM_QK, HEAD_DIM_QK, HEAD_DIM_V)
    )
    one = torch.ones(1, device=device)
    with torch.no_grad():
        parts = layers(q, k, v)
        refused: dict[str, str] = {}
        rows = in_turns({"x.add_": lambda: one.add_(1), **functions(q, k, v, refused)})
        of_backends = shares(q, k, v, rows)
    trained = [x.clone().requires_grad_() for x in (q, k, v)]
    calls = functions(*trained)
    gradients = in_turns(calls)
    backwards = {name: backward(call, trained) for name, call in calls.items() if "aten." not in name}
    for name, value in parts.items():
        print(f"{name:<52} {value:7.2f} us")
    for name, value in rows.items():
        others = (gradients.get(name, float("nan")), backwards.get(name, float("nan")))
        print(f"{name:<52} {value:7.1f} us, with gradients {others[0]:7.1f} us, backward {others[1]:7.1f} us")
    for name, shared in of_backends.items():
        print(f"{name}: " + ", ".join(f"{part} {value:.1f} us" for part, value in shared.items()))
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    record = {
        "benchmark": "dispatch",
        "unit": "microseconds",
        "layers": {name: round(value, 2) for name, value in parts.items()},
        "calls": {name: round(value, 1) for name, value in rows.items()},
        "calls_with_gradients": {name: round(value, 1) for name, value in gradients.items()},
        "backwards": {name: round(value, 1) for name, value in backwards.items()},
        "backends": {name: {x: round(us, 1) for x, us in shared.items()} for name, shared in of_backends.items()},
        "limit": LIMIT_US,
        "refused": refused,
        "packages": dict(device_packages()),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": checkout.commit(options.commit),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"dispatch_{gpu.replace(' ', '_')}.json").write_text(json.dumps(record, indent=2) + "\n")
    if parts["a cached resolve and the hook"] > LIMIT_US:
        raise SystemExit(f"a cached resolve and a hook take more than {LIMIT_US} us")
    if device == "cuda":
        slow = list(slower(record))
        if slow:
            raise SystemExit("\n".join(slow))


def slower(record: Mapping[str, Any]) -> Iterator[str]:
    """Calls that take more than they may, after ``x.add_`` says how fast the host is.

    ``fa2`` may take what the fewest launches that make its result take by themselves.
    """
    factor = max(1.0, record["calls"]["x.add_"] / HOST_US)
    for calls, most in ((record["calls"], WHOLE_US), (record["calls_with_gradients"], TRAINED_US)):
        for name in BACKENDS:
            found = calls.get(f"mla_plugin.attention, {name}")
            if found is not None and name != "fa2" and found > factor * most:
                yield f"mla_plugin.attention, {name}: {found} us, more than {factor:.2f} * {most}"


if __name__ == "__main__":
    main()
