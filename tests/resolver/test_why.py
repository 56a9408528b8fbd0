"""Why a backend does not run, and what to do: each remedy is carried out, and then the backend runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import mla_plugin
from mla_plugin import DecodeRequest, Platform
from mla_plugin.arguments.decode import Profile
from mla_plugin.hooks.manager import BUILTIN_BACKENDS
from mla_plugin.resolver import survey, survey_decode
from mla_plugin.resolver.changes import Situation, of_device, of_packages
from mla_plugin.resolver.why import why
from tests.requests import A100, CPU, mla_request

H100 = Platform(
    "cuda",
    (9, 0),
    packages=(("torch", "2.13.0"), ("triton", "3.7.1")),
    cudnn_version=(9, 20, 0),
    cuda_version="13.0",
)
LARGE = mla_request(num_heads=128, num_kv_heads=128, max_seqlen_q=8192, max_seqlen_kv=8192)
"""A call whose fastest passes of those that come with PyTorch are Triton's."""
GROUPED = mla_request(is_training=True, num_heads=64, num_kv_heads=4, max_seqlen_q=1024, max_seqlen_kv=1024)
"""Likewise, but for the backward, where cuDNN's is faster."""
B200 = dataclasses.replace(H100, compute_capability=(10, 0))
DECODE = DecodeRequest(torch.bfloat16, "cuda", 8, 1, 128, 512, 64, max_seqlen_kv=4096)


def with_packages(platform: Platform = H100, **versions: str) -> Platform:
    packages = dict(platform.packages) | {name.replace("_", "-"): version for name, version in versions.items()}
    return dataclasses.replace(platform, packages=tuple(sorted(packages.items())))


def ask(name: str, request=None, platform: Platform = H100, environ=None, **rest):
    return why(name, request or LARGE, platform=platform, environ=environ or {}, **rest)


def kinds(answer) -> list[str]:
    return [change.kind for change in answer.remedy]


def test_what_runs_says_so():
    answer = ask("triton")
    assert (answer.state, answer.text) == ("runs", "triton runs this request's forward.")
    packages = with_packages(vllm="0.25.1")
    answer = ask("fa3", LARGE.replace(is_training=True), packages)
    assert answer.text == "fa3 runs this request's forward; triton runs the backward."


def test_what_is_slower_says_by_how_much():
    answer = ask("fa2", LARGE.replace(is_training=True))
    assert answer.state == "behind"
    assert answer.chosen["forward"] == "triton"
    assert "triton is chosen for the forward (measured: fa2 takes 3." in answer.text
    assert "triton is chosen for the backward (measured: fa2 takes 2." in answer.text
    assert answer.text.endswith("=> to run it anyway, request it by name: backend='fa2', or MLA_PLUGIN_BACKEND=fa2")


def test_what_only_runs_the_forward_is_not_compared_for_the_backward():
    """FlashAttention 4's backward would be faster, and vLLM's FlashAttention 3 was never measured."""
    answer = ask("fa4", GROUPED, with_packages(flash_attn_4="4.0.0b36"))
    assert answer.chosen == {"forward": "triton", "backward": "cudnn"}
    assert answer.reasons[0].startswith("measured: fa4 takes 1.")
    assert answer.reasons[1].startswith("forward only: training with head_dim_qk=192, head_dim_v=128, num_heads=64")
    assert f"cudnn is chosen for the backward ({answer.reasons[1]})" in answer.text
    answer = ask("fa3", GROUPED, with_packages(vllm="0.25.1"))
    assert answer.reasons[1] == "forward only: is_training=True: vllm has no backward, flash-attn-3 has"
    assert answer.text.splitlines()[-1] == (
        "   It cannot run both passes: is_training=True: vllm has no backward, flash-attn-3 has."
    )


def test_inside_transformer_engine_one_order_places_both_passes():
    request = mla_request(head_dim_qk=128, host="transformer_engine", is_training=True)
    answer = ask("fa2", request, with_packages(flash_attn="2.8.3"))
    assert answer.chosen == {"forward": "cudnn", "backward": "cudnn"}
    assert answer.reasons == (
        "that is TransformerEngine's order",
        "this request's backward runs on the forward's backend",
    )
    answer = ask("triton", mla_request(dtype=torch.float64, host="transformer_engine", window_size=(512, 0)))
    assert answer.text.splitlines()[1:] == [
        "=> change the request: bfloat16",
        "   Then it runs when requested by name, backend='triton': TransformerEngine's own choice applies unless "
        "NVTE_MLA_TRITON=1 and its conditions hold",
    ]


