"""Megatron's own MLA layers and GPT with the plugin as their core attention, against the plain formula in its place."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

import mla_plugin
from mla_plugin.compat import megatron as adapter
from tests.compat.megatron.parts import causal, config, packed_reference, packing, reference, scores
from tests.repository.project import ROOT

# importing Megatron takes three seconds
pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.usefixtures("on_the_cpu")]
MLACoreAttention, MLA = adapter.MLACoreAttention, multi_latent_attention
VOCABULARY, LENGTH = 50, 12


class PlainCore(MLACoreAttention):
    """Attention as its definition; the layer around it is Megatron's in both paths."""

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **rest):
        if packed_seq_params is None:
            return reference(query, key, value, causal(len(query)), self.softmax_scale)
        spans = [(span, span) for span in itertools.pairwise(packed_seq_params.cu_seqlens_q.tolist())]
        return packed_reference(query, key, value, spans, self.softmax_scale)


def attention(core=MLACoreAttention, **changes):
    """One MLA layer with weights from a fixed seed."""
    spec = adapter.mla_gpt_layer_spec().submodules.self_attention
    spec.submodules.core_attention = ModuleSpec(module=core)
    torch.manual_seed(1)
    return build_module(spec, config=config(**changes), layer_number=1)


def hidden_states(tokens=LENGTH, batch=2):
    return torch.randn(tokens, batch, 32, dtype=torch.float64).requires_grad_()


def assert_same_training(module, plain, x, **arguments):
    """Outputs, and gradients of the input and of every parameter."""
    out, expected = (layer(x, None, **arguments)[0] for layer in (module, plain))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    dout = torch.randn_like(expected)
    names = ["hidden states", *dict(plain.named_parameters())]
    found, wanted = (
        torch.autograd.grad(y, [x, *layer.parameters()], dout) for y, layer in ((out, module), (expected, plain))
    )
    for name, ours, theirs in zip(names, found, wanted, strict=True):
        assert theirs.any(), f"{name} has no gradient to compare"
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"rope_type": "yarn", "mscale_all_dim": 1.0}])
def test_an_mla_layer(changes):
    assert_same_training(attention(**changes), attention(PlainCore, **changes), hidden_states())


@pytest.mark.parametrize("lengths", [(5, 1, 6), (12,), (4, 0, 8)])
def test_an_mla_layer_on_packed_sequences(lengths):
    x = hidden_states(batch=1)
    assert_same_training(attention(), attention(PlainCore), x, packed_seq_params=packing(lengths)[0])


def test_a_packed_sequence_is_what_it_is_alone():
    module, x = attention(), hidden_states(batch=1)
    packed = module(x, None, packed_seq_params=packing((5, 7))[0])[0]
    torch.testing.assert_close(packed[5:], module(x[5:], None)[0], rtol=1e-10, atol=1e-11)


def test_the_core_attention_is_built_twice_and_last_with_the_widths():
    built = []

    class Recorded(MLACoreAttention):
        def __init__(self, **arguments):
            built.append((arguments.get("k_channels"), arguments.get("v_channels")))
            super().__init__(**arguments)

    assert attention(Recorded).core_attention.v_channels == 16
    assert built == [(None, None), (24, 16)]


class AppendsZeros(torch.nn.Module):
    """What main's MLA layer does around the core attention of a packed batch, since Megatron-LM PR #3003."""

    def __init__(self, core: MLACoreAttention) -> None:
        super().__init__()
        self.core = core

    def forward(self, query, key, value, *mask, **arguments):
        width, padded_width = value.shape[-1], query.shape[-1]
        value = torch.nn.functional.pad(value, (0, padded_width - width))
        out = self.core(query, key, value, *mask, **arguments)
        if out.ndim == 2:
            out = out.reshape(len(out), -1, padded_width)
        return out[..., :width]


def test_a_layer_that_appends_zeros_to_v():
    module, plain = attention(), attention(PlainCore)
    module.core_attention = AppendsZeros(module.core_attention)
    assert_same_training(module, plain, hidden_states(batch=1), packed_seq_params=packing((5, 7))[0])


