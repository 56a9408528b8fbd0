"""Decoding over latents by the kernels that multiply by W_UK and W_UV themselves, in Triton's interpreter."""

from __future__ import annotations

import copy
import functools
import weakref

import pytest
import torch
from packaging.version import Version

import mla_plugin
from mla_plugin.arguments import checks
from mla_plugin.compat.transformers import latent, latent_steps
from mla_plugin.operations.decode import projected
from mla_plugin.resolver.decode import resolve_decode
from tests.compat.latent_models import cache_of, fresh, layers_of, step
from tests.compat.test_transformers_models import VERSION, tokens_of

pytestmark = [
    pytest.mark.skipif(Version("5.15") > VERSION, reason="the cache holds no latents"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter; see test_transformers_latent_gpu.py"),
]


@pytest.fixture
def fused(monkeypatch) -> list[torch.Size]:
    """The shapes of the results; CUDA and the choice of the triton backend are pretended."""
    shapes = []

    def spy(*tensors, **options):
        out = projected.decode_projected(*tensors, **options)
        if out is not None:
            shapes.append(out.shape)
        return out

    monkeypatch.setattr(latent, "_may_fuse", lambda query: True)
    monkeypatch.setattr(latent, "decode_projected", spy)
    monkeypatch.setattr(projected, "resolve_decode", functools.partial(resolve_decode, backend="triton"))
    monkeypatch.setattr(checks, "may_read", lambda x: False)
    return shapes


def logits(model: torch.nn.Module, kind: str, padding: str, num_tokens: int = 1) -> torch.Tensor:
    """Of ``num_tokens`` tokens after the prompt."""
    ids, mask = tokens_of(padding)
    past = cache_of(model, kind)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True)
    longer = torch.nn.functional.pad(mask, (0, num_tokens), value=1)
    return step(model, past, num_tokens, attention_mask=longer)


@pytest.mark.parametrize("name", ["DeepseekV3", "MiniCPM3"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_step(name, kind, padding, num_tokens, fused, spy):
    model, sdpa = fresh(name).half(), fresh(name, "sdpa").half()
    exact = copy.deepcopy(sdpa).double()
    spy.calls.clear()
    found = logits(model, kind, padding, num_tokens)
    assert spy.calls["absorbed"] == 0
    assert [shape[1] for shape in fused] == [num_tokens] * len(layers_of(model))
    assert all(steps.absorbed == 1 for steps in latent_steps(model).values())
    plain, right = logits(sdpa, kind, padding, num_tokens), logits(exact, kind, padding, num_tokens)
    error, limit = ((x.double() - right).norm() / right.norm() for x in (found, plain))
    assert error <= 2 * limit + 1e-4


@pytest.mark.parametrize("changed", ["hook", "bias", "sinks", "dtype"])
def test_a_call_that_is_more_than_that_goes_another_way(changed, fused, monkeypatch):
    """As it does without these kernels: a layer with a hook is expanded, a call with sinks is decoded in parts."""
    model = fresh().half()
    if changed == "hook":
        for layer in layers_of(model):
            layer.kv_b_proj.register_forward_hook(lambda *_: None)
    elif changed == "bias":
        for layer in layers_of(model):
            layer.kv_b_proj.bias = torch.nn.Parameter(torch.ones(len(layer.kv_b_proj.weight)).half())
    elif changed == "sinks":
        attend = latent.attend
        heads = model.config.num_attention_heads
        monkeypatch.setattr(
            latent, "attend", lambda *given: attend(*given[:-1], torch.zeros(heads, dtype=torch.float16))
        )
    else:
        model = model.float()
    logits(model, "dynamic", "none")
    assert not fused


def test_it_is_what_the_parts_give(fused, monkeypatch):
    model = fresh().half()
    found = logits(model, "static", "left")
    assert fused
    fused.clear()
    monkeypatch.setattr(latent, "_may_fuse", lambda query: False)
    monkeypatch.setattr(mla_plugin, "decode", functools.partial(mla_plugin.decode, backend="triton"))
    in_parts = logits(model, "static", "left")
    assert not fused
    assert (found - in_parts).norm() <= 2e-3 * in_parts.norm()


def test_masks_are_freed(monkeypatch):
    """Nothing that a step keeps on a mask holds the mask."""
    monkeypatch.setattr(latent, "LEAST_KEYS", 0)
    masks, attend = [], latent.attend

    def spy(module, query, c_kv, k_rope, attention_mask, *rest):
        mask = None if attention_mask is None else attention_mask.clone()  # as transformers gives it to static caches
        if mask is not None:
            masks.append(weakref.ref(mask))
        return attend(module, query, c_kv, k_rope, mask, *rest)

    monkeypatch.setattr(latent, "attend", spy)
    for may_fuse in (False, True):
        monkeypatch.setattr(latent, "_may_fuse", lambda query, may_fuse=may_fuse: may_fuse)
        logits(fresh().half(), "static", "left")
    assert masks
    assert [mask() for mask in masks if mask() is not None] == []
