"""NaN and infinity on the CPU's kernel route and on the blocks' route: what plain PyTorch gives, never silent zeros."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import Plan, Residuals
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins import sdpa
from mla_plugin.plugins.sdpa import flash
from tests.plugins import plain
from tests.plugins.calls import request, tensors

NAN, INF = torch.nan, torch.inf
POISONS = {
    "nan_query": ("q", NAN),
    "nan_key": ("k", NAN),
    "nan_value": ("v", NAN),
    "inf_query": ("q", INF),
    "-inf_query": ("q", -INF),
    "inf_key": ("k", INF),
    "-inf_key": ("k", -INF),
    "inf_value": ("v", INF),
}
SHAPES = ((1, 1), (3, 3), (15, 15), (16, 16), (17, 17), (5, 33), (33, 5), (40, 12))
ROUTES: dict[str, dict[str, Any]] = {
    "kernel": {},
    "kernel_causal": {"attn_mask_type": "causal"},
    "kernel_bottom_right": {"attn_mask_type": "causal_bottom_right"},
    "window": {"window_size": (4, 2), "bottom_right_diagonal": True},
    "bias": {"bias_type": "post_scale_bias"},
    "arbitrary": {"attn_mask_type": "arbitrary"},
}


def poisoned(call: Any, poison: str, where: str) -> AttentionTensors:
    """One token of the second head is poisoned, or every token of it; positive numbers keep the infinities' sign."""
    name, value = POISONS[poison]
    extra: dict[str, Any] = {}
    if call.bias_type != "no_bias":
        extra["bias"] = torch.randn(1, call.num_heads, call.max_seqlen_q, call.max_seqlen_kv).to(call.dtype)
    if call.attn_mask_type == "arbitrary":
        extra["attention_mask"] = torch.rand(1, 1, call.max_seqlen_q, call.max_seqlen_kv) < 0.3
        extra["attention_mask"][..., 0, :] = True
    given = tensors(call, **extra)
    given = dataclasses.replace(given, q=given.q.abs(), k=given.k.abs())
    x = getattr(given, name)
    token = {"first": 0, "middle": x.shape[1] // 2, "last": -1, "all": slice(None)}[where]
    x[-1, token, -1] = value
    return given


def in_layout(call: Any, given: AttentionTensors, qkv_format: str) -> tuple[Any, AttentionTensors]:
    """The dense bshd call in another layout; as ``thd`` it is one sequence between padding."""
    if qkv_format == "thd":
        sides = [torch.nn.functional.pad(x[0], (0, 0, 0, 0, 2, 3)) for x in (given.q, given.k, given.v)]
        masks = {"no_mask": "padding", "causal": "padding_causal"}
        mask = masks.get(call.attn_mask_type, "padding_causal_bottom_right")
        lengths, starts = [], []
        for x in (given.q, given.k):
            lengths.append(torch.tensor([0, x.shape[1]], dtype=torch.int32))
            starts.append(torch.tensor([2, 2 + x.shape[1]], dtype=torch.int32))
        q, k, v = sides
        moved = AttentionTensors(q, k, v, given.softmax_scale, *lengths, *starts)
        return call.replace(qkv_format="thd", attn_mask_type=mask, pad_between_seqs=True), moved
    axes = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}[qkv_format]
    moved = {name: getattr(given, name).permute(axes) for name in ("q", "k", "v")}
    return call.replace(qkv_format=qkv_format), dataclasses.replace(given, **moved)


def check(call: Any, given: AttentionTensors, device_type: str = "cpu") -> None:
    """NaN of the keys that a row sees comes out; what comes out is NaN in plain PyTorch too; the rest is right."""
    plan = Plan(call.replace(device_type=device_type), Platform(device_type), "sdpa", "sdpa")
    output = sdpa.forward(plan, given)
    leaves = dataclasses.replace(given, **{n: getattr(given, n).detach().requires_grad_() for n in ("q", "k", "v")})
    inputs = (leaves.q, leaves.k, leaves.v)
    exact, exact_lse = plain.attention(call, leaves)
    spoilt, _ = plain.attention(call, leaves, kept=False)
    dout = torch.randn_like(output.out)
    wanted = torch.autograd.grad(exact, inputs, dout.double()) if exact.requires_grad else inputs
    gradients = sdpa.backward(plan, Residuals(given, output.out, output.lse), dout, None)

    lse_of_out = output.lse.movedim(-1, 0 if call.qkv_format == "thd" else 1).unsqueeze(-1)
    lse_of_out = plain._rows(lse_of_out, "thd") if call.qkv_format == "thd" else lse_of_out
    out = plain._rows(output.out, call.qkv_format)
    found = out.isnan() | lse_of_out.isnan()
    must = plain._rows(exact, call.qkv_format).isnan()
    may = plain._rows(spoilt, call.qkv_format).isnan().any(-1, keepdim=True)
    assert not (must & ~found).any(), "lost NaN"
    assert not (found & ~may).any(), "NaN that plain PyTorch has not"
    sound = ~found & must.logical_not()
    torch.testing.assert_close(out[sound].double(), plain._rows(exact, call.qkv_format)[sound], rtol=1e-4, atol=1e-5)
    whole = ~output.lse.isnan() & ~exact_lse.isnan()
    torch.testing.assert_close(output.lse[whole].double(), exact_lse[whole], rtol=1e-4, atol=1e-5)
    for name, expected in zip(("dq", "dk", "dv"), wanted, strict=True):
        lost = exact.requires_grad & expected.isnan() & ~getattr(gradients, name).isnan()
        assert not lost.any(), f"lost NaN in {name}"


