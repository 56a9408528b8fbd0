"""The tensors of a decode call over the compressed cache, and the lengths that the layers of a step share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

import torch

from mla_plugin.arguments.capture import stream_and_capture
from mla_plugin.arguments.checks import MAX_LENGTH, check_tensor, may_read

MAX_SPREAD = 16


class Profile(NamedTuple):
    """Summary of the lengths for the choice of a backend, rounded so that it rarely changes between decode steps.

    Attributes:
        mean: the mean length, rounded to a power of 2; 0 if there are no keys.
        spread: the longest length over the mean, rounded to a power of 2, at most 16; 1 if all lengths are equal.
    """

    mean: int
    spread: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Profile:
        """From the number of keys of each sequence."""
        total = sum(lengths)
        if not total:
            return cls(0, 1)
        mean = total / len(lengths)
        return cls.rounded(mean, max(lengths) / mean)

    @classmethod
    def rounded(cls, mean: float, spread: float) -> Profile:
        """From the mean, at least 1, and the ratio of the longest length to it."""
        return cls(_power_of_2(mean), min(_power_of_2(spread), MAX_SPREAD))


def _power_of_2(x: float) -> int:
    """The power of 2 nearest in log scale, at least 1."""
    return 1 << max(round(math.log2(x)), 0)


class Schedule(Protocol):
    """A backend's schedule, kept in ``DecodeLengths``: how its kernel splits the work, which depends on the lengths."""

    def renew(self, lengths: DecodeLengths) -> bool:
        """Update the schedule for changed lengths, in the same device memory, so that captured graphs stay valid.

        Returns False and does nothing if no call and no graph uses the schedule; it is then dropped.
        """


Scheduled = TypeVar("Scheduled", bound=Schedule)


class Shared(NamedTuple):
    """What the layers of a step share under one key, see ``DecodeLengths.shared``.

    Attributes:
        value: what an earlier call has kept; None: compute it, then call ``keep``.
        lengths: which keep the value; None once they do.
        key: under which they keep it.
        version: theirs before this call's kernels read them; another thread may update them.
    """

    value: Any
    lengths: DecodeLengths | None
    key: tuple[Hashable, tuple[int, int]]
    version: Hashable

    def keep(self, value: object) -> None:
        """Share what this call has computed. Call it after the kernels that write it have been launched."""
        assert self.lengths is not None, "kept already"
        self.lengths._keep(self._replace(value=value, lengths=None))


