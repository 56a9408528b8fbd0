"""cuDNN's own rule (42), on both sides of each of its limits."""

from typing import Any

import pytest

from mla_plugin.resolver.transformer_engine.cudnn import LAYOUTS, why_not_fused
from mla_plugin.resolver.transformer_engine.inputs import read_query
from mla_plugin.resolver.transformer_engine.release import RELEASES, Release
from tests.resolver.te_cases import PAGED, choose, tables
from tests.resolver.te_rule_cases import BOTTOM_RIGHT, DET, INFERENCE, LOCAL, NO_MASK, POST_BIAS, THD, dims

SMALL = dims(128, 64)
D256, ABSORBED = dims(256, 256), dims(576, 512)
PADDING = {**NO_MASK, "mask": "padding"}
PADDING_CAUSAL = {"mask": "padding_causal"}
PADDED_BOTTOM_RIGHT = {"mask": "padding_causal_bottom_right"}
THD_LAYOUT, MIXED, PACKED = {"layout": "thd_thd_thd"}, {"layout": "thd_bshd_bshd"}, {"layout": "sbh3d"}
PAGED_LAYOUT = {"layout": "paged_kv_bshd_bshd_bshd"}
PAGES = {**PADDING, **INFERENCE, **PAGED_LAYOUT, "cache": PAGED}
CROSS, MORE_QUERIES, ONE_QUERY = {"sq": 128, "skv": 256}, {"sq": 256, "skv": 128}, {"sq": 1}
GQA, DROPOUT, SINK, ALIBI = {"groups": 4}, {"dropout": 0.1}, {"softmax_type": "learnable"}, {"bias": "alibi"}
GRAPH = {"cuda_graph": True, "skv": 100}
SM75, SM80, SM86, SM89, SM90 = ({"cc": cc} for cc in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0)))
SM100, SM103, SM110, SM120, SM121 = ({"cc": cc} for cc in ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)))


def v(*cudnn: int) -> dict[str, Any]:
    return {"cudnn": (*cudnn, 0, 0)[:3]}


def window(left: int, right: int) -> dict[str, Any]:
    return {"window": [left, right]}


ON_256, INFER_ABSORBED = {**SM100, **v(9, 23), **D256}, {**INFERENCE, **ABSORBED}
LOCAL_BOTTOM_RIGHT = {**SMALL, **BOTTOM_RIGHT, **window(9, 0)}
HALF_OPEN = {**SMALL, **NO_MASK, **window(0, 9)}

