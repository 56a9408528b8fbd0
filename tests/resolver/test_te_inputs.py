"""How the three tables of a selection are read."""

import pytest
import torch

from mla_plugin.resolver.transformer_engine.inputs import read_query
from mla_plugin.resolver.transformer_engine.query import Query, normalise_window
from mla_plugin.resolver.transformer_engine.release import RELEASES
from tests.resolver.te_cases import PAGED, UNPAGED, choose, tables


def query(**changes: object) -> Query:
    return read_query(*tables(**changes), RELEASES[-1])


CAUSAL_MASKS = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")


@pytest.mark.parametrize("mask", CAUSAL_MASKS)
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, (-1, 0)),
        ((-1, 0), (-1, 0)),
        ((-1, -1), (-1, 0)),
        ((128, 0), (128, 0)),
        ((0, 0), (0, 0)),
        ((128, 128), (128, 0)),
        ((128, -1), (128, 0)),
        ((0, 3), (0, 0)),
    ],
)
def test_window_of_a_causal_mask(mask: str, window: tuple[int, int] | None, expected: tuple[int, int]) -> None:
    assert normalise_window(mask, window) == expected


@pytest.mark.parametrize("mask", ["no_mask", "padding", "arbitrary"])
@pytest.mark.parametrize(
    ("window", "expected"),
    [(None, (-1, -1)), ((-1, -1), (-1, -1)), ((-1, 0), (-1, -1)), ((128, 0), (128, 0)), ((0, 5), (0, 5))],
)
def test_window_of_another_mask(mask: str, window: tuple[int, int] | None, expected: tuple[int, int]) -> None:
    assert normalise_window(mask, window) == expected


@pytest.mark.parametrize(
    ("mask", "window", "accepted"),
    [
        *((mask, window, "left >= 0, 0") for mask in CAUSAL_MASKS for window in ((-1, 5), (-2, 0), (-2, -1))),
        *(
            (mask, window, "left >= 0, right >= 0")
            for mask in ("no_mask", "padding", "arbitrary")
            for window in ((-1, 5), (5, -1), (-2, -2), (-2, 0), (0, -2))
        ),
    ],
)
def test_windows_that_a_mask_rejects(mask: str, window: tuple[int, int], accepted: str) -> None:
    with pytest.raises(AssertionError, match=rf"attn_mask_type='{mask}'.*{accepted}"):
        normalise_window(mask, window)
    with pytest.raises(AssertionError, match="window_size"):
        choose(mask=mask, window=list(window))


@pytest.mark.parametrize("window", [None, (-1, -1)])
def test_an_unknown_mask_has_no_window(window: tuple[int, int] | None) -> None:
    with pytest.raises(AssertionError, match="attn_mask_type='bogus': expected no_mask"):
        normalise_window("bogus", window)


def test_alibi_with_slopes_is_a_bias_for_cudnn() -> None:
    assert query(bias="alibi", slopes=[16]).fused_bias_type == "post_scale_bias"
    assert query(bias="alibi").fused_bias_type == "alibi"
    assert query(slopes=[16]).fused_bias_type == "no_bias"


def test_selection_takes_a_given_window_as_it_is() -> None:
    assert query(window=[128, 128]).full_window == (128, 128)
    assert query(window=[-1, -1]).full_window == (-1, -1)
    assert query(window=None).full_window == (-1, 0)
    assert query(window=None, mask="no_mask").full_window == (-1, -1)


@pytest.mark.parametrize(
    ("window", "swa"),
    [(None, False), ([-1, 0], False), ([-1, -1], False), ([0, 0], True), ([128, 0], True), ([128, 128], True)],
)
def test_sliding_window(window: list[int] | None, swa: bool) -> None:
    assert query(window=window).swa is swa