@pytest.mark.parametrize("where", ["first", "last", "all"])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("route", ROUTES)
def test_what_plain_pytorch_makes_nan_is_nan(route: str, poison: str, where: str) -> None:
    for len_q, len_kv in SHAPES:
        changes = {"attn_mask_type": "no_mask", "num_kv_heads": 2, **ROUTES[route]}
        call = request(max_seqlen_q=len_q, max_seqlen_kv=len_kv, head_dim_qk=16, head_dim_v=8, **changes)
        check(call, poisoned(call, poison, where))


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("qkv_format", ["sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_in_every_layout(qkv_format: str, poison: str, mask: str, dtype: torch.dtype) -> None:
    for where in ("first", "middle", "all"):
        call = request(
            max_seqlen_q=9, max_seqlen_kv=11, head_dim_qk=16, head_dim_v=24, attn_mask_type=mask, num_kv_heads=2
        )
        moved, given = in_layout(call, poisoned(call, poison, where), qkv_format)
        given = dataclasses.replace(given, **{n: getattr(given, n).to(dtype) for n in ("q", "k", "v")})
        if dtype == torch.float64:
            check(moved.replace(dtype=dtype), given)
        else:  # bfloat16 rounds out: only NaN is compared
            output = sdpa.forward(Plan(moved.replace(dtype=dtype), Platform(), "sdpa", "sdpa"), given)
            exact, _ = plain.attention(moved, given)
            lost = exact.isnan() & ~output.out.isnan()
            assert not lost.any()


def test_scores_that_overflow() -> None:
    """-1e40 is -inf in float32: a row of nothing else has no softmax, in one head only."""
    for len_kv in (1, 7, 16, 64, 700):
        call = request(attn_mask_type="no_mask", max_seqlen_q=5, max_seqlen_kv=len_kv, num_kv_heads=2)
        given = tensors(call)
        given.q[:, :, 1], given.k[:, :, 1] = 1e20, -1e20
        output = sdpa.forward(Plan(call, Platform(), "sdpa", "sdpa"), given)
        assert output.lse[:, 1].isnan().all()
        assert output.out[:, :, 1].isnan().all()
        assert not output.out[:, :, 0].isnan().any()
        gradients = sdpa.backward(
            Plan(call, Platform(), "sdpa", "sdpa"),
            Residuals(given, output.out, output.lse),
            torch.ones_like(output.out),
            None,
        )
        assert gradients.dq[:, :, 1].isnan().all()
        assert gradients.dv[:, :, 1].isnan().all()
        assert not gradients.dq[:, :, 0].isnan().any()


def test_a_piece_of_minus_infinity_counts_as_nothing() -> None:
    """Bottom-right causal is computed in two pieces: keys before the square with scores of -inf get weights of 0."""
    call = request(attn_mask_type="causal_bottom_right", max_seqlen_q=4, max_seqlen_kv=9, bottom_right_diagonal=True)
    given = tensors(call)
    given = dataclasses.replace(given, q=given.q.abs(), k=given.k.abs())
    given.k[:, :5] = -INF
    output = sdpa.forward(Plan(call, Platform(), "sdpa", "sdpa"), given)
    rest = dataclasses.replace(given, k=given.k[:, 5:], v=given.v[:, 5:])
    square = call.replace(attn_mask_type="causal", max_seqlen_kv=4)
    expected = sdpa.forward(Plan(square, Platform(), "sdpa", "sdpa"), rest)
    torch.testing.assert_close(output.out, expected.out)
    torch.testing.assert_close(output.lse, expected.lse)


def test_zeros_that_are_right_stay_zeros() -> None:
    """A query and a value of zeros in a row that sees one key: lse is 0 and out is 0."""
    call = request(num_kv_heads=2)
    given = tensors(call)
    given.q[:, 0], given.v[:, 0] = 0, 0
    output = sdpa.forward(Plan(call, Platform(), "sdpa", "sdpa"), given)
    assert not output.out[:, 0].any()
    assert not output.lse[..., 0].any()
    exact, exact_lse = plain.attention(call, given)
    torch.testing.assert_close(output.out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_zeros_that_are_right_do_not_hide_others() -> None:
    """Row 0 has lse 0 and a sound out; row 3 of the same head has the kernel's zeros."""
    call = request(num_kv_heads=2, max_seqlen_q=5, max_seqlen_kv=5)
    given = tensors(call)
    given.q[:, 0], given.q[:, 3] = 0, NAN
    output = sdpa.forward(Plan(call, Platform(), "sdpa", "sdpa"), given)
    assert not output.lse[..., 0].any()
    assert output.out[:, 0].any()
    assert output.out[:, 3].isnan().all()
    assert not output.out[:, [0, 1, 2, 4]].isnan().any()


@pytest.mark.parametrize("changes", [{"window_size": (2, 1)}, {"bias_type": "post_scale_bias"}])
def test_rows_that_see_no_key_take_and_give_nothing(changes: dict[str, Any]) -> None:
    """Bottom-right with more queries than keys: the first rows' NaN stays theirs, and NaN of the keys is not theirs."""
    call = request(max_seqlen_q=12, max_seqlen_kv=4, attn_mask_type="causal_bottom_right", num_kv_heads=2, **changes)
    bias = torch.randn(1, 1, 12, 4) if "bias_type" in changes else None
    plan = Plan(call, Platform(), "sdpa", "sdpa")
    for name in ("q", "k", "v"):
        given = tensors(call, bias=bias)
        token = 2 if name == "q" else 1
        getattr(given, name)[:, token] = NAN
        output = sdpa.forward(plan, given)
        assert not output.out[:, :8].any()
        assert output.lse[..., :8].isneginf().all()
        dout = torch.randn_like(output.out)
        dlse = torch.randn_like(output.lse)
        dout[:, 3], dlse[..., 3] = NAN, NAN
        gradients = sdpa.backward(plan, Residuals(given, output.out, output.lse), dout, dlse)
        assert not gradients.dq[:, :8].any()
        if name == "q":
            assert not any(x.isnan().any() for x in (output.out, gradients.dq, gradients.dk, gradients.dv))


def test_nothing_is_computed_twice_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound numbers, and queries of zeros, stay with the kernel."""
    monkeypatch.setattr(flash.blocked, "forward", lambda *_: pytest.fail("the kernel's result was sound"))
    call = request()
    given = tensors(call)
    sdpa.forward(Plan(call, Platform(), "sdpa", "sdpa"), given)
    given.q[:, :5] = 0
    sdpa.forward(Plan(call, Platform(), "sdpa", "sdpa"), given)


@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_a_bias_of_minus_infinity_hides_keys(bias_type: str, mask: str) -> None:
    """Also all keys of a row: out 0, lse -inf and no gradient, as where a mask hides them."""
    call = request(attn_mask_type=mask, bias_type=bias_type, max_seqlen_q=6, max_seqlen_kv=6, bias_requires_grad=True)
    bias = torch.zeros(1, 1, 6, 6)
    bias[..., 2, :], bias[..., 4, 1] = -INF, -INF
    given = tensors(call, bias=bias)
    plan = Plan(call, Platform(), "sdpa", "sdpa")
    output = sdpa.forward(plan, given)
    assert not output.out[:, 2].any()
    assert output.lse[..., 2].isneginf().all()
    gradients = sdpa.backward(plan, Residuals(given, output.out, output.lse), torch.ones_like(output.out), None)
    assert not gradients.dq[:, 2].any()
    assert not any(x.isnan().any() for x in vars(gradients).values())


@pytest.mark.gpu
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_the_cuda_kernel_loses_no_nan(mask: str, poison: str) -> None:
    """PyTorch's memory-efficient kernel: what is NaN on the CPU is NaN on the device."""
    for length in (1, 9, 16, 70):
        call = request(attn_mask_type=mask, max_seqlen_q=length, max_seqlen_kv=length, num_kv_heads=2)
        given = poisoned(call, poison, "all")
        on_device = dataclasses.replace(given, **{n: getattr(given, n).cuda() for n in ("q", "k", "v")})
        plan = Plan(call.replace(device_type="cuda"), Platform("cuda", (9, 0)), "sdpa", "sdpa")
        output = sdpa.forward(plan, on_device)
        exact, _ = plain.attention(call, given)
        lse = output.lse.cpu().transpose(1, 2).unsqueeze(-1)
        lost = exact.isnan() & ~output.out.cpu().isnan() & ~lse.isnan()
        assert not lost.any()