# By what is named when it is not met: (what both share, what is supported, what is not).
LIMITS: dict[str, list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {
    "this architecture": [
        ({**SMALL, **SM100}, v(9, 7), v(9, 6, 9)),
        ({**SMALL, **v(8, 9, 2)}, SM80, SM89),
        ({**SMALL, **v(8, 9, 2)}, SM90, SM86),
        ({**SMALL, **SM89}, v(8, 9, 3), v(8, 9, 2)),
        (SMALL, SM80, SM75),
    ],
    "max_seqlen_q=": [
        ({**SMALL, **NO_MASK, "sq": 100, "skv": 128}, v(9), v(8, 9, 7)),
        ({**SMALL, **v(8, 9, 7), "skv": 128}, {"sq": 64}, {"sq": 100}),
        ({**SMALL, **v(8, 9, 7), "sq": 64}, {"skv": 64}, {"skv": 100}),
    ],
    "16 heads": [({**SMALL, **v(8, 9, 6)}, {}, GQA), ({**SMALL, **GQA}, v(8, 9, 7), v(8, 9, 6))],
    "head_dim": [
        ({}, dims(104, 64), dims(100, 64)),
        ({}, dims(64, 64), dims(64, 60)),
        (SM89, dims(128, 128), dims(136, 128)),
        (SM89, dims(128, 128), dims(128, 136)),
        # training on Hopper
        (NO_MASK, v(9, 5), v(9, 4)),
        (v(9, 6), D256, dims(264, 256)),
        (v(9, 6), D256, dims(256, 264)),
        (v(9, 7), SM90, SM89),
        ({**SM90, **dims(256, 128)}, v(9, 10, 2), v(9, 11)),
        ({**SM90, **v(9, 11)}, dims(256, 120), dims(256, 128)),
        ({**SM90, **v(9, 11)}, dims(120, 256), dims(128, 192)),
        ({**SM90, **v(9, 11)}, dims(192, 128), dims(200, 128)),
        ({**SM90, **v(9, 11)}, dims(192, 128), dims(192, 136)),
        ({**SM90, **v(9, 11)}, dims(200, 200), dims(200, 192)),
        ({**SM90, **v(9, 11), **dims(200, 192)}, INFERENCE, {}),
        (ABSORBED, INFERENCE, {}),
        # training with (192, 128) on Blackwell
        (SM100, v(9, 11), v(9, 10, 2)),
        ({}, SM110, SM89),
        (SM121, dims(192, 128), dims(192, 64)),
        (SM100, dims(192, 128), dims(160, 128)),
        # training with (256, 256) on 10.x
        ({**SM100, **D256}, v(9, 23), v(9, 22)),
        ({**SM103, **D256, **THD}, v(9, 25), v(9, 24)),
        ({**SM103, **D256, **NO_MASK, **MIXED}, v(9, 25), v(9, 24)),
        (ON_256, SM103, SM110),
        (ON_256, {}, dims(256, 128)),
        (ON_256, {}, dims(128, 256)),
        (ON_256, {}, DROPOUT),
        (ON_256, {}, SINK),
        (ON_256, {}, POST_BIAS),
        (ON_256, {}, PAGED_LAYOUT),
        ({**ON_256, **LOCAL}, {}, NO_MASK | LOCAL),
        ({**ON_256, **BOTTOM_RIGHT}, window(9, 0), window(9, 9)),
        ({**ON_256, **BOTTOM_RIGHT}, window(9, -1), window(9, 9)),
        ({**ON_256, **NO_MASK}, {}, window(-1, 0)),
        # inference
        (INFERENCE, v(9, 1), v(9)),
        ({**INFERENCE, **v(9, 7)}, D256, dims(576, 256)),
        ({**INFERENCE, **v(9, 7)}, D256, dims(256, 264)),
        ({**INFERENCE, **v(9, 7)}, SM90, SM89),
        ({**INFER_ABSORBED, **SM100}, v(9, 9), v(9, 8)),
        ({**INFER_ABSORBED, **v(9, 9)}, SM100, SM90),
        ({**INFER_ABSORBED, **SM100, **v(9, 9), **NO_MASK}, {"sq": 2}, ONE_QUERY),
        ({**PAGES, **SM100}, v(9, 10, 2), v(9, 9)),
        ({**INFER_ABSORBED, **SM89}, v(9, 10, 2), v(9, 9, 9)),
        ({**INFERENCE, **SM80, **ONE_QUERY}, NO_MASK, {}),
        ({**INFERENCE, **SM80, **ONE_QUERY}, BOTTOM_RIGHT, PADDING_CAUSAL),
        ({**INFERENCE, **SM80, **ONE_QUERY}, PAGES | PADDING_CAUSAL, PADDING_CAUSAL),
        ({**INFERENCE, **ONE_QUERY}, D256, ABSORBED),
    ],
    "bias": [
        ({**SMALL, **POST_BIAS}, {}, {"bias": "pre_scale_bias"}),
        ({**SMALL, **POST_BIAS}, v(8, 9, 6), v(8, 9, 5)),
        ({**SMALL, **POST_BIAS, **SM89}, v(9), v(8, 9, 7)),
        ({**SMALL, **POST_BIAS}, NO_MASK, PADDING),
        ({**SMALL, **POST_BIAS}, {}, PADDING_CAUSAL),
        ({**SMALL, **ALIBI}, {}, NO_MASK),
        ({**SMALL, **ALIBI}, BOTTOM_RIGHT, PADDING_CAUSAL),
        ({**SMALL, **ALIBI}, {}, PADDED_BOTTOM_RIGHT),
        ({**SMALL, **ALIBI}, v(8, 9, 6), v(8, 9, 5)),
        ({**SMALL, **ALIBI}, SM90, SM89),
        ({**SMALL, **ALIBI, **SM89}, {"slopes": [16]}, {}),
    ],
    "mask": [
        ({**SMALL, **NO_MASK}, v(8, 9, 6), v(8, 9, 5)),
        ({**SMALL, **NO_MASK, **THD_LAYOUT}, v(9, 7), v(9, 6)),
        ({**SMALL, **v(8, 9, 5)}, {}, PADDING_CAUSAL),
        ({**SMALL, "layout": "bhsd_bhsd_bhsd"}, v(8, 9, 5), v(8, 9, 6)),
        ({**SMALL, **v(9, 6)}, PACKED, THD_LAYOUT),
        ({**SMALL, **THD_LAYOUT}, v(9, 7), v(9, 6)),
        ({**SMALL, **PADDING, **window(-1, 0)}, v(8, 9, 6), v(8, 9, 5)),
        ({**SMALL, **PADDING, **MIXED}, {}, DROPOUT),
        ({**SMALL, **PADDING_CAUSAL, "window": None, **MIXED}, {}, DROPOUT),
        ({**SMALL, **PADDING, **MIXED}, v(9, 7), v(9, 6)),
        ({**SMALL, **BOTTOM_RIGHT}, v(9, 3), v(9, 2)),
        ({**SMALL, **BOTTOM_RIGHT, **v(9, 6)}, {}, THD_LAYOUT),
        ({**SMALL, **BOTTOM_RIGHT, **v(9, 6)}, {"skv": 4096}, {"skv": 4000}),
        ({**SMALL, **BOTTOM_RIGHT, **v(9, 6)}, {"sq": 1024}, {"sq": 1000}),
        ({**SMALL, **BOTTOM_RIGHT, **v(9, 6)}, CROSS, MORE_QUERIES),
        ({**SMALL, **BOTTOM_RIGHT, **v(9, 6)}, {}, DROPOUT),
        ({**SMALL, **BOTTOM_RIGHT, **v(9, 6)}, {}, POST_BIAS),
        ({**SMALL, **BOTTOM_RIGHT}, MIXED, MORE_QUERIES),
        ({**SMALL, **BOTTOM_RIGHT, "skv": 4000}, v(9, 7), v(9, 6)),
        ({**SMALL, **PADDED_BOTTOM_RIGHT}, v(9, 6), v(9, 5)),
        ({**SMALL, **PADDED_BOTTOM_RIGHT, **v(9, 6)}, {"sq": 128}, {"sq": 100}),
        ({**SMALL, **PADDED_BOTTOM_RIGHT, **v(9, 6)}, CROSS, MORE_QUERIES),
        ({**SMALL, **PADDED_BOTTOM_RIGHT, "sq": 100}, v(9, 7), v(9, 6)),
        ({**SMALL, **PADDED_BOTTOM_RIGHT, **MORE_QUERIES}, {}, DROPOUT),
        ({**SMALL, **PADDED_BOTTOM_RIGHT, **DROPOUT}, v(9, 7), v(9, 6)),
    ],
    "layout": [
        ({**SMALL, **THD}, SM90, SM89),
        ({**SMALL, **THD, **GQA}, v(9, 6), v(9, 5)),
        ({**SMALL, **NO_MASK, **MIXED, **SM80}, v(9, 7), v(9, 6)),
    ],
    "window": [
        ({**SMALL, **LOCAL}, v(9, 2), v(9, 1)),
        ({**SMALL, **LOCAL, **NO_MASK, **window(9, 0)}, v(9, 2), v(9, 1)),
        ({**SMALL, **LOCAL, **v(9, 2)}, {}, PADDING_CAUSAL),
        ({**SMALL, **SM100, **v(9, 7), **CROSS, **window(9, 0)}, PADDING | window(9, 0), BOTTOM_RIGHT),
        ({**SMALL, **PADDING, **PACKED}, v(9, 1), v(9, 2)),
        ({**SMALL, **v(9, 2)}, NO_MASK, PADDING),
        ({**SMALL, **PADDING}, v(9, 6), v(9, 5)),
        ({**SMALL, **THD}, v(9, 6), v(9, 2)),
        ({**SMALL, **DROPOUT}, v(9, 6), v(9, 2)),
        ({**SMALL, **DROPOUT}, v(9, 1), v(9, 2)),
        ({**SMALL, **POST_BIAS}, v(9, 6), v(9, 5)),
        ({**SMALL, **BOTTOM_RIGHT, **v(9, 3)}, {}, CROSS),
        ({**SMALL, **v(9, 2)}, CROSS, MORE_QUERIES),
        (HALF_OPEN, v(9, 6), v(9, 5)),
        ({**SMALL, **window(0, 9)}, NO_MASK | window(0, 9), {}),
        ({**SMALL, **LOCAL}, {}, THD_LAYOUT),
        (HALF_OPEN, {}, MORE_QUERIES),
        (HALF_OPEN, {}, POST_BIAS),
        (HALF_OPEN, {}, DROPOUT),
        ({**LOCAL_BOTTOM_RIGHT, **SM100, **CROSS}, v(9, 7, 1), v(9, 7)),
        ({**LOCAL_BOTTOM_RIGHT, **SM100, **v(9, 7)}, {}, CROSS),
        ({**LOCAL_BOTTOM_RIGHT, **SM100, **v(9, 7), **PADDED_BOTTOM_RIGHT}, {}, CROSS),
        ({**LOCAL_BOTTOM_RIGHT, **CROSS, **v(9, 7)}, SM90, SM100),
    ],
    "what is faulty": [
        (SMALL, v(8, 9), v(8, 8, 9)),
        (SMALL, v(9, 9), v(9, 10)),
        (SMALL, v(9, 10, 2), v(9, 10, 1)),
        ({**SMALL, **LOCAL, **v(9, 14)}, {}, PADDING_CAUSAL),
        ({**SMALL, **LOCAL, **v(9, 14)}, BOTTOM_RIGHT, PADDED_BOTTOM_RIGHT),
        ({**HALF_OPEN, "sq": 8}, v(9, 14, 1), v(9, 14)),
        ({**HALF_OPEN, "sq": 8, **v(9, 14)}, {"skv": 1024}, {"skv": 1025}),
        ({**SMALL, **NO_MASK, **v(9, 14)}, {}, LOCAL),
        ({**SMALL, **GRAPH, **v(9, 15)}, {"cuda_graph": False}, {}),
        ({**SMALL, **GRAPH}, v(9, 15, 1), v(9, 15)),
        ({**SMALL, **GRAPH, **v(9, 15)}, INFERENCE, {}),
        ({**SMALL, **GRAPH, **v(9, 15)}, {"skv": 384}, {"skv": 64}),
        ({**SMALL, **GRAPH, **NO_MASK, **v(9, 15)}, MIXED, PACKED),
        ({**SMALL, **GRAPH, **NO_MASK, **v(9, 15), "sq": 100}, PADDING, {}),
    ],
    "softmax": [({**SMALL, **SINK}, v(9, 13, 1), v(9, 13))],
    "return_max_logit": [({**SMALL, "return_max_logit": True}, v(9, 21), v(9, 20))],
    "deterministic": [
        ({**SM100, **DET}, v(9, 18, 1), v(9, 18)),
        ({**SMALL, **DET, **DROPOUT}, SM90, SM100),
        ({**SMALL, **SM100, **DET, **POST_BIAS}, INFERENCE, {}),
        ({**SMALL, **SM100, **DET}, {}, DROPOUT),
        ({**SMALL, **SM100, **POST_BIAS}, {}, DROPOUT),
        ({**SMALL, **SM121, **DROPOUT}, {}, POST_BIAS),
    ],
    "12.0 before": [
        ({**SMALL, **SM120}, v(9, 18, 1), v(9, 18)),
        ({**SMALL, **DET}, SM121, SM120),
        ({**SMALL, **SM120, **DET}, INFERENCE, {}),
        ({**SMALL, **SM120, **THD}, {"layout": "thd_t2hd"}, {"layout": "t3hd"}),
        ({**SMALL, **SM120, **THD}, {"layout": "thd_th2d"}, {"layout": "th3d"}),
    ],
}
FLAT = [(what, *limit) for what, limits in LIMITS.items() for limit in limits]


def obstacle(changes: dict[str, Any], release: Release = RELEASES[-1]) -> str | None:
    return why_not_fused(read_query(*tables(fused="cudnn", **changes), release))


@pytest.mark.parametrize(("what", "shared", "supported", "unsupported"), FLAT)
def test_limit(what: str, shared: dict[str, Any], supported: dict[str, Any], unsupported: dict[str, Any]) -> None:
    assert obstacle({**shared, **supported}) is None
    reason = obstacle({**shared, **unsupported})
    assert reason is not None
    assert any(part.startswith(what) for part in reason.partition("does not take ")[2].split("; "))


@pytest.mark.parametrize("cc", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("cudnn", [(9, 5, 0), (9, 10, 2), (9, 18, 1), (9, 25, 0)])
def test_absorbed_mla_has_no_training_path(cc: tuple[int, int], cudnn: tuple[int, int, int]) -> None:
    assert "head_dim_qk=576, head_dim_v=512 in training" in obstacle({"cc": cc, "cudnn": cudnn, **dims(576, 512)})


def test_all_obstacles_are_named() -> None:
    reason = obstacle({**SM100, **v(9, 6), **dims(100, 64), **SINK, "return_max_logit": True})
    assert reason == (
        "cuDNN 9.6.0 on compute capability 10.0 does not take this architecture; head_dim_qk=100, head_dim_v=64 in "
        "training; softmax learnable; return_max_logit"
    )


@pytest.mark.parametrize("answer", [True, False])
def test_the_platforms_answer_stands(answer: bool) -> None:
    query = read_query(*tables(fused=answer, **dims(576, 512)), RELEASES[-1])
    assert (why_not_fused(query) is None) is answer


def test_layouts_are_transformer_engines() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS) == 26
    assert {"bs3hd", "sbh3d", "thd_t2hd", "bshd_bsh2d", "th3d", "paged_kv_thd_sbhd_sbhd"} <= set(LAYOUTS)


SHORT = {**SM90, **v(9, 10), **dims(64, 64), "sq": 512, "skv": 512}
"""Short sequences with a cuDNN in which the general kernels are faulty: those for up to 512 run it, up to 2.15."""

SHORT_CROSS = {**SHORT, **NO_MASK, "sq": 64}
BIASED = {**SHORT, **POST_BIAS}


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        (SHORT, {"dtype": "float32"}),
        (SHORT, v(8, 8, 9)),
        ({**SHORT, **SM80}, SM89),
        (SHORT_CROSS, {"skv": 576}),
        (SHORT_CROSS, {"sq": 576}),
        (SHORT_CROSS, {"sq": 63}),
        (SHORT, dims(64, 128)),
        (SHORT, dims(128, 64)),
        (SHORT, GQA),
        (BIASED, {"bias": "pre_scale_bias"}),
        (BIASED, {"bias_shape": "bhss"}),
        (BIASED, {"bias": "alibi", "slopes": [16], "bias_shape": None}),
        (SHORT, {"bias": "alibi"}),
        (SHORT, BOTTOM_RIGHT),
        ({**SHORT, **PADDING_CAUSAL}, {"sq": 256}),
        ({**SHORT, **PADDING}, PADDED_BOTTOM_RIGHT | {"window": [-1, 0]}),
        ({**SHORT, "layout": "bs3hd"}, {"layout": "bsh3d"}),
        (SHORT, {"layout": "sbhd_sbhd_sbhd"}),
        (SHORT, window(9, 0)),
        (SHORT, SINK),
        (SHORT, {"return_max_logit": True}),
        ({**SHORT_CROSS, "cuda_graph": True, "skv": 384}, {"skv": 192}),
    ],
)
def test_kernels_for_short_sequences(taken: dict[str, Any], refused: dict[str, Any]) -> None:
    assert obstacle(taken, (2, 15)) is None
    assert obstacle(taken, (2, 16)) is not None
    assert obstacle({**taken, **refused}, (2, 15)) is not None


