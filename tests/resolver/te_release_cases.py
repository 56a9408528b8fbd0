"""Selections that tell the releases of TransformerEngine apart, one for every bound in the tables.

One line: a rule, the backend that it removes or the subject that a reason of it names, the releases in which it does
so, and changes of ``te_cases.tables``.
"""

from typing import Any, NamedTuple

from tests.resolver.te_cases import PAGED
from tests.resolver.te_rule_cases import (
    A2A,
    A2A_P2P,
    ALIBI,
    BOTTOM_RIGHT,
    CACHED,
    CP,
    CROSS,
    DET,
    GATHER,
    INFERENCE,
    LOCAL,
    NO_FA2,
    NO_FA3,
    NO_MASK,
    PAGES,
    POST_BIAS,
    SM80,
    SM89,
    SM90,
    SM100,
    SM120,
    THD,
    THD_PADDED,
    TOP_LEFT_CROSS,
    dims,
    env,
    fa2,
)


class Span(NamedTuple):
    rule: str
    names: str
    releases: str
    changes: dict[str, Any]
    says: str = ""


ALL = "2.10-2.20"
CAUSAL_CROSS = {**CROSS, **BOTTOM_RIGHT}
NO_FLASH = {"flash": {"2": None, "3": None, "4": None}}
ONLY_FA3 = {"flash": {"2": None, "4": None}}
SINK = {"softmax_type": "learnable"}
CUDNN = {"fused": "cudnn", **dims(128, 64)}
LONG = {**DET, **THD, "batch": 4, "sq": 4096, "skv": 4096}
SHAPE = {**POST_BIAS, "bias_grad": True}
PADDED_CACHE = {**CACHED, "layout": "bshd_thd_thd", "pad_between_seqs": True, **env(NVTE_FUSED_ATTN="0")}

PLATFORM = (
    Span("0.1", "flash2", "2.10-2.18", fa2("2.8.3.post1")),
    Span("0.1", "flash2", ALL, fa2("2.8.4")),
    Span("0.1", "flash4", "2.10-2.14", SM100, "before 2.15"),
    Span("0.1", "flash4", "2.19-2.20", {**SM100, "cutlass_dsl": "4.6.1"}, "nvidia-cutlass-dsl"),
    Span("1", "flash2", "2.18-2.20", env(NVTE_FLASH_ATTN_V2="0")),
    Span("1", "flash3", "2.18-2.20", env(NVTE_FLASH_ATTN_V3="0")),
    Span("1", "flash4", "2.18-2.20", {**SM100, **env(NVTE_FLASH_ATTN_V4="0")}),
    Span("4", "flash4", "2.15-2.20", {"cc": (7, 5)}),
    Span("4", "flash4", "2.19-2.20", SM80),
    Span("9", "fused", "2.10-2.10", {**THD, "return_max_logit": True}),
)

KV_CACHE = (
    Span("12a", "FusedAttention", ALL, {**CACHED, **SM89}),
    Span("12a", "FusedAttention", "2.14-2.20", {**CACHED, **SM120}),
    Span("12b", "FlashAttention", "2.14-2.20", {**CACHED, **SM120}),
    Span("12e", "flash2", ALL, {**PAGES, **dims(64, 64), "cache": {**PAGED, "page_size": 64}}),
    Span("12e", "flash2", "2.16-2.20", {**PAGES, **dims(64, 64), "cache": {**PAGED, "page_size": 384}}),
    Span("12f", "flash2", "2.16-2.20", {**CACHED, **dims(64, 64), "skv": 2000}),
)

SHAPES = (
    Span("13", "flash2", "2.10-2.16", {}),
    Span("15", "flash2", ALL, dims(264, 264)),
    Span("15", "flash2", "2.17-2.20", dims(64, 264)),
    # Rule 29 speaks up while a version is on, installed or not. Up to 2.14 rules 0.2, 15 and 16 switch all three off;
    # in 2.15 one alone is left, FlashAttention 2, then 3.
    Span("29", "FlashAttention", "2.15-2.20", {**CROSS, **NO_FLASH, **dims(512, 512)}),
    Span("29", "FlashAttention", "2.15-2.20", {**CROSS, **SM120, **NO_FA2, **dims(264, 264)}),
    Span("29", "FlashAttention", "2.15-2.20", {**CROSS, **NO_FA3, **dims(512, 512)}),
    Span("16", "flash3", ALL, dims(576, 512)),
    Span("17", "flash4", "2.15-2.20", {**SM100, **dims(256, 128)}),
    Span("17", "flash4", "2.15-2.15", {**SM120, **dims(264, 264)}),
    Span("17", "flash4", "2.16-2.20", {**NO_FA3, **dims(100, 100)}),
    Span("18", "flash4", "2.19-2.20", {**SM100, **dims(512, 512)}),
    Span("19", "flash4", "2.16-2.20", {**SM100, **NO_MASK, **CROSS, **dims(256, 256)}),
    Span("21", "unfused", "2.10-2.10", THD, "not supported"),
    Span("21", "flash3", "2.10-2.15", THD_PADDED),
    Span("21", "FlashAttention 2 and 4", "2.16-2.18", {**THD_PADDED, **dims(64, 64)}),
    Span("21", "FlashAttention 2", "2.19-2.20", {**THD_PADDED, **dims(64, 64)}),
    Span("21", "flash2", ALL, {**THD_PADDED, **dims(64, 64)}),
    Span("21", "flash4", "2.15-2.18", {**THD_PADDED, **SM100}),
    Span("21", "unfused", "2.16-2.20", THD_PADDED, "padding"),
    Span("21", "flash2", "2.20-2.20", {**PADDED_CACHE, **dims(64, 64)}),
    Span("21", "unfused", "2.20-2.20", PADDED_CACHE),
    Span("22", "fused", "2.10-2.13", {**THD, **SM120, **dims(64, 64)}),
    Span("22", "fused", ALL, {**THD, **SM120, **dims(64, 64), "cudnn": (9, 18, 0)}),
)

