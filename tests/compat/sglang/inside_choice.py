"""Registration, what layers dispatch, and what is refused; in a process where SGLang is one release."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import logging
from types import SimpleNamespace

import pytest
import sglang
import torch
from sglang.srt import plugins, server_args
from sglang.srt.layers.attention import attention_registry
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
from sglang.srt.plugins.hook_registry import HookRegistry

import mla_plugin
from mla_plugin.compat import sglang as adapter
from mla_plugin.compat.sglang import dispatch, refusals, releases
from mla_plugin.compat.sglang.backend import MLAPluginAttnBackend
from tests.compat.sglang.parts import arguments, runner, shared_by
from tests.repository.project import pyproject

HAS = releases.installed()
CHUNKS = server_args if HAS.chunk_names else importlib.import_module("sglang.srt.model_executor.model_runner")


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """The plug-in as SGLang loads it, from the entry point of pyproject.toml."""
    ((group, named),) = [x for x in pyproject()["project"]["entry-points"].items() if x[0].startswith("sglang.")]
    found = [importlib.metadata.EntryPoint(name, value, group) for name, value in named.items()]
    monkeypatch.setattr(plugins, "entry_points", lambda *, group: [x for x in found if x.group == group])
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()


@pytest.fixture(autouse=True)
def one_rank():
    with shared_by(1, 0):
        yield


@pytest.fixture
def said(caplog, monkeypatch):
    """What the adapter logs, at any log level of SGLang."""
    ours = logging.getLogger("sglang.mla_plugin")
    monkeypatch.setattr(ours, "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, logger=ours.name):
        yield caplog


def test_it_is_a_choice():
    assert attention_registry.ATTENTION_BACKENDS["mla_plugin"] is adapter.create
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        given = ["--model-path", "m", f"--{flag.replace('_', '-')}", "mla_plugin"]
        assert getattr(parser.parse_args(given), flag) == "mla_plugin"
    assert "mla_plugin" in CHUNKS.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS


def test_it_is_loaded_again_without_a_change(said):
    def state():
        lists = (server_args.ATTENTION_BACKEND_CHOICES, CHUNKS.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS)
        return [list(x) for x in (*lists, *HookRegistry._hooks.values(), attention_registry.ATTENTION_BACKENDS.items())]

    before = state()
    mla_plugin.register("sglang")
    assert state() == before
    assert not said.records


def test_another_plugin_keeps_the_name(monkeypatch, said):
    monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, "mla_plugin", len)
    adapter.register()
    assert attention_registry.ATTENTION_BACKENDS["mla_plugin"] is len
    assert "the attention backend mla_plugin is another plugin's" in said.text


def test_an_older_sglang(monkeypatch):
    monkeypatch.setattr(sglang, "__version__", "0.5.10.post1")
    with pytest.raises(ImportError, match=r"sglang 0\.5\.10\.post1 is installed, mla_plugin needs >= 0\.5\.11"):
        mla_plugin.register("sglang")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_runner_gets_it(dtype, said):
    given = runner(dtype, kv_index_translator=object())
    backend = attention_registry.ATTENTION_BACKENDS["mla_plugin"](given)
    assert type(backend) is MLAPluginAttnBackend
    for name in ("req_to_token_pool", "token_to_kv_pool", "kv_index_translator"):  # SGLang reads them off it
        assert getattr(backend, name) is getattr(given, name)
    assert f"mla-plugin {mla_plugin.__version__} computes MLA attention." in said.text
    assert FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count("mla_plugin") == 1


def test_a_release_that_was_not_tested(monkeypatch, said):
    adapter.create(runner())
    assert "newer" not in said.text
    monkeypatch.setattr(sglang, "__version__", "0.99.dev3+g1234567")
    adapter.create(runner())
    assert f"SGLang is newer than {releases.NEWEST}, the newest release that mla-plugin was tested with" in said.text


@pytest.mark.parametrize(
    ("mode", "prefix", "new", "disabled", "method"),
    [
        ("DECODE", [], [1, 1], False, "MLA"),
        ("TARGET_VERIFY", [], [4, 4], False, "MLA"),
        ("EXTEND", [0, 0], [9, 60], False, "MHA_ONE_SHOT"),
        ("EXTEND", [1, 8], [9, 60], False, "MHA_ONE_SHOT"),
        ("EXTEND", [100, 0], [9, 60], False, "MHA_CHUNKED_KV"),
        ("EXTEND", [100, 0], [9, 60], True, "MLA"),
        ("MIXED", [90, 5], [1, 4], False, "MHA_ONE_SHOT"),
    ],
)
def test_what_layers_dispatch(mode, prefix, new, disabled, method, monkeypatch):
    adapter.create(runner())
    lengths = torch.tensor([a + b for a, b in zip(prefix or [5, 5], new, strict=True)])
    forward_batch = SimpleNamespace(forward_mode=ForwardMode[mode], seq_lens_cpu=lengths, attn_cp_metadata=None)
    forward_batch.extend_prefix_lens_cpu = prefix or None
    forward_batch.get_max_chunk_capacity = lambda: 100
    attn = SimpleNamespace(disable_chunked_prefix_cache=disabled)
    handler = handlers.AttentionBackendRegistry.get_handler("mla_plugin")
    assert handler(attn, forward_batch) is AttnForwardMethod[method]
    captured = [x for x in vars(handlers) if x.startswith("is_in_") and "piecewise" in x]
    for name in captured:
        monkeypatch.setattr(handlers, name, lambda: True)
    assert handler(attn, forward_batch) is AttnForwardMethod.MLA
    assert captured


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_prefixes_are_absorbed_where_sglang_cannot_read_them(capability, kept, monkeypatch):
    """Triton, in which SGLang reads them, has no e4m3 below 8.9."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    given = runner(kv_cache_dtype=kept)
    given.device = "cuda"
    assert list(refusals.of_runner(given)) == []
    dispatch.register(expands_prefixes=refusals.expands_prefixes(given))
    handler = handlers.AttentionBackendRegistry.get_handler("mla_plugin")
    is_readable = kept == torch.bfloat16 or capability >= (8, 9)
    for prefix, is_expanded in ([0, 0], True), ([0, 7], is_readable):
        forward_batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, attn_cp_metadata=None)
        forward_batch.extend_prefix_lens_cpu, forward_batch.seq_lens_cpu = prefix, torch.tensor([9, 9])
        forward_batch.get_max_chunk_capacity = lambda: 100
        attn = SimpleNamespace(disable_chunked_prefix_cache=False)
        assert handler(attn, forward_batch) is AttnForwardMethod["MHA_ONE_SHOT" if is_expanded else "MLA"]


