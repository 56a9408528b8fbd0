"""From which release of TransformerEngine to which each rule holds, and how a release is named."""

import dataclasses
import logging

import pytest
from packaging.version import Version

from mla_plugin import AttentionRequest, Platform
from mla_plugin.resolver import explain, survey, te_decide
from mla_plugin.resolver.transformer_engine.release import NEWEST, RELEASES, nearest_release, read_release
from tests.requests import H100, mla_request
from tests.resolver.te_cases import RELEASE_NAMES, SUBJECTS, choose, named, tables
from tests.resolver.te_release_cases import NO_FLASH, SPANS, Span
from tests.resolver.te_rule_cases import LOCAL, TOP_LEFT_CROSS


def spoken_of(span: Span, release: str) -> bool:
    """Whether the span's rule removes its backend, or names its subject, in a release."""
    decision = choose(release, **span.changes)
    if span.names in SUBJECTS:
        return [span.rule, span.names] in named(decision)
    return any(
        (removal.rule, removal.backend) == (span.rule, span.names) and span.says in removal.reason
        for removal in decision.removals
    )


@pytest.mark.parametrize("span", SPANS, ids=lambda span: f"{span.rule}-{span.names}-{span.releases}")
def test_a_rule_holds_in_its_releases_and_in_no_other(span: Span) -> None:
    first, last = (RELEASE_NAMES.index(release) for release in span.releases.split("-"))
    assert [release for release in RELEASE_NAMES if spoken_of(span, release)] == list(RELEASE_NAMES[first : last + 1])


def test_an_arbitrary_mask_leaves_rule_33_nothing_to_say() -> None:
    """Rule 28 turns FlashAttention off also where it gives no reason, for no version of it is left."""
    changes = {**TOP_LEFT_CROSS, **LOCAL, **NO_FLASH, "mask": "arbitrary"}
    for release in RELEASE_NAMES:
        assert ["33", "FlashAttention"] not in named(choose(release, **changes))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("2.20.2", "2.20.2"),
        ("2.20", "2.20"),
        ("2.10", "2.10"),
        ("2.14.1", "2.14.1"),
        ("2.20.2+abc1234", "2.20.2"),
        ("2.20.0.dev0+d0067d0", "2.20.0"),
        (Version("2.16.1+cu13"), "2.16.1"),
    ],
)
def test_a_release_is_a_version(given: str | Version, name: str) -> None:
    assert te_decide(*tables(), release=given).release == name
    assert read_release(given)[1] == Version(str(given)).release[:2]


@pytest.mark.parametrize("given", ["2.9.0", "2.21", "3.0", "1.13.0", "2", "latest", "", None, 2.14, (2, 14)])
def test_another_release_is_an_error_that_names_those_known(given: object) -> None:
    with pytest.raises(ValueError, match=r"^release=.*2\.10 to 2\.20\.2$"):
        te_decide(*tables(), release=given)


def test_the_newest_release_is_the_default() -> None:
    assert choose().release == te_decide(*tables()).release == NEWEST == "2.20.2"
    assert read_release(NEWEST)[1] == RELEASES[-1]


@pytest.mark.parametrize(("name", "value"), [("has_score_mod_bprop", True), ("softcap", 30.0), ("has_score_mod", True)])
def test_a_release_that_lacks_a_field_says_so(name: str, value: object) -> None:
    first = "2.20" if name == "softcap" else "2.17"
    for release in RELEASE_NAMES:
        if Version(release) >= Version(first):
            assert choose(release, **{name: value}).release == release
        else:
            message = f"^{name}={value}: TransformerEngine {release} does not know it; .* from {first} on$"
            with pytest.raises(ValueError, match=message):
                choose(release, **{name: value})


def test_a_version_variable_that_is_not_read_may_say_anything() -> None:
    for release in RELEASE_NAMES:
        changes = {"env": {"NVTE_FLASH_ATTN_V3": "no"}}
        if Version(release) < Version("2.18"):
            assert choose(release, **changes).selected == choose(release).selected
        else:
            with pytest.raises(ValueError, match="NVTE_FLASH_ATTN_V3='no'"):
                choose(release, **changes)


def test_the_layout_bhsd_is_known_from_2_15_on() -> None:
    changes = {"layout": "bhsd_bhsd_bhsd", "dq": 128, "dv": 128}
    for release in RELEASE_NAMES:
        if Version(release) < Version("2.15"):
            with pytest.raises(ValueError, match="qkv_layout='bhsd_bhsd_bhsd': expected bshd_bshd_bshd"):
                choose(release, **changes)
        else:
            assert choose(release, **changes).selected == "fused"


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((2, 16, 2048, 2048), "bhss"),
        ((1, 16, 2048, 2048), "1hss"),
        ((2, 1, 2048, 2048), "b1ss"),
        ((1, 1, 2048, 2048), "11ss"),
        ((1, 1, 1, 2048), "111s"),
    ],
)
def test_a_bias_shape_may_be_in_numbers_in_every_release(shape: tuple[int, ...], name: str) -> None:
    changes = {"bias": "post_scale_bias", "bias_grad": True}
    for release in RELEASE_NAMES:
        assert choose(release, **changes, bias_shape=shape) == choose(release, **changes, bias_shape=name)


