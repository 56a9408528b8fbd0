"""MLA models of transformers >= 5.15 decode over their latent cache, and give what they give with eager attention.

The other tests of the adapter compare logits with eager attention's error, over the latent cache too; here is which way
a call takes, that ``generate`` gives the same tokens, and what must make a layer go back to K and V.
"""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from tests.compat.latent_models import LENGTH, NUM_NEW, cache_of, fresh, generate, layers_of, prefill, step
from tests.compat.test_transformers_models import FAMILIES, VERSION, assert_as_good_as_eager, tokens_of, trio

SPARSE = [name for name, family in FAMILIES.items() if family.is_sparse]
MLA = [name for name in FAMILIES if name not in (*SPARSE, "Llama", "Mistral", "GptOss")]
SPARSE_CACHE_LATENTS = Version("5.18") <= VERSION
DECODING = [*MLA, *SPARSE] if SPARSE_CACHE_LATENTS else MLA


def decoding(*names: str) -> list[str]:
    return [name for name in names if name in DECODING]


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_every_family_decodes_over_latents(name, cache, padding, spy):
    models = trio(name)
    arguments = {"cache_implementation": None if cache == "dynamic" else cache}
    found = generate(models.plugin, padding, **arguments)
    layers = layers_of(models.plugin)
    windows = sum(getattr(layer, "sliding_window", None) is not None for layer in layers)  # these are always expanded
    num_layers = len(layers) - windows
    assert num_layers > 0
    assert spy.calls["absorbed"] >= num_layers * (NUM_NEW - 1)
    assert spy.calls["expanded"] + spy.calls["absorbed"] == len(layers) * NUM_NEW
    if cache == "dynamic":  # a prompt that is short compared with a static cache's slots may be absorbed
        assert spy.calls["expanded"] == num_layers + windows * NUM_NEW
    assert torch.equal(found, generate(models.eager, padding, **arguments))


@pytest.mark.parametrize("name", decoding("DeepseekV3", "MiniCPM3", "AXK2", "HYV4"))
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beam_search(name, cache, spy):
    arguments = {"num_beams": 3, "cache_implementation": None if cache == "dynamic" else cache}
    found = generate(trio(name).plugin, **arguments)
    assert spy.calls["absorbed"] > 0
    assert torch.equal(found, generate(trio(name).eager, **arguments))


@pytest.mark.parametrize("name", decoding("DeepseekV3", "LongcatFlash", "DeepseekV32"))
def test_speculative_steps_have_several_queries(name, spy):
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8]])
    arguments = {"prompt_lookup_num_tokens": 4, "max_new_tokens": 8, "do_sample": False}
    found = trio(name).plugin.generate(ids, **arguments)
    seen = {call["q_nope_abs"].shape[:2] for call in spy.decoded}
    assert any(shape[0 if FAMILIES[name].is_sparse else 1] > 1 for shape in seen)
    assert torch.equal(found, trio(name).eager.generate(ids, **arguments))


def test_an_assistant_model(spy):
    models = trio("DeepseekV3")
    ids = tokens_of("none")[0][:1]
    arguments = {"max_new_tokens": 6, "do_sample": False}
    found = models.plugin.generate(ids, assistant_model=fresh("DeepseekV3"), **arguments)
    assert any(call["q_nope_abs"].shape[1] > 1 for call in spy.decoded)
    assert torch.equal(found, models.eager.generate(ids, **arguments))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_cache_is_passed_on_without_a_copy(kind, spy):
    model = fresh()
    past = prefill(model, kind)
    spy.decoded.clear()
    step(model, past)
    for layer, call in zip(past.layers, spy.decoded, strict=True):
        assert (call["c_kv"].data_ptr(), call["k_rope"].data_ptr()) == (layer.keys.data_ptr(), layer.values.data_ptr())
        assert call["c_kv"].shape == (3, layer.keys.shape[2], 16)


def test_a_cache_of_strided_views(spy, monkeypatch):
    model, eager = trio("DeepseekV3").plugin, trio("DeepseekV3").eager
    past = prefill(model)

    def update(layer, *latents, **_):
        """Room before and after the tokens, as a cache that grows by blocks has it."""
        longer = (torch.cat(pair, dim=2) for pair in zip((layer.keys, layer.values), latents[:2], strict=True))
        return tuple(torch.nn.functional.pad(x, (0, 0, 2, 3))[:, :, 2:-3] for x in longer)

    monkeypatch.setattr(type(past.layers[0]), "update", update)
    spy.decoded.clear()
    found = step(model, past)
    monkeypatch.undo()
    assert [call["c_kv"].is_contiguous() for call in spy.decoded] == [False, False]
    torch.testing.assert_close(found, step(eager, prefill(eager)), rtol=1e-4, atol=1e-4)


def steps_behind_padding(model: torch.nn.Module, padding: str, num_tokens: int, last_is_token: bool = True):
    ids, mask = tokens_of(padding)
    past = cache_of(model, "dynamic")
    longer = torch.nn.functional.pad(mask, (0, num_tokens), value=1)
    longer[0, -1] = last_is_token
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=past)
    return step(model, past, num_tokens, attention_mask=longer)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("padding", ["holes", "right"])
def test_padding_between_tokens(padding, num_tokens, spy):
    found, *others = (steps_behind_padding(model, padding, num_tokens) for model in trio("DeepseekV3"))
    assert spy.calls["absorbed"] == 2
    lengths = [call["seqlens_kv"].tolist() for call in spy.decoded]
    assert lengths == [(tokens_of(padding)[1].sum(1) + num_tokens).tolist()] * 2
    assert_as_good_as_eager(found, *others, what="logits")


def test_a_query_that_is_padding(spy):
    """It sees the tokens before it, as in eager attention; several such queries are expanded."""
    assert_as_good_as_eager(*(steps_behind_padding(m, "right", 1, False) for m in trio("DeepseekV3")), what="logits")
    assert spy.calls["absorbed"] == 2
    assert_as_good_as_eager(*(steps_behind_padding(m, "right", 3, False) for m in trio("DeepseekV3")), what="logits")
    assert spy.calls["absorbed"] == 2


@pytest.mark.parametrize("name", decoding("DeepseekV3", "DeepseekV32"))
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_mask_of_the_caller(name, kind, spy):
    attend = torch.rand(3, 1, 2, LENGTH + 2, generator=torch.Generator().manual_seed(3)) < 0.6
    attend[..., 0] = True
    outputs = []
    for model in trio(name):
        past, mask = cache_of(model, "dynamic"), attend
        with torch.no_grad():
            model(tokens_of("none")[0], past_key_values=past)
        if kind == "additive" or model.config._attn_implementation == "eager":
            mask = torch.zeros(attend.shape, dtype=model.dtype).masked_fill(~attend, torch.finfo(model.dtype).min)
        outputs.append(step(model, past, 2, attention_mask=mask))
    # A bool mask only shows and hides, so a sparse layer can take the keys that it shows.
    assert (spy.calls["absorbed"] > 0) == (kind == "bool" and name == "DeepseekV32")
    assert_as_good_as_eager(*outputs, what="logits")


def test_models_whose_cache_holds_keys_and_values_are_left_alone(spy):
    """Sparse models before 5.18, and every model without MLA."""
    for name in set(FAMILIES) - set(DECODING):
        found = generate(trio(name).plugin)
        assert spy.calls.keys() == {"expanded"}
        assert torch.equal(found, generate(trio(name).eager))
