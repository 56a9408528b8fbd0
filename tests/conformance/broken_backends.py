"""Backends that each break the contract in one way, with the case that must catch it and what the suite must say."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from mla_plugin.arguments.layout import to_bhsd
from mla_plugin.hooks.attention import AttentionOutput, Gradients
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.reference import attention, attention_with_gradients
from tests.conformance.sample_backends import FlashBackend, ReferenceBackend


class WrongScale(ReferenceBackend):
    case, message = "bshd-causal-bf16", "^out: the .* error"

    def compute(self, request, tensors):
        return super().compute(request, replace(tensors, softmax_scale=request.head_dim_v**-0.5))


class WrongScaleInBackward(ReferenceBackend):
    case, message = "bshd-causal-fp32", "^dq: the .* error"

    def differentiate(self, request, residuals, dout, dlse):
        gradients = super().differentiate(request, residuals, dout, dlse)
        return replace(gradients, dq=gradients.dq * 1.0001)


class LowPrecision(ReferenceBackend):
    case, message = "bshd-causal-fp32", "^out: the .* error"

    def compute(self, request, tensors):
        output = attention(request, tensors, compute_dtype=torch.bfloat16)
        return AttentionOutput(output.out.float(), output.lse.float())


class ChangedRequest(ReferenceBackend):
    """Computes another request than it was asked for."""

    def compute(self, request, tensors):
        return super().compute(self.change(request), tensors)


class TopLeftForBottomRight(ChangedRequest):
    case, message = "lengths_17_131-causal_bottom_right-bf16", "^out: the .* error"

    def change(self, request):
        return request.replace(attn_mask_type="causal")


class BottomRightForTopLeft(ChangedRequest):
    case, message = "lengths_131_17-causal-fp32", "out must be 0|^lse|^out"

    def change(self, request):
        return request.replace(attn_mask_type="causal_bottom_right")


class DiagonalOfTheExtents(ChangedRequest):
    """Aligns a padded batch by its longest lengths instead of each sequence's own."""

    case, message = "bshd-padding_causal_bottom_right-fp32", "^out"

    def change(self, request):
        return request.replace(attn_mask_type="padding_causal")


class WindowOneTooWide(ChangedRequest):
    case, message = "window_both-67_67-bf16", "^out: the .* error"

    def change(self, request):
        left, right = request.window_size
        return request.replace(window_size=(left + 1, right))


class WindowTopLeft(ChangedRequest):
    case, message = "window_both-37_71-bf16", "^out: the .* error"

    def change(self, request):
        return request.replace(bottom_right_diagonal=False)


class IgnoresPadding(ChangedRequest):
    case, message = "bshd-padding-bf16", "out must be 0 in rows that lie in padding"

    def change(self, request):
        return request.replace(attn_mask_type="no_mask")


class ReadsPaddedKeys(ReferenceBackend):
    case, message = "bshd-padding-self-bf16", "^out: the .* error"

    def compute(self, request, tensors):
        full = torch.arange(request.batch_size + 1, dtype=torch.int32) * request.max_seqlen_kv
        exact = super().compute(request, tensors)
        leaky = super().compute(request, replace(tensors, cu_seqlens_kv=full))
        return replace(exact, out=leaky.out)


class IgnoresPaddedOffsets(ReferenceBackend):
    case, message = "thd-padding-between-bf16", "^out"

    def compute(self, request, tensors):
        return super().compute(request, replace(tensors, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None))


class InvertedMask(ReferenceBackend):
    case, message = "arbitrary-b1ss-bf16", "^lse|^out"

    def compute(self, request, tensors):
        return super().compute(request, replace(tensors, attention_mask=~tensors.attention_mask))


class BiasBeforeTheScale(ChangedRequest):
    case, message = "post_scale_bias-1hss-bf16", "^out: the .* error"

    def change(self, request):
        return request.replace(bias_type="pre_scale_bias")


class LastTileForgotten(ReferenceBackend):
    """Computes whole tiles of 64 queries and leaves the rest of ``out`` as it was allocated."""

    case, message = "bshd-causal-bf16", "NaN in .* never written"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        out = torch.empty_like(output.out)
        out[:, :64] = output.out[:, :64]
        return replace(output, out=out)


class LastKeysForgotten(FlashBackend):
    case, message = "bhsd-no_mask-bf16", "^out: the .* error"

    def operands(self, request, tensors):
        q, k, v, scores = super().operands(request, tensors)
        return q, k, v, scores.masked_fill(torch.arange(scores.shape[-1]) >= 64, -torch.inf)


