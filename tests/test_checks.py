import fractions

import numpy as np
import pytest
import torch

from mla_plugin import attention
from mla_plugin.arguments import checks
from mla_plugin.arguments.mask import canonical_mask

Q, K, V = torch.randn(2, 3, 4, 24), torch.randn(2, 5, 2, 24), torch.randn(2, 5, 2, 16)
CU = torch.tensor([0, 2, 3], dtype=torch.int32)


def error(*args: object, **kwargs: object) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        attention(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((Q[0], K, V), ["q has shape (3, 4, 24)", "[B, S, H, D]"]),
        ((Q, K.bfloat16(), V), ["float32", "bfloat16"]),
        ((Q.int(), K.int(), V.int()), ["int32", "torch.float16"]),
        ((Q, K, V[:, :4]), ["k has shape (2, 5, 2, 24)", "(2, 4, 2, 16)"]),
        ((Q, K[..., :16], V), ["q has 24", "k has 16"]),
        ((Q[:, :, :3], K, V), ["3 query heads over 2"]),
        ((Q[:1], K, V), ["q has 1", "k has 2"]),
        ((Q[..., :0], K[..., :0], V), ["head_dim_qk=0"]),
        ((Q, K, V.to("meta")), ["cpu", "meta", "one device"]),
        (("q", K, V), ["q is str", "torch.Tensor"]),
        ((Q, None, V), ["k is NoneType"]),
        ((Q, K, V.tolist()), ["v is list"]),
        ((Q.to_sparse(), K, V), ["q has the memory layout torch.sparse_coo", "q.to_dense()"]),
    ],
)
def test_tensors(args: tuple[object, ...], words: list[str]) -> None:
    message = error(*args)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"qkv_format": "bsh"}, ["'bsh'", "bshd, sbhd, bhsd, thd"]),
        ({"attn_mask_type": "lower"}, ["'lower'", "padding_causal"]),
        ({"attn_mask_type": None}, ["None", "padding_causal"]),
        ({"window_size": (-2, 0)}, ["(-2, 0)", "-1"]),
        ({"window_size": 5}, ["window_size=5", "(left, right)"]),
        ({"window_size": (1, 2, 3)}, ["(1, 2, 3)", "(left, right)"]),
        ({"window_size": (1.5, 0)}, ["(1.5, 0)", "number of tokens"]),
        ({"window_size": {2, 1}}, ["window_size={1, 2}", "(left, right)"]),
        ({"window_size": {2: 0, 1: 0}}, ["window_size={2: 0", "(left, right)"]),
        ({"window_size": (True, False)}, ["(True, False)", "number of tokens"]),
        ({"window_size": torch.tensor([2, 1])}, ["tensor([2, 1])", "(left, right)"]),
        ({"cp_comm_type": np.array(["p2p", "a2a"])}, ["cp_comm_type=array(['p2p', 'a2a']", "p2p, all_gather, a2a"]),
        ({"max_seqlen_q": 2}, ["max_seqlen_q=2", "3, the tensor's length"]),
        ({"max_seqlen_kv": 6}, ["max_seqlen_kv=6", "5, the tensor's length"]),
        ({"max_seqlen_q": 4, "attn_mask_type": "padding", "cu_seqlens_q": CU}, ["max_seqlen_q=4", "0 to 3"]),
        ({"max_seqlen_q": 1, "attn_mask_type": "padding", "cu_seqlens_q": CU}, ["max_seqlen_q=1", "[2, 1]"]),
        ({"attn_mask_type": "padding", "cu_seqlens_q": [0, 2, 3]}, ["cu_seqlens_q is list"]),
        ({"attn_mask_type": "arbitrary", "attention_mask": [True]}, ["attention_mask is list"]),
        ({"core_attention_bias_type": "post_scale_bias", "core_attention_bias": 1.0}, ["core_attention_bias is float"]),
        ({"attn_mask_type": "causal", "bottom_right_diagonal": True}, ["contradicts"]),
        ({"attn_mask_type": "padding"}, ["needs cu_seqlens_q"]),
        ({"attn_mask_type": "padding", "cu_seqlens_q": CU.long()}, ["int64", "int32"]),
        ({"attn_mask_type": "padding", "cu_seqlens_q": CU[:2]}, ["(2,)", "(3,)"]),
        ({"attn_mask_type": "padding", "cu_seqlens_q": CU[:0]}, ["(0,)"]),
        ({"attn_mask_type": "padding", "cu_seqlens_q": CU.to("meta")}, ["meta", "cpu"]),
        ({"attn_mask_type": "causal", "cu_seqlens_q": CU}, ["cu_seqlens_q", "padding mask"]),
        (
            {
                "attn_mask_type": "padding",
                "cu_seqlens_q": CU,
                "cu_seqlens_q_padded": CU,
                "cu_seqlens_kv_padded": CU,
            },
            ["qkv_format='thd'"],
        ),
        ({"attn_mask_type": "arbitrary"}, ["needs attention_mask"]),
        ({"attention_mask": torch.ones(3, 5, dtype=torch.bool)}, ["arbitrary"]),
        ({"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(3, 5)}, ["float32", "core_attention_bias"]),
        (
            {"attn_mask_type": "arbitrary", "attention_mask": torch.ones(3, 4, dtype=torch.bool)},
            ["(3, 4)", "(2, 4, 3, 5)"],
        ),
        ({"core_attention_bias_type": "relative"}, ["'relative'", "post_scale_bias"]),
        ({"core_attention_bias_type": "post_scale_bias"}, ["no core_attention_bias"]),
        ({"core_attention_bias": torch.zeros(3, 5)}, ["no_bias"]),
        (
            {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(3, 5).double()},
            ["float64", "float32"],
        ),
        ({"softmax_scale": 0.0}, ["softmax_scale=0.0", "positive"]),
        ({"softmax_scale": float("nan")}, ["softmax_scale=nan"]),
        ({"dropout_p": 1.0}, ["dropout_p=1.0"]),
        ({"dropout_p": -0.1}, ["dropout_p=-0.1"]),
        ({"host": "jax"}, ["'jax'", "transformer_engine"]),
        ({"pad_between_seqs": True}, ["needs cu_seqlens_q_padded"]),
        ({"backend": "fa9"}, ["'fa9'", "sdpa"]),
        ({"cp_comm_type": "ring"}, ["cp_comm_type='ring'; expected one of p2p, all_gather, a2a"]),
    ],
)
def test_options(options: dict[str, object], words: list[str]) -> None:
    message = error(Q, K, V, **options)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("cu", "words"),
    [
        ([0, 3, 2], ["[0, 3, 2]", "never decrease"]),
        ([1, 2, 3], ["start at 0"]),
        ([0, 4, 5], ["[4, 1]", "3 tokens"]),
    ],
)
def test_length_values_of_dense_layouts(cu: list[int], words: list[str]) -> None:
    lengths = torch.tensor(cu, dtype=torch.int32)
    message = error(Q, K, V, attn_mask_type="padding", cu_seqlens_q=lengths, cu_seqlens_kv=CU)
    for word in words:
        assert word in message


