"""Up to four sequences are divided by the Gluon kernels themselves, more by a kernel before."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.hopper import launch as hopper_launch
from mla_plugin.kernels.decode.plan import FEW_SEQUENCES
from mla_plugin.kernels.decode.projected import launch as projected
from tests.kernels.decode_cases import assert_as_good_as_pytorch, assert_out_as_good_as_pytorch
from tests.kernels.gathered_cases import call_of
from tests.kernels.gluon.hopper import hopper as hopper

pytestmark = pytest.mark.usefixtures("hopper")
LENGTHS = [200, 64, 0, 129, 1]
BFLOAT16 = torch.bfloat16
KINDS = [(40, PLAIN, 64), (40, PLAIN, 16), (40, FP8, None), (40, FP8_DS_MLA, 16), (16, FP8, 16), (20, FP8, 64)]


def assert_planned(tensors: DecodeTensors, is_planned: bool) -> None:
    """A kernel plans, and the next one knows."""
    ((plan, attend, _),) = decode_launch.make_launches(tensors).rounds
    told = dict(zip(attend.kernel.arg_names[len(attend.given) :], attend.arguments, strict=True))
    assert (plan is not None, told["PLANNED"]) == (is_planned, is_planned)


def decode(tensors: DecodeTensors) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = decode_launch.decode(tensors, known_of(tensors))
    assert lse is not None
    return out, lse


@pytest.mark.parametrize(("heads", "kv_format", "page_size"), KINDS)
@pytest.mark.parametrize("batch", [4, 5])
def test_four_have_no_plan_and_five_have_one(batch: int, heads: int, kv_format: str, page_size: int | None) -> None:
    inputs, tensors = call_of((batch, 1, heads, 200), page_size, kv_format, BFLOAT16, LENGTHS[:batch])
    assert_planned(tensors, batch == 5)
    assert_as_good_as_pytorch(*decode(tensors), inputs, is_causal=False)


@pytest.mark.parametrize(("heads", "kv_format", "page_size"), KINDS)
def test_a_plan_changes_no_bit(
    heads: int, kv_format: str, page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tensors = call_of((FEW_SEQUENCES, 2, heads // 2, 200), page_size, kv_format, BFLOAT16, LENGTHS[:4], 1, True)
    first = decode(tensors)
    monkeypatch.setattr(decode_launch, "FEW_SEQUENCES", 0)
    monkeypatch.setattr("mla_plugin.arguments.decode_layout._known", {})
    assert_planned(tensors, True)
    assert all(torch.equal(a, b) for a, b in zip(first, decode(tensors), strict=True))


@pytest.mark.parametrize("heads", [20, 40])
@pytest.mark.parametrize("batch", [4, 5])
def test_products_over_e4m3_of_few_sequences(batch: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls without the log-sum-exp have: with and without a plan, and the same bits."""
    inputs, tensors = call_of((batch, 1, heads, 200), 64, FP8, BFLOAT16, LENGTHS[:batch])
    tensors = tensors._replace(return_lse=False)
    assert_planned(tensors, batch == 5)
    out, _ = decode_launch.decode(tensors, known_of(tensors))
    assert_out_as_good_as_pytorch(out, inputs, is_causal=False)
    if batch == 4:
        monkeypatch.setattr(decode_launch, "FEW_SEQUENCES", 0)
        monkeypatch.setattr("mla_plugin.arguments.decode_layout._known", {})
        assert_planned(tensors, True)
        assert torch.equal(out, decode_launch.decode(tensors, known_of(tensors))[0])


@pytest.mark.parametrize(("seqlen_kv", "is_plain"), [(5 * 64, True), (5 * 64 + 1, False)])
def test_a_step_with_w_uk_and_w_uv_over_few_keys_runs_the_plain_kernel(seqlen_kv: int, is_plain: bool) -> None:
    """It needs a kernel that reads the cache by pointers; there is none from two tiles a part on."""
    _, tensors = call_of((1, 1, 40, seqlen_kv), None, PLAIN, BFLOAT16, [seqlen_kv])
    assert isinstance(decode_launch.make_launches(tensors).described, hopper_launch.Descriptors)
    query, weight = torch.zeros(1, 40, 1, 128 + 64, dtype=BFLOAT16), torch.zeros(40 * 256, 512, dtype=BFLOAT16)
    step = projected.step_of(tensors, query, weight, 128, 128, None)
    assert (step is not None) == is_plain