REFUSED = [
    (
        {"kv_cache_dtype": "fp8_e5m2"},
        "kv_cache_dtype='fp8_e5m2', expected one of auto, bf16, bfloat16, fp8_e4m3: the kernels read no other numbers",
    ),
    ({"kv_cache_dtype": "fp4_e2m1"}, "kv_cache_dtype='fp4_e2m1', expected"),
    ({"kv_cache_dtype": "mxfp8"}, "kv_cache_dtype='mxfp8', expected"),
    ({"attn_cp_size": 2}, "attn_cp_size=2, expected 1: there is no context parallelism"),
    ({"dllm_algorithm": "LowConfidence"}, "dllm_algorithm='LowConfidence', expected None"),
    ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm='NGRAM', expected one of EAGLE, EAGLE3, NEXTN"),
    (
        {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
        "speculative_eagle_topk=4, expected 1: a tree of drafts has a mask, and the kernels have none",
    ),
    (
        {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1},
        "speculative_draft_attention_backend=None, expected one of flashinfer, fa3: it verifies drafts",
    ),
    (
        {"speculative_algorithm": "EAGLE", "speculative_draft_attention_backend": "fa3", "dcp_size": 2},
        "speculation with dcp_size=2, expected 1",
    ),
    (
        {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full"))},
        "cuda_graph_config[prefill].backend='full', expected one of disabled, tc_piecewise",
    ),
    ({"cuda_graph_backend_prefill": "breakable"}, "cuda_graph_config[prefill].backend='breakable', expected"),
]


@pytest.mark.parametrize(("changed", "reason"), REFUSED)
def test_arguments_that_are_refused(changed, reason):
    args = arguments(**changed)
    assert [x for x in refusals.of_arguments(args) if x.startswith(reason)]
    with pytest.raises(ValueError, match="--attention-backend mla_plugin cannot serve this: ") as error:
        adapter.create(runner(server_args=args))
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_cache_dtype": "bf16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"speculative_algorithm": "EAGLE", "speculative_draft_attention_backend": "flashinfer"},
        {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="tc_piecewise"))},
    ],
)
def test_arguments_that_are_taken(changed):
    assert list(refusals.of_arguments(arguments(**changed))) == []