def test_a_rate_may_be_any_number() -> None:
    for dropout_p in (fractions.Fraction(1, 4), np.float32(0.25), np.float64(0.25)):
        assert attention(Q, K, V, dropout_p=dropout_p).shape == (*Q.shape[:3], V.shape[3])


def test_length_values_of_thd() -> None:
    q = torch.randn(6, 2, 8)
    cu, padded = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    message = error(q, q, q, qkv_format="thd", cu_seqlens_q=padded)
    assert message == "cu_seqlens_q=[0, 3, 7] ends at 7; the tensor holds 6 tokens"
    squeezed = torch.tensor([0, 1, 6], dtype=torch.int32)
    message = error(
        q, q, q, qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_q_padded=squeezed, cu_seqlens_kv_padded=squeezed
    )
    assert "[2, 3]" in message
    assert "[1, 5]" in message
    before = torch.tensor([-1, 2, 6], dtype=torch.int32)
    message = error(q, q, q, qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_q_padded=before, cu_seqlens_kv_padded=before)
    assert "from -1" in message
    for longest in (-1, 2, 2**31):
        message = error(q, q, q, qkv_format="thd", cu_seqlens_q=cu, max_seqlen_kv=longest)
        assert f"max_seqlen_kv={longest}" in message
    assert attention(q, q, q, qkv_format="thd", cu_seqlens_q=cu, max_seqlen_q=3, max_seqlen_kv=9).shape == q.shape
    apart = {"cu_seqlens_q": cu, "cu_seqlens_q_padded": torch.tensor([0, 3, 6], dtype=torch.int32)}
    message = error(q, q, q, qkv_format="thd", **apart, pad_between_seqs=False)
    assert "pad_between_seqs=False" in message
    assert "cu_seqlens_q=[0, 2, 5]" in message
    assert "cu_seqlens_q_padded=[0, 3, 6]" in message
    tail = {"cu_seqlens_q": cu, "cu_seqlens_q_padded": torch.tensor([0, 2, 6], dtype=torch.int32)}
    found = attention(q, q, q, qkv_format="thd", **tail, pad_between_seqs=False)
    torch.testing.assert_close(found, attention(q, q, q, qkv_format="thd", cu_seqlens_q=cu))
    message = error(
        q, q, q, qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu.clone(), cu_seqlens_q_padded=cu.clone()
    )
    assert "cu_seqlens_kv_padded is missing" in message
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1)}
    assert "dense layout" in error(q, q, q, qkv_format="thd", cu_seqlens_q=cu, **bias)
    mask = {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(1, dtype=torch.bool)}
    assert "dense layout" in error(q, q, q, qkv_format="thd", **mask)