FEATURES = (
    Span("23", "FlashAttention 3", "2.10-2.14", {**NO_FLASH, "dropout": 0.1}),
    Span("23", "FlashAttention 3", ALL, {"dropout": 0.1}),
    Span("24", "fused", ALL, {**THD, **SINK, "cudnn": (9, 17, 0)}),
    Span("24", "fused", "2.10-2.11", {**THD, **SINK}),
    Span("24", "UnfusedDotProductAttention", "2.10-2.11", {**THD, **SINK}),
    Span("24", "unfused", "2.11-2.11", {**THD, **SINK}),
    Span("24", "unfused", "2.10-2.11", {**CP, **SINK}),
    Span("25", "flash4", "2.15-2.18", {**CP, **SM100, **A2A}),
    Span("25", "flash4", "2.15-2.20", {**CP, **SM100, **A2A_P2P}),
    Span("25", "FlashAttention 4", "2.19-2.20", {**CP, **SM100, **A2A_P2P, **NO_FLASH}),
    Span("27", "fused", "2.15-2.20", {**CP, **POST_BIAS, **A2A}),
    Span("27", "fused", "2.15-2.17", {**CP, **THD, **GATHER}),
    Span("27", "fused", "2.15-2.18", {**CP, **THD, **A2A_P2P}),
    Span("27", "fused", "2.15-2.20", {**CP, **LOCAL}),
    Span("27", "fused", "2.15-2.20", {**CP, **A2A, "groups": 1}),
)

MASK_AND_BIAS = (
    Span("31", "flash4", "2.18-2.20", {**SM100, **LOCAL, **dims(256, 256)}),
    Span("32", "fused", "2.10-2.11", {**NO_MASK, "window": [128, 128]}),
    Span("32", "fused", ALL, {**LOCAL, "dropout": 0.1}),
    Span("33", "flash2", "2.12-2.20", {**TOP_LEFT_CROSS, **LOCAL, **dims(64, 64)}),
    # Rule 29 has removed FlashAttention already; up to 2.19 rule 33 speaks up all the same.
    Span("33", "FlashAttention", "2.12-2.19", {**CROSS, **LOCAL, **dims(64, 64)}),
    Span("33", "flash3", "2.20-2.20", {**TOP_LEFT_CROSS, **LOCAL, **ONLY_FA3}),
    Span("34", "flash2", "2.12-2.20", {**ALIBI, **TOP_LEFT_CROSS, **dims(64, 64)}),
    Span("37", "fused", "2.10-2.12", {**SHAPE, "bias_shape": "bhss"}),
    Span("37", "fused", ALL, {**SHAPE, "bias_shape": "111s"}),
    Span("37", "fused", "2.10-2.19", {**SHAPE, "bias_shape": "111s", "batch": 1}),
    Span("37", "fused", "2.10-2.19", {**SHAPE, "bias_shape": "111s", "num_heads": 1, "groups": 1}),
    Span("37", "fused", "2.10-2.19", {**SHAPE, "bias_shape": "111s", **NO_MASK, "sq": 1}),
)

DETERMINISM = (
    Span("40", "flash3", "2.15-2.20", {**DET, **dims(256, 256)}),
    Span("40", "flash3", "2.15-2.15", {**DET, **INFERENCE, **dims(256, 256)}),
    Span("40", "flash3", "2.16-2.20", {**DET, **dims(64, 256)}),
    Span("41", "fused", "2.12-2.20", {**DET, **SINK, **INFERENCE}),
    Span("41", "fused", ALL, {**DET, **SM89}),
    Span("41", "fused", "2.10-2.19", {**DET, "cudnn": (8, 9, 4)}),
    Span("41", "fused", "2.10-2.11", {**DET, **SM100}),
    Span("41", "fused", "2.19-2.20", LONG),
)

FUSED = (
    Span("38", "fused", "2.10-2.17", {**CUDNN, **SM100, **dims(256, 256), "cudnn": (9, 23, 0)}, "head_dim_qk"),
    Span("38", "fused", "2.17-2.20", {**CUDNN, "return_max_logit": True, "cudnn": (9, 20, 0)}, "return_max_logit"),
    Span("38", "fused", "2.12-2.20", {**CUDNN, **SM100, **DET, "dropout": 0.1}, "deterministic"),
    Span("38", "fused", "2.14-2.20", {**CUDNN, **SM120, "cudnn": (9, 17, 0)}, "12.0"),
    Span("38", "fused", "2.12-2.15", {**CUDNN, **NO_MASK, "window": [128, 128]}, "window"),
    Span("38", "fused", "2.10-2.11", {**CUDNN, "mask": "padding", "window": [128, 0]}, "window"),
    Span("38", "fused", "2.12-2.20", {**CUDNN, "mask": "padding", "window": [-1, -1], "cudnn": (9, 5, 0)}, "window"),
    # ALiBi with post-scale slopes or, up to 2.11, with lengths that differ, is a bias that 8.9 takes too.
    Span("38", "fused", "2.12-2.20", {**CUDNN, **ALIBI, **CAUSAL_CROSS, **SM89, "cudnn": (9, 7, 0)}, "bias"),
    Span("38", "fused", "2.16-2.20", {**CUDNN, **SM90, **dims(64, 64), "sq": 512, "skv": 512, "cudnn": (9, 10, 0)}),
)

SPANS = (*PLATFORM, *KV_CACHE, *SHAPES, *FEATURES, *MASK_AND_BIAS, *DETERMINISM, *FUSED)
