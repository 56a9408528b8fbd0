"""``MLA_PLUGIN_TE=fill`` inside one version of TransformerEngine; run as ``te_inside`` is."""

from __future__ import annotations

import pytest
import torch

import mla_plugin
from mla_plugin.compat.transformer_engine import wrapper as wrapper_module
from tests.compat import te_host
from tests.compat.te_parts import D_V, VERSION, attention, te, tensors, with_gradients


def packed(lengths=(4, 5), slots=None, **options) -> dict:
    """Arguments for packed self-attention."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    arguments = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "max_seqlen_q": 5, "max_seqlen_kv": 5}
    arguments |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    if slots is not None:
        offsets = torch.tensor([0, *slots]).cumsum(0, dtype=torch.int32)
        arguments |= {"cu_seqlens_q_padded": offsets, "cu_seqlens_kv_padded": offsets}
    return {**arguments, **options}


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    mla_plugin.register("transformer_engine")
    monkeypatch.setenv("MLA_PLUGIN_TE", "fill")


def release() -> tuple[int, int]:
    return tuple(map(int, VERSION.split(".")[:2]))


@pytest.mark.parametrize("mask", ["padding_causal", "causal,padding"])
def test_fills_packed_causal_self_attention(te_calls, fill, monkeypatch, mask) -> None:
    q, k, v = tensors(9, qkv_format="thd")
    arguments = packed(attn_mask_type=mask)
    found = with_gradients(lambda *t: attention()(*t, **arguments), q, k, v)
    expected = with_gradients(lambda *t: mla_plugin.attention(*t, backend="sdpa", **arguments).flatten(-2), q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not te_calls
    monkeypatch.delenv("MLA_PLUGIN_TE")
    assert attention()(q, k, v, **arguments) == 7.0


def test_the_filled_gap_equals_transformer_engines_unfused_attention(fill, monkeypatch) -> None:
    q, k, v = tensors(9, qkv_format="thd", kind=te_host.OnDevice)
    plain = [x.detach().as_subclass(torch.Tensor).requires_grad_() for x in (q, k, v)]
    found = with_gradients(lambda *t: attention()(*t, **packed()), *plain)
    monkeypatch.delenv("MLA_PLUGIN_TE")
    with te_host.CudaIsCpu():
        if release() < (2, 11):  # before that, its unfused attention takes no packed sequences
            with pytest.raises(ValueError, match="No dot product attention backend"):
                attention()(q, k, v, **packed())
            return
        expected = with_gradients(lambda *t: attention()(*t, **packed()), q, k, v)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_fills_padding_between_sequences_before_hopper(te_calls, fill, monkeypatch) -> None:
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "triton")  # what a GPU would choose
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    q, k, v = tensors(12, qkv_format="thd")
    arguments = packed(slots=(6, 6))
    found = with_gradients(lambda *t: attention()(*t, **arguments), q, k, v)
    expected = with_gradients(lambda *t: mla_plugin.attention(*t, backend="triton", **arguments).flatten(-2), q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not te_calls
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    assert attention()(q, k, v, **arguments) == 7.0


def test_tensors_on_no_cuda_device_are_transformer_engines(te_calls, fill, monkeypatch) -> None:
    def refuse(device):
        raise ValueError(f"Expected a cuda device, but got: {device}")  # PyTorch's words

    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    assert attention()(*tensors(12, qkv_format="thd"), **packed(slots=(6, 6))) == 7.0


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch):
    """Pretends a backend that the CPU lacks; the test sees which one would have run."""

    def pretend(backend: str) -> None:
        monkeypatch.setattr(wrapper_module, "_chosen", lambda request, gates: backend)
        monkeypatch.setattr(wrapper_module, "_attend", lambda call, backend: torch.tensor(ord(backend[-1])))

    return pretend


def test_fills_flash_attention_3_with_lengths_before_2_16(te_calls, fill, chosen) -> None:
    chosen("fa3")
    out = attention()(*tensors(12, qkv_format="thd"), **packed(slots=(6, 6)))
    assert out == (ord("3") if release() < (2, 16) else 7.0)


@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_fills_flash_attention_2_with_padded_v_before_2_17(te_calls, fill, chosen, qkv_format) -> None:
    chosen("fa2")
    arguments = packed(attn_mask_type="padding") if qkv_format == "thd" else {}
    out = attention()(*tensors(9, qkv_format=qkv_format), **arguments)
    assert out == (ord("2") if release() < (2, 17) else 7.0)


def test_fills_nothing_that_transformer_engine_runs_fused(te_calls, fill, monkeypatch) -> None:
    asked = []

    def select(params):
        asked.append(params)
        return True, None, False, None, False, [True, False, True]

    monkeypatch.setattr(te.dpa_utils, "get_attention_backend", select)
    module = attention()
    for _ in range(2):
        assert module(*tensors(9, qkv_format="thd"), **packed()) == 7.0
    assert len(asked) == 1  # kept for the next call of the kind
    assert asked[0].head_dim_v == D_V


@pytest.mark.parametrize("slots", [None, (6, 6)])
def test_the_selection_is_asked_as_transformer_engine_asks_it(fill, monkeypatch, slots) -> None:
    """Every field of its AttentionParams, by TransformerEngine's own forward and by us."""
    asked = []

    def select(params):
        asked.append({name: value for name, value in vars(params).items() if name not in ("fp8_meta", "qkv_type")})
        return True, None, False, None, False, [True, False, True]

    monkeypatch.setattr(te.dpa_utils, "get_attention_backend", select)
    monkeypatch.setattr(te.FlashAttention, "forward", lambda self, *args, **kwargs: torch.tensor(7.0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    monkeypatch.setattr(wrapper_module, "_chosen", lambda request, gates: "triton")
    module, t = attention(), tensors(12, qkv_format="thd", kind=te_host.OnDevice)
    with te_host.CudaIsCpu():
        assert module(*t, **packed(slots=slots)) == 7.0
    ours, its_own = asked
    assert ours == its_own


@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_fills_packed_self_attention_alone(te_calls, fill, attention_type) -> None:
    out = attention(attention_type=attention_type)(*tensors(9, qkv_format="thd"), **packed())
    assert (out.dim() == 2) == (attention_type == "self")


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int64)},
        {"attn_mask_type": "causal"},
        {"max_seqlen_q": 4},
        {"window_size": (2, 0)},
    ],
    ids=str,
)
def test_fills_no_other_packed_call(te_calls, fill, options) -> None:
    assert attention()(*tensors(9, qkv_format="thd"), **packed(**options)) == 7.0


def test_padding_between_sequences_is_found_as_this_version_finds_it(te_calls, fill) -> None:
    """Up to 2.17 by value, later by which tensors were given; without padding the packed gap is filled."""
    same = {"cu_seqlens_q_padded": packed()["cu_seqlens_q"], "cu_seqlens_kv_padded": packed()["cu_seqlens_q"]}
    out = attention()(*tensors(9, qkv_format="thd"), **packed(**same))
    assert (out.dim() == 2) == (release() < (2, 18))
    arguments = packed()
    same = {"cu_seqlens_q_padded": arguments["cu_seqlens_q"], "cu_seqlens_kv_padded": arguments["cu_seqlens_q"]}
    assert attention()(*tensors(9, qkv_format="thd"), **arguments, **same).dim() == 2


def test_the_longest_sequence_is_found_when_left_out(te_calls, fill) -> None:
    arguments = packed(max_seqlen_q=None, max_seqlen_kv=None)
    q, k, v = tensors(9, qkv_format="thd")
    expected = mla_plugin.attention(q, k, v, backend="sdpa", **packed()).flatten(-2)
    assert torch.equal(attention()(q, k, v, **arguments), expected)
    assert not te_calls
