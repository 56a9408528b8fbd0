"""The Triton backend through the public entry: rows without a key, after every sequence, and offsets with strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla_plugin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}  # from [B, S, H, D]


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def column(x: torch.Tensor) -> torch.Tensor:
    """x as a column of a table, whose rows read in turn are offsets too, though others."""
    return torch.stack((x, x), 1)[:, 1]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = mla_plugin.attention(*leaves, backend="triton", return_lse=True, **options)
    finite = lse.masked_fill(lse.isneginf(), 0.0)
    gradients = torch.autograd.grad((out, finite), leaves, (random(*out.shape), random(*lse.shape)))
    return [out.detach(), lse.detach(), *gradients]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=0.0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("padded", [False, True])
def test_offsets_that_are_a_column_of_a_table(padded: bool) -> None:
    q, k, v = random(40, 2, 24), random(40, 2, 24), random(40, 2, 16)
    given = {"cu_seqlens_q": offsets(0, 3, 10, 12), "cu_seqlens_kv": offsets(0, 7, 10, 20)}
    if padded:
        given |= {"cu_seqlens_q_padded": offsets(0, 5, 14, 20), "cu_seqlens_kv_padded": offsets(0, 9, 14, 30)}
    options = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "max_seqlen_q": 20, "max_seqlen_kv": 20}
    expected = results(q, k, v, **options, **given)
    for name in given:
        assert_equal(results(q, k, v, **options, **given | {name: column(given[name])}), expected)


@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
def test_a_longest_sequence_beyond_the_tokens(mask: str) -> None:
    """A host may pass any bound. The largest one would overflow int32 where tiles are counted."""
    q, k, v = random(40, 2, 24), random(40, 2, 24), random(40, 2, 16)
    given = {"cu_seqlens_q": offsets(0, 3, 40), "cu_seqlens_kv": offsets(0, 7, 40)}
    options = {"qkv_format": "thd", "attn_mask_type": mask, "window_size": (20, 0 if "causal" in mask else 2**31 - 1)}
    expected = results(q, k, v, max_seqlen_q=37, max_seqlen_kv=33, **options, **given)
    for longest in (40, 2**31 - 1):
        assert_equal(results(q, k, v, max_seqlen_q=longest, max_seqlen_kv=longest, **options, **given), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_of_a_dense_batch_that_are_a_column_of_a_table(layout: str) -> None:
    q, k, v = (random(2, 12, 2, width).permute(LAYOUTS[layout]) for width in (24, 24, 16))
    options = {"qkv_format": layout, "attn_mask_type": "padding"}
    lengths_q, lengths_kv = offsets(0, 3, 10), offsets(0, 9, 12)
    expected = results(q, k, v, cu_seqlens_q=lengths_q, cu_seqlens_kv=lengths_kv, **options)
    found = results(q, k, v, cu_seqlens_q=column(lengths_q), cu_seqlens_kv=column(lengths_kv), **options)
    assert_equal(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_rows_behind_the_longest_sequence_of_a_dense_batch(
    mask: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a tile of them: 70 rows, the longest sequences have 5 queries and 3 keys."""
    q, k, v = (random(2, 70, 2, width).permute(LAYOUTS[layout]) for width in (24, 24, 16))
    options = {"qkv_format": layout, "attn_mask_type": mask}
    options |= {"cu_seqlens_q": offsets(0, 5, 9), "cu_seqlens_kv": offsets(0, 2, 5)}
    new_empty = torch.Tensor.new_empty

    def filled(x: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        made = new_empty(x, *arguments, **keywords)
        return made.fill_(1e30) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    expected = results(q, k, v, **options)
    found = results(q, k, v, max_seqlen_q=5, max_seqlen_kv=3, **options)
    assert_equal(found, expected)
    out, lse, *gradients = found
    tokens = LAYOUTS[layout].index(1)
    assert lse.shape == (2, 2, 70)
    assert lse[..., 5:].isneginf().all()
    assert not any(x.narrow(tokens, 5, 65).any() for x in (out, *gradients))


def summed_squares(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """dq, dk, dv of the sum of squared lse: of a query that sees no key the gradient is infinite."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = mla_plugin.attention(*leaves, backend="triton", return_lse=True, **options)
    assert lse.isneginf().any()
    return list(torch.autograd.grad(out.sum() + lse.square().sum(), leaves))


def test_an_infinite_gradient_of_lse_where_no_key_is_seen() -> None:
    q, k, v = random(1, 8, 2, 24), random(1, 4, 2, 24), random(1, 4, 2, 16)
    found = summed_squares(q, k, v, attn_mask_type="causal_bottom_right")
    # the last four queries alone: the others see nothing
    leaves = [x.detach().requires_grad_() for x in (q[:, 4:], k, v)]
    out, lse = mla_plugin.attention(*leaves, backend="triton", return_lse=True, attn_mask_type="causal_bottom_right")
    expected = torch.autograd.grad(out.sum() + lse.square().sum(), leaves)
    assert not found[0][:, :4].any()
    for x, y in zip((found[0][:, 4:], *found[1:]), expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("seqlens", "options", "without"),
    [
        ((64, 5), {"attn_mask_type": "causal_bottom_right"}, slice(0, 59)),
        ((80, 64), {"attn_mask_type": "causal_bottom_right"}, slice(0, 16)),
        ((64, 20), {"attn_mask_type": "no_mask", "window_size": (3, 2), "bottom_right_diagonal": False}, slice(23, 64)),
        ((80, 20), {"attn_mask_type": "no_mask", "window_size": (3, 2)}, slice(0, 58)),
    ],
)
def test_nothing_of_a_query_without_a_key_reaches_the_others(
    seqlens: tuple[int, int], options: dict[str, Any], without: slice
) -> None:
    """Its out is 0, and the gradient of a square root there is infinite; its own values may be anything."""
    q, k, v = random(1, seqlens[0], 2, 24), random(1, seqlens[1], 1, 24), random(1, seqlens[1], 1, 16)
    dout = random(1, seqlens[0], 2, 16)

    def run(q: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = mla_plugin.attention(*leaves, backend="triton", return_lse=True, **options)
        assert lse[:, :, without].isneginf().all()
        assert lse.isfinite().any()
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    expected = run(q, dout)
    q, dout = q.clone(), dout.clone()
    q[:, without], dout[:, without] = torch.nan, torch.inf
    for x, y in zip(run(q, dout), expected, strict=True):
        assert torch.equal(x, y)
    assert not expected[1][:, without].any()


def test_a_query_whose_every_score_is_minus_infinity_has_no_weight() -> None:
    q, k, v = random(1, 5, 2, 24), random(1, 5, 2, 24).abs() + 10, random(1, 5, 2, 16)
    q[:, 2] = -3e38
    dout = random(1, 5, 2, 16)

    def run(dout: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = mla_plugin.attention(*leaves, backend="triton", return_lse=True)
        assert lse[:, :, 2].isneginf().all()
        assert not out[:, 2].any()
        return list(torch.autograd.grad(out, leaves, dout))

    found = run(dout)
    assert not found[0][:, 2].any()
    dout[:, 2] = 0.0
    for x, y in zip(found, run(dout), strict=True):
        assert x.isfinite().all()
        assert torch.equal(x, y)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    _, lse = mla_plugin.attention(*leaves, backend="triton", return_lse=True)
    of_squares = torch.autograd.grad(lse.square().sum(), leaves[:2])  # the gradient of lse is infinite there
    assert not of_squares[0][:, 2].any()
    assert all(x.isfinite().all() for x in of_squares)
