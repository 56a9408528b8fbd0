"""Runs the kernels of a decode call, and shares the plan among the layers of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.decode_checks import check_query_strides, check_tensors
from mla_plugin.arguments.decode_layout import Known
from mla_plugin.kernels.decode.descriptors import plain_arguments
from mla_plugin.kernels.decode.hopper.query_rows import with_copied_queries
from mla_plugin.kernels.decode.workspace import Scratch, new_plans
from mla_plugin.kernels.launch import Launch, compile_together

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Described(Protocol):
    """The descriptors of the calls of one layout."""

    @property
    def gathers(self) -> bool:
        """The kernel gets the cache's addresses in place of its descriptors."""

    @property
    def query_block(self) -> tuple[int, ...] | None:
        """See ``query_rows``; None where queries are read by addresses."""

    @property
    def copies_queries(self) -> bool:
        """See ``query_rows``."""

    def arguments(
        self, tensors: DecodeTensors, scratch: Scratch, out: torch.Tensor, lse: torch.Tensor | None, scale: float
    ) -> tuple[object, ...]:
        """Those of the attention kernel in a call."""


class Round(NamedTuple):
    """The launches of the kernels, in order.

    Attributes:
        plan: None if the programs of attend compute their shares themselves.
        attend: the attention kernel.
        combine: None if no sequence can have two pieces.
    """

    plan: Launch | None
    attend: Launch
    combine: Launch | None


@dataclass
class Launches:
    """Everything about a call that its layout determines.

    Attributes:
        out_shape, lse_shape: of the results.
        workspace: elements of the workspace of a round.
        plan_numbers: int32 values of the plan of a round.
        plan_key: of the plans that layers share; None: no kernel plans.
        combines_by_plan: the last kernel of a round reads the plan.
        rounds: run one after another, in one workspace.
        described: the descriptors of each call; None: the cache is read by pointers.
        copies_queries: into contiguous tensors, before each call.
        cuda_index: of the device; None without CUDA.
        code: everything that determines the compiled code of the kernels; a process has few of them.
    """

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    workspace: int
    plan_numbers: int
    plan_key: Hashable | None
    combines_by_plan: bool
    rounds: tuple[Round, ...]
    described: Described | None
    copies_queries: bool
    cuda_index: int | None
    code: tuple[object, ...]


_compiled: set[tuple[object, ...]] = set()
"""``Launches.code`` of kernels compiled in parallel; others are compiled one by one when first launched."""
_SHARED = ", shared plans"
"""Added to the name of a layout's launches."""


def launches_of(
    tensors: DecodeTensors,
    described: Described | None,
    workspace: int,
    plan_numbers: int,
    rounds: tuple[Round, ...],
    code: tuple[object, ...],
) -> Launches:
    """The launches of a call; ``code`` decides about the kernels' code, besides dtypes, device and ``described``."""
    q_nope_abs = tensors.q_nope_abs
    read = None if described is None else (described.gathers, described.query_block)
    combine = rounds[0].combine
    return Launches(
        out_shape=tuple(q_nope_abs.shape),
        lse_shape=tensors.lse_shape,
        workspace=workspace,
        plan_numbers=plan_numbers,
        plan_key=_plan_key([of_round.plan for of_round in rounds if of_round.plan is not None]),
        combines_by_plan=combine is not None and "Plan" in combine.given,
        rounds=rounds,
        described=described,
        copies_queries=described is not None and described.copies_queries,
        cuda_index=q_nope_abs.device.index if q_nope_abs.is_cuda else None,
        code=(q_nope_abs.dtype, tensors.kv_cache_format, q_nope_abs.device, tensors.leftpad_kv is None, read, *code),
    )


_plan_keys: dict[tuple[object, ...], int] = {}


def _plan_key(plans: list[Launch]) -> Hashable | None:
    """Everything that the plans depend on, except the lengths: their kernels and all other arguments.

    As a number, because tuples of tuples take longer to look up.
    """
    if not plans:
        return None
    depends_on = tuple((plan.kernel.__name__, plan.grid, plan.arguments) for plan in plans)
    return "triton", _plan_keys.setdefault(depends_on, len(_plan_keys))


def run(
    tensors: DecodeTensors, known: Known, make: Callable[..., Launches], kept: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [B, S_q, H, R] and, if wanted, lse [B, H, S_q].

    With ``DecodeLengths`` the first call of a step plans, and the others on its stream take its plan.

    Args:
        tensors: as ``mla_decode_attention`` takes them.
        known: of their layout; it holds the launches.
        make: makes them, of ``tensors`` and ``is_shared``: whether layers share the plan.
        kept: their name in ``known``.
    """
    q_nope_abs, return_lse = tensors.q_nope_abs, tensors.return_lse
    lengths = tensors.shared_lengths
    name = kept if lengths is None else kept + _SHARED
    launches = known.kept.get(name)
    if launches is None:
        check_tensors(tensors, DTYPES)
        check_query_strides(tensors)
        launches = known.kept[name] = make(tensors, is_shared=lengths is not None)
    if launches.cuda_index is not None and launches.cuda_index != torch._C._cuda_getDevice():
        with torch.cuda.device(launches.cuda_index):  # Triton launches on the current device
            return run(tensors, known, make, kept)
    out = q_nope_abs.new_empty(launches.out_shape)
    lse = q_nope_abs.new_empty(launches.lse_shape, dtype=torch.float32) if return_lse else None
    if known.has_no_query:
        return out, lse
    if launches.copies_queries:
        tensors = with_copied_queries(tensors)
    shared = None if lengths is None or launches.plan_key is None else lengths.shared(launches.plan_key)
    plans = None if shared is None else shared.value
    is_planned = plans is not None
    if plans is None:
        plans = new_plans(out.device, len(launches.rounds), launches.plan_numbers)
    parts = q_nope_abs.new_empty(launches.workspace)
    scale = float(tensors.softmax_scale)  # Triton would compile a whole number in as a constant
    arguments_of = plain_arguments if launches.described is None else launches.described.arguments
    calls: list[tuple[Launch, tuple[object, ...]]] = []
    ends = 0  # the calls of the first round
    for (plan_launch, attend, combine), plan in zip(launches.rounds, plans, strict=True):
        if plan_launch is not None and not is_planned:
            calls.append((plan_launch, (plan, tensors.seqlens_kv, tensors.leftpad_kv)))
        calls.append((attend, arguments_of(tensors, Scratch(parts, plan), out, lse, scale)))
        if combine is not None:
            calls.append((combine, (parts, plan, out, lse) if launches.combines_by_plan else (parts, out, lse)))
        ends = ends or len(calls)
    if launches.rounds[0].attend.run is None and out.is_cuda and ends > 1 and launches.code not in _compiled:
        compile_together(calls[:ends], out.device)
        _compiled.add(launches.code)
    for launch, arguments in calls:
        launch(*arguments)
    if shared is not None and not is_planned:
        shared.keep(plans)
    return out, lse
