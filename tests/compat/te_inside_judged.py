"""What TransformerEngine says of a call that it judges, with us as without; run as ``te_inside`` is."""

from __future__ import annotations

import inspect

import pytest
import torch

import mla_plugin
from mla_plugin import Accepted, hookimpl
from mla_plugin.hooks.manager import get_manager
from tests.compat.te_parts import ATTENTION, MASKS, PARAMETERS, attention, tensors


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_tensor_beside_another_mask_counts_as_in_transformer_engine(
    te_on_device, triton_on, monkeypatch, mask
) -> None:
    """Its unfused attention hides what either hides, except under no_mask."""
    module, t = attention(attn_mask_type=mask), tensors()
    hidden = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    hidden[1, :, :, 1] = True
    found, without = module(*t, attention_mask=hidden), module(*t, attention_mask=None)
    monkeypatch.delenv("NVTE_MLA_TRITON")
    expected = module(*t, attention_mask=hidden)
    assert torch.equal(found, expected)
    assert torch.allclose(without, expected, atol=1e-4) == (mask == "no_mask")


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_that_do_not_fit_are_transformer_engines_to_judge(te_on_device, monkeypatch, heads) -> None:
    mla_plugin.register("transformer_engine")
    q, k, v = tensors()
    said = []
    for text in ("0", "1"):
        monkeypatch.setenv("NVTE_MLA_TRITON", text)
        try:
            said.append(attention()(q[:, :, :1].expand(-1, -1, heads, -1), k, v).shape)
        except (AssertionError, RuntimeError) as error:
            said.append((type(error), str(error)))
    assert said[0] == said[1]


def test_a_plugin_that_arrives_later_is_asked(te_calls, triton_on) -> None:
    """It comes before every built-in backend, so it is not the Triton kernels that this library would choose."""

    class First:
        @hookimpl
        def select_backend(self, request, platform):
            return Accepted(priority=1)

    module, t = attention(), tensors(batch=1)
    assert module(*t).dim() == 3
    get_manager().register(First(), "first")
    try:
        assert module(*t) == 7.0
    finally:
        get_manager().unregister("first")
    assert module(*t).dim() == 3


def test_a_parameter_that_we_do_not_know_keeps_the_call(monkeypatch, te_calls) -> None:
    """A release to come may have one; at its default it says nothing."""
    inner = ATTENTION.forward

    def forward(self, query_layer, key_layer, value_layer, *, hidden_meaning="none", **kwargs):
        return inner(self, query_layer, key_layer, value_layer, **kwargs)

    known = [p for p in PARAMETERS.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    new = inspect.Parameter("hidden_meaning", inspect.Parameter.KEYWORD_ONLY, default="none")
    forward.__signature__ = inspect.Signature([*known, new])
    with monkeypatch.context() as patch:
        patch.setattr(ATTENTION, "forward", forward)
        patch.setenv("NVTE_MLA_TRITON", "1")
        registration = mla_plugin.register("transformer_engine")
        t = tensors(batch=1)
        assert attention()(*t).dim() == attention()(*t, hidden_meaning="".join(["no", "ne"])).dim() == 3
        assert attention()(*t, hidden_meaning="some") == 7.0
        registration.uninstall()


def test_what_our_kernels_cannot_differentiate_is_transformer_engines(te_calls, triton_on) -> None:
    q, k, v = tensors(batch=1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        assert attention()(dual, k, v) == 7.0
    assert torch.func.vmap(lambda x: attention()(x, k, v).expand(1))(q.detach()[None]) == 7.0
    assert attention()(q, k, v).dim() == 3
