"""Which decode kernels compute a call: number of programs, tile, arguments; computed once for each shape."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_layout import Known
from mla_plugin.kernels.decode import tiles as decode_tiles
from mla_plugin.kernels.decode.combine import combine_kernel
from mla_plugin.kernels.decode.descriptors import CacheDescriptors, can_use_descriptors, strides_of
from mla_plugin.kernels.decode.device import Device as Device
from mla_plugin.kernels.decode.device import device_of as device_of
from mla_plugin.kernels.decode.hopper import launch as hopper
from mla_plugin.kernels.decode.kernel import decode_kernel
from mla_plugin.kernels.decode.limits import OVERHEAD, check_rows, count_tiles
from mla_plugin.kernels.decode.plan import FEW_SEQUENCES, SHARE_NUMBERS, plan_kernel
from mla_plugin.kernels.decode.run import Described, Launches, Round, launches_of, run
from mla_plugin.kernels.decode.tiles import choose_parts as choose_parts
from mla_plugin.kernels.decode.transposed import launch as transposed
from mla_plugin.kernels.decode.transposed import rule as transposed_rule
from mla_plugin.kernels.decode.wide import launch as wide
from mla_plugin.kernels.decode.wide import rule as wide_rule
from mla_plugin.kernels.launch import Launch, named_strides
from mla_plugin.kernels.tile_math import split_head_dim
from mla_plugin.kernels.tiles import ceil_div, next_power_of_2

_split_head_dim = functools.cache(split_head_dim)  # a layout of a growing cache is new at every step
_KEPT = "triton"  # key of a layout's cached launches
_GIVEN = (
    *("Q_nope_abs", "Q_rope", "C_kv", "K_rope", "page_table", "seqlens_kv", "leftpad_kv", "KV_scale"),
    *("Parts", "Plan", "Out", "Lse"),
    *("desc_c0", "desc_c1", "desc_k", "softmax_scale"),
)
_COMBINE_GIVEN = ("Parts", "Out", "Lse")
_PLAN_GIVEN = ("Plan", "seqlens_kv", "leftpad_kv")
_COMBINE_ELEMENTS = 4096  # of parts that a warp of the combine kernel holds at a time
_COMBINE_PIECES, _COMBINE_PIECES_OF_16_ROWS = 64, 128
_COMBINE_FEW_ROWS, _COMBINE_SOME_ROWS = 512, 1024  # of all sequences
_COMBINE_MOST_ROWS, _COMBINE_COLUMNS, _COMBINE_WARPS = 16, 128, 4  # of a program where there are more rows than few
# passing a descriptor takes more host time than a pointer, which does not pay off for programs that read few tiles
_TILES_FOR_DESCRIPTORS = 8


def _workspace(slot_rows: int, entries: int, rank: int, itemsize: int) -> int:
    """Elements of ``slot_rows`` rows of ``rank`` columns, rounded up to an even number, and of the 4-byte values.

    The latter are one per row, and two per entry of the list of split sequences.
    """
    words = slot_rows + 2 * entries
    elements: int = ceil_div(slot_rows * rank, 2) * 2 + words * (4 // itemsize)
    return elements


def options_of(device: Device, num_warps: int, **others: int | None) -> dict[str, int | None]:
    """Options of a launch; None leaves an option to Triton."""
    dependent: dict[str, int | None] = {"launch_pdl": True} if device.has_dependent_launch else {}
    return {"num_warps": num_warps, **others, **dependent}


def _combine_shape(entries: int, num_rows: int, parts: int, key_tiles: int, rank: int) -> tuple[int, int, int, int]:
    """(rows, columns, pieces at a time, warps) of a program of the combine kernel.

    With few rows one sequence may have most of the pieces, so programs have few columns of one row each. With more
    rows, or few pieces, a program has several rows and up to four warps: 1,000 programs take about 1.4 us to start
    (H200), and most of them have two or three pieces to add.
    """
    most, all_rows = next_power_of_2(min(parts, key_tiles)), entries * num_rows
    if all_rows <= _COMBINE_FEW_ROWS and most > 16:
        # 31 x 1k + 32k keys: 35 us instead of 42 at H 16, 45 instead of 52 at H 32; even lengths lose up to 2
        pieces = max(32, min(next_power_of_2(ceil_div(parts, entries) + 1), most))
        # one sequence, H 16: 12.0 us instead of 12.6 over 6k keys, 19.5 instead of 21.0 over 32k; H 64: 24.4, not 23.1
        pieces = min(pieces, _COMBINE_PIECES_OF_16_ROWS if num_rows <= 16 else _COMBINE_PIECES)
        # at least 32, in which columns may be mixed
        columns = min(next_power_of_2(rank), max(32, _COMBINE_ELEMENTS // pieces))
        rows = min(next_power_of_2(num_rows), _COMBINE_ELEMENTS // (pieces * columns))
        return rows, columns, pieces, 1
    # H 128, 8 sequences: 35.2 us with 16 pieces at a time, 35.9 with 8; 64: 218 and 204
    pieces = min(most, 16 if all_rows <= _COMBINE_SOME_ROWS else 8)
    columns = min(next_power_of_2(rank), _COMBINE_COLUMNS)
    # with more rows and 2 or 4 pieces ptxas of Triton 3.7 spills up to 700 bytes a thread, 3,000 in float32
    rows = min(next_power_of_2(num_rows), _COMBINE_MOST_ROWS, _COMBINE_ELEMENTS * _COMBINE_WARPS // (pieces * columns))
    return rows, columns, pieces, max(1, pieces * columns * rows // _COMBINE_ELEMENTS)


def _combine_launch(
    device: Device, batch: int, heads: int, seqlen_q: int, parts: int, key_tiles: int, rank: int, *, is_mixed: bool
) -> Launch:
    entries, num_rows = min(batch, parts), heads * seqlen_q
    rows, columns, pieces, warps = _combine_shape(entries, num_rows, parts, key_tiles, rank)
    return Launch(
        combine_kernel,
        (ceil_div(num_rows, rows) * entries, ceil_div(rank, columns), 1),
        _COMBINE_GIVEN,
        {"batch": batch, "num_heads": heads, "seqlen_q": seqlen_q, "num_parts": parts, "R": rank}
        | {"BLOCK_ROWS": rows, "BLOCK_R": columns, "BLOCK_PIECES": pieces}
        | {"MIXED": is_mixed, "DEPENDENT": device.has_dependent_launch},
        options_of(device, warps),
    )


def _plan_launch(device: Device, batch: int, capacity: int, parts: int, block_n: int) -> Launch:
    return Launch(
        plan_kernel,
        (parts, 1, 1),
        _PLAN_GIVEN,
        {"batch": batch, "capacity": capacity, "num_parts": parts, "overhead": OVERHEAD, "BLOCK_N": block_n}
        | {"DEPENDENT": device.has_dependent_launch},
        options_of(device, 4),
    )


def _constants(
    tensors: DecodeTensors, device: Device, tile: decode_tiles.DecodeTile, page_size: int, by_descriptors: bool
) -> dict[str, object]:
    """The constants of ``decode_kernel``, except the row strides."""
    q_nope_abs, rank, rope = tensors.q_nope_abs, tensors.q_nope_abs.shape[-1], tensors.q_rope.shape[-1]
    first, second = _split_head_dim(rank)
    is_hopper = device.gpu_class == "Hopper"
    return {
        "R": rank,
        "R0": first,
        "R1": second,
        "D_ROPE": rope,
        "ROPE": _rope_columns(rope),
        "PAGE_SIZE": page_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": decode_tiles.stages_for(tile, page_size),
        "CAUSAL": tensors.causal and q_nope_abs.shape[1] > 1,
        "TMA": by_descriptors,
        "HOPPER": is_hopper and tile.block_m >= 64 and second == 0 and q_nope_abs.element_size() == 2,
        "DEPENDENT": device.has_dependent_launch,
        "PRECISION": "ieee" if q_nope_abs.dtype == torch.float32 else "tf32",
        "FORMAT": tensors.kv_cache_format,
        "CONVERSION": e4m3_conversion(device, tile),
    }


def e4m3_conversion(device: Device, tile: decode_tiles.DecodeTile) -> str:
    """How e4m3 bytes are converted, see ``from_e4m3``."""
    if device.gpu_class == "227 KiB" and tile.block_m >= 64:
        return "pure instruction"
    return device.e4m3_conversion


def _rope_columns(rope: int) -> int:
    return max(16, next_power_of_2(rope)) if rope else 0


def tile_of(tensors: DecodeTensors, device: Device, rows: int) -> decode_tiles.DecodeTile:
    """The table's tile for so many rows."""
    itemsize = tensors.q_nope_abs.element_size()  # float32 products need their own tiles whatever the cache is
    itemsize = itemsize if itemsize == 4 else tensors.c_kv.element_size()
    return decode_tiles.tile_for(device.gpu_class, itemsize, sum(widths_of(tensors)), rows)


