"""Hand-written selections on both sides of every clause of TransformerEngine's rules.

One line: rule, the backends it is about, changes of ``te_cases.tables`` for which it removes them, and several for
which it does not. They reach the clauses that the recorded selections do not.
"""

from typing import Any, NamedTuple

from mla_plugin.resolver.transformer_engine.release import NEWEST
from tests.resolver.te_cases import PAGED, UNPAGED


class Case(NamedTuple):
    rule: str
    backends: tuple[str, ...]
    fires: dict[str, Any]
    spares: tuple[dict[str, Any], ...]
    release: str = NEWEST


FLASH = ("flash2", "flash3")
ALL_ON_90 = (*FLASH, "fused", "unfused")
SM80, SM86, SM89, SM90 = {"cc": (8, 0)}, {"cc": (8, 6)}, {"cc": (8, 9)}, {"cc": (9, 0)}
SM100, SM103, SM110, SM120, SM121 = {"cc": (10, 0)}, {"cc": (10, 3)}, {"cc": (11, 0)}, {"cc": (12, 0)}, {"cc": (12, 1)}
NO_FA2, NO_FA3 = {"flash": {"2": None}}, {"flash": {"3": None}}


def fa2(version: str) -> dict[str, Any]:
    return {"flash": {"2": version}}


def fa4(version: str) -> dict[str, Any]:
    return {"flash": {"3": None, "4": version}}


def dims(dq: int, dv: int) -> dict[str, int]:
    return {"dq": dq, "dv": dv}


def env(**variables: str) -> dict[str, Any]:
    return {"env": variables}


NO_MASK = {"mask": "no_mask", "window": [-1, -1], "bottom_right_diagonal": True}
BOTTOM_RIGHT = {"mask": "causal_bottom_right", "bottom_right_diagonal": True}
THD = {"layout": "thd_thd_thd", "mask": "padding_causal"}
THD_PADDED = {**THD, "pad_between_seqs": True}
LOCAL = {"window": [128, 0]}
CP = {"context_parallel": True, "cp_size": 2}
DET = {"deterministic": True}
INFERENCE = {"is_training": False}
DECODE = {**INFERENCE, "mask": "padding", "window": [-1, -1], "bottom_right_diagonal": True}
CACHED = {**DECODE, "cache": UNPAGED}
PAGES = {**DECODE, "cache": PAGED, "layout": "paged_kv_bshd_bshd_bshd"}
CROSS = {"sq": 128, "skv": 256}
TOP_LEFT_CROSS = {**NO_MASK, **CROSS, "bottom_right_diagonal": False}
POST_BIAS = {"bias": "post_scale_bias", "bias_shape": "1hss"}
ALIBI = {"bias": "alibi"}
SOFTCAP = {"softcap": 30.0}
MOD = {**NO_MASK, "has_score_mod": True}

