"""Megatron-Core in one process: a world of one rank, without a port."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import multi_latent_attention

from mla_plugin.compat.megatron import registration


@pytest.fixture(scope="package", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Megatron's layers ask CUDA for their device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


@pytest.fixture
def pristine(monkeypatch):
    """Megatron as imported, and nothing said yet; what ``register`` changes is put back after the test."""
    changed = [(multi_latent_attention.MultiLatentAttention, "__init__")]
    if registration.absorbed_mla is not None:
        changed.append((registration.absorbed_mla.AbsorbedMLASelfAttention, "__init__"))
    if hasattr(multi_latent_attention, "_prepare_mla_core_attention_value"):
        changed.append((multi_latent_attention, "_prepare_mla_core_attention_value"))
    for owner, name in changed:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", True)  # as 0.16 has it without TransformerEngine
    registration._warn_once.cache_clear()
