"""One engine of ``vllm_engine``: builds it, generates, measures, and writes what it found as JSON.

python -m benchmarks.vllm_engine_run FLASHMLA found.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine's parts are reached into
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from vllm.sampling_params import RequestOutputKind

from benchmarks import vllm_engine_model
from benchmarks import vllm_engine_parts as parts
from benchmarks.vllm_engine import add_options

PREFILL_TOKENS = 8192
"""Of one step."""
ROOM = 256
"""Tokens that a request may generate until its context is as long as the cell's."""
WARM = 12
PROMPTS = (5, 40, 133, 1000, 8000)
TOKENS = 48


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    """Random tokens."""
    return {"prompt_token_ids": random.Random(seed).choices(range(2, parts.ALPHABET), k=length)}


def build(options: argparse.Namespace, folder: str) -> vllm.LLM:
    """The engine."""
    names, _, dtype = options.backend.partition("+")
    backend, _, prefill = names.partition("/")
    attention = {"backend": backend} | ({"mla_prefill_backend": prefill} if prefill else {})
    tokens = options.drafts + 1
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    graphs |= {"cudagraph_capture_sizes": [tokens * batch for batch in options.batches]}
    ngram = {"method": "ngram", "num_speculative_tokens": options.drafts, "prompt_lookup_max": 3}
    ngram |= {"prompt_lookup_min": 1}
    return vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        load_format=parts.LOAD_FORMAT,
        seed=0,
        kv_cache_dtype=dtype or "auto",
        max_model_len=options.longest,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=min(PREFILL_TOKENS, options.longest),
        enable_prefix_caching=False,
        enforce_eager=options.eager,
        gpu_memory_utilization=options.memory,
        attention_config=attention,
        compilation_config=None if options.eager else graphs,
        kv_transfer_config={
            "kv_connector": parts.FilledCache.__name__,
            "kv_connector_module_path": parts.__name__,
            "kv_role": "kv_both",
        },
        speculative_config=ngram if options.drafts else None,
    )


def classes(engine: vllm.LLM) -> dict[str, str]:
    """Who computes decode and prefill."""
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    layer = next(layer for layer in layers.values() if hasattr(layer, "impl"))
    return {"decode": type(layer.impl).__name__, "prefill": type(layer.prefill_backend).__name__}


def capacity(engine: vllm.LLM) -> int:
    """Tokens that the cache holds."""
    config = engine.llm_engine.vllm_config.cache_config
    return int(config.num_gpu_blocks) * int(config.block_size)


def generate(engine: vllm.LLM, lengths: list[int]) -> dict[str, Any]:
    """Greedy tokens of fixed prompts, all at once, and their log-probabilities."""
    parts.FilledCache.is_on = False
    asked = vllm.SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    done = engine.generate([prompt(length, length) for length in lengths], asked, use_tqdm=False)
    found = [request.outputs[0] for request in done]
    return {
        "prompts": lengths,
        "tokens": [list(x.token_ids) for x in found],
        "logprobs": [
            [float(step[token].logprob) for step, token in zip(x.logprobs, x.token_ids, strict=True)] for x in found
        ],
    }


def time_prefill(engine: vllm.LLM, length: int, rounds: int) -> float:
    """Milliseconds until the first token of one prompt, median."""
    parts.FilledCache.is_on = False
    asked = vllm.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    found = []
    for index in range(rounds + 1):
        start = time.perf_counter()
        engine.llm_engine.add_request(f"prefill {length} {index}", prompt(length, index), asked)
        while engine.llm_engine.has_unfinished_requests():
            engine.llm_engine.step()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[1:])


def time_decode(
    engine: vllm.LLM, batch: int, context: int, steps: int, replays: parts.Replays | None
) -> dict[str, Any]:
    """Steps over a filled cache, all requests in each: of the engine, and of the GPU where a graph is replayed."""
    parts.FilledCache.is_on = True
    asked = vllm.SamplingParams(
        max_tokens=ROOM, temperature=0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    names = [f"decode {batch} {context} {index}" for index in range(batch)]
    for index, name in enumerate(names):
        engine.llm_engine.add_request(name, prompt(context - ROOM, index), asked)
    stamps: list[float] = []
    tokens: list[int] = []
    while len(stamps) <= WARM + steps:
        if outputs := engine.llm_engine.step():
            stamps.append(time.perf_counter())
            tokens.append(sum(len(x.outputs[0].token_ids) for x in outputs))
            whole = len(outputs) == batch
            assert whole or len(stamps) == 1, f"{len(outputs)} of {batch} requests in a step"
    engine.llm_engine.abort_request(names)
    seconds = stamps[-1] - stamps[WARM]
    found: dict[str, Any] = {"batch": batch, "context": context, "step_ms": seconds / steps * 1e3}
    found |= {"tokens_per_s": sum(tokens[WARM + 1 :]) / seconds, "tokens": sum(tokens[WARM + 1 :]) / steps / batch}
    if replays is not None:
        times = list(replays.take())[-steps:]
        found["graph_ms"] = statistics.median(times) if len(times) == steps else None
    return found


def measure(options: argparse.Namespace, folder: str) -> None:
    """Everything that was asked for; written after each part, as a later one may fail."""
    start = time.perf_counter()
    replays = parts.Replays() if torch.cuda.is_available() else None
    parts.complete_drafts()
    engine = build(options, folder)
    record: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if replays else "cpu",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "backend": options.backend,
        "drafts": options.drafts,
        "eager": options.eager,
        "classes": classes(engine),
        "page_size": engine.llm_engine.vllm_config.cache_config.block_size,
        "capacity": capacity(engine),
        "start_s": time.perf_counter() - start,
        "prefill_ms": {},
        "decode": [],
        "skipped": [],
    }
    longest = options.longest - TOKENS
    record["generated"] = generate(engine, [min(length, longest) for length in PROMPTS])
    for length in options.prefills:
        record["prefill_ms"][length] = time_prefill(engine, min(length, longest), options.rounds)
    options.output.write_text(json.dumps(record))
    for context in options.contexts:
        for batch in options.batches:
            if batch * context > record["capacity"]:
                record["skipped"].append([batch, context])
                continue
            record["decode"].append(time_decode(engine, batch, context, options.steps, replays))
            record["seconds"] = time.perf_counter() - start
            options.output.write_text(json.dumps(record))
            print(json.dumps(record["decode"][-1]), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", help="vLLM's name for decode, /NAME of the one for prefill, +DTYPE of the cache")
    parser.add_argument("output", type=Path)
    parser.add_argument("--drafts", type=int, default=0, help="tokens that ngram speculation proposes")
    add_options(parser)
    return parser.parse_args()


def main() -> None:
    """Run the engine of the command line."""
    options = parse()
    if (WARM + options.steps + 1) * (options.drafts + 1) > ROOM:
        raise SystemExit(
            f"{options.steps} steps of up to {options.drafts + 1} tokens, and {WARM} before, exceed {ROOM}"
        )
    with tempfile.TemporaryDirectory() as folder:
        vllm_engine_model.make_model(Path(folder), options.layers, options.dense, options.tiny)
        measure(options, folder)


if __name__ == "__main__":
    main()
