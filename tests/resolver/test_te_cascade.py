"""TransformerEngine's selection against its own recorded decisions, its preference, and the inputs that it rejects."""

import pytest

from mla_plugin.environment import EnvironmentVariableError
from mla_plugin.resolver import te_decide
from mla_plugin.resolver.transformer_engine import cascade as te_cascade
from mla_plugin.resolver.transformer_engine.cascade import CascadeDecision
from tests.resolver.te_cases import PAGED, RELEASE_NAMES, Recorder, as_seen, choose, load, load_selections, named
from tests.resolver.te_release_cases import SPANS
from tests.resolver.te_rule_cases import CASES

SELECTIONS = load_selections()
RAISES = load("raises.jsonl")
ALWAYS = "0.2"
BACKENDS = {"flash2", "flash3", "flash4", "fused", "unfused"}
ONLY_FA4 = {"2": None, "3": None}


def check_consistent(decision: CascadeDecision) -> None:
    """What is left and what was removed make up all backends, and the first survivor is selected."""
    removed = {removal.backend for removal in decision.removals}
    assert removed | set(decision.survivors) == BACKENDS
    assert not removed & set(decision.survivors)
    assert decision.selected == (decision.survivors or ("none",))[0]


@pytest.mark.parametrize("release", RELEASE_NAMES)
def test_recorded_selections(release: str) -> None:
    """What each release's own code selected for 2,000 requests, and which backends its log then named."""
    lines = [line for line in SELECTIONS if release in line["seen"]]
    assert len(lines) >= 1900
    wrong = {}
    for line in lines:
        decision = te_decide(line["params"], line["env"], line["platform"], release=release)
        check_consistent(decision)
        if as_seen(decision) != line["seen"][release]:
            wrong[line["id"]] = (as_seen(decision), line["seen"][release])
    assert wrong == {}


def test_what_a_release_cannot_express_is_an_error() -> None:
    lines = [line for line in SELECTIONS if "2.16" not in line["seen"]]
    assert len(lines) == 90
    for line in lines:
        with pytest.raises(ValueError, match=r"score_mod.*TransformerEngine 2\.16 does not know it"):
            te_decide(line["params"], line["env"], line["platform"], release="2.16")


@pytest.mark.parametrize("line", RAISES, ids=lambda line: line["id"])
def test_recorded_exception(line: dict) -> None:
    """Where TransformerEngine raises on purpose the type is its own; where it stumbles it is a ValueError."""
    expected = AssertionError if line["exception"] == "AssertionError" else ValueError
    with pytest.raises(expected, match=r"expected|accepted"):
        te_decide(line["params"], line["env"], line["platform"])


def test_every_rule_fires_and_holds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    for line in SELECTIONS:
        for release in line["seen"]:
            te_decide(line["params"], line["env"], line["platform"], release=release)
    for case in CASES:
        for changes in (case.fires, *case.spares):
            check_consistent(choose(case.release, **changes))
    for span in SPANS:
        for release in RELEASE_NAMES:
            choose(release, **span.changes)
    counts = list(zip(recorder.numbers, recorder.fired, recorder.held_back, strict=True))
    assert [count for count in counts if not (count[1] and count[2])] == [(ALWAYS, counts[0][1], 0)]


def test_the_table_holds_every_filter_in_order() -> None:
    """7 is FP8's; 30 and 36 are values of ``Query``; 42 is cuDNN's answer to 38; from 43 on it is preference."""
    filters = (
        "0.2 1 2 3 4 5 6 8 9 9a 10 11 12a 12b 12c 12d 12e 12f 12g 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 31"
    )
    numbers = [*filters.split(" "), *(str(number) for number in (32, 33, 34, 35, 37, 38, 39, 40, 41))]
    assert list(dict.fromkeys(rule.number for rule in te_cascade.RULES)) == numbers


