"""``mla-plugin bench`` measures every backend that takes the call."""

from __future__ import annotations

import json
import math

import pytest

from mla_plugin.cli import main

SMALL = ["--heads", "2", "--head-dim-qk", "24", "--head-dim-v", "16", "--seqlen", "20", "--dtype", "float32"]


def test_times_of_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", *SMALL]) == 0
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first == "2 heads, head dims 24/16, cache of 512 + 64, float32"
    assert "20 tokens" in second
    name, *cells = last.split()
    assert name == "sdpa"
    assert cells.count("TFLOP/s*") == 2, "the resolver's choice is marked in both passes"
    assert max(map(len, (first, second, last))) <= 80


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choice"] == {"forward": "sdpa", "backward": "sdpa"}
    assert 0 < found["forward"]["sdpa"] < math.inf
    assert 0 < found["backward"]["sdpa"] < math.inf
    assert found["tera_operations"] == {"forward": 2 * 400 * 40 / 1e12, "backward": 2 * 400 * 104 / 1e12}


def test_without_a_backward(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--inference", "--json", *SMALL]) == 0
    assert "backward" not in json.loads(capsys.readouterr().out)


def test_no_backend_has_status_1_and_every_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    assert main(["bench", "--device", "cpu", *SMALL]) == 1
    assert "NVTE_UNFUSED_ATTN=0" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--seqlen", "--batch-size", "--kv-lora-rank"])
def test_sizes_are_positive(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--device", "cpu", *SMALL, flag, "-1"])
    assert f"argument {flag}: '-1': expected a whole number" in capsys.readouterr().err