@pytest.mark.parametrize("recomputed", ["core_attn", "mla_up_proj"])
def test_recomputation_keeps_gradients_and_dropout(monkeypatch, recomputed):
    """Selective recomputation saves and restores CUDA's random state too; there is none here."""
    monkeypatch.setattr(megatron_random, "_get_cuda_rng_state", lambda **_: None)
    monkeypatch.setattr(megatron_random, "_set_cuda_rng_state", lambda *_, **__: None)
    dropout = {"attention_dropout": 0.3}
    recompute = {"recompute_granularity": "selective", "recompute_modules": [recomputed], **dropout}
    x, gradients, outs = hidden_states(), [], []
    for changes in (dropout, recompute):
        module = attention(**changes)
        assert (module.checkpoint_core_attention or module.recompute_up_proj) == (changes is recompute)
        torch.manual_seed(5)
        out = module(x, None)[0]
        torch.manual_seed(6)  # recomputation must not depend on where the generator stands by then
        out.square().sum().backward()
        outs.append(out.detach())
        gradients.append([x.grad, *(parameter.grad for parameter in module.parameters())])
        x.grad = None
    assert torch.equal(*outs)
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-10, atol=1e-11)


def test_generation_over_a_static_cache_equals_the_whole_sequence():
    """A prompt of 7 tokens, then one token at a time."""
    x = hidden_states().detach()
    module = attention().eval()
    whole = module(x, None)[0]
    context = StaticInferenceContext(max_batch_size=2, max_sequence_length=LENGTH)
    parts = []
    for start, end in [(0, 7), *((n, n + 1) for n in range(7, LENGTH))]:
        context.sequence_len_offset = start
        parts.append(module(x[start:end], None, inference_context=context)[0])
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("threshold", [0.5, 1e6])
def test_qk_clip_brings_every_head_under_the_threshold(threshold):
    """Megatron's own clip_qk scales the weights of a head by what its largest score asks, and leaves the others."""
    module, x = attention(qk_clip=True, qk_clip_threshold=threshold), hidden_states()
    seen = []
    module.core_attention.register_forward_pre_hook(lambda core, args: seen.append(args[:2]))

    def largest():
        module(x, None)
        q, k = seen.pop()
        return scores(q, k, causal(LENGTH), module.softmax_scale).amax((0, 2, 3)).detach()

    before = largest()
    assert before.min() > 0
    assert before.max() > 0.5
    module.clip_qk()
    torch.testing.assert_close(largest(), before.clamp(max=threshold), rtol=1e-4, atol=1e-5)


def gpt(spec, mtp_block_spec=None, **changes) -> GPTModel:
    torch.manual_seed(0)
    options = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH, "position_embedding_type": "rope"}
    return GPTModel(config(**changes), spec, mtp_block_spec=mtp_block_spec, **options)


def loss_of(model: GPTModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(2, -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()


def plain_loss(**changes) -> torch.Tensor:
    spec = adapter.mla_gpt_layer_spec()
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=PlainCore)
    return loss_of(gpt(spec, **changes))


def test_a_gpt_of_our_layer_spec():
    torch.testing.assert_close(loss_of(gpt(adapter.mla_gpt_layer_spec())), plain_loss(), rtol=1e-9, atol=0)


def test_a_gpt_that_predicts_several_tokens():
    """The block for the tokens after the next takes over the decoder's layer."""
    losses = []
    for core in (MLACoreAttention, PlainCore):
        layer = adapter.mla_gpt_layer_spec()
        layer.submodules.self_attention.submodules.core_attention = ModuleSpec(module=core)
        options = config(mtp_num_layers=1)
        block = gpt_layer_specs.get_gpt_mtp_block_spec(options, layer, use_transformer_engine=False)
        model = gpt(layer, mtp_num_layers=1, mtp_block_spec=block)
        assert [type(module) for module in model.modules() if isinstance(module, MLACoreAttention)] == [core] * 3
        loss = loss_of(model)
        losses.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, plain in zip(*losses, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-8, atol=1e-10)


def test_recomputing_whole_layers(monkeypatch):
    monkeypatch.setattr(megatron_random, "_get_cuda_rng_state", lambda **_: None)
    monkeypatch.setattr(megatron_random, "_set_cuda_rng_state", lambda *_, **__: None)
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    gradients = []
    for changes in ({}, whole):
        model = gpt(adapter.mla_gpt_layer_spec(), attention_dropout=0.2, **changes)
        torch.manual_seed(7)
        loss = loss_of(model)
        torch.manual_seed(8)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-9, atol=1e-11)


