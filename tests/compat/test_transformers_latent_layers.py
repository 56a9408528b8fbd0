"""A layer over latents: weights that change, projections that cannot be absorbed, copies, graphs, and the rule."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.integrations import finegrained_fp8

import mla_plugin
from mla_plugin.compat.transformers import latent
from mla_plugin.compat.transformers.projection import obstacle
from mla_plugin.operations.decode import operator as decode_operator
from tests.compat.latent_models import NUM_NEW, cache_of, fresh, generate, layers_of, prefill, step
from tests.compat.test_transformers_models import tokens_of, trio


def test_gradients_are_taken_of_expanded_keys(spy):
    model = fresh()
    past = prefill(model)
    spy.calls.clear()
    out = model(torch.tensor([[5]] * 3), past_key_values=past).logits
    assert spy.calls == {"expanded": 2}
    out.sum().backward()
    assert model.model.layers[0].self_attn.kv_b_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("change", ["in place", "load_state_dict", "new parameter", "dtype"])
def test_weights_that_change_are_used(change, spy):
    model, eager = fresh(), fresh(implementation="eager")
    generate(model)
    scale = 1.5
    for each in (model, eager):
        if change == "load_state_dict":
            each.load_state_dict({k: v * scale if "kv_b_proj" in k else v for k, v in each.state_dict().items()})
        for layer in layers_of(each):
            if change == "in place":
                layer.kv_b_proj.weight.data.mul_(scale)
            elif change == "new parameter":
                layer.kv_b_proj.weight = torch.nn.Parameter(layer.kv_b_proj.weight.detach() * scale)
        if change == "dtype":
            each.to(torch.float64)
    spy.calls.clear()
    past, other = prefill(model), prefill(eager)
    spy.calls.clear()
    found, expected = step(model, past), step(eager, other)
    assert spy.calls == {"absorbed": 2}
    assert found.dtype == (torch.float64 if change == "dtype" else torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class LowRankUpdate(torch.nn.Module):
    """A LoRA layer, as PEFT puts it in the place of a projection."""

    def __init__(self, base_layer: torch.nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.lora_a = torch.nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_b = torch.nn.Linear(2, base_layer.out_features, bias=False)
        self.weight = base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


class QuantizedLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, (self.weight * 8).round() / 8)


class OtherTensor(torch.Tensor):
    """What a quantised or a distributed weight is: a subclass of Tensor."""


def with_bias(layer: torch.nn.Module) -> None:
    layer.kv_b_proj.bias = torch.nn.Parameter(torch.full((layer.kv_b_proj.out_features,), 0.5))


def with_hook(layer: torch.nn.Module) -> None:
    layer.kv_b_proj.register_forward_hook(lambda module, args, out: out * 1.5)


def with_pre_hook(layer: torch.nn.Module) -> None:
    layer.kv_b_proj.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def with_a_wrapped_forward(layer: torch.nn.Module) -> None:
    forward = layer.kv_b_proj.forward
    layer.kv_b_proj.forward = lambda x: forward(x) * 1.5


def with_a_low_rank_update(layer: torch.nn.Module) -> None:
    torch.manual_seed(0)
    layer.kv_b_proj = LowRankUpdate(layer.kv_b_proj)


def quantized(layer: torch.nn.Module) -> None:
    layer.kv_b_proj.__class__ = QuantizedLinear


def with_a_subclass_as_weight(layer: torch.nn.Module) -> None:
    layer.kv_b_proj.weight = torch.nn.Parameter(layer.kv_b_proj.weight.detach().as_subclass(OtherTensor))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_bias, "kv_b_proj has a bias"),
        (with_hook, "kv_b_proj has forward hooks"),
        (with_pre_hook, "kv_b_proj has forward hooks"),
        (with_a_wrapped_forward, "kv_b_proj has forward hooks"),
        (with_a_low_rank_update, "kv_b_proj is a tests.compat.test_transformers_latent_layers.LowRankUpdate, only"),
        (quantized, "kv_b_proj is a tests.compat.test_transformers_latent_layers.QuantizedLinear, only"),
        (with_a_subclass_as_weight, "kv_b_proj.weight is a tests.compat.test_transformers_latent_layers.OtherTensor"),
    ],
)
def test_a_projection_that_cannot_be_absorbed_is_run_and_said_once(change, reason, spy, caplog):
    model, eager = fresh(), fresh(implementation="eager")
    for each in (model, eager):
        for layer in layers_of(each):
            change(layer)
    with caplog.at_level(logging.WARNING, logger="mla_plugin"):
        found = generate(model)
    assert spy.calls == {"expanded": 2 * NUM_NEW}
    (line,) = [record.message for record in caplog.records]
    layer = "layer 0, transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention"
    assert line.startswith(f"{layer}, decodes over expanded K and V: {reason}")
    assert "; what to do: " in line
    assert torch.equal(found, generate(eager))
    assert not torch.equal(found, generate(fresh())) or change is with_a_subclass_as_weight


def fp8_of(linear: torch.nn.Linear, block: tuple[int, int] | None) -> torch.nn.Module:
    """The layer that transformers makes of a projection, with scales that differ."""
    torch.manual_seed(0)
    quantized = finegrained_fp8.FP8Linear(linear.in_features, linear.out_features, block_size=block)
    quantized.weight.data = linear.weight.data.to(torch.float8_e4m3fn)
    scale = quantized.weight_scale_inv
    scale.data = torch.rand(scale.shape) + 0.5
    return quantized.requires_grad_(False)


def dequantized(quantized: torch.nn.Module) -> torch.Tensor:
    weight, scale = quantized.weight.float(), quantized.weight_scale_inv
    if quantized.block_size is None:
        return weight * scale
    blocks = [torch.arange(n) // size for n, size in zip(weight.shape, quantized.block_size, strict=True)]
    return weight * scale[blocks[0][:, None], blocks[1]]


@pytest.mark.parametrize("block", [None, (24, 6)])  # 112 rows and 16 columns: neither is a multiple
def test_weights_in_fp8_are_absorbed(block, spy, monkeypatch):
    model, plain = fresh(), fresh(implementation="eager")
    for ours, theirs in zip(layers_of(model), layers_of(plain), strict=True):
        ours.kv_b_proj = fp8_of(ours.kv_b_proj, block)
        theirs.kv_b_proj.weight.data = dequantized(ours.kv_b_proj)
    kernel = lambda self, x: torch.nn.functional.linear(x, dequantized(self))  # noqa: E731  theirs needs a GPU
    monkeypatch.setattr(finegrained_fp8.FP8Linear, "forward", kernel)
    past, other = prefill(model), prefill(plain)
    spy.calls.clear()
    torch.testing.assert_close(step(model, past), step(plain, other), rtol=1e-4, atol=1e-4)
    assert spy.calls == {"absorbed": 2}


def test_weights_in_fp4_are_not():
    layer = layers_of(fresh())[0]
    layer.kv_b_proj = fp8_of(layer.kv_b_proj, (24, 6))
    layer.kv_b_proj.weight = torch.nn.Parameter(torch.zeros(112, 16, dtype=torch.int8), requires_grad=False)
    query, *cache = (torch.zeros(1, heads, 1, dim) for heads, dim in ((4, 24), (1, 16), (1, 8)))
    assert "FP4" in obstacle(layer, query.dtype, query, *cache).text


def test_each_model_is_spoken_of_and_each_reason(caplog):
    models = [fresh(), fresh()]
    for model in models:
        with_bias(layers_of(model)[0])
        with_hook(layers_of(model)[1])
    with caplog.at_level(logging.WARNING, logger="mla_plugin"):
        for model in models * 2:
            generate(model)
    reasons = [record.message.partition("K and V: ")[2].partition(";")[0] for record in caplog.records]
    assert Counter(reasons) == {
        "kv_b_proj has a bias": 2,
        "kv_b_proj has forward hooks (offloading, tensor parallelism), which absorbing would pass by": 2,
    }
    assert {record.message.partition(",")[0] for record in caplog.records} == {"layer 0", "layer 1"}


class AlignDevicesHook:
    """accelerate's, as far as it matters: it may change what goes in, as the real one does when it offloads."""

    def __init__(self, offload: bool):
        self.offload = offload

    def pre_forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.offload else x


