"""What a backend computes, refuses and fails, feature by feature; for the terminal, and as JSON and Markdown."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_plugin.hooks.types import Refused

FEATURES: dict[str, tuple[str, ...]] = {
    "attention": (
        *("bshd", "sbhd", "bhsd", "thd"),
        *("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right"),
        *("arbitrary", "window", "unequal_lengths", "empty_sequences", "pad_between_seqs", "lead", "tail"),
        *("gqa", "mqa", "head_dim_qk!=head_dim_v", "head_dim>256"),
        *("post_scale_bias", "pre_scale_bias", "bias_requires_grad", "return_lse", "deterministic"),
        *("bf16", "fp16", "fp32", "fp64", "scores_large", "scores_overflow", "non_contiguous", "inference", "training"),
    ),
    "decode": (
        *("paged", "contiguous", "several_queries", "all_keys", "leftpad", "return_lse"),
        *("host_lengths", "no_host_lengths", "full_cache", "shared_pages", "pair_of_caches"),
        *("bf16", "fp16", "fp32", "scores_large", "strided_queries", "strided_cache", "unaligned_rows"),
    ),
}
"""The tags that are shown of each operation, in this order."""


@dataclass
class Feature:
    """The outcomes of the cases that have a feature.

    Attributes:
        computed, refused, failed: how many cases.
        reasons: how often each reason was given in refusals caused by the feature.
    """

    computed: int = 0
    refused: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def words(self) -> str:
        """The text of a cell."""
        if self.failed:
            return "failed"
        if self.computed:
            return "computed" if not self.refused else "computed, parts refused"
        return "refused" if self.refused else "not tested"


@dataclass
class Matrix:
    """All features of one backend on one device; ``total`` and ``failures`` also hold what failed besides the cases."""

    backend: str
    device: str
    features: dict[tuple[str, str], Feature] = field(default_factory=dict)
    total: Feature = field(default_factory=Feature)
    failures: list[str] = field(default_factory=list)

    def add(self, operation: str, tags: Iterable[str], outcome: str, reasons: Iterable[str]) -> None:
        """One case of an operation: ``computed``, ``refused`` or ``failed``."""
        found = [self.total, *(self.features.setdefault((operation, tag), Feature()) for tag in tags)]
        for feature in found:
            setattr(feature, outcome, getattr(feature, outcome) + 1)
            feature.reasons.update(reasons)

    def rows(self) -> Iterator[tuple[str, str, Feature, str]]:
        """(operation, feature, counts, the commonest reason where nothing of it is computed)."""
        for operation, tags in FEATURES.items():
            for tag in tags:
                feature = self.features.get((operation, tag))
                if feature is not None:
                    yield operation, tag, feature, _own_reason(feature, self.total)

    def as_text(self) -> list[str]:
        """For the terminal."""
        lines = [f"{'':10} {'feature':28} {'':22} computed refused failed  reason"]
        for operation, tag, feature, reason in self.rows():
            counts = f"{feature.computed:8} {feature.refused:7} {feature.failed:6}"
            lines.append(f"{operation:10} {tag:28} {feature.words:22} {counts}  {reason}"[:180].rstrip())
        return lines

    def as_markdown(self) -> str:
        """A table for a README."""
        lines = [f"| | feature | `{self.backend}` on {self.device} | cases | reason |", "|---|---|---|---|---|"]
        for operation, tag, feature, reason in self.rows():
            cases = f"{feature.computed} of {feature.computed + feature.refused + feature.failed}"
            lines.append(f"| {operation} | `{tag}` | {feature.words} | {cases} | {reason.replace('|', '/')} |")
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        rows = {
            f"{operation} {tag}": {
                "outcome": feature.words,
                **{name: getattr(feature, name) for name in ("computed", "refused", "failed")},
                "reason": reason or None,
            }
            for operation, tag, feature, reason in self.rows()
        }
        return {
            "backend": self.backend,
            "device": self.device,
            "total": {name: getattr(self.total, name) for name in ("computed", "refused", "failed")},
            "reasons": [reason for reason, _ in self.total.reasons.most_common(5)],
            "failures": self.failures,
            "features": rows,
        }


def _own_reason(feature: Feature, total: Feature) -> str:
    """The reason that is given for this feature more than for others."""
    if feature.computed or feature.failed or not feature.reasons:
        return ""
    share = {reason: count / total.reasons[reason] for reason, count in feature.reasons.items()}
    given_always = [reason for reason, count in feature.reasons.items() if count >= feature.refused]
    return max(given_always or list(share), key=lambda reason: (share[reason], reason))


def _parameters(item: pytest.Item) -> dict[str, Any]:
    found: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return found


def _needs_gigabytes(item: pytest.Item) -> bool:
    case = _parameters(item).get("case") or _parameters(item).get("decode_case")
    return "two_billion" in item.name if case is None else "large" in case.tags


class Recorder:
    """A pytest plugin: records each case, prints the matrix, and fails a backend that computed nothing."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.matrix = Matrix(str(config.getoption("backend")), str(config.getoption("device")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run memory-hungry tests in one process (``pytest -n N --dist loadgroup``): together they may not fit."""
        if self.config.pluginmanager.hasplugin("xdist"):
            for item in items:
                if _needs_gigabytes(item):
                    item.add_marker(pytest.mark.xdist_group("large"))

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """What PyTorch's allocator keeps is missing in the processes beside this one."""
        if torch.cuda.is_initialized() and _needs_gigabytes(item):
            gc.collect()
            torch.cuda.empty_cache()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Put the suite's decision into the report, which is sent between processes."""
        result: Any = yield
        parameters = _parameters(item)
        case = parameters.get("case") or parameters.get("decode_case")
        if call.when != "call" or case is None:
            return
        decision = getattr(getattr(item, "instance", None), "decision", None)
        reasons = list(decision.reasons) if isinstance(decision, Refused) else []
        tags = sorted(case.tags | {"inference" if item.name.startswith("test_forward") else "training"})
        found = {"operation": "attention" if "case" in parameters else "decode", "tags": tags, "reasons": reasons}
        result.get_result().user_properties.append(("conformance", found))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the case, and whatever else fails: tests of many calls, fixtures, a process that died."""
        found = dict(report.user_properties).get("conformance") if report.when == "call" else None
        self.matrix.failures += [report.nodeid.partition("::")[2]] if report.failed else []
        if isinstance(found, Mapping):
            outcome = "failed" if report.failed else "refused" if found["reasons"] else "computed"
            self.matrix.add(found["operation"], found["tags"], outcome, found["reasons"])
        elif report.failed:
            self.matrix.add("", (), "failed", ())

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A backend that refuses everything has not passed."""
        if hasattr(self.config, "workerinput"):
            return
        total = self.matrix.total
        if not total.computed and not total.failed and total.refused:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for option, text in (
            ("matrix_json", json.dumps(self.matrix.as_json(), indent=1) + "\n"),
            ("matrix_markdown", self.matrix.as_markdown()),
        ):
            if self.config.getoption(option):
                Path(self.config.getoption(option)).write_text(text)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the matrix."""
        total = self.matrix.total
        terminalreporter.section(f"{self.matrix.backend} on {self.matrix.device}")
        for line in self.matrix.as_text():
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"{total.computed} computed, {total.refused} refused, {total.failed} failed")
        if not total.computed:
            terminalreporter.write_line(f"{self.matrix.backend} computed nothing, so it has not passed")
