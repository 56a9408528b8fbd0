"""The packages that carry FlashMLA's dense decode, and how each is called.

DeepSeek's own package, SGLang's package of the same module, and the copies in vLLM and in SGLang's kernels. A call has
the same names in all of them; what differs is the schedule, see ``Provider.schedule``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from packaging.version import Version

from mla_plugin.device import FLASH_MLA_PROVIDERS
from mla_plugin.hooks.types import Platform
from mla_plugin.plugins.shared.flash_family import imported, not_installed
from mla_plugin.plugins.shared.refusals import off_cuda

WIDTH_V = 512


class Schedule(NamedTuple):
    """How a kernel splits the work: which tiles each SM takes, and the parts of each sequence.

    Attributes:
        tiles: a tensor, or an object of the library that the first call fills.
        splits: a tensor; None with such an object.
    """

    tiles: Any
    splits: torch.Tensor | None


@dataclass(frozen=True)
class Provider:
    """One package.

    Attributes:
        distribution: name of the distribution, as ``Platform.version`` takes it.
        module: what to import.
        first_version: of the distribution that has the module; None for any.
    """

    distribution: str
    module: str
    first_version: str | None = None

    def is_installed(self, platform: Platform) -> bool:
        """The distribution is installed, in a release that has the module."""
        found = platform.version(self.distribution)
        return found is not None and (self.first_version is None or Version(found) >= Version(self.first_version))

    def library(self) -> Any:
        """The imported module.

        Raises:
            RuntimeError: it cannot be imported, or has no dense decode.
        """
        remedy = (
            f"reinstall it for PyTorch {torch.__version__}, or leave the backend out with MLA_PLUGIN_BLOCK=flashmla"
        )
        library = imported(self.distribution, self.module, remedy, "flash_mla_with_kvcache")
        if is_sparse_alone(library.flash_mla_with_kvcache):
            raise RuntimeError(
                f"{self.distribution} is installed, but this release of {self.module} has no dense decode, which "
                "FlashMLA's release of 2026-09-30 removed; install an earlier one or sgl-flash-mla, or leave the "
                "backend out with MLA_PLUGIN_BLOCK=flashmla"
            )
        return library

    def schedule(self, seqlens_kv: torch.Tensor, rows: int) -> Schedule:
        """A schedule for these lengths and ``rows`` query rows of a sequence, S_q H.

        Earlier releases compute it here with a kernel; later ones in the call that first uses it.
        """
        make = self.library().get_mla_metadata
        return Schedule(*(make(seqlens_kv, rows, 1) if "cache_seqlens" in _parameters(make) else make()))

    def decode(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        page_table: torch.Tensor,
        seqlens_kv: torch.Tensor,
        schedule: Schedule,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out [B, S_q, H, 512] and lse [B, H, S_q], natural log, +inf for a query that sees no key.

        Args:
            q: [B, S_q, H, 576].
            cache: [pages, 64, 1, 576].
            page_table, seqlens_kv: as in ``DecodeTensors``.
            schedule: of these lengths and this shape of q.
            softmax_scale, causal: as in ``DecodeTensors``.
        """
        function = self.library().flash_mla_with_kvcache
        frozen = {"use_legacy": True} if "use_legacy" in _parameters(function) else {}
        out, lse = function(
            q,
            cache,
            page_table,
            seqlens_kv,
            WIDTH_V,
            schedule.tiles,
            schedule.splits,
            softmax_scale=softmax_scale,
            causal=causal,
            **frozen,
        )
        return out, lse


PROVIDERS = tuple(Provider(*provider) for provider in FLASH_MLA_PROVIDERS)
"""In search order."""


def is_sparse_alone(function: Callable[..., Any]) -> bool:
    """True for a release without dense decode, which SGLang's package keeps as ``use_legacy``."""
    return "enable_batch_invariant" in _parameters(function) and "use_legacy" not in _parameters(function)


def find(platform: Platform) -> Provider | None:
    """The first provider whose distribution is installed in a release with dense decode."""
    return next((provider for provider in PROVIDERS if provider.is_installed(platform)), None)


def installed(platform: Platform) -> Provider:
    """The provider that a plan was made for."""
    provider = find(platform)
    if provider is None:
        raise RuntimeError(f"no provider of FlashMLA is installed on {platform}; the plan is another machine's")
    return provider


def absence(device_type: str, platform: Platform) -> Iterator[str]:
    """Why the library cannot run at all: no provider is installed, or the device is not Hopper."""
    if find(platform) is None:
        too_old = [(x.distribution, platform.version(x.distribution), x.first_version) for x in PROVIDERS]
        yield from (f"{name}={found} < {first}" for name, found, first in too_old if found is not None)
        yield from not_installed(platform, "FlashMLA", *(provider.distribution for provider in PROVIDERS))
    off_device = tuple(off_cuda(device_type, platform.device_type))
    yield from off_device
    if not off_device and platform.compute_capability != (9, 0):
        yield f"compute_capability={platform.compute_capability}, expected (9, 0)"


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