def widths_of(tensors: DecodeTensors) -> tuple[int, int, int]:
    """Padded columns of c_kv's two column blocks and of k_rope."""
    return (*_split_head_dim(tensors.q_nope_abs.shape[-1]), _rope_columns(tensors.q_rope.shape[-1]))


def page_size_of(tensors: DecodeTensors) -> int:
    """0: contiguous."""
    return 0 if tensors.page_table is None else tensors.c_kv.shape[1]


def attend_launch(
    kernel: Any,
    tensors: DecodeTensors,
    device: Device,
    tile: decode_tiles.DecodeTile,
    programs: int,
    by_descriptors: bool,
    more: Mapping[str, object],
    **options: int,
) -> Launch:
    """The launch of ``decode_kernel``, or of a kernel with its arguments and ``more``."""
    q_nope_abs, q_rope, c_kv, k_rope = tensors[:4]
    page_size = page_size_of(tensors)
    batch, seqlen_q, heads, _ = q_nope_abs.shape
    fixed: dict[str, object] = {"batch": batch, "num_heads": heads, "seqlen_q": seqlen_q, "capacity": tensors.capacity}
    fixed |= named_strides("q", "bsh", q_nope_abs.stride()[:3]) | named_strides("r", "bsh", q_rope.stride()[:3])
    fixed |= named_strides("c", "bn", strides_of(c_kv)) | named_strides("k", "bn", strides_of(k_rope))
    fixed |= {"stride_pt": 0 if tensors.page_table is None else tensors.page_table.stride(0)}
    fixed |= _constants(tensors, device, tile, page_size, by_descriptors)
    stages = decode_tiles.stages_for(tile, page_size)
    asked = options_of(device, tile.num_warps, num_stages=stages, maxnreg=tile.max_registers, **options)
    return Launch(kernel, (programs, 1, 1), _GIVEN, {**fixed, **more}, asked)


