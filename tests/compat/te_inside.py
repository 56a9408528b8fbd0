"""What holds inside one version of TransformerEngine; ``test_transformer_engine`` runs this file once for each."""

from __future__ import annotations

import inspect
import threading
import time
from functools import partialmethod
from unittest.mock import Mock

import pytest
import torch

import mla_plugin
from mla_plugin.compat import transformer_engine as adapter
from mla_plugin.compat.transformer_engine import wrapper as wrapper_module
from tests.compat import te_host
from tests.compat.te_parts import (
    ATTENTION,
    D_V,
    MASKS,
    ORIGINAL,
    PARAMETERS,
    H,
    attention,
    direct,
    te,
    tensors,
    with_gradients,
)


@pytest.mark.parametrize(
    ("qkv_format", "mask", "lengths", "groups", "batch"),
    [
        ("bshd", "causal", (5, 5), H, 2),
        ("sbhd", "causal", (7, 7), 1, 2),
        ("bshd", "no_mask", (1, 3), H, 1),
        ("sbhd", "causal_bottom_right", (3, 7), H, 1),
        ("bshd", "causal", (7, 3), H, 1),
    ],
)
def test_equals_the_direct_call(te_calls, triton_on, qkv_format, mask, lengths, groups, batch) -> None:
    module = attention(qkv_format=qkv_format, attn_mask_type=mask, groups=groups, softmax_scale=0.3)
    q, k, v = tensors(*lengths, qkv_format, groups, batch=batch)
    found = with_gradients(module, q, k, v)
    expected = with_gradients(direct(mask, qkv_format=qkv_format, softmax_scale=0.3), q, k, v)
    assert found[0].shape == (*q.shape[:2], H * D_V)
    assert found[0].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not te_calls


def test_equals_transformer_engines_own_attention(triton_on, monkeypatch) -> None:
    module = attention(qkv_format="sbhd")
    q, k, v = tensors(qkv_format="sbhd", kind=te_host.OnDevice)
    found = with_gradients(module, *(x.detach().as_subclass(torch.Tensor).requires_grad_() for x in (q, k, v)))
    monkeypatch.delenv("NVTE_MLA_TRITON")
    with te_host.CudaIsCpu():
        expected = with_gradients(module, q, k, v)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def recorded(monkeypatch: pytest.MonkeyPatch, calls: list) -> list:
    """What TransformerEngine's selection is asked, what reaches its backend, and the results, of some calls."""
    log: list = []

    def plain(value):
        return value.tolist() if isinstance(value, torch.Tensor) else repr(value) if callable(value) else value

    with monkeypatch.context() as patch:
        select, run = te.dpa_utils.get_attention_backend, te.UnfusedDotProductAttention.forward

        def get_attention_backend(params):
            fields = {name: plain(value) for name, value in vars(params).items() if name != "fp8_meta"}
            log.append(("selection", fields, select(params)))
            return select(params)

        def forward(self, *args, **kwargs):
            named = {name: plain(value) for name, value in kwargs.items() if name not in ("fp8_meta", "quantizers")}
            log.append(("unfused", [plain(value) for value in args[1:]], named))
            return run(self, *args, **kwargs)

        patch.setattr(te.dpa_utils, "get_attention_backend", get_attention_backend)
        patch.setattr(te.UnfusedDotProductAttention, "forward", forward)
        te._attention_backends["attention_params"] = None
        for options, arguments in calls:
            module = attention(**options)
            q, k, v = tensors(qkv_format=options.get("qkv_format", "bshd"), kind=te_host.OnDevice)
            with te_host.CudaIsCpu():
                log.append([x.tolist() for x in with_gradients(lambda *t, m=module, a=arguments: m(*t, **a), q, k, v)])
    return log


def test_unset_or_other_values_change_nothing(monkeypatch) -> None:
    padding = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    padding[1, ..., 3:] = True
    calls = [
        ({}, {}),
        ({"qkv_format": "sbhd", "attn_mask_type": "no_mask"}, {"attn_mask_type": "causal_bottom_right"}),
        ({"attn_mask_type": "padding_causal"}, {"attention_mask": padding}),
        ({"window_size": (2, 0)}, {"checkpoint_core_attention": False}),
        ({}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.ones(1, H, 5, 5)}),
    ]
    expected = recorded(monkeypatch, calls)
    assert [entry[0] for entry in expected if isinstance(entry, tuple)].count("unfused") == len(calls)
    mla_plugin.register("transformer_engine")
    for text in (None, "0", "true", ""):
        if text is not None:
            monkeypatch.setenv("NVTE_MLA_TRITON", text)
            monkeypatch.setenv("MLA_PLUGIN_TE", text)
        assert recorded(monkeypatch, calls) == expected


