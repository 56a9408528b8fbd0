"""Relative speed of the built-in backends for an attention call, measured or estimated."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver.attention_measured import BACKENDS, MEASURED

_BLACKWELL = ("cudnn", "fa4", "triton", "fa2")
"""From compute capability 10.0 on; not measured.

By the figures of a B200 and an RTX PRO 6000 in NVIDIA/cudnn-frontend, benchmark/attention_training/results.
"""

_OLDER = ("fa2", "cudnn", "triton")
"""Before Hopper, equal head dims: kernels written for these GPUs first; not measured."""

_OLDER_MLA = ("triton", "fa2", "cudnn")
"""Before Hopper, unequal head dims: FlashAttention 2 pads V, which at 192/128 adds 50 % to the products of weights and
values; on an H200 ours is twice as fast. Not measured on these GPUs."""

_OTHER_MASK = 4.0
"""Distance of no mask, or of a window, from a causal mask: as much as four doublings of the length."""

_OTHER_WORK = 8.0
"""Distance in doublings for packed sequences, and for a deterministic backward."""

_OTHER_GPU = 0.1
"""Squared distance of another GPU of the same compute capability."""

_NEAR = 1e-3
"""Below this squared distance a single measured call decides."""

_PLAIN_KERNELS: Mapping[tuple[int, int], Mapping[str, float]] = {
    (192, 128): {"forward": 1.42, "backward": 1.27},
    (128, 128): {"forward": 1.40, "backward": 1.37},
    (256, 256): {"forward": 1.37, "backward": 1.83},
    (64, 64): {"forward": 1.07, "backward": 1.31},
    (96, 64): {"forward": 1.07, "backward": 1.34},
}
"""Head dims of our Hopper kernels, and how many times as long our plain kernels take, which run under versions of
Triton that the Hopper kernels do not support: geometric means on an H200, relative to the other backends."""


def known_order(request: AttentionRequest, platform: Platform) -> tuple[str, ...]:
    """The order without measurements, from NVIDIA's and FlashAttention's published figures for the generation."""
    capability = platform.compute_capability or (0, 0)
    if capability >= (10, 0):
        return _BLACKWELL
    return _OLDER if request.head_dim_qk == request.head_dim_v else _OLDER_MLA


class _Call(NamedTuple):
    """The features by which a request is compared with measured calls."""

    dim_qk: int
    dim_v: int
    heads: int
    kv_heads: int
    batch: int
    seqlen_q: int
    seqlen_kv: int
    mask: str
    is_packed: bool
    is_deterministic: bool
    is_bottom_right: bool = False

    @classmethod
    def of(cls, request: AttentionRequest) -> _Call:
        """From a request; a dense batch with true lengths counts as packed sequences, as kernels treat it."""
        return cls(
            request.head_dim_qk,
            request.head_dim_v,
            request.num_heads,
            request.num_kv_heads,
            request.batch_size,
            request.max_seqlen_q,
            request.max_seqlen_kv,
            "window" if request.has_sliding_window else "causal" if request.is_causal else "full",
            request.has_padding,
            request.deterministic,
            bool(request.bottom_right_diagonal),
        )

    @property
    def unmasked(self) -> float:
        """Share of the work that no mask cuts: 1 without one, 0 under the diagonal of a square.

        Under a causal mask aligned to the last query and key, the keys before the square are seen by all queries.
        """
        if self.mask != "causal":
            return float(self.mask == "full")
        before = max(self.seqlen_kv - self.seqlen_q, 0) if self.is_bottom_right else 0
        return before / max(before + 0.5 * self.seqlen_q, 1)

    @property
    def place(self) -> tuple[float, ...]:
        """Coordinates in which nearby calls are about equally fast: doublings, and large offsets between kinds."""
        return (
            2 * math.log2(self.dim_qk),
            2 * math.log2(self.dim_v / self.dim_qk),
            0.5 * math.log2(max(self.batch * self.heads, 1)),
            0.5 * math.log2(self.heads / self.kv_heads),
            math.log2(max(self.seqlen_q, 1)),
            _OTHER_MASK * self.unmasked,
            _OTHER_MASK * (self.mask == "window"),
            _OTHER_WORK * self.is_packed,
            _OTHER_WORK * self.is_deterministic,
        )


class _Measured(NamedTuple):
    """One line of the table: its coordinates, and each backend's log time relative to the fastest."""

    gpu: str
    widths: tuple[int, int]
    place: tuple[float, ...]
    behind: dict[str, dict[str, float]]


