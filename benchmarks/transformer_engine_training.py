"""Training steps inside TransformerEngine's own CUDA build, with NVTE_MLA_TRITON unset, "1" and "true".

    python -m benchmarks.transformer_engine_training --json benchmarks/results/transformer_engine_h200.json

The program that trains (``--train``) knows nothing of this library. Each variant is a separate process:

===========  ==========================================================================================================
plain        TransformerEngine alone
again        the same once more: cuDNN's backward need not repeat itself bit for bit
unset, true  under ``python -m mla_plugin.run``, NVTE_MLA_TRITON unset or "true": losses as near ``plain`` as ``again``
one          under ``python -m mla_plugin.run``, NVTE_MLA_TRITON=1: our kernels where head_dim_qk != head_dim_v
slot         NVTE_PLUGIN=mla_plugin.compat.transformer_engine, NVTE_MLA_TRITON=1: losses equal ``one`` bit for bit
fill         under ``python -m mla_plugin.run``, MLA_PLUGIN_TE=fill; ``packed`` alone, where cuDNN is switched off
===========  ==========================================================================================================

Workloads: ``attention`` (DotProductAttention between plain projections, heads 192/128), ``mla_layer`` (a layer of
TransformerEngine's own modules with DeepSeek-V3's head dims: RMSNorm, low-rank projections, DotProductAttention,
LayerNormMLP), ``transformer_layer`` (its TransformerLayer, equal head dims: untouched), ``packed`` (thd, causal,
NVTE_FUSED_ATTN=0: TransformerEngine's unfused attention), ``graph`` (forward and backward captured in a CUDA graph).

For each: the losses, milliseconds a step (and of ``attention`` alone), peak memory, the kernels that took most of the
time in one profiled step, and the lines in which TransformerEngine and this library log their choice. ``--tiny`` runs
the whole on a CPU, over the tests' stand-in for the compiled extension, to find mistakes in this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
TE_VERSION = "2.20.2"
RUN = ("-m", "mla_plugin.run")
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "plain": ((), {}),
    "again": ((), {}),
    "unset": (RUN, {}),
    "true": (RUN, {"NVTE_MLA_TRITON": "true"}),
    "one": (RUN, {"NVTE_MLA_TRITON": "1"}),
    "slot": ((), {"NVTE_MLA_TRITON": "1", "NVTE_PLUGIN": "mla_plugin.compat.transformer_engine"}),
    "fill": (RUN, {"MLA_PLUGIN_TE": "fill"}),
}
OURS = ("plain", "again", "unset", "true", "one", "slot")
WORKLOADS: dict[str, tuple[str, ...]] = {
    "attention": OURS,
    "mla_layer": OURS,
    "transformer_layer": ("plain", "one"),
    "packed": ("plain", "fill"),
    "graph": ("plain", "one"),
}
TINY = ("attention", "packed")
Step = Callable[[], torch.Tensor]
Losses = dict[str, dict[str, Any]]


class Sizes:
    """Shapes of one run: DeepSeek-V3's heads, or next to nothing."""

    def __init__(self, tiny: bool) -> None:
        self.device, self.dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
        self.tokens, self.heads, self.hidden = (8, 2, 16) if tiny else (4096, 16, 2048)
        self.head_dim_qk, self.head_dim_v, self.rope = (24, 16, 8) if tiny else (192, 128, 64)
        self.rank = 16 if tiny else 512
        self.steps = 3 if tiny else 20


def import_te(tiny: bool) -> Any:
    """TransformerEngine, or its Python over a stand-in for the extension."""
    if tiny:
        from tests.compat import te_host

        te_host.import_transformer_engine(TE_VERSION)
    import transformer_engine.pytorch as te

    return te


class Attention(torch.nn.Module):
    """Projections around DotProductAttention; q, k and v in its layout."""

    def __init__(self, te: Any, sizes: Sizes, qkv_format: str, tiny: bool) -> None:
        super().__init__()
        self.sizes, self.qkv_format, self.tiny = sizes, qkv_format, tiny
        heads, options = sizes.heads, {"device": sizes.device, "dtype": sizes.dtype, "bias": False}
        self.q = torch.nn.Linear(sizes.hidden, heads * sizes.head_dim_qk, **options)
        self.kv = torch.nn.Linear(sizes.hidden, heads * (sizes.head_dim_qk + sizes.head_dim_v), **options)
        self.out = torch.nn.Linear(heads * sizes.head_dim_v, sizes.hidden, **options)
        dims = (sizes.head_dim_qk, sizes.head_dim_v)
        self.core = te.DotProductAttention(heads, dims, qkv_format=qkv_format, attention_dropout=0.0)

    def forward(self, x: torch.Tensor, **lengths: Any) -> torch.Tensor:
        """[..., hidden] to the same; ``lengths`` go to DotProductAttention."""
        sizes = self.sizes
        q = self.q(x).unflatten(-1, (sizes.heads, sizes.head_dim_qk))
        k, v = self.kv(x).unflatten(-1, (sizes.heads, -1)).split((sizes.head_dim_qk, sizes.head_dim_v), dim=-1)
        is_ours = os.environ.get("NVTE_MLA_TRITON") == "1" or "MLA_PLUGIN_TE" in os.environ
        if self.tiny and not is_ours:
            from tests.compat.te_host import OnDevice

            q, k, v = (tensor.as_subclass(OnDevice) for tensor in (q, k, v))
        out = self.core(q, k, v, **lengths).as_subclass(torch.Tensor)
        return x + self.out(out)


