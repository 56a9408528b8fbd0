"""Absorbed decode of a few queries with the products of W_UK and W_UV in its first and its last kernel.

A small batch leaves the GPU waiting for the host, which needs about as long for a launch as the GPU for such a kernel.
In parts, W_UK, the scheduler, attention, the combination of its pieces and W_UV are five launches, and the products are
PyTorch's, with views around them. Here they are three, or four where the pieces are many: ``absorb_kernel`` multiplies
by W_UK and plans, ``decode_kernel`` is as it is, ``values_kernel`` combines the pieces and multiplies by W_UV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.kernels.decode.device import device_of
from mla_plugin.kernels.decode.launch import make_launches, options_of
from mla_plugin.kernels.decode.projected.kernels import absorb_kernel, values_kernel
from mla_plugin.kernels.decode.run import Launches
from mla_plugin.kernels.launch import Launch, compile_together, on_device_of
from mla_plugin.kernels.tiles import ceil_div, next_power_of_2

ROWS = 16
"""The most queries of all sequences together: the rows of a matrix instruction."""
PIECES = 8
"""Pieces that are combined at a time."""
WARPS = 4
_MOST_STEPS = 4  # of so many pieces, for all queries, that a program of the last kernel takes; else a kernel combines
_FEW_HEADS = 64  # below, a head is divided among twice as many programs
_ABSORB_GIVEN = ("Q", "W", "Q_nope_abs", "Plan", "Ranges", "Lengths")
_BLOCK_BYTES = 2**15  # of W_UK that a program of the first kernel holds, at most
_LENGTHS = 2 * 2 * ROWS  # elements of two bytes: lengths and first keys of up to ROWS sequences, int32
_VALUES_GIVEN = ("Parts", "Latent", "W", "Out")


_compiled: set[tuple[object, ...]] = set()
"""``Step.code`` of kernels compiled in parallel; others are compiled one by one when first launched."""


@dataclass
class Step:
    """The launches of the calls of one layout.

    Attributes:
        absorb, attend, combine, values: the kernels, in order; combine None: values does that.
        latent_at, lengths_at, plan_at, parts_at, elements: of the one buffer that holds Q_nope_abs, the latent results,
            a copy of the lengths, the plan and the workspace of ``decode_kernel``: where the others begin, its size.
        is_planned: there is a plan.
        has_padding: the lengths are followed by the first keys.
        out_shape: of the result.
        code: what determines the compiled code of the kernels, except divisors of strides; a process has few of them.
    """

    absorb: Launch
    attend: Launch
    combine: Launch | None
    values: Launch
    latent_at: int
    lengths_at: int
    plan_at: int
    parts_at: int
    elements: int
    is_planned: bool
    has_padding: bool
    out_shape: tuple[int, ...]
    code: tuple[object, ...]

    @property
    def is_compiled(self) -> bool:
        """Whether every kernel can be launched by addresses."""
        has_combined = self.combine is None or self.combine.run is not None
        return has_combined and None not in (self.absorb.run, self.attend.run, self.values.run)


class Blocks(NamedTuple):
    """Columns of a head that one program computes: of W_UK's product, and values of W_UV's."""

    rank: int
    values: int


def padded(width: int) -> int:
    """Columns of a matrix operand: a power of two, at least 16."""
    return max(16, next_power_of_2(width))


def blocks_of(heads: int, rank: int, dim_nope: int, dim_v: int) -> Blocks:
    """Blocks that make about as many programs as a GPU has multiprocessors, or several times as many."""
    most = Blocks(128, 64) if heads >= _FEW_HEADS else Blocks(64, 32)
    fitting = max(16, _BLOCK_BYTES // (2 * padded(dim_nope)))
    return Blocks(min(most.rank, fitting, padded(rank)), min(most.values, padded(dim_v)))


_TILES_FOR_HOPPER = 2
"""Key tiles of a part from which on the Hopper kernel, which reads by descriptors, computes the attention."""


def step_of(
    tensors: DecodeTensors,
    query: torch.Tensor,
    weight: torch.Tensor,
    dim_nope: int,
    dim_v: int,
    ranges: torch.Tensor | None,
) -> Step | None:
    """The launches of a call; None where its attention reads the cache by descriptors, or ``dim_nope`` is no 8 n.

    None also if rows of ``weight`` lie so far apart that a tile of them exceeds int32 offsets. With few keys the plain
    kernel runs, which does not use descriptors: the Hopper kernel is a few microseconds faster, but without these
    launches the host takes 80 us longer.

    Args:
        tensors: checked; a contiguous cache in the dtype of the queries, 2 bytes an element, at most ``ROWS`` queries,
            no lse.
        query: [B, H, S_q, dim_nope + Dr], of which ``tensors.q_rope`` is a view.
        weight: [H (dim_nope + dim_v), R], the rows of W_UK and of W_UV of each head, one below the other, as
            ``kv_b_proj`` of DeepSeek-V2 and its successors has them. Columns are contiguous.
        dim_nope, dim_v: number of these rows.
        ranges: int32 [.., 1 or 2, B], contiguous rows: ``tensors.seqlens_kv`` and ``tensors.leftpad_kv``.
    """
    launches: Launches = make_launches(tensors, tiles_for_hopper=_TILES_FOR_HOPPER)
    if launches.described is not None or dim_nope % 8:  # the address of the rope part would never be one of 16 bytes
        return None
    if max(padded(dim_nope), padded(dim_v)) * weight.stride(0) >= 2**31:
        return None
    ((plan, attend, combine),) = launches.rounds
    batch, seqlen_q, heads, rank = tensors.q_nope_abs.shape
    device = device_of(query.device)
    fixed: dict[str, Any] = dict(zip(attend.kernel.arg_names[len(attend.given) :], attend.arguments, strict=True))
    parts: int = fixed["num_parts"]
    pieces = min(parts, ceil_div(tensors.capacity, fixed["BLOCK_N"]))
    combines = batch <= parts and batch * seqlen_q * ceil_div(pieces, PIECES) <= _MOST_STEPS
    if combines:
        combine = None
    strides = {"stride_qb": query.stride(0), "stride_qh": query.stride(1), "stride_qs": query.stride(2)}
    stride_w = {"stride_w": weight.stride(0)}
    shared: dict[str, Any] = {name: fixed[name] for name in ("batch", "num_heads", "seqlen_q", "num_parts", "R")}
    shared |= {"D_NOPE": dim_nope, "D_V": dim_v, "ROWS": ROWS, "DEPENDENT": device.has_dependent_launch, **stride_w}
    block = blocks_of(heads, rank, dim_nope, dim_v)
    has_padding = tensors.leftpad_kv is not None
    blocks = ceil_div(rank, block.rank) * heads
    absorb = Launch(
        absorb_kernel,
        (blocks if plan is None else max(blocks, parts), 1, 1),
        _ABSORB_GIVEN,
        {name: fixed[name] for name in ("capacity", "overhead", "BLOCK_N")}
        | {**shared, **strides, "NOPE": padded(dim_nope), "BLOCK_R": block.rank}
        | {"PLANNED": plan is not None, "HAS_PADDING": has_padding}
        | {"stride_l": ranges.stride(-2) if ranges is not None and has_padding else 0},
        options_of(device, WARPS),
    )
    values = Launch(
        values_kernel,
        (ceil_div(dim_v, block.values) * heads, 1, 1),
        _VALUES_GIVEN,
        {**shared, "COLUMNS": padded(rank), "BLOCK_V": block.values, "BLOCK_PIECES": PIECES, "COMBINES": combines},
        options_of(device, WARPS),
    )
    latent_at = _aligned(tensors.q_nope_abs.numel())
    lengths_at = 2 * latent_at
    plan_at = lengths_at + _LENGTHS
    parts_at = plan_at + 2 * launches.plan_numbers
    out_shape = (batch, seqlen_q, heads, dim_v)
    elements = parts_at + launches.workspace
    code = (*launches.code, dim_nope, dim_v, heads, seqlen_q, plan is not None, combines, ranges is None)
    places = latent_at, lengths_at, plan_at, parts_at, elements
    return Step(absorb, attend, combine, values, *places, plan is not None, has_padding, out_shape, code)


def _aligned(elements: int) -> int:
    """Rounded up to 16 bytes of two-byte elements."""
    return -(-elements // 8) * 8


def decode(
    step: Step,
    query: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    weight: torch.Tensor,
    dim_nope: int,
    ranges: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    """out [B, S_q, H, D_v].

    Args:
        step: of the layout of these tensors.
        query: [B, H, S_q, dim_nope + Dr].
        c_kv, k_rope: [B, S_kv, R] and [B, S_kv, Dr], or the same with a dimension of 1 after the first.
        weight, ranges: as of ``step_of``.
        softmax_scale: multiplies the scores.
    """
    with on_device_of(query):
        buffer, out = query.new_empty(step.elements), query.new_empty(step.out_shape)
        q, c, k, w = query.data_ptr(), c_kv.data_ptr(), k_rope.data_ptr(), weight.data_ptr()
        made, result, rope = buffer.data_ptr(), out.data_ptr(), q + 2 * dim_nope
        if (q | rope | c | k | w) % 16 or not step.is_compiled:
            _launch_by_tensors(step, (query, c_kv, k_rope, weight, ranges), dim_nope, softmax_scale, buffer, out)
            return out
        places = (step.latent_at, step.lengths_at, step.plan_at, step.parts_at)
        latent, copied, planned, parts = (made + 2 * at for at in places)
        plan = planned if step.is_planned else None
        given = None if ranges is None else ranges.data_ptr()
        lengths = None if given is None else copied
        padding = copied + 4 * ROWS if step.has_padding else None
        step.absorb.run(q, w, made, plan, given, copied, *step.absorb.arguments)
        attended = (made, rope, c, k, None, lengths, padding, None, parts, plan, latent, None, None, None, None)
        step.attend.run(*attended, softmax_scale, *step.attend.arguments)
        if step.combine is not None:
            step.combine.run(parts, latent, None, *step.combine.arguments)
        step.values.run(parts, latent, w, result, *step.values.arguments)
        return out


def _launch_by_tensors(
    step: Step,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    dim_nope: int,
    softmax_scale: float,
    buffer: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The first call of a layout, which compiles, and calls with an address that is no multiple of 16 bytes."""
    query, c_kv, k_rope, weight, ranges = inputs
    absorbed, latent, parts = buffer, buffer[step.latent_at :], buffer[step.parts_at :]
    copied = buffer[step.lengths_at : step.plan_at].view(torch.int32)
    plan = buffer[step.plan_at : step.parts_at].view(torch.int32) if step.is_planned else None
    if ranges is not None and ranges.data_ptr() % 16:  # a launch keeps its compiled kernel from aligned tensors only
        count, width = ranges.shape[-2:]
        aligned = ranges.new_empty(count, max(width, ranges.stride(-2)))  # the same step from row to row
        ranges = aligned[:, :width].copy_(ranges.view(count, width))
    lengths = None if ranges is None else copied
    padding = copied[ROWS:] if step.has_padding else None
    attended = (absorbed, query[..., dim_nope:], c_kv, k_rope, None, lengths, padding, None, parts, plan, latent)
    calls: list[tuple[Launch, tuple[object, ...]]] = [
        (step.absorb, (query, weight, absorbed, plan, ranges, copied)),
        (step.attend, (*attended, None, None, None, None, softmax_scale)),
    ]
    if step.combine is not None:
        calls.append((step.combine, (parts, latent, None)))
    calls.append((step.values, (parts, latent, weight, out)))
    if out.is_cuda and step.code not in _compiled:
        compile_together(calls, out.device)
        _compiled.add(step.code)
    for launch, arguments in calls:
        launch(*arguments)