class _Attend(NamedTuple):
    """Which attention kernel computes a call, and how its work is divided.

    Attributes:
        kernel: "plain", "hopper", "transposed" or "wide".
        row_tiles, key_tiles: tiles of a sequence's (query, head) pairs, and most tiles of its keys.
        parts: programs for a row tile.
        by_descriptors: the plain or the Hopper kernel reads the cache by descriptors.
        is_planned: a kernel before it plans.
    """

    kernel: str
    tile: decode_tiles.DecodeTile
    row_tiles: int
    key_tiles: int
    parts: int
    by_descriptors: bool
    is_planned: bool


def _choose_attend(tensors: DecodeTensors, device: Device, tiles_for_hopper: int, *, is_shared: bool) -> _Attend:
    """Arguments as for ``make_launches``."""
    batch, seqlen_q, heads, _ = tensors.q_nope_abs.shape
    rows, page_size = seqlen_q * heads, page_size_of(tensors)
    kernel, tile = "plain", tile_of(tensors, device, rows)
    if transposed.takes(tensors, device):
        kernel, tile = "transposed", transposed_rule.TILES
    elif wide.takes(tensors, device):
        kernel, tile = "wide", wide_rule.TILES
    row_tiles: int = ceil_div(rows, tile.block_m)
    slots = choose_parts(row_tiles, device.processors * tile.programs)
    tile = decode_tiles.for_batch(tile, page_size, batch, tensors.capacity, slots)
    key_tiles = count_tiles(batch, tensors.capacity, tile.block_n)
    all_tiles, by_descriptors = batch * key_tiles, False
    if kernel == "plain":
        can_describe = can_use_descriptors(tensors, device, tile, page_size)
        if all_tiles >= slots * tiles_for_hopper and hopper.takes(tensors, device, can_describe):
            kernel, by_descriptors = "hopper", True
        else:
            by_descriptors = can_describe and all_tiles >= slots * _TILES_FOR_DESCRIPTORS
    is_planned = (tile.planned or is_shared) if kernel == "plain" else batch > FEW_SEQUENCES
    return _Attend(kernel, tile, row_tiles, key_tiles, min(slots, all_tiles), by_descriptors, is_planned)


