"""The core attention alone, called as Megatron's layers call it, against attention written out in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

import mla_plugin
from tests.compat.megatron.parts import (
    D_QK,
    D_V,
    SCALE,
    H,
    assert_equal,
    causal,
    core,
    packed_reference,
    packing,
    reference,
    tensors,
)

pytestmark = pytest.mark.xdist_group("megatron")  # importing it takes three seconds


@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("length", [1, 7, 33])
def test_causal(length, kv_heads):
    q, k, v = tensors(length, kv_heads=kv_heads)
    assert_equal(core()(q, k, v, None), reference(q, k, v, causal(length)), [q, k, v])


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (AttnMaskType.no_mask, causal(3, 7, 7)),
        (AttnMaskType.causal_bottom_right, causal(3, 7, 4)),
        (AttnMaskType.causal, causal(3, 7)),
    ],
)
def test_the_call_chooses_the_mask(mask, visible):
    q, k, v = tensors(3, 7)
    ignored = torch.ones(1, 1, 3, 7, dtype=torch.bool)
    out = core(AttnMaskType.padding)(q, k, v, ignored, attn_mask_type=mask, attention_bias=None, packed_seq_params=None)
    assert_equal(out, reference(q, k, v, visible), [q, k, v])


@pytest.mark.parametrize("mask", [AttnMaskType.padding, AttnMaskType.arbitrary])
def test_a_mask_tensor(mask):
    q, k, v = tensors(5, 6)
    hidden = torch.zeros(2, 1, 5, 6, dtype=torch.bool)
    hidden[1, :, :, 4:] = True
    hidden[0, :, 2, :3] = True
    assert_equal(core(mask)(q, k, v, hidden), reference(q, k, v, ~hidden), [q, k, v])


def test_strides_of_a_batch_first_model():
    """Views [S, B, H, D] of tensors that lie in memory in another order, and out of wider ones."""
    leaves = [torch.randn(2, 9, H, D_QK + 5, dtype=torch.float64).requires_grad_() for _ in range(3)]
    views = [x.transpose(0, 1)[..., 3 : 3 + dim] for x, dim in zip(leaves, (D_QK, D_QK, D_V), strict=True)]
    assert_equal(core()(*views, None), reference(*views, causal(9)), leaves)


def test_a_bias_is_added_to_the_scaled_scores():
    q, k, v = tensors(6)
    bias = torch.randn(1, H, 6, 6, dtype=torch.float64)
    weights = (torch.einsum("qbhd,kbhd->bhqk", q, k) * SCALE + bias).masked_fill(~causal(6), -torch.inf).softmax(-1)
    expected = torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2)
    assert_equal(core()(q, k, v, None, attention_bias=bias), expected, [q, k, v])


@pytest.mark.parametrize(("layer_number", "is_windowed"), [(1, True), (2, False)])
def test_the_window_applies_to_the_layers_that_megatron_says(layer_number, is_windowed):
    q, k, v = tensors(9)
    module = core(layer_number=layer_number, window_size=(2, 0), window_attn_skip_freq=2)
    visible = causal(9) & ~causal(9, diagonal=-3) if is_windowed else causal(9)
    assert_equal(module(q, k, v, None), reference(q, k, v, visible), [q, k, v])


@pytest.mark.parametrize("mask", [AttnMaskType.no_mask, AttnMaskType.padding, AttnMaskType.causal])
def test_minus_one_and_zero_are_no_window_without_a_causal_mask(mask):
    q, k, v = tensors(9)
    visible = causal(9) if mask is AttnMaskType.causal else causal(9, diagonal=9)
    hidden = torch.zeros(1, 1, 9, 9, dtype=torch.bool)
    assert_equal(core(mask, window_size=(-1, 0))(q, k, v, hidden), reference(q, k, v, visible), [q, k, v])


def test_packed_minus_one_and_zero_are_no_window_without_a_causal_mask():
    q, k, v = tensors(9, batch=())
    params, spans = packing((4, 5))
    out = core(AttnMaskType.padding, window_size=(-1, 0))(q, k, v, None, packed_seq_params=params)
    expected = packed_reference(q, k, v, spans, visible=lambda *lengths: torch.ones(lengths, dtype=torch.bool))
    assert_equal(out, expected, [q, k, v])


def test_the_scale_defaults_to_that_of_the_head_dimension():
    module = core(v_channels=None)
    module.softmax_scale = None
    q, k, v = tensors(5)
    assert_equal(module(q, k, v, None), reference(q, k, v, causal(5), D_QK**-0.5), [q, k, v])


@pytest.mark.parametrize(
    ("lengths", "slots", "total"),
    [
        ((5, 1, 11), None, 17),
        ((5, 0, 3), None, 8),
        ((5, 0, 3), (6, 2, 4), 12),
        ((7, 2), (8, 4), 15),  # and three tokens that belong to no sequence
    ],
)
@pytest.mark.parametrize("mask", [AttnMaskType.causal, AttnMaskType.padding_causal])
def test_packed_sequences(lengths, slots, total, mask):
    q, k, v = tensors(total, batch=())
    params, spans = packing(lengths, slots)
    out = core()(q, k, v, None, packed_seq_params=params, attn_mask_type=mask)
    assert_equal(out, packed_reference(q, k, v, spans), [q, k, v])


def test_packed_sequences_without_a_causal_mask():
    q, k, v = tensors(9, batch=())
    params, spans = packing((4, 5))
    out = core()(q, k, v, None, packed_seq_params=params, attn_mask_type=AttnMaskType.no_mask)
    expected = packed_reference(q, k, v, spans, visible=lambda *lengths: torch.ones(lengths, dtype=torch.bool))
    assert_equal(out, expected, [q, k, v])


def test_lengths_of_keys_default_to_those_of_queries():
    q, k, v = tensors(9, batch=())
    params, spans = packing((4, 5))
    params.cu_seqlens_kv = params.max_seqlen_q = params.max_seqlen_kv = None
    assert_equal(core()(q, k, v, None, packed_seq_params=params), packed_reference(q, k, v, spans), [q, k, v])


@pytest.mark.parametrize(
    ("slots", "said", "asked"),
    [((5, 3), False, False), ((6, 4), True, True), ((6, 4), None, None), (None, True, None), (None, None, None)],
)
def test_what_a_batch_says_about_padding_between_its_sequences(monkeypatch, slots, said, asked):
    """``pad_between_seqs``, since 0.19: False lets kernels run that take one sequence to end where the next starts."""
    arguments = []
    attention = mla_plugin.attention
    monkeypatch.setattr(mla_plugin, "attention", lambda *qkv, **rest: arguments.append(rest) or attention(*qkv, **rest))
    q, k, v = tensors(12, batch=())
    params, spans = packing((5, 3), slots)
    params.pad_between_seqs = said
    assert_equal(core()(q, k, v, None, packed_seq_params=params), packed_reference(q, k, v, spans), [q, k, v])
    assert [rest.get("pad_between_seqs") for rest in arguments] == [asked]


def test_packed_v_with_zeros_appended():
    """Out has the true width; the gradient of V is that without zeros, and 0 in the zeros."""
    q, k, v = tensors(12, batch=())
    params, spans = packing((5, 3), (7, 5))
    padded = torch.nn.functional.pad(v.detach(), (0, D_QK - D_V)).requires_grad_()
    out = core()(q, k, padded, None, packed_seq_params=params)
    assert out.shape == (12, H, D_V)
    expected = packed_reference(q, k, v, spans)
    dout = torch.randn_like(expected)
    torch.testing.assert_close(out.flatten(1), expected, rtol=1e-10, atol=1e-11)
    dq, dk, dpadded = torch.autograd.grad(out.flatten(1), [q, k, padded], dout)
    for found, wanted in zip((dq, dk, dpadded[..., :D_V]), torch.autograd.grad(expected, [q, k, v], dout), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    assert torch.equal(dpadded[..., D_V:], torch.zeros(12, H, D_QK - D_V, dtype=torch.float64))


def test_the_zeros_are_not_computed(monkeypatch):
    """The request that reaches the backends has the true width."""
    widths = []
    attention = mla_plugin.attention
    monkeypatch.setattr(
        mla_plugin, "attention", lambda q, k, v, **rest: widths.append(v.shape[-1]) or attention(q, k, v, **rest)
    )
    q, k, v = tensors(8, batch=())
    core()(q, k, torch.nn.functional.pad(v, (0, D_QK - D_V)), None, packed_seq_params=packing((8,))[0])
    assert widths == [D_V]


@pytest.mark.parametrize(
    ("width", "is_packed", "message"),
    [
        (D_QK, True, "what is beyond is not zero"),
        (D_QK, False, "head dimension 24 and this layer was built for v_channels=16"),
        (D_V - 1, True, "head dimension 15 and this layer was built for v_channels=16"),
    ],
)
def test_another_width_of_v_is_refused(width, is_packed, message):
    q, k, v = tensors(8, batch=() if is_packed else (2,), head_dim_v=width)
    with pytest.raises(ValueError, match=message):
        core()(q, k, v, None, packed_seq_params=packing((8,))[0] if is_packed else None)


def test_without_a_declared_width_v_is_taken_as_it_is():
    q, k, v = tensors(8, batch=(), head_dim_v=D_QK)
    params, spans = packing((3, 5))
    out = core(v_channels=None)(q, k, v, None, packed_seq_params=params)
    assert_equal(out, packed_reference(q, k, v, spans), [q, k, v])


def test_dropout_follows_the_configuration_in_training_only():
    q, k, v = (x.detach() for x in tensors(16))
    module = core(attention_dropout=0.5)
    torch.manual_seed(3)
    first, second = module(q, k, v, None), module(q, k, v, None)
    torch.manual_seed(3)
    assert torch.equal(module(q, k, v, None), first)
    assert not torch.equal(first, second)
    module.eval()
    torch.testing.assert_close(module(q, k, v, None), reference(q, k, v, causal(16)))


def test_dropout_keeps_the_mean():
    q, k, _ = (x.detach() for x in tensors(8))
    ones = torch.ones(8, 2, H, D_V, dtype=torch.float64)
    module = core(attention_dropout=0.25)
    torch.manual_seed(0)
    mean = torch.stack([module(q, k, ones, None) for _ in range(200)]).mean()
    assert abs(mean - 1) < 0.02


def test_tensor_parallel_ranks_drop_different_weights_and_stay_in_step():
    q, k, v = (x.detach() for x in tensors(16))
    outs, states = [], []
    for rank in (0, 1):
        module = core(attention_dropout=0.5)
        module.tp_group = SimpleNamespace(rank=lambda rank=rank: rank)
        torch.manual_seed(3)
        outs.append(module(q, k, v, None))
        states.append(torch.get_rng_state())
    assert not torch.equal(*outs)
    assert torch.equal(*states)


def test_deterministic_mode_is_passed_on(monkeypatch):
    asked = []
    monkeypatch.setattr(mla_plugin, "attention", lambda q, k, v, **rest: asked.append(rest["deterministic"]) or v)
    for wanted in (False, True):
        core(deterministic_mode=wanted)(*tensors(4), None)
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size=2 and the context-parallel group is of 1 ranks"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable', expected 'vanilla'"),
        ({"experimental_attention_variant": "csa"}, "experimental_attention_variant='csa', expected None or 'gated"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention=True"),
        ({"fp8_multi_head_attention": True}, "fp8_multi_head_attention=True"),
        ({"batch_invariant_mode": True}, "batch_invariant_mode=True"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(change, message):
    plain = config_like(core().config, **change)
    with pytest.raises(ValueError, match=message):
        type(core())(config=plain, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")


def config_like(config, **changes):
    """The configuration with changes that it would only check together with others."""
    return SimpleNamespace(**{**vars(config), **changes})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"attn_mask_type": AttnMaskType.padding_causal}, "attn_mask_type=padding_causal without packed_seq_params"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "arbitrary needs attention_mask"),
        ({"packed_seq_params": SimpleNamespace(qkv_format="bshd")}, "qkv_format='bshd', expected 'thd'"),
    ],
)
def test_a_call_that_is_not_computed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        core()(*tensors(4), None, **call)


@pytest.mark.parametrize(
    ("size", "group", "message"),
    [
        (2, None, "local_cp_size=2 with no cp_group"),
        (4, SimpleNamespace(size=lambda: 2), "local_cp_size=4 with a cp_group of 2 ranks"),
    ],
)
def test_a_packed_batch_names_as_many_ranks_as_its_group_has(size, group, message):
    params, _ = packing((4,))
    params.local_cp_size, params.cp_group = size, group
    with pytest.raises(ValueError, match=message):
        core()(*tensors(4, batch=()), None, packed_seq_params=params)


def test_a_local_group_of_one_rank_is_no_context_parallelism():
    q, k, v = tensors(8, batch=())
    params, spans = packing((8,))
    params.local_cp_size, params.cp_group = 1, SimpleNamespace(size=lambda: 1)
    assert_equal(core()(q, k, v, None, packed_seq_params=params), packed_reference(q, k, v, spans), [q, k, v])


def test_it_has_no_state():
    module = core()
    assert module.state_dict() == {}
    assert module.sharded_state_dict(prefix="core_attention.") == {}


def test_a_checkpoint_of_transformer_engine_loads_and_nothing_else_is_swallowed():
    layer = torch.nn.ModuleDict({"core_attention": core()})
    layer.load_state_dict({"core_attention._extra_state": torch.empty(0)}, strict=True)
    with pytest.raises(RuntimeError, match="softmax_offset"):
        layer.load_state_dict({"core_attention.softmax_offset": torch.empty(H)}, strict=True)
