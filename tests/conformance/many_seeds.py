"""Run the correct backends with fresh data until the count is reached: none of the runs may fail.

python -m tests.conformance.many_seeds 5000 [attention|decode]
"""

from __future__ import annotations

import contextlib
import io
import itertools
import sys

import torch

from tests.conformance.test_suite import CORRECT
from tests.conformance.whole_table import SUITES, runs_of, suite_of


def main(count: int, operations: list[str]) -> int:
    """Print every failure."""
    torch.set_num_threads(1)
    failures = 0
    for operation in operations:
        runs = []
        for name, constants in CORRECT.items():
            suite = suite_of(operation, None, constants=constants)
            runs.append((name, [x for x in runs_of(operation, suite, name) if "[" in x[0]]))
        order = itertools.cycle(itertools.chain(*([(name, *test) for test in tests] for name, tests in runs)))
        for name, test_name, test in itertools.islice(order, count):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    test()
            except Exception as error:
                failures += 1
                print(operation, name, test_name, f"{type(error).__name__}: {error}", flush=True)
    print(f"{failures} failures in {count} runs of each of {operations}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:] or list(SUITES)))
