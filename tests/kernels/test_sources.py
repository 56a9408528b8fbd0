"""Triton's hash of our kernels does not depend on which kernels a process has hashed before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mla_plugin.kernels.sources import hash_sources
from tests.repository.project import ROOT

MODULES = (
    *("prefill.forward", "prefill.backward_rows", "prefill.backward_kv", "prefill.backward_q"),
    *("hopper.plan", "hopper.forward", "hopper.forward_latent", "hopper.backward_kv", "hopper.backward_q"),
    *(
        "decode.plan",
        "decode.kernel",
        "decode.combine",
        "decode.projected.kernels",
        "decode.hopper.kernel",
        "decode.transposed.kernel",
        "decode.wide.kernel",
        "decode.cache",
    ),
    *("decode.invariant.kernel", "decode.invariant.combine", "decode.quantised_cache"),
)
CODE = """
import importlib, json, sys
from triton.runtime.jit import JITFunction
from mla_plugin.kernels.sources import hash_sources
modules, chosen, is_reversed, is_ours = json.loads(sys.argv[1])
kernels = {}
for name in modules:
    module = importlib.import_module(f"mla_plugin.kernels.{name}")
    for attribute, kernel in vars(module).items():
        if isinstance(kernel, JITFunction) and kernel.__module__ == module.__name__ and attribute.endswith("kernel"):
            kernels[f"{name} {attribute}"] = kernel
order = [name for name in kernels if chosen is None or name == chosen]
for name in order[::-1] if is_reversed else order:
    if is_ours:
        hash_sources(kernels[name])
    kernels[name].cache_key
found = {name: kernels[name].cache_key for name in order}
values = {
    name: sorted({(used, str(value)) for (used, _), (value, _) in kernel.used_global_vals.items()})
    for name, kernel in kernels.items()
    if name in order
}
print(json.dumps([found, values]))
"""


def told(chosen: str | None, *, is_reversed: bool, is_ours: bool) -> list[dict[str, Any]]:
    """By kernel: Triton's hash, in a new process that compiles; and names and values of the globals that it uses."""
    environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE, json.dumps([MODULES, chosen, is_reversed, is_ours])]
    environ |= {"PYTHONPATH": str(ROOT)}
    found: list[dict[str, Any]] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    )
    return found


def hashes(chosen: str | None = None, *, is_reversed: bool = False, is_ours: bool = True) -> dict[str, str]:
    """Triton's hash of each kernel, or of the chosen one alone."""
    return told(chosen, is_reversed=is_reversed, is_ours=is_ours)[0]


def test_the_order_of_kernels_does_not_matter() -> None:
    forth, back = hashes(), hashes(is_reversed=True)
    assert len(forth) > len(MODULES)
    assert forth == back


@pytest.mark.parametrize("kernel", ["decode.kernel decode_kernel", "hopper.backward_q attention_backward_q_kernel"])
def test_a_kernel_alone_has_the_same_hash(kernel: str) -> None:
    assert hashes(kernel) == {kernel: hashes(is_reversed=True)[kernel]}


def test_a_kernel_uses_no_two_globals_of_one_name() -> None:
    """Triton hashes them in the order of the addresses of their modules, so the hash would change with the process."""
    for kernel, values in told(None, is_reversed=False, is_ours=True)[1].items():
        names = [name for name, _ in values]
        assert len(names) == len(set(names)), (kernel, values)


def test_triton_alone_depends_on_the_order() -> None:
    """Once it does not, ``hash_sources`` can go."""
    assert hashes(is_ours=False) != hashes(is_reversed=True, is_ours=False)


def test_what_is_no_compiled_kernel_is_left_alone() -> None:
    class Interpreted:
        fn: Any = None

    hash_sources(Interpreted())
