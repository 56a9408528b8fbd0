"""Hold every broken backend against the suite, and write down which case catches it first.

    python -m tests.conformance.whole_table [attention|decode] [NAME ...]

It takes ten minutes. What it finds goes at once to ``caught.json``, which the tests go by; a backend that nothing
catches is printed, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import random
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mla_plugin.conformance import BackendConformance, DecodeConformance, settings
from tests.conformance import (
    broken_apart,
    broken_attention,
    broken_beside,
    broken_combined,
    broken_decode,
    broken_extremes,
    broken_gaps,
    broken_hidden,
    broken_later,
    broken_narrower,
    broken_ported,
    broken_rare,
    broken_sizes,
    broken_spoilt,
    broken_state,
    broken_unseen,
    broken_wider,
)
from tests.conformance.mutants import HERE, Broken, manager_of, module_of

SUITES = {"attention": BackendConformance, "decode": DecodeConformance}
GENERAL = {
    "attention": (
        "test_what_no_tensors_go_with_is_refused",
        "test_dropout",
        "test_unusual_values",
        "test_residuals_of_another_backend",
        "test_at_the_same_time",
        "test_surroundings",
        "test_unlike_calls",
    ),
    "decode": (
        "test_attention_is_answered",
        "test_every_request_is_answered",
        "test_at_the_same_time",
        "test_unusual_values",
        "test_surroundings",
        "test_unlike_calls",
    ),
}
_LAST = (
    "test_sizes_beside_features",
    "test_every_size",
    "test_drawn_calls",
    "test_batch_invariance",
    "test_many_sequences",
)
LAST = {
    "attention": (*_LAST, "test_more_than_two_billion_elements"),
    "decode": (*_LAST, "test_more_than_two_billion_elements"),
}
"""Of all kinds too, but few faults show there alone."""
_TABLES = (
    broken_later,
    broken_rare,
    broken_hidden,
    broken_state,
    broken_ported,
    broken_sizes,
    broken_gaps,
    broken_extremes,
    broken_spoilt,
    broken_unseen,
    broken_beside,
    broken_narrower,
    broken_apart,
    broken_wider,
    broken_combined,
)
FAULTS = {
    "attention": (*broken_attention.BROKEN, *(fault for table in _TABLES for fault in table.ATTENTION)),
    "decode": (*broken_decode.BROKEN, *(fault for table in _TABLES for fault in table.DECODE)),
}
CAUGHT = HERE / "caught.json"
_OF_ALL: dict[str, dict[str, Any]] = {"exact": {"EXACT": torch.float64, "WEIGHTS": torch.float64}, "plain": {}}
CORRECT: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {
        **_OF_ALL,
        "dropout": {"before": broken_unseen.DROPOUT},
        "invariant": {"before": broken_unseen.INVARIANT},
        **{f"{name}_only": {"before": before} for name, before in broken_beside.NARROWER.items()},
    },
    "decode": {
        **_OF_ALL,
        "invariant": {"before": broken_unseen.INVARIANT_DECODE},
        **{f"{name}_only": {"before": before} for name, before in broken_beside.NARROWER_DECODE.items()},
    },
}
"""Backends that keep the contract, by what ``module_of`` is given. The first computes in float64 and rounds at the end,
the second sums in float32 and has weights in the call's dtype; the others have more features than it, or fewer."""


def suite_of(
    operation: str, fault: Broken | None, constants: dict[str, Any] | None = None, **attributes: object
) -> BackendConformance | DecodeConformance:
    """The suite over the correct backend of an operation, or over one with a fault; ``constants`` as in CORRECT."""
    manager = manager_of(module_of(f"plain_{operation}", fault, **(constants or {})))
    refuses = None if fault is not None and fault.refuses_more else {}
    members = {"backend": "sample", "manager": manager, "refuses": refuses, **attributes}
    return type(f"Test{operation}", (SUITES[operation],), members)()


def runs_of(operation: str, suite: object, seed: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every test by name; the cases in an order of their own for each fault, so that many of them have to serve."""
    restored = settings.settings_restored()  # some faults set the default dtype, for all tests that follow
    for name in GENERAL[operation]:
        yield name, restored(getattr(suite, name))
    given = list(suite.cases())
    random.Random(seed).shuffle(given)
    ways = ("test_backward", "test_forward") if operation == "attention" else ("test_decode",)
    for case in given:
        for way in ways:
            yield f"{way}[{case}]", restored(functools.partial(getattr(suite, way), case))
    for name in LAST[operation]:
        yield name, restored(getattr(suite, name))


def first_catch(operation: str, fault: Broken) -> tuple[str, str] | None:
    """The test that fails first, and how."""
    for name, test in runs_of(operation, suite_of(operation, fault), fault.name):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                test()
        except unittest.SkipTest:  # too little memory: nothing was caught
            continue
        except Exception as error:
            return name, f"{type(error).__name__}: {error}"
    return None


def main(operations: list[str], names: list[str]) -> int:
    """Search, print and keep."""
    torch.set_num_threads(1)
    logging.root.addHandler(logging.NullHandler())  # as under pytest, which has its own
    caught = json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {name: {} for name in SUITES}
    missed = 0
    for operation in operations:
        for fault in FAULTS[operation]:
            if names and fault.name not in names:
                continue
            found = first_catch(operation, fault)
            missed += found is None
            print(fault.name, "MISSED" if found is None else f"{found[0]}  {found[1][:90]}", flush=True)
            if found is not None:
                caught[operation][fault.name] = found[0]
                CAUGHT.write_text(json.dumps(caught, indent=1) + "\n")
    print(f"{missed} missed")
    return int(missed > 0)


if __name__ == "__main__":
    chosen = [name for name in sys.argv[1:] if name in SUITES]
    sys.exit(main(chosen or list(SUITES), [name for name in sys.argv[1:] if name not in SUITES]))
