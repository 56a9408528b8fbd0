"""One query over few latents on the CPU: what is computed without a backend, what is left to one, and the results."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from mla_plugin.compat.transformers import few_keys, latent, latent_steps
from mla_plugin.hooks import hookimpl
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import Refused
from tests.compat.latent_models import fresh, generate, layers_of, prefill, step
from tests.compat.test_transformers_models import FAMILIES, VERSION, assert_as_good_as_eager, for_each, trio

pytestmark = pytest.mark.skipif(Version("5.15") > VERSION, reason="the cache holds no latents")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(latent, "LEAST_KEYS", 64)


MLA = [
    name
    for name, family in FAMILIES.items()
    if not family.is_sparse and name not in ("Llama", "Mistral", "GptOss") and Version("5.15") <= VERSION
]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max())


@for_each(MLA)
def test_a_step_asks_no_backend(name, spy):
    models = trio(name)
    pasts = [prefill(model) for model in models]
    spy.calls.clear()
    plugin, eager, exact = (step(model, past) for model, past in zip(models, pasts, strict=True))
    assert not spy.calls
    assert_as_good_as_eager(plugin, eager, exact, name)


@pytest.mark.parametrize("name", ["MiniCPM3", "Youtu"])  # without experts, which a rounding may change
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(name, dtype):
    model, eager = fresh(name).to(dtype), fresh(name, "eager").to(dtype)
    exact = fresh(name, "sdpa").to(dtype).double()  # the softmax of eager attention is float32
    found, plain, right = (step(x, prefill(x)) for x in (model, eager, exact))
    assert found.dtype == dtype
    assert error(found, right) <= 2 * error(plain, right) + 16 * torch.finfo(dtype).eps * float(right.abs().max())
    assert {x.reason for x in latent_steps(model).values()} == {latent.FEW_KEYS.text}


def test_generate_gives_the_tokens_of_eager_attention():
    for padding in ("none", "left"):
        assert generate(fresh(), padding).equal(generate(trio("DeepseekV3").eager, padding))


def test_what_was_done_to_kv_b_proj_counts():
    model, eager = fresh(), fresh(implementation="eager")
    for each in (model, eager):
        first, second = layers_of(each)[:2]
        first.kv_b_proj.register_forward_hook(lambda module, inputs, out: out * 1.5)
        second.kv_b_proj = torch.nn.Sequential(second.kv_b_proj, torch.nn.Tanh())
    torch.testing.assert_close(step(model, prefill(model)), step(eager, prefill(eager)), rtol=1e-4, atol=1e-4)


def test_gradients_flow():
    gradients = []
    for implementation in ("mla_plugin", "eager"):
        model = fresh(implementation=implementation)
        model(torch.tensor([[5]] * 3), past_key_values=prefill(model)).logits.square().sum().backward()
        gradients.append([x.grad for x in model.parameters() if x.grad is not None])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variable", ["MLA_PLUGIN_BACKEND=sdpa", "NVTE_DEBUG=1"])
def test_variables_are_for_a_backend(variable, monkeypatch, spy):
    monkeypatch.setenv(*variable.split("="))
    model = fresh()
    past = prefill(model)
    spy.calls.clear()
    step(model, past)
    assert spy.calls == {"expanded": 2}


def test_another_backend_is_asked(spy):
    class Other:
        @hookimpl
        def select_backend(self, request, platform):
            return Refused(("a test",))

    model = fresh()
    past = prefill(model)
    get_manager().register(Other(), name="other")
    try:
        spy.calls.clear()
        step(model, past)
        assert spy.calls == {"expanded": 2}
    finally:
        get_manager().unregister("other")
    past.crop(-1)
    spy.calls.clear()
    step(model, past)
    assert not spy.calls


def test_autocast_and_several_queries_are_for_a_backend(spy):
    model = fresh()
    past = prefill(model)
    spy.calls.clear()
    step(model, past, 2)
    assert spy.calls == {"expanded": 2}
    past = prefill(model)
    spy.calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        step(model, past)
    assert spy.calls == {"expanded": 2}
    q, c_kv, k_rope = torch.ones(1, 2, 1, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 2)
    assert few_keys.takes(q, c_kv, k_rope)
    assert not few_keys.takes(q.to("meta"), c_kv, k_rope)
    assert not few_keys.takes(q, c_kv.bfloat16(), k_rope)
