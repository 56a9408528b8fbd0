"""What V padded to q's width costs one Megatron attention call on packed sequences, forward and backward, on this GPU.

    python -m benchmarks.megatron_v_width

Megatron-Core's main appends zeros to V (128 to 192 columns in DeepSeek's models) before the core attention of a packed
batch and trims the output (Megatron-LM issue #6240, whose four batches these are). The ways, all through
``MLACoreAttention``, causal, bfloat16:

- ``padded``: Megatron pads and trims, and the attention computes all 192 columns, as every other core attention does;
- ``recognised``: Megatron pads and trims, and the core attention leaves the zeros out;
- ``native``: nothing is padded, as in Megatron-Core 0.16 and after ``mla_plugin.register("megatron")``;
- ``qk-clip``: ``native``, and the largest score of each head is recorded.

A way whose output or gradients err by more than twice plain PyTorch in bfloat16, against float64, is not timed.
Milliseconds are medians of ``triton.testing.do_bench``; the rounds go through all ways in turn, because a GPU's clock
drifts. Writes benchmarks/results/megatron_v_width_<gpu>.json, prints a table last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import megatron.core
import torch
import triton
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig

import mla_plugin
from benchmarks import checkout
from mla_plugin.compat.megatron import MLACoreAttention

RESULTS = Path(__file__).parent / "results"
CASES = ((4096, 4), (8192, 4), (16384, 4), (16384, 1))
"""Tokens, and sequences of equal length among them."""
NOPE, ROPE, V = 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5

Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Way = Callable[..., torch.Tensor]


def core(*, v_channels: int | None = V, qk_clip: bool = False) -> MLACoreAttention:
    """The module as an MLA layer builds it; without ``v_channels`` it takes zeros for values."""
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=2,
        qk_head_dim=NOPE,
        qk_pos_emb_head_dim=ROPE,
        v_head_dim=V,
        attention_dropout=0.0,
        qk_clip=qk_clip,
    )
    return MLACoreAttention(
        config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE, k_channels=NOPE + ROPE, v_channels=v_channels
    )


def padding(module: MLACoreAttention) -> Way:
    """The module within the pad and the trim of Megatron's main."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: PackedSeqParams) -> torch.Tensor:
        out = module(q, k, torch.nn.functional.pad(v, (0, q.shape[-1] - V)), None, packed_seq_params=params)
        return out.view(*q.shape[:2], -1)[..., :V].reshape(len(q), -1)

    return call


def native(module: MLACoreAttention) -> Way:
    """The module alone."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: PackedSeqParams) -> torch.Tensor:
        return module(q, k, v, None, packed_seq_params=params)

    return call


def ways() -> dict[str, Way]:
    """In the order of the table, each with its own module: with qk-clip one serves one number of heads."""
    return {
        "padded": padding(core(v_channels=None)),
        "recognised": padding(core()),
        "native": native(core()),
        "qk-clip": native(core(qk_clip=True)),
    }


def draw(tokens: int, sequences: int, heads: int, device: str) -> tuple[Leaves, PackedSeqParams, torch.Tensor]:
    """q, k, v that require gradients, Megatron's description of the batch, and dout."""
    dims = (NOPE + ROPE, NOPE + ROPE, V)
    q, k, v = (torch.randn(tokens, heads, dim, dtype=torch.bfloat16, device=device, requires_grad=True) for dim in dims)
    ends = torch.arange(0, tokens + 1, tokens // sequences, dtype=torch.int32, device=device)
    longest = tokens // sequences
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    return (q, k, v), params, torch.randn(tokens, heads * V, dtype=torch.bfloat16, device=device)


def plain(leaves: Leaves, params: PackedSeqParams, dtype: torch.dtype) -> torch.Tensor:
    """Attention as its definition, in ``dtype``: [T, H * V]."""
    outs = []
    for q, k, v in zip(*(x.to(dtype).split(params.cu_seqlens_q.diff().tolist()) for x in leaves), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v).flatten(1))
    return torch.cat(outs)


