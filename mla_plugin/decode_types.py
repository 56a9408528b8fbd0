"""The values of a decode call over the compressed cache; ``types`` holds those of attention over expanded K and V."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch

from mla_plugin.types import Platform, TraceEntry

MAX_LENGTH = 2**31 - 1
_LEAST = {"batch_size": 0, "seqlen_q": 0, "max_seqlen_kv": 0, "num_heads": 1, "kv_lora_rank": 1, "qk_rope_head_dim": 0}


@dataclass(frozen=True)
class DecodeRequest:
    """One absorbed decode call over the compressed cache, without its tensors.

    Attributes:
        dtype: dtype of the queries and the cache.
        device_type: ``"cpu"`` or ``"cuda"``.
        batch_size: number of sequences.
        seqlen_q: query tokens of each sequence; more than 1 for speculative steps.
        num_heads: query heads; all of them share the cache.
        kv_lora_rank, qk_rope_head_dim: width of ``c_kv`` and of ``k_rope`` (DeepSeek-V3: 512 and 64); the second may be
            0.
        max_seqlen_kv: keys that the cache has room for in a sequence. ``decode`` rounds it up to a power of two, so
            that a cache that grows by a token at a time does not make a new request at each.
        page_size: tokens of a page; None for a contiguous cache.
        causal: query i of seqlen_q sees keys up to seqlens_kv - seqlen_q + i; False for a single query, which sees all.
        has_seqlens_kv: the sequences have lengths of their own; otherwise they fill a contiguous cache.
        has_host_lengths: the lengths are known on the host too: they fill the cache, or came as ``DecodeLengths``.
        has_leftpad_kv: sequences begin behind the cache's first token.
        has_aligned_rows: every row of c_kv and of k_rope starts on a 16-byte boundary.
        return_lse: the caller wants the log-sum-exp.
        device_index: CUDA device ordinal; None for the current device or for the CPU.
        host: who asks.
    """

    dtype: torch.dtype
    device_type: str
    batch_size: int
    seqlen_q: int
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    max_seqlen_kv: int
    page_size: int | None = None
    causal: bool = False
    has_seqlens_kv: bool = False
    has_host_lengths: bool = False
    has_leftpad_kv: bool = False
    has_aligned_rows: bool = True
    return_lse: bool = False
    device_index: int | None = None
    host: str = "direct"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; at least {least} is needed")
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"page_size={self.page_size}; at least 1 is needed, or None for a contiguous cache")

    def replace(self, **changes: object) -> DecodeRequest:
        """A copy with some attributes changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DecodePlan:
    """A decision: which backend runs one decode request."""

    request: DecodeRequest
    platform: Platform
    forward_backend: str
    trace: tuple[TraceEntry, ...] = ()


class Schedule(Protocol):
    """What a backend keeps in ``DecodeLengths``: how its kernel shares out the work, which depends on the lengths."""

    def renew(self, lengths: DecodeLengths) -> bool:
        """Follow lengths that have changed, in the same device memory, so that captured graphs stay valid.

        False, and nothing done, where no call has used it since it was made and no graph can: it is then forgotten.
        """


Scheduled = TypeVar("Scheduled", bound=Schedule)


