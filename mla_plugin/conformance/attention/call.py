"""One call of a case with its data, what it must give, and the hooks that compute it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.layout import lse_dtype
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.draw import Draw
from mla_plugin.conformance.attention.oracle import Oracle
from mla_plugin.conformance.budget import Roundings, Yardstick, fail
from mla_plugin.conformance.watch import as_the_library, nothing_changed
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Plan, Residuals
from mla_plugin.hooks.manager import BackendManager


@dataclass(frozen=True)
class Call:
    """A case with its data: what a hook is given.

    Attributes:
        case: that the data was drawn for.
        request: its request.
        tensors: the inputs; those that the case says require a gradient.
        dout, dlse: what the backward is given; without a backward they are not used. ``dlse`` is infinite where no key
            is seen, as that of ``lse.square()`` is.
    """

    case: Case
    request: AttentionRequest
    tensors: AttentionTensors
    dout: torch.Tensor
    dlse: torch.Tensor | None

    @classmethod
    def of(
        cls,
        case: Case,
        request: AttentionRequest,
        device: str,
        generator: torch.Generator,
        padding_poison: float,
        *,
        is_guarded: bool = True,
    ) -> Call:
        """Fresh data; ``is_guarded`` as in ``Draw``."""
        tensors = case.tensors(device, generator, padding_poison=padding_poison, is_guarded=is_guarded)
        dout, dlse = case.cotangents(device, generator, padding_poison=padding_poison, is_guarded=is_guarded)
        if request.is_training:
            needing = {name: getattr(tensors, name).detach().requires_grad_() for name in case.needs_gradient}
            if request.bias_requires_grad and tensors.bias is not None:
                needing["bias"] = tensors.bias.detach().requires_grad_()
            tensors = replace(tensors, **needing)
        call = cls(case, request, tensors, dout, dlse)
        if request.is_training and dlse is not None and not case.dlse_storage.startswith("expanded"):
            no_key = call.expected()[1].exact.isneginf()
            dlse.copy_(torch.where(no_key, torch.copysign(dlse.new_tensor(torch.inf), dlse), dlse))
        return call

    @property
    def inputs(self) -> dict[str, torch.Tensor | None]:
        """The tensors by name."""
        return {name: x for name, x in vars(self.tensors).items() if isinstance(x, torch.Tensor)}

    def without_dlse(self) -> Call:
        """The same call without a gradient of lse."""
        return self if self.dlse is None else replace(self, dlse=None)

    def with_mask_of(self, hides: bool) -> Call:
        """The same call with a mask of one value; ``dlse`` is finite, because queries may see keys that saw none."""
        if self.tensors.attention_mask is None:
            return self
        mask = torch.full_like(self.tensors.attention_mask, hides)
        dlse = None if self.dlse is None else self.dlse.nan_to_num(posinf=1.0, neginf=-1.0)
        return replace(self, tensors=replace(self.tensors, attention_mask=mask), dlse=dlse)

    def in_memory_of(self, other: Call) -> Call | None:
        """This call's data written into the other's tensors, as a captured graph has it; None where one is expanded.

        Neither addresses nor version counters change: kernels of other packages do not count versions.
        """
        mine, theirs = ({**x.inputs, "dout": x.dout, "dlse": x.dlse} for x in (self, other))
        for name, x in mine.items():
            there = theirs[name]
            if x is None or there is None:
                continue
            if any(stride == 0 and size > 1 for stride, size in zip(there.stride(), there.shape, strict=True)):
                return None
        for name, x in mine.items():
            there = theirs[name]
            if x is not None and there is not None:
                there.data.copy_(x)
        tensors = replace(other.tensors, softmax_scale=self.tensors.softmax_scale)
        return replace(self, tensors=tensors, dout=other.dout, dlse=other.dlse)

    @cached_property
    def oracle(self) -> Oracle:
        """What the call must give."""
        return Oracle(self.request, self.tensors)

    @cached_property
    def _expected(self) -> tuple[Yardstick, Yardstick]:
        return self.oracle.forward()

    def expected(self) -> tuple[Yardstick, Yardstick]:
        """out and lse."""
        return self._expected

    def as_of_another(self, output: AttentionOutput, generator: torch.Generator) -> AttentionOutput:
        """The same out and lse with other strides, as those of another backend's forward have them."""
        of_out, of_lse = self.case.merged_storages
        draw = Draw(self.case.dtype, output.out.device, generator)
        placed = draw.placed(output.out, of_out, self.request.layout)
        return AttentionOutput(placed, draw.placed(output.lse, of_lse))

    def partial(self, generator: torch.Generator) -> tuple[Call, AttentionOutput]:
        """out and lse over these keys and others that this call does not see, as context parallelism merges them.

        They have the strides of another backend's. Of the rows that see no key here some see others: their lse is
        finite, and so is ``dlse`` in the call that is returned.
        """
        out, lse = self._expected
        share = torch.rand(lse.exact.shape, generator=generator, dtype=torch.float64).to(lse.exact.device) * 0.7 + 0.2
        others = torch.randn(out.exact.shape, generator=generator, dtype=torch.float64).to(out.exact.device)
        rows = share[None, ..., None] if self.case.is_packed else share[..., None]
        rows = self.request.layout.from_bhsd(rows)
        merged = torch.where(out.sigma > 0, rows * out.exact + (1 - rows) * others, 0.0)
        padding = self.request.layout.to_bhsd(self.case.is_padding("q"))[..., 0].to(share.device)
        padding = padding[0] if self.case.is_packed else padding
        sees_others = lse.exact.isneginf() & ~padding & (share > 0.35)
        whole = torch.where(sees_others, 4 * share - 2, lse.exact - share.log())
        rows = sees_others[None, ..., None] if self.case.is_packed else sees_others[..., None]
        merged = torch.where(self.request.layout.from_bhsd(rows), others, merged)
        output = AttentionOutput(merged.to(self.case.dtype), whole.to(lse_dtype(self.case.dtype)))
        call = self
        if self.dlse is not None and bool((sees_others & self.dlse.isinf()).any()):
            dlse = torch.where(sees_others, self.dlse.sign(), self.dlse)
            draw = Draw(self.case.dtype, dlse.device, generator)
            call = replace(self, dlse=draw.placed(dlse, self.case.dlse_storage))
        return call, self.as_of_another(output, generator)

    def expected_gradients(self, partial: AttentionOutput | None = None) -> dict[str, Yardstick]:
        """The gradients for the call's own out and lse, or for those that ``partial`` gave."""
        if partial is None:
            return self._own_gradients
        given = partial.out.double()
        rounded = Yardstick(given, Roundings.of(self.case.dtype).step * given.abs())
        return self.oracle.backward(rounded, partial.lse, self.dout, self.dlse)

    @cached_property
    def _own_gradients(self) -> dict[str, Yardstick]:
        out, lse = self._expected
        return self.oracle.backward(out, lse.exact, self.dout, self.dlse)