def kept_by_arguments() -> list:
    bias = torch.zeros(1, H, 5, 5)
    cu_seqlens = torch.tensor([0, 5, 10], dtype=torch.int32)
    cases = [
        ("bias", {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}),
        ("alibi", {"core_attention_bias_type": "alibi"}),
        ("alibi_slopes", {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(H)}),
        ("inference_params", {"inference_params": object()}),
        ("num_splits", {"num_splits": 2}),
        ("window", {"window_size": (2, 0)}),
        ("arbitrary", {"attn_mask_type": "arbitrary", "attention_mask": bias.bool()}),
        *((f"{mask} and a mask tensor", {"attn_mask_type": mask, "attention_mask": bias.bool()}) for mask in MASKS),
        ("no such mask", {"attn_mask_type": "diagonal"}),
        ("an empty mask", {"attn_mask_type": ""}),
        ("an empty format", {"qkv_format": ""}),
        ("a list as a window", {"window_size": [-1, -1]}),
        ("a number as a window", {"window_size": 5}),
        ("a float as a length", {"max_seqlen_q": 5.0}),
        ("a row that sees no key", {"query_layer": tensors(6)[0], "attn_mask_type": "causal_bottom_right"}),
        ("no batch", {"query_layer": tensors()[0][:0], "key_layer": tensors()[1][:0], "value_layer": tensors()[2][:0]}),
        ("no query heads", {"query_layer": tensors()[0][:, :, :0]}),
        ("no key heads", {"key_layer": tensors()[1][:, :, :0], "value_layer": tensors()[2][:, :, :0]}),
        ("fewer key heads", {"key_layer": tensors()[1][:, :, :1], "value_layer": tensors()[2][:, :, :1]}),
        ("rows that are not whole", {"key_layer": tensors()[1].detach().mT.contiguous().mT}),
        ("fp8_output", {"fp8_output": True}),
        ("padding", {"attn_mask_type": "padding_causal", "attention_mask": bias[:, 0, 0].bool()}),
        ("thd", {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu_seqlens}),
        ("longest", {"max_seqlen_q": 3}),
        ("bhsd", {"qkv_format": "bhsd"}),
        ("score_mod", {"score_mod": abs}),
        ("softcap", {"softcap": 30.0}),
        ("thd_attention_policies", {"thd_attention_policies": [{}]}),
        ("qkv_layer", {"qkv_layer": bias, "query_layer": None, "key_layer": None, "value_layer": None}),
        ("kv_layer", {"kv_layer": bias, "key_layer": None, "value_layer": None}),
        ("query", {"query_layer": None}),
        ("dtype", {"value_layer": tensors()[2].double()}),
        ("rank", {"query_layer": tensors()[0][0]}),
    ]
    return [pytest.param(a, id=name) for name, a in cases if a.keys() <= PARAMETERS.keys()]


@pytest.mark.parametrize("arguments", kept_by_arguments())
def test_arguments_that_transformer_engine_keeps(te_calls, triton_on, arguments) -> None:
    arguments = {**dict(zip(("query_layer", "key_layer", "value_layer"), tensors(), strict=True)), **arguments}
    assert attention()(**arguments) == 7.0
    ((args, kwargs),) = te_calls
    assert args == ()
    assert kwargs.keys() == arguments.keys()
    assert all(kwargs[name] is arguments[name] for name in arguments)


KEPT_MODULES = [
    {"attention_dropout": 0.1},
    {"softmax_type": "off-by-one"},
    {"return_max_logit": True},
    {"window_size": (3, 0)},
    {"attn_mask_type": "arbitrary"},
    *([{"softcap": 20.0}] if "softcap" in inspect.signature(ATTENTION).parameters else []),
]


@pytest.mark.parametrize("options", KEPT_MODULES, ids=str)
def test_modules_that_transformer_engine_keeps(te_calls, triton_on, options) -> None:
    assert attention(**{"attention_dropout": 0.0, **options})(*tensors()) == 7.0
    assert len(te_calls) == 1


def test_equal_head_dims_stay_with_transformer_engine(te_calls, triton_on, monkeypatch) -> None:
    monkeypatch.setattr(wrapper_module, "_chosen", Mock(side_effect=AssertionError("decided, and logged, needlessly")))
    assert attention(dims=(16, 16))(*tensors(dims=(16, 16))) == 7.0


def test_head_dims_that_the_module_does_not_declare_are_transformer_engines_error(triton_on) -> None:
    with te_host.CudaIsCpu(), pytest.raises(AssertionError):
        attention(dims=(32, 16))(*tensors(kind=te_host.OnDevice))


