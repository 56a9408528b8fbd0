"""Decoding in Hugging Face transformers over a DeepSeek-V3-shaped stack: tokens per second and peak memory.

    python -m benchmarks.transformers_decode                     the table, on this GPU
    python -m benchmarks.transformers_decode --step              one context of 1,024 tokens, more rounds
    python -m benchmarks.transformers_decode --crossover         also: how many queries at once are still a decode
    python -m benchmarks.transformers_decode --device cpu --tiny every step of it in a few seconds, for its figures not

Attention has DeepSeek-V3's dims (hidden 7168, 128 heads, q_lora 1536, kv_lora 512, 128 + 64, 128); layers are few, the
MLPs and the vocabulary small, the weights random, bfloat16. The cache is filled with random latents: eager attention
could not prefill 64k tokens. Then ``generate`` decodes greedily, by ``attn_implementation`` "mla_plugin", "sdpa" and
"eager", in turns within each round, because a GPU's clock drifts; the best round counts. The first round's time is kept
too: a growing cache has lengths there that the process has not seen, for which cuDNN's attention plans anew. The peak
is ``max_memory_allocated`` during ``generate``, and what it adds to weights and cache.

On a GPU a static cache's step is also captured in a CUDA graph, as engines run it, whose replays are timed: there the
host's time does not count.

An implementation is only timed where its logits are right: for the first sequence of the batch, their error against
float64 is at most twice that of "sdpa" in the same dtype. What runs out of memory is noted as such.
Writes benchmarks/results/transformers_decode_<gpu>.json, with ``--step`` transformers_step_<gpu>.json; prints the table
last.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import Cache

import mla_plugin
from benchmarks import checkout
from mla_plugin.compat.transformers import latent

RESULTS = Path(__file__).parent / "results"
OURS = "mla_plugin"
IMPLEMENTATIONS = (OURS, "sdpa", "eager")
CACHES = ("dynamic", "static")
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def build(options: argparse.Namespace) -> DeepseekV3ForCausalLM:
    """The model, on the device."""
    dims = TINY if options.tiny else DEEPSEEK_V3
    config = DeepseekV3Config(
        **dims,
        num_key_value_heads=dims["num_attention_heads"],
        num_hidden_layers=options.layers,
        first_k_dense_replace=options.layers,
        intermediate_size=2 * dims["kv_lora_rank"],
        vocab_size=1024,
        max_position_embeddings=1 << 18,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        return DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def weight_bytes(model: DeepseekV3ForCausalLM) -> int:
    """Of the weights that a step reads: all but the embedding, of which it reads a row."""
    read = (x for name, x in model.named_parameters() if "embed_tokens" not in name)
    return sum(x.numel() * x.element_size() for x in read)


def latents(model: DeepseekV3ForCausalLM, batch: int, context: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random c_kv [B, 1, S, R] and k_rope [B, 1, S, Dr] of each layer, the same at every call."""
    generator = torch.Generator(model.device).manual_seed(1)
    for _ in range(model.config.num_hidden_layers):
        yield tuple(
            torch.randn(batch, 1, context, dim, generator=generator, device=model.device, dtype=torch.bfloat16)
            for dim in (model.config.kv_lora_rank, model.config.qk_rope_head_dim)
        )


def fill(model: DeepseekV3ForCausalLM, kind: str, batch: int, context: int, room: int = 0) -> Cache:
    """A cache that holds ``context`` tokens, and has room for more if it is static."""
    config = model.config
    past = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=context + room)
    for index, (c_kv, k_rope) in enumerate(latents(model, batch, context)):
        past.update(c_kv, k_rope, index)
    return past


def tokens(model: DeepseekV3ForCausalLM, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator(model.device).manual_seed(2)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator, device=model.device)


def next_logits(model: DeepseekV3ForCausalLM, past: Cache, ids: torch.Tensor) -> torch.Tensor:
    """Logits [vocabulary] of the first sequence after one more token."""
    context = ids.shape[1] - 1
    positions = torch.full((len(ids), 1), context, device=ids.device)
    logits = model(ids[:, -1:], past_key_values=past, position_ids=positions, use_cache=True).logits
    return logits[0, -1].double()


def exact_logits(model: DeepseekV3ForCausalLM, batch: int, context: int) -> torch.Tensor:
    """The same of the first sequence alone, in float64, with PyTorch's attention."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("sdpa")
    past = DynamicCache(config=exact.config)
    for index, (c_kv, k_rope) in enumerate(latents(model, batch, context)):
        past.update(c_kv[:1].double(), k_rope[:1].double(), index)
    return next_logits(exact, past, tokens(model, batch, context + 1)[:1])


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the norm of the exact ones."""
    return ((logits - exact).norm() / exact.norm()).item()