@pytest.mark.parametrize("shape", [(3, 16, 2048, 2048), (2, 16, 2048), ()])
def test_a_bias_shape_that_has_no_name_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"core_attention_bias_shape=\(.*expected 1hss"):
        choose(bias="post_scale_bias", bias_shape=shape)


def with_transformer_engine(version: str | None, **packages: str) -> Platform:
    versions = {name.replace("_", "-"): found for name, found in packages.items()}
    if version is not None:
        versions["transformer-engine"] = version
    return dataclasses.replace(H100, packages=tuple(sorted(versions.items())))


@pytest.mark.parametrize(
    ("host", "installed", "release"),
    [
        ("transformer_engine", "2.14.1", "2.14.1"),
        ("transformer_engine", "2.18.0+27486e0", "2.18.0"),
        ("transformer_engine", None, NEWEST),
        ("megatron", "2.14.1", NEWEST),
        ("direct", "2.14.1", NEWEST),
    ],
)
def test_inside_transformer_engine_its_own_release_decides(host: str, installed: str | None, release: str) -> None:
    decision = survey(mla_request(host=host), platform=with_transformer_engine(installed), environ={})
    assert decision.cascade.release == release
    told = survey(mla_request(host=host), platform=with_transformer_engine(installed), environ={}, te_release="2.12")
    assert told.cascade.release == "2.12"


@pytest.mark.parametrize(("installed", "nearest"), [("2.21.0", "2.20.2"), ("3.1", "2.20.2"), ("2.9.0", "2.10")])
def test_an_installed_release_that_is_not_known_is_taken_for_the_nearest(
    installed: str, nearest: str, caplog: pytest.LogCaptureFixture
) -> None:
    nearest_release.cache_clear()
    request, platform = mla_request(host="transformer_engine"), with_transformer_engine(installed)
    with caplog.at_level(logging.WARNING, logger="mla_plugin"):
        decisions = [survey(request, platform=platform, environ={}) for _ in range(2)]
    assert [decision.cascade.release for decision in decisions] == [nearest, nearest]
    assert [record.getMessage() for record in caplog.records] == [
        f"TransformerEngine {installed}: its selection is known for 2.10 to 2.20.2; taken for {nearest}"
    ]


def test_explain_names_the_release() -> None:
    request = mla_request(is_training=True)
    for release in ("2.14", "2.20.2"):
        text = explain(request, platform=H100, environ={}, te_release=release)
        assert f"TransformerEngine {release}'s own selection: " in text
    with pytest.raises(ValueError, match=r"release='2\.21'"):
        explain(request, platform=H100, environ={}, te_release="2.21")


def test_a_release_changes_what_runs() -> None:
    """FlashAttention 2 takes unequal head dimensions from 2.17 on; before, TransformerEngine leaves it out."""
    platform = with_transformer_engine("2.16.1", flash_attn="2.8.3")
    request: AttentionRequest = mla_request(host="transformer_engine", is_training=True)
    environ = {"NVTE_FUSED_ATTN": "0"}
    assert "flash2" not in survey(request, platform=platform, environ=environ).cascade.survivors
    newer = with_transformer_engine("2.17.1", flash_attn="2.8.3")
    assert survey(request, platform=newer, environ=environ).cascade.selected == "flash2"


def test_the_switch_of_a_version_is_no_reason_before_2_18() -> None:
    platform = with_transformer_engine(None, flash_attn="2.8.3", flash_attn_3="3.0.0")
    environ = {"NVTE_FLASH_ATTN_V3": "0", "NVTE_FUSED_ATTN": "0"}
    removed = {}
    for release in ("2.17", "2.18"):
        cascade = survey(mla_request(), platform=platform, environ=environ, te_release=release).cascade
        removed[release] = [removal.reason for removal in cascade.removals if removal.backend == "flash3"]
    assert removed == {"2.17": [], "2.18": ["NVTE_FLASH_ATTN_V3=0"]}


def test_the_platform_is_seen_as_the_release_sees_it() -> None:
    """2.16 compares flash-attn 2.8.3+cu12 as 2.8.3; 2.14 takes it for a newer one; 2.19 looks at CUTLASS."""
    platform = with_transformer_engine(
        None, flash_attn="2.8.3+cu12", flash_attn_4="4.0.0b24", nvidia_cutlass_dsl="4.6.1"
    )
    for release, absent in (
        ("2.14", {"flash2", "flash3", "flash4"}),
        ("2.16", {"flash3"}),
        ("2.19", {"flash3", "flash4"}),
    ):
        removals = survey(mla_request(), platform=platform, environ={}, te_release=release).cascade.removals
        assert {removal.backend for removal in removals if removal.rule == "0.1"} == absent