@pytest.mark.parametrize(
    ("text", "deterministic"), [(None, False), ("1", False), ("2", False), ("-1", False), ("0", True), (" 00 ", True)]
)
def test_determinism_comes_from_the_environment_unless_given(text: str | None, deterministic: bool) -> None:
    env = {} if text is None else {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": text}
    assert choose(env=env).deterministic is deterministic
    assert choose(env=env, deterministic="env").deterministic is deterministic
    assert choose(env=env, deterministic=True).deterministic is True
    assert choose(env=env, deterministic=False).deterministic is False


@pytest.mark.parametrize(
    ("mask", "bottom_right"),
    [("causal", False), ("padding_causal", False), ("causal_bottom_right", True), ("no_mask", True), ("padding", True)],
)
def test_diagonal_comes_from_the_mask_when_it_is_auto(mask: str, bottom_right: bool) -> None:
    assert query(mask=mask, window=None, bottom_right_diagonal="auto").bottom_right_diagonal is bottom_right
    assert query(mask=mask, window=None, bottom_right_diagonal=True).bottom_right_diagonal is True
    assert query(mask=mask, window=None, bottom_right_diagonal=False).bottom_right_diagonal is False


@pytest.mark.parametrize(
    ("layout", "cache", "fmt", "layout_format"),
    [
        ("bshd_bshd_bshd", None, "bshd", "bshd"),
        ("sbh3d", None, "sbhd", "sbhd"),
        ("thd_t2hd", None, "thd", "thd"),
        ("t3hd", None, "thd", "thd"),
        ("thd_bshd_bshd", None, "thd", "thd_2bshd"),
        ("thd_bshd_bshd", UNPAGED, "thd_2bshd", "thd_2bshd"),
        ("bshd_bs2hd", UNPAGED, "bshd", "bshd"),
        ("paged_kv_thd_bshd_bshd", PAGED, "thd_2bshd", "thd_2bshd"),
        ("paged_kv_sbhd_bshd_bshd", PAGED, "sbhd_2bshd", "sbhd_2bshd"),
        ("paged_kv_bshd_bshd_bshd", PAGED, "bshd", "bshd"),
    ],
)
def test_formats(layout: str, cache: dict | None, fmt: str, layout_format: str) -> None:
    read = query(layout=layout, cache=cache)
    assert (read.fmt, read.layout_format) == (fmt, layout_format)
    assert read.is_paged_layout == layout.startswith("paged")


@pytest.mark.parametrize("layout", ["bs3hd", "sbh3d", "t3hd", "paged_kv_bs3hd"])
def test_a_packed_layout_has_no_kv_cache(layout: str) -> None:
    with pytest.raises(ValueError, match=f"qkv_layout='{layout}' with inference_params.*expected"):
        query(layout=layout, cache=UNPAGED)


@pytest.mark.parametrize("name", ["qkv_dtype", "window_size", "inference_params", "attn_mask_type"])
def test_a_missing_param_is_named(name: str) -> None:
    params, env, platform = tables()
    del params[name]
    with pytest.raises(ValueError, match=f"params lacks {name};"):
        read_query(params, env, platform, RELEASES[-1])


@pytest.mark.parametrize("name", ["compute_capability", "cudnn_version", "flash_attn", "fused_supported"])
def test_a_missing_platform_field_is_named(name: str) -> None:
    params, env, platform = tables()
    del platform[name]
    with pytest.raises(ValueError, match=f"platform lacks {name};"):
        read_query(params, env, platform, RELEASES[-1])


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("qkv_dtype", torch.bfloat16, "a text"),
        ("attn_mask_type", None, "a text"),
        ("num_gqa_groups", 0, "an integer >= 1"),
        ("max_seqlen_kv", None, "an integer >= 0"),
        ("head_dim_v", -8, "an integer >= 1"),
    ],
)
def test_a_param_of_the_wrong_type_is_named(name: str, value: object, accepted: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}: expected {accepted}"):
        query(**{name: value})


def test_empty_sequences_are_decided_about() -> None:
    assert choose(sq=0, skv=0).selected == "fused"


def test_a_kv_cache_needs_its_two_fields() -> None:
    with pytest.raises(ValueError, match=r"params\['inference_params'\] lacks page_size"):
        query(cache={"is_paged": False})


@pytest.mark.parametrize("answer", [None, "yes", 1])
def test_cudnns_answer_is_yes_no_or_worked_out(answer: object) -> None:
    with pytest.raises(ValueError, match=r"platform\['fused_supported'\]=.*expected True, False and 'cudnn'"):
        query(fused=answer)


def test_a_cpu_has_no_selection() -> None:
    params, env, platform = tables()
    with pytest.raises(ValueError, match="CUDA devices; give"):
        read_query(params, env, {**platform, "compute_capability": None}, RELEASES[-1])


def test_without_cudnn_there_is_no_fused_attention() -> None:
    params, env, platform = tables(fused="cudnn")
    assert read_query(params, env, {**platform, "cudnn_version": None}, RELEASES[-1]).cudnn == (0, 0, 0)


def test_a_query_is_a_value() -> None:
    first, second = query(), query()
    assert first == second
    assert query(head_dim_v=64) != first
    with pytest.raises(AttributeError):
        first.dq = 64


JUNK = (None, "x", 1, -1, 1.5, [], ["a", "b"], [None, None], (1, 2, 3), (1, 2, 3, 4), {}, b"", object(), float("nan"))
JUNK_CACHES = ({"is_paged": True}, {"is_paged": True, "page_size": "x"}, {"is_paged": None, "page_size": None})


def rejected(where: str, field: str, value: object) -> str:
    """What ``read_query`` says of a value; nothing if it accepts it."""
    given = {name: dict(table) for name, table in zip(("params", "env", "platform"), tables(), strict=True)}
    given[where][field] = value
    try:
        read_query(*given.values(), RELEASES[-1])
    except (ValueError, AssertionError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", ["params", "platform"])
def test_a_value_of_any_type_is_accepted_or_named(where: str) -> None:
    table = dict(zip(("params", "env", "platform"), tables(), strict=True))[where]
    named = set()
    for field in (*table, "softcap", "deterministic", "nvidia_cutlass_dsl", "fa3_softcap"):
        for value in (*JUNK, *(JUNK_CACHES if field == "inference_params" else ())):
            why = rejected(where, field, value)
            assert not why or field in why or field == "qkv_layout", (field, value, why)
            if why:
                named.add(field)
    expected = {
        "params": {"window_size", "softcap", "attention_dropout", "inference_params", "core_attention_bias_shape"},
        "platform": {"compute_capability", "cudnn_version", "flash_attn", "fused_supported"},
    }
    assert expected[where] <= named


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_table_that_is_none(place: int) -> None:
    broken: list[object] = list(tables())
    broken[place] = None
    with pytest.raises(ValueError, match=r"(params|env|platform)=None: expected a dict"):
        read_query(*broken, RELEASES[-1])
