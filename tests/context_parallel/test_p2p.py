"""K and V around a ring, against one process."""

from __future__ import annotations

import pytest
import torch

from tests.context_parallel.case import Case, run

F32 = torch.float32
CASES = [
    *(Case(size=size) for size in (2, 3, 4)),
    *(Case(layout=layout, mask=mask, size=3) for layout in ("sbhd", "bhsd") for mask in ("causal", "no_mask")),
    *(Case(mask="no_mask", lengths_kv=(16, 16), size=size) for size in (2, 4)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_p2p(pool, case):
    pool.run(run, case=case)