class DecodeLengths:
    """The keys of each sequence at one decode step, on the device and on the host, for every layer of the step.

    Pass it as ``seqlens_kv``. Backends that schedule on the host (FlashInfer) do so once for each such object
    instead of once a layer, and never wait for the device to read the lengths. Make a new one for each step, or
    ``update`` one: captured CUDA graphs that used it then replay with the new lengths.

    Args:
        host: the lengths, as ints or a tensor [B] on the CPU; a tensor on a device would have to be waited for.
        seqlens_kv: int32 [B], the same lengths where the cache is. None: they are copied to ``device``.
        device: where to copy them; the current CUDA device by default, the CPU where there is none.

    Attributes:
        host: int32 [B] on the CPU.
        seqlens_kv: int32 [B] on the cache's device. Change it by ``update`` alone.

    Raises:
        ValueError, TypeError: the lengths are not B non-negative ints on the CPU, or the tensors do not fit.
    """

    def __init__(
        self,
        host: Sequence[int] | torch.Tensor,
        *,
        seqlens_kv: torch.Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.host = _host_lengths(host)
        if seqlens_kv is None:
            device = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
            seqlens_kv = self.host.to(device, copy=True)
        elif not isinstance(seqlens_kv, torch.Tensor):
            raise TypeError(f"seqlens_kv is {type(seqlens_kv).__name__}; a tensor, int32 [{len(self.host)}], is needed")
        elif seqlens_kv.dtype != torch.int32 or seqlens_kv.shape != self.host.shape:
            raise ValueError(
                f"seqlens_kv is {seqlens_kv.dtype} {list(seqlens_kv.shape)} and host has {len(self.host)} lengths; "
                f"int32 [{len(self.host)}] is needed"
            )
        self.seqlens_kv = seqlens_kv
        self._schedules: dict[Hashable, Schedule] = {}

    def __len__(self) -> int:
        return len(self.host)

    def update(self, host: Sequence[int] | torch.Tensor) -> None:
        """Take new lengths into the same memory and schedule again what was scheduled; as many as before.

        Where a backend cannot follow, its error is raised and all is as before.
        """
        new = _host_lengths(host)
        if new.shape != self.host.shape:
            raise ValueError(f"{len(new)} lengths given, {len(self.host)} are held; make a new DecodeLengths")
        before = self.host.clone()
        try:
            self._take(new)
        except Exception:
            self._take(before)
            raise

    def _take(self, lengths: torch.Tensor) -> None:
        self.host.copy_(lengths)
        self.seqlens_kv.copy_(lengths, non_blocking=True)
        self._schedules = {key: schedule for key, schedule in self._schedules.items() if schedule.renew(self)}

    def schedule(self, key: Hashable, make: Callable[[DecodeLengths], Scheduled]) -> Scheduled:
        """A backend's schedule for these lengths: the one kept under ``key``, or a new one."""
        found = self._schedules.get(key)
        if found is None:
            found = self._schedules[key] = make(self)
        return found  # type: ignore[return-value]


def _host_lengths(host: Sequence[int] | torch.Tensor) -> torch.Tensor:
    if isinstance(host, torch.Tensor) and host.device.type != "cpu":
        raise ValueError(f"host lengths are on {host.device}; give those that the host knows: ints or a CPU tensor")
    try:
        given = torch.as_tensor(host)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: beyond int64
        raise TypeError(
            f"host lengths are {type(host).__name__}, of which PyTorch makes no tensor ({error}); a list of ints or a "
            "CPU tensor [B] is needed"
        ) from error
    if given.dtype not in (torch.int32, torch.int64) and given.numel():  # an empty list has no dtype
        raise TypeError(f"host lengths have dtype {given.dtype}; int32 or int64 is needed")
    if given.dim() != 1 or (given < 0).any():
        raise ValueError(f"host lengths are {given.tolist()}; one non-negative length a sequence is needed")
    if (given > MAX_LENGTH).any():
        raise ValueError(f"host lengths are {given.tolist()}; at most {MAX_LENGTH} is accepted, they are kept in int32")
    return given.to(torch.int32, copy=True)


class DecodeTensors(NamedTuple):
    """The tensors of one decode call and the plain values that go with them.

    Attributes:
        q_nope_abs: [B, S_q, H, R], the queries without rope multiplied by W_UK. The last dimension of every tensor is
            contiguous, other strides are free.
        q_rope: [B, S_q, H, Dr].
        c_kv: [B, S_kv, R], or [pages, page_size, R] with a page table.
        k_rope: [B, S_kv, Dr], or [pages, page_size, Dr].
        softmax_scale: multiplies the scores before the softmax.
        causal: as in ``DecodeRequest``.
        return_lse: as in ``DecodeRequest``; without it a backend may leave lse None.
        page_table: int32 [B, n]; entries beyond a sequence's length hold anything and are never followed.
        seqlens_kv: int32 [B]; None: the sequences fill a contiguous cache. What the cache holds beyond a length has no
            influence as long as it is finite.
        leftpad_kv: int32 [B]; keys before it are not seen.
        lengths: where ``seqlens_kv`` came from, when it came as ``DecodeLengths``.
    """

    q_nope_abs: torch.Tensor
    q_rope: torch.Tensor
    c_kv: torch.Tensor
    k_rope: torch.Tensor
    softmax_scale: float
    causal: bool = False
    return_lse: bool = False
    page_table: torch.Tensor | None = None
    seqlens_kv: torch.Tensor | None = None
    leftpad_kv: torch.Tensor | None = None
    lengths: DecodeLengths | None = None


class DecodeOutput(NamedTuple):
    """What a decode returns.

    Attributes:
        out: [B, S_q, H, R], dtype of the queries; a query that sees no key is 0.
        lse: [B, H, S_q], natural log, float32 (float64 for float64); -inf for a query that sees no key. None where the
            call does not ask for it.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
