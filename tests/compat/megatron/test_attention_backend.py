"""``config.attention_backend``, for which Megatron's language models set TransformerEngine's variables themselves."""

from __future__ import annotations

import os

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

import mla_plugin
from mla_plugin.compat import megatron as adapter
from tests.compat.megatron.parts import causal, core, reference, tensors
from tests.compat.megatron.test_layers import gpt, loss_of, plain_loss

# importing Megatron takes three seconds
pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.usefixtures("on_the_cpu")]
SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@pytest.fixture(autouse=True)
def an_environment_of_its_own(monkeypatch):
    """What Megatron writes into it is taken out again."""
    for name in SWITCHES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("backend", [AttnBackend.local, AttnBackend.unfused, AttnBackend.auto])
def test_what_can_run_on_a_cpu_runs(backend):
    model = gpt(adapter.mla_gpt_layer_spec(), attention_backend=backend)
    expected = {AttnBackend.local: "000", AttnBackend.unfused: "001", AttnBackend.auto: "111"}
    assert "".join(os.environ[name] for name in SWITCHES) == expected[backend]
    torch.testing.assert_close(loss_of(model), plain_loss(attention_backend=backend), rtol=1e-9, atol=0)


@pytest.mark.parametrize("backend", [AttnBackend.flash, AttnBackend.fused])
def test_what_cannot_names_the_option(backend):
    model = gpt(adapter.mla_gpt_layer_spec(), attention_backend=backend)
    message = rf"sdpa +off +NVTE_UNFUSED_ATTN=0[^$]*config.attention_backend is {backend}, and .*AttnBackend.auto"
    with pytest.raises(mla_plugin.NoBackendError, match=message) as error:
        loss_of(model)
    assert {entry.backend for entry in error.value.trace} > {"sdpa", "cudnn"}


def test_the_largest_scores_name_it_too(monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(mla_plugin.NoBackendError, match=r"config.attention_backend is AttnBackend.fused"):
        core(qk_clip=True, attention_backend=AttnBackend.fused)(*tensors(4), None)


@pytest.mark.parametrize(
    ("backend", "variable", "value"),
    [
        (AttnBackend.auto, "NVTE_UNFUSED_ATTN", "0"),  # the user's own doing
        (AttnBackend.unfused, "MLA_PLUGIN_BACKEND", "fa2"),
    ],
)
def test_the_option_is_not_blamed_for_what_it_did_not_do(monkeypatch, backend, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(mla_plugin.NoBackendError) as error:
        core(attention_backend=backend)(*tensors(4), None)
    assert "attention_backend" not in str(error.value)


def test_local_runs_under_every_mask(monkeypatch):
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    q, k, v = tensors(5)
    module = core(attention_backend=AttnBackend.local, qk_clip=True)
    torch.testing.assert_close(module(q, k, v, None), reference(q, k, v, causal(5)))