def test_kernels_for_short_sequences_are_deterministic() -> None:
    """The second clause of rule 41 is about the others."""
    changes = {**SHORT, **SM80, **DET, "fused": "cudnn"}
    assert "fused" in choose("2.15", **changes).survivors
    assert "fused" not in choose("2.15", **{**changes, **v(9, 10, 2)}).survivors


def test_kernels_for_short_sequences_may_be_put_first() -> None:
    """Up to 2.15, where both sets of kernels can run the call: rule 41 is about one of them."""
    changes = {**SHORT, **SM80, **DET, **v(9, 10, 2), "fused": "cudnn"}
    for text, first in (("0", True), (" 0 or so", True), ("1", False), ("", False), ("garbage", False)):
        told = {**changes, "env": {"NVTE_FUSED_ATTN_BACKEND": text}}
        assert ("fused" in choose("2.15", **told).survivors) is first
        assert "fused" not in choose("2.16", **told).survivors
        assert "fused" not in choose("2.15", **{**told, "skv": 1024, **NO_MASK}).survivors


def test_alibi_without_slopes_becomes_a_bias_of_short_sequences_too() -> None:
    changes = {**SHORT_CROSS, **PADDING, **ALIBI}
    assert obstacle(changes, (2, 11)) is None
    assert obstacle(changes, (2, 12)) is not None


