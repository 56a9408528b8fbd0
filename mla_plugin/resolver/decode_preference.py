"""The order in which backends are tried for a decode request: as measured, per compute capability and size."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from mla_plugin.arguments.decode import Profile
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver.attention_speed import distance_of_gpu, lacks_hopper_kernels
from mla_plugin.resolver.decode_measured import BACKENDS, MEASURED
from mla_plugin.resolver.preference import FALLBACK, by_priority

FUSED = ("triton", "flashinfer", "fa3", "flashmla")
"""Fused built-in backends of decode, in the order for GPUs on which nothing was measured.

Off Hopper FlashInfer runs its ``fa2`` kernel, which was slower than ours in every case on an H200.
"""

_WHOLE, _SMALL = 64, 16
"""Pages of 64 and more are read by descriptors, smaller ones token by token or in parts."""
_OTHER_PAGES = 4.0
"""Distance between the two kinds of pages: as much as four doublings of the length."""
_NEAR = 1e-3
"""Below this squared distance a single measured call decides."""
_PLAIN_KERNEL, _PLAIN_KERNEL_GATHERED = 1.14, 1.28
"""How many times as long our plain kernel takes as the Hopper kernel, which copies tiles by TMA or gathers them:
geometric means of 162 and 40 calls on an H200, each in turns in one run."""


def measured_order(request: DecodeRequest, platform: Platform) -> tuple[str, ...]:
    """Fused built-in backends, fastest first, as measured on a GPU of this compute capability."""
    times = measured_times(request, platform)
    if not times:
        return FUSED
    return tuple(sorted(FUSED, key=lambda name: times.get(name, math.inf)))


def measured_times(request: DecodeRequest, platform: Platform) -> dict[str, float]:
    """Each backend's time relative to the fastest, interpolated from measured calls, nearest weighted most.

    Empty without measurements.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    place = _Call.of(request).place
    is_plain = lacks_hopper_kernels(platform)
    for row in _table(platform.compute_capability or (0, 0)):
        distance = distance_of_gpu(row.gpu, platform) + sum((a - b) ** 2 for a, b in zip(place, row.place, strict=True))
        weight = 1 / (distance + _NEAR) ** 2
        for name, value in row.behind.items():
            if name == "triton" and is_plain:
                value += math.log(row.plain_kernel)
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight
    behind = {name: sums[name] / weights[name] for name in sums}
    return {name: math.exp(value - min(behind.values())) for name, value in behind.items()}


class _Call(NamedTuple):
    """The features by which a request is compared with measured calls."""

    batch: int
    heads: int
    seqlen_q: int
    profile: Profile
    page_size: int

    @classmethod
    def of(cls, request: DecodeRequest) -> _Call:
        """From a request; unknown lengths are assumed to be ragged and half of the cache's capacity."""
        profile, room = request.profile, request.max_seqlen_kv
        if profile is None:
            profile = Profile.of([room]) if request.has_host_lengths else Profile(Profile.of([room // 2]).mean, 2)
        return cls(request.batch_size, request.num_heads, request.seqlen_q, profile, request.page_size or _WHOLE)

    @property
    def place(self) -> tuple[float, ...]:
        """Coordinates in which nearby calls are about equally fast: doublings, and large offsets between kinds."""
        return (
            math.log2(max(self.batch, 1)),
            math.log2(self.heads),
            1.5 * math.log2(max(self.seqlen_q, 1)),
            math.log2(max(self.profile.mean, 1)),
            2.0 * math.log2(self.profile.spread),
            _OTHER_PAGES * (self.page_size < _WHOLE),
            _OTHER_PAGES * (self.page_size < _SMALL),
        )


class _Measured(NamedTuple):
    """One call on one GPU.

    Attributes:
        gpu: that it was measured on.
        place: its coordinates.
        behind: each backend's log time relative to the fastest.
        plain_kernel: how many times as long ``triton`` takes without the Hopper kernel.
    """

    gpu: str
    place: tuple[float, ...]
    behind: dict[str, float]
    plain_kernel: float


def _parsed(gpus: Sequence[str], line: str) -> Iterator[_Measured]:
    """What a line says of each GPU."""
    from mla_plugin.kernels.decode.hopper import rule

    sizes, *columns = line.split("|")
    batch, heads, seqlen_q, mean, longest, page_size = map(int, sizes.split())
    call = _Call(batch, heads, seqlen_q, Profile.rounded(mean, longest / mean), page_size)
    given = (torch.bfloat16, rule.RANK, rule.ROPE, seqlen_q * heads, page_size)
    plain_kernel = 1.0
    if rule.plain_kernel_because(*given) is None:
        plain_kernel = _PLAIN_KERNEL_GATHERED if rule.lies_in_several_pages(page_size) else _PLAIN_KERNEL
    for gpu, milliseconds in zip(gpus, columns, strict=True):
        found = {name: float(x) for name, x in zip(BACKENDS, milliseconds.split(), strict=True) if x != "-"}
        if found:
            fastest = min(found.values())
            behind = {name: math.log(value / fastest) for name, value in found.items()}
            yield _Measured(gpu, call.place, behind, plain_kernel)


@functools.cache
def _table(capability: tuple[int, int]) -> tuple[_Measured, ...]:
    gpus, lines = MEASURED.get(capability, ((), ""))
    return tuple(measured for line in lines.split("\n") if line for measured in _parsed(gpus, line))


def order(
    request: DecodeRequest, platform: Platform, priorities: Mapping[str, int], builtin: Sequence[str]
) -> list[str]:
    """Backends in the order in which they are tried.

    Args:
        request, platform: what is decided on.
        priorities: the priority of each third-party backend.
        builtin: names of the built-in backends.
    """
    others = by_priority(priorities)
    fused = measured_order(request, platform) if platform.device_type == "cuda" else ()
    return [
        *(name for name in others if priorities[name] > 0),
        *(name for name in fused if name in builtin),
        *(name for name in others if priorities[name] == 0),
        *([FALLBACK] if FALLBACK in builtin else []),
        *(name for name in others if priorities[name] < 0),
    ]
