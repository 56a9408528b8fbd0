"""Measured tiles: the static table's tile and its neighbours are timed once, the fastest is kept on disk.

The tables in tiles.py are the default; tuning costs about ten seconds at the first call of each kind (``Key``).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from mla_plugin.kernels.prefill.packing import Packing, static_tile
from mla_plugin.kernels.tiles import Tile, next_power_of_2

_LARGEST_BLOCK = 128  # see WIDE_STRIDE in packing.py


class Key(NamedTuple):
    """The kind of call that a measured tile is for; lengths are rounded up to a power of two."""

    kernel: str
    dtype: str
    head_dim_qk: int
    head_dim_v: int
    causal: bool
    window: bool
    packed: bool
    seqlen_q: int
    seqlen_kv: int

    @classmethod
    def of(cls, kernel: str, q: torch.Tensor, v: torch.Tensor, packing: Packing) -> Key:
        """The key of one call of one kernel."""
        band = packing.band
        return cls(
            kernel,
            str(q.dtype).removeprefix("torch."),
            q.shape[-1],
            v.shape[-1],
            band.right >= 0,
            band.left >= 0,
            packing.layout.is_packed,
            next_power_of_2(packing.max_seqlen_q),
            next_power_of_2(packing.max_seqlen_kv),
        )


def candidates(tile: Tile) -> tuple[Tile, ...]:
    """The tile itself, and each tile one step away from it: a block, the warps or the stages (two at least)."""
    steps = (
        *((tile.block_m * 2, tile.block_n), (tile.block_m, tile.block_n * 2)),
        *((tile.block_m // 2, tile.block_n), (tile.block_m, tile.block_n // 2)),
    )
    found = [tile]
    for block_m, block_n in steps:
        if 16 <= block_m <= _LARGEST_BLOCK and 16 <= block_n <= _LARGEST_BLOCK:
            found.append(tile._replace(block_m=block_m, block_n=block_n))
    found.append(tile._replace(num_warps=4 if tile.num_warps == 8 else 8))
    found += [tile._replace(num_stages=stages) for stages in (tile.num_stages - 1, tile.num_stages + 1) if stages > 1]
    return tuple(found)


def benchmark(run: Callable[[], None]) -> float:
    """Median milliseconds of ``run`` on the current device; infinite if its tile does not fit the GPU."""
    try:
        return float(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"))
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError):
        return float("inf")


class Tuner:
    """The measured tiles of one GPU model under one version of Triton.

    Attributes:
        path: JSON file that keeps them between processes, which may share it. A file that cannot be read or written is
            ignored.
        timer: gives the time of a call.
    """

    def __init__(self, path: Path, timer: Callable[[Callable[[], None]], float] = benchmark) -> None:
        self.path = path
        self.timer = timer
        self._tiles: dict[Key, Tile] = {}

    def tile(self, key: Key, static: Tile, launch: Callable[[Tile], None]) -> Tile:
        """The tile for the key: known, else read from the file, else measured by ``launch`` with each candidate.

        ``launch`` must give the same results however often it runs. While a CUDA graph is being captured nothing can be
        measured, and an unknown key gets the ``static`` tile.
        """
        if key in self._tiles:
            return self._tiles[key]
        accepted = candidates(static)
        found = self._read(key)
        if found not in accepted:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return static
            found = min(accepted, key=lambda tile: self.timer(functools.partial(launch, tile)))
            self._write(key, found)
        self._tiles[key] = found
        return found

    def _load(self) -> dict[str, object]:
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _read(self, key: Key) -> Tile | None:
        """The key's tile if the file has one; an entry of another version of this library may be anything."""
        entry = self._load().get(_text(key))
        return Tile(*entry) if isinstance(entry, list) and len(entry) == len(Tile._fields) else None

    def _write(self, key: Key, tile: Tile) -> None:
        """Add the tile to the file atomically."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = self._load() | {_text(key): list(tile)}
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
                json.dump(content, file, indent=1)
            os.replace(file.name, self.path)


def _text(key: Key) -> str:
    return " ".join(str(value) for value in key)


def measured_tile(
    kernel: str, q: torch.Tensor, v: torch.Tensor, packing: Packing, launch: Callable[[Tile], None]
) -> Tile:
    """The measured tile of a call in 2-byte elements on a CUDA device, else the static one.

    float32 stays with the table: its kernels take too long to compile to try several.
    """
    static = static_tile(kernel, q, v)
    if not q.is_cuda or q.element_size() != 2:
        return static
    return tuner(q.device).tile(Key.of(kernel, q, v, packing), static, launch)


@functools.cache
def tuner(device: torch.device) -> Tuner:
    """The tuner of a CUDA device; its file lies in Triton's cache directory."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device))
    return Tuner(Path(triton.knobs.cache.dir) / "mla_plugin" / f"{name}-triton-{triton.__version__}.json")