class LowCore(MLACoreAttention):
    """The yardstick of a low precision: the formula in the tensors' own dtype."""

    def forward(self, query, key, value, *mask, **rest):
        s = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        weights = s.masked_fill(~causal(len(query)), -torch.inf).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_mla_layer_in_low_precision(dtype):
    """Output and gradient of the input: at most twice the error of the formula in that dtype."""
    x = hidden_states().detach().to(dtype)
    ours, low = (attention(core, params_dtype=dtype) for core in (MLACoreAttention, LowCore))
    exact = attention(PlainCore, params_dtype=dtype).double()
    dout = torch.randn_like(x)
    found = []
    for module, inputs in ((ours, x), (low, x), (exact, x.double())):
        leaf = inputs.clone().requires_grad_()
        out = module(leaf, None)[0]
        found.append([out, *torch.autograd.grad(out, leaf, dout.to(out.dtype))])
    for mine, yardstick, true in zip(*found, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - true).norm() <= 2 * (yardstick.double() - true).norm() + 1e-7 * true.norm()


@pytest.mark.usefixtures("pristine")
def test_registered_megatrons_own_local_spec_builds_mla():
    with pytest.raises(TypeError):
        gpt(gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True))
    mla_plugin.register("megatron")
    model = gpt(gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True))
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    assert [type(core) for core in cores] == [MLACoreAttention] * 2
    torch.testing.assert_close(loss_of(model), plain_loss(), rtol=1e-9, atol=0)


@pytest.mark.usefixtures("pristine")
def test_registering_twice_is_registering_once():
    mla_plugin.register("megatron")
    once = MLA.MultiLatentAttention.__init__
    mla_plugin.register("megatron")
    assert MLA.MultiLatentAttention.__init__ is once


@pytest.mark.usefixtures("pristine")
def test_registered_v_is_not_padded_for_us_and_still_is_for_others(monkeypatch):
    """Main's function, by its contract: zeros for packed batches alone."""

    def prepare(layer, query, value, packed_seq_params):
        return "as it is" if packed_seq_params is None else "zeros appended"

    monkeypatch.setattr(MLA, "_prepare_mla_core_attention_value", prepare, raising=False)
    mla_plugin.register("megatron")
    layer, params = attention(), packing((3,))[0]
    assert MLA._prepare_mla_core_attention_value(layer, None, None, params) == "as it is"
    layer.core_attention = torch.nn.Identity()
    assert MLA._prepare_mla_core_attention_value(layer, None, None, params) == "zeros appended"


def test_every_layer_of_a_block_is_changed():
    mixed = config(num_layers=3, num_moe_experts=4, moe_layer_freq=[0, 1, 1], multi_latent_attention=True)
    block = gpt_layer_specs.get_gpt_decoder_block_spec(mixed, use_transformer_engine=False)
    assert adapter.with_core_attention(block) is block
    cores = [layer.submodules.self_attention.submodules.core_attention for layer in block.layer_specs]
    assert [spec.module for spec in cores] == [MLACoreAttention] * 3


def test_checkpoints_hold_nothing_of_it():
    module = attention()
    assert not [name for name in module.state_dict() if "core_attention" in name]
    keys = module.sharded_state_dict(prefix="self_attention.").keys()
    assert {"self_attention.linear_q_up_proj.weight", "self_attention.linear_proj.weight"} <= keys
    assert not [name for name in keys if "core_attention" in name]


def test_the_example_trains_with_equal_losses():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "examples/megatron_mla_gpt.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("the losses are equal\n")