@pytest.mark.parametrize(
    ("changes", "survivors"),
    [
        ({"cc": (8, 0)}, ("flash2", "fused", "unfused")),
        ({"cc": (8, 9)}, ("flash2", "fused", "unfused")),
        ({"cc": (9, 0)}, ("fused", "flash3", "flash2", "unfused")),
        ({"cc": (9, 0), "flash": {"3": None}}, ("fused", "flash4", "flash2", "unfused")),
        ({"cc": (9, 0), "flash": {"3": None, "4": None}}, ("fused", "flash2", "unfused")),
        ({"cc": (10, 0)}, ("fused", "flash4", "flash2", "unfused")),
        ({"cc": (10, 3)}, ("fused", "flash4", "flash2", "unfused")),
        ({"cc": (11, 0)}, ("fused", "flash4", "flash2", "unfused")),
        ({"cc": (12, 0), "is_training": False}, ("fused", "flash4", "flash2", "unfused")),
        ({"cc": (12, 1), "flash": {"4": None}}, ("fused", "flash2", "unfused")),
        ({"cc": (9, 0), "fused": False}, ("flash3", "flash2", "unfused")),
        ({"cc": (8, 0), "flash": {"2": None}}, ("fused", "unfused")),
        ({"cc": (8, 0), "flash": {"2": None}, "fused": False}, ("unfused",)),
        ({"cc": (7, 5)}, ("unfused",)),
        ({"cc": (7, 5), "env": {"NVTE_UNFUSED_ATTN": "0"}}, ()),
    ],
)
def test_preference(changes: dict, survivors: tuple[str, ...]) -> None:
    decision = choose(**changes)
    assert decision.survivors == survivors
    check_consistent(decision)


def test_the_flash_version_is_told_even_when_cudnn_wins() -> None:
    decision = choose(cc=(9, 0))
    assert (decision.selected, decision.flash_attention_backend) == ("fused", "3")
    assert decision.reasons[-1].startswith("Disabling FlashAttention:")
    assert decision.reasons[-1].endswith("(rule 45)")
    assert "45" not in {removal.rule for removal in decision.removals}


def test_flash_comes_first_before_hopper_without_a_reason() -> None:
    decision = choose(cc=(8, 0))
    assert (decision.selected, decision.available_backends) == ("flash2", (True, True, True))
    assert "45" not in {rule for rule, _ in named(decision)}


def test_a_backend_may_be_removed_for_several_reasons() -> None:
    decision = choose(cc=(8, 0), return_max_logit=True, head_dim_qk=576, head_dim_v=512)
    assert [removal.rule for removal in decision.removals if removal.backend == "flash2"] == ["9", "15"]
    assert "head_dim_qk=576, head_dim_v=512 on compute capability 8.0" in decision.reasons[-1]


def test_fa3_shadows_fa4_on_hopper() -> None:
    """Defect 1: FlashAttention 4 goes by preference before FlashAttention 3 goes by shape."""
    assert choose(fused=False, dq=128, dv=64, env={"NVTE_FLASH_ATTN_V2": "0"}).selected == "unfused"
    switched = choose(fused=False, dq=128, dv=64, env={"NVTE_FLASH_ATTN_V2": "0", "NVTE_FLASH_ATTN_V3": "0"})
    assert switched.selected == "flash4"


def test_an_uninstalled_version_counts_only_where_transformer_engine_lets_it() -> None:
    """Rule 29 speaks up although nothing is installed; rules 26 and 35 do not."""
    nothing = {"2": None, "3": None, "4": None}
    assert ["29", "FlashAttention"] in named(choose(flash=nothing, sq=128, skv=256))
    # Dropout switches a version off only when it is installed.
    left = {"env": {"NVTE_FLASH_ATTN_V2": "0"}, "dropout": 0.1, "sq": 128, "skv": 256}
    assert ["29", "FlashAttention"] in named(choose(flash={"2": "2.8.3", "3": None, "4": "4.0.0b24"}, **left))
    assert ["29", "FlashAttention"] in named(choose(flash={"2": "2.8.3", "3": "3.0.0", "4": None}, **left))
    assert ["29", "FlashAttention"] not in named(choose(**left))
    # So do the head dimensions.
    left = {"dq": 576, "dv": 512, "sq": 128, "skv": 256}
    only_3, only_4 = ({"NVTE_FLASH_ATTN_V2": "0", f"NVTE_FLASH_ATTN_V{off}": "0"} for off in (4, 3))
    assert ["29", "FlashAttention"] in named(choose(env=only_3, flash={"3": None}, **left))
    assert ["29", "FlashAttention"] in named(choose(env=only_4, flash={"4": None}, **left))
    quiet = choose(flash=nothing, context_parallel=True, bias="pre_scale_bias")
    assert {"26", "35"}.isdisjoint(rule for rule, _ in named(quiet))
    loud = choose(flash={**ONLY_FA4}, context_parallel=True, bias="pre_scale_bias")
    assert ["26", "FlashAttention"] in named(loud)


