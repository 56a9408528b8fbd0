"""What the suite checks: shapes, zeros, error budgets, untouched inputs. A check raises ConformanceError or returns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_plugin.arguments.layout import from_bhsd
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.device import DISTRIBUTIONS
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Platform

ACCUMULATOR_ROUNDINGS = 32
"""Roundings of the accumulator, on numbers of the data's size, that the budget allows beyond plain PyTorch's error."""

_ALLOCATIONS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_FACTS = (*(f.name for kind in (AttentionRequest, DecodeRequest, Platform) for f in fields(kind)), *DISTRIBUTIONS)


class ConformanceError(AssertionError):
    """A backend does not keep the contract of ``mla_plugin.hooks.spec``."""


def fail(message: str) -> NoReturn:
    """Raise ConformanceError."""
    raise ConformanceError(message)


class PoisonedMemory(TorchDispatchMode):
    """Fills every floating-point tensor that is allocated uninitialised with NaN, so that what is never written shows.

    ``torch.utils.deterministic.fill_uninitialized_memory`` would do so too, but only together with deterministic
    algorithms, which change what is under test.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS and result.is_floating_point():
            result.fill_(torch.nan)
        if isinstance(result, list):  # one with None, which stands for an undefined tensor, cannot go back
            return [torch.empty(0) if x is None else x for x in result]
        return result