def free(model: DeepseekV3ForCausalLM) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def decode(model: DeepseekV3ForCausalLM, case: tuple[str, int, int], steps: int) -> tuple[float, int, int]:
    """Seconds, peak bytes and bytes at the start of one ``generate`` over a filled cache."""
    kind, batch, context = case
    past = fill(model, kind, batch, context, steps + 1)
    ids = tokens(model, batch, context + 1)
    options = {"do_sample": False, "max_new_tokens": steps, "disable_compile": True}
    free(model)
    is_cuda = model.device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_cuda else 0
    start = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=past, **options)
    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert out.shape[1] == context + 1 + steps
    return seconds, torch.cuda.max_memory_allocated() if is_cuda else 0, before


def graphed(model: DeepseekV3ForCausalLM, case: tuple[str, int, int], steps: int, rounds: int) -> float:
    """Seconds of one replay of a step over a static cache that was captured in a CUDA graph."""
    kind, batch, context = case
    past = fill(model, kind, batch, context, 4 + rounds * steps)
    ids, positions = tokens(model, batch, 1), torch.full((batch, 1), context, device=model.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # fills the cache, and draws the token
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(ids, past_key_values=past, position_ids=positions, use_cache=True)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(ids, past_key_values=past, position_ids=positions, use_cache=True)
    best = float("inf")
    for _ in range(rounds):
        free(model)
        start = time.perf_counter()
        for _ in range(steps):
            graph.replay()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / steps)
    return best


def check(model: DeepseekV3ForCausalLM, case: tuple[str, int, int], row: dict[str, Any]) -> list[str]:
    """The implementations whose logits are right; the others are noted in ``row``."""
    kind, batch, context = case
    exact = exact_logits(model, batch, context)
    free(model)
    for name in ("sdpa", OURS, "eager"):
        model.set_attn_implementation(name)
        try:
            next_logits(model, fill(model, kind, batch, context, 1), tokens(model, batch, context + 1))  # hands over
            found = next_logits(model, fill(model, kind, batch, context, 1), tokens(model, batch, context + 1))
            row["error"][name] = error(found, exact)
        except torch.OutOfMemoryError:
            row["refused"][name] = "out of memory"
        free(model)
    limit = 2 * row["error"].get("sdpa", 1e-2)
    for name, found in row["error"].items():
        if not found <= limit:
            row["refused"][name] = f"error {found:.1e} > {limit:.1e}, twice that of sdpa"
    return [name for name in IMPLEMENTATIONS if name not in row["refused"]]


