"""Selections that the tests of TransformerEngine's cascade share: recorded ones, and one that keeps much."""

import dataclasses
import gzip
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mla_plugin.resolver import te_decide
from mla_plugin.resolver.transformer_engine import cascade as te_cascade
from mla_plugin.resolver.transformer_engine.cascade import CascadeDecision, Rule
from mla_plugin.resolver.transformer_engine.query import Query
from mla_plugin.resolver.transformer_engine.release import NEWEST, RELEASES

DATA = Path(__file__).parent / "data"
SUBJECTS = ("all backends", "FlashAttention 2 and 4", "FlashAttention 2", "FlashAttention 3", "FlashAttention 4")
SUBJECTS += ("FlashAttention", "FusedAttention", "UnfusedDotProductAttention")
LETTERS = dict(zip(SUBJECTS, "AB234FCU", strict=True))
"""What a message is about, as it is recorded."""

RELEASE_NAMES = tuple(f"{major}.{minor}" for major, minor in RELEASES)

BASE_PARAMS: dict[str, Any] = {
    "qkv_dtype": "bfloat16",
    "qkv_layout": "bshd_bshd_bshd",
    "batch_size": 2,
    "num_heads": 16,
    "num_gqa_groups": 16,
    "max_seqlen_q": 2048,
    "max_seqlen_kv": 2048,
    "head_dim_qk": 192,
    "head_dim_v": 128,
    "attn_mask_type": "causal",
    "window_size": [-1, 0],
    "bottom_right_diagonal": False,
    "alibi_slopes_shape": None,
    "core_attention_bias_type": "no_bias",
    "core_attention_bias_shape": None,
    "core_attention_bias_requires_grad": False,
    "pad_between_seqs": False,
    "attention_dropout": 0.0,
    "context_parallel": False,
    "cp_comm_type": "p2p",
    "cp_size": 1,
    "is_training": True,
    "inference_params": None,
    "softmax_type": "vanilla",
    "return_max_logit": False,
    "cuda_graph": False,
    "num_splits": 1,
    "checkpoint_core_attention": False,
    "has_score_mod": False,
    "has_score_mod_bprop": False,
}
"""What a recorded selection leaves out of its params is this."""

PACKAGES = {"2": "2.8.3", "3": "3.0.0", "4": "4.0.0b24"}
SHORT = {
    "dtype": "qkv_dtype",
    "layout": "qkv_layout",
    "groups": "num_gqa_groups",
    "sq": "max_seqlen_q",
    "skv": "max_seqlen_kv",
    "dq": "head_dim_qk",
    "dv": "head_dim_v",
    "mask": "attn_mask_type",
    "window": "window_size",
    "batch": "batch_size",
    "slopes": "alibi_slopes_shape",
    "bias": "core_attention_bias_type",
    "bias_shape": "core_attention_bias_shape",
    "bias_grad": "core_attention_bias_requires_grad",
    "dropout": "attention_dropout",
    "cache": "inference_params",
}
PAGED = {"is_paged": True, "page_size": 256}
UNPAGED = {"is_paged": False, "page_size": None}


def load(name: str) -> list[dict[str, Any]]:
    """The lines of a data file, with their params complete."""
    lines = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    return [{**line, "params": {**BASE_PARAMS, **line["params"]}} for line in lines]


def load_selections() -> list[dict[str, Any]]:
    """The recorded selections of every release: params, env, platform, and by release what was seen.

    Where a release is missing it cannot express the request.
    """
    lines = gzip.decompress((DATA / "releases.jsonl.gz").read_bytes()).decode().splitlines()
    return [_selections(json.loads(line)) for line in lines]


def _selections(line: dict[str, Any]) -> dict[str, Any]:
    capability, cudnn, flash, fused = line["platform"]
    changes, seen, last = line["selects"], {}, None
    for release in RELEASE_NAMES:
        last = changes.get(release, last)
        if last is not None:
            seen[release] = last
    return {
        "id": line["id"],
        "params": {**BASE_PARAMS, **line["params"]},
        "env": line.get("env", {}),
        "platform": {
            "compute_capability": capability,
            "cudnn_version": cudnn,
            "flash_attn": dict(zip("234", flash, strict=True)),
            "fused_supported": fused,
        },
        "seen": seen,
    }


def as_seen(decision: CascadeDecision) -> str:
    """A decision in the words of the record: selected, FlashAttention, what is available, what the log is about."""
    available = "".join(str(int(left)) for left in decision.available_backends)
    subjects = [LETTERS[subject] for _, subject in named(decision)]
    log = "".join(letter for letter, _ in itertools.groupby(subjects))
    return f"{decision.selected} {decision.flash_attention_backend or '-'} {available} {log}".rstrip()


def tables(
    cc: tuple[int, int] = (9, 0),
    cudnn: tuple[int, int, int] = (9, 21, 0),
    fused: bool | str = True,
    env: Mapping[str, str] | None = None,
    flash: Mapping[str, str | None] | None = None,
    cutlass_dsl: str | None = None,
    fa3_softcap: bool = False,
    **params: Any,
) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The three tables of a selection; params by their own names or those of ``SHORT``."""
    full = {**BASE_PARAMS, **{SHORT.get(name, name): value for name, value in params.items()}}
    platform = {"compute_capability": list(cc), "cudnn_version": list(cudnn), "fused_supported": fused}
    packages = {
        "flash_attn": {**PACKAGES, **(flash or {})},
        "nvidia_cutlass_dsl": cutlass_dsl,
        "fa3_softcap": fa3_softcap,
    }
    return full, dict(env or {}), {**platform, **packages}


def choose(release: str = NEWEST, **changes: Any) -> CascadeDecision:
    """Decide about ``tables(**changes)``, as a release does."""
    return te_decide(*tables(**changes), release=release)


def named(decision: CascadeDecision) -> list[list[str]]:
    """[rule, subject] of each reason."""
    pairs = []
    for reason in decision.reasons:
        subject = next(s for s in SUBJECTS if reason.startswith(f"Disabling {s}:"))
        pairs.append([reason.rsplit("(rule ", 1)[1].removesuffix(")"), subject])
    return pairs


class Recorder:
    """Notes for every line of the rule table how often it was asked, and how often it fired."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fired = [0] * len(te_cascade.RULES)
        self.held_back = [0] * len(te_cascade.RULES)
        self.numbers = [rule.number for rule in te_cascade.RULES]
        wrapped = tuple(self._wrap(index, rule) for index, rule in enumerate(te_cascade.RULES))
        monkeypatch.setattr(te_cascade, "RULES", wrapped)

    def _wrap(self, index: int, rule: Rule) -> Rule:
        def when(query: Query) -> bool:
            fires = rule.when(query)
            (self.fired if fires else self.held_back)[index] += 1
            return fires

        return dataclasses.replace(rule, when=when)
