"""The partitions of warps: one runs at a time, in a random order that a seed fixes.

Another one may take over wherever it could see a difference: at barriers, while a product is in flight, and before
threads read or write shared memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.kernels.gluon.memory import Descriptor, Shared, poison_of
from tests.kernels.gluon.values import Pointer, Value, torch_dtype

WARP = 32
"""Threads."""


class StuckError(RuntimeError):
    """Every partition that has not ended waits for a barrier: on a GPU the kernel would hang."""


class Barrier:
    """An mbarrier: a phase ends after ``count`` arrivals, when the bytes that it expects have been copied.

    Copies end as late as possible, when a partition waits for them, or at once. Until then their memory holds NaN.
    """

    def __init__(self, name: str, lands_at_once: bool = False) -> None:
        self.name = name
        self._lands_at_once = lands_at_once
        self.count = 0
        self.phase = 0
        self._arrived = 0
        self._expected = 0
        self._copies: list[Callable[[], None]] = []

    def init(self, count: int) -> None:
        """Set the arrivals of a phase."""
        self.count = count

    def arrive(self, count: int = 1) -> None:
        """Arrive so many times."""
        self._arrived += count
        if self._arrived > self.count:
            raise RuntimeError(f"{self.name}: {self._arrived} arrivals in a phase of {self.count}")
        self._end_phase()

    def expect(self, size: int) -> None:
        """Arrive, and expect so many bytes."""
        self._expected += size
        self.arrive()

    def copy(self, descriptor: Descriptor, start: list[Any], target: Shared) -> None:
        """Start a copy by TMA, whose bytes count here."""
        given = target.read().shape
        assert list(given) == descriptor.block_shape, f"{given} for a block of {descriptor.block_shape}"
        if not target.is_fenced():
            raise RuntimeError("a copy to shared memory that threads wrote without fence_async_shared")
        target.poison()
        at = [int(x) for x in start]

        def land() -> None:
            target.write(descriptor.tile(at))
            self._expected -= target.size()

        self._copies.append(land)
        if self._lands_at_once:
            self.land()

    def arrive_after(self, copies: list[Callable[[], None]], threads: int) -> None:
        """So many threads arrive, each when its copies have ended."""

        def land() -> None:
            for copy in copies:
                copy()
            self.arrive(threads)

        self._copies.append(land)

    def land(self) -> None:
        """End the copies."""
        copies, self._copies = self._copies, []
        for copy in copies:
            copy()
        self._end_phase()

    def _end_phase(self) -> None:
        if self._arrived == self.count and self._expected == 0 and not self._copies:
            self.phase += 1
            self._arrived = 0

    def has_ended(self, parity: int) -> bool:
        """Whether the phase of this parity has ended, as ``mbarrier.try_wait.parity`` says."""
        return self.phase & 1 != parity


class Partition:
    """Some warps of a program, and the products that they have issued."""

    def __init__(self, run: Callable[[], None], name: str, warps: int = 1) -> None:
        self.name = name
        self.threads = warps * WARP
        self.has_waited = False  # for the kernel before
        self.waits_for: tuple[Barrier, int] | None = None
        self.bit = 0
        self._waits_until = 0  # the phase of that barrier in which it must go on
        self.has_ended = False
        self.failure: BaseException | None = None
        self.baton = threading.Event()
        self._run = run
        self._products: list[tuple[Value, Callable[[], torch.Tensor]]] = []
        self._copies: list[Callable[[], None]] = []
        self._groups: list[list[Callable[[], None]]] = []

    def copy(self, pointer: Pointer, mask: Any, target: Shared) -> None:
        """Start an asynchronous copy of its own threads; what is masked is NaN then, of bytes that of e4m3."""
        target.poison()
        other = poison_of(torch_dtype(pointer.dtype.element_ty))
        self._copies.append(lambda: target.write_by(self.bit, pointer.load(mask, other).data))

    def commit_copies(self) -> None:
        """Those that are in no group are one."""
        self._groups.append(self.taken_copies())

    def wait_for_copies(self, most: int) -> None:
        """Until at most so many groups are in flight; they end in order, and as late as this allows."""
        while len(self._groups) > most:
            for copy in self._groups.pop(0):
                copy()

    def taken_copies(self) -> list[Callable[[], None]]:
        """Those that no barrier counts yet."""
        copies, self._copies = self._copies, []
        return copies

    def issue(self, product: Callable[[], torch.Tensor], layout: Any) -> Value:
        """A product that is computed when it is waited for, from what shared memory holds then."""
        found = Value(None, layout)
        self._products.append((found, product))
        return found

    def wait_for_products(self, most: int) -> None:
        """Until at most so many are in flight; they end in order."""
        while len(self._products) > most:
            found, product = self._products.pop(0)
            found.complete(product())

    def check_idle(self) -> None:
        """Raises: it ends with a product or a copy in flight."""
        if self._products:
            raise RuntimeError(f"{self.name} ends with {len(self._products)} products in flight")
        if self._groups or self._copies:
            raise RuntimeError(f"{self.name} ends with copies in flight")

    def can_run(self) -> bool:
        """Whether what it waits for has happened; lands copies that it waits for."""
        if self.waits_for is None:
            return True
        barrier, parity = self.waits_for
        if not barrier.has_ended(parity):
            barrier.land()
        if barrier.phase > self._waits_until:
            raise RuntimeError(f"a phase of {barrier.name} ends before {self.name} has seen that the previous one has")
        return barrier.has_ended(parity)

    def begin_wait(self, barrier: Barrier, parity: int) -> None:
        """It cannot run before the phase of this parity has ended, and a barrier tells phases apart by parity only."""
        self.waits_for = (barrier, parity)
        self._waits_until = barrier.phase + (not barrier.has_ended(parity))

    def start(self, scheduler: Scheduler) -> None:
        """Run in a thread, whenever it has the baton."""

        def target() -> None:
            self.baton.wait()
            scheduler.local.partition = self
            try:
                self._run()
                self.check_idle()
            except BaseException as failure:  # reported by the scheduler's thread
                self.failure = failure
            self.has_ended = True
            scheduler.turn.set()

        threading.Thread(target=target, daemon=True).start()


class Scheduler:
    """Runs partitions: a random one at each turn or, for half of the seeds, always the first of a random order.

    The latter lets one partition run as far ahead of the others as barriers allow.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._is_fair = self._random.random() < 0.5
        self.lands_at_once = self._random.random() < 0.5
        self._order: list[Partition] = []
        self._next: Partition | None = None
        self.turn = threading.Event()
        self.local = threading.local()

    @property
    def current(self) -> Partition:
        """The partition whose thread asks."""
        found: Partition = self.local.partition
        return found

    @property
    def asking(self) -> Partition | None:
        """The same; None before there are partitions."""
        return getattr(self.local, "partition", None)

    def wait(self, barrier: Barrier, parity: int) -> None:
        """Let others run until the phase has ended."""
        self.current.begin_wait(barrier, parity)
        self._give_way()

    def pause(self) -> None:
        """Let another one run, if it is its turn; before there are partitions nothing happens."""
        partition = self.asking
        if partition is not None:
            chosen = self._choose()
            if chosen is not None and chosen is not partition:
                self._next = chosen
                self._give_way()

    def bit(self) -> int:
        """Of the partition whose thread asks; threads before the partitions are those of the first."""
        partition = self.asking
        return 1 if partition is None else partition.bit

    def _choose(self) -> Partition | None:
        running = [partition for partition in self._order if not partition.has_ended]
        if self._is_fair:
            self._random.shuffle(running)
        return next((partition for partition in running if partition.can_run()), None)

    def _give_way(self) -> None:
        partition = self.current
        partition.baton.clear()
        self.turn.set()
        partition.baton.wait()
        partition.waits_for = None
        if partition.failure is not None:
            raise partition.failure

    def run(self, partitions: list[Partition]) -> None:
        """Until all have ended.

        Raises:
            StuckError: all that have not ended wait.
            Exception: what one of them raised.
        """
        for number, partition in enumerate(partitions):
            partition.bit = 1 << number
            partition.start(self)
        self._order = self._random.sample(partitions, len(partitions))
        while running := [partition for partition in partitions if not partition.has_ended]:
            chosen = self._next or self._choose()
            self._next = None
            if chosen is None:
                waits = [f"{p.name} for {p.waits_for[0].name}" for p in running if p.waits_for is not None]
                failure = StuckError(f"everybody waits: {', '.join(waits)}")
                for partition in running:  # end their threads
                    partition.failure = failure
                    partition.baton.set()
                raise failure
            self.turn.clear()
            chosen.baton.set()
            self.turn.wait()
            if chosen.failure is not None:
                raise chosen.failure
