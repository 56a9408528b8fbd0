"""``mla-plugin explain``, in text and in JSON, on this machine and on described ones."""

from __future__ import annotations

import json
import shlex

import pytest
import torch

from mla_plugin import device
from mla_plugin.cli import main
from mla_plugin.cli.explain import ASSUMED, SHARED_MEMORY_PER_BLOCK
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver import survey
from tests.requests import mla_request

A100 = ("--capability", "8.0", "--cudnn-version", "9.13.0", "--cuda-version", "13.0")


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["explain", *arguments])
    return status, *capsys.readouterr()


def decision(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    return json.loads(explain(capsys, *arguments, "--json")[1])


def test_text_names_the_request_the_platform_every_backend_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*A100, "--head-dim-qk", "192", "--head-dim-v", "128", "--format", "thd", "--mask", "padding_causal")
    status, out, _ = explain(capsys, *arguments)
    lines = out.splitlines()
    assert status == 0
    for part in ("thd", "bfloat16", "192/128", "padding_causal", "sm80", "training"):
        assert part in lines[0]
    assert lines[-1] == "=> forward: triton, backward: triton"
    assert any(line.split()[:2] == ["cudnn", "refuses"] for line in lines)


def test_text_and_json_tell_what_the_library_decides(capsys: pytest.CaptureFixture[str]) -> None:
    request = mla_request(is_training=True, num_heads=128, num_kv_heads=128, max_seqlen_q=4096, max_seqlen_kv=4096)
    found = decision(capsys, *A100)
    platform = device.platform("cpu")
    packages = [list(pair) for pair in platform.packages]
    assert found["platform"]["compute_capability"] == [8, 0]
    assert found["platform"]["cudnn_version"] == [9, 13, 0]
    assert found["platform"]["shared_memory_per_block"] == SHARED_MEMORY_PER_BLOCK[8, 0]
    assert found["platform"]["packages"] == packages

    asked = found["request"]
    assert {name: getattr(request, name) for name in asked if name not in ("dtype", "window_size")} == {
        name: value for name, value in asked.items() if name not in ("dtype", "window_size")
    }
    assert (asked["dtype"], asked["window_size"]) == ("torch.bfloat16", [-1, 0])

    a100 = Platform("cuda", (8, 0), packages=platform.packages, cudnn_version=(9, 13, 0), cuda_version="13.0")
    direct = survey(request, platform=a100)
    assert found["plan"] == {"forward": direct.plan.forward_backend, "backward": direct.plan.backward_backend}
    assert [entry["backend"] for entry in found["trace"]] == [entry.backend for entry in direct.trace]
    assert found["transformer_engine"]["selected"] == direct.cascade.selected
    assert found["error"] is None


def test_the_release_of_transformer_engine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    inside = (*A100, "--host", "transformer_engine", "--package", "transformer-engine=2.14.1")
    for arguments, release in (
        (A100, "2.20.2"),
        ((*A100, "--te-release", "2.16"), "2.16"),
        (inside, "2.14.1"),
        ((*inside, "--te-release", "2.20.2+abc"), "2.20.2"),
    ):
        assert f"TransformerEngine {release}'s own selection: " in explain(capsys, *arguments)[1]
        assert decision(capsys, *arguments)["transformer_engine"]["release"] == release


def test_the_release_of_transformer_engine_decides(capsys: pytest.CaptureFixture[str]) -> None:
    """FlashAttention 2 takes unequal head dimensions from 2.17 on."""
    arguments = (*A100, "--package", "flash-attn=2.8.3", "--te-release")
    assert decision(capsys, *arguments, "2.17")["transformer_engine"]["selected"] == "flash2"
    assert decision(capsys, *arguments, "2.16")["transformer_engine"]["selected"] == "unfused"


def test_every_flag_reaches_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--head-dim-qk 96 --head-dim-v 64 --heads 12 --kv-heads 4 --batch-size 3 --seqlen-q 7 --seqlen-kv 11 "
        "--dtype float16 --format sbhd --mask padding --window 5 3 --dropout 0.25 --inference --deterministic "
        "--bias post_scale_bias --host megatron --device cpu"
    )
    asked = decision(capsys, *flags.split())["request"]
    assert asked == {
        "qkv_format": "sbhd",
        "dtype": "torch.float16",
        "device_type": "cpu",
        "batch_size": 3,
        "num_heads": 12,
        "num_kv_heads": 4,
        "max_seqlen_q": 7,
        "max_seqlen_kv": 11,
        "head_dim_qk": 96,
        "head_dim_v": 64,
        "attn_mask_type": "padding",
        "window_size": [5, 3],
        "bottom_right_diagonal": True,
        "bias_type": "post_scale_bias",
        "dropout_p": 0.25,
        "deterministic": True,
        "host": "megatron",
    }
    assert decision(capsys, "--format", "thd", "--pad-between-seqs")["request"]["pad_between_seqs"] is True


