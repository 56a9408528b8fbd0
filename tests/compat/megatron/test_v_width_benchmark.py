"""``benchmarks/megatron_v_width.py`` on the CPU, where it has everything to do but to time."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import megatron_v_width as benchmark

pytestmark = pytest.mark.xdist_group("megatron")  # importing it takes three seconds


@pytest.fixture
def no_gpu_needed(monkeypatch, tmp_path) -> None:
    """Tensors on the CPU, each way run once instead of timed, results in a folder of the test's own."""
    draw = benchmark.draw
    monkeypatch.setattr(benchmark, "draw", lambda tokens, sequences, heads, _: draw(tokens, sequences, heads, "cpu"))
    monkeypatch.setattr(benchmark, "milliseconds", lambda way, leaves, params, _: float(len(way(*leaves, params))))
    monkeypatch.setattr(benchmark, "CASES", ((6, 2),))
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    monkeypatch.setattr(sys, "argv", ["megatron_v_width.py", "--heads", "2", "4", "--rounds", "1"])


@pytest.mark.usefixtures("no_gpu_needed")
def test_every_way_is_right_and_runs_with_every_number_of_heads(tmp_path, capsys):
    benchmark.main()
    record = json.loads((tmp_path / "megatron_v_width_a_CPU.json").read_text())
    assert record["refused"] == {}
    assert [row["heads"] for row in record["rows"]] == [2, 4]
    for row in record["rows"]:
        assert row["ms"] == dict.fromkeys(("padded", "recognised", "native", "qk-clip"), 6.0)
    assert capsys.readouterr().out.count("| 6 | 2 |") == 2


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_way_that_is_wrong_is_not_timed(monkeypatch, tmp_path):
    correct = benchmark.ways()["native"]
    ways = {"native": correct, "padded": lambda *arguments: 2 * correct(*arguments)}
    monkeypatch.setattr(benchmark, "ways", lambda: ways)
    with pytest.raises(SystemExit, match=r"padded was refused: out: error .* twice plain PyTorch's"):
        benchmark.main()
    record = json.loads((tmp_path / "megatron_v_width_a_CPU.json").read_text())
    assert record["refused"].keys() == {"padded"}
    assert [row["ms"].keys() for row in record["rows"]] == [{"native"}] * 2