def _described_launch(
    tensors: DecodeTensors, device: Device, chosen: _Attend, page_size: int
) -> tuple[Described | None, Launch]:
    """The descriptors of the cache, None if it is read by pointers, and the launch of the attention kernel."""
    parts, programs = chosen.parts, chosen.row_tiles * chosen.parts
    options, is_planned = options_of(device, 4), chosen.is_planned
    if chosen.kernel == "transposed":
        return transposed.Descriptors(tensors), transposed.attend_launch(
            tensors, parts, page_size, options, overhead=OVERHEAD, is_planned=is_planned
        )
    if chosen.kernel == "wide":
        return wide.Descriptors(tensors), wide.attend_launch(
            tensors, programs, parts, page_size, options, overhead=OVERHEAD, is_planned=is_planned
        )
    if chosen.kernel == "hopper":
        return hopper.Descriptors(tensors), hopper.attend_launch(
            tensors, programs, parts, page_size, options, overhead=OVERHEAD, is_planned=is_planned
        )
    described = CacheDescriptors(chosen.tile.block_n, widths_of(tensors)) if chosen.by_descriptors else None
    more = {"num_parts": parts, "overhead": OVERHEAD, "PLANNED": is_planned}
    return described, attend_launch(decode_kernel, tensors, device, chosen.tile, programs, chosen.by_descriptors, more)


def make_launches(tensors: DecodeTensors, *, is_shared: bool = False, tiles_for_hopper: int = 0) -> Launches:
    """The launches of the kernels that divide the tiles of all sequences evenly.

    Args:
        is_shared: layers share the plan, so that it pays off where a call plans as fast in the attention kernel.
        tiles_for_hopper: calls with fewer key tiles a part run on the plain kernel.
    """
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    check_rows(seqlen_q, heads)
    device, rows, page_size = device_of(tensors.q_nope_abs.device), seqlen_q * heads, page_size_of(tensors)
    chosen = _choose_attend(tensors, device, tiles_for_hopper, is_shared=is_shared)
    kernel, parts, key_tiles = chosen.kernel, chosen.parts, chosen.key_tiles
    described, attend = _described_launch(tensors, device, chosen, page_size)
    plan, combine, plan_numbers = None, None, 0
    if chosen.is_planned:
        plan = _plan_launch(device, batch, tensors.capacity, parts, chosen.tile.block_n)
        plan_numbers = SHARE_NUMBERS.value * parts
    if parts > 1 and key_tiles > 1:
        is_mixed = kernel == "hopper"
        combine = _combine_launch(device, batch, heads, seqlen_q, parts, key_tiles, rank, is_mixed=is_mixed)
    workspace = _workspace(2 * parts * rows, min(batch, parts), rank, tensors.q_nope_abs.element_size())
    code = (
        kernel,
        transposed_rule.tile_rows(rows) if kernel == "transposed" else 0,
        tensors.return_lse,
        chosen.is_planned,
        combine and combine.arguments[-5:-2],
        *_constants(tensors, device, chosen.tile, page_size, chosen.by_descriptors).values(),
    )
    return launches_of(tensors, described, workspace, plan_numbers, (Round(plan, attend, combine),), code)


def decode(tensors: DecodeTensors, known: Known) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [B, S_q, H, R] and, if wanted, lse [B, H, S_q]; tensors as ``mla_decode_attention`` takes them.

    ``known`` is of their layout.
    """
    return run(tensors, known, make_launches, _KEPT)