def test_packages_are_added_changed_and_taken_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert "triton" in dict(decision(capsys, "--device", "cpu")["platform"]["packages"])
    flags = ("--package", "flash-attn=2.8.3", "--package", "torch=2.11.0", "--package", "triton=")
    packages = dict(decision(capsys, *flags)["platform"]["packages"])
    assert packages["flash-attn"] == "2.8.3"
    assert packages["torch"] == "2.11.0"
    assert "triton" not in packages


def test_no_backend_is_status_1_with_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    refused = ("--device", "cpu", "--env", "NVTE_UNFUSED_ATTN=0")
    status, out, _ = explain(capsys, *refused)
    assert status == 1
    assert out.splitlines()[-1] == "=> no backend"
    assert "NVTE_UNFUSED_ATTN=0" in out
    found = decision(capsys, *refused)
    assert found["plan"] is None
    assert "NVTE_UNFUSED_ATTN=0" in found["error"]


def test_env_is_laid_over_the_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    assert explain(capsys, "--device", "cpu")[0] == 1
    assert explain(capsys, "--device", "cpu", "--env", "NVTE_UNFUSED_ATTN=1")[0] == 0


def test_an_explicit_backend_never_falls_back(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = explain(capsys, "--device", "cpu", "--backend", "cudnn")
    assert status == 1
    assert "'cudnn' was requested by name" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--backend fa9",
            "no backend named 'fa9' is registered; registered: triton, fa3, fa4, fa2, flashinfer, flashmla, cudnn, "
            "sdpa",
        ),
        ("--capability 8.0 --env NVTE_FLASH_ATTN=true", "NVTE_FLASH_ATTN='true': expected an integer"),
        ("--heads 6 --kv-heads 4", "--heads 6 is not a multiple of --kv-heads 4"),
        ("--pad-between-seqs", "--pad-between-seqs needs --format thd; the format is bshd"),
        ("--device cpu --capability 8.0", "--capability describes a CUDA device"),
        ("--window -2 0", "window_size=(-2, 0)"),
        (
            "--capability 8.0 --te-release 2.9",
            "release='2.9': TransformerEngine's selection is known for 2.10 to 2.20.2",
        ),
        ("--device cpu --te-release latest", "release='latest': expected a version of TransformerEngine"),
        (
            "--capability 9.0 --host transformer_engine --mask no_mask --window 5 -1",
            "TransformerEngine would raise: window_size=(5, -1) with attn_mask_type='no_mask': expected (-1, -1) or",
        ),
        ("--decode --te-release 2.20", "--te-release does not apply to --decode"),
        ("--decode --format thd", "--format does not apply to --decode: leave it out"),
        ("--decode --mask padding", "--mask padding with --decode; expected causal or no_mask"),
        ("--decode --contiguous --page-size 32", "--page-size does not apply to --contiguous"),
        ("--page-size 32 --leftpad", "--page-size and --leftpad without --decode would have no effect: add --decode"),
        ("--rope 32", "--rope without --decode or --latent would have no effect"),
    ],
)
def test_contradictions_are_status_2(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    status, out, err = explain(capsys, *arguments.split())
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("mla-plugin: ")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--capability 80", "'80': write it as in 8.0"),
        ("--capability 9.0a", "'9.0a': write it as in 8.0"),
        ("--cudnn-version 9.8", "'9.8': write it as in 9.8.0"),
        ("--cuda-version new", "'new': write it as in 13.0"),
        ("--package flash-attn", "'flash-attn': write NAME=VALUE"),
        ("--package flash-attn=new", "'flash-attn=new': expected a version such as flash-attn=2.8.3"),
        ("--package flash_attn=2.8.3", "no decision depends on the package 'flash_attn'; flash-attn?"),
        ("--env =1", "'=1': write NAME=VALUE"),
        ("--env NVTE_FLASH_ATN=0", "no decision depends on the variable 'NVTE_FLASH_ATN'; NVTE_FLASH_ATTN?"),
        ("--env HOME=/", "MLA_PLUGIN_BACKEND, MLA_PLUGIN_BATCH_INVARIANT"),
        ("--dropout 1.0", "'1.0': expected a number 0 <= x < 1"),
        ("--dropout half", "'half': expected a number 0 <= x < 1"),
        ("--heads 0", "'0': expected a whole number, 1 or more"),
        ("--seqlen-q -5", "'-5': expected a whole number, 1 or more"),
        ("--rope -1", "'-1': expected a whole number, 0 or more"),
        ("--mask diagonal", "invalid choice: 'diagonal'"),
    ],
)
def test_unreadable_arguments(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["explain", *arguments.split()])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_cuda_device_one_must_be_described(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = explain(capsys, "--device", "cuda")
    assert status == 2
    assert "--capability 8.0" in err
    assert explain(capsys, "--device", "cuda", "--capability", "8.0")[0] == 0


def test_a_described_device_brings_versions_that_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, out, err = explain(capsys, "--capability", "9.0", "--json")
    platform = json.loads(out)["platform"]
    assert (platform["cuda_version"], tuple(platform["cudnn_version"])) == tuple(ASSUMED.values())
    assert err == "note: this PyTorch has no CUDA; assumed cuda_version=13.0, cudnn_version=(9, 20, 0)\n"
    _, out, err = explain(capsys, "--capability", "9.0", "--cudnn-version", "9.8.0", "--json")
    assert json.loads(out)["platform"]["cudnn_version"] == [9, 8, 0]
    assert err == "note: this PyTorch has no CUDA; assumed cuda_version=13.0\n"
    assert explain(capsys, *A100)[2] == ""


def test_an_unknown_capability_has_no_known_shared_memory(capsys: pytest.CaptureFixture[str]) -> None:
    platform = decision(capsys, "--capability", "99.0")["platform"]
    assert platform["compute_capability"] == [99, 0]
    assert "shared_memory_per_block" not in platform


def test_decode(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "explain --decode --capability 9.0 --heads 128 --batch-size 64 --seqlen-kv 1024 --package vllm=0.25.1"
    assert main(shlex.split(arguments)) == 0
    out = capsys.readouterr().out
    assert "decode bfloat16, batch 64, lengths 1 x 1024, 128 heads, kv_lora_rank 512, rope 64, pages of 64" in out
    assert "vllm 0.25.1, qv" in out
    assert out.splitlines()[-1] == "=> decode: fa3"


def test_decode_that_nothing_takes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "explain --decode --json --device cpu --backend fa3 --seqlen-q 3 --contiguous --leftpad --no-host-lengths "
        "--kv-lora-rank 256 --rope 32 --dtype float32"
    )
    assert main(shlex.split(arguments)) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["plan"] is None
    assert content["request"] == {
        "dtype": "torch.float32",
        "device_type": "cpu",
        "batch_size": 2,
        "seqlen_q": 3,
        "num_heads": 128,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "max_seqlen_kv": 4096,
        "causal": True,
        "has_seqlens_kv": True,
        "has_leftpad_kv": True,
    }
    reasons = {entry["backend"]: entry["reasons"] for entry in content["trace"]}
    assert "has_leftpad_kv=True, expected False" in reasons["fa3"]
    assert "no decode backend" in content["error"]


def test_decode_json_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split("explain --decode --json --device cpu --mask no_mask --seqlen-q 2")) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["plan"] == {"forward": "sdpa"}
    assert "causal" not in content["request"]