class UnwrittenGradient(ReferenceBackend):
    case, message = "thd-tail-fp32", "dk has NaN|dk must be 0"

    def differentiate(self, request, residuals, dout, dlse):
        gradients = super().differentiate(request, residuals, dout, dlse)
        written = residuals.tensors.cu_seqlens_kv[-1]
        dk = torch.empty_like(gradients.dk)
        dk[:written] = gradients.dk[:written]
        return replace(gradients, dk=dk)


class LeavesPaddedGradients(ReferenceBackend):
    case, message = "bshd-padding-fp32", "dk must be 0 in rows that lie in padding"

    def differentiate(self, request, residuals, dout, dlse):
        gradients = super().differentiate(request, residuals, dout, dlse)
        return replace(gradients, dk=gradients.dk.masked_fill(gradients.dk == 0, 1e-30))


class NanWithoutKeys(ReferenceBackend):
    case, message = "arbitrary-b1ss-fp32", "^out must be 0.* nan"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        return replace(output, out=output.out.masked_fill(output.out == 0, math.nan))


class FiniteLseWithoutKeys(ReferenceBackend):
    case, message = "lse-rows_without_keys-fp32", "lse must be -inf exactly"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        return replace(output, lse=output.lse.clamp(min=-1e30))


class LseInBaseTwo(ReferenceBackend):
    case, message = "bshd-causal-bf16", "^lse: the .* error"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        return replace(output, lse=output.lse / math.log(2))


class LseInLowPrecision(ReferenceBackend):
    case, message = "bshd-causal-bf16", "lse has shape .* torch.bfloat16"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        return replace(output, lse=output.lse.bfloat16())


class IgnoresDlse(ReferenceBackend):
    case, message = "lse-bshd-bf16", "^dq: the .* error"

    def differentiate(self, request, residuals, dout, dlse):
        return super().differentiate(request, residuals, dout, None)


class BackwardOfItsOwnForwardOnly(FlashBackend):
    """Keeps what its backward needs from its own forward instead of reading out and lse."""

    case, message = "bhsd-no_mask-fp32", "^d[qk]"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        self.mine = output.out
        return output

    def differentiate(self, request, residuals, dout, dlse):
        if residuals.out is not self.mine:
            residuals = replace(residuals, lse=residuals.lse / math.log(2))
        return super().differentiate(request, residuals, dout, dlse)


class GradientOfOneHeadOfTheGroup(FlashBackend):
    case, message = "bhsd-gqa-bf16", "^dk: the .* error"

    def differentiate(self, request, residuals, dout, dlse):
        ratio = request.num_heads // request.num_kv_heads
        tensors = residuals.tensors
        expanded = replace(tensors, k=tensors.k.repeat_interleave(ratio, 1), v=tensors.v.repeat_interleave(ratio, 1))
        residuals = replace(residuals, tensors=expanded)
        request = request.replace(num_kv_heads=request.num_heads)
        gradients = super().differentiate(request, residuals, dout, dlse)
        return replace(gradients, dk=gradients.dk[:, ::ratio], dv=gradients.dv[:, ::ratio])


class GradientPerQueryHead(GradientOfOneHeadOfTheGroup):
    case, message = "bhsd-gqa-bf16", "dk has shape"

    def differentiate(self, request, residuals, dout, dlse):
        gradients = super().differentiate(request, residuals, dout, dlse)
        return replace(gradients, dk=gradients.dk.repeat_interleave(2, 1))


class NoBiasGradient(ReferenceBackend):
    case, message = "post_scale_bias-1hss-grad-bf16", "dbias is None; a tensor of shape"

    def differentiate(self, request, residuals, dout, dlse):
        return replace(super().differentiate(request, residuals, dout, dlse), dbias=None)


class BiasGradientNotSummed(ReferenceBackend):
    case, message = "post_scale_bias-11ss-grad-bf16", "dbias has shape"

    def differentiate(self, request, residuals, dout, dlse):
        gradients = super().differentiate(request, residuals, dout, dlse)
        shape = (request.batch_size, request.num_heads, request.max_seqlen_q, request.max_seqlen_kv)
        return replace(gradients, dbias=gradients.dbias.expand(shape))


class AssumesContiguousInputs(ReferenceBackend):
    case, message = "bshd-packed-bf16", "^out: the .* error"

    def compute(self, request, tensors):
        misread = torch.as_strided(tensors.q, tensors.q.shape, torch.empty(tensors.q.shape).stride(), 0)
        return super().compute(request, replace(tensors, q=misread))


