"""``mla-plugin doctor``: each finding, and the command that fixes it."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mla_plugin import Platform, device
from mla_plugin.cli import doctor, main
from mla_plugin.hooks.manager import BackendManager
from mla_plugin.plugins.fa2 import providers
from tests.repository.project import pyproject


def test_the_report_has_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"mla-plugin \S+, Python 3\.\d+", out)
    for title in doctor.SECTIONS:
        assert f"\n{title}\n" in out
    assert f"torch {importlib.metadata.version('torch')}" in out
    assert "no variable is set" in out
    assert out.endswith("nothing is broken\n")


def test_the_report_as_json_says_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLUGIN_BACKENDS", "sdpa")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["broken"] == 1
    assert list(report["sections"]) == list(doctor.SECTIONS)
    findings = [finding for section in report["sections"].values() for finding in section]
    assert all(f"{finding['state']:<8} {finding['text']}" in shown for finding in findings)
    assert {"state", "text", "remedy"} == findings[0].keys()
    (broken,) = (finding for finding in findings if finding["state"] == "broken")
    assert broken["remedy"] == "unset MLA_PLUGIN_BACKENDS"


DECLARED = ("fa2", "fa4", "flashinfer", "megatron", "transformers", "demo")
"""The extras that doctor asks about."""


def test_needs_say_what_the_package_declares() -> None:
    """The versions that doctor asks for are those of pyproject.toml."""
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    declared = {
        (requirement.name, str(requirement.specifier))
        for text in (*project["dependencies"], *(text for name in DECLARED for text in extras[name]))
        if (requirement := Requirement(text)).name != "triton"
    }
    needed = {
        (need.name, str(SpecifierSet(f">={need.minimum}" if need.below is None else f">={need.minimum},<{need.below}")))
        for need in doctor.NEEDS
    }
    assert needed == declared


@pytest.mark.parametrize(
    ("installed", "state", "text"),
    [
        ({}, "missing", "none of flash-attn-3, vllm, sgl-kernel; needed for backend fa3"),
        ({"sgl-kernel": "0.3.21"}, "note", "sgl-kernel 0.3.21, for backend fa3, forward only"),
        ({"sgl-kernel": "0.3.21", "vllm": "0.25.1"}, "note", "vllm 0.25.1, for backend fa3, forward only"),
        ({"vllm": "0.25.1", "flash-attn-3": "3.0.0"}, "ok", "flash-attn-3 3.0.0, for backend fa3"),
    ],
)
def test_flash_attention_3_has_three_providers(
    installed: dict[str, str], state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = device.version
    flash = {name for name, _ in device.FLASH_ATTENTION_PROVIDERS["fa3"]}
    monkeypatch.setattr(device, "version", lambda name: installed.get(name) if name in flash else real(name))
    (finding,) = [finding for finding in doctor.packages() if "backend fa3" in finding.text]
    assert (finding.state, finding.text) == (state, text)
    assert (finding.remedy is None) == (state == "ok")
    assert finding.remedy is None or finding.remedy.startswith("pip install ")


@pytest.mark.parametrize(
    ("installed", "state", "text"),
    [
        (
            {"vllm": "0.14.1"},
            "missing",
            "none of flash-mla, sgl-flash-mla, vllm 0.15, sglang-kernel, sgl-kernel; needed for backend flashmla",
        ),
        ({"vllm": "0.14.1", "sgl-kernel": "0.3.21"}, "ok", "sgl-kernel 0.3.21, for backend flashmla"),
        ({"vllm": "0.25.1"}, "ok", "vllm 0.25.1, for backend flashmla"),
        ({"vllm": "0.25.1", "flash-mla": "1.0.0+48c6dc4"}, "ok", "flash-mla 1.0.0+48c6dc4, for backend flashmla"),
    ],
)
def test_flash_mla_has_five_providers(
    installed: dict[str, str], state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = device.version
    names = {name for name, _, _ in device.FLASH_MLA_PROVIDERS}
    monkeypatch.setattr(device, "version", lambda name: installed.get(name) if name in names else real(name))
    (finding,) = [finding for finding in doctor.packages() if "backend flashmla" in finding.text]
    assert (finding.state, finding.text) == (state, text)
    assert (finding.remedy is None) == (state == "ok")


@pytest.mark.parametrize(
    ("name", "version", "states"),
    [
        ("flash-attn-4", "4.0.0b36", {"ok"}),
        ("flash-attn-4", "4.0.0b4", {"missing"}),
        ("rich", None, {"missing"}),
        ("transformers", None, {"missing"}),
        ("transformers", "5.0.0", {"ok", "missing"}),
        ("transformers", "4.10", {"missing"}),
        ("torch", "2.4.0", {"broken"}),
        ("torch", "2.11.0+cu130", {"ok"}),
        ("pluggy", None, {"broken"}),
    ],
)
def test_packages(name: str, version: str | None, states: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = device.version
    monkeypatch.setattr(device, "version", lambda asked: version if asked == name else real(asked))
    findings = [finding for finding in doctor.packages() if name in finding.text]
    assert {finding.state for finding in findings} == states
    for finding in findings:
        assert (finding.remedy is None) == (finding.state == "ok")
        assert finding.remedy is None or finding.remedy.startswith("pip install ")
        assert version is None or version in finding.text


@pytest.mark.parametrize(
    ("version", "state", "text"),
    [
        (
            "2.8.3",
            "ok",
            "flash-attn 2.8.3, for deterministic training on backend fa2, which otherwise uses PyTorch's own kernel",
        ),
        ("2.6.3", "missing", "flash-attn 2.6.3 is older than 2.7"),
        ("2.8.4", "missing", "flash-attn 2.8.4 is not below 2.8.4"),
        (None, "missing", "flash-attn is not installed"),
    ],
)
def test_flash_attention_2_by_version(
    version: str | None, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What doctor calls fit is what the backend takes."""
    real = device.version
    monkeypatch.setattr(device, "version", lambda asked: version if asked == "flash-attn" else real(asked))
    (finding,) = [finding for finding in doctor.packages() if finding.text.startswith("flash-attn ")]
    assert finding.state == state
    assert finding.text.startswith(text)
    packages = () if version is None else (("flash-attn", version),)
    provider = providers.find(Platform("cuda", (9, 0), packages))
    assert isinstance(provider, providers.FlashAttn) == (state == "ok")