PLATFORM = (
    Case("0.1", ("flash2",), fa2("2.1.0"), (fa2("2.1.1"), fa2("2.8.3.post1"), fa2("2.8.3+cu12torch2.7"))),
    Case("0.1", ("flash2",), fa2("2.8.4"), (fa2("2.8.3"),)),
    Case("0.1", ("flash2",), {**SM100, **fa2("2.7.2")}, ({**SM100, **fa2("2.7.3")}, {**SM90, **fa2("2.7.2")})),
    Case("0.1", ("flash2", "flash3"), {"flash": {"2": None, "3": None}}, ({"flash": {"3": "0.0.1"}},)),
    Case("0.1", ("flash4",), fa4("4.0.0b4"), (fa4("4.0.0b5"), fa4("4.0.0"))),
    Case("1", FLASH, env(NVTE_FLASH_ATTN="0"), (env(NVTE_FLASH_ATTN="-1"), env(NVTE_FLASH_ATTN=" 1 "))),
    Case("1", ("flash4",), env(NVTE_FLASH_ATTN="00", NVTE_FLASH_ATTN_V4="no"), (env(NVTE_FLASH_ATTN="2"),)),
    Case("1", ("flash2",), env(NVTE_FLASH_ATTN_V2="0"), (env(NVTE_FLASH_ATTN_V3="0"), env(NVTE_FLASH_ATTN_V2="3"))),
    Case("1", ("flash3",), env(NVTE_FLASH_ATTN_V3="0"), (env(NVTE_FLASH_ATTN_V2="0"),)),
    Case("1", ("flash4",), env(NVTE_FLASH_ATTN_V4="0"), (env(NVTE_FLASH_ATTN_V3="0"),)),
    Case("1", ("fused",), env(NVTE_FUSED_ATTN="0"), (env(NVTE_FUSED_ATTN="1"), env(NVTE_FUSED_ATTN_BACKEND="0"))),
    Case("1", ("unfused",), env(NVTE_UNFUSED_ATTN="0"), (env(NVTE_UNFUSED_ATTN="-1"), env(NVTE_FUSED_ATTN="0"))),
    Case("2", ("flash2", "fused"), {"cc": (7, 5)}, (SM80, SM86)),
    Case("3", ("flash3",), SM89, (SM90,)),
    Case("3", ("flash3",), SM103, (SM90,)),
    Case("4", ("flash4",), SM89, (SM90, SM120)),
    Case("5", ("flash4",), SM90, (SM100, NO_FA3, env(NVTE_FLASH_ATTN_V3="0"))),
    Case("5", ("flash4",), {**SM90, **dims(256, 128)}, ({**SM90, **NO_FA3, **dims(256, 128)},)),
    Case("6", ALL_ON_90[:-1], {"dtype": "float32"}, ({"dtype": "bfloat16"}, {"dtype": "float16"})),
    Case("6", ("flash4",), {**SM100, "dtype": "float8_e4m3fn"}, (SM100,)),
    Case("6", ("flash3", "fused"), {"dtype": "float32"}, ({"dtype": "float8_e4m3fn"},)),
    Case("8", ("flash2", "fused", "unfused"), {"num_splits": 4}, ({"num_splits": 1},)),
    Case("8", ("flash2", "fused", "unfused"), {"num_splits": 0}, ({},)),
    Case("8", ("flash2", "fused", "unfused"), {"num_splits": None}, ({},)),
    Case("8", ("flash4",), {"num_splits": 4, **NO_FA3}, ({"num_splits": 4, **SM100}, NO_FA3)),
    Case("9", FLASH, {"return_max_logit": True}, ({},)),
    Case("9a", ("fused", "flash2"), {**SOFTCAP, **fa2("2.5.9")}, ({}, fa2("2.5.9"))),
    Case("9a", ("flash4",), {**SOFTCAP, **SM100}, (SM100,)),
    Case("9a", ("flash3",), SOFTCAP, ({}, {**SOFTCAP, "fa3_softcap": True}, {"fa3_softcap": True})),
    Case("9a", ("flash3",), {**SOFTCAP, "fa3_softcap": True, **dims(64, 264)}, (dims(64, 264),)),
    Case("9a", ("flash3",), {**SOFTCAP, "fa3_softcap": True, **CP}, (CP,)),
    Case("9a", ("flash2",), {**SOFTCAP, "dropout": 0.1}, ({"dropout": 0.1}, {**SOFTCAP, "dropout": 0.1, **INFERENCE})),
    Case("10", ALL_ON_90, {"has_score_mod_bprop": True}, ({"has_score_mod_bprop": True, "has_score_mod": True},)),
    Case("11", (*FLASH, "unfused"), MOD, (NO_MASK,)),
    Case("11", ("fused",), {**MOD, "mask": "causal"}, (MOD, {**MOD, "window": None}, {**MOD, **dims(64, 64)})),
    Case("11", ("fused",), {**MOD, "window": [-1, 0]}, (MOD,)),
    Case("11", ("fused",), {**MOD, "window": [128, 128]}, (MOD,)),
    Case("11", ("fused",), {**MOD, "dtype": "float8_e4m3fn"}, ({**MOD, "dtype": "float16"},)),
    Case("11", ("fused",), {**MOD, **INFERENCE, "cache": UNPAGED}, ({**MOD, **INFERENCE},)),
    Case("11", ("fused",), {**MOD, **CP}, (MOD,)),
    Case("11", ("fused",), {**MOD, "layout": "thd_thd_thd"}, ({**MOD, "layout": "sbhd_sbhd_sbhd"},)),
    Case("11", ("fused",), {**MOD, "pad_between_seqs": True}, (MOD,)),
    Case("11", ("fused",), {**MOD, **POST_BIAS}, (MOD,)),
    Case("11", ("fused",), {**MOD, "slopes": [16]}, (MOD,)),
    Case("11", ("fused",), {**MOD, "softmax_type": "learnable"}, (MOD,)),
    Case("11", ("fused",), {**MOD, "dropout": 0.1}, (MOD,)),
    Case("11", ("fused",), {**MOD, "return_max_logit": True}, (MOD,)),
    Case("11", ("fused",), {**MOD, "checkpoint_core_attention": True}, (MOD,)),
    Case("11", ("fused",), {**MOD, "cuda_graph": True}, (MOD,)),
)