def test_a_master_switch_that_is_off_is_not_removed_again() -> None:
    decision = choose(env={"NVTE_FLASH_ATTN": "0"}, return_max_logit=True)
    assert "9" not in {rule for rule, _ in named(decision)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": [-1, 5], "env": {"NVTE_FLASH_ATTN": "x"}, "layout": "bs3hd", "cache": PAGED}, "window_size"),
        ({"env": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "x"}, "layout": "bs3hd", "cache": PAGED}, "NONDETERMINISTIC"),
        ({"env": {"NVTE_FLASH_ATTN": "x"}, "layout": "bs3hd", "cache": PAGED}, "qkv_layout='bs3hd'"),
        ({"env": {"NVTE_FLASH_ATTN": "x", "NVTE_FUSED_ATTN": "x"}, "mask": "m", "window": None}, "NVTE_FLASH_ATTN='x'"),
        ({"env": {"NVTE_FLASH_ATTN_V4": "x", "NVTE_FUSED_ATTN": "x"}}, "NVTE_FLASH_ATTN_V4='x'"),
        ({"env": {"NVTE_FLASH_ATTN": "0", "NVTE_FLASH_ATTN_V4": "x", "NVTE_FUSED_ATTN": ""}}, "NVTE_FUSED_ATTN=''"),
        ({"mask": "m", "window": None}, "attn_mask_type='m'"),
        ({"cache": {"is_paged": True, "page_size": None}, "softmax_type": "bogus"}, "page_size=None"),
        ({"softmax_type": "bogus"}, "softmax_type='bogus'.*vanilla"),
        ({"mask": "m", "window": [-1, -1]}, "attn_mask_type='m'"),
        ({"bias": "b"}, "core_attention_bias_type='b'"),
        ({"layout": "hdbs_hdbs_hdbs", "dq": 128}, "qkv_layout='hdbs_hdbs_hdbs'"),
    ],
)
def test_of_several_faults_transformer_engines_first_is_reported(changes: dict, message: str) -> None:
    with pytest.raises((ValueError, AssertionError), match=message):
        choose(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {"NVTE_FLASH_ATTN": "0", "NVTE_FLASH_ATTN_V2": "true"}},
        {"env": {"NVTE_FUSED_ATTN_BACKEND": "garbage"}},
        {"env": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "x"}, "deterministic": False},
        {"softmax_type": "bogus", "env": {"NVTE_FUSED_ATTN": "0"}},
        {"mask": "bogus", "window": [-1, -1], "dtype": "float32"},
        {"cache": {"is_paged": True, "page_size": None}, "cc": (7, 5)},
        {"cache": {"is_paged": True, "page_size": None}, "env": {"NVTE_FLASH_ATTN_V2": "0"}},
    ],
)
def test_what_transformer_engine_does_not_look_at_does_not_raise(changes: dict) -> None:
    check_consistent(choose(**changes))


def test_a_page_size_that_is_missing_raises_even_without_flash_attention_2() -> None:
    with pytest.raises(ValueError, match="page_size=None with is_paged=True; expected a positive integer"):
        choose(cache={"is_paged": True, "page_size": None}, flash={"2": None})


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(EnvironmentVariableError, match=r"NVTE_UNFUSED_ATTN='1\.0': expected an integer"):
        choose(env={"NVTE_UNFUSED_ATTN": "1.0"})
