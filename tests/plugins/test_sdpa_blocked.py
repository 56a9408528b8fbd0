"""The fallback beyond the suite: dropout, the cutting into blocks and pieces, clear errors."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from mla_plugin.arguments.mask import Band
from mla_plugin.hooks.attention import Plan, Residuals
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins import sdpa
from mla_plugin.plugins.sdpa import blocked, flash
from mla_plugin.plugins.sdpa.terms import ScoreTerms
from mla_plugin.reference import visibility
from tests.plugins.calls import both_passes, request, tensors


@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_dropout_scales_what_it_keeps_and_both_passes_keep_the_same(qkv_format: str, device_type: str) -> None:
    """With V = I, out is the dropped weights themselves; dv of dout = I is their transpose."""
    cu_seqlens = torch.tensor([0, 23, 64], dtype=torch.int32)
    mask = {"attn_mask_type": "padding_causal", "batch_size": 2} if qkv_format == "thd" else {}
    call = request(qkv_format=qkv_format, head_dim_v=64, num_heads=1, dropout_p=0.3, device_type=device_type, **mask)
    seed = torch.tensor([5])
    given = tensors(request(head_dim_v=64, num_heads=1), dropout_seed=seed, cu_seqlens_q=cu_seqlens)
    identity = torch.eye(64).view(1, 64, 1, 64)
    q, k, v = (x[0] if qkv_format == "thd" else x for x in (given.q, given.k, identity))
    given = dataclasses.replace(given, q=q, k=k, v=v, cu_seqlens_kv=cu_seqlens)
    plan = Plan(call, Platform(device_type), "sdpa", "sdpa")
    output = sdpa.forward(plan, given)
    undropped = sdpa.forward(Plan(call.replace(dropout_p=0.0, device_type="cpu"), Platform(), "sdpa", "sdpa"), given)
    weights, whole = output.out.view(64, 64), undropped.out.view(64, 64)
    torch.testing.assert_close(output.lse, undropped.lse)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], whole[kept] / 0.7)
    assert 0.6 < kept[whole != 0].float().mean() < 0.8
    gradients = sdpa.backward(plan, Residuals(given, output.out, output.lse), v, None)
    torch.testing.assert_close(gradients.dv.view(64, 64), weights.transpose(0, 1))


@pytest.mark.parametrize("bias_type", ["no_bias", "pre_scale_bias"])
def test_gradients_through_dropout(bias_type: str) -> None:
    """Against autograd through the formula, with the weights that the forward kept."""
    call = request(dtype=torch.float64, dropout_p=0.25, bias_type=bias_type, bias_requires_grad=True, num_kv_heads=2)
    bias = None if bias_type == "no_bias" else torch.randn(1, 2, 64, 64, dtype=torch.float64)
    given = tensors(call, dropout_seed=torch.tensor([7]), bias=bias)
    plan = Plan(call, Platform(), "sdpa", "sdpa")
    wide = dataclasses.replace(given, v=torch.eye(64, dtype=torch.float64).view(1, 64, 1, 64).expand(1, 64, 2, 64))
    factor = (sdpa.forward(plan, wide).out.transpose(1, 2) != 0) / 0.75

    leaves = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    scores = q @ k.transpose(-1, -2)
    if bias is not None:
        leaves.append(bias.detach().requires_grad_())
        scores = scores + leaves[-1]
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
    scores = (scores * given.softmax_scale).masked_fill(hidden, -torch.inf)
    out = ((scores.softmax(-1) * factor) @ v).transpose(1, 2)
    lse = scores.logsumexp(-1)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = torch.autograd.grad((out, lse), leaves, (dout, dlse))

    output = sdpa.forward(plan, given)
    torch.testing.assert_close(output.out, out)
    gradients = sdpa.backward(plan, Residuals(given, output.out, output.lse), dout, dlse)
    found = (gradients.dq, gradients.dk, gradients.dv, gradients.dbias)
    for got, exact in zip(found, wanted, strict=False):
        torch.testing.assert_close(got, exact)
    assert (gradients.dbias is None) == (bias is None)


def test_dropout_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 1024)  # several blocks, each with its own weights
    call = request(dropout_p=0.5)
    given = tensors(call, dropout_seed=torch.tensor([11]))
    plan = Plan(call, Platform(), "sdpa", "sdpa")
    first = sdpa.forward(plan, given).out
    torch.randn(3)
    assert torch.equal(first, sdpa.forward(plan, given).out)
    other = dataclasses.replace(given, dropout_seed=torch.tensor([12]))
    assert not torch.equal(first, sdpa.forward(plan, other).out)


def test_dropout_without_a_seed_is_an_error() -> None:
    call = request(dropout_p=0.5)
    with pytest.raises(ValueError, match=r"dropout_p=0.5 without dropout_seed"):
        sdpa.forward(Plan(call, Platform(), "sdpa", "sdpa"), tensors(call))


def test_padding_without_lengths_is_an_error() -> None:
    call = request(attn_mask_type="padding")
    with pytest.raises(ValueError, match="needs cu_seqlens_q and cu_seqlens_kv"):
        sdpa.forward(Plan(call, Platform(), "sdpa", "sdpa"), tensors(call))


@pytest.mark.parametrize(
    "changes",
    [
        {"window_size": (9, 0)},
        {"attn_mask_type": "causal_bottom_right", "window_size": (9, 0), "max_seqlen_q": 33},
        {"attn_mask_type": "causal_bottom_right", "window_size": (9, 0), "max_seqlen_kv": 33},
        {"attn_mask_type": "no_mask", "window_size": (2, 30), "max_seqlen_q": 129, "bottom_right_diagonal": True},
        {"attn_mask_type": "no_mask", "dtype": torch.float64, "batch_size": 5, "window_size": (63, -1)},
    ],
)
def test_the_number_of_blocks_changes_nothing(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = request(**changes)
    given, results = tensors(call), []
    for elements in (1, 1 << 13, 1 << 30):
        monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", elements)
        torch.manual_seed(0)
        output, gradients = both_passes(call, given)
        results.append((output.out, output.lse, gradients.dq, gradients.dk, gradients.dv))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_a_window_computes_only_its_keys() -> None:
    call = request(max_seqlen_q=4096, max_seqlen_kv=4096, window_size=(31, 0))
    q = torch.empty(1, 2, 4096, 24)
    terms = ScoreTerms(1.0, call.band)
    widths = [block.keys.stop - block.keys.start for block in blocked.blocks(q, 4096, terms)]
    assert max(widths) < 4096
    assert sum(widths) < 3 * 4096


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("right", [-1, 0])
def test_pieces_cover_what_is_visible_exactly_once(right: int, bottom_right: bool) -> None:
    for len_q, len_kv in itertools.product(range(7), range(7)):
        band = Band(-1, right, bottom_right)
        seen = torch.zeros(len_q, len_kv, dtype=torch.int64)
        for piece in flash.pieces(len_q, len_kv, band):
            part = seen[piece.queries, piece.keys]
            assert part.numel()
            assert not piece.is_causal or part.shape[0] == part.shape[1]
            part += torch.ones_like(part).tril() if piece.is_causal else 1
        call = request(attn_mask_type="no_mask", window_size=(-1, right), bottom_right_diagonal=bottom_right)
        assert torch.equal(seen, visibility(call, len_q, len_kv).long())