KV_CACHE = (
    Case("12a", ("fused",), {**CACHED, **SM89}, ({**DECODE, **SM89}, {**CACHED, **SM86}, {**CACHED, **SM90})),
    Case("12a", ("fused",), {**CACHED, **SM120}, ({**CACHED, **SM121},)),
    Case("12b", ("flash2",), {**CACHED, **SM120}, ({**CACHED, **SM121}, {**CACHED, **SM89}, {**DECODE, **SM120})),
    Case("12c", ALL_ON_90, {**CACHED, **CP}, (CACHED, {**DECODE, **CP})),
    Case(
        "12d",
        ALL_ON_90,
        {**CACHED, "layout": "thd_bshd_bshd", "pad_between_seqs": True},
        ({**CACHED, "layout": "thd_bshd_bshd"}, {**CACHED, "pad_between_seqs": True}, THD_PADDED),
    ),
    Case("12e", ("flash2",), {**PAGES, "cache": {**PAGED, "page_size": 64}}, (PAGES, CACHED)),
    Case("12e", ("flash2",), {**PAGES, "cache": {**PAGED, "page_size": 384}}, ({**PAGES, "skv": 2000},)),
    Case("12e", ("flash2",), {**PAGES, **fa2("2.4.3")}, ({**PAGES, **fa2("2.5.0")}, {**CACHED, **fa2("2.4.3")})),
    Case("12f", ("flash2",), {**CACHED, "skv": 2000}, (CACHED, {**PAGES, "skv": 2000}, {**DECODE, "skv": 2000})),
    Case("12g", ("flash4",), {**CACHED, **SM100}, ({**DECODE, **SM100},)),
    Case("12g", ("flash4",), {**CACHED, **NO_FA3}, ({**DECODE, **NO_FA3},)),
)

