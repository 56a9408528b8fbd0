"""The pytest plugin of ``python -m tests.gpu``: one shard of the tests, a limit of time, and what was not run."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.peers import NOTHING_ELSE, PEERS

OUTCOMES = ("passed", "failed", "not run")


def shard_of(text: str) -> tuple[int, int]:
    """``2/3`` is the second of three.

    Raises:
        ValueError: it is no such text.
    """
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count)):
        raise ValueError(f"--shard={text}, expected is such as 2/3, from 1/3 to 3/3")
    return int(first), int(count)


def is_in(nodeid: str, shard: tuple[int, int]) -> bool:
    """Each test is in one shard, whatever else is collected."""
    return zlib.crc32(nodeid.encode()) % shard[1] == shard[0] - 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """The lane's options."""
    parser.addoption("--shard", default="1/1", help="which part of the tests, such as 2/3")
    parser.addoption("--minutes", type=float, default=10.0, help="tests that would start later are not run")
    parser.addoption("--json", metavar="FILE", help="write the closing table as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """The clock starts in every process."""
    config.stash[DEADLINE] = time.monotonic() + 60 * config.getoption("minutes")


DEADLINE = pytest.StashKey[float]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other shards."""
    shard = shard_of(config.getoption("shard"))
    others = [item for item in items if not is_in(item.nodeid, shard)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if is_in(item.nodeid, shard)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Nothing starts after the time is over."""
    if time.monotonic() > item.config.stash[DEADLINE]:
        minutes = item.config.getoption("minutes")
        pytest.skip(f"not run: the {minutes:g} minutes were over; take more shards, or more --minutes")


def table(stats: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """What each peer's tests came to: counts of ``OUTCOMES``, and ``why`` with how often each reason was given."""
    rows: dict[str, dict[str, Any]] = {
        name: {**dict.fromkeys(OUTCOMES, 0), "why": Counter()} for name in (NOTHING_ELSE, *PEERS)
    }
    for outcome, kinds in (("passed", ("passed",)), ("failed", ("failed", "error")), ("not run", ("skipped",))):
        for report in (report for kind in kinds for report in stats.get(kind, [])):
            for name in dict(getattr(report, "user_properties", ())).get("peers") or [NOTHING_ELSE]:
                rows[name][outcome] += 1
                if outcome == "not run":
                    rows[name]["why"][str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
    for name, row in rows.items():
        if name != NOTHING_ELSE and not any(row[outcome] for outcome in OUTCOMES):
            row["why"][f"not run: {name}: no test of this shard needs it"] += 1
    return rows


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The closing table."""
    rows = table(terminalreporter.stats)
    terminalreporter.section(f"shard {config.getoption('shard')}: what ran and what did not")
    terminalreporter.write_line(f"{'needs':28} {'passed':>7} {'failed':>7} {'not run':>8}")
    for name, row in rows.items():
        terminalreporter.write_line(f"{name:28} {row['passed']:7} {row['failed']:7} {row['not run']:8}")
        for reason, count in row["why"].most_common():
            terminalreporter.write_line(f"    {reason}" + (f" ({count} tests)" if row["not run"] else ""))
    if config.getoption("json"):
        Path(config.getoption("json")).write_text(json.dumps(rows, indent=1) + "\n")
