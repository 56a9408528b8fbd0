"""What the ahead-of-time tests take from benchmarks/results/ahead_of_time.json is what compiling gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiler import AFRESH, KINDS, RECORDED, ROOT, keyed_results
from tests.kernels.prefill_compiler import DEEPSEEK, MISCOMPILED, jobs

pytestmark = pytest.mark.xdist_group("compiler")

SAMPLE = [
    *(
        job.name
        for job in jobs(all_targets=False)
        if (job.head_dim_qk, job.head_dim_v) == DEEPSEEK
        and (job.kernel, job.capability, job.itemsize, job.call) == ("backward_kv", 90, 2, "causal")
    ),
    MISCOMPILED.name,
]


def test_a_sample_compiled_again_is_as_recorded(tmp_path: Path) -> None:
    """Where a kernel is newer than the record, both are compiled: python -m benchmarks.ahead_of_time records it."""
    only = [f"--only={name}" for name in SAMPLE]
    fresh = keyed_results("tests.kernels.prefill_compiler", AFRESH, *only, cache=tmp_path)
    assert fresh.keys() == set(SAMPLE)
    assert keyed_results("tests.kernels.prefill_compiler", *only, cache=tmp_path) == fresh


KEYS = """
import dataclasses, json
from tests.kernels import decode_compiler, prefill_compiler
job, *_ = prefill_compiler.jobs(all_targets=False)
program = prefill_compiler.program(job)
keys = [program.key, prefill_compiler.program(job).key]
others = [
    dataclasses.replace(program, capability=100),
    dataclasses.replace(program, strides_are_aligned=False),
    dataclasses.replace(program, options=dict(program.options) | {"num_warps": 2}),
    dataclasses.replace(program, constants=dict(program.constants) | {"BLOCK_M": 16}),
    dataclasses.replace(program, types=dict(program.types) | {program.kernel.arg_names[0]: "*fp16"}),
]
keys += [other.key for other in others]
program.kernel._unsafe_update_src(program.kernel.src.replace("BLOCK_N", "BLOCK_K"))
keys.append(program.key)
keys += [decode_compiler.program(job).key for job in decode_compiler.jobs()]
print(json.dumps(keys))
"""


def test_a_key_stands_for_all_that_a_program_is_made_of() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", KEYS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, again, *others = json.loads(done.stdout)
    assert first == again
    assert len({first, *others}) == 1 + len(others)


def test_every_record_has_a_key_of_its_own() -> None:
    found = json.loads(RECORDED.read_text())
    of_kinds = [record for kind in KINDS for record in found[kind]]
    records = (*found["records"], *found["decode"], *of_kinds, found["miscompiled"])
    keys = [record["key"] for record in records]
    assert len(set(keys)) == len(keys)
