"""Run the tests that need a CUDA device, or one shard of them: ``python -m tests.gpu --shard 1/3``.

Any CUDA device will do. What the machine lacks, such as a library or a second GPU, is listed at the end as not run,
with the reason. Other arguments go to pytest, such as ``-k decode`` or ``tests/plugins``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

import pytest
import torch

from tests.gpu.lane import shard_of


def command(arguments: Sequence[str]) -> list[str]:
    """The arguments of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--shard", default="1/1", help="which part of the tests, such as 2/3")
    parser.add_argument("--minutes", default="10", help="tests that would start later are not run; the default is 10")
    most = max(1, min(14, (os.cpu_count() or 2) - 2))
    parser.add_argument("--processes", default=str(most), help=f"they share the device; the default here is {most}")
    parser.add_argument("--json", metavar="FILE", help="write the closing table as JSON")
    given, rest = parser.parse_known_args(arguments)
    try:
        shard_of(given.shard)
    except ValueError as error:
        parser.error(str(error))
    options = ["-m", "gpu", "-p", "tests.gpu.lane", "-q", "--shard", given.shard, "--minutes", given.minutes]
    if given.processes != "0" and importlib.util.find_spec("xdist") is not None:
        options += ["-n", given.processes, "--dist", "loadgroup"]
    if importlib.util.find_spec("megatron") is None:
        options += ["--ignore", "tests/compat/megatron"]  # it has no GPU test, and cannot be collected
    return [*options, *(["--json", given.json] if given.json else []), *rest]


def main(arguments: Sequence[str]) -> int:
    """pytest's exit status; 2 without a CUDA device."""
    options = command(arguments)
    if not torch.cuda.is_available():
        print("not run: PyTorch finds no CUDA device, which every test of this command needs", file=sys.stderr)
        return 2
    return int(pytest.main(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