SHAPES = (
    Case("13", ("fused",), {"layout": "bs3hd"}, ({"layout": "bs3hd", **dims(64, 64)}, {}, THD)),
    Case("13", ("fused",), {"layout": "bshd_bsh2d"}, ({"layout": "sbhd_sbhd_sbhd"},)),
    Case("13", ("fused",), PAGES, ({**PAGES, **dims(128, 128)}, {**CACHED, "layout": "thd_bshd_bshd"})),
    Case("14", ("fused",), {**SM120, **dims(136, 128)}, ({**SM120, **dims(128, 64)}, {**SM120, **dims(136, 136)})),
    Case("14", ("fused",), {**SM120, **dims(100, 60)}, ({**SM120, **dims(100, 60), **INFERENCE},)),
    Case("14", ("fused",), SM120, ({**SM120, **INFERENCE}, SM121, SM100)),
    Case("15", ("flash2",), dims(264, 264), (dims(256, 256), dims(256, 128), dims(128, 256))),
    Case("15", ("flash2",), dims(64, 264), (dims(64, 256),)),
    Case("15", ("flash2",), dims(100, 60), (dims(104, 60), dims(60, 104))),
    Case("15", ("flash2",), {**SM89, **dims(200, 128)}, (SM89, {**SM80, **dims(200, 128)}, {**SM90, **dims(200, 128)})),
    Case("15", ("flash2",), {**SM103, **dims(128, 200)}, (SM103, {**SM100, **dims(128, 200)})),
    Case("15", ("flash2",), {**SM121, **dims(256, 256)}, (SM121, {**SM120, **dims(256, 256)})),
    Case("15", ("flash2",), {**SM110, **dims(256, 256)}, (SM110,)),
    Case("15", ("flash2",), {**SM86, **dims(256, 256)}, (SM86,)),
    Case("16", ("flash3",), dims(264, 264), (dims(256, 256), dims(8, 8), dims(100, 100))),
    Case("16", ("flash3",), {"num_heads": 16, "groups": 5}, ({"num_heads": 15, "groups": 5}, {"groups": 1})),
    Case("16", ("flash3",), dims(128, 112), (dims(129, 97), dims(192, 128))),
    Case("16", ("flash3",), dims(193, 128), (dims(160, 128),)),
    Case("16", ("flash3",), dims(192, 129), (dims(192, 104),)),
    Case("16", ("flash3",), dims(192, 96), (dims(192, 97),)),
    Case("16", ("flash3",), dims(65, 128), (dims(64, 128), dims(60, 36))),
    Case("16", ("flash3",), dims(64, 513), (dims(64, 512),)),
    Case(
        "16", ("flash3",), {"dtype": "float8_e4m3fn", **dims(64, 512)}, ({"dtype": "float8_e4m3fn", **dims(64, 256)},)
    ),
    Case("17", ("flash4",), {**NO_FA3, **dims(264, 128)}, ({**NO_FA3, **dims(256, 128)}, {**NO_FA3, **dims(8, 256)})),
    Case("17", ("flash4",), {**NO_FA3, **dims(4, 8)}, ({**fa4("4.0.0b5"), **dims(256, 256)},)),
    Case("17", ("flash4",), {**NO_FA3, **dims(100, 64)}, ({**SM120, **dims(100, 64)}, {**SM120, **dims(576, 512)})),
    Case("17", ("flash4",), {**NO_FA3, **dims(64, 60)}, ({**NO_FA3, **dims(64, 64)},)),
    Case("17", ("flash4",), {**SM100, **dims(136, 128)}, ({**SM100, **fa4("4.0.0b5")}, {**SM110, **dims(128, 128)})),
    Case("17", ("flash4",), {**SM100, **dims(64, 136)}, ({**SM100, **dims(8, 128)},)),
    Case(
        "17", ("flash4",), {**SM103, **fa4("4.0.0b8"), **dims(64, 512)}, ({**SM103, **fa4("4.0.0b9"), **dims(64, 512)},)
    ),
    Case(
        "17",
        ("flash4",),
        {**SM100, **fa4("4.0.0b10"), **dims(256, 256)},
        ({**SM100, **fa4("4.0.0b11"), **dims(256, 256)},),
    ),
    Case(
        "17",
        ("flash4",),
        {**SM100, **fa4("4.0.0b15"), **dims(512, 512)},
        ({**SM100, **fa4("4.0.0b16"), **dims(512, 512)},),
    ),
    Case("18", ("flash4",), {**SM100, **dims(512, 512)}, ({**SM120, **dims(512, 512)}, {**SM100, **dims(64, 512)})),
    Case("18", ("flash4",), {**SM110, **dims(512, 512)}, ({**SM110, **dims(256, 256)},)),
    Case(
        "19",
        ("flash4",),
        {**SM100, **NO_MASK, **CROSS, **dims(256, 256)},
        (
            {**SM100, **NO_MASK, **dims(256, 256)},
            {**SM100, **NO_MASK, **CROSS, **dims(128, 128)},
            {**SM120, **NO_MASK, **CROSS, **dims(256, 256)},
            {**NO_FA3, **NO_MASK, **CROSS, **dims(256, 256)},
        ),
    ),
    Case(
        "20", ("flash4",), {**SM100, **dims(128, 96)}, ({**SM100, **dims(128, 64)}, {**SM100, **dims(128, 56)}, SM100)
    ),
    Case("20", ("flash4",), {**SM103, **dims(128, 112)}, ({**SM103, **dims(128, 112), **INFERENCE},)),
    Case("20", ("flash4",), {**SM110, **dims(128, 32)}, ({**SM120, **dims(128, 32)}, {**NO_FA3, **dims(128, 32)})),
    Case("20", ("flash4",), {**SM100, **dims(128, 8)}, ({**SM100, **dims(120, 8)}, {**SM100, **dims(64, 512)})),
    Case("21", ("flash2", "unfused"), THD_PADDED, (THD, {"pad_between_seqs": True})),
    Case("21", ("flash4",), {**THD_PADDED, **SM100}, ({**THD, **SM100},), "2.18"),
    Case("22", ("fused",), {**THD, **SM120, **dims(64, 64), "cudnn": (9, 18, 0)}, ({**SM120, **dims(64, 64)},)),
    Case(
        "22", ("fused",), {**THD, **SM120, "cudnn": (9, 18, 0), **INFERENCE}, ({**THD, **SM121, "cudnn": (9, 18, 0)},)
    ),
    Case("22", ("fused",), {**THD, **SM120, **dims(64, 64), "layout": "t3hd"}, ({**THD, **SM120, **dims(64, 64)},)),
    Case(
        "22",
        ("fused",),
        {**THD, **SM120, **dims(64, 64), "layout": "th3d"},
        ({**THD, **SM121, **dims(64, 64), "layout": "th3d"},),
    ),
)