def test_a_missing_optional_package_is_not_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = device.version
    monkeypatch.setattr(device, "version", lambda asked: None if asked == "rich" else real(asked))
    assert main(["doctor"]) == 0
    assert '-> pip install "mla-plugin[demo]"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("driver", "cuda_version", "state", "remedy"),
    [
        (None, None, "ok", None),
        (None, "13.0", "ok", None),
        ("580.65.06", None, "broken", "pip install --force-reinstall --index-url https://pypi.org/simple torch"),
        ("470.57.02", "13.0", "broken", "nvidia-smi"),
    ],
)
def test_hardware_without_a_usable_device(
    driver: str | None, cuda_version: str | None, state: str, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    monkeypatch.setattr(device, "nvidia_driver_version", lambda: driver)
    (finding,) = doctor.hardware()
    assert (finding.state, finding.remedy) == (state, remedy)
    assert driver is None or driver in finding.text


@pytest.mark.parametrize(
    ("capability", "triton", "notes"), [((9, 0), "3.7.1", 0), ((9, 0), "3.9.0", 1), ((8, 0), "3.9.0", 0)], ids=str
)
def test_a_triton_without_our_hopper_kernels(
    capability: tuple[int, int], triton: str, notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    found = Platform("cuda", capability, packages=(("triton", triton),))
    monkeypatch.setattr(device, "platform", lambda *_: found)
    first, *rest = doctor.hardware()
    assert first.state == "ok"
    assert [finding.state for finding in rest] == ["note"] * notes
    assert all("Triton 3.9.0, the Hopper kernel needs 3.6 or 3.7" in finding.text for finding in rest)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n", "550.54.14"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06"),
        ("NVRM version: unreadable", None),
    ],
)
def test_driver_version(text: str, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert device.nvidia_driver_version() == version


@pytest.mark.parametrize(
    ("name", "text", "state", "part", "remedy"),
    [
        ("NVTE_FLASH_ATTN", "0", "ok", "is read as 0", None),
        ("NVTE_FLASH_ATTN", "true", "broken", "expected an integer", "unset NVTE_FLASH_ATTN"),
        ("NVTE_FLASH_ATN", "0", "broken", "did you mean NVTE_FLASH_ATTN?", "unset NVTE_FLASH_ATN"),
        ("MLA_PLUGIN_BLOK", "sdpa", "broken", "did you mean MLA_PLUGIN_BLOCK?", "unset MLA_PLUGIN_BLOK"),
        ("MLA_PLUGIN_UTTERLY_ELSE", "1", "broken", "is not a known variable", "unset MLA_PLUGIN_UTTERLY_ELSE"),
        ("MLA_PLUGIN_BACKEND", "fa9", "broken", "no backend named 'fa9' is registered", "unset MLA_PLUGIN_BACKEND"),
        ("MLA_PLUGIN_BLOCK", "cudnn, fa9", "broken", "no backend named 'fa9'", "unset MLA_PLUGIN_BLOCK"),
        ("MLA_PLUGIN_BLOCK", "cudnn", "ok", "('cudnn',)", None),
    ],
)
def test_variables(
    name: str, text: str, state: str, part: str, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    findings = [finding for finding in doctor.variables() if finding.state == state]
    assert any(part in finding.text and finding.remedy == remedy for finding in findings), findings
    assert main(["doctor"]) == (1 if state == "broken" else 0)


def test_other_variables_of_transformer_engine_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_TORCH_COMPILE", "0")
    assert list(doctor.variables()) == []


def test_a_broken_third_party_backend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BackendManager(load_entry_points=False)
    manager.broken["shaky"] = "ImportError: no libshaky.so"
    monkeypatch.setattr(doctor, "get_manager", lambda: manager)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "broken   shaky, from an unknown package: ImportError: no libshaky.so" in out
    assert out.endswith("1 broken\n")


@pytest.mark.parametrize(
    ("installed", "tools", "states"),
    [
        ({}, (), []),
        ({"flashinfer-python": "0.6.13"}, ("nvcc",), ["ok", "missing"]),
        ({"flashinfer-python": "0.6.13"}, (), ["missing", "missing"]),
        ({"flashinfer-python": "0.6.13", "flashinfer-jit-cache": "0.6.13"}, (), []),
    ],
)
def test_what_flashinfer_compiles_with(
    installed: dict[str, str], tools: tuple[str, ...], states: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "version", installed.get)
    monkeypatch.setattr(device, "build_tools", lambda: frozenset(tools))
    findings = list(doctor._flashinfer_compiler())
    assert [finding.state for finding in findings] == states
    assert all((finding.remedy is None) == (finding.state == "ok") for finding in findings)
