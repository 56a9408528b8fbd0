"""Every kind of call of ``batch_invariant`` decode computes by the same operations in the same layouts."""

import json
import os
import subprocess
import sys

from tests.repository.project import ROOT


def test_the_arithmetic_does_not_depend_on_the_call() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.decode_arithmetic"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(x["tile"], x["call"]) for x in found} >= {("16", "left padding"), ("64", "descriptors")}
    for capability, tile in {(x["capability"], x["tile"]) for x in found}:
        first, *others = (x for x in found if (x["capability"], x["tile"]) == (capability, tile))
        wanted = first["found"]
        assert sum("dot" in name for name in wanted) >= 3
        assert any(name.startswith("})") for name in wanted)  # a sum or a maximum over threads
        assert len(others) >= 5
        for other in others:
            if other["call"] == "descriptors":  # two loops, so each operation occurs twice
                assert other["found"].keys() == wanted.keys()
                assert all(count <= other["found"][name] <= 2 * count for name, count in wanted.items())
            else:
                assert other["found"] == wanted
