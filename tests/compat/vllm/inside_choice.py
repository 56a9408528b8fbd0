"""Registration, and what vLLM's own selection makes of our answers; in a process where vLLM is one release."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from dataclasses import fields

import pytest
import torch
import vllm
import vllm.plugins
from vllm.config.attention import AttentionConfig
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.mla.prefill import registry as prefill_registry
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
from vllm.v1.attention.selector import AttentionSelectorConfig

import mla_plugin
from mla_plugin.compat import vllm as adapter
from mla_plugin.compat.vllm import releases
from mla_plugin.compat.vllm.decode import MLAPluginBackend
from mla_plugin.compat.vllm.prefill import MLAPluginPrefillBackend
from tests.repository.project import pyproject

HAS = releases.installed()
NAME = releases.name(HAS)
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
ONLY_TRITON_MLA = [(8, 0), (8, 6), (8, 9), (12, 0)]
"""Where vLLM has no other dense decode."""
FIELDS = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": True}


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """The plug-in as vLLM loads it, from the entry point of pyproject.toml."""
    ((group, named),) = [x for x in pyproject()["project"]["entry-points"].items() if x[0].startswith("vllm.")]
    found = [importlib.metadata.EntryPoint(name, value, group) for name, value in named.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [x for x in found if x.group == group])
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    yield
    registry.AttentionBackendEnum.TRITON_MLA.clear_override()


@pytest.fixture
def said(caplog, monkeypatch):
    """What the adapter logs, of whatever level vLLM was asked for."""
    ours = logging.getLogger("vllm.mla_plugin")
    monkeypatch.setattr(ours, "handlers", [caplog.handler])
    with caplog.at_level(logging.WARNING, logger=ours.name):
        yield caplog


def test_the_table_says_what_the_release_has():
    chunk = inspect.signature(MLAPrefillBackend.run_prefill_context_chunk).parameters
    assert HAS.chunk == ("chunk" in chunk)
    assert HAS.chunk != ("chunk_idx" in chunk)
    assert HAS.causal == ("causal" in {field.name for field in fields(MLACommonMetadata)})
    assert HAS.names == hasattr(registry.AttentionBackendEnum, "register")
    assert HAS.names == hasattr(prefill_registry.MLAPrefillBackendEnum, "register")


def test_both_are_chosen_by_name():
    config = AttentionConfig(backend=NAME.lower(), mla_prefill_backend=NAME.lower())
    assert config.backend.get_class() is MLAPluginBackend
    assert config.mla_prefill_backend.get_class() is MLAPluginPrefillBackend
    assert not registry.AttentionBackendEnum.TRITON_MLA.is_overridden()


def test_it_is_loaded_again_without_a_change(said):
    members = dict(registry.AttentionBackendEnum.__members__)
    adapter.load_plugin()
    mla_plugin.register("vllm")
    assert dict(registry.AttentionBackendEnum.__members__) == members
    assert not said.records


def test_another_plugin_keeps_the_name(monkeypatch, said):
    member = registry.AttentionBackendEnum[NAME]
    with monkeypatch.context() as patch:
        patch.setitem(registry._ATTN_OVERRIDES, member, "another.Backend")
        adapter.load_plugin()
        assert member.get_path() == "another.Backend"
    assert f"AttentionBackendEnum.{NAME} is another.Backend of another plugin" in said.text
    assert member.get_path() == adapter.DECODE


def test_an_older_vllm_is_left_alone(monkeypatch, said):
    """vLLM does not guard the call of a plug-in: an error would end it."""
    monkeypatch.setattr(vllm, "__version__", "0.25.0")
    adapter.load_plugin()
    assert "vllm 0.25.0 is installed, mla_plugin needs >= 0.25.1" in said.text
    with pytest.raises(ImportError, match=r"needs >= 0\.25\.1"):
        mla_plugin.register("vllm")


@pytest.mark.parametrize("version", ["dev", "unknown"])
def test_a_vllm_that_does_not_know_its_version(version, monkeypatch, said):
    """As vLLM calls itself where it was not built."""
    monkeypatch.setattr(vllm, "__version__", version)
    adapter.load_plugin()
    assert f"vllm {version!r} is installed, which names no release; mla_plugin needs >= 0.25.1" in said.text


@pytest.mark.parametrize("version", ["0.33.1", "0.34.0rc1", "0.40.0", "1.0.dev3+g1234567.cu130"])
def test_a_release_that_was_not_tested(version, monkeypatch, said):
    members = dict(registry.AttentionBackendEnum.__members__)
    monkeypatch.setattr(vllm, "__version__", version)
    if not HAS.names:  # this release's registries lack what a later one has
        monkeypatch.setattr(releases, "name", lambda has: NAME)
    adapter.load_plugin()
    expected = f"vLLM is newer than {releases.NEWEST}, the newest release that mla-plugin was tested with"
    assert {x.getMessage() for x in said.records} == {expected}
    assert dict(registry.AttentionBackendEnum.__members__) == members


def test_a_vllm_with_other_registries(monkeypatch, said):
    """vLLM goes on without the plug-in, and the log says why."""
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    monkeypatch.delattr(registry, "register_backend")
    adapter.load_plugin()
    assert "mla-plugin is not registered; vLLM runs without it." in said.text
    assert "has no attribute 'register_backend'" in said.text


def platform_of(capability):
    """vLLM's CUDA platform on a device of this compute capability."""

    class Gpu(NonNvmlCudaPlatform):
        device_name = "stub"

        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*capability)

    return Gpu


def chosen(capability, backend=None, **changed):
    return platform_of(capability).get_attn_backend_cls(backend, AttentionSelectorConfig(**{**FIELDS, **changed}), 16)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_by_name_on_every_gpu(capability, kv_cache_dtype):
    found = chosen(capability, registry.AttentionBackendEnum[NAME], kv_cache_dtype=kv_cache_dtype)
    assert found.endswith("decode.MLAPluginBackend")


@pytest.mark.parametrize("capability", ONLY_TRITON_MLA)
def test_the_override_makes_it_the_default(capability, monkeypatch):
    assert chosen(capability).endswith("TritonMLABackend")
    monkeypatch.setenv("MLA_PLUGIN_VLLM_OVERRIDE", "1")
    adapter.load_plugin()
    assert chosen(capability).endswith("MLAPluginBackend")


@pytest.mark.parametrize("value", ["0", "", "true", "yes", " 1", "01", "2", "1\n"])
def test_the_override_is_the_digit_1_alone(value, monkeypatch, said):
    monkeypatch.setenv("MLA_PLUGIN_VLLM_OVERRIDE", value)
    adapter.load_plugin()
    assert not registry.AttentionBackendEnum.TRITON_MLA.is_overridden()
    assert not said.records


def reasons(capability=(8, 6), **changed):
    config = AttentionSelectorConfig(**{**FIELDS, **changed})
    return MLAPluginBackend.validate_configuration(device_capability=DeviceCapability(*capability), **config._asdict())


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_taken(capability, page_size, dtype):
    assert reasons(capability, block_size=page_size, dtype=dtype, use_batch_invariant=True) == []
    assert reasons(capability, head_size=320, dtype=dtype, kv_cache_dtype=str(dtype).removeprefix("torch.")) == []
    assert (reasons(capability, use_non_causal=True) == []) == HAS.causal
    for name in ("fp8", "fp8_e4m3"):
        assert reasons(capability, dtype=dtype, kv_cache_dtype=name) == []


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_tokens_that_hold_their_scales_are_taken_where_prefill_reads_them(capability):
    found = reasons(capability, kv_cache_dtype="fp8_ds_mla")
    assert found == [] if HAS.packed else "mla-plugin: kv_cache_dtype='fp8_ds_mla', expected one of" in found[-1]
    shape = MLAPluginBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla")
    assert shape == (7, 64, 656)
    assert MLAPluginBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8") == (7, 64, 576)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_gpus_before_ampere_are_refused(capability):
    ours = f"mla-plugin: compute capability {capability[0]}.{capability[1]}, expected 8.0 or newer"
    assert reasons(capability) == ["compute capability not supported", ours]
    with pytest.raises(ValueError, match=ours):
        chosen(capability, registry.AttentionBackendEnum[NAME])


@pytest.mark.parametrize(
    ("changed", "ours"),
    [
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype='fp8_e5m2', expected one of auto, bfloat16, float16, fp8, fp8_e4m3",
        ),
        ({"kv_cache_dtype": "fp8_ds_mla", "head_size": 320}, "kv_cache_dtype='fp8_ds_mla'"),
        ({"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16}, "kv_cache_dtype='fp8_ds_mla'"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype='float16' of a model in torch.bfloat16, expected the same"),
        ({"dtype": torch.float32}, "dtype=torch.float32, expected bfloat16 or float16"),
        ({"use_sparse": True}, "sparse attention (DSA), expected dense"),
        ({"has_sink": True}, "attention sinks, expected a plain softmax"),
        ({"head_size": 288}, "head_size=288, expected one of 320"),
    ],
)
def test_what_is_refused_says_what_is_expected(changed, ours):
    found = reasons(**changed)
    assert f"mla-plugin: {ours}" in found[-1]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("has_sliding_window", "sliding window not supported"),
        ("use_rswa", "R-SWA not supported"),
        ("use_adaptive_verification", "device-cpu query lens mismatch not supported"),
        ("use_mm_prefix", "partial multimodal token full attention not supported"),
    ],
)
def test_what_vllm_refuses_by_our_answers(asked, reason):
    """Where the release asks for it."""
    if asked in AttentionSelectorConfig._fields:
        (found,) = reasons(**{asked: True})
        assert found.startswith(reason)


def test_a_page_size_is_refused_in_the_words_that_vllm_looks_for():
    assert reasons(block_size=8) == ["block_size not supported"]


@pytest.mark.parametrize(("default", "preferred"), [(16, 64), (64, 64), (128, 128), (48, 64)])
def test_pages_of_64_where_the_user_says_nothing(default, preferred):
    assert MLAPluginBackend.get_preferred_block_size(default) == preferred


def test_pages_come_first_where_layers_share_one_tensor():
    """As vLLM before 0.29 asks it."""
    if hasattr(MLAPluginBackend, "indexes_kv_by_block_stride"):
        assert MLAPluginBackend.indexes_kv_by_block_stride()


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("widths", [(128, 64, 128), (192, 64, 256), (64, 32, 64)])
def test_prefill_takes_every_width(capability, widths):
    asked = MLAPrefillSelectorConfig(torch.bfloat16, MLADimensions(**dict(zip(DIMENSIONS, widths, strict=True))))
    assert MLAPluginPrefillBackend.validate_configuration(DeviceCapability(*capability), asked) == []


DIMENSIONS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def test_prefill_refuses_old_gpus_and_float32():
    asked = MLAPrefillSelectorConfig(torch.float32, MLADimensions(**dict.fromkeys(DIMENSIONS, 64)))
    found = MLAPluginPrefillBackend.validate_configuration(DeviceCapability(7, 5), asked)
    assert found == ["compute capability 7.5 not supported", "dtype torch.float32 not supported"]


def test_amd_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "mla-plugin: an AMD device" in reasons()[-1]
    assert not MLAPluginPrefillBackend.is_available()
