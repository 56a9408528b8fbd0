"""What ``benchmarks.prefill_backends`` makes of its times: shares of the best, and results measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefill_backends
from benchmarks.prefill_backends import merge, shares, table
from benchmarks.prefill_cases import Case
from benchmarks.prefill_limits import TILE, TOKENS, WINDOWS, fitted, key_tiles

FORWARD, BOTH, BACKWARD, SINGLE = "forward", "training forward", "backward", "of the best single one"


def row(case: Case = prefill_backends.QUICK[0], **changes: Any) -> dict[str, Any]:
    made = {
        **case._asdict(),
        "longest": case.seqlen,
        "refused": {},
        "choice": {"forward": "fa4", "training": ["triton", "fa4"]},
        "forward": {"triton": 2.0, "fa3": 1.0, "fa4": 4.0},
        "backward": {"triton": 6.0, "fa4": 4.0},
    }
    return made | changes


def test_shares_are_of_the_best_of_each_pass_and_of_the_best_single_backend() -> None:
    assert shares(row()) == {FORWARD: 0.25, BOTH: 0.5, BACKWARD: 1.0, SINGLE: 8 / 6}


def test_a_choice_without_a_time_has_no_share() -> None:
    assert shares(row(forward={"fa3": 1.0, "fa4": 4.0})) == {FORWARD: 0.25, BACKWARD: 1.0}
    assert shares(row(backward={"triton": 6.0})) == {FORWARD: 0.25, BOTH: 0.5}
    assert shares(row(choice={"forward": "fa2", "training": ["fa2", "fa2"]})) == {}
    no_single = row(forward={"fa3": 1.0}, choice={"forward": "fa3", "training": ["fa3", "fa4"]})
    assert shares(no_single) == {FORWARD: 1.0, BOTH: 1.0, BACKWARD: 1.0}


def test_the_table_has_a_dash_where_there_is_no_share() -> None:
    whole, part = row(), row(backward={"triton": 6.0})
    lines = table([whole, part]).splitlines()
    assert lines[-2].endswith("| 0.50 1.00 1.33 |")
    assert lines[-1].endswith("| 0.50 - - |")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the kept results of one call."""
    monkeypatch.setattr(prefill_backends, "RESULTS", tmp_path)
    path = tmp_path / "prefill_backends_NVIDIA_H200.json"
    kept = row(superseded={"triton forward": 9.0, "fa4 backward": 9.0})
    path.write_text(json.dumps({"rows": [kept, row(prefill_backends.QUICK[1])]}))
    return path


def again(**times: dict[str, float]) -> dict[str, Any]:
    case = prefill_backends.QUICK[0]._asdict()
    return {
        "backend": "triton",
        "gpu": "NVIDIA H200",
        "commit": "abc",
        "packages": {"triton": "9"},
        "rows": [json.loads(json.dumps({**case, **times}))],
    }


def test_times_measured_again_are_scaled_by_the_backends_that_did_not_change(results: Path) -> None:
    """The others took twice as long this time, as on a slower day."""
    merge(again(forward={"triton": 1.0, "fa3": 2.0, "fa4": 8.0}), rest_unchanged=True)
    record = json.loads(results.read_text())
    first, second = record["rows"]
    assert first["forward"] == {"triton": pytest.approx(0.5), "fa3": 1.0, "fa4": 4.0}
    assert first["backward"] == row()["backward"]
    assert first["again"] == {"triton forward": "abc"}
    assert first["superseded"] == {"fa4 backward": 9.0}
    assert record["packages_again"] == {"abc": {"triton": "9"}}
    assert second["forward"] == row()["forward"]
    assert "again" not in second


def test_calls_not_measured_again_are_set_aside_unless_their_kernels_did_not_change(results: Path) -> None:
    merge(again(forward={"triton": 2.0, "fa3": 1.0}, backward={"fa4": 4.0}), rest_unchanged=False)
    first, second = json.loads(results.read_text())["rows"]
    assert first["superseded"] == {"fa4 backward": 9.0, "triton backward": 6.0}
    assert second["superseded"] == {"triton forward": 2.0, "triton backward": 6.0}
    assert second["forward"] == {"fa3": 1.0, "fa4": 4.0}
    merge(again(forward={"triton": 3.0}), rest_unchanged=True)  # nothing to scale it by
    assert json.loads(results.read_text())["rows"][0]["forward"]["triton"] == 2.0
    assert [path.name for path in results.parent.iterdir()] == [results.name]


def test_the_last_time_that_was_set_aside_leaves_nothing_behind(results: Path) -> None:
    record = json.loads(results.read_text())
    record["rows"][0]["superseded"] = {"triton forward": 9.0}
    results.write_text(json.dumps(record))
    merge(again(forward={"triton": 2.0, "fa3": 1.0}), rest_unchanged=True)
    assert "superseded" not in json.loads(results.read_text())["rows"][0]


@pytest.mark.parametrize("window", WINDOWS)
def test_the_key_tiles_of_a_window_are_counted(window: int) -> None:
    counts = [1 + min(tile, window // TILE) for tile in range(TOKENS // TILE)]
    assert key_tiles(window) == sum(counts) / len(counts)


def test_costs_of_tiles_are_those_that_the_times_were_made_of() -> None:
    ms = {window: 2.0 + 0.5 * key_tiles(window) for window in WINDOWS}
    found = fitted(ms, share=0.25)
    assert found["slope"] == pytest.approx(125)
    assert found["intercept"] == pytest.approx(500)
    assert found["residual"] < 1e-9
    assert fitted(ms | {128: 1.1 * ms[128]}, share=0.25)["residual"] > 0.03