def test_a_shared_cache_needs_a_release_that_has_it():
    found = list(refusals.of_arguments(arguments(dcp_size=2)))
    expected = "dcp_size=2, expected 1: decode context parallelism needs sglang >= 0.5.16"
    assert found == ([] if HAS.shared_cache else [expected])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"use_mla_backend": False}, "a model without MLA"),
        ({"is_draft_worker": True}, "a draft model: pass --speculative-draft-attention-backend flashinfer"),
        (
            {"kv_cache_dtype": torch.float8_e5m2},
            "a cache of torch.float8_e5m2 for a model in torch.bfloat16, expected the same dtype or torch.float8_e4m3",
        ),
        ({"kv_cache_dtype": torch.bfloat16, "dtype": torch.float16}, "a cache of torch.bfloat16 for a model in torch."),
        ({"dtype": torch.float32}, "dtype=torch.float32, expected bfloat16 or float16"),
    ],
)
def test_models_that_are_refused(changed, reason):
    with pytest.raises(ValueError, match=reason):
        adapter.create(runner(**changed))


@pytest.mark.parametrize(("name", "reason"), [("index_topk", "sparse attention"), ("llama_4_scaling", "scaling, ex")])
def test_models_that_their_configuration_refuses(name, reason):
    given = runner()
    setattr(given.model_config.hf_config, name, 2048)
    with pytest.raises(ValueError, match=reason):
        adapter.create(given)


def test_devices_that_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    shared = {"server_args": arguments(dcp_size=2), "device": "cuda"}
    if HAS.shared_cache:
        reason = r"dcp_size=2 with a cache of torch.float8_e4m3fn below compute capability 8.9: prefixes are absorbed"
        with pytest.raises(ValueError, match=reason):
            adapter.create(runner(**shared, kv_cache_dtype=torch.float8_e4m3fn))
        assert list(refusals.of_runner(runner(**shared))) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 7\.5, expected 8\.0 or newer"):
        adapter.create(runner(device="cuda"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="an AMD device"):
        adapter.create(runner())


def given_arguments(**changed):
    """SGLang's own ServerArgs with the defaults of all fields, none of them resolved for a model and a device."""
    changed = {"chunked_prefill_size": -1, "served_model_name": "m", **changed}
    if not dataclasses.is_dataclass(server_args.ServerArgs):  # from 0.5.20 on it resolves nothing by itself
        return server_args.ServerArgs(model_path="m", **changed)
    args = object.__new__(server_args.ServerArgs)
    for field in dataclasses.fields(server_args.ServerArgs):
        missing = field.default_factory is dataclasses.MISSING
        value = field.default if missing else field.default_factory()
        object.__setattr__(args, field.name, None if value is dataclasses.MISSING else value)
    for name, value in {"enable_grpc": False, **changed}.items():
        object.__setattr__(args, name, value)
    return args


def test_sglangs_own_check_refuses():
    """Before it loads a model."""
    check = server_args.ServerArgs.check_server_args
    check(given_arguments(attention_backend="triton", kv_cache_dtype="fp8_e5m2"))
    check(given_arguments(attention_backend="mla_plugin"))
    check(given_arguments(attention_backend="mla_plugin", kv_cache_dtype="fp8_e4m3"))
    others = {"prefill_attention_backend": "triton", "decode_attention_backend": "triton"}
    check(given_arguments(attention_backend="mla_plugin", kv_cache_dtype="fp8_e5m2", **others))
    for chosen in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        with pytest.raises(ValueError, match="cannot serve this: kv_cache_dtype='fp8_e5m2'"):
            check(given_arguments(**{chosen: "mla_plugin", "kv_cache_dtype": "fp8_e5m2"}))
