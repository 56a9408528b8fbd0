"""What results are checked for: shapes, zeros and -inf, errors. A check raises ConformanceError or returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields

import torch

from mla_plugin.arguments.layout import LAYOUTS, lse_dtype
from mla_plugin.conformance.attention.case import DTYPE_NAMES, Case
from mla_plugin.conformance.budget import ConformanceError, Yardstick, check_error, fail
from mla_plugin.conformance.watch import check_no_graph, check_not_shared
from mla_plugin.device import DISTRIBUTIONS
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Platform

__all__ = ["ConformanceError", "check_error", "fail"]

_REQUESTS = (AttentionRequest, DecodeRequest)
_FACTS = (
    *(f.name.removeprefix("has_") for kind in (*_REQUESTS, Platform) for f in fields(kind)),
    *(kind.__name__ for kind in _REQUESTS),
    *DISTRIBUTIONS,
)
_NAMED = re.compile(r"\b([a-z][a-z_]*)=")
_CLAUSE = re.compile(r"[,;:()]")
_LIMIT = re.compile(
    r"\b(accepts?|expect\w*|instead|must|need\w*|only|require\w*|supports?|takes?|unless|wants?|without)\b"
)
"""A clause with such a word says what the backend takes, and not what it was given."""
Inputs = Mapping[str, torch.Tensor | None]


def check_reasons(reasons: tuple[str, ...], request: AttentionRequest | DecodeRequest | None = None) -> None:
    """Each reason is a text with the value found; ``name=value`` of a request's attribute is that of this request.

    ``expected name=value`` is the backend's own.
    """
    for reason in reasons:
        if not isinstance(reason, str) or not reason.strip():
            fail(f"the reason {reason!r} is not a string; expected one such as 'head_dim_qk=320 > 256'")
        if not re.search(r"\d", reason) and not any(fact in reason for fact in _FACTS):
            fail(f"the reason {reason!r} lacks the value found or the limit, as in 'head_dim_qk=320 > 256'")
        found = [clause for clause in _CLAUSE.split(reason) if not _LIMIT.search(clause)]
        for name in _NAMED.findall(";".join(found)):
            if hasattr(request, name) and not _holds(reason, value := getattr(request, name)):
                fail(f"the reason {reason!r} does not fit its request, whose {name} is {value!r}")


def _holds(reason: str, value: object) -> bool:
    """Whether the value stands in the reason, in some spelling; floats may be rounded there."""
    if isinstance(value, tuple):
        return all(_holds(reason, x) for x in value)
    if isinstance(value, bool):
        spellings = [str(value), str(value).lower(), str(int(value))]
    elif isinstance(value, torch.dtype):
        spellings = [str(value), str(value).removeprefix("torch."), DTYPE_NAMES.get(value, str(value))]
    elif isinstance(value, int | str):
        spellings = [str(value)]
    else:
        return True
    return any(re.search(rf"(?<![\w.-]){re.escape(text)}(?!\w)", reason) for text in spellings)


def check_output(case: Case, inputs: Inputs, output: object, expected: tuple[Yardstick, Yardstick]) -> AttentionOutput:
    """A forward's result: fresh tensors of the right shapes, zeros and -inf where no key is seen, errors in budget.

    Args:
        case: the case.
        inputs: its tensors by name.
        output: what the backend returned.
        expected: out and lse.
    """
    output = check_types(case, output, expected)
    out, lse = expected
    if output.out.numel() and output.out.stride(-1) != 1:
        fail(f"out has strides {output.out.stride()}; its last dimension must be contiguous, a backward may rely on it")
    check_no_graph(out=output.out, lse=output.lse)
    check_not_shared(vars(output), inputs)
    check_zero("out", output.out, rows_without_keys(case, lse.exact))
    check_error("out", output.out, out)
    check_lse(output.lse, lse)
    return output


def check_types(case: Case, output: object, expected: tuple[Yardstick, Yardstick]) -> AttentionOutput:
    """A forward's result: shapes and dtypes alone."""
    if not isinstance(output, AttentionOutput):
        fail(f"forward must return an AttentionOutput, not {type(output).__name__}")
    out, lse = expected
    check_tensor("out", output.out, out.exact, case.dtype)
    check_tensor("lse", output.lse, lse.exact, lse_dtype(case.dtype))
    return output


