"""The catalogue covers what it promises, and a case's request and tensors describe one and the same call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.arguments.mask import ATTN_MASK_TYPES
from mla_plugin.conformance import Case, cases
from mla_plugin.conformance.attention import many
from mla_plugin.conformance.attention.call import Call
from mla_plugin.conformance.attention.case import PADDING_POISON
from mla_plugin.conformance.attention.oracle import Oracle
from mla_plugin.conformance.budget import check_error
from mla_plugin.conformance.decode import many as many_of_decode
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.reference import attention, attention_with_gradients

SMALL, LARGE = cases(), cases("large")
EVERY = (*SMALL, *LARGE)
PADDED = Case("", seqlens_q=(2, 5), seqlens_kv=(3, 1), rows_q=(6, 6), rows_kv=(4, 4), attn_mask_type="padding")
PACKED = replace(PADDED, qkv_format="thd", rows_q=(2, 6), rows_kv=(4, 1), tail=2)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_names_are_unique_and_can_be_keys_of_refuses():
    names = [case.name for case in EVERY]
    assert len(set(names)) == len(names)
    assert not any(set(name) & set(" &\t[]") for name in names)
    assert not set(names) & frozenset().union(*(case.tags for case in EVERY))


@pytest.mark.parametrize(
    "tag",
    [
        *LAYOUTS,
        *ATTN_MASK_TYPES,
        *("fp32", "bf16", "fp16", "fp64"),
        *(f"head_dims={d}" for d in ("192/128", "128/128", "256/256", "192/256", "96/64", "64/32")),
        *(
            "pre_scale_bias",
            "post_scale_bias",
            "bias_1hss",
            "bias_b1ss",
            "bias_11ss",
            "bias_bhss",
            "bias_requires_grad",
        ),
        *("window", "window_without_causal_mask", "gqa", "mqa", "unequal_lengths", "one_token", "empty_sequences"),
        *("pad_between_seqs", "tail", "transposed", "sliced_heads", "expanded_heads", "dout_expanded"),
        *("return_lse", "deterministic"),
    ],
)
def test_every_feature_has_a_case_in_both_working_dtypes(tag):
    selected = cases(tag)
    assert selected
    assert all(tag in case.tags for case in selected)
    if tag not in ("fp32", "bf16", "fp16", "fp64"):
        assert cases(tag, "fp32")
        assert cases(tag, "bf16")


def test_selection():
    assert all("small" in case.tags for case in SMALL)
    assert all(case.is_large for case in LARGE)
    assert set(cases("thd", "fp16")) == {case for case in SMALL if case.qkv_format == "thd" and "fp16" in case.tags}
    assert cases("large", "thd")
    with pytest.raises(ValueError, match=r"no conformance case has the tag 'tdh'; tags: .*thd"):
        cases("tdh")


def test_lengths_meet_masks_in_both_ways():
    for mask in ("causal", "causal_bottom_right"):
        dense = [case for case in cases(mask) if len(set(case.seqlens_q)) == 1]
        assert any(case.seqlens_q > case.seqlens_kv for case in dense)
        assert any(case.seqlens_q < case.seqlens_kv for case in dense)


def test_large_cases_stay_within_their_memory():
    for case in LARGE:
        assert case.num_heads * max(case.seqlens_q) * max(case.seqlens_kv) <= 2**26, case
    for case in SMALL:
        assert sum(a * b for a, b in zip(case.seqlens_q, case.seqlens_kv, strict=True)) < 2**20, case


@pytest.mark.parametrize("case", SMALL[::3], ids=str)
def test_request_and_tensors_describe_one_call(case):
    """The request is what the library makes of the tensors, for the first call and for the second."""
    for each in (case, case.other()):
        tensors = each.tensors(generator=generator())
        assert request_of(each, tensors) == case.request()
        assert all(x.stride(-1) == 1 for x in (tensors.q, tensors.k, tensors.v))
        output = attention(case.request(), tensors)
        dout, dlse = each.cotangents(generator=generator())
        assert (dout.shape, dout.dtype) == (output.out.shape, case.dtype)
        assert (dlse is not None) == case.return_lse
        if dlse is not None:
            assert dlse.shape == output.lse.shape
            assert dlse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)


def request_of(case, tensors):
    request = case.request()
    return AttentionRequest.of(
        tensors,
        qkv_format=case.qkv_format,
        attn_mask_type=case.attn_mask_type,
        window_size=case.window_size,
        bottom_right_diagonal=None if "causal" in case.attn_mask_type else case.bottom_right_diagonal,
        max_seqlen_q=request.max_seqlen_q,
        max_seqlen_kv=request.max_seqlen_kv,
        bias_type=case.bias_type,
        bias_requires_grad=case.bias_requires_grad,
        is_training=True,
        deterministic=case.deterministic,
        return_lse=case.return_lse,
    )


def test_the_oracle_is_autograd_through_the_reference():
    """Two ways to the same numbers: formulas that are written out, and autograd."""
    with_sequences = [case for case in SMALL if case.batch_size]  # autograd has nothing to go back to without
    for case in with_sequences[::7]:
        call = Call.of(case, case.request(), "cpu", generator(), PADDING_POISON)
        exact, gradients = attention_with_gradients(call.request, call.tensors, call.dout, call.dlse)
        out, lse = call.expected()
        torch.testing.assert_close(out.exact, exact.out, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(lse.exact, exact.lse, rtol=1e-9, atol=1e-11)
        for name, yardstick in call.expected_gradients().items():
            torch.testing.assert_close(yardstick.exact, getattr(gradients, name), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_below_the_normal_range_may_be_flushed_to_zero(dtype):
    """GPUs flush them; the gradient of a key that has only such weights is then 0 instead of 1e-36."""
    keys = torch.tensor([[88.0], [0.0]], dtype=dtype).view(1, 2, 1, 1)  # the second key's weight is exp(-88) = 6e-39
    q, v, dout = torch.ones(1, 1, 1, 1, dtype=dtype), torch.full_like(keys, 50.0), torch.full((1, 1, 1, 1), 50.0)
    v[0, 1] = -50.0
    tensors = AttentionTensors(q, keys, v, 1.0)
    oracle = Oracle(AttentionRequest.of(tensors, attn_mask_type="no_mask"), tensors)
    out, lse = oracle.forward()
    for name, yardstick in oracle.backward(out, lse.exact, dout.to(dtype), None).items():
        flushed = yardstick.exact.masked_fill(yardstick.exact.abs() < 1e-30, 0.0)
        assert name != "dk" or bool((flushed != yardstick.exact).any())
        check_error(name, flushed, yardstick)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_cases_are_consistent(case):
    request = case.request("cuda:0")
    assert (request.device_type, request.device_index) == ("cuda", 0)
    assert case.is_packed or request.has_padding or len({*case.seqlens_q}) == len({*case.seqlens_kv}) == 1


def test_inference_asks_for_no_gradient():
    case = Case("", bias_type="post_scale_bias", bias_requires_grad=True)
    assert case.request(is_training=True).bias_requires_grad
    assert not case.request(is_training=False).bias_requires_grad


@pytest.mark.parametrize(
    ("mask", "given", "expected"),
    [
        ("causal", True, False),
        ("padding_causal", True, False),
        ("causal_bottom_right", False, True),
        ("padding_causal_bottom_right", False, True),
        ("no_mask", True, True),
        ("padding", False, False),
    ],
)
def test_the_diagonal_agrees_with_the_mask(mask, given, expected):
    case = Case("", attn_mask_type=mask, bottom_right_diagonal=given)
    assert case.request().bottom_right_diagonal is expected


STRIDES = {
    # storage: strides of q and of k for bshd, B = 2, S = 3, H = 4, head dims 8 and 6
    "contiguous": ((96, 32, 8, 1), (96, 32, 8, 1)),
    "transposed": ((96, 8, 24, 1), (96, 8, 24, 1)),
    "sliced_heads": ((192, 64, 16, 1), (192, 64, 16, 1)),
    "packed": ((264, 88, 22, 1), (264, 88, 22, 1)),
    "expanded_heads": ((96, 32, 8, 1), (24, 8, 0, 1)),
}


@pytest.mark.parametrize("storage", STRIDES)
def test_storage(storage):
    lengths = {"seqlens_q": (3, 3), "seqlens_kv": (3, 3)}
    case = Case("", head_dim_qk=8, head_dim_v=6, num_heads=4, num_kv_heads=4, storage=storage, **lengths)
    tensors = case.tensors(generator=generator())
    assert (tensors.q.stride(), tensors.k.stride()) == STRIDES[storage]
    assert (tensors.q.untyped_storage().data_ptr() == tensors.v.untyped_storage().data_ptr()) == (storage == "packed")


@pytest.mark.parametrize(
    ("storage", "strides"), [("contiguous", (24, 8, 1)), ("transposed", (8, 40, 1)), ("expanded", (0, 0, 0))]
)
def test_dout_storage(storage, strides):
    case = replace(PACKED, tail=0, rows_q=(2, 3), seqlens_q=(2, 3), num_heads=3, head_dim_v=8, dout_storage=storage)
    assert case.cotangents(generator=generator())[0].stride() == strides


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd"])
def test_padding_of_dense_layouts(qkv_format):
    case = replace(PADDED, qkv_format=qkv_format)
    padding = LAYOUTS[qkv_format].to_bhsd(case.is_padding("q"))
    assert padding.shape == (2, 1, 6, 1)
    assert padding[:, 0, :, 0].tolist() == [[False, False, *[True] * 4], [*[False] * 5, True]]


def test_padding_of_packed_sequences():
    assert PACKED.is_padding("q").flatten().tolist() == [False, False, *[False] * 5, True, True, True]
    assert PACKED.is_padding("kv").flatten().tolist() == [False, False, False, True, False, True, True]
    tensors = PACKED.tensors()
    assert tensors.q.shape[0] == 10
    assert tensors.cu_seqlens_q.tolist() == [0, 2, 7]
    assert tensors.cu_seqlens_q_padded.tolist() == [0, 2, 8]
    assert tensors.cu_seqlens_kv_padded.tolist() == [0, 4, 5]


@pytest.mark.parametrize("storage", ["contiguous", "transposed", "sliced_heads"])
@pytest.mark.parametrize("case", [PADDED, replace(PADDED, qkv_format="sbhd"), PACKED], ids=["bshd", "sbhd", "thd"])
def test_padded_rows_are_poisoned(case, storage):
    case = replace(case, storage=storage, dout_storage="contiguous", return_lse=True)
    plain, poisoned = (case.tensors(generator=generator(), padding_poison=factor) for factor in (1.0, PADDING_POISON))
    for name, side in (("q", "q"), ("k", "kv"), ("v", "kv")):
        factor = torch.where(case.is_padding(side), PADDING_POISON, 1.0)
        assert factor.max() == PADDING_POISON
        assert torch.equal(getattr(poisoned, name), getattr(plain, name) * factor)
    (dout, dlse), (dout_poisoned, dlse_poisoned) = (
        case.cotangents(generator=generator(), padding_poison=factor) for factor in (1.0, PADDING_POISON)
    )
    factor = torch.where(case.is_padding("q"), PADDING_POISON, 1.0)
    assert torch.equal(dout_poisoned, dout * factor)
    factor = LAYOUTS[case.qkv_format].to_bhsd(factor)[..., 0]
    assert torch.equal(dlse_poisoned, dlse * (factor[0] if case.is_packed else factor))


def test_arbitrary_masks_hide_whole_rows_and_parts_of_others():
    mask = Case("", attn_mask_type="arbitrary").tensors(generator=generator()).attention_mask
    assert mask.shape == (2, 1, 67, 67)
    hidden = mask.all(-1)[:, 0]
    assert hidden.nonzero()[:, 1].tolist() == [0, 33, 66] * 2
    assert 0.3 < mask.float().mean() < 0.7


def test_data_is_fresh_and_reproducible():
    case = Case("")
    assert torch.equal(case.tensors(generator=generator(3)).q, case.tensors(generator=generator(3)).q)
    assert not torch.equal(case.tensors().q, case.tensors().q)
    assert case.tensors().softmax_scale == 192**-0.5
    assert replace(case, softmax_scale=0.3).tensors().softmax_scale == 0.3


def test_a_batch_on_a_gpu_exceeds_a_dimension_of_its_grid() -> None:
    for lengths in (many.LENGTHS_Q, many_of_decode.LENGTHS):
        assert max(times * len(lengths) for times, _ in many.sizes_on("cuda")) > 65_535
    assert all(times % 2 == 0 and len(many.LENGTHS_Q) % 2 == 1 for times, _ in many.sizes_on("cuda"))
