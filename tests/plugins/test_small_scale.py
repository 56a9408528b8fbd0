"""By what q is multiplied where a backward rounds the scores' gradients times a small scale to float16."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.plugins.shared.small_scale import factor_of_q


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (0.072, 1.0),
        (2.0**-6, 1.0),
        (2.0**-7, 0.5),
        (-(2.0**-9), 0.125),
        (2.0**-14, 2.0**-8),
        (2.0**-30, 2.0**-14),
        (0.0, 1.0),
    ],
)
def test_the_factor(scale: float, factor: float) -> None:
    assert factor_of_q(torch.float16, scale) == factor
    assert factor_of_q(torch.bfloat16, scale) == 1.0
    assert factor_of_q(torch.float32, scale) == 1.0