FEATURES = (
    Case("23", ("flash3",), {"dropout": 0.1}, ({},)),
    Case("23", ("flash4",), {"dropout": 0.1, **INFERENCE, **SM100}, (SM100,)),
    Case("24", FLASH, {"softmax_type": "off-by-one"}, ({},)),
    Case("24", FLASH, {"softmax_type": "learnable"}, ({},)),
    Case(
        "24",
        ("fused",),
        {**THD, "softmax_type": "learnable", "cudnn": (9, 17, 9)},
        (
            {**THD, "softmax_type": "learnable", "cudnn": (9, 18, 0)},
            {"softmax_type": "learnable", "cudnn": (9, 17, 9)},
            {**THD, "cudnn": (9, 17, 9)},
        ),
    ),
    *(
        Case(
            "24",
            ("fused",),
            {**CP, "softmax_type": "learnable", "cp_comm_type": comm},
            ({**CP, "softmax_type": "learnable", "cp_comm_type": "a2a"}, {"softmax_type": "learnable"}, CP),
        )
        for comm in ("p2p", "all_gather", "a2a+p2p")
    ),
    Case("25", ("unfused",), CP, ({},)),
    Case("25", ("flash4",), {**CP, **SM100}, (SM100,), "2.18"),
    Case(
        "25",
        ("flash4",),
        {**CP, **SM100, "cp_comm_type": "a2a+p2p"},
        tuple({**CP, **SM100, "cp_comm_type": comm} for comm in ("p2p", "all_gather", "a2a")),
    ),
)

CP_NO_MASK = {**CP, **NO_MASK}
CP_BIAS = {**CP, **POST_BIAS}
A2A, A2A_P2P, GATHER = ({"cp_comm_type": name} for name in ("a2a", "a2a+p2p", "all_gather"))