@dataclass(frozen=True)
class Hooks:
    """The hooks of a backend, called as the library does: outside autograd, and watched.

    Attributes:
        manager: that holds it.
        device_type: of the calls.
        kept: shared by calls that differ only in values, see ``AttentionTensors.kept``.
    """

    manager: BackendManager
    device_type: str
    kept: dict[str, Any] | None = None

    def forward(self, plan: Plan, call: Call, *, is_poisoned: bool = True) -> Any:
        """The forward of a call; ``is_poisoned`` fills uninitialised memory with NaN."""
        run = self.manager.caller("forward", plan.forward_backend)
        if self.kept is not None:
            vars(call.tensors)["kept"] = self.kept
        watched = as_the_library(self.device_type, call.inputs, is_poisoned=is_poisoned)
        with _same_objects(call.tensors), nothing_changed(plan, plan.request), watched:
            return run(plan=plan, tensors=call.tensors)

    def backward(self, plan: Plan, call: Call, output: AttentionOutput, *, is_poisoned: bool = True) -> Any:
        """The backward of a call, given an out and an lse."""
        run = self.manager.caller("backward", plan.backward_backend)
        residuals = Residuals(call.tensors, output.out, output.lse)
        inputs = {**call.inputs, "out": output.out, "lse": output.lse, "dout": call.dout, "dlse": call.dlse}
        watched = as_the_library(self.device_type, inputs, is_poisoned=is_poisoned)
        with _same_objects(call.tensors), _same_objects(residuals), nothing_changed(plan, plan.request), watched:
            return run(plan=plan, residuals=residuals, dout=call.dout, dlse=call.dlse)


@contextmanager
def _same_objects(given: AttentionTensors | Residuals) -> Iterator[None]:
    """Fail if the block replaces an attribute: a backward, or another layer, gets the object too."""
    before = {field.name: getattr(given, field.name) for field in fields(given)}
    yield
    for name, x in before.items():
        if getattr(given, name) is not x:
            fail(f"the hook replaced {name} of its {type(given).__name__}; a hook must not change its arguments")
