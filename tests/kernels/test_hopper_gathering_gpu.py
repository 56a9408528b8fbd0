"""The gathering warpgroup of the Hopper decode kernel on a Hopper GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN
from tests.kernels.gathered_cases import call_of, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
LENGTHS = [2100, 0, 1, 63, 64, 65, 1000] * 12


@pytest.mark.parametrize(
    ("kv_format", "dtype", "page_size"),
    [
        *((FP8, dtype, page_size) for dtype in (torch.bfloat16, torch.float16) for page_size in (1, 16, 48, 64)),
        *((FP8_DS_MLA, torch.bfloat16, page_size) for page_size in (1, 16, 48)),
        *((PLAIN, dtype, page_size) for dtype in (torch.bfloat16, torch.float16) for page_size in (1, 16, 48)),
    ],
)
@pytest.mark.parametrize(("heads", "seqlen_q", "is_causal"), [(128, 1, False), (24, 4, True)])
def test_as_good_as_pytorch(
    kv_format: str, dtype: torch.dtype, page_size: int, heads: int, seqlen_q: int, is_causal: bool
) -> None:
    shape = (len(LENGTHS), seqlen_q, heads, 2100)
    check(*call_of(shape, page_size, kv_format, dtype, LENGTHS, is_causal=is_causal))
