"""``batch_invariant``: a prefill in chunks, and sequences alone, have the bits of one prefill of the whole batch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import checks
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Plan
from mla_plugin.hooks.types import Accepted

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = ((192, 128), (64, 64))
ENDS = (1, 38, 64, 101, 190)
"""Where chunks end: one query alone, ends within tiles and on them."""


def check_batch_invariance(suite: BackendConformance) -> None:
    """Of the first dtype and head dims that the backend takes, over dense and packed sequences."""
    for dtype, (dim_qk, dim_v) in itertools.product(DTYPES, HEAD_DIMS):
        whole = _draw(suite, dtype, dim_qk, dim_v)
        if not suite.takes(_request(whole, batch_invariant=False)):
            continue
        request = _request(whole, batch_invariant=True)
        answer = suite._answer(request)
        if isinstance(answer, Accepted):
            _check(suite, whole)
        elif not any("batch_invariant" in reason for reason in answer.reasons):
            checks.fail(f"{suite.backend} refuses batch_invariant=True without naming it: {answer.reasons}")
        return


def _draw(suite: BackendConformance, dtype: torch.dtype, dim_qk: int, dim_v: int) -> AttentionTensors:
    generator = suite._generator()
    shapes = ((2, ENDS[-1], 2, dim) for dim in (dim_qk, dim_qk, dim_v))
    q, k, v = (torch.randn(shape, generator=generator).to(suite.device, dtype) for shape in shapes)
    return AttentionTensors(q, k, v, dim_qk**-0.5)


def _request(tensors: AttentionTensors, *, batch_invariant: bool, qkv_format: str = "bshd") -> AttentionRequest:
    mask = "causal_bottom_right" if qkv_format == "bshd" else "padding_causal_bottom_right"
    return AttentionRequest.of(
        tensors,
        qkv_format=qkv_format,
        attn_mask_type=mask,
        return_lse=True,
        is_training=False,
        batch_invariant=batch_invariant,
    )


def _run(suite: BackendConformance, tensors: AttentionTensors, qkv_format: str = "bshd") -> AttentionOutput:
    request = _request(tensors, batch_invariant=True, qkv_format=qkv_format)
    plan = Plan(request, suite.platform(), suite.backend, suite.backend)
    output: AttentionOutput = suite._manager().caller("forward", suite.backend)(plan=plan, tensors=tensors)
    return output


def _check(suite: BackendConformance, whole: AttentionTensors) -> None:
    output, scale = _run(suite, whole), whole.softmax_scale
    for first, last in itertools.pairwise((0, *ENDS)):
        chunk = AttentionTensors(whole.q[:, first:last], whole.k[:, :last], whole.v[:, :last], scale)
        wanted = (output.out[:, first:last], output.lse[:, :, first:last])
        _same(f"queries {first} to {last}", _run(suite, chunk), wanted)
    for b in range(2):
        q, k, v = (x[b : b + 1] for x in (whole.q, whole.k, whole.v))
        alone = AttentionTensors(q, k, v, scale)
        _same(f"sequence {b}", _run(suite, alone), (output.out[b : b + 1], output.lse[b : b + 1]))
    lengths = [0, ENDS[-1], 2 * ENDS[-1]]
    offsets = torch.tensor(lengths, dtype=torch.int32, device=whole.q.device)
    q, k, v = (x.flatten(0, 1) for x in (whole.q, whole.k, whole.v))
    packed = AttentionTensors(q, k, v, scale, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    if suite.takes(_request(packed, batch_invariant=True, qkv_format="thd")):
        found = _run(suite, packed, "thd")
        _same("packed sequences", found, (output.out.flatten(0, 1), output.lse.transpose(0, 1).flatten(1)))


def _same(name: str, found: AttentionOutput, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    for what, x, y in zip(("out", "lse"), (found.out, found.lse), wanted, strict=True):
        if not torch.equal(x, y):
            count = int((x != y).sum())
            checks.fail(
                f"{what} of {name}: {count} of {x.numel()} elements have other bits than in the prefill of the whole "
                "batch; refuse batch_invariant=True"
            )
