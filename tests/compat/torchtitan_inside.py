"""The torchtitan adapter in torchtitan's own models; test_torchtitan.py starts it where torchtitan can be imported."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common import config_utils
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, create_varlen_metadata_for_document
from torchtitan.models.deepseek_v3 import model_registry

import mla_plugin
from mla_plugin.hooks.manager import get_manager

mla_plugin.register("torchtitan")

from mla_plugin.compat.torchtitan import PluginAttention  # noqa: E402

B, S, H, D_QK, D_V = 2, 16, 4, 24, 12
POSITIONS = torch.stack((torch.cat((torch.arange(5), torch.arange(11))), torch.arange(16)))


def reference(q, k, v, window=(-1, 0), scale=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch: output [B, S, H, D_V] and log-sum-exp [B, S, H] within the documents of POSITIONS."""
    document = (POSITIONS == 0).cumsum(1)
    distance = torch.arange(S) - torch.arange(S)[:, None]  # of the key from the query
    seen = document[:, :, None] == document[:, None]
    left, right = window
    seen = seen & (distance >= -left if left >= 0 else True) & (distance <= right if right >= 0 else True)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)


def tensors(kv_heads: int = H, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = ((H, D_QK), (kv_heads, D_QK), (kv_heads, D_V))
    return [torch.randn(B, S, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def weighted(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return out * lse.sigmoid()[..., None]


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (3, 0), (3, 2)])
@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize("transform", [None, weighted])
def test_a_layer(window, kv_heads, transform):
    layer = PluginAttention.Config(window_size=window).build()
    given, masks = tensors(kv_heads), create_varlen_metadata_for_document(POSITIONS)
    found = layer(*given, attention_masks=masks, scale=0.3, out_transform=transform, enable_gqa=kv_heads != H)
    expected, lse = reference(*given, window, 0.3)
    expected = expected if transform is None else transform(expected, lse)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    gradients = (torch.autograd.grad((x * weight).sum(), given) for x in (found, expected))
    torch.testing.assert_close(*gradients)


def test_the_default_scale_and_queries_of_another_dtype():
    layer, masks = PluginAttention.Config().build(), create_varlen_metadata_for_document(POSITIONS)
    q, k, v = (x.detach() for x in tensors(dtype=torch.float32))
    torch.testing.assert_close(layer(q, k, v, attention_masks=masks), reference(q, k, v)[0], rtol=1e-5, atol=1e-5)
    found = layer(q, k, v.bfloat16(), attention_masks=masks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference(q, k, v)[0], rtol=0, atol=0.05)


def test_a_mask_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"attention_masks is a Tensor; mla_plugin takes VarlenMetadata"):
        PluginAttention.Config().build()(*tensors(), attention_masks=torch.ones(S, S))


def test_the_name_is_known_and_others_stay():
    mla_plugin.register("torchtitan")
    assert type(config_utils.get_attention_config("mla_plugin")) is PluginAttention.Config
    assert type(config_utils.get_attention_config("varlen")) is VarlenAttention.Config
    assert type(config_utils.get_attention_config("flex")) is FlexAttention.Config
    with pytest.raises(ValueError, match="Unknown backend: mla"):
        config_utils.get_attention_config("mla")


class Plain(VarlenAttention):
    def forward(self, q, k, v, *, attention_masks, scale=None, **kwargs):
        assert len(attention_masks.cu_seq_q) == 4
        return reference(q, k, v, scale=scale)[0]


@pytest.mark.parametrize("num_mtp_layers", [0, 1])
def test_deepseek_v3(num_mtp_layers):
    """Loss and gradients of torchtitan's small model, whose every layer asks us."""
    config = model_registry("debugmodel", attn_backend="mla_plugin", num_mtp_layers=num_mtp_layers).model
    config.layers = config.layers[:2]
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    plain = copy.deepcopy(model)
    ours = [(name, x) for name, x in plain.named_modules() if isinstance(x, PluginAttention)]
    assert len(ours) == 2 + num_mtp_layers
    for _, layer in ours:
        layer.__class__ = Plain
    ids = torch.randint(0, 2048, (B, S))
    losses = []
    for each in (model, plain):
        masks = each.get_attention_masks(POSITIONS)
        out = each(ids, attention_masks=masks, positions=POSITIONS)
        parts = out if isinstance(out, (list, tuple)) else [out]
        losses.append(sum(x.float().log_softmax(-1)[..., 3].mean() for x in parts))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    gradients = [{n: p.grad for n, p in each.named_parameters() if p.grad is not None} for each in (model, plain)]
    assert any("wkv_b" in name for name in gradients[0])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


class Counter:
    """A plugin that counts what backends compute."""

    def __init__(self) -> None:
        self.forwards = 0

    @mla_plugin.hookimpl(wrapper=True)
    def forward(self, plan):
        self.forwards += 1
        return (yield)


def test_selective_checkpointing_saves_what_attention_computed():
    save = activation_checkpoint._get_default_save_ops()
    layer, masks = PluginAttention.Config().build(), create_varlen_metadata_for_document(POSITIONS)
    given, counter = tensors(), Counter()

    def policy(context, op, *arguments, **kwargs):
        names = torch.utils.checkpoint.CheckpointPolicy
        return names.MUST_SAVE if op in save else names.PREFER_RECOMPUTE

    def run(q, k, v):
        return layer(q * 2, k, v, attention_masks=masks)

    get_manager().register(counter, "counter")
    try:
        out = checkpoint(
            run, *given, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
        found = torch.autograd.grad(out.square().sum(), given)
    finally:
        get_manager().unregister("counter")
    assert counter.forwards == 1
    q, k, v = given
    torch.testing.assert_close(found, torch.autograd.grad(reference(q * 2, k, v)[0].square().sum(), given))


def test_one_graph_under_torch_compile():
    layer, masks = PluginAttention.Config().build(), create_varlen_metadata_for_document(POSITIONS)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    given = tensors()
    found, expected = (f(*given, attention_masks=masks) for f in (compiled, layer))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(x.square().sum(), given) for x in (found, expected)]
    torch.testing.assert_close(*gradients)
