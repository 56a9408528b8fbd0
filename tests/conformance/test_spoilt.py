"""What a row of out may be where its query has NaN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.conformance import ConformanceError, spoilt

EXACT: Any = (SimpleNamespace(exact=torch.full((1, 2, 3, 4), 7.0)), SimpleNamespace(exact=torch.ones(1, 3, 2)))


@pytest.mark.parametrize(
    ("row", "drops_nan", "is_right"),
    [
        ([torch.nan] * 4, False, True),
        ([torch.nan] * 4, True, True),
        ([0.0] * 4, True, True),
        ([0.0] * 4, False, False),
        ([0.0, 0.0, torch.nan, 0.0], True, False),
        ([0.0, 0.0, 1.0, 0.0], True, False),
    ],
)
def test_a_row_of_nan_or_of_zeros(row: list[float], drops_nan: bool, is_right: bool) -> None:
    out, lse = torch.full((1, 2, 3, 4), 7.0), torch.ones(1, 3, 2)
    out[0, 1, 2] = torch.tensor(row)
    arguments = ((0, 2, 1), out, lse, EXACT, LAYOUTS["bshd"], drops_nan)
    if is_right:
        spoilt.repair(*arguments)
        assert bool((out == 7).all())
    else:
        with pytest.raises(ConformanceError, match="a query has NaN and its row of out does not show it; expected NaN"):
            spoilt.repair(*arguments)