def measure(model: DeepseekV3ForCausalLM, case: tuple[str, int, int], steps: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    kind, batch, context = case
    row: dict[str, Any] = {"cache": kind, "batch": batch, "context": context, "error": {}, "refused": {}}
    names = check(model, case, row)
    best: dict[str, float] = {}
    first: dict[str, float] = {}
    peaks: dict[str, tuple[int, int]] = {}
    for _, name in itertools.product(range(rounds + 1), names):  # the first round warms up
        if name in row["refused"]:
            continue
        model.set_attn_implementation(name)
        try:
            seconds, *peaks[name] = decode(model, case, steps)
        except torch.OutOfMemoryError:
            row["refused"][name] = "out of memory"
            free(model)
            continue
        first.setdefault(name, seconds)
        best[name] = min(best.get(name, float("inf")), seconds)
    timed = [name for name in names if name not in row["refused"]]
    row["tokens_per_s"] = {name: batch * steps / best[name] for name in timed}
    row["ms_per_step"] = {name: best[name] / steps * 1e3 for name in timed}
    row["ms_per_step_of_first_round"] = {name: first[name] / steps * 1e3 for name in timed}
    if kind == "static" and model.device.type == "cuda":
        row["graph_ms_per_step"] = {}
        for name in timed:
            model.set_attn_implementation(name)
            try:
                row["graph_ms_per_step"][name] = graphed(model, case, steps, rounds) * 1e3
            except (RuntimeError, torch.OutOfMemoryError) as error:  # eager makes its mask from a tensor of the CPU
                row["refused"][f"{name} in a graph"] = str(error).splitlines()[0]
            free(model)
    row["peak_gib"] = {name: peaks[name][0] / 2**30 for name in timed}
    row["peak_above_start_gib"] = {name: (peaks[name][0] - peaks[name][1]) / 2**30 for name in timed}
    return row


@contextlib.contextmanager
def way(is_absorbed: bool) -> Iterator[None]:
    """Take one of the two computations whatever the number of queries."""
    with mock.patch.object(latent, "is_decode", return_value=is_absorbed):
        yield


def crossover(model: DeepseekV3ForCausalLM, context: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of one forward of several queries, absorbed and expanded, and which one the rule takes."""
    model.set_attn_implementation(OURS)
    config = model.config
    past = fill(model, "dynamic", 1, context)
    for num_queries in QUERIES:
        ids = tokens(model, 1, num_queries)
        positions = torch.arange(context, context + num_queries, device=model.device)[None]
        best = {"absorbed": float("inf"), "expanded": float("inf")}
        for _, name in itertools.product(range(rounds + 2), best):
            with way(name == "absorbed"):
                free(model)
                start = time.perf_counter()
                model(ids, past_key_values=past, position_ids=positions, use_cache=True)
                free(model)
                best[name] = min(best[name], time.perf_counter() - start)
            past.crop(-num_queries)
        dims = (config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim)
        rule = "absorbed" if latent.is_decode(num_queries, context + num_queries, *dims) else "expanded"
        ms = {name: seconds * 1e3 for name, seconds in best.items()}
        yield {"context": context, "queries": num_queries, "ms": ms, "rule": rule}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: tokens per second, the memory that decoding adds and a graph's step, of each implementation."""
    heads = [f"{name} {unit}" for unit in ("tok/s", "GiB", "ms in a graph") for name in IMPLEMENTATIONS]
    lines = ["| cache | batch | context | " + " | ".join(heads) + " |", "|---" * (3 + len(heads)) + "|"]
    for row in rows:
        cells = [row["cache"], str(row["batch"]), str(row["context"])]
        for name in IMPLEMENTATIONS:
            cells.append(f"{row['tokens_per_s'][name]:.1f}" if name in row["tokens_per_s"] else row["refused"][name])
        for name in IMPLEMENTATIONS:
            gib = row["peak_above_start_gib"].get(name)
            cells.append("" if gib is None else f"{gib:.2f}")
        for name in IMPLEMENTATIONS:
            ms = row.get("graph_ms_per_step", {}).get(name)
            cells.append("" if ms is None else f"{ms:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small dims")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16, help="tokens that generate adds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1 << 10, 1 << 12, 1 << 14, 1 << 16])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--crossover", action="store_true")
    parser.add_argument("--step", action="store_true", help="over 1,024 tokens, where the host is the limit")
    parser.add_argument("--commit", help="recorded in the result; default: of this checkout")
    options = parser.parse_args()
    if options.tiny:
        options.contexts, options.layers, options.steps = [64, 256], 2, 4
    elif options.step:
        options.contexts, options.rounds = [1 << 10], 40
    return options


def keep(
    options: argparse.Namespace,
    model: DeepseekV3ForCausalLM,
    rows: list[dict[str, Any]],
    crossings: list[dict[str, Any]],
) -> None:
    """Write what was found so far."""
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    record = {
        "benchmark": "transformers_decode",
        "gpu": gpu,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "commit": checkout.commit(options.commit),
        "model": {**(TINY if options.tiny else DEEPSEEK_V3), "num_hidden_layers": options.layers, "dtype": "bfloat16"},
        "weight_bytes": weight_bytes(model),
        "steps": options.steps,
        "rows": rows,
        "crossover": crossings,
    }
    if not options.tiny:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"transformers_{'step' if options.step else 'decode'}_{gpu.replace(' ', '_')}.json"
        path.write_text(json.dumps(record, indent=2) + "\n")


@torch.inference_mode()
def main() -> None:
    """Measure every case, write, print."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time; --device cpu --tiny tries the script")
    mla_plugin.register("transformers")
    transformers.logging.set_verbosity_error()
    model = build(options)
    rows: list[dict[str, Any]] = []
    crossings: list[dict[str, Any]] = []
    for case in itertools.product(options.caches, options.batches, options.contexts):
        rows.append(measure(model, case, options.steps, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
        keep(options, model, rows, crossings)
    for context in options.contexts if options.crossover else ():
        for found in crossover(model, context, options.rounds):
            crossings.append(found)
            print(json.dumps(found), flush=True)
    keep(options, model, rows, crossings)
    print(table(rows))
    if any(OURS not in row["tokens_per_s"] for row in rows):
        raise SystemExit("our own result was refused; see 'refused' above")


if __name__ == "__main__":
    main()