H100 = ("--capability", "9.0", "--cudnn-version", "9.20.0", "--cuda-version", "13.0")
SHORT = ("--heads", "16", "--seqlen-q", "1024")


def test_why_names_the_one_thing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = explain(capsys, *H100, *SHORT, "--package", "flash-attn-4=", "--inference", "--why", "fa4")
    assert status == 1
    lines = out.splitlines()
    assert lines[0] == "fa4 does not take this request on cuda sm90: flash-attn-4 is not installed"
    assert lines[1] == '=> pip install "mla-plugin[fa4]"'
    assert lines[2] == "   Then fa4 runs this request's forward."


def test_why_of_a_backend_that_can_run_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = explain(capsys, *H100, "--seqlen-q", "8192", "--why", "fa2")
    assert status == 0
    assert "is chosen for the forward (measured: fa2 takes" in out
    status, out, _ = explain(capsys, "--device", "cpu", "--why", "sdpa")
    assert (status, out) == (0, "sdpa runs this request's forward and backward.\n")


def test_why_as_json_beside_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    found = decision(capsys, *H100, "--env", "NVTE_FUSED_ATTN=0", "--why", "cudnn")
    assert found["plan"]["forward"] != "cudnn"
    assert (found["why"]["backend"], found["why"]["state"]) == ("cudnn", "off")
    assert found["why"]["text"].startswith("cudnn could run this request but is off: NVTE_FUSED_ATTN=0\n=> unset")
    assert found["why"]["reasons"] == ["NVTE_FUSED_ATTN=0"]
    assert found["why"]["remedy"] == [{"kind": "variable", "do": "unset NVTE_FUSED_ATTN (it is '0')"}]
    assert found["why"]["chosen"] == found["plan"]
    assert "why" not in decision(capsys, *H100)


