"""Four processes over gloo that live for all tests of a session; each test runs a function in all of them."""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import interpreter

WORLD = 4
MEMBERS = {1: (2,), 2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3)}
"""Global ranks of the groups, by their size: not all start at 0."""
TIMEOUT = datetime.timedelta(seconds=20)

groups: dict[int, Any] = {}
"""In a process of the pool: the groups by their size."""
device = torch.device("cpu")
"""Where tensors are; ``nccl`` changes it."""


def _work(rank: int, path: str, connection: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD, timeout=TIMEOUT)
    for size, members in MEMBERS.items():
        groups[size] = dist.new_group(list(members), timeout=TIMEOUT)
    while (task := connection.recv()) is not None:
        function, arguments = task
        interpreter.make_quick()
        try:
            connection.send((function(**arguments), None))
        except BaseException:
            connection.send((None, f"rank {rank}: {traceback.format_exc()}"))
    dist.destroy_process_group()


class Pool:
    """The processes, started once and replaced after a test that did not end."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        path = str(Path(tempfile.mkdtemp()) / "store")
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, path, there), daemon=True)
            process.start()
            self._processes.append(process)
            self._connections.append(here)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What the function returns in each process.

        Raises:
            AssertionError: it raised in one of them, or did not end.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments))
        results, failures = [], []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(90):
                self.stop()
                raise AssertionError(f"rank {rank} did not answer within 90 s; {failures}")
            result, failure = connection.recv()
            results.append(result)
            failures += [failure] if failure else []
        if failures:
            self.stop()  # their messages may be out of step
            raise AssertionError("\n".join(failures))
        return results

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []
