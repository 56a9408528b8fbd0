"""vLLM's engine by decode backend: the same tokens, tokens per second, prefill, and speculation, on this GPU.

    python -m benchmarks.vllm_engine
    python -m benchmarks.vllm_engine --backends TRITON_MLA CUSTOM --dense --layers 8

DeepSeek-V2-Lite's shape in bfloat16 with random weights, the same for all; CUDA graphs, no torch.compile. One process
runs one backend, named as in vLLM, without speculation and then with it; ``CUSTOM`` is mla-plugin before vLLM 0.32,
MLA_PLUGIN from then on; ``/NAME`` chooses the backend for prefill too, ``+fp8`` the cache's dtype. Greedy tokens of
fixed prompts are compared with those of the first backend: equal up to a first difference, and log-probabilities up
to and with it.

Requests decode over a cache of random latents, so that nobody waits for prefill: vLLM's own way to time decode
(``DecodeBenchConnector``). A step is timed in the whole engine, and on the GPU alone for the graph that it replays.
Speculation proposes n-grams, and other tokens where a prompt has too few, so that every request of a step has all
drafts that were asked for. Random weights rarely accept one: such steps show what several query tokens of a request
cost.

Writes benchmarks/results/vllm_engine_<gpu>.json after every process, prints the tables last. A process that fails is
noted with the end of its output, and with what it had found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import checkout

RESULTS = Path(__file__).parent / "results"
BACKENDS = (
    *("TRITON_MLA", "CUSTOM", "FLASH_ATTN_MLA", "FLASHMLA", "CUSTOM/CUSTOM"),
    *("TRITON_MLA+fp8", "CUSTOM+fp8", "FLASHMLA+fp8"),
)
OURS = "mla-plugin"
"""``CUSTOM`` on pages and plots."""
SHORTEST = 30
"""Seconds that an engine needs to start: with less left, none is."""
FINE = "exit status 0"
"""What ``run`` says of a process that ended well."""
VERSIONS = ("gpu", "vllm", "torch", "cuda")
"""Of every engine, kept once."""
LINES = 30
"""Of the output of a process that failed."""
PASSED_ON = ("batches", "layers", "longest", "memory", "steps", "rounds", "dense", "tiny", "eager")


def runs(options: argparse.Namespace) -> Iterator[tuple[str, int, list[int], list[int]]]:
    """Backend, drafts, contexts and prefill lengths of each process."""
    for backend in options.backends:
        yield backend, 0, [] if "/" in backend else options.contexts, options.prefills
    for backend in options.backends if options.drafts else ():
        if "/" not in backend:
            yield backend, options.drafts, options.draft_contexts, []


def command(
    options: argparse.Namespace, backend: str, drafts: int, contexts: list[int], prefills: list[int], found: Path
) -> list[str]:
    """Of one process."""
    words = [sys.executable, "-m", "benchmarks.vllm_engine_run", backend, str(found), "--drafts", str(drafts)]
    words += ["--contexts", *map(str, contexts), "--prefills", *map(str, prefills)]
    for name in PASSED_ON:
        value = getattr(options, name)
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None and value is not False:
            words += [f"--{name}", str(value)]
    return words


def run(words: list[str], found: Path, log: Path, limit: float) -> dict[str, Any]:
    """What one process found, and its error."""
    found.unlink(missing_ok=True)
    with log.open("w") as output:
        try:
            done = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, timeout=limit, check=False)
            ended = f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
    result: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    return result if ended == FINE else result | {"error": [ended, *log.read_text().splitlines()[-LINES:]]}


def named(engine: dict[str, Any]) -> dict[str, Any]:
    """The engine's record with our backend by the library's name."""
    return engine | {"backend": engine["backend"].replace("CUSTOM", OURS)}


def agreement(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each prompt: tokens that are equal, and the largest difference of log-probabilities up to the next one."""
    result = []
    for prompt, x, y, p, q in zip(
        wanted["prompts"], found["tokens"], wanted["tokens"], found["logprobs"], wanted["logprobs"], strict=True
    ):
        same = next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        error = max(abs(a - b) for a, b in zip(p[: same + 1], q[: same + 1], strict=True))
        result.append({"prompt": prompt, "equal": same, "of": len(x), "logprob_difference": error})
    return result


def agreement_lines(records: list[dict[str, Any]]) -> Iterator[str]:
    """Each engine against the first."""
    complete = [record for record in records if "generated" in record]
    for record in complete:
        found = agreement(record["generated"], complete[0]["generated"])
        equal = ", ".join(f"{x['prompt']}: {x['equal']}/{x['of']}" for x in found)
        error = max(x["logprob_difference"] for x in found)
        name = f"{record['backend']}, {record['drafts']} drafts"
        yield f"{name}: tokens as {complete[0]['backend']} by prompt: {equal}; log-probabilities within {error:.4f}"


