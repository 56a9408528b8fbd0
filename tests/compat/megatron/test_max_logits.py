"""``current_max_attn_logits``: what Megatron's qk-clip reads, against the largest score written out in float64."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

import mla_plugin
from tests.compat.megatron.parts import D_V, H, causal, core, packing, scores, tensors

pytestmark = pytest.mark.xdist_group("megatron")  # importing it takes three seconds
ON = [{"qk_clip": True}, {"log_max_attention_logit": True}]


def largest(q, k, visible) -> torch.Tensor:
    """[H], of tensors [S, B, H, D]."""
    return scores(q, k, visible).amax((0, 2, 3))


def assert_max(found, expected, dtype=torch.float64) -> None:
    """Relative to a rounding of ``dtype``, and to the 14 / 2**20 that a million equal scores would add."""
    assert found.shape == (H,)
    assert not found.requires_grad
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}[dtype]
    torch.testing.assert_close(found.double(), expected.detach(), rtol=tolerance, atol=14 / 2**20)


@pytest.mark.parametrize("options", ON)
@pytest.mark.parametrize("kv_heads", [H, 2])
def test_causal(options, kv_heads):
    q, k, v = tensors(33, kv_heads=kv_heads)
    module = core(**options)
    module(q, k, v, None)
    assert_max(module.current_max_attn_logits, largest(q, k, causal(33)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 30.0])
def test_low_precision_and_any_magnitude(dtype, magnitude):
    """Scores from thousandths to tens of thousands; the products are exact in float32 up to their summation."""
    q, k, v = (x.detach() * magnitude for x in tensors(40, dtype=dtype))
    module = core(qk_clip=True)
    module(q, k, v, None)
    assert module.current_max_attn_logits.dtype == torch.float32
    assert_max(module.current_max_attn_logits, largest(q, k, causal(40)), dtype)


def test_scores_that_are_all_equal():
    """The worst case of the log-sum-exp: each of n keys adds its share, log(n) / 2**20."""
    q, k, v = (torch.ones_like(x) for x in tensors(64))
    module = core(qk_clip=True)
    module(q, k, v, None)
    assert_max(module.current_max_attn_logits, largest(q, k, causal(64)))


def test_what_the_mask_hides_does_not_count():
    q, k, v = tensors(6, batch=(1,))
    with torch.no_grad():
        k[-1] *= 100
    hidden = torch.zeros(1, 1, 1, 6, dtype=torch.bool)
    hidden[..., -1] = True
    module = core(AttnMaskType.padding, qk_clip=True)
    module(q, k, v, hidden)
    assert_max(module.current_max_attn_logits, largest(q, k, ~hidden))


def test_packed_sequences_with_padding():
    q, k, v = tensors(14, batch=())
    with torch.no_grad():
        k[5:7] = q[11:] = 1e3  # padding
    params, spans = packing((5, 4), (7, 7))
    module = core(qk_clip=True)
    module(q, k, v, None, packed_seq_params=params)
    parts = [largest(q[a:b].unsqueeze(1), k[c:d].unsqueeze(1), causal(b - a)) for (a, b), (c, d) in spans]
    assert_max(module.current_max_attn_logits, torch.stack(parts).amax(0))


def test_the_largest_of_all_microbatches_counts_until_it_is_reset():
    module = core(qk_clip=True)
    batches = [tensors(5) for _ in range(3)]
    for batch in batches:
        module(*batch, None)
    assert_max(module.current_max_attn_logits, torch.stack([largest(q, k, causal(5)) for q, k, _ in batches]).amax(0))
    module.current_max_attn_logits = None
    module(*batches[0], None)
    assert_max(module.current_max_attn_logits, largest(*batches[0][:2], causal(5)))


def test_another_number_of_heads_is_refused_until_it_is_reset():
    q, k, v = tensors(5)
    fewer = [x[:, :, : H // 2] for x in (q, k, v)]
    module = core(qk_clip=True)
    module(q, k, v, None)
    with pytest.raises(ValueError, match=f"query has {H // 2} heads and current_max_attn_logits .* of {H}; build"):
        module(*fewer, None)
    module.current_max_attn_logits = None
    module(*fewer, None)
    torch.testing.assert_close(
        module.current_max_attn_logits, largest(*fewer[:2], causal(5)).detach(), rtol=1e-12, atol=14 / 2**20
    )


def test_the_output_is_the_same_and_the_cost_is_one_forward_when_asked(monkeypatch):
    calls = []
    attention = mla_plugin.attention
    monkeypatch.setattr(mla_plugin, "attention", lambda *qkv, **rest: calls.append(rest) or attention(*qkv, **rest))
    batch = tensors(9)
    outs = [core(**options)(*batch, None) for options in ({}, *ON)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert [call.get("return_lse", False) for call in calls] == [False, True, False, True, False]


def test_off_nothing_is_recorded():
    module = core()
    module(*tensors(5), None)
    assert module.current_max_attn_logits is None


def test_dropout_does_not_touch_it():
    q, k, v = tensors(9)
    module = core(qk_clip=True, attention_dropout=0.5)
    module(q, k, v, None)
    assert_max(module.current_max_attn_logits, largest(q, k, causal(9)))


def test_a_bias_is_refused():
    with pytest.raises(ValueError, match="qk_clip and attention_bias"):
        core(qk_clip=True)(*tensors(4), None, attention_bias=torch.zeros(1, 1, 4, 4, dtype=torch.float64))


def test_v_does_not_matter():
    q, k, _ = tensors(7)
    module = core(qk_clip=True)
    module(q, k, torch.full((7, 2, H, D_V), 1e300, dtype=torch.float64), None)
    assert_max(module.current_max_attn_logits, largest(q, k, causal(7)))


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_batch_without_tokens_records_nothing_large(is_packed):
    """Not None: Megatron reduces over the data-parallel ranks, and all of them must take part."""
    module = core(qk_clip=True)
    q, k, v = tensors(0, batch=() if is_packed else (2,))
    module(q, k, v, None, packed_seq_params=packing((0, 0))[0] if is_packed else None)
    assert torch.equal(module.current_max_attn_logits, torch.full((H,), -torch.inf, dtype=torch.float64))
    q, k, v = tensors(5)
    module(q, k, v, None)
    assert_max(module.current_max_attn_logits, largest(q, k, causal(5)))