CONTEXT_PARALLEL = (
    Case("26", FLASH, {**CP, **BOTTOM_RIGHT}, (CP, BOTTOM_RIGHT)),
    Case("26", FLASH, {**CP, **THD, "mask": "padding_causal_bottom_right"}, ({**CP, **THD},)),
    Case("26", FLASH, {**CP, **CROSS}, ({**CP_NO_MASK, **CROSS}, CROSS)),
    Case("26", FLASH, {**CP_BIAS, "bias": "pre_scale_bias"}, (CP_BIAS, {**POST_BIAS, "bias": "pre_scale_bias"})),
    Case("26", FLASH, {**CP, **ALIBI}, (ALIBI,)),
    Case("26", FLASH, {**CP_BIAS, **THD}, ({**POST_BIAS, **THD},)),
    Case("27", ("fused",), {**CP, **BOTTOM_RIGHT}, (CP, BOTTOM_RIGHT)),
    Case("27", ("fused",), {**CP, **CROSS}, ({**CP_NO_MASK, **CROSS}, CROSS)),
    Case("27", ("fused",), {**CP, **ALIBI}, (CP_BIAS, ALIBI)),
    Case("27", ("fused",), {**CP_BIAS, "bias": "pre_scale_bias"}, (CP_BIAS,)),
    Case("27", ("fused",), {**CP_BIAS, **THD}, ({**CP, **THD}, {**POST_BIAS, **THD})),
    Case("27", ("fused",), {**CP_BIAS, **A2A}, ({**CP, **A2A}, CP_BIAS)),
    Case("27", ("fused",), {**CP_BIAS, **GATHER}, ({**CP, **GATHER},)),
    Case("27", ("fused",), {**CP, **LOCAL}, ({**CP, **LOCAL, **A2A}, {**CP, **LOCAL, **GATHER}, LOCAL)),
    Case("27", ("fused",), {**CP, **LOCAL, **A2A_P2P}, ({**CP, **A2A_P2P}, {**CP, "window": None, **A2A_P2P})),
    Case("27", ("fused",), {**CP, **A2A, "num_heads": 15, "groups": 2}, ({**CP, **A2A, "groups": 2},)),
    Case("27", ("fused",), {**CP, **A2A, "num_heads": 15, "groups": 15}, ({**CP, "num_heads": 15, "groups": 15},)),
    Case(
        "27",
        ("fused",),
        {**CP, **A2A_P2P, "groups": 1},
        ({**CP, **GATHER, "groups": 1}, {**CP, **A2A_P2P, "groups": 2}),
    ),
)

MASK_AND_BIAS = (
    Case("28", (*FLASH, "fused"), {**NO_MASK, "mask": "arbitrary"}, (NO_MASK,)),
    Case("29", FLASH, CROSS, ({}, {**CROSS, **BOTTOM_RIGHT}, {**CROSS, **NO_MASK})),
    Case("29", FLASH, {**CROSS, **THD, "bottom_right_diagonal": True}, (THD,)),
    Case(
        "31",
        ("flash4",),
        {**SM100, **LOCAL, **dims(256, 256)},
        ({**SM100, **dims(256, 256)}, {**SM100, **LOCAL, **dims(128, 128)}, {**SM120, **LOCAL, **dims(256, 256)}),
    ),
    Case("32", ("fused",), {**LOCAL, "dropout": 0.1}, (LOCAL, {"dropout": 0.1})),
    Case(
        "32",
        ("fused",),
        {**NO_MASK, "window": [128, 128], "sq": 256, "skv": 128},
        ({**NO_MASK, "sq": 256, "skv": 128},),
    ),
    Case("32", ("fused",), {**LOCAL, "sq": 256, "skv": 128}, ({**LOCAL, "sq": 128, "skv": 256}, LOCAL)),
    Case("32", ("fused",), {"window": [0, 0], "dropout": 0.1}, ({"window": None, "dropout": 0.1},)),
    Case("33", ("flash2",), {**LOCAL, **fa2("2.2.5")}, ({**LOCAL, **fa2("2.3.0")}, fa2("2.2.5"))),
    Case(
        "33",
        FLASH,
        {**TOP_LEFT_CROSS, **LOCAL},
        (
            {**TOP_LEFT_CROSS, **LOCAL, "bottom_right_diagonal": True},
            {**TOP_LEFT_CROSS, **LOCAL, "sq": 256},
            TOP_LEFT_CROSS,
            {**TOP_LEFT_CROSS, **LOCAL, **NO_FA2},
            {**TOP_LEFT_CROSS, **LOCAL, **dims(60, 36)},
        ),
        "2.19",
    ),
    Case(
        "33",
        ("flash3",),
        {**TOP_LEFT_CROSS, **LOCAL, **NO_FA2},
        (
            {**TOP_LEFT_CROSS, **LOCAL, **NO_FA2, "bottom_right_diagonal": True},
            {**TOP_LEFT_CROSS, **LOCAL, **NO_FA2, "sq": 256},
            {**TOP_LEFT_CROSS, **NO_FA2},
        ),
    ),
    Case("34", ("flash3",), ALIBI, ({},)),
    Case("34", ("flash4",), {**ALIBI, **SM100}, (SM100,)),
    Case("34", ("flash2",), {**ALIBI, **fa2("2.3.6")}, ({**ALIBI, **fa2("2.4.0")}, fa2("2.3.6"))),
    Case("34", ("flash2",), {**ALIBI, **TOP_LEFT_CROSS}, ({**ALIBI, **CROSS, **NO_MASK}, {**ALIBI, **NO_MASK})),
    Case("35", FLASH, POST_BIAS, ({}, ALIBI)),
    Case("35", FLASH, {**POST_BIAS, "bias": "pre_scale_bias"}, ({},)),
    Case("35", FLASH, {"bias_shape": "1hss"}, ({},)),
    Case("35", FLASH, {"bias": "post_scale_bias"}, ({"bias": "alibi"},)),
    Case(
        "37",
        ("fused",),
        {**POST_BIAS, "bias_shape": "111s", "bias_grad": True},
        (
            {**POST_BIAS, "bias_shape": "111s"},
            {**POST_BIAS, "bias_grad": True},
            {**ALIBI, "slopes": [3], "bias_shape": "111s", "bias_grad": True},
        ),
    ),
    Case("38", ("fused",), {"fused": False}, ({"fused": True}, {"fused": "cudnn"})),
    Case("38", ("fused",), {"fused": "cudnn", **dims(576, 512)}, ({"fused": True, **dims(576, 512)},)),
    Case("38", ("fused",), {"fused": "cudnn", "dtype": "float8_e4m3fn"}, ({"fused": "cudnn", "dtype": "float16"},)),
)

