"""NaN in one query: it shows in the query's own row of out, and in no other row.

The suites spoil a call that they make anyway, so every combination of features is asked, at no cost.
"""

from __future__ import annotations

import torch

from mla_plugin.arguments.layout import Layout
from mla_plugin.conformance.budget import Yardstick, fail

Place = tuple[int, ...]
"""Of a query in lse."""


def spoil(q: torch.Tensor, lse: torch.Tensor, layout: Layout, generator: torch.Generator) -> Place | None:
    """Write NaN into one element of a query that sees a key; no version counter says so.

    Args:
        q: the queries; changed in place.
        lse: what the call must give without NaN.
        layout: of q.
        generator: that draws the query and the element.

    Returns:
        its place; None where no other query sees a key, or queries share memory.
    """
    places = lse.isfinite().nonzero()
    is_shared = any(stride == 0 and size > 1 for stride, size in zip(q.stride(), q.shape, strict=True))
    if len(places) < 2 or is_shared or not q.shape[-1]:
        return None
    place: Place = tuple(places[_drawn(len(places), generator)].tolist())
    _rows(q.data, layout)[place][_drawn(q.shape[-1], generator)] = torch.nan
    return place


def repair(
    place: Place,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: tuple[Yardstick, Yardstick],
    layout: Layout,
    drops_nan: bool = False,
) -> None:
    """Check that the query's row of out is NaN, and give it the values without, so that the rest can be checked.

    Args:
        drops_nan: see ``Accepted``; the row may be 0.
    """
    row = _rows(out, layout)[place]
    if not bool(row.isnan().all()) and not (drops_nan and not bool(row.any())):
        or_zeros = " or, with drops_nan, 0" if drops_nan else ""
        fail(f"a query has NaN and its row of out does not show it; expected NaN{or_zeros} in the whole row")
    of_out, of_lse = expected
    row.copy_(_rows(of_out.exact, layout)[place])
    if lse is not None:
        lse[place] = of_lse.exact[place].to(lse.dtype)


def _drawn(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator))


def _rows(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A view with the axes of lse and the last one."""
    bhsd = layout.to_bhsd(x)
    return bhsd[0] if layout.is_packed else bhsd
