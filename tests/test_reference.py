"""The oracle against PyTorch's attention, against numbers worked out by hand, and against finite differences."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.reference import attention, attention_with_gradients, visibility

B, H, H_KV, S_Q, S_KV, D, D_V = 2, 4, 2, 5, 7, 6, 3
SCALE = 0.37


def make_request(**changes) -> AttentionRequest:
    base = AttentionRequest("bshd", torch.float64, "cpu", B, H, H_KV, S_Q, S_KV, D, D_V, bottom_right_diagonal=False)
    return base.replace(**changes)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def dense_tensors(qkv_format: str = "bshd", seqlen_q: int = S_Q, seqlen_kv: int = S_KV) -> AttentionTensors:
    q, k, v = random(B, H, seqlen_q, D), random(B, H_KV, seqlen_kv, D), random(B, H_KV, seqlen_kv, D_V)
    return AttentionTensors(*(LAYOUTS[qkv_format].from_bhsd(x) for x in (q, k, v)), softmax_scale=SCALE)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return offsets(0, *itertools.accumulate(lengths))


def rows(*texts: str) -> torch.Tensor:
    return torch.tensor([[character == "x" for character in text] for text in texts])


def sdpa(tensors: AttentionTensors, attn_mask=None, qkv_format: str = "bshd", is_causal: bool = False) -> torch.Tensor:
    q, k, v = (LAYOUTS[qkv_format].to_bhsd(x) for x in (tensors.q, tensors.k, tensors.v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=tensors.softmax_scale, enable_gqa=True
    )
    return LAYOUTS[qkv_format].from_bhsd(out)


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("attn_mask_type", ["no_mask", "causal"])
def test_equals_pytorch_in_every_dense_layout(qkv_format, attn_mask_type):
    tensors = dense_tensors(qkv_format)
    request = make_request(qkv_format=qkv_format, attn_mask_type=attn_mask_type)
    output = attention(request, tensors)
    expected = sdpa(tensors, qkv_format=qkv_format, is_causal=attn_mask_type == "causal")
    assert output.out.shape == (*tensors.q.shape[:-1], D_V)
    torch.testing.assert_close(output.out, expected)


def test_bottom_right_causal_equals_pytorch():
    tensors = dense_tensors()
    output = attention(make_request(attn_mask_type="causal_bottom_right"), tensors)
    mask = causal_lower_right(S_Q, S_KV)._materialize("cpu")
    torch.testing.assert_close(output.out, sdpa(tensors, mask))


def test_gradients_equal_those_of_pytorch():
    tensors = dense_tensors()
    dout = random(B, S_Q, H, D_V)
    _, gradients = attention_with_gradients(make_request(attn_mask_type="causal"), tensors, dout)
    leaves = [x.clone().requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
    sdpa(replace(tensors, q=leaves[0], k=leaves[1], v=leaves[2]), is_causal=True).backward(dout)
    for gradient, leaf in zip((gradients.dq, gradients.dk, gradients.dv), leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad)


VISIBILITY = {
    # name: (changes of the request, rows of a 2x3 matrix, rows of a 3x2 matrix)
    "no_mask": ({}, ("xxx", "xxx"), ("xx", "xx", "xx")),
    "causal": ({"attn_mask_type": "causal"}, ("x..", "xx."), ("x.", "xx", "xx")),
    "causal_bottom_right": ({"attn_mask_type": "causal_bottom_right"}, ("xx.", "xxx"), ("..", "x.", "xx")),
    "padding_causal": ({"attn_mask_type": "padding_causal"}, ("x..", "xx."), ("x.", "xx", "xx")),
    "window left": ({"window_size": (0, -1)}, ("xxx", ".xx"), ("xx", ".x", "..")),
    "window right": ({"window_size": (-1, 1)}, ("xx.", "xxx"), ("xx", "xx", "xx")),
    "window both, bottom right": (
        {"window_size": (1, 0), "bottom_right_diagonal": True},
        ("xx.", ".xx"),
        ("..", "x.", "xx"),
    ),
    "window and causal": (
        {"attn_mask_type": "causal_bottom_right", "window_size": (1, 5)},
        ("xx.", ".xx"),
        ("..", "x.", "xx"),
    ),
}


@pytest.mark.parametrize("name", VISIBILITY)
def test_visibility_by_hand(name):
    changes, two_by_three, three_by_two = VISIBILITY[name]
    request = make_request(**changes)
    assert torch.equal(visibility(request, 2, 3), rows(*two_by_three))
    assert torch.equal(visibility(request, 3, 2), rows(*three_by_two))


def test_two_queries_and_three_keys_by_hand():
    """Head dim 1, q = (1, 2), k = (0, ln 2, ln 3), v = (1, 10, 100): the weights are small fractions."""
    request = make_request(num_heads=1, num_kv_heads=1, batch_size=1, attn_mask_type="causal_bottom_right")
    q = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
    k = torch.tensor([0.0, math.log(2), math.log(3)]).view(1, 3, 1, 1)
    v = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1)
    output = attention(request, AttentionTensors(q, k, v, softmax_scale=1.0), compute_dtype=torch.float64)
    expected = [(1 + 2 * 10) / 3, (1 + 4 * 10 + 9 * 100) / 14]
    torch.testing.assert_close(output.out.flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    expected_lse = [math.log(3), math.log(14)]
    torch.testing.assert_close(output.lse.flatten(), torch.tensor(expected_lse, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("shape", [(1, H, S_Q, S_KV), (B, 1, S_Q, S_KV), (1, 1, S_Q, S_KV), (B, H, S_Q, S_KV)])
def test_bias_and_its_gradient(bias_type, shape):
    tensors = replace(dense_tensors(), bias=random(*shape))
    request = make_request(bias_type=bias_type, attn_mask_type="causal_bottom_right")
    dout = random(B, S_Q, H, D_V)
    output, gradients = attention_with_gradients(request, tensors, dout)

    bias = tensors.bias.clone().requires_grad_()
    additive = bias * SCALE if bias_type == "pre_scale_bias" else bias
    hidden = ~visibility(request, S_Q, S_KV)
    expected = sdpa(tensors, additive.expand(B, H, S_Q, S_KV).masked_fill(hidden, -torch.inf))
    expected.backward(dout)
    torch.testing.assert_close(output.out, expected.detach())
    torch.testing.assert_close(gradients.dbias, bias.grad)
    assert gradients.dbias.shape == shape


@pytest.mark.parametrize("shape", [(1, 1, S_Q, S_KV), (B, 1, S_Q, S_KV), (B, H, S_Q, S_KV)])
def test_arbitrary_mask_hides_where_true(shape):
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    tensors = replace(dense_tensors(), attention_mask=mask)
    output = attention(make_request(attn_mask_type="arbitrary"), tensors)
    torch.testing.assert_close(output.out, sdpa(tensors, ~mask))


LENGTHS_Q, LENGTHS_KV = (3, 0, 1, 4, 2), (2, 3, 5, 0, 2)
PACKED_MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attn_mask_type", PACKED_MASKS)
def test_packed_sequences_equal_one_call_per_sequence(attn_mask_type, padded):
    cu_q, cu_kv = cumulative(LENGTHS_Q), cumulative(LENGTHS_KV)
    starts_q, starts_kv = (offsets(0, 5, 6, 7, 12, 16), offsets(0, 2, 7, 12, 15, 17)) if padded else (cu_q, cu_kv)
    q, k, v = random(20, H, D), random(20, H_KV, D), random(20, H_KV, D_V)
    is_real = torch.zeros(20, dtype=torch.bool)
    tensors = AttentionTensors(q, k, v, SCALE, cu_q, cu_kv)
    if padded:
        tensors = replace(tensors, cu_seqlens_q_padded=starts_q, cu_seqlens_kv_padded=starts_kv)
    request = make_request(
        qkv_format="thd", batch_size=5, attn_mask_type=attn_mask_type, max_seqlen_q=4, max_seqlen_kv=5
    )
    output = attention(request, tensors)
    assert output.lse.shape == (H, 20)
    dense = make_request(attn_mask_type=attn_mask_type.replace("padding_", "").replace("padding", "no_mask"))
    starts = zip(starts_q[:-1].tolist(), starts_kv[:-1].tolist(), strict=True)
    for (start_q, start_kv), length_q, length_kv in zip(starts, LENGTHS_Q, LENGTHS_KV, strict=True):
        mine, theirs = slice(start_q, start_q + length_q), slice(start_kv, start_kv + length_kv)
        is_real[mine] = True
        one = AttentionTensors(q[None, mine], k[None, theirs], v[None, theirs], SCALE)
        expected = attention(dense.replace(batch_size=1), one)
        torch.testing.assert_close(output.out[mine], expected.out[0])
        torch.testing.assert_close(output.lse[:, mine], expected.lse[0])
    assert (output.out[~is_real] == 0).all()
    assert output.lse[:, ~is_real].isneginf().all()


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("attn_mask_type", PACKED_MASKS)
def test_dense_padding_equals_the_packed_call(qkv_format, attn_mask_type):
    lengths_q, lengths_kv = (2, S_Q), (S_KV, 4)
    cu_q, cu_kv = cumulative(lengths_q), cumulative(lengths_kv)
    tensors = replace(dense_tensors(qkv_format), cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    request = make_request(qkv_format=qkv_format, attn_mask_type=attn_mask_type)
    output = attention(request, tensors)

    def pack(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        bhsd = LAYOUTS[qkv_format].to_bhsd(x)
        return torch.cat([bhsd[b, :, :length] for b, length in enumerate(lengths)], 1).transpose(0, 1)

    packed = replace(
        tensors, q=pack(tensors.q, lengths_q), k=pack(tensors.k, lengths_kv), v=pack(tensors.v, lengths_kv)
    )
    expected = attention(request.replace(qkv_format="thd"), packed)
    torch.testing.assert_close(pack(output.out, lengths_q), expected.out)
    for b, (start, stop) in enumerate(itertools.pairwise(cu_q.tolist())):
        torch.testing.assert_close(output.lse[b, :, : stop - start], expected.lse[:, start:stop])
    padding = LAYOUTS[qkv_format].to_bhsd(output.out)[0, :, lengths_q[0] :]
    assert padding.numel()
    assert (padding == 0).all()
    assert output.lse[0, :, lengths_q[0] :].isneginf().all()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_padding_is_never_read(poison):
    tensors = replace(dense_tensors(), cu_seqlens_q=offsets(0, 2, 2), cu_seqlens_kv=offsets(0, 3, 3 + S_KV))
    for x, length in ((tensors.q, 2), (tensors.k, 3), (tensors.v, 3)):
        x[0, length:] = poison
    dout, dlse = random(B, S_Q, H, D_V), random(B, H, S_Q)
    dout[0, 2:] = 1e300
    output, gradients = attention_with_gradients(make_request(attn_mask_type="padding"), tensors, dout, dlse)
    for x in (output.out, gradients.dq, gradients.dk, gradients.dv):
        assert x.isfinite().all()
        assert (x[0, 3:] == 0).all()
    assert output.out[0, :2].abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_keys_give_zero_and_no_gradient(dtype):
    request = make_request(attn_mask_type="causal_bottom_right")
    tensors = dense_tensors(seqlen_q=7, seqlen_kv=4)
    output, gradients = attention_with_gradients(
        request, tensors, random(B, 7, H, D_V), random(B, H, 7), compute_dtype=dtype
    )
    assert output.out.dtype == output.lse.dtype == gradients.dq.dtype == dtype
    assert (output.out[:, :3] == 0).all()
    assert output.lse[:, :, :3].isneginf().all()
    assert output.lse[:, :, 3:].isfinite().all()
    assert (gradients.dq[:, :3] == 0).all()
    assert gradients.dq[:, 4:].abs().amin() > 0
    assert all(x.isfinite().all() for x in (gradients.dq, gradients.dk, gradients.dv))


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend(seqlen_q, seqlen_kv):
    tensors = dense_tensors(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    output, gradients = attention_with_gradients(make_request(), tensors, random(B, seqlen_q, H, D_V))
    assert output.out.shape == (B, seqlen_q, H, D_V)
    assert all((x == 0).all() for x in (output.out, gradients.dq, gradients.dk, gradients.dv))
    assert output.lse.isneginf().all()


GRADCHECK = {
    "dense": (make_request(attn_mask_type="causal_bottom_right", bias_type="post_scale_bias"), None),
    "pre-scale": (make_request(attn_mask_type="padding", bias_type="pre_scale_bias"), offsets(0, 3, 3)),
    "packed": (
        make_request(qkv_format="thd", batch_size=3, attn_mask_type="padding_causal", bias_type="post_scale_bias"),
        offsets(0, 4, 4, 5),
    ),
}


@pytest.mark.parametrize("name", GRADCHECK)
def test_gradients_equal_finite_differences(name):
    request, cu_seqlens = GRADCHECK[name]
    request = request.replace(num_heads=2, num_kv_heads=1)
    shape = (B, S_Q) if request.qkv_format == "bshd" else (S_Q + 1,)
    leaves = [
        x.requires_grad_()
        for x in (random(*shape, 2, 2), random(*shape, 1, 2), random(*shape, 1, 3), random(1, 2, S_Q, S_Q))
    ]

    def loss(q, k, v, bias):
        tensors = AttentionTensors(q, k, v, SCALE, cu_seqlens, cu_seqlens, bias=bias)
        output = attention(request.replace(max_seqlen_kv=S_Q), tensors)
        return output.out, output.lse.masked_fill(output.lse.isneginf(), 0)

    assert torch.autograd.gradcheck(loss, leaves)


def test_gradient_of_lse_is_the_softmax():
    tensors = dense_tensors()
    _, gradients = attention_with_gradients(
        make_request(), tensors, torch.zeros(B, S_Q, H, D_V), torch.ones(B, H, S_Q, dtype=torch.float64)
    )
    weights = torch.softmax(SCALE * torch.einsum("bqhd,bkhd->bhqk", tensors.q, tensors.k.repeat_interleave(2, 2)), -1)
    expected = SCALE * torch.einsum("bhqk,bkhd->bqhd", weights, tensors.k.repeat_interleave(2, 2))
    torch.testing.assert_close(gradients.dq, expected)
    assert (gradients.dv == 0).all()


def test_layouts_agree():
    bhsd = dense_tensors("bhsd")
    expected = attention(make_request(qkv_format="bhsd"), bhsd).out
    for qkv_format in tuple(LAYOUTS)[:3]:
        views = (LAYOUTS[qkv_format].from_bhsd(x) for x in (bhsd.q, bhsd.k, bhsd.v))
        output = attention(make_request(qkv_format=qkv_format), AttentionTensors(*views, softmax_scale=SCALE))
        assert torch.equal(LAYOUTS[qkv_format].to_bhsd(output.out), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p=0\.1.*0\.0 only"),
        ({"bias_type": "alibi"}, "bias_type='alibi'"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
        ({"attn_mask_type": "casual"}, "attn_mask_type='casual'.* causal,"),
        ({"attn_mask_type": "arbitrary"}, "give attention_mask"),
        ({"bias_type": "post_scale_bias"}, "give bias"),
        ({"attn_mask_type": "padding"}, "give cu_seqlens_q and cu_seqlens_kv"),
    ],
)
def test_what_it_does_not_compute_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        attention(make_request(**changes), dense_tensors())


def test_unused_bias_is_an_error():
    with pytest.raises(ValueError, match="leave out bias"):
        attention(make_request(), replace(dense_tensors(), bias=random(B, H, S_Q, S_KV)))
