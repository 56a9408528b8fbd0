"""Dropout: refused, or the right share of the weights by the seed, the same ones in both passes.

With the unit matrix as each sequence's V, out shows which weights were dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.conformance import checks
from mla_plugin.conformance.attention.call import Call
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.special import call_of
from mla_plugin.hooks.attention import AttentionOutput, Gradients, Plan
from mla_plugin.hooks.types import Accepted, Refused

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

DROPOUTS = (0.25, 0.1, 0.003)
"""The last is less than what 8 bits of a random number tell apart."""
LEAST_DROPPED = 12
"""Weights that a head loses on average: with fewer two heads that lose none look alike too often."""
_BESIDE: tuple[dict[str, Any], ...] = (
    {"num_kv_heads": 2},
    {"attn_mask_type": "causal", "return_lse": True},
    {"window_size": (50, 9)},
    *({"window_size": (12, 0), "head_dim_qk": dim, "head_dim_v": dim} for dim in (128, 256)),
    {"bias_type": "post_scale_bias", "bias_shape": "bhss", "bias_requires_grad": True},
)
"""What the draws of the two passes may follow, in the plainest layout; in each layout unequal lengths too."""


def check_dropout(suite: BackendConformance) -> None:
    """Each rate with and without a backward; then one rate in other layouts, with unequal lengths and beside others."""
    cases = list(_cases(suite))
    for dropout_p, is_training in itertools.product(DROPOUTS, (True, False)):
        for case in cases[: 1 if suite.is_slow else 2]:
            if dropout_p * case.seqlens_kv[0] ** 2 > LEAST_DROPPED:
                _check(suite, case, dropout_p, is_training=is_training)
    for case in cases[2 : 2 if suite.is_slow else None]:
        _check(suite, case, DROPOUTS[0], is_training=True)


def _cases(suite: BackendConformance) -> Iterator[Case]:
    plain = [_with_square_scores(case) for case in suite.plain_cases()]
    yield from plain
    for case in plain:
        keys = case.seqlens_kv[0]
        unequal: dict[str, Any] = {"seqlens_q": (keys, keys // 2), "seqlens_kv": (keys - 5, keys)}
        if not case.is_packed:
            unequal |= {"rows_q": (keys,) * 2, "rows_kv": (keys,) * 2, "attn_mask_type": "padding"}
        yield replace(case, name=f"{case.name} with unequal lengths", **unequal)
    for case, beside in itertools.product(plain[:1], _BESIDE):
        if case.is_packed and ("bias_type" in beside or "attn_mask_type" in beside):
            continue
        found = replace(case, name=f"{case.name} with {beside}", **beside)
        yield _with_square_scores(found, most=found.head_dim_v) if "head_dim_v" in beside else found


def _with_square_scores(plain: Case, most: int = 96) -> Case:
    keys = min(plain.head_dim_v, most)
    square: dict[str, Any] = {"seqlens_q": (keys,) * 2, "seqlens_kv": (keys,) * 2, "rows_q": None, "rows_kv": None}
    return replace(plain, **square, num_heads=4, num_kv_heads=4, scores="normal", lead=0, tail=0, return_lse=False)


def _check(suite: BackendConformance, case: Case, dropout_p: float, *, is_training: bool) -> None:
    request = case.request(suite.device, is_training=is_training).replace(dropout_p=dropout_p)
    decision = suite._answer(request)
    if isinstance(decision, Refused):
        checks.check_reasons(decision.reasons)
    if not isinstance(decision, Accepted):
        return
    plan = Plan(request, suite.platform(), suite.backend, decision.backward_by or suite.backend)
    call = _with_unit_matrices(call_of(suite, case, request.replace(dropout_p=0.0)))
    seeds = [torch.tensor([seed], dtype=torch.int64) for seed in (11, 11, 12)]
    calls = [replace(call, tensors=replace(call.tensors, dropout_seed=seed)) for seed in seeds]
    outputs = [suite.hooks().forward(plan, each) for each in calls]
    try:
        _check_dropped(calls[0], outputs, dropout_p)
        if is_training:
            _check_backward(suite, plan, calls[0], outputs[0])
    except checks.ConformanceError as error:
        checks.fail(f"dropout in {case.name}: {error}")


def _with_unit_matrices(call: Call) -> Call:
    """The call with the unit matrix as V of each sequence."""
    layout = call.request.layout
    v = layout.to_bhsd(torch.zeros_like(call.tensors.v, memory_format=torch.contiguous_format))
    for part in call.oracle._parts:
        of_sequence = v[part.row, :, part.columns]
        of_sequence.copy_(torch.eye(*of_sequence.shape[1:], dtype=v.dtype, device=v.device).expand_as(of_sequence))
    v = layout.from_bhsd(v).contiguous().requires_grad_(call.tensors.v.requires_grad)
    return Call(call.case, call.request, replace(call.tensors, v=v), call.dout, call.dlse)


def _check_dropped(call: Call, outputs: list[AttentionOutput], dropout_p: float) -> None:
    if not torch.equal(outputs[0].out, outputs[1].out):
        checks.fail("two calls with the same dropout_seed drop different weights; expected the same")
    if torch.equal(outputs[0].out, outputs[2].out):
        checks.fail(f"dropout_p={dropout_p} is accepted, and another dropout_seed changes nothing; refuse dropout")
    layout, expected_lse = call.request.layout, call.expected()[1]
    checks.check_lse(outputs[0].lse, expected_lse)
    out, lse = layout.to_bhsd(outputs[0].out).double(), expected_lse.exact
    lse = lse[None] if layout.is_packed else lse
    bound = 8 * torch.finfo(call.case.dtype).eps + 1e-5
    kept, seen = [], []
    for part in call.oracle._parts:
        weights = part.weights(lse[part.row, :, part.rows])
        given = out[part.row, :, part.rows, : weights.shape[-1]]
        seen.append(weights > 1e-3)
        kept.append((given != 0) & seen[-1])
        wanted = torch.where(kept[-1], weights / (1 - dropout_p), 0.0)
        if not bool(((given - wanted).abs() <= bound).masked_select(seen[-1]).all()):
            checks.fail(f"the weights that are kept must be divided by 1 - dropout_p = {1 - dropout_p}")
    count = sum(float(x.sum()) for x in seen)
    share = sum(float(x.sum()) for x in kept) / count
    spread = (dropout_p * (1 - dropout_p) / count) ** 0.5
    if not abs(share - (1 - dropout_p)) <= 6 * spread + 1e-3:
        checks.fail(f"dropout_p={dropout_p}, but {1 - share:.4f} of the weights are dropped")
    rows, columns = (min(x.shape[axis] for x in kept) for axis in (1, 2))
    first, second, *_ = [(x[:, :rows, :columns], y[:, :rows, :columns]) for x, y in zip(kept, seen, strict=True)]
    heads = [(first[0][i], first[1][i]) for i in (0, 1)]
    for words, ((x, x_seen), (y, y_seen)) in (("heads", heads), ("sequences", (first, second))):
        both = x_seen & y_seen
        if torch.equal(x & both, y & both):
            checks.fail(f"two {words} drop the same weights; expected independent ones")


def _check_backward(suite: BackendConformance, plan: Plan, call: Call, output: AttentionOutput) -> None:
    """The gradients of a softmax whose weights were dropped as the forward's out shows it."""
    given = suite.hooks().backward(plan, call, output)
    if not isinstance(given, Gradients):
        checks.fail(f"backward must return Gradients, not {type(given).__name__}")
    layout, dropout_p, scale = call.request.layout, plan.request.dropout_p, call.tensors.softmax_scale
    out, dout = (layout.to_bhsd(x.detach()).double() for x in (output.out, call.dout))
    lse, dlse = call.expected()[1].exact, call.dlse
    if layout.is_packed:
        lse, dlse = lse[None], None if dlse is None else dlse[None]
    exact = {name: torch.zeros(x.shape, dtype=torch.float64, device=x.device) for name, x in _inputs(call).items()}
    views = {name: x if name == "dbias" else layout.to_bhsd(x) for name, x in exact.items()}
    for part in call.oracle._parts:
        at = (part.row, slice(None), part.rows)
        weights = part.weights(lse[at])
        dropped = torch.where(part.visible, out[at][..., : weights.shape[-1]], 0.0)
        dp = torch.where(dropped != 0, dout[at] @ part.v.mT / (1 - dropout_p), 0.0)
        of_lse = 0.0 if dlse is None else dlse[at].double().masked_fill(lse[at].isneginf(), 0.0)[..., None]
        ds = weights * (dp - (dout[at] * out[at]).sum(-1, keepdim=True) + of_lse)
        views["dq"][at] = scale * (ds @ part.k)
        for name, x in (("dk", scale * (ds.mT @ part.q)), ("dv", dropped.mT @ dout[at])):
            views[name][part.row, :, part.columns] = x.unflatten(0, (call.request.num_kv_heads, -1)).sum(1)
        if "dbias" in views:
            views["dbias"][part.row, :, part.rows, part.columns] = ds
    bound = 16 * torch.finfo(call.case.dtype).eps + 1e-4
    for name, wanted in exact.items():
        error = float((getattr(given, name).double() - wanted).norm() / wanted.norm())
        if not error <= bound:
            checks.fail(f"{name} is off by {error:.3g} of its norm; the backward must drop what the forward did")


def _inputs(call: Call) -> dict[str, torch.Tensor]:
    """The name of each gradient to its input."""
    tensors = call.tensors
    found = {"dq": tensors.q, "dk": tensors.k, "dv": tensors.v}
    return found | ({"dbias": tensors.bias} if call.request.bias_requires_grad and tensors.bias is not None else {})
