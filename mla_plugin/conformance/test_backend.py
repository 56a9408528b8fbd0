"""The suite for the backend that the command line names; see docs/conformance.md."""

from __future__ import annotations

import pytest

from mla_plugin.conformance.attention.suite import BackendConformance
from mla_plugin.conformance.decode.suite import DecodeConformance
from mla_plugin.hooks.manager import get_manager


def _prepare(suite: type[BackendConformance] | type[DecodeConformance], config: pytest.Config) -> None:
    name = config.getoption("backend", None)
    if not name:
        raise pytest.UsageError(
            "name a backend: pytest --pyargs mla_plugin.conformance --backend NAME; registered: "
            + ", ".join(get_manager().backends())
        )
    if name not in get_manager().backends():
        raise pytest.UsageError(get_manager().why_not_registered(name))
    suite.backend, suite.device, suite.refuses = name, config.getoption("device"), None
    suite.quick, suite.is_slow = config.getoption("quick"), config.getoption("few_repeats")
    lowest_score = config.getoption("lowest_score")
    if issubclass(suite, DecodeConformance) and lowest_score is not None:
        if not DecodeConformance.lowest_score <= lowest_score < 0:
            raise pytest.UsageError(
                f"--lowest-score={lowest_score}, expected {DecodeConformance.lowest_score:.0f} to below 0"
            )
        suite.lowest_score = lowest_score


class TestAttention(BackendConformance):
    """Every refusal with reasons passes here; a test file of the backend's own lists what it refuses."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each case of the named backend."""
        _prepare(TestAttention, metafunc.config)
        super().pytest_generate_tests(metafunc)


class TestDecode(DecodeConformance):
    """The same for decode."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each case of the named backend."""
        _prepare(TestDecode, metafunc.config)
        super().pytest_generate_tests(metafunc)
