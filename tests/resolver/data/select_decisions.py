"""Made decisions.jsonl and raises.jsonl beside this file from full tables of recorded selections.

    PYTHONPATH=. python tests/resolver/data/select_decisions.py FULL_DECISIONS FULL_RAISES

The full tables hold what ``get_attention_backend`` of NVIDIA/TransformerEngine d0067d0da6cb decided, or raised, one
JSON object a line. From the decisions a greedy cover is taken: every line of the rule table fires and holds back for
every pair of compute capability and selected backend for which it does so anywhere, and every value of every field is
met. Params that equal ``te_cases.BASE_PARAMS`` are left out; a logged reason is kept as [rule, backend that it names].
"""

import json
import re
import sys
from pathlib import Path

import pytest

from mla_plugin.resolver.transformer_engine import cascade as te_cascade
from tests.resolver.te_cases import BASE_PARAMS, SUBJECTS, Recorder

RULE_OF_MESSAGE = (
    ("2 due to unsupported", "15"), ("3 due to unsupported", "16"), ("4 due to unsupported", "17"),
    ("2.4.1", "39"), ("deterministic backward", "40"), ("determinism reasons", "41"),
    ("due to NVTE_", "1"), ("< sm80", "2"), ("!= sm90", "3"), ("< sm90", "4"), ("prefer FlashAttention 3", "5"),
    ("qkv_dtype = torch", "6"), ("num_splits", "8"), ("for max_logit", "9"), ("score_mod_bprop", "10"),
    ("score_mod", "11"), ("sm89/sm120", "12a"), ("caching for sm120", "12b"), ("caching with context", "12c"),
    ("and KV caching", "12d"), ("page size|paged attention requires", "12e"), ("non-paged KV", "12f"),
    ("support KV cache", "12g"), ("MLA is not supported", "13"), ("MLA for backward", "14"),
    ("symmetric head_dim", "18"), ("head_dim=256 cross", "19"), ("backward kernel bug", "20"),
    ("2 and 4|for pad_between", "21"), ("capability = sm120", "22"), ("[34] for dropout", "23"),
    ("FlashAttention for softmax_type|thd and cuDNN|with softmax_type", "24"),
    ("(Unfused.*|4 )as it does not support context", "25"), ("FlashAttention as it does not support context", "26"),
    ("context parallelism|cp_comm_type", "27"), ("arbitrary mask", "28"), ("causal mask since", "29"),
    ("head_dim=256 does not", "31"), ("window attention without|s_q > s_kv", "32"),
    ("window attention requires|window with bottom", "33"), ("ALiBi", "34"), ("pre/post_scale", "35"), ("dbias", "37"),
    ("no backend supports", "38"), ("preference on Hopper", "45"),
)  # fmt: skip
"""The first pattern that a message of TransformerEngine's log contains, and the rule behind it."""


def read(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rule_and_subject(message: str) -> list[str]:
    """The rule behind a message of TransformerEngine's log, and the backend that the message names."""
    subject = next(s for s in SUBJECTS if message.startswith(f"Disabling {s} "))
    rule = next(rule for pattern, rule in RULE_OF_MESSAGE if re.search(pattern, message))
    return [rule, subject]


def features(line: dict, recorder: Recorder) -> set[tuple]:
    """What a line shows."""
    before = [*recorder.fired, *recorder.held_back]
    te_cascade.decide(line["params"], line["env"], line["platform"])
    after = [*recorder.fired, *recorder.held_back]
    selected, cc = line["decision"]["selected"], tuple(line["platform"]["compute_capability"])
    shown = {(i, selected, cc) for i, (a, b) in enumerate(zip(after, before, strict=True)) if a != b}
    tables = {**line["params"], **line["env"], **line["platform"]}
    return shown | {(name, json.dumps(value)) for name, value in tables.items()} | {(selected, cc)}


def cover(lines: list[dict]) -> list[dict]:
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        shown = [features(line, recorder) for line in lines]
    missing, chosen = set().union(*shown), []
    while missing:
        best = max(range(len(lines)), key=lambda i: len(shown[i] & missing))
        chosen.append(best)
        missing -= shown[best]
    return [lines[i] for i in sorted(chosen)]


def compact(line: dict) -> str:
    line["params"] = {k: v for k, v in line["params"].items() if k not in BASE_PARAMS or BASE_PARAMS[k] != v}
    if "decision" in line:
        line["decision"]["reasons"] = [rule_and_subject(message) for message in line["decision"]["reasons"]]
    return json.dumps(line, separators=(",", ":"))


if __name__ == "__main__":
    for name, lines in (("decisions", cover(read(sys.argv[1]))), ("raises", read(sys.argv[2]))):
        text = "\n".join(map(compact, lines)) + "\n"
        Path(__file__).with_name(f"{name}.jsonl").write_text(text)
