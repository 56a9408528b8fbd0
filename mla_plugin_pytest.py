"""The pytest plugin of the conformance suite: ``pytest --pyargs mla_plugin.conformance --backend NAME``.

pytest loads it in every run of an environment that has mla-plugin, so it imports nothing of that and adds no option
unless the run names the suite: ``--backend`` and ``--device`` are options of many projects' own tests.
"""

from __future__ import annotations

import os
from typing import Any

SUITE = "mla_plugin.conformance"


def pytest_addoption(parser: Any, pluginmanager: Any) -> None:
    """The suite's options, where a run names the suite."""
    config = pluginmanager.get_plugin("pytestconfig")
    arguments = [] if config is None else list(config.invocation_params.args)
    arguments += os.environ.get("PYTEST_ADDOPTS", "").split()
    if not any(SUITE in str(argument) or SUITE.replace(".", "/") in str(argument) for argument in arguments):
        return
    group = parser.getgroup("mla-plugin conformance")
    group.addoption("--backend", help="name of the backend, as it is registered")
    group.addoption("--device", default="cpu", help="device that the cases run on; cpu is the default")
    group.addoption("--quick", action="store_true", help="a selection of the cases: less than a minute on a CPU")
    group.addoption("--few-repeats", action="store_true", help="one case in four is computed again and by the library")
    group.addoption("--lowest-score", type=float, help="of every key in decode's call of low scores")
    group.addoption("--matrix-json", metavar="FILE", help="write the matrix of features as JSON")
    group.addoption("--matrix-markdown", metavar="FILE", help="write the matrix of features as Markdown")


def pytest_configure(config: Any) -> None:
    """Collect what becomes of each case, where a run names a backend."""
    if config.getoption("backend", None) is None or config.getoption("matrix_json", "missing") == "missing":
        return
    from mla_plugin.conformance.matrix import Recorder

    config.pluginmanager.register(Recorder(config), "mla_plugin_conformance_matrix")