class DecodeLengths:
    """Number of keys of each sequence at one decode step, on the device and, if known, on the host.

    Pass it as ``seqlens_kv`` to all layers of the step. Backends plan once per object instead of once per layer: on the
    device (our kernels, FlashMLA), or on the host (FlashInfer), which never synchronises to read the lengths. Make a
    new one for each step, or ``update`` one: captured CUDA graphs that used it then replay with the new lengths.

    Args:
        host: the lengths, as ints or a CPU tensor [B]; reading a device tensor would synchronise. None: only the device
            knows them; then backends that plan on the host refuse the call.
        seqlens_kv: int32 [B], the same lengths on the cache's device. None: they are copied to ``device``.
        device: where to copy them; default the current CUDA device, or the CPU if there is none.

    Attributes:
        host: int32 [B] on the CPU, or None.
        seqlens_kv: int32 [B] on the cache's device. Change lengths that the host knows only with ``update``; where only
            the device knows them, call ``update`` after the change.

    Raises:
        ValueError, TypeError: the lengths are not B non-negative ints on the CPU, or the tensors do not match. Values
            of a CUDA tensor are compared only with MLA_PLUGIN_CHECK=1.
    """

    def __init__(
        self,
        host: Sequence[int] | torch.Tensor | None = None,
        *,
        seqlens_kv: torch.Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.host = None
        if host is None:
            _check_device_lengths(seqlens_kv)
        else:
            with torch.inference_mode(False):  # later updates write to them outside inference mode too
                self.host = _host_lengths(host)
                if seqlens_kv is None:
                    device = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
                    seqlens_kv = self.host.to(device, copy=True)
            _check_equal(self.host, seqlens_kv)
        assert seqlens_kv is not None
        self._seqlens_kv = seqlens_kv
        self._updates = 0
        self._schedules: dict[Hashable, Schedule] = {}
        self._kept: dict[tuple[Hashable, tuple[int, int]], Shared] = {}
        self._device = seqlens_kv.device
        self._is_counted: bool | None = None  # not asked here, where torch.compile could not follow
        self._profile: Profile | None = None

    def __len__(self) -> int:
        return self.seqlens_kv.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        """A copy, and what is pickled, has memory of its own and plans for itself."""
        with torch.inference_mode(False):
            host = None if self.host is None else self.host.clone()
            own = {"host": host, "_seqlens_kv": self._seqlens_kv.clone()}
        return self.__dict__ | own | {"_schedules": {}, "_kept": {}, "_is_counted": None}

    @property
    def seqlens_kv(self) -> torch.Tensor:
        """int32 [B] on the cache's device, always the same tensor."""
        return self._seqlens_kv

    @property
    def profile(self) -> Profile | None:
        """Summary of the lengths that the choice of a backend depends on; None if the host does not know them."""
        if self._profile is None and self.host is not None:
            self._profile = Profile.of(self.host.tolist())
        return self._profile

    def update(self, host: Sequence[int] | torch.Tensor | None = None) -> None:
        """Write as many new lengths into the same memory and update the backends' schedules.

        If only the device knows the lengths, call it without ``host`` after they have been written to ``seqlens_kv``.
        If a backend raises, its error is raised and nothing has changed.
        """
        if self.host is None:
            if host is not None:
                raise TypeError("update(host) of lengths that only the device knows; write seqlens_kv, then update()")
            self._renew()
            return
        if host is None:
            raise TypeError("update() without lengths, but the host knows them; pass the new ones")
        new = _host_lengths(host)
        if new.shape != self.host.shape:
            raise ValueError(f"{len(new)} lengths given, {len(self.host)} expected; make a new DecodeLengths")
        before = self.host.clone()
        try:
            self._take(self.host, new)
        except Exception:
            self._take(self.host, before)
            raise

    def _take(self, host: torch.Tensor, lengths: torch.Tensor) -> None:
        self._updates += 1  # before the write too: another thread may have a plan of the old lengths
        host.copy_(lengths)
        self._profile = None
        with torch.inference_mode(self.seqlens_kv.is_inference()):  # the caller's tensor may be of that mode
            self.seqlens_kv.copy_(lengths, non_blocking=True)
        self._renew()

    def _renew(self) -> None:
        self._updates += 1
        self._kept.clear()
        self._schedules = {key: schedule for key, schedule in self._schedules.items() if schedule.renew(self)}

    def _state(self) -> Hashable:
        """Changes with ``update``, and when PyTorch writes to ``seqlens_kv``; other writers leave no trace.

        Nor does PyTorch if the tensor was made in ``inference_mode``.
        """
        lengths = self._seqlens_kv
        if self._is_counted is None:
            self._is_counted = not lengths.is_inference()
        return self._updates, lengths.data_ptr(), lengths._version if self._is_counted else None

    def shared(self, key: Hashable) -> Shared | None:
        """What layers share that is computed on the device from ``seqlens_kv``.

        It is shared on one stream, outside of captures or within one, because elsewhere it might not be written yet, or
        not be written again when a graph is replayed. Once the lengths change it is gone. What is computed on the host
        is a ``schedule`` instead.

        Args:
            key: who shares it, and all that it depends on besides the lengths.

        Returns:
            The value that an earlier call has kept, or where to keep this call's; None where nothing can be shared,
            within a capture that the driver does not tell from others.
        """
        place = stream_and_capture(self._device)
        if place is None:
            return None
        at, version = (key, place), self._state()
        found = self._kept.get(at)
        return Shared(None, self, at, version) if found is None or found.version != version else found

    def _keep(self, shared: Shared) -> None:
        """Keep it, and nothing of other lengths or of captures that have ended."""
        captures = (0, shared.key[1][1])
        kept = {
            at: held for at, held in list(self._kept.items()) if held.version == shared.version and at[1][1] in captures
        }
        self._kept = kept | {shared.key: shared}

    def schedule(self, key: Hashable, make: Callable[[DecodeLengths], Scheduled]) -> Scheduled:
        """A backend's schedule for these lengths: the one kept under ``key``, or a new one."""
        found = self._schedules.get(key)
        if found is None:
            found = self._schedules[key] = make(self)
        return found  # type: ignore[return-value]


def _check_device_lengths(seqlens_kv: object) -> None:
    if not isinstance(seqlens_kv, torch.Tensor):
        raise TypeError(
            f"neither host nor seqlens_kv has lengths (seqlens_kv is {type(seqlens_kv).__name__}); pass ints, a CPU "
            "tensor, or seqlens_kv=, a tensor on the cache's device, int32 [B]"
        )
    check_tensor("seqlens_kv", seqlens_kv, "int32 [B]")
    if seqlens_kv.dtype != torch.int32 or seqlens_kv.dim() != 1:
        raise ValueError(f"seqlens_kv is {seqlens_kv.dtype} {list(seqlens_kv.shape)}; expected int32 [B]")


def _check_equal(host: torch.Tensor, seqlens_kv: object) -> None:
    check_tensor("seqlens_kv", seqlens_kv, f"int32 [{len(host)}]")
    assert isinstance(seqlens_kv, torch.Tensor)
    if seqlens_kv.dtype != torch.int32 or seqlens_kv.shape != host.shape:
        raise ValueError(
            f"seqlens_kv is {seqlens_kv.dtype} {list(seqlens_kv.shape)} and host has {len(host)} lengths; "
            f"expected int32 [{len(host)}]"
        )
    if may_read(seqlens_kv) and seqlens_kv.tolist() != host.tolist():
        raise ValueError(
            f"host lengths are {host.tolist()} and seqlens_kv is {seqlens_kv.tolist()}; they must be equal"
        )


def _host_lengths(host: Sequence[int] | torch.Tensor) -> torch.Tensor:
    if isinstance(host, torch.Tensor) and host.device.type != "cpu":
        raise ValueError(f"host lengths are on {host.device}; pass ints or a CPU tensor, or this one as seqlens_kv=")
    try:
        given = torch.as_tensor(host, device="cpu")  # whatever the default device is
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: beyond int64
        raise TypeError(
            f"host lengths are {type(host).__name__}, which PyTorch cannot convert to a tensor ({error}); "
            "expected a list of ints or a CPU tensor [B]"
        ) from error
    if given.dtype not in (torch.int32, torch.int64) and given.numel():  # an empty list has no dtype
        raise TypeError(f"host lengths have dtype {given.dtype}; expected int32 or int64")
    if not isinstance(host, torch.Tensor) and any(isinstance(x, bool) for x in host):
        raise TypeError(f"host lengths are {host}; expected ints, not bools")
    is_read = may_read(given)
    if given.dim() != 1 or (is_read and (given < 0).any()):
        raise ValueError(f"host lengths are {given.tolist()}; expected one non-negative length per sequence")
    if is_read and (given > MAX_LENGTH).any():
        raise ValueError(f"host lengths are {given.tolist()}; expected at most {MAX_LENGTH}, they are kept in int32")
    return given.to(torch.int32, copy=True)


class DecodeTensors(NamedTuple):
    """The tensors of one decode call and the plain values that go with them.

    Attributes:
        q_nope_abs: [B, S_q, H, R], the queries without rope multiplied by W_UK. The last dimension of every tensor is
            contiguous; other strides may be anything.
        q_rope: [B, S_q, H, Dr].
        c_kv: [B, S_kv, R], or [pages, page_size, R] with a page table; uint8 in a quantised cache.
        k_rope: [B, S_kv, Dr], or [pages, page_size, Dr]; uint8 in ``fp8``, bfloat16 in ``fp8_ds_mla``.
        softmax_scale: multiplies the scores before the softmax.
        causal: as in ``DecodeRequest``.
        return_lse: as in ``DecodeRequest``; without it a backend may leave lse None.
        page_table: int32 [B, n]; entries beyond a sequence's length may hold anything and are not read.
        seqlens_kv: int32 [B]; None: the sequences fill a contiguous cache. Values of the cache beyond a length do not
            matter as long as they are finite.
        leftpad_kv: int32 [B]; keys before it are masked.
        lengths: where ``seqlens_kv`` came from, when it came as ``DecodeLengths``.
        kv_scale: of a quantised cache, float32: no dimension in ``fp8``, [.., .., 4] next to c_kv in ``fp8_ds_mla``.
        kv_cache_format: as in ``DecodeRequest``.
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
    kv_scale: torch.Tensor | None = None
    kv_cache_format: str = "plain"

    @property
    def capacity(self) -> int:
        """Keys that the cache has room for per sequence."""
        rows = self.c_kv.shape[1]
        return rows if self.page_table is None else rows * self.page_table.shape[1]

    @property
    def host_lengths(self) -> torch.Tensor | None:
        """The lengths as the host knows them: int32 [B] on the CPU."""
        return None if self.lengths is None else self.lengths.host

    @property
    def shared_lengths(self) -> DecodeLengths | None:
        """``lengths`` if ``seqlens_kv`` is their tensor and there is no left padding; otherwise None.

        Only then do all calls with these lengths see the same keys of each sequence.
        """
        lengths = self.lengths
        if lengths is None or self.seqlens_kv is not lengths.seqlens_kv or self.leftpad_kv is not None:
            return None
        return lengths

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """Shape of the log-sum-exp: [B, H, S_q]."""
        batch, seqlen_q, heads, _ = self.q_nope_abs.shape
        return batch, heads, seqlen_q


OPERATOR_FIELDS = {name: hint for name, hint in get_type_hints(DecodeTensors).items() if name != "lengths"}
"""The operator's arguments in its order: all of ``DecodeTensors`` except ``lengths``."""