def test_why_of_decode(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = explain(capsys, *H100, "--decode", "--contiguous", "--why", "flashinfer")
    assert status == 1
    assert "change the request: a cache in pages" in out


def test_why_of_an_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = explain(capsys, "--device", "cpu", "--why", "fa9")
    assert status == 2
    assert "no backend named 'fa9' is registered" in err


def test_help_says_how_a_running_program_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    out = capsys.readouterr().out
    assert "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1" in out
    assert "NVTE_DEBUG_LEVEL=2" in out


def test_the_sections_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = explain(capsys, *A100, "--cp-size", "4", "--cp-rank", "1")
    assert status == 0
    assert out.startswith(
        "context parallel, p2p, rank 1 of 4: 3 kinds of sections\n\nbshd bfloat16, batch 2, lengths 1024"
    )
    assert out.count("=> forward: ") == 3
    found = decision(capsys, *A100, "--cp-size", "4", "--cp-comm-type", "a2a")
    assert found["context_parallel"] == "context parallel, a2a, rank 0 of 4: 1 section"
    (section,) = found["sections"]
    assert (section["request"]["num_heads"], section["request"]["max_seqlen_q"]) == (32, 4096)
    assert section["plan"]["backward"] == "triton"
    packed = "--format thd --mask padding_causal --pad-between-seqs --cp-size 2 --batch-size 3 --host megatron"
    *_, back = decision(capsys, *A100, *packed.split())["sections"]
    assert back["request"]["max_seqlen_kv"] == 2048
    assert back["request"]["pad_between_seqs"]


def test_latents(capsys: pytest.CaptureFixture[str]) -> None:
    heads = decision(capsys, *A100, "--latent", "--seqlen-q", "131072")["request"]["num_heads"]
    assert heads == 8  # 2 x 131072 tokens of 320 numbers in 2 bytes are 160 MiB a head
    found = decision(capsys, *A100, "--latent", "--cp-size", "8", "--format", "bhsd", "--inference")
    assert found["context_parallel"] == "context parallel, latent all_gather, rank 0 of 8: 2 kinds of sections"
    assert [s["request"]["max_seqlen_kv"] for s in found["sections"]] == [256, 4096]


def test_decode_over_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--decode --cp-size 4 --cp-rank 3 --cp-interleave 64 --seqlen-q 2 --seqlen-kv 1000 --leftpad --no-host-lengths"
    )
    found = decision(capsys, *A100, *flags.split())
    (section,) = found["sections"]
    wanted = {"batch_size": 4, "seqlen_q": 1, "max_seqlen_kv": 256, "return_lse": True, "has_leftpad_kv": True}
    assert wanted.items() <= section["request"].items()
    assert not section["request"].get("has_host_lengths")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--cp-size 4 --cp-rank 4", "--cp-rank 4 with --cp-size 4; expected 0 to 3"),
        ("--cp-size 4 --seqlen-q 12", "--seqlen-q 12 over 4 ranks; expected a multiple of 8"),
        ("--cp-size 4 --mask causal_bottom_right", "cp_comm_type='all_gather' or 'a2a' takes it"),
        ("--cp-size 4 --cp-comm-type ring", "cp_comm_type='ring'; expected one of p2p, all_gather, a2a"),
        ("--cp-size 4 --dropout 0.5", "dropout_p=0.5; context parallelism takes 0"),
        ("--cp-size 4 --bias post_scale_bias", "--bias post_scale_bias with --cp-size; expected no_bias"),
        ("--latent --cp-size 2 --cp-comm-type p2p", "cp_comm_type='p2p'; latent_attention accepts: all_gather, a2a"),
        ("--latent --kv-heads 4", "--kv-heads does not apply to --latent: leave it out"),
        ("--latent --rope 192", "--rope 192 with --head-dim-qk 192"),
        (
            "--decode --latent --cp-comm-type a2a",
            "--latent and --cp-comm-type do not apply to --decode: leave them out",
        ),
        ("--cp-comm-type a2a", "--cp-comm-type without --cp-size would have no effect: add --cp-size"),
        ("--cp-size 2 --batch-invariant", "batch_invariant=True with cp_group"),
        ("--decode --cp-size 2 --batch-invariant", "batch_invariant=True with cp_group"),
        ("--latent --batch-invariant", "--batch-invariant does not apply to --latent"),
    ],
)
def test_what_ranks_cannot_do_is_status_2(capsys: pytest.CaptureFixture[str], flags: str, text: str) -> None:
    status, out, err = explain(capsys, "--device", "cpu", *flags.split())
    assert (status, out) == (2, "")
    assert text in err