def test_fp8_contexts_stay_with_transformer_engine(te_calls, triton_on) -> None:
    from transformer_engine.pytorch import fp8_autocast

    module = attention()
    for options in ({"enabled": True}, {"enabled": False, "calibrating": True}):
        with fp8_autocast(**options):
            assert module(*tensors()) == 7.0
    quantized = type("Float8Tensor", (torch.Tensor,), {"__module__": "transformer_engine.pytorch.tensor"})
    assert module(*tensors(kind=quantized)) == 7.0
    assert len(te_calls) == 3


def test_onnx_export_stays_with_transformer_engine(te_calls, triton_on) -> None:
    from transformer_engine.pytorch.export import onnx_export

    module = attention()
    with onnx_export(True):
        assert module(*tensors()) == 7.0


@pytest.mark.parametrize(("sizes", "is_kept"), [([2], True), ([1], False), ([1, 2], True)])
def test_context_parallel_groups_stay_unless_of_one_process(te_calls, triton_on, monkeypatch, sizes, is_kept) -> None:
    """As Megatron-Core sets them; a list of groups is ``a2a+p2p``."""
    module = attention()
    groups = [Mock(size=size) for size in sizes]
    cp_group = groups[0] if len(groups) == 1 else groups
    module.set_context_parallel_group(cp_group, list(range(max(sizes))), Mock(), "p2p")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size)
    module(*tensors())
    assert len(te_calls) == is_kept


