"""What counts as an installed FlashAttention, and which head dimensions each version takes."""

import pytest

from mla_plugin.resolver import te_decide
from mla_plugin.resolver.transformer_engine.flash import (
    compared_version,
    fa2_takes,
    fa3_takes,
    fa4_backward_misaligned,
    fa4_takes,
    fa4_takes_unasked,
    why_not_installed,
)
from mla_plugin.resolver.transformer_engine.release import RELEASES
from tests.resolver.te_cases import tables

NEWEST = RELEASES[-1]
ALL_CC = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]


@pytest.mark.parametrize("cc", ALL_CC)
@pytest.mark.parametrize(
    "version", ["2.0.9", "2.1.0", "2.1.1", "2.7.2", "2.7.3", "2.7.4.post1", "2.8.3", "2.8.4", "2.9"]
)
def test_flash_attention_2_counts_within_a_range(version: str, cc: tuple[int, int]) -> None:
    old = ("2.1.1", "2.7.2")
    counts = version in ("2.7.3", "2.7.4.post1", "2.8.3") or (version in old and cc < (10, 0))
    reason = why_not_installed("flash2", version, cc, release=NEWEST)
    assert (reason is None) == counts
    assert counts or reason.startswith(f"flash-attn {version} ")


@pytest.mark.parametrize("version", ["2.8.3", "2.8.3.post1", "2.8.3+cu12torch2.7"])
def test_what_comes_after_2_8_3_counts_from_2_19_on(version: str) -> None:
    counting = [
        release for release in RELEASES if why_not_installed("flash2", version, (9, 0), release=release) is None
    ]
    assert counting == (list(RELEASES) if version == "2.8.3" else [(2, 19), (2, 20)])


def test_2_15_to_2_18_compare_flash_attention_2_without_its_local_part() -> None:
    whole, parts = "2.8.3+cu12torch2.7", {"2.8.3", "2.8.3+cu12torch2.7"}
    compared = {release: compared_version("flash2", whole, release) for release in RELEASES}
    assert set(compared.values()) == parts
    assert [release for release in RELEASES if compared[release] == "2.8.3"] == [(2, minor) for minor in range(15, 19)]
    assert compared_version("flash3", "3.0.0+cu12", (2, 16)) == "3.0.0+cu12"
    assert compared_version("flash2", None, (2, 16)) is None


def test_flash_attention_3_counts_in_every_version() -> None:
    assert why_not_installed("flash3", "0.0.1", (9, 0), release=NEWEST) is None
    assert why_not_installed("flash3", None, (9, 0), release=NEWEST) == "flash-attn-3 is not installed"


@pytest.mark.parametrize(
    ("version", "cutlass_dsl", "counts"),
    [
        ("4.0.0b0", None, False),
        ("4.0.0b4", None, False),
        ("4.0.0b5", None, True),
        ("4.0.0b10", "4.0.0", True),
        ("4.0.0b23", "4.6.1", True),
        ("4.0.0b24", "4.6.1", False),
        ("4.0.0b24", "4.6.2", True),
        ("4.0.0b24", None, True),
        ("4.0.0", None, True),
    ],
)
def test_flash_attention_4_counts_from_b5(version: str, cutlass_dsl: str | None, counts: bool) -> None:
    assert (why_not_installed("flash4", version, (10, 0), cutlass_dsl, release=NEWEST) is None) == counts
    params, env, platform = tables(cc=(10, 0), flash={"4": version})
    decision = te_decide(params, env, {**platform, "nvidia_cutlass_dsl": cutlass_dsl})
    assert ("flash4" in decision.survivors) == counts


@pytest.mark.parametrize("cc", ALL_CC)
def test_flash_attention_2_head_dims(cc: tuple[int, int]) -> None:
    large = cc in [(8, 0), (9, 0), (10, 0), (12, 0)]
    taken = {dim for dim in (8, 60, 64, 192, 200, 256, 264, 576) if fa2_takes(dim, cc)}
    assert taken == {8, 64, 192} | ({200, 256} if large else set())


@pytest.mark.parametrize(
    ("dq", "dv", "taken"),
    [
        (192, 128, True), (129, 97, True), (136, 104, True), (64, 512, True), (60, 36, True), (256, 256, True),
        (200, 200, True), (256, 128, False), (128, 64, False), (576, 512, False), (192, 96, False), (128, 104, False),
        (200, 128, False), (192, 136, False), (72, 64, False), (64, 520, False), (264, 264, False),
    ],
)  # fmt: skip
def test_flash_attention_3_head_dims(dq: int, dv: int, taken: bool) -> None:
    assert fa3_takes(dq, dv, 16, 16, "bfloat16") is taken
    assert fa3_takes(dq, dv, 16, 4, "float16") is taken
    assert not fa3_takes(dq, dv, 16, 5, "bfloat16")
    assert fa3_takes(dq, dv, 16, 16, "float8_e4m3fn") is (taken and (dv <= 256 or dq == dv))


@pytest.mark.parametrize("major", [10, 11])
@pytest.mark.parametrize(
    ("dq", "dv", "since"),
    [
        (8, 8, 5), (128, 128, 5), (128, 8, 5), (192, 128, 5), (64, 512, 9), (256, 256, 11), (512, 512, 16),
        (136, 128, None), (128, 192, None), (256, 128, None), (192, 192, None), (576, 512, None), (60, 64, None),
        (64, 60, None), (4, 64, None), (0, 64, None), (64, 256, None),
    ],
)  # fmt: skip
def test_flash_attention_4_head_dims_by_release(dq: int, dv: int, since: int | None, major: int) -> None:
    taking = [beta for beta in range(5, 25) if fa4_takes(dq, dv, (major, 0), f"4.0.0b{beta}")]
    assert taking == ([] if since is None else list(range(since, 25)))


@pytest.mark.parametrize("version", ["4.0.0b5", "4.0.0b24"])
def test_flash_attention_4_head_dims_on_hopper(version: str) -> None:
    dims = [(4, 64), (8, 8), (60, 64), (64, 60), (192, 128), (128, 256), (256, 256), (64, 264), (264, 64), (64, 512)]
    taken = [pair for pair in dims if fa4_takes(*pair, (9, 0), version)]
    assert taken == [(8, 8), (192, 128), (128, 256), (256, 256)]


@pytest.mark.parametrize("cc", [(8, 0), (12, 0), (12, 1)])
def test_flash_attention_4_checks_nothing_elsewhere(cc: tuple[int, int]) -> None:
    assert fa4_takes(576, 512, cc, "4.0.0b11")
    assert fa4_takes(61, 7, cc, "4.0.0b11")


@pytest.mark.parametrize("cc", ALL_CC)
def test_flash_attention_4_head_dims_of_2_15(cc: tuple[int, int]) -> None:
    dims = [(100, 60), (128, 128), (192, 128), (128, 192), (136, 128), (256, 256), (264, 64), (64, 264)]
    taken = [pair for pair in dims if fa4_takes_unasked(*pair, cc)]
    assert taken == (dims[:3] if (10, 0) <= cc < (12, 0) else dims[:6])


def test_the_backward_of_flash_attention_4_at_head_dim_128() -> None:
    """Only what rounds up to 64 or 128 passes; the sixteenths are rounded first."""
    passing = {dv for dv in range(8, 129, 8) if not fa4_backward_misaligned(128, dv)}
    assert passing == {56, 64, 120, 128}
    assert not fa4_backward_misaligned(192, 128)
    assert fa4_backward_misaligned(192, 96)
    # 136 rounds up to 144: the step is gcd(32, 72) = 8, which divides every rounded half.
    assert not fa4_backward_misaligned(136, 96)
