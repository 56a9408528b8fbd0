"""A fixture: the Hopper kernels run on this machine's CPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from mla_plugin.arguments import decode_layout
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode import run as decode_run
from mla_plugin.kernels.decode.device import Device
from mla_plugin.kernels.decode.transposed import rule as transposed_rule
from mla_plugin.kernels.decode.wide import rule as wide_rule
from mla_plugin.kernels.hopper import launch_backward, launch_forward, rule
from mla_plugin.kernels.hopper.device import CAPABILITY
from mla_plugin.kernels.launch import Launch
from mla_plugin.kernels.prefill import attention
from tests.kernels.gluon.launching import interpreting

PROGRAMS = 3


@pytest.fixture
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU with three multiprocessors; the CPU is taken for one of compute capability 9.0."""
    decisions = (rule.plain_kernel_for, rule.plain_dkv_for, rule.plain_dq_for)
    prepared = (launch_forward.forward_of, launch_backward.backward_of, attention._kept)
    monkeypatch.setattr(Launch, "__call__", interpreting(zlib.crc32(request.node.name.encode())))
    monkeypatch.setattr(rule, "_capability", lambda device: CAPABILITY)
    monkeypatch.setattr(
        decode_launch, "device_of", lambda device: Device("Hopper", PROGRAMS, True, False, "fields", True)
    )
    for rule_of_fp8 in (transposed_rule, wide_rule):
        monkeypatch.setattr(rule_of_fp8, "TILES_OF_A_PART", 0)
    monkeypatch.setattr(
        decode_launch, "options_of", lambda device, num_warps, **_: {"num_warps": num_warps, "launch_pdl": True}
    )
    monkeypatch.setattr(decode_run, "compile_together", lambda calls, device: None)
    monkeypatch.setattr(decode_layout, "_known", {})
    for module in (launch_forward, launch_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: PROGRAMS)
        monkeypatch.setattr(module, "counter", lambda device, kernel: torch.zeros(1, dtype=torch.int32))
    for cache in (*decisions, *prepared):
        cache.cache_clear()
    yield
    for cache in (*decisions, *prepared):
        cache.cache_clear()