class MlaLayer(torch.nn.Module):
    """One DeepSeek-V3 layer of TransformerEngine's own modules, sbhd, without rotary embedding."""

    def __init__(self, te: Any, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        heads, nope = sizes.heads, sizes.head_dim_qk - sizes.rope
        options = {"params_dtype": sizes.dtype, "bias": False}
        self.norm = te.RMSNorm(sizes.hidden, dtype=sizes.dtype)
        self.down = te.Linear(sizes.hidden, 2 * sizes.rank + sizes.rope, **options)
        self.up_q = te.LayerNormLinear(sizes.rank, heads * sizes.head_dim_qk, normalization="RMSNorm", **options)
        self.up_kv = te.LayerNormLinear(
            sizes.rank, heads * (nope + sizes.head_dim_v), normalization="RMSNorm", **options
        )
        self.core = te.DotProductAttention(
            heads, (sizes.head_dim_qk, sizes.head_dim_v), qkv_format="sbhd", attention_dropout=0.0
        )
        self.out = te.Linear(heads * sizes.head_dim_v, sizes.hidden, **options)
        self.mlp = te.LayerNormMLP(
            sizes.hidden, 4 * sizes.hidden, normalization="RMSNorm", activation="swiglu", **options
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, hidden] to the same."""
        sizes = self.sizes
        c_q, c_kv, k_rope = self.down(self.norm(x)).split((sizes.rank, sizes.rank, sizes.rope), dim=-1)
        q = self.up_q(c_q.contiguous()).unflatten(-1, (sizes.heads, -1))
        kv = self.up_kv(c_kv.contiguous()).unflatten(-1, (sizes.heads, -1))
        k_nope, v = kv.split((sizes.head_dim_qk - sizes.rope, sizes.head_dim_v), dim=-1)
        k = torch.cat((k_nope, k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)), dim=-1)
        x = x + self.out(self.core(q, k, v))
        return x + self.mlp(x)


def make(workload: str, te: Any, sizes: Sizes, tiny: bool) -> tuple[torch.nn.Module, Step]:
    """The model and a function that runs it on a fixed batch and returns the loss."""
    generator = torch.Generator().manual_seed(1)
    shape = {"packed": (sizes.tokens,), "mla_layer": (sizes.tokens, 1), "transformer_layer": (sizes.tokens, 1)}
    shape = shape.get(workload, (1, sizes.tokens))
    x, target = (torch.randn(*shape, sizes.hidden, generator=generator).to(sizes.device, sizes.dtype) for _ in range(2))
    arguments: dict[str, Any] = {}
    if workload in ("attention", "graph"):
        model: torch.nn.Module = Attention(te, sizes, "bshd", tiny)
    elif workload == "mla_layer":
        model = MlaLayer(te, sizes)
    elif workload == "transformer_layer":
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "kv_channels": 128}
        model = te.TransformerLayer(
            sizes.hidden,
            4 * sizes.hidden,
            sizes.heads,
            params_dtype=sizes.dtype,
            self_attn_mask_type="causal",
            **options,
        )
    else:
        model = Attention(te, sizes, "thd", tiny)
        lengths = [0, sizes.tokens // 2, sizes.tokens // 4, sizes.tokens // 8, sizes.tokens // 8]
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(sizes.device)
        arguments = {"attn_mask_type": "padding_causal", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        arguments |= {"max_seqlen_q": sizes.tokens // 2, "max_seqlen_kv": sizes.tokens // 2}
    return model, lambda: torch.nn.functional.mse_loss(model(x, **arguments).float(), target.float())


def captured(model: torch.nn.Module, step: Step) -> Step:
    """The step's forward and backward as one CUDA graph; the losses of the step itself are expected of it.

    A graph reads its inputs where they were and does not keep them: whoever replays it has to hold ``step``.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step().backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
        loss.backward()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def kernels_of(train: Callable[[], object]) -> list[tuple[str, float]]:
    """The kernels of one step that took most of the time, with their milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    return [(event.key[:100], round(event.device_time_total / 1000, 3)) for event in events[:14]]


def train(workload: str, tiny: bool) -> dict[str, Any]:
    """Train for some steps; losses, milliseconds a step, peak memory and kernels."""
    real, te = torch.cuda.is_available, import_te(tiny)
    sizes = Sizes(tiny)
    torch.manual_seed(0)
    context: Any = nullcontext()
    if tiny:
        from tests.compat.te_host import CudaIsCpu

        torch.set_num_threads(1)
        context, torch.cuda.is_available = CudaIsCpu(), lambda: True
    with context:
        model, step = make(workload, te, sizes, tiny)
        torch.cuda.is_available = real
        run = captured(model, step) if workload == "graph" else step
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

        def one() -> torch.Tensor:
            if workload != "graph":
                optimizer.zero_grad(set_to_none=True)
            loss = run()
            if workload != "graph":
                loss.backward()
            optimizer.step()
            return loss.detach().clone()

        losses = [one() for _ in range(sizes.steps)]
        result: dict[str, Any] = {"losses": [loss.item() for loss in losses]}
        if not tiny:
            result |= {"step_ms": milliseconds(one), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
            result["kernels"] = kernels_of(one)
        if not tiny and workload == "attention":
            result["attention_ms"] = milliseconds(attention_alone(model.core, sizes))
    return result


def attention_alone(core: Callable[..., torch.Tensor], sizes: Sizes) -> Callable[[], None]:
    """Forward and backward of the DotProductAttention itself."""
    shapes = ((sizes.heads, sizes.head_dim_qk), (sizes.heads, sizes.head_dim_qk), (sizes.heads, sizes.head_dim_v))
    q, k, v = (
        torch.randn(1, sizes.tokens, *shape, device=sizes.device, dtype=sizes.dtype, requires_grad=True)
        for shape in shapes
    )
    dout = torch.randn(1, sizes.tokens, sizes.heads * sizes.head_dim_v, device=sizes.device, dtype=sizes.dtype)

    def run() -> None:
        torch.autograd.grad(core(q, k, v), (q, k, v), dout)

    return run


def milliseconds(one: Callable[[], object], repeats: int = 30) -> float:
    """Median time of a step, the device idle before and after."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        one()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return round(sorted(times)[repeats // 2], 3)


def variant_of(workload: str, variant: str, tiny: bool) -> dict[str, Any]:
    """One process: what it measured, and what the two libraries logged."""
    launcher, variables = VARIANTS[variant]
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("NVTE_", "MLA_PLUGIN_"))}
    environ |= {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "1", **variables}
    paths = [str(ROOT), environ.get("PYTHONPATH", "")]
    if tiny:
        from tests.compat.te_host import folder_of

        environ |= {"TRITON_INTERPRET": "1", "NVTE_FUSED_ATTN": "0", "OMP_NUM_THREADS": "1"}
        paths.append(str(folder_of(TE_VERSION)))
    if workload == "packed":
        environ["NVTE_FUSED_ATTN"] = "0"
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, *launcher, __file__, "--train", workload, *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-4000:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    lines = (done.stdout + done.stderr).splitlines()
    choices = [line for line in lines if "Running with" in line or "mla_plugin]" in line or "NVTE_PLUGIN" in line]
    result["log"] = list(dict.fromkeys(choices))
    return result


