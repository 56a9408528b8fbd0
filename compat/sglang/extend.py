"""Prefill steps: requests with different numbers of new tokens, after a prefix that may be in the cache."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch

from mla_plugin import DecodeLengths

QUERIES = 16
"""New tokens of a block with weight absorption: as many as share the tiles of the cache that they read."""


class Blocks(NamedTuple):
    """New tokens split into V blocks of c tokens, each treated as a separate request by decode.

    A request's blocks end with its last token, so only its first block may include tokens before the request's new
    ones; the results for those are dropped.

    Attributes:
        rows: int64 [V, c], index among the T tokens of each query of a block.
        lengths: [V], the keys up to a block's last token; one object for all layers, as in ``Steps``.
        owners: int64 [V], the request of each block.
        places: int64 [T], index among the V * c queries of each token's output.
    """

    rows: torch.Tensor
    lengths: DecodeLengths
    owners: torch.Tensor
    places: torch.Tensor


class Extend:
    """Lengths of a prefill's requests, on the host and on the device.

    Attributes:
        tokens, all_tokens: new tokens of all requests, and with their prefixes. SGLang may give more rows: padding.
        max_new, max_all: of the longest request.
        cu_new: int32 [B + 1], starts of the requests among the new tokens.
        cu_all: int32 [B + 1], starts of the requests where each has prefix and new tokens side by side.
        page_table: int32 [V, n], the pages of each block's request, once a layer was absorbed.
    """

    def __init__(self, forward_batch: Any) -> None:
        on_host = forward_batch.extend_seq_lens_cpu
        self._counts = [int(count) for count in on_host]
        self.tokens, self.max_new = sum(self._counts), max(self._counts)
        lengths = forward_batch.seq_lens_cpu.tolist()
        self.all_tokens, self.max_all = sum(lengths), max(lengths)
        self._new, self._prefix = forward_batch.extend_seq_lens, forward_batch.extend_prefix_lens
        self.cu_new = starts(self._new)
        self.cu_all = starts(forward_batch.seq_lens)
        self.page_table: torch.Tensor | None = None

    @cached_property
    def blocks(self) -> Blocks:
        """Computed once for all layers, without a synchronisation."""
        return cut(self._new, self._prefix, self._counts, min(QUERIES, self.max_new))


def starts(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [B + 1] of lengths [B]: 0, and the sum up to each request."""
    summed = lengths.new_zeros(lengths.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=summed[1:])
    return summed


def cut(new: torch.Tensor, prefix: torch.Tensor, counts: list[int], width: int) -> Blocks:
    """Split the new tokens into blocks of ``width``.

    Args:
        new: [B], new tokens of each request; ``counts`` has the same numbers on the host.
        prefix: [B], keys before them.
        counts: as ``new``.
        width: tokens of a block, at least 1.
    """
    new, prefix = new.long(), prefix.long()
    device, tokens = new.device, sum(counts)
    blocks = (new + width - 1) // width
    requests = torch.arange(new.shape[0], device=device)
    owners = torch.repeat_interleave(requests, blocks, output_size=sum(-(-count // width) for count in counts))
    last_block, last_token = blocks.cumsum(0) - 1, new.cumsum(0) - 1
    behind = (last_block[owners] - torch.arange(owners.shape[0], device=device)) * width
    rows = (last_token[owners] - behind)[:, None] - torch.arange(width - 1, -1, -1, device=device)
    of = torch.repeat_interleave(requests, new, output_size=tokens)
    behind_token = last_token[of] - torch.arange(tokens, device=device)
    places = (last_block[of] + 1) * width - 1 - behind_token
    lengths = DecodeLengths(seqlens_kv=((new + prefix)[owners] - behind).int())
    return Blocks(rows.clamp_min(0), lengths, owners, places)
