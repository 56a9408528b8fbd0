"""Checks that run on a few calls: torch.compile, requests that nothing can compute, a CUDA device's own."""

from __future__ import annotations

import itertools
import unittest
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.options import HOSTS
from mla_plugin.conformance import checks
from mla_plugin.conformance.attention import library
from mla_plugin.conformance.attention.call import Call, Hooks
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
HINTS: tuple[dict[str, Any], ...] = (
    {"qkv_layout": "thd_t2hd"},
    {"num_splits": 3},
    {"cuda_graph": True},
    {"checkpoint_core_attention": True},
    {"has_score_mod": True, "has_score_mod_bprop": True},
    {"has_kv_cache": True, "page_size": 64},
    {"context_parallel": True, "cp_size": 4, "cp_comm_type": "a2a+p2p"},
    *({"host": host} for host in HOSTS),
)
"""What hosts say besides."""


def _calls(suite: BackendConformance, *, is_training: bool | None = None) -> list[tuple[Plan, Call]]:
    """``is_training``: as in ``plan_of``."""
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
    for plan, call in _calls(suite, is_training=True)[:most]:

        def run(call: Call = call, plan: Plan = plan) -> tuple[torch.Tensor, torch.Tensor | None]:
            return library.attend(call, plan.forward_backend)

        with library.as_the_process_manager(suite._manager()):
            out, lse = torch.compile(run, backend="aot_eager", fullgraph=True)()
            library.check_results(call, out, lse, library.differentiate(call, out, lse))
        torch._dynamo.reset()


def check_hopeless(suite: BackendConformance) -> None:
    """Requests without tensors are refused, two of them for two reasons, and decode is answered."""
    plain = next(iter(suite.plain_cases()), Case("plain"))
    request = plain.request(suite.device)
    before = suite._answer(request)
    for is_training in (True, False):
        alone = [_reasons(suite, request, changes | {"is_training": is_training}) for changes in HOPELESS]
        for (one, of_one), (other, of_other) in itertools.combinations(zip(HOPELESS, alone, strict=True), 2):
            if one.keys() & other.keys() or of_one & of_other:
                continue
            found = _reasons(suite, request, one | other | {"is_training": is_training})
            if len(found) < 2:
                checks.fail(
                    f"{suite.backend} refuses {_words(one)} for {sorted(of_one)} and {_words(other)} for "
                    f"{sorted(of_other)}, but both at once for {sorted(found)}; give every reason"
                )
    if suite._answer(request) != before:
        checks.fail(
            "select_backend answers a request differently after it has refused others; the answer must not change"
        )
    hints = [request.replace(**changes) for changes in (*HINTS, *HOPELESS)]
    suite.check_every_request_is_answered([request, *hints])
    decode = DecodeRequest(request.dtype, torch.device(suite.device).type, 2, 1, 16, 512, 64, 1024, 64)
    if not isinstance(decision := suite._answer(decode), Accepted | Refused):
        checks.fail(f"select_backend of {suite.backend} answers a DecodeRequest with {decision!r}; return Refused")


def _words(changes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())


def _reasons(suite: BackendConformance, request: AttentionRequest, changes: dict[str, Any]) -> set[str]:
    """Why a request with changes that nothing can compute is refused."""
    asked = request.replace(**changes)
    decision = suite._answer(asked)
    if not isinstance(decision, Refused):
        checks.fail(
            f"{suite.backend} accepts {_words(changes)}, for which no hook is given tensors; refuse it. "
            "mla_plugin.plain_attention_refusals(request) yields the reasons for all that a plain backend cannot do"
        )
    checks.check_reasons(decision.reasons, asked)
    return set(decision.reasons)


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


def step(
    suite: BackendConformance, plan: Plan, call: Call, output: AttentionOutput | None = None
) -> tuple[AttentionOutput, Gradients | None]:
    """Both hooks, unwatched; only the backward where the forward's output is given, and none without training."""
    manager = suite._manager()
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        if output is None:
            output = manager.caller("forward", plan.forward_backend)(plan=plan, tensors=call.tensors)
        if not plan.request.is_training:
            return output, None
        residuals = Residuals(call.tensors, output.out, output.lse)
        run = manager.caller("backward", plan.backward_backend)
        return output, run(plan=plan, residuals=residuals, dout=call.dout, dlse=call.dlse)


def results_of(output: AttentionOutput, gradients: Gradients | None) -> dict[str, torch.Tensor | None]:
    """What ``step`` returns, by name."""
    return {**vars(output), **({} if gradients is None else vars(gradients))}


def check_step(call: Call, output: AttentionOutput, gradients: Gradients | None) -> None:
    """The results of both hooks, or of the forward alone."""
    checks.check_output(call.case, call.inputs, output, call.expected())
    if gradients is None:
        return
    expected, lse = call.expected_gradients(), call.expected()[1].exact
    checks.check_gradients(call.case, call.inputs, gradients, lse, expected)


def check_once(suite: BackendConformance, case: Case, words: str) -> None:
    """Both passes of a case, or the forward alone, unwatched; nothing where the backend refuses it."""
    plan = suite.plan_of(case)
    if plan is None:
        return
    call = call_of(suite, case, plan.request)
    try:
        check_step(call, *step(suite, plan, call))
    except checks.ConformanceError as error:
        checks.fail(f"{words}, in {case!r}: {error}")


def check_call(suite: BackendConformance, plan: Plan, call: Call, words: str) -> None:
    """Both hooks, watched; ``words`` say with what, or after what."""
    try:
        hooks = suite.hooks()
        check_after_forward(hooks, plan, call, hooks.forward(plan, call))
    except checks.ConformanceError as error:
        checks.fail(f"{call.case.name} {words}: {error}")


def check_after_forward(hooks: Hooks, plan: Plan, call: Call, output: AttentionOutput) -> None:
    """The forward's output, and with training the backward, watched."""
    checks.check_output(call.case, call.inputs, output, call.expected())
    if plan.request.is_training:
        gradients = hooks.backward(plan, call, output)
        checks.check_gradients(call.case, call.inputs, gradients, call.expected()[1].exact, call.expected_gradients())


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