def results(out: torch.Tensor, leaves: Leaves, dout: torch.Tensor) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def wrong(way: Way, device: str) -> str | None:
    """What is wrong with a way, on a small batch; None if nothing."""
    leaves, params, dout = draw(384, 3, 2, device)
    exact = results(plain(leaves, params, torch.float64), leaves, dout)
    low = results(plain(leaves, params, torch.bfloat16), leaves, dout)
    found = results(way(*leaves, params), leaves, dout)
    for name, x, yardstick, true in zip(("out", "dq", "dk", "dv"), found, low, exact, strict=True):
        error, limit = ((y.double() - true).norm().item() for y in (x, yardstick))
        if not error <= 2 * limit:
            return f"{name}: error {error:.1e} > {2 * limit:.1e}, twice plain PyTorch's in bfloat16"
    return None


def milliseconds(way: Way, leaves: Leaves, params: PackedSeqParams, dout: torch.Tensor) -> float:
    """Median of one forward and backward."""

    def step() -> None:
        torch.autograd.grad(way(*leaves, params), leaves, dout)

    return float(triton.testing.do_bench(step, warmup=50, rep=200, return_mode="median"))


def backends(leaves: Leaves, params: PackedSeqParams) -> dict[str, str]:
    """Which backend runs, for V as wide as q and for V as it is."""
    q = leaves[0]
    request = mla_plugin.AttentionRequest(
        qkv_format="thd",
        dtype=q.dtype,
        device_type=q.device.type,
        device_index=q.device.index,
        batch_size=len(params.cu_seqlens_q) - 1,
        num_heads=q.shape[1],
        num_kv_heads=q.shape[1],
        max_seqlen_q=params.max_seqlen_q,
        max_seqlen_kv=params.max_seqlen_kv,
        head_dim_qk=NOPE + ROPE,
        head_dim_v=V,
        attn_mask_type="padding_causal",
        window_size=(-1, 0),
        bottom_right_diagonal=False,
        is_training=True,
        host="megatron",
    )
    plans = {
        "padded": mla_plugin.resolve(request.replace(head_dim_v=NOPE + ROPE)),
        "native": mla_plugin.resolve(request),
    }
    return {name: f"{plan.forward_backend}, backward {plan.backward_backend}" for name, plan in plans.items()}


def measure(case: tuple[int, int], heads: int, refused: Container[str], rounds: int) -> dict[str, Any]:
    """One row of the table, without the ways that are refused."""
    tokens, sequences = case
    leaves, params, dout = draw(tokens, sequences, heads, "cuda")
    correct = {name: way for name, way in ways().items() if name not in refused}
    times: dict[str, list[float]] = {name: [] for name in correct}
    for _ in range(rounds):
        for name, way in correct.items():
            times[name].append(milliseconds(way, leaves, params, dout))
    ms = {name: statistics.median(found) for name, found in times.items()}
    row = {"tokens": tokens, "sequences": sequences, "heads": heads, "ms": ms, "all_ms": times}
    if "native" in ms:
        row["over_native"] = {name: found / ms["native"] - 1 for name, found in ms.items()}
    return {**row, "backends": backends(leaves, params)}


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Markdown: milliseconds, and what each way costs over native."""
    lines = ["| tokens | sequences | heads | " + " | ".join(names) + " | padded over native |", "|---" * 8 + "|"]
    for row in rows:
        cells = [str(row[name]) for name in ("tokens", "sequences", "heads")]
        cells += [f"{row['ms'][name]:.3f}" if name in row["ms"] else "" for name in names]
        over = row.get("over_native", {}).get("padded")
        lines.append("| " + " | ".join([*cells, "" if over is None else f"{over:+.1%}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every batch, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128], help="DeepSeek-V2-Lite's and V3's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", help="recorded in the result; default: of this checkout")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    found = {name: wrong(way, "cuda") for name, way in ways().items()}
    refused = {name: reason for name, reason in found.items() if reason is not None}
    rows = [measure(case, heads, refused, options.rounds) for heads in options.heads for case in CASES]
    gpu = torch.cuda.get_device_name()
    record = {
        "benchmark": "megatron_v_width",
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "megatron-core": megatron.core.__version__,
        "commit": checkout.commit(options.commit),
        "rows": rows,
        "refused": refused,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"megatron_v_width_{gpu.replace(' ', '_')}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(table(rows, list(ways())))
    for name, reason in refused.items():
        raise SystemExit(f"{name} was refused: {reason}")


if __name__ == "__main__":
    main()
