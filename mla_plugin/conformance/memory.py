"""How much memory a test may take: of the device, and on a CPU of what the process's control groups leave."""

from __future__ import annotations

import contextlib
import os
import unittest
from collections.abc import Iterator
from pathlib import Path

import torch

NEEDED_BYTES = 48 << 30
_GROUPS = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of the second and the first version of control groups: the limit, what is in use, and what of it can be dropped."""


def check_memory(device: str, needed: int = NEEDED_BYTES) -> None:
    """Skip the test, with a reason, if the device has less free memory.

    Of a CPU's memory only what is touched is taken, but a backend may copy the whole of a tensor.
    """
    free = free_on_the_host() if torch.device(device).type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if free < needed:
        raise unittest.SkipTest(f"not run: {free >> 30} GiB of the device's memory are free, {needed >> 30} are needed")


@contextlib.contextmanager
def not_run_without_memory() -> Iterator[None]:
    """Skip the test where the device runs out of memory: what a backend takes beside its results is its own affair."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise unittest.SkipTest(f"not run: the backend ran out of memory: {str(error).splitlines()[0]}") from error


def free_on_the_host(groups: Path = _GROUPS, mounted: Path = _MOUNTED) -> int:
    """Bytes; beyond the limit of a control group the system would end the process."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not Linux
        return 0
    return max(0, min([free, *_left_by_groups(groups, mounted)]))


def _left_by_groups(groups: Path, mounted: Path) -> Iterator[int]:
    """What each group that the process is in leaves; in a container the group's own folder may not be there."""
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        kind = "memory" if "memory" in controllers.split(",") else controllers
        if kind not in _FILES:
            continue
        limit, used, droppable = _FILES[kind]
        own = Path(path.strip("/"))
        for folder in (mounted / kind / each for each in (own, *own.parents)):
            try:
                most = (folder / limit).read_text().strip()
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                taken = int((folder / used).read_text()) - int(stat.get(droppable, 0))
            except (OSError, ValueError):
                continue
            if most != "max":
                yield int(most) - taken