def test_the_release_of_transformer_engine_counts():
    strict, platform = {"MLA_PLUGIN_STRICT_TE": "1"}, with_packages(flash_attn="2.8.3")
    assert ask("fa2", mla_request(), platform, strict, te_release="2.16").state == "off"
    assert ask("fa2", mla_request(), platform, strict, te_release="2.17").state == "behind"


def test_this_machine_and_its_environment_are_the_default(monkeypatch):
    request = mla_request(device_type="cpu")
    assert why("sdpa", request).state == "runs"
    assert why("fa2", request).text.startswith("fa2 does not take this request on cpu: ")
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    answer = why("sdpa", request)
    assert (answer.state, answer.reasons) == ("off", ("NVTE_UNFUSED_ATTN=0",))
    with pytest.raises(TypeError, match="why=None; expected the name of a backend"):
        why(None, request)


def test_where_nothing_was_measured_it_says_so():
    answer = ask("fa2", platform=A100)
    assert "no measurements for compute_capability=(8, 0); expected order on such GPUs: triton, fa2" in answer.text


def test_the_fallback_comes_last():
    assert "sdpa is the fallback, tried after the fused backends" in ask("sdpa").text


@pytest.mark.parametrize("strict", [{"MLA_PLUGIN_STRICT_TE": "1"}, {}])
def test_transformer_engines_order_is_named(strict):
    request = mla_request(head_dim_v=128, head_dim_qk=128, host="direct" if strict else "transformer_engine")
    answer = ask("fa2", request, with_packages(flash_attn="2.8.3"), strict)
    assert answer.chosen == {"forward": "cudnn"}
    assert "(that is TransformerEngine's order)" in answer.text


def test_a_variable_that_puts_triton_first_is_named():
    answer = ask("cudnn", environ={"NVTE_MLA_TRITON": "1"})
    assert "(NVTE_MLA_TRITON=1 puts triton first)" in answer.text


@pytest.mark.parametrize(
    ("name", "platform", "command"),
    [
        ("fa4", H100, 'pip install "mla-plugin[fa4]"'),
        ("fa4", with_packages(flash_attn_4="4.0.0b4"), 'pip install --upgrade "flash-attn-4>=4.0.0b36"'),
        ("fa3", H100, "flash-attention.git#subdirectory=hopper"),
        ("triton", dataclasses.replace(H100, packages=()), "pip install triton"),
        ("cudnn", dataclasses.replace(H100, cudnn_version=(9, 8, 0)), "pip install --upgrade nvidia-cudnn-cu13"),
    ],
)
def test_a_missing_package_has_its_command(name, platform, command):
    answer = ask(name, platform=platform)
    assert (answer.state, kinds(answer)) == ("refuses", ["package"])
    assert command in answer.text.splitlines()[1]
    assert f"Then {name} " in answer.text.splitlines()[2]


def test_a_pytorch_without_cuda_is_what_to_install():
    answer = ask("cudnn", platform=dataclasses.replace(H100, cuda_version=None))
    assert kinds(answer) == ["package"]
    assert "=> install a CUDA build of PyTorch: https://pytorch.org/get-started/locally" in answer.text


def test_pip_brings_the_companions_of_a_package_that_is_upgraded():
    old = with_packages(flashinfer_python="0.2.0", flashinfer_jit_cache="0.2.0")
    answer = ask("flashinfer", DECODE.replace(page_size=64, has_host_lengths=True), old)
    assert [change.text for change in answer.remedy] == ['pip install --upgrade "flashinfer-python>=0.6.12"']
    packages = dict(answer.remedy[0].apply(Situation(DECODE, old, {})).platform.packages)
    assert packages["flashinfer-jit-cache"] == packages["flashinfer-python"] == "0.7.2"
    assert "flashinfer-cubin" not in packages


def test_packed_sequences_are_a_remedy_for_padding():
    answer = ask("fa2", mla_request(attn_mask_type="padding_causal"))
    assert "=> change the request: packed sequences (qkv_format='thd')" in answer.text


def test_another_package_for_the_backward():
    answer = ask("fa3", mla_request(is_training=True, dropout_p=0.0), with_packages(vllm="0.25.1"), backend="triton")
    assert answer.state == "refuses"
    assert kinds(answer) == ["package"]


def test_only_the_gpu_is_in_the_way():
    answer = ask("fa3", platform=with_packages(A100, flash_attn_3="3.0.0"))
    assert kinds(answer) == ["device"]
    assert answer.text.splitlines()[1] == "=> needs another GPU: a GPU of compute capability 9.0 (such as H100 or H200)"
    answer = ask("fa3", platform=B200)
    assert kinds(answer) == ["package", "device"]
    assert (
        "=> needs another GPU: a GPU of compute capability 9.0 (such as H100 or H200); and pip install" in answer.text
    )


