"""Run the correct backends with fresh data for so many runs or seconds: none of the runs may fail.

    python -m tests.conformance.many_seeds [RUNS] [attention|decode ...] [--seconds S] [--processes N]

Each kind of test of each backend gets the same time, so that a general check of a second runs as often as a hundred
cases together. A run counts as 0.05 s or more, so refusals, which take no time, do not fill it. What needs 8 GiB runs
in the first process alone. A failure is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import multiprocessing
import random
import secrets
import sys
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from tests.conformance.whole_table import CORRECT, SUITES, runs_of, suite_of

OF_GIGABYTES = "test_more_than_two_billion_elements"
FEATURES = {"dropout": "test_dropout", "invariant": "test_batch_invariance"}
"""What is run of a backend that differs from the plain one in this alone; the others refuse it."""
LEAST_SECONDS = 0.05
"""What a run counts as, at least."""
WITHOUT_DATA = ("test_what_no_tensors_go_with_is_refused", "test_attention_is_answered")


@dataclass
class Kind:
    """A test of one backend, or its cases in one way.

    Attributes:
        suite: of the backend.
        name: operation, backend and test, separated by slashes.
        tests: names to tests, again and again.
        seconds: that its runs count as.
    """

    suite: Any
    name: str
    tests: Iterator[tuple[str, Callable[[], None]]]
    seconds: float = 0.0


def kinds_of(operation: str, backend: str, only: str, *, is_first: bool) -> Iterator[Kind]:
    """All kinds of tests of a correct backend whose names contain a text."""
    if only.count("/") == 2 and not only.startswith(f"{operation}/{backend}/"):
        return  # a whole name, of another backend; making the cases takes a second
    refuses = None if backend.endswith("_only") else {}
    suite: Any = suite_of(operation, None, constants=CORRECT[operation][backend], refuses=refuses)
    refused = {f"[{case}]" for case in suite.cases() if not suite._accepts(case)}
    found: dict[str, list[tuple[str, Callable[[], None]]]] = {}
    for name, test in runs_of(operation, suite, secrets.token_hex(8)):
        kind, bracket, case = name.partition("[")
        if kind in WITHOUT_DATA or bracket + case in refused or only not in f"{operation}/{backend}/{name}":
            continue
        if kind == FEATURES.get(backend) or (backend not in FEATURES and kind not in FEATURES.values()):
            found.setdefault(kind, []).append((name, test))
    for kind, tests in found.items():
        if is_first or kind != OF_GIGABYTES:
            yield Kind(suite, f"{operation}/{backend}/{kind}", itertools.cycle(tests))


def seeded(suite: Any, seed: int) -> None:
    """Whatever a run of the suite draws follows from the seed, each of its calls from other numbers."""
    of_calls = random.Random(seed)
    suite._generator = lambda: torch.Generator().manual_seed(of_calls.getrandbits(31))
    torch.manual_seed(seed)
    random.seed(seed)


def share(process: int, operations: list[str], given: argparse.Namespace) -> tuple[int, Counter[str]]:
    """What one process does: its failures, which it prints, and how often each kind of test ran."""
    torch.set_num_threads(1)
    end = time.monotonic() + given.seconds
    kinds = [
        kind
        for operation in operations
        for backend in CORRECT[operation]
        for kind in kinds_of(operation, backend, given.only, is_first=not process)
    ]
    failures, counts = 0, Counter[str]()
    for _ in range(-(-(given.runs - process) // given.processes)) if given.runs else itertools.count():
        if time.monotonic() > end or not kinds:
            break
        kind = min(kinds, key=lambda kind: kind.seconds)
        name, test = next(kind.tests)
        seed = secrets.randbits(31) if given.seed is None else given.seed
        seeded(kind.suite, seed)
        started = time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                test()
        except unittest.SkipTest as skipped:
            print(f"{kind.name}: {skipped}", flush=True)
            kinds.remove(kind)
            continue
        except Exception as error:
            failures += 1
            whole = "/".join((*kind.name.split("/")[:2], name))
            print(f"{whole}: {type(error).__name__}: {error}", flush=True)
            print(f"  again: python -m tests.conformance.many_seeds 1 --only '{whole}' --seed {seed}", flush=True)
        kind.seconds += max(LEAST_SECONDS, time.monotonic() - started)
        counts[kind.name] += 1
    return failures, counts


def main(arguments: list[str] | None = None) -> int:
    """Print every failure, and how many runs of which tests there were."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.many_seeds", description=__doc__)
    words = "how many, without --seconds 5000; attention or decode, by default both"
    parser.add_argument("what", nargs="*", metavar="RUNS|attention|decode", help=words)
    parser.add_argument("--seconds", type=float, help="to stop after")
    parser.add_argument("--processes", type=int, default=1, help="with one thread each")
    parser.add_argument("--only", default="", metavar="TEXT", help="that operation/backend/test contains")
    parser.add_argument("--seed", type=int, help="of each run; by default a fresh one")
    given = parser.parse_args(arguments)
    counts = [int(word) for word in given.what if word.isdigit()]
    operations = [word for word in given.what if not word.isdigit()] or list(SUITES)
    if len(counts) > 1 or not set(operations) <= set(SUITES):
        parser.error(f"{given.what}: expected a number of runs, and {' or '.join(SUITES)}")
    given.runs = counts[0] if counts else None if given.seconds else 5000
    given.seconds = given.seconds or float("inf")
    if given.processes == 1:
        shares = [share(0, operations, given)]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.processes, mp_context=context) as pool:
            tasks = [pool.submit(share, process, operations, given) for process in range(given.processes)]
            shares = [task.result() for task in tasks]
    failures, ran = sum(found for found, _ in shares), sum((ran for _, ran in shares), Counter[str]())
    by_test = ", ".join(f"{name} {count}" for name, count in sorted(ran.items()))
    print(f"{failures} failures in {ran.total()} runs: {by_test}")
    return int(failures > 0 or not ran)


if __name__ == "__main__":
    sys.exit(main())
