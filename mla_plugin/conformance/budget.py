"""The error bound of a result: what the roundings of the same computation in the case's dtype add up to.

A ``Yardstick`` holds the exact values and, for each element, the standard deviation of the error that independent
roundings make: of the scores, the softmax weights, their gradients and the result to the case's dtype, and of every sum
in float32 (float64 for float64). It is computed from the inputs, so it depends neither on chance nor on a second run.

Three statistics are compared with it. The largest error of an element reveals a key too many or too few; the root mean
square reveals sums in a low precision; and the gain, <got, exact> / <exact, exact>, reveals a factor of half a percent,
which no norm of the error does: rounding errors have both signs and cancel in the gain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import torch

LARGEST = 9.0
"""Largest allowed error of one element, in standard deviations."""
MEAN = 2.0
"""Largest allowed root-mean-square error: twice that of plain PyTorch in the dtype."""
GAIN = 8.0
"""Largest allowed error of the gain, in standard deviations."""
GAIN_STEPS = 8
"""Also allowed, in units of the accumulator: an exp or a sum may have the same error everywhere."""


class ConformanceError(AssertionError):
    """A backend violates the contract of ``mla_plugin.hooks.spec``."""


def fail(message: str) -> NoReturn:
    """Raise ConformanceError."""
    raise ConformanceError(message)


@dataclass(frozen=True)
class Roundings:
    """The roundings of one dtype.

    Attributes:
        step: standard deviation of the relative error of one rounding to the dtype.
        tiny: the same of the absolute error near 0, where float16 has few numbers.
        sum: relative error of a sum in the accumulator, of the sum of its terms' absolute values.
    """

    step: float
    tiny: float
    sum: float

    def sum_of(self, count: int) -> float:
        """``sum`` for ``count`` terms: beyond a thousand, errors of a sequential sum grow like a random walk."""
        return self.sum * max(1.0, math.sqrt(count / 1024))

    @classmethod
    def of(cls, dtype: torch.dtype) -> Roundings:
        """Rounding errors are uniform, at most half a unit in the last place."""
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        info = torch.finfo(dtype)
        step = info.eps / 2 / math.sqrt(3)
        smallest = max(info.smallest_normal, 1e-150)  # float64 cannot hold the square of its own
        tiny = smallest * (step if dtype == torch.float16 else 1.0)  # others may flush to zero below it
        return cls(step, tiny, 4 * torch.finfo(accumulator).eps)


@dataclass(frozen=True)
class Yardstick:
    """Exact values and the standard deviation of their error, both float64, one shape."""

    exact: torch.Tensor
    sigma: torch.Tensor


def check_error(name: str, got: torch.Tensor, yardstick: Yardstick, *, is_biased: bool = False) -> None:
    """Fail unless the largest error, the root-mean-square error and the gain are within the bounds.

    ``is_biased``: errors of all rows may have the same sign, as with tensor cores that truncate sums instead of
    rounding them. The gain is not checked then.
    """
    _check_no_nan(name, got)
    exact, sigma = yardstick.exact, yardstick.sigma
    if not bool((exact.isfinite() & sigma.isfinite()).all()):
        fail(f"the suite's own mistake: {name} has no finite bound, which nothing would exceed")
    error = (got.double() - exact).abs_()
    ratio = error / sigma  # 0 / 0 is NaN where 0 is exact, and x / 0 is infinite
    count = int((sigma > 0).sum())
    ratio.nan_to_num_(0.0, torch.inf)
    if not count and not ratio.numel():
        return
    worst = float(ratio.max())
    if worst == torch.inf and float((error * (sigma == 0)).max()) != 0:
        fail(f"{name}: an element that must be exactly 0 is not")
    if not worst <= LARGEST:
        where = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        fail(
            f"{name}: the error {error[where]:.3g} of the element {where}, {got[where].item():.6g} for "
            f"{exact[where]:.6g}, is {worst:.3g} times what rounding explains; expected at most {LARGEST:g}"
        )
    if not count:
        return
    rows = max(1, count // exact.shape[-1]) if exact.dim() > 3 else count
    mean, accepted = float(ratio.square_().sum().div(count).sqrt()), MEAN * (1 + 3 / math.sqrt(rows))
    if not mean <= accepted:
        fail(
            f"{name}: the root-mean-square error is {mean:.3g} times what plain PyTorch's roundings explain; expected "
            f"at most {accepted:.3g}"
        )
    if not is_biased:
        _check_gain(name, got, yardstick)


def _check_gain(name: str, got: torch.Tensor, yardstick: Yardstick) -> None:
    """Errors within a row may be correlated; those of different rows are independent.

    But rows that are alike, as where one key outweighs all others, are rounded alike: the result may also be compared
    with the exact one as the dtype holds it.
    """
    exact, sigma = yardstick.exact, yardstick.sigma
    power = float(exact.flatten() @ exact.flatten())
    if not power:
        return
    gains = [_gain(got, wanted) for wanted in (exact, exact.to(got.dtype).double())]
    gain = min(gains, key=lambda gain: abs(gain - 1))
    spread = float((sigma * exact).abs_().sum(-1).norm()) / power
    accumulator = torch.float64 if got.dtype == torch.float64 else torch.float32
    accepted = GAIN * spread + GAIN_STEPS * torch.finfo(accumulator).eps
    if not abs(gain - 1) <= accepted:
        fail(
            f"{name}: it is the exact result times 1{gain - 1:+.2g}; rounding explains 1 +- {accepted:.2g}. A "
            "factor such as the scale is wrong, or a term is added or missing everywhere"
        )


def _gain(got: torch.Tensor, wanted: torch.Tensor) -> float:
    power = float(wanted.flatten() @ wanted.flatten())
    return float(got.double().flatten() @ wanted.flatten()) / power if power else math.inf


def _check_no_nan(name: str, x: torch.Tensor) -> None:
    count = int(x.isnan().sum())
    if count:
        fail(
            f"{name} has NaN in {count} of {x.numel()} elements: memory that was never written, memory that is not "
            "the tensor's, scores that overflow, or a row that sees no key"
        )