def test_on_the_cpu_a_gpu_is_needed():
    answer = ask("triton", mla_request(device_type="cpu"), CPU)
    assert kinds(answer)[-1] == "device"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dropout_p": 0.1}, "no dropout (dropout_p=0)"),
        ({"dtype": torch.float32}, "bfloat16"),
        ({"bias_type": "post_scale_bias", "bias_shape": "11ss"}, "no additive bias"),
        ({"attn_mask_type": "arbitrary"}, "a mask given by causality, windows or lengths"),
        ({"window_size": (128, 0)}, "no sliding window"),
        ({"max_seqlen_kv": 4096}, "as many keys as queries"),
        (
            {"qkv_format": "thd", "attn_mask_type": "padding_causal"},
            "a dense batch without padding (qkv_format='bshd', attn_mask_type='causal')",
        ),
        (
            {"qkv_format": "sbhd", "attn_mask_type": "padding"},
            "a dense batch without padding (qkv_format='sbhd', attn_mask_type='no_mask')",
        ),
    ],
)
def test_a_flag_of_the_request_is_the_remedy(changes, words):
    answer = ask("cudnn", mla_request(**changes))
    assert answer.state == "refuses"
    assert kinds(answer) == ["request"]
    assert f"=> change the request: {words}" in answer.text


def test_a_variable_is_the_remedy():
    off = {"NVTE_FUSED_ATTN": "0", "NVTE_DEBUG": "0"}
    answer = ask("cudnn", GROUPED, environ=off)
    assert answer.state == "off"
    assert answer.text.splitlines()[:2] == [
        "cudnn could run this request but is off: NVTE_FUSED_ATTN=0",
        "=> unset NVTE_FUSED_ATTN (it is '0')",
    ]
    assert answer.text.splitlines()[2] == "   Then cudnn runs this request's backward; triton runs the forward."


def test_a_blocked_backend():
    answer = ask("cudnn", environ={"MLA_PLUGIN_BLOCK": "cudnn,fa2"})
    assert "=> remove cudnn from MLA_PLUGIN_BLOCK=cudnn,fa2" in answer.text


def test_a_backend_asked_for_by_name_keeps_the_others_out():
    answer = ask("cudnn", backend="triton")
    assert "=> leave out backend='triton'" in answer.text
    answer = ask("cudnn", environ={"MLA_PLUGIN_BACKEND": "triton"})
    assert "=> unset MLA_PLUGIN_BACKEND (it is 'triton')" in answer.text


def test_what_transformer_engines_rules_leave_out():
    request = mla_request(host="transformer_engine")
    answer = ask("triton", request, H100)
    assert "=> set NVTE_MLA_TRITON=1" in answer.text
    answer = ask("fa4", request, with_packages(flash_attn_3="3.0.0", flash_attn_4="4.0.0b36"))
    assert "TransformerEngine rule 5" in answer.text
    assert "=> to run it anyway, request it by name: backend='fa4'" in answer.text


def test_what_nothing_changes_is_said():
    answer = ask("fa3", mla_request(head_dim_qk=320, head_dim_v=320))
    assert (answer.state, answer.remedy) == ("impossible", ())
    last = answer.text.splitlines()[-1]
    assert last.startswith("=> fa3 cannot compute this: head_dim_qk=320, head_dim_v=320, expected")
    assert "not installed" not in last