def check_lse(lse: torch.Tensor, expected: Yardstick) -> None:
    """-inf exactly where no key is seen; elsewhere as exact as sums in float32 are."""
    sees_no_key = expected.exact.isneginf()
    if bool(lse.isnan().any()):
        fail("lse has NaN: memory that was never written, scores that overflow, or a row that sees no key")
    if not torch.equal(lse.isneginf(), sees_no_key):
        fail("lse must be -inf exactly for the rows that see no key, or lie in padding")
    finite = Yardstick(expected.exact.masked_fill(sees_no_key, 0.0), expected.sigma.masked_fill(sees_no_key, 0.0))
    check_error("lse", lse.masked_fill(sees_no_key, 0.0), finite, is_biased=True)


def check_gradients(
    case: Case,
    inputs: Inputs,
    gradients: object,
    lse: torch.Tensor,
    expected: Mapping[str, Yardstick],
) -> Gradients:
    """A backward's result: the inputs' shapes and dtypes, zeros where no key is seen, errors in budget."""
    if not isinstance(gradients, Gradients):
        fail(f"backward must return Gradients, not {type(gradients).__name__}")
    padding = case.is_padding("kv").to(lse.device)
    zeros = {"dq": rows_without_keys(case, lse), "dk": padding, "dv": padding}
    check_no_graph(**vars(gradients))
    check_not_shared(vars(gradients), inputs)
    for name, yardstick in expected.items():
        got, source = getattr(gradients, name), inputs[name[1:]]
        assert source is not None
        check_tensor(name, got, yardstick.exact, source.dtype)
        if name in zeros:
            check_zero(name, got, zeros[name])
        check_error(name, got, yardstick)
    return gradients


def check_equal_bits(first: object, second: object) -> None:
    """Two results of a deterministic request agree bit for bit."""
    for name, x in vars(first).items():
        if x is not None and not torch.equal(x, getattr(second, name)):
            fail(f"{name} differs between two runs of a deterministic request; refuse deterministic=True, or keep it")


def check_tensor(name: str, x: object, like: torch.Tensor, dtype: torch.dtype) -> None:
    """A tensor of the shape and on the device of ``like``, in ``dtype``."""
    if not isinstance(x, torch.Tensor):
        fail(f"{name} is {x!r}; expected a tensor of shape {tuple(like.shape)} and {dtype}")
    if (x.shape, x.dtype, x.device) != (like.shape, dtype, like.device):
        fail(
            f"{name} has shape {tuple(x.shape)}, {x.dtype}, on {x.device}; "
            f"expected {tuple(like.shape)}, {dtype}, on {like.device}"
        )


def worst_copy(name: str, x: object, exact: torch.Tensor, axis: int, times: int, dtype: torch.dtype) -> torch.Tensor:
    """Of a result that holds the same thing so many times along an axis, each element from the copy that is worst.

    All copies have the same roundings, so as a whole they would look like a systematic error.
    """
    shape = list(exact.shape)
    shape[axis] *= times
    check_tensor(name, x, exact.new_empty(shape), dtype)
    assert isinstance(x, torch.Tensor)
    copies = x.unflatten(axis, (times, exact.shape[axis])).movedim(axis, 0)
    errors = (copies.double() - exact).abs().masked_fill(copies == exact, 0.0)
    worst = errors.nan_to_num(torch.inf).argmax(0, keepdim=True)
    picked: torch.Tensor = copies.gather(0, worst).squeeze(0)
    return picked


def check_zero(name: str, x: torch.Tensor, where: torch.Tensor) -> None:
    """Exactly 0 wherever ``where`` holds."""
    selected = x.masked_select(where)
    wrong = selected[selected != 0]
    if wrong.numel():
        fail(
            f"{name} must be 0 in rows that lie in padding or, for queries, see no key; {wrong.numel()} of "
            f"{selected.numel()} elements there are not, such as {wrong[0]}"
        )


def rows_without_keys(case: Case, lse: torch.Tensor) -> torch.Tensor:
    """Lse's -inf in the layout of out: [..., H, 1]."""
    bhsd = lse[None, ..., None] if case.is_packed else lse[..., None]
    return LAYOUTS[case.qkv_format].from_bhsd(bhsd.isneginf())