@pytest.mark.parametrize(
    ("shared", "supported", "unsupported"),
    [
        ({**SMALL, **LOCAL}, v(9, 2), v(9, 1)),
        ({**SMALL, **LOCAL}, {}, window(9, 9)),
        ({**SMALL, **LOCAL}, {}, DROPOUT),
        ({**SMALL, **LOCAL}, CROSS, MORE_QUERIES),
        ({**SMALL, **LOCAL}, {}, THD_LAYOUT),
        ({**SMALL, **LOCAL}, {}, NO_MASK | LOCAL),
        ({**SMALL, **LOCAL, **PADDING_CAUSAL}, v(9, 6), v(9, 5)),
        ({**LOCAL_BOTTOM_RIGHT, **CROSS}, v(9, 6), v(9, 5)),
        ({**LOCAL_BOTTOM_RIGHT, **v(9, 5)}, {}, CROSS),
        ({**LOCAL_BOTTOM_RIGHT, **SM100, **CROSS}, v(9, 7, 1), v(9, 7)),
        ({**SMALL, **NO_MASK}, window(-1, 0), window(9, 0)),
    ],
)
def test_windows_up_to_2_11(shared: dict[str, Any], supported: dict[str, Any], unsupported: dict[str, Any]) -> None:
    assert obstacle({**shared, **supported}, (2, 11)) is None
    assert "window" in obstacle({**shared, **unsupported}, (2, 11))


def test_a_window_without_a_mask_up_to_2_15() -> None:
    left = {**SMALL, **NO_MASK, **window(9, 0)}
    for changes, release in ((left, (2, 15)), ({**left, **THD_LAYOUT}, (2, 16)), ({**left, **window(0, 9)}, (2, 16))):
        assert obstacle(changes, release) is None
    for changes in ({**left, **THD_LAYOUT}, {**left, **window(0, 9)}):
        assert "window" in obstacle(changes, (2, 15))


def test_only_masks_that_have_windows_have_them() -> None:
    """Between cuDNN 9.2 and 9.6 a padding mask has none; neither has a window with dropout."""
    assert "window" in obstacle({**SMALL, **PADDING, **v(9, 5)})
    assert "window" in obstacle({**SMALL, **LOCAL, **DROPOUT})