def decode_table(records: list[dict[str, Any]], drafts: int) -> str:
    """Markdown: tokens per second and milliseconds of a step, engine and graph, by batch and context."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    names = []
    for record in records:
        if record.get("drafts") == drafts and record.get("decode"):
            names.append(record["backend"])
            for cell in record["decode"]:
                rows.setdefault((cell["context"], cell["batch"]), {})[record["backend"]] = cell
    lines = ["| context | batch | " + " | ".join(names) + " |", "|---" * (2 + len(names)) + "|"]
    for (context, batch), cells in sorted(rows.items()):
        shown = [cell_text(cells[name]) if name in cells else "" for name in names]
        lines.append(f"| {context} | {batch} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def cell_text(cell: Mapping[str, Any]) -> str:
    """Tokens per second (ms of a step, of its graph)."""
    graph = cell.get("graph_ms")
    return f"{cell['tokens_per_s']:.0f} ({cell['step_ms']:.2f}, {'no graph' if graph is None else f'{graph:.2f}'})"


def show(records: list[dict[str, Any]], drafts: int) -> None:
    """Everything, errors first."""
    for record in records:
        if "error" in record:
            print(f"== {record['backend']}, {record['drafts']} drafts:", *record["error"], sep="\n")
    for record in records:
        if "generated" in record:
            prefill = ", ".join(f"{length}: {ms:.1f} ms" for length, ms in record["prefill_ms"].items())
            name = f"{record['backend']}, {record['drafts']} drafts{', eager' * record['eager']}"
            print(
                f"{name}: {record['classes']}, pages of {record['page_size']}, {record['capacity']} tokens, "
                f"started in {record['start_s']:.0f} s, prefill {prefill or 'not timed'}, "
                f"without room: {record['skipped'] or 'none'}"
            )
    print(*agreement_lines(records), sep="\n")
    for query_tokens in sorted({1, drafts + 1}):
        print(f"\n{query_tokens} query tokens a request: tokens per second (ms of a step, of its graph)\n")
        print(decode_table(records, query_tokens - 1))


def kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What an earlier call found without an error."""
    if not options.resume:
        return []
    records: list[dict[str, Any]] = json.loads(options.output.read_text())["engines"]
    return [record for record in records if "error" not in record]


def write(options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Keep what was found so far."""
    versions = next(({name: x[name] for name in VERSIONS} for x in records if "gpu" in x), {"gpu": "unknown"})
    gpu = versions["gpu"]
    record = {
        "benchmark": "vllm_engine",
        **versions,
        "commit": checkout.commit(options.commit),
        "model": {"name": "DeepSeek-V2-Lite", "layers": options.layers, "dense": options.dense, "tiny": options.tiny},
        "longest": options.longest,
        "engines": records,
    }
    path = options.output or RESULTS / f"vllm_engine_{gpu.replace(' ', '_')}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of each engine."""
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prefills", type=int, nargs="*", default=[8192], help="lengths")
    parser.add_argument("--longest", type=int, default=32768, help="max_model_len; TRITON_MLA splits keys by it")
    parser.add_argument("--layers", type=int, help="default: 27")
    parser.add_argument("--dense", action="store_true", help="no mixture of experts")
    parser.add_argument("--tiny", action="store_true", help="small dims, to try the script")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--memory", type=float, default=0.95, help="share of the GPU's, weights and cache")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--drafts", type=int, default=3, help="tokens that ngram speculation proposes; 0: no such runs")
    parser.add_argument("--draft-contexts", type=int, nargs="*", default=[8192])
    parser.add_argument("--limit", type=float, default=150, help="seconds of one process")
    parser.add_argument("--total", type=float, default=570, help="seconds of all")
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder for what the processes print"
    )
    parser.add_argument("--output", type=Path, help="another place for the result")
    parser.add_argument("--resume", action="store_true", help="run what --output has not, or with an error")
    parser.add_argument("--commit", help="recorded in the result; default: of this checkout")
    add_options(parser)
    options = parser.parse_args()
    if options.resume and (options.output is None or not options.output.exists()):
        parser.error("--resume needs the --output of an earlier call")
    return options


def main() -> None:
    """Run every engine, write, print."""
    options = parse()
    end = time.monotonic() + options.total
    records = kept(options)
    have = {(record["backend"], record["drafts"]) for record in records}
    for backend, drafts, contexts, prefills in runs(options):
        if (backend, drafts) in have:
            continue
        record: dict[str, Any] = {"backend": backend, "drafts": drafts}
        left = end - time.monotonic()
        if left < SHORTEST:
            records.append({**record, "error": [f"not started: {left:.0f} s left"]})
            continue
        log = options.logs / f"vllm_engine_{backend.replace('/', '_')}_{drafts}.log"
        found = log.with_suffix(".json")
        words = command(options, backend, drafts, contexts, prefills, found)
        records.append(record | run(words, found, log, min(options.limit, left)))
        print(json.dumps({"left": end - time.monotonic(), **records[-1]})[:2000], flush=True)
        write(options, records)
    show(records, options.drafts)


if __name__ == "__main__":
    main()