def _parsed(gpu: str, line: str) -> _Measured:
    numbers, forward, backward = line.split("|")
    *sizes, mask, layout, repeats = numbers.split()
    dim_qk, dim_v, heads, kv_heads, batch, seqlen = map(int, sizes)
    flags = (layout == "packed", repeats == "deterministic")
    call = _Call(dim_qk, dim_v, heads, kv_heads, batch, seqlen, seqlen, mask, *flags)
    return _Measured(gpu, (dim_qk, dim_v), call.place, {"forward": _behind(forward), "backward": _behind(backward)})


def _behind(milliseconds: str) -> dict[str, float]:
    found = {name: float(x) for name, x in zip(BACKENDS, milliseconds.split(), strict=True) if x != "-"}
    fastest = min(found.values())
    return {name: math.log(value / fastest) for name, value in found.items()}


@functools.cache
def _table(capability: tuple[int, int]) -> tuple[_Measured, ...]:
    gpus = MEASURED.get(capability, {})
    return tuple(_parsed(gpu, line) for gpu, lines in gpus.items() for line in lines.split("\n") if line)


def distance_of_gpu(gpu: str, platform: Platform) -> float:
    """Squared distance of calls measured on ``gpu``, such as ``"H200"``: the platform's own results count first."""
    return 0.0 if gpu in (platform.device_name or "").split() else _OTHER_GPU


def lacks_hopper_kernels(platform: Platform) -> bool:
    """Whether our plain kernels run there where calls were measured with the Hopper kernels."""
    from mla_plugin.kernels.hopper.device import unfit_device_because

    return unfit_device_because(platform.compute_capability, platform.version("triton")) is not None


def _estimates(platform: Platform, place: Sequence[float], direction: str, is_plain: bool = False) -> dict[str, float]:
    """Each backend's log time relative to the fastest, interpolated from measured calls, nearest weighted most.

    Args:
        platform: whose own measurements count most.
        place: of the call.
        direction: ``"forward"`` or ``"backward"``.
        is_plain: whether our plain kernels run where measured calls had the Hopper kernels.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for row in _table(platform.compute_capability or (0, 0)):
        distance = distance_of_gpu(row.gpu, platform) + sum((a - b) ** 2 for a, b in zip(place, row.place, strict=True))
        weight = 1 / (distance + _NEAR) ** 3
        slower = _PLAIN_KERNELS.get(row.widths) if is_plain else None
        for name, value in row.behind[direction].items():
            if name == "triton" and slower is not None:
                value += math.log(slower[direction])
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight
    return {name: sums[name] / weights[name] for name in sums}


def _estimates_of(request: AttentionRequest, platform: Platform, direction: str) -> dict[str, float]:
    has_hopper_kernels = (request.head_dim_qk, request.head_dim_v) in _PLAIN_KERNELS
    is_plain = has_hopper_kernels and lacks_hopper_kernels(platform)
    return _estimates(platform, _Call.of(request).place, direction, is_plain)


def fastest_first(request: AttentionRequest, platform: Platform, names: Sequence[str], direction: str) -> list[str]:
    """Fused built-in backends in the order of their speed for one pass.

    Interpolated between calls measured on a GPU of the same compute capability (``attention_measured``); for other
    GPUs estimated from published figures.

    Args:
        request, platform: what is decided on.
        names: of the backends.
        direction: ``"forward"`` or ``"backward"``.
    """
    known = known_order(request, platform)
    behind = _estimates_of(request, platform, direction)

    def rank(name: str) -> tuple[float, int]:
        return behind.get(name, math.inf), known.index(name) if name in known else len(known)

    return sorted(names, key=rank)


def relative_times(request: AttentionRequest, platform: Platform, direction: str) -> dict[str, float]:
    """Each backend's time for one pass relative to the fastest; empty without measurements.

    Arguments and order as ``fastest_first``; a backend that was not measured for the pass is left out.
    """
    behind = _estimates_of(request, platform, direction)
    return {name: math.exp(value - min(behind.values())) for name, value in behind.items()}