@pytest.mark.parametrize(
    ("mask", "window", "diagonal", "layout", "expected"),
    [
        ("causal", None, None, "bshd", ("causal", (-1, 0), False)),
        ("causal", (4, 7), None, "bshd", ("causal", (4, 0), False)),
        ("causal_bottom_right", None, None, "bshd", ("causal_bottom_right", (-1, 0), True)),
        ("causal,padding", None, None, "bshd", ("padding_causal", (-1, 0), False)),
        ("causal_padding", None, False, "bshd", ("padding_causal", (-1, 0), False)),
        ("no_mask", None, None, "bshd", ("no_mask", (-1, -1), True)),
        ("no_mask", (3, 2), False, "bshd", ("no_mask", (3, 2), False)),
        ("no_mask", (-1, 5), None, "bshd", ("no_mask", (-1, 5), True)),
        ("no_mask", (-1, 0), None, "bshd", ("causal_bottom_right", (-1, 0), True)),
        ("no_mask", (-1, 0), False, "bshd", ("causal", (-1, 0), False)),
        ("padding", (-1, 0), None, "bshd", ("padding_causal_bottom_right", (-1, 0), True)),
        ("causal", None, None, "thd", ("padding_causal", (-1, 0), False)),
        ("no_mask", None, None, "thd", ("padding", (-1, -1), True)),
        ("causal_bottom_right", None, None, "thd", ("padding_causal_bottom_right", (-1, 0), True)),
        ("arbitrary", (-1, 0), None, "bshd", ("arbitrary", (-1, 0), True)),
    ],
)
def test_masks_are_normalized(mask: str, window: object, diagonal: object, layout: str, expected: object) -> None:
    assert canonical_mask(mask, window, diagonal, is_packed=layout == "thd") == expected


def test_a_window_of_minus_one_zero_does_not_see_the_future() -> None:
    q = torch.randn(1, 6, 2, 24)
    v = torch.randn(1, 6, 2, 16)
    before = attention(q, q, v, attn_mask_type="no_mask", window_size=(-1, 0))
    v[:, -1] += 100.0
    after = attention(q, q, v, attn_mask_type="no_mask", window_size=(-1, 0))
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=0, atol=0)
    assert not torch.equal(before[:, -1], after[:, -1])


def test_values_on_a_gpu_cost_one_look_at_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of decode asks whether it may read the lengths, so the variable is read before anything slower."""

    class OnGpu:
        is_cpu, is_cuda = False, True

    monkeypatch.setattr(checks, "is_traced", lambda x: pytest.fail("asked"))
    assert not checks.may_read(OnGpu())  # type: ignore[arg-type]
    monkeypatch.setenv("MLA_PLUGIN_CHECK", "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for is_traced in (False, True):
        monkeypatch.setattr(checks, "is_traced", lambda x, found=is_traced: found)
        assert checks.may_read(OnGpu()) is not is_traced  # type: ignore[arg-type]
    monkeypatch.setattr(checks, "is_traced", lambda x: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not checks.may_read(OnGpu())  # type: ignore[arg-type]
