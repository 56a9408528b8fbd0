"""The lane's closing table: what is missing is never counted as passed. Proven without a GPU, over tests made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as program
from tests.gpu import lane, peers

pytest_plugins = ("pytester",)

CONFTEST = """
from tests.gpu import peers

def pytest_configure(config):
    for name in ("gpu", "peer(name)"):
        config.addinivalue_line("markers", name)
    peers.PEERS.update({"FlashInfer": lambda: "flashinfer-python is not installed", "a second GPU": lambda: None})

def pytest_collection_modifyitems(items):
    peers.skip_without(items)
"""
TESTS = """
import pytest, unittest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("n", range(3))
def test_plain(n): assert n < 2

@pytest.mark.peer("FlashInfer")
@pytest.mark.parametrize("n", range(4))
def test_flashinfer(n): raise AssertionError("it ran")

@pytest.mark.peer("a second GPU")
class TestTwo:
    def test_two(self): pass

    def test_broken(self, no_such_fixture): pass

    def test_skips_itself(self): raise unittest.SkipTest("not run: no link between the two")

def test_of_no_mark(): pass
"""
OPTIONS = ("-p", "tests.gpu.lane", "-p", "no:cacheprovider", "-m", "gpu")


@pytest.fixture
def made(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(peers, "PEERS", dict(peers.PEERS))
    monkeypatch.setattr(lane, "PEERS", peers.PEERS)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    return pytester


def counts(row: dict) -> tuple[int, ...]:
    return tuple(row[name] for name in lane.OUTCOMES)


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["one process", "another process"])
def test_what_is_missing_is_not_run(made: pytest.Pytester, tmp_path: Path, processes: tuple[str, ...]) -> None:
    file = tmp_path / "table.json"
    result = made.runpytest_inprocess(*OPTIONS, *processes, "--json", str(file))
    rows = json.loads(file.read_text())
    assert counts(rows[peers.NOTHING_ELSE]) == (3, 1, 0)
    assert counts(rows["FlashInfer"]) == (0, 0, 4)
    assert rows["FlashInfer"]["why"] == {"not run: FlashInfer: flashinfer-python is not installed": 4}
    assert counts(rows["a second GPU"]) == (1, 1, 1)
    assert rows["a second GPU"]["why"] == {"not run: no link between the two": 1}
    assert rows["FlashAttention 4"]["why"] == {"not run: FlashAttention 4: no test of this shard needs it": 1}
    result.stdout.fnmatch_lines(
        [
            "*shard 1/1: what ran and what did not*",
            f"{peers.NOTHING_ELSE} *3 *1 *0",
            "FlashInfer *0 *0 *4",
            "    not run: FlashInfer: flashinfer-python is not installed (4 tests)",
        ]
    )


def test_a_deadline(made: pytest.Pytester) -> None:
    result = made.runpytest_inprocess(*OPTIONS, "--minutes", "0")
    result.assert_outcomes(skipped=11)
    result.stdout.fnmatch_lines(["    not run: the 0 minutes were over; take more shards, or more --minutes (4 tests)"])


def test_shards_share_out_every_test(made: pytest.Pytester) -> None:
    """By the test's own name, so whatever else is collected."""
    ran = []
    for shard in ("1/3", "2/3", "3/3"):
        result = made.runpytest_inprocess(*OPTIONS, "--shard", shard)
        ran.append(
            sum(value for name, value in result.parseoutcomes().items() if name not in ("deselected", "warnings"))
        )
    assert sum(ran) == 11
    assert max(ran) < 11


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/"])
def test_what_is_no_shard(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.command(["--shard", text])
    assert "expected is such as 2/3" in capsys.readouterr().err


def test_without_a_gpu_nothing_has_passed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["--shard", "1/3"]) == 2
    assert "not run: PyTorch finds no CUDA device" in capsys.readouterr().err


def test_the_command() -> None:
    options = program.command(["--shard", "2/3", "--processes", "0", "-k", "decode"])
    assert options[options.index("-p") + 1] == "tests.gpu.lane"
    assert options[-2:] == ["-k", "decode"]
    assert "-n" not in options
    options = program.command(["--processes", "3"])
    assert options[options.index("-n") :][:4] == ["-n", "3", "--dist", "loadgroup"]


def test_a_mark_names_a_peer() -> None:
    item = type(
        "Item", (), {"nodeid": "test_x", "iter_markers": lambda self, name: [pytest.mark.peer("FlashInfr").mark]}
    )
    with pytest.raises(ValueError, match="test_x: no peer 'FlashInfr'; there are FlashAttention 2"):
        peers.of(item())  # type: ignore[arg-type]


def test_every_reason_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(peers.device, "installed_packages", lambda: (("sgl-kernel", "0.3.21"),))
    found = {name: reason() for name, reason in peers.PEERS.items()}
    assert found["FlashAttention 2"] == "flash-attn is not installed"
    assert found["FlashAttention 3"] is None
    assert found["a second GPU"] == "1 GPU, 2 are needed"
    assert found["a Hopper GPU"] == "compute_capability=(8, 0), needed is (9, 0)"