WORKSPACE = {**DET, **THD, "batch": 4, "sq": 4096, "skv": 4096}

DETERMINISM = (
    Case("39", ("flash2",), {**DET, **fa2("2.4.0")}, ({**DET, **fa2("2.4.1")}, fa2("2.4.0"))),
    Case("39", ("flash2",), {**DET, **INFERENCE, **fa2("2.4.0")}, ({**DET, **NO_FA2},)),
    Case("40", ("flash3",), {**DET, **dims(256, 256)}, ({**DET, **dims(255, 255)}, dims(256, 256))),
    Case(
        "40", ("flash3",), {**DET, **dims(64, 256)}, ({**DET, **INFERENCE, **dims(64, 512)}, {**DET, **dims(64, 248)})
    ),
    Case("41", ("fused",), {**DET, "softmax_type": "learnable", **INFERENCE}, ({"softmax_type": "learnable"}, DET)),
    Case("41", ("fused",), {**DET, **SM89}, ({**DET, **SM89, **INFERENCE}, SM89, {**DET, **SM90})),
    Case(
        "41",
        ("fused",),
        {**DET, **POST_BIAS, "bias_grad": True},
        ({**DET, **POST_BIAS}, {**POST_BIAS, "bias_grad": True}),
    ),
    Case("41", ("fused",), {**DET, "cudnn": (8, 9, 4)}, ({**DET, "cudnn": (8, 9, 5)}, {"cudnn": (8, 9, 4)}), "2.19"),
    Case(
        "41",
        ("fused",),
        WORKSPACE,
        (
            {**WORKSPACE, "batch": 3},
            {**WORKSPACE, "num_heads": 15, "groups": 15},
            {**WORKSPACE, "sq": 4095},
            {**WORKSPACE, "skv": 4095},
            {**WORKSPACE, **INFERENCE},
            {**WORKSPACE, "deterministic": False},
            {**WORKSPACE, "layout": "bshd_bshd_bshd"},
            {**WORKSPACE, **SM100},
        ),
    ),
)

CASES = (
    *PLATFORM,
    *KV_CACHE,
    *SHAPES,
    *FEATURES,
    *CONTEXT_PARALLEL,
    *MASK_AND_BIAS,
    *DETERMINISM,
)