def test_arguments_without_effect_do_not_keep_a_call(te_calls, triton_on) -> None:
    """A flash-like kernel has nothing to recompute; offsets are read for padding masks alone."""
    q, k, v = tensors(batch=1)
    expected = with_gradients(attention(), q, k, v)
    for arguments in (
        {"checkpoint_core_attention": True},
        {"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32), "cu_seqlens_kv": torch.tensor([0, 2])},
        {"pad_between_seqs": True},
        {"window_size": (-1, -1), "attn_mask_type": "causal"},
        {"window_size": (-1, 0), "max_seqlen_q": 5, "max_seqlen_kv": 5, "fast_zero_fill": False},
    ):
        found = with_gradients(lambda *t, a=arguments: attention()(*t, **a), q, k, v)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not te_calls


def test_graph_capture_is_no_obstacle(te_calls, triton_on) -> None:
    from transformer_engine.pytorch import graph

    graph.set_capture_start()
    try:
        attention()(*tensors(batch=1))
    finally:
        graph.set_capture_end()
    assert not te_calls


def test_mask_spellings(te_calls, triton_on) -> None:
    q, k, v = tensors(3, 5, batch=1)
    for mask in ("causal", "causal_bottom_right", "causal,bottom_right"):
        expected = direct(mask.replace(",", "_"))(q, k, v)
        assert torch.equal(attention(attn_mask_type="no_mask")(q, k, v, attn_mask_type=mask), expected)
    assert torch.equal(attention()(q, k, v, attn_mask_type="no_mask"), direct("no_mask")(q, k, v))
    assert attention()(*tensors(), attn_mask_type="causal,padding", attention_mask=torch.zeros(1)) == 7.0


def test_autocast_does_not_change_the_dtype(triton_on) -> None:
    q, k, v = tensors(batch=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention()(q, k, v)
    assert torch.equal(out, direct()(q, k, v))


def test_arguments_by_position(te_calls, triton_on) -> None:
    """Each version has its own order: a value that keeps the call is found at any position."""
    q, k, v = tensors(batch=1)
    values = {"query_layer": q, "key_layer": k, "value_layer": v, "attn_mask_type": "no_mask"}
    names = list(PARAMETERS)[1:]
    defaults = [values.get(name, PARAMETERS[name].default) for name in names]
    assert torch.equal(attention()(*defaults), direct("no_mask")(q, k, v))
    assert torch.equal(attention()(**values), direct("no_mask")(q, k, v))
    for name, value in (("core_attention_bias_type", "alibi"), ("num_splits", 3), ("inference_params", object())):
        positional = [value if other == name else default for other, default in zip(names, defaults, strict=True)]
        assert attention()(*positional) == 7.0
    assert len(te_calls) == 3


@pytest.mark.parametrize("arguments", [{"no_such_argument": 1}, {"query_layer": tensors()[0]}], ids=["new", "twice"])
def test_wrong_arguments_are_transformer_engines_error(triton_on, arguments) -> None:
    with pytest.raises(TypeError, match=next(iter(arguments))):
        attention()(*tensors(), **arguments)


def test_too_many_arguments_are_transformer_engines_error(triton_on) -> None:
    with pytest.raises(TypeError, match="positional"):
        attention()(*tensors(), *[None] * len(PARAMETERS))


def test_a_subclass_that_calls_its_parent(triton_on) -> None:
    class MegatronLike(ATTENTION):
        def forward(self, query, key, value, attention_mask):
            return super().forward(query, key, value, attention_mask, qkv_format="sbhd")

    q, k, v = tensors(qkv_format="sbhd", batch=1)
    assert torch.equal(attention(MegatronLike)(q, k, v, None), direct(qkv_format="sbhd")(q, k, v))


def test_alternating_shapes_and_training(te_calls, triton_on) -> None:
    module = attention()
    runs = [(tensors(length, batch=1), training) for length in (3, 6) for training in (True, False)]
    expected = {len(t[0][0]): direct()(*t).detach() for t, _ in runs[::2]}
    for _ in range(2):
        for t, training in runs:
            module.train(training)
            with torch.set_grad_enabled(training):
                assert torch.equal(module(*t), expected[len(t[0][0])])
    assert not te_calls


def test_the_variable_is_read_at_every_call(te_calls, monkeypatch) -> None:
    mla_plugin.register("transformer_engine")
    module, t = attention(), tensors(batch=1)
    others = (" 1", "1 ", "1\n", "01", "+1", "2", "0", "true", "TRUE", "", None)
    for text, is_ours in ((text, text == "1") for other in others for text in ("1", other)):
        monkeypatch.delenv("NVTE_MLA_TRITON", raising=False)
        if text is not None:
            monkeypatch.setenv("NVTE_MLA_TRITON", text)
        te_calls.clear()
        out = module(*t)
        assert (out.dim() == 3, len(te_calls)) == ((True, 0) if is_ours else (False, 1))


@pytest.mark.parametrize(
    ("name", "text"), [("MLA_PLUGIN_BLOCK", "triton"), ("MLA_PLUGIN_BACKEND", "sdpa"), ("MLA_PLUGIN_BACKEND", "typo")]
)
def test_another_choice_of_backend_is_respected(te_calls, triton_on, monkeypatch, caplog, name, text) -> None:
    monkeypatch.setenv(name, text)
    assert attention()(*tensors()) == 7.0
    assert ("typo" in caplog.text) == (text == "typo")  # TransformerEngine knows nothing of the variable


def test_install_twice_and_uninstall(monkeypatch) -> None:
    first = mla_plugin.register("transformer_engine")
    wrapped = ATTENTION.forward
    assert mla_plugin.register("transformer_engine") is first
    assert ATTENTION.forward is wrapped
    assert wrapped.__wrapped__ is ORIGINAL
    assert inspect.signature(wrapped) == inspect.signature(ORIGINAL)
    first.uninstall()
    assert ATTENTION.forward is ORIGINAL
    second = mla_plugin.register("transformer_engine")
    first.uninstall()  # done already
    assert ATTENTION.forward.__wrapped__ is ORIGINAL
    second.uninstall()
    assert ATTENTION.forward is ORIGINAL


def test_uninstall_below_a_later_wrapper(te_calls, triton_on, monkeypatch) -> None:
    ours = ATTENTION.forward
    with monkeypatch.context() as patch:
        patch.setattr(ATTENTION, "forward", partialmethod(ours))
        adapter._registration.uninstall()
        assert attention()(*tensors()) == 7.0


def test_threads_that_register_together_wrap_once(monkeypatch) -> None:
    version = adapter._installed_version()
    monkeypatch.setattr(adapter, "_installed_version", lambda: time.sleep(0.02) or version)
    threads = [threading.Thread(target=mla_plugin.register, args=["transformer_engine"]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ATTENTION.forward.__wrapped__ is ORIGINAL


def test_an_earlier_wrapper_that_hides_the_parameters_keeps_all(te_calls, monkeypatch, caplog) -> None:
    inner = ATTENTION.forward

    def opaque(self, query_layer, key_layer, value_layer, *args, **kwargs):
        return inner(self, query_layer, key_layer, value_layer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ATTENTION, "forward", opaque)
        patch.setenv("NVTE_MLA_TRITON", "1")
        registration = mla_plugin.register("transformer_engine")
        assert attention()(*tensors()) == attention()(*tensors(), attn_mask_type="causal") == 7.0
        assert "opaque" in caplog.text
        assert "functools.wraps" in caplog.text
        registration.uninstall()
        assert ATTENTION.forward is opaque


@pytest.mark.parametrize("is_on", [False, True])
def test_torch_compile(te_calls, monkeypatch, is_on) -> None:
    """Unset, the wrapper adds no graph break; what is asked for runs at one."""
    torch._dynamo.reset()
    mla_plugin.register("transformer_engine")
    if is_on:
        monkeypatch.setenv("NVTE_MLA_TRITON", "1")
    module, t = attention(), tensors(batch=1)
    compiled = torch.compile(lambda q, k, v: module(q, k, v) * 2, backend="eager", fullgraph=not is_on)
    assert torch.equal(compiled(*t), module(*t) * 2)
    assert bool(te_calls) != is_on
