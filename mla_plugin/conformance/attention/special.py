"""Checks that run on a few calls: torch.compile, dropout, requests that nothing can compute, a CUDA device's own."""

from __future__ import annotations

import itertools
import unittest
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.conformance import checks
from mla_plugin.conformance.attention import library
from mla_plugin.conformance.attention.call import Call
from mla_plugin.conformance.attention.case import Case
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted, Refused

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

HOPELESS: tuple[dict[str, Any], ...] = (
    {"fp8": True},
    {"softmax_type": "off-by-one"},
    {"softmax_type": "learnable"},
    {"has_score_mod": True},
    {"has_kv_cache": True},
    {"context_parallel": True, "cp_size": 2},
    {"return_max_logit": True},
    {"bias_type": "alibi"},
)
"""What a request can say and no hook is given tensors for."""
DROPOUTS = (0.25, 0.1)


def _calls(suite: BackendConformance, *, is_training: bool = True) -> list[tuple[Plan, Call]]:
    found = []
    for case in suite.plain_cases():
        plan = suite.plan_of(case, is_training=is_training)
        if plan is not None:
            found.append((plan, call_of(suite, case, plan.request)))
    return found


def call_of(suite: BackendConformance, case: Case, request: AttentionRequest) -> Call:
    """Fresh data for a case."""
    return Call.of(case, request, suite.device, suite._generator(), suite.padding_poison)


def check_compiled(suite: BackendConformance, most: int) -> None:
    """One graph, traced without a break, computes what the eager call does; for so many layouts."""
    for plan, call in _calls(suite)[:most]:

        def run(call: Call = call, plan: Plan = plan) -> tuple[torch.Tensor, torch.Tensor | None]:
            return library.attend(call, plan.forward_backend)

        with library.as_the_process_manager(suite._manager()):
            out, lse = torch.compile(run, backend="aot_eager", fullgraph=True)()
            library.check_results(call, out, lse, library.differentiate(call, out, lse))
        torch._dynamo.reset()


def check_hopeless(suite: BackendConformance) -> None:
    """Requests without tensors are refused, and decode is answered."""
    plain = next(iter(suite.plain_cases()), Case("plain"))
    request = plain.request(suite.device)
    before = suite._answer(request)
    for changes, is_training in itertools.product(HOPELESS, (True, False)):
        decision = suite._answer(request.replace(**changes, is_training=is_training))
        if not isinstance(decision, Refused):
            words = ", ".join(f"{name}={value!r}" for name, value in (*changes.items(), ("is_training", is_training)))
            checks.fail(
                f"{suite.backend} accepts {words}, for which no hook is given tensors; refuse it. "
                "mla_plugin.plain_attention_refusals(request) yields the reasons for all that a plain backend cannot do"
            )
        checks.check_reasons(decision.reasons)
    if suite._answer(request) != before:
        checks.fail(
            "select_backend answers a request differently after it has refused others; the answer must not change"
        )
    decode = DecodeRequest(request.dtype, torch.device(suite.device).type, 2, 1, 16, 512, 64, 1024, 64)
    if not isinstance(decision := suite._answer(decode), Accepted | Refused):
        checks.fail(f"select_backend of {suite.backend} answers a DecodeRequest with {decision!r}; return Refused")


def check_dropout(suite: BackendConformance) -> None:
    """With the unit matrix as V, out shows which weights were dropped; the backward must drop the same ones."""
    plain = next(iter(suite.plain_cases()), None)
    if plain is None:
        return
    keys = min(plain.head_dim_v, 96)
    square: dict[str, Any] = {"seqlens_q": (keys,) * 2, "seqlens_kv": (keys,) * 2, "rows_q": None, "rows_kv": None}
    case = replace(plain, **square, num_heads=4, num_kv_heads=4, scores="normal", lead=0, tail=0, return_lse=False)
    for dropout_p, is_training in itertools.product(DROPOUTS, (True, False)):
        request = case.request(suite.device, is_training=is_training).replace(dropout_p=dropout_p)
        decision = suite._answer(request)
        if isinstance(decision, Accepted):
            plan = Plan(request, suite.platform(), suite.backend, decision.backward_by or suite.backend)
            _check_dropout(suite, plan, case, keys)
        elif isinstance(decision, Refused):
            checks.check_reasons(decision.reasons)