@contextmanager
def synchronisation_is_an_error(device_type: str) -> Iterator[None]:
    """On a CUDA device, an operator of PyTorch that makes the host wait raises."""
    if device_type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def unmodified(tensors: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Fail when the memory behind a tensor, gaps between its elements included, changes inside the block."""
    before = {name: _memory(x).clone() for name, x in tensors.items() if x is not None}
    yield
    for name, memory in before.items():
        if not torch.equal(memory, _memory(tensors[name])):
            fail(f"{name} was modified; a backend must leave its inputs as they are")


def _memory(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def check_reasons(reasons: tuple[str, ...]) -> None:
    """Each reason is a text with the value found."""
    for reason in reasons:
        if not reason.strip():
            fail(f"a reason is a text such as 'head_dim_qk=320 > 256', not {reason!r}")
        if not re.search(r"\d", reason) and not any(fact in reason for fact in _FACTS):
            fail(f"the reason {reason!r} says neither what was found nor the limit; such as 'head_dim_qk=320 > 256'")


def check_output(
    case: Case, tensors: Mapping[str, torch.Tensor], output: object, exact: AttentionOutput, low: AttentionOutput
) -> AttentionOutput:
    """A forward's result: fresh tensors of the right shapes, zeros and -inf where no key is seen, errors in budget.

    Args:
        case: the case.
        tensors: the inputs by name.
        output: what the backend returned.
        exact: the oracle's result in float64.
        low: the oracle's result in the case's dtype.
    """
    if not isinstance(output, AttentionOutput):
        fail(f"forward returns an AttentionOutput, not {type(output).__name__}")
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    check_tensor("out", output.out, exact.out, case.dtype)
    check_tensor("lse", output.lse, exact.lse, lse_dtype)
    if output.out.numel() and output.out.stride(-1) != 1:
        fail(f"out has strides {output.out.stride()}; its last dimension must be contiguous, a backward may rely on it")
    inputs = {_address(x): name for name, x in tensors.items()}
    for name in ("out", "lse"):
        owner = inputs.get(_address(getattr(output, name)))
        if owner is not None and getattr(output, name).numel():
            fail(f"{name} shares its memory with {owner}; return a fresh tensor")

    sees_no_key = exact.lse.isneginf()
    check_zero("out", output.out, _rows_without_keys(case, exact.lse))
    _check_no_nan("lse", output.lse)
    if not torch.equal(output.lse.isneginf(), sees_no_key):
        fail("lse must be -inf exactly for the rows that see no key, or lie in padding")
    exact_lse, low_lse, lse = (x.masked_fill(sees_no_key, 0) for x in (exact.lse, low.lse, output.lse))
    check_error(case, "out", output.out, exact.out, low.out, magnitude_of(exact.out) * magnitude_of(exact_lse))
    check_error(case, "lse", lse, exact_lse, low_lse, magnitude_of(exact_lse))
    return output


def check_gradients(
    case: Case,
    tensors: Mapping[str, torch.Tensor],
    gradients: object,
    exact_lse: torch.Tensor,
    exact: Gradients,
    low: Gradients,
    rounding: float,
) -> Gradients:
    """A backward's result: the inputs' shapes and dtypes, zeros where no key is seen, errors in budget.

    ``rounding`` is what ``delta_rounding`` gives; it is allowed in every gradient but dv.
    """
    if not isinstance(gradients, Gradients):
        fail(f"backward returns Gradients, not {type(gradients).__name__}")
    names = ["dq", "dk", "dv"]
    if case.bias_requires_grad:
        names.append("dbias")
    padding = case.is_padding("kv").to(exact_lse.device)
    zeros = {"dq": _rows_without_keys(case, exact_lse), "dk": padding, "dv": padding}
    finite_lse = exact_lse.masked_fill(exact_lse.isneginf(), 0)
    magnitude = max(magnitude_of(getattr(exact, name)) for name in names) * magnitude_of(finite_lse)
    for name in names:
        got, wanted = getattr(gradients, name), getattr(exact, name)
        check_tensor(name, got, wanted, tensors[name[1:]].dtype)
        if name in zeros:
            check_zero(name, got, zeros[name])
        allowed = 0.0 if name == "dv" else rounding
        check_error(case, name, got, wanted, getattr(low, name), magnitude, allowed)
    return gradients


def delta_rounding(case: Case, out: torch.Tensor, dout: torch.Tensor, softmax_scale: float) -> float:
    """What a backward may lose because it takes delta = rowsum(dout * out) from an out rounded to the case's dtype.

    The error of delta, one rounding of each out (in quadrature), is multiplied by the scale and by an element of k or
    q, which are standard normal: hardly one exceeds 4. With few keys everything else cancels and only this is left.
    """
    products = (dout.double() * out.double()).nan_to_num(0.0)
    largest = products.norm(dim=-1).max().item() if products.numel() else 0.0
    return torch.finfo(case.dtype).eps * largest * softmax_scale * 4.0


def check_error(
    case: Case | DecodeCase,
    name: str,
    got: torch.Tensor,
    exact: torch.Tensor,
    low: torch.Tensor,
    magnitude: float,
    allowed: float = 0.0,
) -> None:
    """The error against float64 is at most twice that of plain PyTorch in the case's dtype, plus a floor.

    Both the largest and the root-mean-square error are held to it. The floor is for cases where plain PyTorch happens
    to make hardly an error, such as a single key: two roundings to the dtype, of the softmax weights and of the result,
    and ``ACCUMULATOR_ROUNDINGS`` roundings of the accumulator (float32, or float64 for float64) on numbers of size
    ``magnitude``: the largest value, times the largest log-sum-exp, because exp(score - lse) turns an absolute error
    of its argument into a relative one. ``allowed`` is added to it.
    """
    _check_no_nan(name, got)
    accumulator = torch.float64 if case.dtype == torch.float64 else torch.float32
    two_roundings = torch.finfo(case.dtype).eps
    accumulated = ACCUMULATOR_ROUNDINGS * torch.finfo(accumulator).eps * magnitude
    for norm, words in ((_largest, "largest"), (_root_mean_square, "root-mean-square")):
        plain = norm(low.double() - exact)
        budget = 2 * plain + two_roundings * norm(exact) + accumulated + allowed
        error = norm(got.double() - exact)
        if not error <= budget:
            fail(
                f"{name}: the {words} error {error:.3g} is above {budget:.3g}, twice that of plain PyTorch in "
                f"{case.dtype} ({plain:.3g}) and a floor; the {words} value is {norm(exact):.3g}"
            )


def check_equal_bits(first: object, second: object) -> None:
    """Two results of a deterministic request agree bit for bit."""
    for name, x in vars(first).items():
        if x is not None and not torch.equal(x, getattr(second, name)):
            fail(f"{name} differs between two runs of a deterministic request; refuse deterministic=True or keep it")


def check_tensor(name: str, x: object, like: torch.Tensor, dtype: torch.dtype) -> None:
    """A tensor of the shape and on the device of ``like``, in ``dtype``."""
    if not isinstance(x, torch.Tensor):
        fail(f"{name} is {x!r}; a tensor of shape {tuple(like.shape)} and {dtype} is wanted")
    if (x.shape, x.dtype, x.device) != (like.shape, dtype, like.device):
        fail(
            f"{name} has shape {tuple(x.shape)}, {x.dtype}, on {x.device}; "
            f"wanted is {tuple(like.shape)}, {dtype}, on {like.device}"
        )


def _check_no_nan(name: str, x: torch.Tensor) -> None:
    count = int(x.isnan().sum())
    if count:
        fail(
            f"{name} has NaN in {count} of {x.numel()} elements: memory that was never written, or a row "
            "that sees no key"
        )


def check_zero(name: str, x: torch.Tensor, where: torch.Tensor) -> None:
    """Exactly 0 wherever ``where`` holds."""
    selected = x.masked_select(where)
    wrong = selected[selected != 0]
    if wrong.numel():
        fail(
            f"{name} must be 0 in rows that lie in padding or, for queries, see no key; {wrong.numel()} of "
            f"{selected.numel()} elements there are not, such as {wrong[0]}"
        )


def _rows_without_keys(case: Case, lse: torch.Tensor) -> torch.Tensor:
    """Lse's -inf in the layout of out: [..., H, 1]."""
    bhsd = lse[None, ..., None] if case.is_packed else lse[..., None]
    return from_bhsd(bhsd.isneginf(), case.qkv_format)


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def magnitude_of(x: torch.Tensor) -> float:
    """The largest value, at least that of the normal random data."""
    return max(1.0, _largest(x))


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _root_mean_square(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
