"""``mla-plugin demo``, made short: it trains, writes, shows the backends, and notices wrong attention."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

import mla_plugin
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.cli import demo, main
from mla_plugin.hooks.attention import AttentionOutput, Plan
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan
from mla_plugin.hooks.manager import get_manager

SHORT = ("demo", "--device", "cpu", "--steps", "8", "--tokens", "12")


def test_it_trains_writes_and_agrees_with_eager(capsys: pytest.CaptureFixture[str]) -> None:
    plugins = get_manager().generation
    assert main(SHORT) == 0
    out = capsys.readouterr().out
    assert f"It writes:\n{demo.PROMPT}" in out
    for name in get_manager().backends():
        assert f"│ {name} " in out
    first, last = map(float, out.split("\nloss ")[1].split(" nats")[0].split(" -> "))
    assert last < first
    assert "step    1  loss" in out
    assert out.splitlines()[-1].startswith("passed in ")
    assert get_manager().generation == plugins + 2, "the call counter is registered once and taken away again"


def test_two_runs_are_equal() -> None:
    data = torch.tensor(list(demo.license_text().encode()))
    runs = [demo.train(demo.build_model("cpu"), data, 3, lambda loss: None) for _ in range(2)]
    assert runs[0] == runs[1]


class Falsifier:
    """Multiplies every output; eager attention, which runs no hook, is then different."""

    @mla_plugin.hookimpl(wrapper=True)
    def forward(
        self, plan: Plan | DecodePlan, tensors: AttentionTensors | DecodeTensors
    ) -> Generator[None, AttentionOutput | DecodeOutput, AttentionOutput | DecodeOutput]:
        output = yield
        return type(output)(output.out * 1.01, output.lse)


def test_attention_that_is_off_by_a_hundredth_fails(capsys: pytest.CaptureFixture[str]) -> None:
    get_manager().register(Falsifier(), "falsifier")
    try:
        assert main(SHORT) == 1
    finally:
        get_manager().unregister("falsifier")
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED in ")


def test_a_loss_that_does_not_fall_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LEARNING_RATE", 0.0)
    monkeypatch.setattr(torch, "randint", lambda low, high, size, generator: torch.zeros(size, dtype=torch.int64))
    assert main(("demo", "--device", "cpu", "--steps", "2", "--tokens", "1")) == 1


@pytest.mark.parametrize("missing", [("rich",), ("rich", "transformers")])
def test_missing_packages_are_named_with_the_command(
    missing: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else real(name))
    assert main(SHORT) == 2
    error = capsys.readouterr().err
    assert f'the demo needs {" and ".join(missing)}: pip install "mla-plugin[demo]"' in error


@pytest.mark.parametrize("steps", ["1", "0", "-3", "many"])
def test_too_few_steps(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--steps", steps])
    assert "at least 2 steps" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["0", "-3", "1005", "many"])
def test_tokens_that_cannot_be_generated_are_refused_before_training(
    tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--tokens", tokens])
    assert "a number of bytes from 1 to 1004" in capsys.readouterr().err


def test_without_a_cuda_device_there_is_no_demo_on_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_no_backend_is_a_message_not_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "sdpa")
    assert main(["demo", "--device", "cpu"]) == 1
    assert re.search("sdpa +off +excluded by MLA_PLUGIN_BLOCK", capsys.readouterr().err)


def installed_at(folder: Path, text: str | None) -> None:
    """A distribution named mla-plugin, with a licence or without."""
    information = folder / "mla_plugin-9.9.dist-info"
    (information / "licenses").mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.4\nName: mla-plugin\nVersion: 9.9\n")
    record = "mla_plugin-9.9.dist-info/METADATA,,\n"
    if text is not None:
        (information / "licenses" / "LICENSE").write_text(text)
        record += "mla_plugin-9.9.dist-info/licenses/LICENSE,,\n"
    (information / "RECORD").write_text(record)


@pytest.mark.parametrize("text", ["the text of an installed licence", None])
def test_the_licence_is_that_of_the_installation_else_of_the_checkout(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_at(tmp_path, text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    checkout = (Path(mla_plugin.__file__).parents[1] / "LICENSE").read_text()
    assert demo.license_text() == (text or checkout)


def test_no_licence_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_at(tmp_path, None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(mla_plugin, "__file__", str(tmp_path / "lib" / "mla_plugin" / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="reinstall the package"):
        demo.license_text()
