"""What a machine with a GPU may lack, and why: tests marked ``peer(NAME)`` are not run without it, and say so."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

import pytest
import torch

from mla_plugin import device
from mla_plugin.plugins import fa2, fa3, fa4, flashinfer, flashmla
from tests.repository.project import ROOT

BINARIES = {
    "FlashAttention 2 of vLLM": ".peers_fa2/_vllm_fa2_C.abi3.so.xz",
    "FlashAttention 3 of vLLM": ".peers/_vllm_fa3_C.abi3.so.xz",
    "FlashAttention 4, unpacked": ".peers_fa4/fa4.tar.xz",
}
"""Libraries next to the checkout, for machines that cannot install them; they are no part of the project."""


def _not_installed(*distributions: str) -> str | None:
    found = dict(device.installed_packages())
    if any(name in found for name in distributions):
        return None
    return f"{' or '.join(distributions)} is not installed"


def _not_there(path: str) -> str | None:
    return None if (ROOT / path).exists() else f"{path} is not there"


def _no_transformer_engine() -> str | None:
    for module in ("transformer_engine", "transformer_engine_torch"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    return None


def _one_gpu() -> str | None:
    count = torch.cuda.device_count()
    return None if count > 1 else f"{count} GPU, 2 are needed"


def _no_hopper() -> str | None:
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"compute_capability={capability}, needed is (9, 0)"


PEERS: dict[str, Callable[[], str | None]] = {
    "FlashAttention 2": lambda: _not_installed(fa2.providers.DISTRIBUTION),
    "FlashAttention 3": lambda: _not_installed(*(x.distribution for x in fa3.providers.PROVIDERS)),
    "FlashAttention 4": lambda: _not_installed(fa4.DISTRIBUTION),
    **{name: lambda path=path: _not_there(path) for name, path in BINARIES.items()},
    "FlashInfer": lambda: _not_installed(flashinfer.DISTRIBUTION),
    "FlashMLA": lambda: _not_installed(*(x.distribution for x in flashmla.providers.PROVIDERS)),
    "TransformerEngine": _no_transformer_engine,
    "a Hopper GPU": _no_hopper,
    "a second GPU": _one_gpu,
}
"""Name to the reason why it is missing, None where it is there."""
NOTHING_ELSE = "PyTorch and Triton alone"
"""What the tests without a peer need."""


def of(item: pytest.Item) -> list[str]:
    """The names of its marks.

    Raises:
        ValueError: a mark names no peer.
    """
    names = [mark.args[0] for mark in item.iter_markers("peer")]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"{item.nodeid}: no peer {name!r}; there are {', '.join(PEERS)}")
    return names


def skip_without(items: Iterable[pytest.Item]) -> None:
    """Skip what lacks a peer, and write the peer into each report, which also crosses processes."""
    missing: dict[str, str | None] = {}
    for item in items:
        for name in of(item):
            if name not in missing:
                missing[name] = PEERS[name]()
            if missing[name]:
                item.add_marker(pytest.mark.skip(reason=f"not run: {name}: {missing[name]}"))
        item.user_properties.append(("peers", of(item)))