def _check_dropout(suite: BackendConformance, plan: Plan, case: Case, keys: int) -> None:
    request = plan.request
    call = call_of(suite, case, request.replace(dropout_p=0.0))
    layout = request.layout
    v = layout.to_bhsd(torch.zeros_like(call.tensors.v))
    tokens = v.shape[2]
    unit = torch.eye(keys, v.shape[3], dtype=v.dtype, device=v.device).repeat(tokens // keys, 1)
    v = layout.from_bhsd(v + unit).contiguous()
    seeds = [torch.tensor([seed], dtype=torch.int64) for seed in (11, 11, 12)]
    calls = [replace(call, tensors=replace(call.tensors, v=v, dropout_seed=seed)) for seed in seeds]
    outputs = [suite.hooks().forward(plan, each) for each in calls]
    _check_dropped(calls[0], outputs, keys, request.dropout_p)
    if request.is_training:
        _check_dropped_backward(suite, plan, calls[0], outputs[0], keys)


def _weights(call: Call, keys: int) -> torch.Tensor:
    """The weights before dropout, [B, H, S, keys]: the exact out with the unit matrix as V."""
    return call.request.layout.to_bhsd(call.oracle.forward()[0].exact)[..., :keys]


def _check_dropped(call: Call, outputs: list[AttentionOutput], keys: int, dropout_p: float) -> None:
    first, again, other = (call.request.layout.to_bhsd(x.out)[..., :keys].double() for x in outputs)
    if not torch.equal(first, again):
        checks.fail("dropout: two calls with the same dropout_seed drop different weights; expected the same")
    if torch.equal(first, other):
        checks.fail(f"dropout_p={dropout_p} is accepted, and another dropout_seed changes nothing; refuse dropout")
    weights = _weights(call, keys)
    seen = weights > 1e-3
    kept = (first != 0) & seen
    share = float(kept.sum() / seen.sum())
    spread = (dropout_p * (1 - dropout_p) / float(seen.sum())) ** 0.5
    if not abs(share - (1 - dropout_p)) <= 6 * spread + 1e-3:
        checks.fail(f"dropout_p={dropout_p}, but {1 - share:.4f} of the weights are dropped")
    wanted = torch.where(kept, weights / (1 - dropout_p), 0.0)
    bound = 8 * torch.finfo(call.case.dtype).eps + 1e-5
    if not bool(((first - wanted).abs() <= bound).masked_select(seen).all()):
        checks.fail(f"dropout: the weights that are kept must be divided by 1 - dropout_p = {1 - dropout_p}")
    for words, axis in (("heads", 1), ("sequences", 0)):
        if kept.shape[axis] > 1:
            both = seen.select(axis, 0) & seen.select(axis, 1)
            if torch.equal(kept.select(axis, 0) & both, kept.select(axis, 1) & both):
                checks.fail(f"dropout: two {words} drop the same weights; expected independent ones")


def _check_dropped_backward(
    suite: BackendConformance, plan: Plan, call: Call, output: AttentionOutput, keys: int
) -> None:
    layout, dropout_p = call.request.layout, plan.request.dropout_p
    given = suite.hooks().backward(plan, call, output)
    if not isinstance(given, Gradients):
        checks.fail(f"backward must return Gradients, not {type(given).__name__}")
    out, dout, q, k, v = (layout.to_bhsd(x.detach()).double() for x in (output.out, call.dout, *_qkv(call)))
    if layout.is_packed:
        out, dout, q, k, v = (x.squeeze(0).unflatten(1, (-1, keys)).transpose(0, 1) for x in (out, dout, q, k, v))
    weights = _weights(call, keys)
    if layout.is_packed:
        weights = weights.squeeze(0).unflatten(1, (-1, keys)).transpose(0, 1)
    dropped = out[..., :keys]
    dp = torch.where(dropped != 0, dout @ v.mT / (1 - dropout_p), 0.0)
    ds = weights * (dp - (dout * out).sum(-1, keepdim=True))
    exact = {"dq": ds @ k * call.tensors.softmax_scale, "dk": ds.mT @ q * call.tensors.softmax_scale}
    exact["dv"] = dropped.mT @ dout
    bound = 16 * torch.finfo(call.case.dtype).eps + 1e-4
    for name, wanted in exact.items():
        got = layout.to_bhsd(getattr(given, name)).double()
        if layout.is_packed:
            got = got.squeeze(0).unflatten(1, (-1, keys)).transpose(0, 1)
        error = float((got - wanted).norm() / wanted.norm())
        if not error <= bound:
            checks.fail(f"dropout: {name} is off by {error:.3g} of its norm; the backward must drop what forward did")


def _qkv(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return call.tensors.q, call.tensors.k, call.tensors.v


def check_cuda(suite: BackendConformance) -> None:
    """Another stream, a graph replayed with other numbers and lengths in the same memory."""
    for plan, call in _calls(suite):
        _check_on_a_stream(suite, plan, call)
        _check_replayed(suite, plan, call)
    for case in suite.cases():
        if {"padding_masks", "unequal_lengths"} <= case.tags and "large" not in case.tags:
            found = suite.plan_of(case)
            if found is not None:
                _check_replayed(suite, found, call_of(suite, case, found.request))
                break


def step(suite: BackendConformance, plan: Plan, call: Call) -> tuple[AttentionOutput, Gradients]:
    """Both hooks, unwatched."""
    manager = suite._manager()
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        output = manager.caller("forward", plan.forward_backend)(plan=plan, tensors=call.tensors)
        residuals = Residuals(call.tensors, output.out, output.lse)
        run = manager.caller("backward", plan.backward_backend)
        return output, run(plan=plan, residuals=residuals, dout=call.dout, dlse=call.dlse)


def check_step(call: Call, output: AttentionOutput, gradients: Gradients) -> None:
    """The results of both hooks."""
    checks.check_output(call.case, call.inputs, output, call.expected())
    expected, lse = call.expected_gradients(), call.expected()[1].exact
    checks.check_gradients(call.case, call.inputs, gradients, lse, expected)


def _check_on_a_stream(suite: BackendConformance, plan: Plan, call: Call) -> None:
    """Inputs are written on the stream behind a long wait: a kernel on another stream would read them too early."""
    stream = torch.cuda.Stream()
    q = call.tensors.q.detach().clone()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        call.tensors.q.detach().zero_()
        torch.cuda._sleep(20_000_000)
        call.tensors.q.detach().copy_(q)
        results = step(suite, plan, call)
    torch.cuda.current_stream().wait_stream(stream)
    check_step(call, *results)


def check_second_device(suite: BackendConformance) -> None:
    """Tensors on the second device while the first is the current one."""
    count = torch.cuda.device_count()
    if count < 2:
        raise unittest.SkipTest(f"not run: a second GPU: {count} GPU, 2 are needed")
    for plan, call in _calls(suite):
        request = plan.request.replace(device_index=1)
        there = Call.of(call.case, request, "cuda:1", suite._generator(), suite.padding_poison)
        with torch.cuda.device(0):
            check_step(there, *step(suite, replace(plan, request=request), there))


def _check_replayed(suite: BackendConformance, plan: Plan, call: Call) -> None:
    step(suite, plan, call)  # compiles and plans
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(suite, plan, call)
    for case in (call.case.other(), call.case):
        other = call_of(suite, case, plan.request)
        with torch.no_grad():
            for name, x in other.inputs.items():
                target = getattr(call.tensors, name)
                if x is not None and "expanded" not in str(case.storages):
                    target.copy_(x)
            if case.dout_storage != "expanded":
                call.dout.copy_(other.dout)
            if call.dlse is not None and other.dlse is not None and case.dlse_storage != "expanded":
                call.dlse.copy_(other.dlse)
        graph.replay()
        torch.cuda.synchronize()
        check_step(Call(case, plan.request, call.tensors, call.dout, call.dlse), *results)