class AssumesContiguousDout(ReferenceBackend):
    case, message = "bshd-dout_transposed-bf16", "^d[qkv]: the .* error"

    def differentiate(self, request, residuals, dout, dlse):
        misread = torch.as_strided(dout, dout.shape, torch.empty(dout.shape).stride(), 0)
        return super().differentiate(request, residuals, misread, dlse)


class ScalesQueriesInPlace(ReferenceBackend):
    case, message = "bshd-causal-fp32", "^q was modified"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        tensors.q.mul_(tensors.softmax_scale)
        return output


class WritesBetweenTheHeads(ReferenceBackend):
    case, message = "bshd-sliced_heads-fp32", "^k was modified"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        shape = (*tensors.k.shape[:2], 2 * request.num_kv_heads, request.head_dim_qk)
        torch.as_strided(tensors.k, shape, torch.empty(shape).stride(), 0)[:, :, 1].zero_()
        return output


class ReturnsItsInput(ReferenceBackend):
    case, message = "lengths_1_1-causal-bf16", "out shares its memory with v"

    def compute(self, request, tensors):
        return replace(super().compute(request, tensors), out=tensors.v)


class WrongLayout(ReferenceBackend):
    case, message = "bshd-causal-bf16", "out has shape"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        return replace(output, out=to_bhsd(output.out, request.qkv_format))


class LastDimensionStrided(ReferenceBackend):
    case, message = "bshd-causal-bf16", "last dimension must be contiguous"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        return replace(output, out=output.out.mT.contiguous().mT)


class OutInFloat32(ReferenceBackend):
    case, message = "bshd-causal-bf16", "out has shape .* torch.float32"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        return replace(output, out=output.out.float())


class NotDeterministic(ReferenceBackend):
    case, message = "deterministic-causal-fp32", "dk differs between two runs"
    calls = itertools.count()

    def differentiate(self, request, residuals, dout, dlse):
        gradients = super().differentiate(request, residuals, dout, dlse)
        return replace(gradients, dk=gradients.dk * (1 + next(self.calls) % 2 * 2e-7))


class PlainTuple(ReferenceBackend):
    case, message = "bshd-causal-bf16", "forward returns an AttentionOutput, not tuple"

    def compute(self, request, tensors):
        output = super().compute(request, tensors)
        return output.out, output.lse


class PlainGradients(ReferenceBackend):
    case, message = "bshd-causal-bf16", "backward returns Gradients, not tuple"

    def differentiate(self, request, residuals, dout, dlse):
        gradients = super().differentiate(request, residuals, dout, dlse)
        return gradients.dq, gradients.dk, gradients.dv


class RefusesEverything(ReferenceBackend):
    case, message = "bshd-causal-bf16", "refuses bshd-causal-bf16, which it is expected to compute: head_dim_qk=192 > 0"

    def decide(self, request):
        return Refused((f"head_dim_qk={request.head_dim_qk} > 0",))


class RefusesWithoutAReason(ReferenceBackend):
    case, message = "bshd-causal-bf16", "says neither what was found nor the limit"

    def decide(self, request):
        return Refused(("not supported",))


class RefusesWithABlank(ReferenceBackend):
    case, message = "bshd-causal-bf16", "a reason is a text such as 'head_dim_qk=320 > 256', not ' '"

    def decide(self, request):
        return Refused((" ",))


class AnswersTrue(ReferenceBackend):
    case, message = "bshd-causal-bf16", "select_backend returns Accepted or Refused, not True"

    def decide(self, request):
        return True


class AnswersNothing(ReferenceBackend):
    case, message = "bshd-causal-bf16", "select_backend returns Accepted or Refused, not None"

    def decide(self, request):
        return None


class ChangesItsMind(ReferenceBackend):
    case, message = "bshd-causal-bf16", "two answers to one request"
    calls = itertools.count()

    def decide(self, request):
        return Accepted(priority=next(self.calls))


class GradientsInLowPrecision(ReferenceBackend):
    case, message = "bshd-no_mask-fp32", "^dq: the largest error .* is above"

    def differentiate(self, request, residuals, dout, dlse):
        _, low = attention_with_gradients(request, residuals.tensors, dout, dlse, compute_dtype=torch.float16)
        return Gradients(low.dq.float(), low.dk.float(), low.dv.float())