def add_hook(projection: torch.nn.Linear, hook: AlignDevicesHook) -> None:
    """Attributes and a replaced forward, as ``accelerate.hooks.add_hook_to_module`` leaves them (1.15)."""

    def new_forward(module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return module._old_forward(module._hf_hook.pre_forward(x))

    new_forward.__module__ = "accelerate.hooks"
    projection._old_forward, projection._hf_hook = projection.forward, hook
    projection.forward = functools.update_wrapper(functools.partial(new_forward, projection), projection._old_forward)


def spread_over_devices(layer: torch.nn.Module) -> None:
    add_hook(layer.kv_b_proj, AlignDevicesHook(offload=False))


def gathered_again(layer: torch.nn.Module) -> None:
    layer.kv_b_proj.forward = layer.kv_b_proj.forward


def offloaded(layer: torch.nn.Module) -> None:
    add_hook(layer.kv_b_proj, AlignDevicesHook(offload=True))


def wrapped_before_it_was_spread(layer: torch.nn.Module) -> None:
    with_a_wrapped_forward(layer)
    spread_over_devices(layer)


def wrapped_after_it_was_spread(layer: torch.nn.Module) -> None:
    spread_over_devices(layer)
    with_a_wrapped_forward(layer)


@pytest.mark.parametrize(
    ("change", "is_absorbed"),
    [
        (spread_over_devices, True),
        (gathered_again, True),
        (offloaded, False),
        (wrapped_before_it_was_spread, False),
        (wrapped_after_it_was_spread, False),
    ],
)
def test_a_model_that_accelerate_spread_over_devices(change, is_absorbed, spy):
    model, eager = fresh(), fresh(implementation="eager")
    for each in (model, eager):
        for layer in layers_of(each):
            change(layer)
    assert torch.equal(generate(model), generate(eager))
    assert bool(spy.calls["absorbed"]) == is_absorbed


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_projection_that_cannot_be_absorbed_over_a_static_cache(padding, spy):
    model, eager = fresh(), fresh(implementation="eager")
    for each in (model, eager):
        for layer in layers_of(each):
            with_bias(layer)
    found = generate(model, padding, cache_implementation="static")
    assert spy.calls == {"expanded": 2 * NUM_NEW}
    assert torch.equal(found, generate(eager, padding, cache_implementation="static"))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast_decodes_over_latents_in_its_own_dtype(weights, spy):
    outputs = []
    for model in (fresh().to(weights), fresh(implementation="eager").to(weights)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            past = prefill(model)
            spy.calls.clear()
            outputs.append(step(model, past))
        if not outputs[1:]:
            assert spy.calls == {"absorbed": 2}
            assert {call["q_nope_abs"].dtype for call in spy.decoded} == {torch.bfloat16}
    found, expected = (x.double() for x in outputs)
    exact = fresh(implementation="eager").to(weights).double()
    exact = step(exact, prefill(exact))
    assert (found - exact).norm() < 1.5 * (expected - exact).norm() + 1e-2 * exact.norm()


def test_float64_under_autocast_is_left_to_the_model(spy):
    model = fresh().double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        past = prefill(model)
        spy.calls.clear()
        step(model, past)
    assert spy.calls == {"expanded": 2}


def test_a_frozen_model_decodes_over_latents_with_gradients_enabled(spy):
    model, eager = fresh().requires_grad_(False), fresh(implementation="eager")
    past, other = prefill(model), prefill(eager)
    spy.calls.clear()
    with torch.enable_grad():
        found = model(torch.tensor([[5]] * 3), past_key_values=past).logits
    assert spy.calls == {"absorbed": 2}
    with torch.no_grad():
        torch.testing.assert_close(found, eager(torch.tensor([[5]] * 3), past_key_values=other).logits)


def test_inference_mode_decodes_over_latents_although_gradients_are_enabled(spy):
    model = fresh()
    with torch.inference_mode(), torch.enable_grad():
        past = prefill(model)
        spy.calls.clear()
        model(torch.tensor([[5]] * 3), past_key_values=past)
    assert spy.calls == {"absorbed": 2}


def test_a_few_keys_are_expanded(monkeypatch):
    monkeypatch.setattr(latent, "LEAST_KEYS", 64)
    assert [latent.is_decode(1, s_kv, 512, 128, 128) for s_kv in (3, 63, 64)] == [False, False, True]


def test_copies_and_pickles_have_weights_of_their_own(spy):
    model, eager = fresh("Youtu"), fresh("Youtu", "eager")
    generate(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        for each in (other, eager):
            for layer in layers_of(each):
                layer.kv_b_proj.weight.data.mul_(1.1)
        past = prefill(other)
        spy.calls.clear()
        found, expected = step(other, past), step(eager, prefill(eager))
        assert spy.calls == {"absorbed": 2}
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for layer in layers_of(eager):
            layer.kv_b_proj.weight.data.div_(1.1)


def test_another_implementation_gets_keys_and_values_again(spy):
    model = fresh()
    found = generate(model)
    model.set_attn_implementation("eager")
    spy.calls.clear()
    assert torch.equal(generate(model), found)
    assert not spy.calls


def test_a_method_that_someone_else_replaced_stays(spy):
    model, calls = fresh(), Counter()
    for layer in layers_of(model):
        original = layer.expand_kv

        def theirs(c_kv, k_rope, original=original):
            calls["theirs"] += 1
            return original(c_kv, k_rope)

        layer.expand_kv = theirs
    generate(model)
    assert calls == {"theirs": 2 * NUM_NEW}
    assert spy.calls == {"expanded": 2 * NUM_NEW}


def test_a_second_generate_compiles_nothing_again(monkeypatch):
    """Static caches, the whole model compiled; with sdpa nothing is compiled again either."""
    compiled = []
    model = fresh("Youtu")
    kind = type(layers_of(model)[0])  # as it is in a new process
    monkeypatch.setattr(kind, "expand_kv", getattr(kind.expand_kv, "__wrapped__", kind.expand_kv))
    monkeypatch.setattr(latent, "_replaced", set())
    model.forward = torch.compile(model.forward, backend=lambda graph, example: compiled.append(graph) or graph)
    first = generate(model, "none", cache_implementation="static")
    count = len(compiled)
    assert count >= 2
    assert torch.equal(generate(model, "none", cache_implementation="static"), first)
    assert torch.equal(first, generate(fresh("Youtu", "eager"), "none"))
    assert len(compiled) == count


@pytest.mark.parametrize(
    ("cache", "is_warm", "padding"),
    [("dynamic", True, "none"), ("dynamic", True, "holes"), ("static", True, "none"), ("static", False, "none")],
)
def test_a_compiled_step_without_a_graph_break(cache, is_warm, padding, monkeypatch):
    runs = Counter()
    run = decode_operator.run

    def counted(*arguments):
        runs["absorbed"] += 1
        return run(*arguments)

    monkeypatch.setattr(decode_operator, "run", counted)
    model, eager = fresh("Youtu"), trio("Youtu").eager
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    ids, mask = tokens_of(padding)
    given = {} if padding == "none" else {"attention_mask": mask}
    later = {} if padding == "none" else {"attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1)}
    past, other = cache_of(model, cache), cache_of(eager, cache)
    with torch.no_grad():
        (model if is_warm else compiled)(ids, past_key_values=past, **given)
        eager(ids, past_key_values=other, **given)
    runs.clear()
    found = step(compiled, past, **later)
    assert runs == {"absorbed": 2}
    torch.testing.assert_close(found, step(eager, other, **later), rtol=1e-4, atol=1e-4)


DIMS = [(512, 128, 128), (512, 192, 256), (512, 256, 256), (256, 64, 64), (256, 64, 128), (32, 64, 64)]


def flops(s_q: int, s_kv: int, rank: int, nope: int, v: int, absorbed: bool) -> int:
    """Counted by PyTorch, one head, without the rope part."""
    q, c_kv, w_uk, w_uv = (
        torch.empty(shape, device="meta") for shape in ((s_q, nope), (s_kv, rank), (nope, rank), (v, rank))
    )
    with FlopCounterMode(display=False) as counter:
        if absorbed:
            (q @ w_uk @ c_kv.T) @ c_kv @ w_uv.T
        else:
            (q @ (c_kv @ w_uk.T).T) @ (c_kv @ w_uv.T)
    return counter.get_total_flops()


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("s_kv", [1, 2, 50, 1000, 65536])
def test_the_rule_counts_multiplications(dims, s_kv):
    for s_q in {1, 2, 5, s_kv // 8, s_kv // 2, s_kv - 1, s_kv, 63, 64, 73, 74, 170, 400} - {0}:
        if s_q <= s_kv:
            expected = 2 * flops(s_q, s_kv, *dims, True) < flops(s_q, s_kv, *dims, False)
            assert latent.is_decode(s_q, s_kv, *dims) == expected


def test_where_the_rule_changes_for_deepseek_v3():
    lengths = (3, 256, 1024, 65536)
    most = [max(s_q for s_q in range(s_kv) if latent.is_decode(s_q, s_kv, 512, 128, 128)) for s_kv in lengths]
    assert most == [1, 46, 63, 72]
    assert not latent.is_decode(1, 2, 512, 128, 128)
    assert not any(latent.is_decode(s, s, *dims) for s in (1, 7, 4096) for dims in DIMS)


class Operations(TorchDispatchMode):
    """Names of the operations that are dispatched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **(options or {}))


def test_a_step_of_one_sequence_takes_few_operations(monkeypatch):
    """What a step costs the host: sdpa takes 13, of which two copy K and V of all tokens."""
    layer = layers_of(fresh())[0]
    query, *latents = (torch.randn(1, heads, length, dim) for heads, length, dim in ((4, 1, 24), (1, 9, 16), (1, 9, 8)))
    monkeypatch.setattr(mla_plugin, "decode", lambda q, *rest, **options: torch.empty_like(q))
    with torch.no_grad(), Operations() as seen:
        out = latent.attend(layer, query, *latents, None, None, None, None)
    assert out.shape == (1, 1, 4, layer.v_head_dim)
    assert seen.names.count("aten.bmm.default") == 2
    assert len(seen.names) <= 15


class LouderLinear(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        return out * 1.5 if function is torch.nn.functional.linear else out


@contextlib.contextmanager
def patched(owner: object, name: str) -> Iterator[None]:
    original = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *arguments: original(*arguments) * 1.5)
        yield


@pytest.mark.parametrize(
    ("changed", "is_absorbed"),
    [
        (lambda: patched(torch.nn.Linear, "forward"), False),
        (lambda: patched(torch.nn.functional, "linear"), False),
        (LouderLinear, False),
        (lambda: torch.device("cpu"), True),
    ],
    ids=["Linear.forward", "functional.linear", "function mode", "default device"],
)
def test_what_changes_all_linear_layers_is_not_passed_by(changed, is_absorbed, spy):
    model, eager = fresh(), fresh(implementation="eager")
    past, other = prefill(model), prefill(eager)
    spy.calls.clear()
    with changed():
        found, expected = step(model, past), step(eager, other)
    assert spy.calls == {"absorbed" if is_absorbed else "expanded": 2}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
