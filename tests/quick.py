"""The lane of a minute, ``python -m pytest -m quick``: of each test function two cases, chosen by their names.

It is for who changes one thing and wants to know soon; ``.ci/run`` runs everything.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

EACH = 2
"""Cases of a function; which ones follows from their names alone, so it is the same everywhere."""
LEFT_OUT = (
    "tests/cli/test_demo.py",
    "tests/compat/megatron/",
    "tests/compat/test_transformer_engine.py",
    "tests/compat/test_transformers_latent_layers.py",
    "tests/compat/test_transformers_versions.py",
    "tests/gpu/",
    "tests/hooks/test_pluggy_versions.py",
    "tests/house/test_wheel.py",
    "tests/kernels/test_attention.py::test_compiled_equals_eager",
    "tests/kernels/test_compiler_record.py",
    "tests/kernels/test_decode_ahead_of_time.py",
    "tests/kernels/test_prefill_ahead_of_time.py",
    "tests/kernels/test_tuning.py",
    "tests/resolver/test_te_coverage.py",
    "tests/test_third_party.py",
)
"""Where most tests start other processes, compile, or install packages."""


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the chosen tests the mark ``quick``."""
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.nodeid.startswith(LEFT_OUT) and not item.get_closest_marker("gpu"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        for item in sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))[:EACH]:
            item.add_marker("quick")