def compare(found: Losses, eager: Losses | None = None) -> dict[str, Any]:
    """What the losses of the variants say about one another, and of a CUDA graph's about the same steps without it.

    Args:
        found: what each variant measured.
        eager: for ``graph`` what each variant measured in ``attention``, whose model and batch are the same.
    """
    said: dict[str, Any] = {}
    for name, result in found.items():
        others = {"plain": found.get("plain") if name != "plain" else None, "eager": (eager or {}).get(name)}
        for other, reference in others.items():
            if "losses" not in result or reference is None or "losses" not in reference:
                continue
            pairs = list(zip(result["losses"], reference["losses"], strict=True))
            worst = max(abs(a - b) / abs(b) for a, b in pairs)
            said.setdefault(name, {})[other] = {
                "equal": all(a == b for a, b in pairs),
                "largest_relative_difference": worst,
            }
    if all("losses" in found.get(name, {}) for name in ("slot", "one")):
        said["slot_equals_one"] = found["slot"]["losses"] == found["one"]["losses"]
    return said


def main() -> None:
    """Parent: all workloads and variants. ``--train``: one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, help="these workloads alone")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with next to no work")
    parser.add_argument("--train", choices=WORKLOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.train:
        print(json.dumps(train(options.train, options.tiny)))
        return
    results: dict[str, Any] = {"torch": torch.__version__, "transformer_engine": TE_VERSION, "workloads": {}}
    if torch.cuda.is_available():
        results["device"] = torch.cuda.get_device_name()
    for workload in options.only or (TINY if options.tiny else WORKLOADS):
        found = {variant: variant_of(workload, variant, options.tiny) for variant in WORKLOADS[workload]}
        eager = results["workloads"].get("attention", {}).get("variants") if workload == "graph" else None
        results["workloads"][workload] = {"variants": found, "losses": compare(found, eager)}
        for variant, result in found.items():
            shown = {
                name: result[name] for name in ("step_ms", "attention_ms", "peak_gib", "log", "error") if name in result
            }
            print(workload, variant, [round(loss, 5) for loss in result.get("losses", [])[::5]], shown, flush=True)
            for kernel in result.get("kernels", [])[:6]:
                print("    ", *kernel)
        print(workload, json.dumps(results["workloads"][workload]["losses"]), flush=True)
        if options.json:  # after each workload: a later one that fails leaves this
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
