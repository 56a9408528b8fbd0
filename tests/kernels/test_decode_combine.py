"""``combine_kernel`` by itself, over pieces whose columns lie in their order or mixed."""

from __future__ import annotations

import pytest
import torch

from mla_plugin.kernels.decode.combine import combine_kernel
from tests.kernels.decode_cases import DEVICE, mixed

PARTS, HEADS, SEQLEN_Q, RANK = 7, 2, 3, 128
ROWS = HEADS * SEQLEN_Q
COUNTS = {0: 3, 3: 1, 4: 2}
"""Pieces of the sequences, by the part in which each begins."""


@pytest.mark.parametrize("block", [(1, 32, 1), (2, 128, 2), (8, 64, 4)])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("batch", [3, 9])
def test_pieces_are_combined(batch: int, is_mixed: bool, block: tuple[int, int, int]) -> None:
    """Of fewer and of more sequences than parts; one with a single piece was written directly and stays as it is."""
    generator = torch.Generator().manual_seed(2)
    parts = torch.randn(2 * PARTS, ROWS, RANK, generator=generator).half()
    lse_log2 = 8 * torch.randn(2 * PARTS, ROWS, generator=generator)
    lse_log2[:, 1] = -torch.inf  # a row that sees nothing
    parts[:, 1] = 0
    if batch <= PARTS:
        listed = [[first, count] for first, count in COUNTS.items()]
    else:
        listed = [[list(COUNTS).index(part), COUNTS[part]] if part in COUNTS else [0, 0] for part in range(PARTS)]
    words = [lse_log2.flatten(), torch.tensor(listed, dtype=torch.int32).flatten().view(torch.float32)]
    stored = mixed(parts) if is_mixed else parts
    workspace = torch.cat([stored.flatten(), *(x.view(torch.float16) for x in words)]).to(DEVICE)
    out = torch.full((batch, SEQLEN_Q, HEADS, RANK), torch.nan, dtype=torch.float16, device=DEVICE)
    lse = torch.full((batch, HEADS, SEQLEN_Q), torch.nan, device=DEVICE)
    rows, columns, pieces = block
    combine_kernel[(len(listed) * -(-ROWS // rows), RANK // columns)](
        workspace,
        out,
        lse,
        batch=batch,
        num_heads=HEADS,
        seqlen_q=SEQLEN_Q,
        num_parts=PARTS,
        R=RANK,
        BLOCK_ROWS=rows,
        BLOCK_R=columns,
        BLOCK_PIECES=pieces,
        MIXED=is_mixed,
        DEPENDENT=False,
    )
    for b, (first, count) in enumerate(COUNTS.items()):
        if count == 1:
            assert out[b].isnan().all()
            continue
        slots = [*range(first, first + count - 1), PARTS + first]
        of_row = lse_log2[slots].double() * torch.log(torch.tensor(2.0, dtype=torch.float64))
        wanted_lse = of_row.logsumexp(0)
        weights = (of_row - wanted_lse).exp().nan_to_num(0)
        wanted = (weights[:, :, None] * parts[slots].double()).sum(0)
        found = out[b].cpu().double().view(ROWS, RANK)  # rows: query by query, all heads of each
        assert torch.allclose(found, wanted, rtol=2**-10, atol=1e-4)
        found_lse = lse[b].cpu().double().T.flatten()
        assert torch.allclose(found_lse, wanted_lse, rtol=1e-6)
    assert out[len(COUNTS) :].isnan().all()
