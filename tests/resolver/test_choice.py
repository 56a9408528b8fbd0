"""Outside TransformerEngine: the measured table decides, the two passes apart."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_plugin import AttentionRequest, Platform, resolve
from tests.requests import H100

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import prefill_table  # noqa: E402  a script of the benchmarks

RESULTS = [
    json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    for name in (*prefill_table.RESULTS[(9, 0)].values(), "prefill_backends_between_NVIDIA_H100_80GB_HBM3.json")
]
LIBRARIES = {"fa3": ("vllm", "0.25.1"), "fa4": ("flash-attn-4", "4.0.0b36")}
INSTALLED = [subset for n in range(3) for subset in itertools.combinations(LIBRARIES, n)]


def with_libraries(installed: tuple[str, ...], platform: Platform = H100) -> Platform:
    packages = (*platform.packages, *(LIBRARIES[name] for name in installed), ("nvidia-cutlass-dsl", "4.7.1"))
    return replace(platform, packages=packages, cudnn_version=(9, 19, 0), cuda_version="13.0")


def request_of(row: dict[str, Any], is_training: bool) -> AttentionRequest:
    window = (row["mask"], 0) if isinstance(row["mask"], int) else (-1, -1)
    return AttentionRequest(
        qkv_format="thd" if row["packed"] else "bshd",
        dtype=torch.bfloat16,
        device_type="cuda",
        batch_size=row["batch"],
        num_heads=row["heads"],
        num_kv_heads=row["kv_heads"],
        max_seqlen_q=row["longest"],
        max_seqlen_kv=row["longest"],
        head_dim_qk=row["dims"][0],
        head_dim_v=row["dims"][1],
        attn_mask_type="no_mask" if row["mask"] == "full" else "causal_bottom_right",
        window_size=window,
        is_training=is_training,
        deterministic=row["deterministic"],
    )


def speeds(row: dict[str, Any], installed: tuple[str, ...], gpu: str) -> dict[str, float]:
    """Of the choice, as shares of the best that is installed."""
    missing = set(LIBRARIES) - set(installed)
    forward, backward = ({name: row[kind][name] for name in row[kind] if name not in missing} for kind in PASSES)
    platform = replace(with_libraries(installed), device_name=gpu)
    training = resolve(request_of(row, True), platform=platform, environ={})
    inference = resolve(request_of(row, False), platform=platform, environ={})
    first, second = training.forward_backend, training.backward_backend
    single = min(forward[name] + backward[name] for name in forward if name in backward)
    return {
        "inference": min(forward.values()) / forward[inference.forward_backend],
        "forward": min(forward.values()) / forward[first],
        "backward": min(backward.values()) / backward[second],
        "both": single / (forward[first] + backward[second]),
    }


PASSES = ("forward", "backward")


@pytest.mark.parametrize("installed", INSTALLED, ids="+".join)
@pytest.mark.parametrize("record", RESULTS, ids=lambda record: f"{record['benchmark']} {record['gpu']}")
def test_the_choice_is_never_far_from_the_best_that_is_installed(
    record: dict[str, Any], installed: tuple[str, ...]
) -> None:
    found = [speeds(row, installed, record["gpu"]) for row in record["rows"]]
    for row, shares in zip(record["rows"], found, strict=True):
        assert min(shares["inference"], shares["forward"], shares["backward"]) >= 0.95, (row, shares)
    assert sum(math.log(shares["both"]) for shares in found) >= 0


def test_the_table_is_what_the_kept_results_say() -> None:
    assert prefill_table.MODULE.read_text() == prefill_table.text()
