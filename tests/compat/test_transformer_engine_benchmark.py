"""``benchmarks/transformer_engine_training.py``: what it says about losses, and what a CUDA graph needs of it."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from benchmarks import transformer_engine_training as benchmark


def test_a_graphs_inputs_outlive_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph does not hold the batch that it reads; freed, its memory is the optimizer's, and the loss wrong."""
    seen = []

    def captured(model: torch.nn.Module, step: benchmark.Step) -> benchmark.Step:
        held = weakref.ref(step)
        return lambda: torch.tensor(float(seen.append(held()) or held() is not None))

    te = SimpleNamespace(DotProductAttention=lambda *args, **kwargs: torch.nn.Identity())
    monkeypatch.setattr(benchmark, "import_te", lambda tiny: te)
    monkeypatch.setattr(benchmark, "captured", captured)
    assert benchmark.train("graph", tiny=True)["losses"] == [1.0, 1.0, 1.0]
    assert len(seen) == 3


def variants(**losses: list[float] | None) -> benchmark.Losses:
    return {name: {"error": "failed"} if found is None else {"losses": found} for name, found in losses.items()}


def test_losses_are_compared_with_those_of_transformer_engine_alone() -> None:
    said = benchmark.compare(variants(plain=[2.0, 1.0], true=[2.0, 1.0], one=[2.0, 1.5], slot=[2.0, 1.5]))
    assert said == {
        "true": {"plain": {"equal": True, "largest_relative_difference": 0.0}},
        "one": {"plain": {"equal": False, "largest_relative_difference": 0.5}},
        "slot": {"plain": {"equal": False, "largest_relative_difference": 0.5}},
        "slot_equals_one": True,
    }


def test_a_graphs_losses_are_compared_with_those_of_the_same_steps() -> None:
    said = benchmark.compare(variants(plain=[2.0, 0.5], one=[2.0, 0.5]), variants(plain=[2.0, 1.0], one=[2.0, 0.5]))
    assert said["plain"] == {"eager": {"equal": False, "largest_relative_difference": 0.5}}
    assert said["one"]["eager"]["equal"]


def test_a_variant_that_failed_is_equal_to_nothing() -> None:
    assert benchmark.compare(variants(plain=[2.0], one=None, slot=None)) == {}
    assert benchmark.compare(variants(plain=None, again=[2.0])) == {}
