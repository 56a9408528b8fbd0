"""Rules 0.2 to 11: environment, hardware, data type, and features that few backends support."""

from __future__ import annotations

from mla_plugin.resolver.transformer_engine.query import HALF_TYPES, Query
from mla_plugin.resolver.transformer_engine.rule import EVERYTHING, Rule, always, any_flash_switch_on, while_on


def _environment_rule(backend: str) -> Rule:
    return Rule("1", (backend,), lambda q: backend in q.switched_off, lambda q: q.switched_off[backend])


def _not_one_split(q: Query) -> bool:
    return q.num_splits != 1


def _splits(q: Query) -> str:
    return f"num_splits={q.num_splits}, expected 1"


def _score_mod_obstacles(q: Query) -> list[str]:
    """Rule 11: what keeps cuDNN from running a score_mod. Unequal head dimensions do not; num_splits did in rule 8."""
    obstacles = {
        f"dtype {q.dtype}": q.dtype not in HALF_TYPES,
        "a KV cache": q.kv_cache,
        "context parallelism": q.context_parallel,
        f"formats {q.q_format} and {q.kv_format}": "thd" in (q.q_format, q.kv_format),
        "padding between sequences": q.pad_between_seqs,
        f"mask {q.mask}": q.mask != "no_mask",
        f"window {q.window}": q.window not in (None, (-1, -1)),
        f"bias {q.bias_type}": q.bias_type != "no_bias",
        "ALiBi slopes": q.has_alibi_slopes,
        f"softmax {q.softmax_type}": q.softmax_type != "vanilla",
        f"dropout {q.dropout}": q.dropout != 0.0,
        "return_max_logit": q.return_max_logit,
        "checkpoint_core_attention": q.checkpoint_core_attention,
        "cuda_graph": q.cuda_graph,
    }
    return [name for name, found in obstacles.items() if found]


def _softcap(q: Query) -> str:
    return f"softcap {q.softcap}, expected 0"


RULES: tuple[Rule, ...] = (
    # turned off, not only absent: rules 26 and 29 consider versions that are on even if they are not installed
    Rule("0.2", ("flash4",), lambda q: True, lambda q: "not known before 2.15", until="2.14"),
    *map(_environment_rule, ("flash2", "flash3", "flash4", "fused", "unfused")),
    Rule("2", ("flash2", "fused"), lambda q: q.cc < (8, 0), lambda q: f"{q.device}, below 8.0"),
    Rule("3", ("flash3",), lambda q: q.cc != (9, 0), lambda q: f"{q.device}, expected 9.0"),
    Rule("4", ("flash4",), lambda q: q.cc < (8, 0), lambda q: f"{q.device}, below 8.0"),
    Rule("4", ("flash4",), lambda q: q.cc < (9, 0), lambda q: f"{q.device}, below 9.0", since="2.19"),
    Rule(
        "5",
        ("flash4",),
        lambda q: q.cc == (9, 0) and q.has("flash3") and q.has("flash4"),
        lambda q: (
            "FlashAttention 3 comes before it on compute capability 9.0, even where a later rule removes that too"
        ),
        asked_while=lambda q, on: {"flash3", "flash4"} <= on,
    ),
    Rule(
        "6",
        ("flash2", "flash4"),
        lambda q: q.dtype not in HALF_TYPES,
        lambda q: f"dtype {q.dtype}, expected bfloat16 and float16",
    ),
    Rule(
        "6",
        ("flash3", "fused"),
        lambda q: q.dtype not in (*HALF_TYPES, "float8_e4m3fn"),
        lambda q: f"dtype {q.dtype}, expected bfloat16, float16 and float8_e4m3fn",
    ),
    Rule("8", ("flash2",), lambda q: q.has("flash2") and _not_one_split(q), _splits),
    Rule(
        "8",
        ("flash4",),
        lambda q: q.cc < (10, 0) and _not_one_split(q),
        lambda q: f"{_splits(q)} on {q.device}, below 10.0",
    ),
    Rule("8", ("fused", "unfused"), _not_one_split, _splits),
    Rule("9", ("flash",), lambda q: q.return_max_logit, lambda q: "return_max_logit is not supported"),
    Rule(
        "9",
        ("fused",),
        lambda q: q.return_max_logit and q.fmt == "thd",
        lambda q: "return_max_logit with thd is not supported",
        until="2.10",
    ),
    Rule("9a", ("fused", "flash4"), lambda q: q.softcap != 0.0, _softcap, since="2.20"),
    Rule(
        "9a",
        ("flash3",),
        lambda q: q.softcap != 0.0 and (not q.fa3_softcap or max(q.dq, q.dv) > 256 or q.context_parallel),
        lambda q: (
            f"{_softcap(q)}, unless its functions take one, head dimensions up to 256 (found {max(q.dq, q.dv)}), no "
            "context parallelism"
        ),
        asked_while=while_on("flash3"),
        since="2.20",
    ),
    Rule(
        "9a",
        ("flash2",),
        lambda q: q.softcap != 0.0 and not (q.has("flash2") and q.fa2_at_least("2.6")),
        lambda q: f"softcap needs flash-attn 2.6, found {q.flash_versions.get('flash2')}",
        asked_while=while_on("flash2"),
        since="2.20",
    ),
    Rule(
        "9a",
        ("flash2",),
        lambda q: q.softcap != 0.0 and q.dropout != 0.0 and q.is_training,
        lambda q: f"softcap with dropout {q.dropout} in training",
        since="2.20",
    ),
    Rule(
        "10",
        EVERYTHING,
        lambda q: q.has_score_mod_bprop and not q.has_score_mod,
        lambda q: "score_mod_bprop without score_mod",
        subject="all backends",
        asked_while=always,
        since="2.17",
    ),
    Rule(
        "11",
        ("flash",),
        lambda q: q.has_score_mod,
        lambda q: "score_mod is not supported",
        asked_while=any_flash_switch_on,
        since="2.17",
    ),
    Rule("11", ("unfused",), lambda q: q.has_score_mod, lambda q: "score_mod is not supported", since="2.17"),
    Rule(
        "11",
        ("fused",),
        lambda q: q.has_score_mod and bool(_score_mod_obstacles(q)),
        lambda q: f"score_mod together with {', '.join(_score_mod_obstacles(q))}",
        since="2.17",
    ),
)
