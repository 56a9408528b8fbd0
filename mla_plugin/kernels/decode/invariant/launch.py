"""The launch of the batch-invariant decode kernels."""

from __future__ import annotations

import functools

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import Known
from mla_plugin.kernels.decode import launch
from mla_plugin.kernels.decode.descriptors import CacheDescriptors, can_use_descriptors
from mla_plugin.kernels.decode.invariant.combine import combine_chunks_kernel
from mla_plugin.kernels.decode.invariant.kernel import chunks_kernel
from mla_plugin.kernels.decode.invariant.plan import NUMBERS, plan_chunks_kernel
from mla_plugin.kernels.decode.tiles import DecodeTile
from mla_plugin.kernels.launch import Launch
from mla_plugin.kernels.tiles import ceil_div, next_power_of_2

WORKSPACE_BYTES = 512 << 20
"""Most memory for chunk results at a time, unless two sequences need more."""
_COMBINE_COLUMNS, _COMBINE_CHUNKS = 256, 16


def rounds_of(batch: int, chunks: int, slot_bytes: int) -> tuple[int, int, int]:
    """(rounds, chunk indices per round, slots) for sequences of up to so many chunks.

    A round takes the sequences whose first chunk is in its range of indices; the last one may extend beyond it.
    """
    most = max(WORKSPACE_BYTES // slot_bytes, 2 * chunks)
    if batch * chunks <= most:
        return 1, max(1, batch * chunks), batch * chunks
    size = most - chunks
    return ceil_div(batch * chunks, size), size, most


_ROUNDED = {"enable_fp_fusion": False}
"""No fused multiply-adds, so that all code paths of a kernel round equally."""


def _combine_launch(tensors: DecodeTensors, device: launch.Device, slots: int) -> Launch:
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    columns = min(next_power_of_2(rank), _COMBINE_COLUMNS)
    return Launch(
        combine_chunks_kernel,
        (batch * seqlen_q * heads, ceil_div(rank, columns), 1),
        ("Parts", "Out", "Lse"),
        {"num_heads": heads, "seqlen_q": seqlen_q, "slots": slots, "R": rank, "BLOCK_R": columns}
        | {"BLOCK_CHUNKS": _COMBINE_CHUNKS, "DEPENDENT": device.has_dependent_launch},
        launch.options_of(device, 1, **_ROUNDED),
    )


def _plan_launch(tensors: DecodeTensors, device: launch.Device, chunk: int, fixed: dict[str, int]) -> Launch:
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    return Launch(
        plan_chunks_kernel,
        (fixed["num_parts"], 1, 1),
        ("Parts", "seqlens_kv", "leftpad_kv"),
        fixed
        | {"batch": batch, "capacity": tensors.capacity, "num_rows": seqlen_q * heads, "R": rank, "CHUNK": chunk}
        | {"DEPENDENT": device.has_dependent_launch},
        launch.options_of(device, 4),
    )


def _workspace(tensors: DecodeTensors, slots: int, parts: int) -> int:
    """Elements of the workspace that ``combine_chunks_kernel`` describes."""
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    words: int = slots * seqlen_q * heads + 2 * batch + NUMBERS * parts
    elements: int = ceil_div(slots * seqlen_q * heads * rank, 2) * 2
    itemsize: int = tensors.q_nope_abs.element_size()
    return elements + words * (4 // itemsize)


def make_launches(tensors: DecodeTensors, chunk: int) -> launch.Launches:
    """The launches that split every sequence into chunks of ``chunk`` keys, a multiple of every tile's.

    The tile depends on the heads, not on all rows, so that a query is computed equally alone and among others.
    """
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    device = launch.device_of(tensors.q_nope_abs.device)
    tile: DecodeTile = launch.tile_of(tensors, device, heads)
    chunks, row_tiles = launch.count_tiles(batch, tensors.capacity, chunk), ceil_div(seqlen_q * heads, tile.block_m)
    slot_bytes = max(1, seqlen_q * heads * rank * tensors.q_nope_abs.element_size())
    rounds, size, slots = rounds_of(batch, chunks, slot_bytes)
    if chunks == 1:
        slots = 0  # results are written directly to out
    parts = min(launch.choose_parts(row_tiles, device.processors * tile.programs), max(1, batch * chunks))
    by_descriptors = can_use_descriptors(tensors, device, tile, launch.page_size_of(tensors))
    described = CacheDescriptors(tile.block_n, launch.widths_of(tensors)) if by_descriptors else None
    found = []
    for n in range(rounds):
        fixed = {"num_parts": parts, "slots": slots, "begin": n * size, "size": size}
        attend = launch.attend_launch(
            chunks_kernel,
            tensors,
            device,
            tile,
            row_tiles * parts,
            by_descriptors,
            fixed | {"PLANNED": tile.planned, "CHUNK": chunk},
            **_ROUNDED,
        )
        plan = _plan_launch(tensors, device, chunk, fixed) if tile.planned else None
        found.append(launch.Round(plan, attend, _combine_launch(tensors, device, slots) if chunks > 1 else None))
    code = (chunk, rank, heads, tensors.causal, tile, launch.page_size_of(tensors), by_descriptors)
    return launch.launches_of(tensors, described, _workspace(tensors, slots, parts), tuple(found), (*code, chunks > 1))


def kept_as(chunk: int) -> str:
    """The key under which a layout caches the launches."""
    return f"triton, batch invariant by {chunk}"


def decode(tensors: DecodeTensors, known: Known, chunk: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [B, S_q, H, R] and, if wanted, lse [B, H, S_q].

    A query has the same bits in every call with as many heads and the same ``chunk``, a multiple of every tile's keys;
    kernels/README.md says what a chunk costs.
    """
    return launch.decode(tensors, known, functools.partial(make_launches, chunk=chunk), kept_as(chunk))