@pytest.mark.parametrize("platform", [CPU, A100, H100, B200], ids=["cpu", "A100", "H100", "B200"])
@pytest.mark.parametrize(
    "request_",
    [
        mla_request(),
        mla_request(is_training=True),
        mla_request(is_training=True, dropout_p=0.1, dtype=torch.float32),
        mla_request(qkv_format="thd", attn_mask_type="padding_causal", pad_between_seqs=True),
        mla_request(num_kv_heads=4, is_training=True, host="megatron"),
        mla_request(host="transformer_engine"),
        mla_request(head_dim_qk=576, head_dim_v=512),
        DECODE,
        DECODE.replace(page_size=64, has_seqlens_kv=True),
        DECODE.replace(has_leftpad_kv=True, dtype=torch.float32),
    ],
)
@pytest.mark.parametrize("environ", [{}, {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_MLA_TRITON": "0"}])
def test_every_remedy_works_and_nothing_in_it_is_idle(request_, platform, environ):
    request_ = request_.replace(device_type=platform.device_type)

    def can_run(name: str, situation: Situation, asked: str | None) -> bool:
        given = {"backend": asked, "platform": situation.platform, "environ": situation.environ}
        decide = survey_decode if isinstance(situation.request, DecodeRequest) else survey
        decision = decide(situation.request, **given)
        return next(entry for entry in decision.trace if entry.backend == name).accepted

    for name in BUILTIN_BACKENDS:
        answer = why(name, request_, platform=platform, environ=environ)
        now = Situation(request_, platform, environ)
        asked = None if answer.state == "off" else name
        assert can_run(name, now, None) == (answer.state in ("runs", "behind"))
        changed = now
        for change in answer.remedy:
            changed = change.apply(changed)
        if answer.remedy:
            assert can_run(name, changed, asked)
        for left_out in answer.remedy:
            fewer = now
            for change in answer.remedy:
                fewer = fewer if change is left_out else change.apply(fewer)
            assert not can_run(name, fewer, asked)


def test_decode_is_asked_about_too():
    answer = ask("flashinfer", DECODE)
    assert kinds(answer)[:1] == ["package"]
    assert 'pip install "mla-plugin[flashinfer]"' in answer.text
    assert "a cache in pages of 64 (page_table=...)" in answer.text
    even = DECODE.replace(batch_size=64, max_seqlen_kv=1024, has_host_lengths=True, profile=Profile.of([1024] * 64))
    answer = ask("triton", even.replace(has_seqlens_kv=True), with_packages(vllm="0.25.1"))
    assert "fa3 is chosen for the decode (measured: triton takes 1." in answer.text


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("fa9", ValueError, "no backend named 'fa9' is registered; registered: triton"),
        ("", ValueError, "backend=''"),
        (3, TypeError, "backend=3"),
    ],
)
def test_names_that_are_off(name, error, message):
    with pytest.raises(error) as caught:
        mla_plugin.explain(mla_request(), platform=H100, why=name)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["triton", "fa2", "cudnn", "fa4"])
def test_what_transformer_engine_raises_for_on_a_gpu_is_no_remedy_on_the_cpu(name):
    """Its selection asserts that a window has two sides; on the CPU it is not asked."""
    window = mla_request(attn_mask_type="no_mask", window_size=(-1, 5), device_type="cpu")
    for request in (window.replace(host="transformer_engine"), window):
        given = {"te_release": "2.20"} if request is window else {}
        answer = ask(name, request, CPU, **given)
        assert answer.state in ("refuses", "impossible")
        assert "device_type='cpu', expected 'cuda'" in answer.text
        sided = ask(name, request.replace(window_size=(5, 5)), CPU, **given)
        assert sided.state == "refuses"
    with pytest.raises(ValueError, match="has_score_mod=True"):
        ask(name, mla_request(has_score_mod=True), te_release="2.14")
    assert ask(name, mla_request(has_score_mod=True, device_type="cpu"), CPU, te_release="2.14").state == "refuses"


def test_of_the_variables_only_those_that_keep_it_off_are_named():
    environ = {"NVTE_DEBUG": "0", "NVTE_FLASH_ATTN": "0", "NVTE_FLASH_ATTN_V3": "0", "NVTE_FUSED_ATTN": "1"}
    answer = ask("fa3", mla_request(), with_packages(flash_attn_3="3.0.0"), environ)
    assert [change.text for change in answer.remedy] == [
        "unset NVTE_FLASH_ATTN (it is '0')",
        "unset NVTE_FLASH_ATTN_V3 (it is '0')",
    ]


def test_a_variable_that_was_never_read_may_have_any_value():
    """NVTE_FLASH_ATTN=0 keeps the versions' variables from being read; unset, they are."""
    environ = {"NVTE_FLASH_ATTN": "0", "NVTE_FLASH_ATTN_V3": "on"}
    answer = ask("fa3", mla_request(), with_packages(flash_attn_3="3.0.0"), environ)
    assert answer.state == "off"
    assert [change.text for change in answer.remedy] == [
        "unset NVTE_FLASH_ATTN (it is '0')",
        "unset NVTE_FLASH_ATTN_V3 (it is 'on')",
    ]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [(None, (9, 20, 0)), ((9, 8, 0), (9, 20, 0)), ((9, 25, 1), (9, 25, 1)), ((10, 0, 0), (10, 0, 0))],
)
def test_an_upgrade_of_cudnn_never_takes_a_newer_one_away(found, wanted):
    now = Situation(mla_request(), dataclasses.replace(H100, cudnn_version=found), {})
    (upgrade,) = of_packages("cudnn", now)
    assert upgrade.text == "pip install --upgrade nvidia-cudnn-cu13"
    assert upgrade.apply(now).platform.cudnn_version == wanted
    assert of_device((10, 0), now).apply(now).platform.cudnn_version == (found or (9, 20, 0))
