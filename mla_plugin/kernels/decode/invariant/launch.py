"""The launch of the batch-invariant decode kernels."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import Known
from mla_plugin.kernels.decode import launch
from mla_plugin.kernels.decode.descriptors import CacheDescriptors, can_use_descriptors
from mla_plugin.kernels.decode.hopper import launch as hopper
from mla_plugin.kernels.decode.invariant.chunks import most_chunks
from mla_plugin.kernels.decode.invariant.combine import combine_chunks_kernel
from mla_plugin.kernels.decode.invariant.kernel import chunks_kernel
from mla_plugin.kernels.decode.invariant.plan import COUNTED_KEYS, NUMBERS, plan_chunks_kernel
from mla_plugin.kernels.decode.limits import check_rows, count_tiles
from mla_plugin.kernels.decode.plan import FEW_SEQUENCES
from mla_plugin.kernels.decode.run import Described, Launches, Round, launches_of, run
from mla_plugin.kernels.decode.tiles import DecodeTile
from mla_plugin.kernels.hopper.common import ROWS
from mla_plugin.kernels.launch import Launch
from mla_plugin.kernels.tiles import ceil_div, next_power_of_2

_WORKSPACE_BYTES = 512 << 20
"""Most for chunk results at a time, unless the device has more than so many times as much memory: then that share."""
_WORKSPACES_OF_MEMORY = 128


def workspace_bytes(memory: int) -> int:
    """Most bytes for chunk results at a time, unless two sequences need more; ``memory``: bytes of the device."""
    return max(_WORKSPACE_BYTES, memory // _WORKSPACES_OF_MEMORY)


def combine_sizes(rows: int, chunks: int, rounds: int) -> tuple[int, int, int]:
    """Rows, columns and chunks at a time of a program of the combine kernel.

    A row takes a warp. With few rows, or many chunks, more programs share a row. With several rounds a program has four
    rows: a round may have no sequence, and fewer programs start faster.

    Args:
        rows: those of all sequences.
        chunks: most of a sequence, by the capacity.
        rounds: into which the launch is divided.
    """
    if rounds > 1:
        return 4, 512, 4
    # microseconds on an H200 with 64 columns and 32 chunks, 128 and 8, 256 and 8, 512 and 4:
    # 8 x 32k keys, H 8: 90, 94, 101, 105; 64 x 32k, H 16: 663, 655, 671, 686; 64 x 1k, H 16: 46, 41, 39, 39;
    # 256 x 1k, H 32: 186, 146, 128, 123
    if rows <= 64:
        return 1, 64, 32
    if rows <= 512 or (rows <= 4096 and chunks > 40):
        return 1, 128, 8
    return (1, 256, 8) if rows <= 4096 else (1, 512, 4)


def rounds_of(batch: int, chunks: int, slot_bytes: int, workspace: int) -> tuple[int, int, int]:
    """(rounds, chunk indices per round, slots) for sequences of up to so many chunks, in so many bytes of workspace.

    A round takes the sequences whose first chunk is in its range of indices; the last one may extend beyond it.
    """
    most = max(workspace // slot_bytes, 2 * chunks)
    if batch * chunks <= most:
        return 1, max(1, batch * chunks), batch * chunks
    size = most - chunks
    return ceil_div(batch * chunks, size), size, most


_ROUNDED = {"enable_fp_fusion": False}
"""No fused multiply-adds, so that all code paths of a kernel round equally."""


def _combine_launch(
    tensors: DecodeTensors, device: launch.Device, slots: int, chunks: int, rounds: int, *, is_mixed: bool
) -> Launch | None:
    """None if no sequence can have two chunks."""
    if chunks == 1:
        return None
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    num_rows = seqlen_q * heads
    rows, columns, at_a_time = combine_sizes(batch * num_rows, chunks, rounds)
    columns = min(next_power_of_2(rank), columns)
    return Launch(
        combine_chunks_kernel,
        (batch * ceil_div(num_rows, rows), ceil_div(rank, columns), 1),
        ("Parts", "Plan", "Out", "Lse"),
        {"num_heads": heads, "seqlen_q": seqlen_q, "slots": slots, "R": rank}
        | {"BLOCK_ROWS": rows, "BLOCK_R": columns, "BLOCK_CHUNKS": at_a_time}
        | {"MIXED": is_mixed, "DEPENDENT": device.has_dependent_launch},
        launch.options_of(device, rows, **_ROUNDED),
    )


def _plan_launch(tensors: DecodeTensors, device: launch.Device, chunk: int, fixed: dict[str, int]) -> Launch:
    return Launch(
        plan_chunks_kernel,
        (fixed["num_parts"], 1, 1),
        ("Plan", "seqlens_kv", "leftpad_kv"),
        fixed
        | {"batch": tensors.q_nope_abs.shape[0], "capacity": tensors.capacity, "CHUNK": chunk}
        | {"DEPENDENT": device.has_dependent_launch},
        launch.options_of(device, 4),
    )


def _workspace(tensors: DecodeTensors, slots: int) -> int:
    """Elements of the workspace that ``combine_chunks_kernel`` describes."""
    _, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    words: int = slots * seqlen_q * heads
    elements: int = ceil_div(words * rank, 2) * 2
    itemsize: int = tensors.q_nope_abs.element_size()
    return elements + words * (4 // itemsize)


class _Division(NamedTuple):
    """Which attention kernel computes a call, and how its work is divided.

    Attributes:
        is_hopper: the Hopper kernel, whose tile always has 64 rows, and not the plain one.
        by_descriptors: the plain kernel reads the cache by descriptors.
        row_tiles, chunks: tiles of a sequence's (query, head) pairs, and most chunks of its keys.
        parts: programs for a row tile.
        rounds, size, slots: of ``rounds_of``.
        is_planned: a kernel before it plans.
    """

    is_hopper: bool
    tile: DecodeTile
    by_descriptors: bool
    row_tiles: int
    chunks: int
    parts: int
    rounds: int
    size: int
    slots: int
    is_planned: bool


def _divide(tensors: DecodeTensors, device: launch.Device, chunk: int, *, is_shared: bool) -> _Division:
    """Arguments as for ``make_launches``."""
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    is_hopper = hopper.takes_cache(tensors, device, batch_invariant=True)
    tile: DecodeTile = launch.tile_of(tensors, device, ROWS.value if is_hopper else heads)
    count_tiles(batch, tensors.capacity, COUNTED_KEYS.value)  # fewer than the plan can count
    chunks = most_chunks(tensors.capacity, chunk)
    row_tiles = ceil_div(seqlen_q * heads, ROWS.value if is_hopper else tile.block_m)
    slot_bytes = max(1, seqlen_q * heads * rank * tensors.q_nope_abs.element_size())
    rounds, size, slots = rounds_of(batch, chunks, slot_bytes, workspace_bytes(device.memory))
    if chunks == 1:
        rounds, slots = 1, 0  # results are written directly to out
    parts = min(launch.choose_parts(row_tiles, device.processors * tile.programs), max(1, batch * chunks))
    by_descriptors = not is_hopper and can_use_descriptors(tensors, device, tile, launch.page_size_of(tensors))
    is_planned = (batch > FEW_SEQUENCES or rounds > 1) if is_hopper else tile.planned or is_shared
    return _Division(is_hopper, tile, by_descriptors, row_tiles, chunks, parts, rounds, size, slots, is_planned)


def _attend_launch(
    tensors: DecodeTensors, device: launch.Device, chunk: int, divided: _Division, fixed: dict[str, int]
) -> Launch:
    programs = divided.row_tiles * divided.parts
    if divided.is_hopper:
        return hopper.attend_launch(
            tensors,
            programs,
            divided.parts,
            launch.page_size_of(tensors),
            launch.options_of(device, 4, **_ROUNDED),
            slots=divided.slots,
            chunk=chunk,
            is_planned=divided.is_planned,
        )
    return launch.attend_launch(
        chunks_kernel,
        tensors,
        device,
        divided.tile,
        programs,
        divided.by_descriptors,
        fixed | {"PLANNED": divided.is_planned, "slots": divided.slots, "CHUNK": chunk},
        **_ROUNDED,
    )


def make_launches(tensors: DecodeTensors, chunk: int, *, is_shared: bool = False) -> Launches:
    """The launches that split every sequence at fixed positions (``chunks.py``); ``chunk`` is 128 times a whole number.

    The tile depends on the heads, not on all rows, so that a query is computed equally alone and among others; that of
    the Hopper kernel always has 64 rows. ``is_shared``: as for the other kernels' ``make_launches``.
    """
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    check_rows(seqlen_q, heads)
    device = launch.device_of(tensors.q_nope_abs.device)
    divided = _divide(tensors, device, chunk, is_shared=is_shared)
    is_hopper, parts, rounds, slots = divided.is_hopper, divided.parts, divided.rounds, divided.slots
    described: Described | None = None
    if is_hopper:
        described = hopper.Descriptors(tensors)
    elif divided.by_descriptors:
        described = CacheDescriptors(divided.tile.block_n, launch.widths_of(tensors))
    combine = _combine_launch(tensors, device, slots, divided.chunks, rounds, is_mixed=is_hopper)
    found = []
    for n in range(rounds):
        fixed = {"num_parts": parts, "begin": n * divided.size, "size": divided.size, "SINGLE_ROUND": rounds == 1}
        plan = _plan_launch(tensors, device, chunk, fixed) if divided.is_planned else None
        found.append(Round(plan, _attend_launch(tensors, device, chunk, divided, fixed), combine))
    code = (
        *(chunk, rank, heads, tensors.causal and seqlen_q > 1, divided.tile, launch.page_size_of(tensors)),
        *(divided.by_descriptors, is_hopper, rounds == 1, divided.is_planned, combine and combine.arguments[-5:]),
    )
    return launches_of(
        tensors,
        described,
        _workspace(tensors, slots),
        2 * batch + NUMBERS.value * parts if divided.is_planned else 2 * batch,
        tuple(found),
        code,
    )


def kept_as(chunk: int) -> str:
    """The key under which a layout caches the launches."""
    return f"triton, batch invariant by {chunk}"


def decode(tensors: DecodeTensors, known: Known, chunk: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [B, S_q, H, R] and, if wanted, lse [B, H, S_q].

    A query has the same bits in every call with as many heads, of the same dtypes and the same ``chunk``, from a cache
    whose rows start on 16 bytes, or from one whose rows do not; kernels/README.md says what a chunk costs.
    """
    return run(tensors, known, functools.partial(make_launches, chunk=chunk), kept_as(chunk))
