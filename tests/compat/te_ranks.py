"""One of two ranks: ``MLA_PLUGIN_TE=fill`` over gloo inside one version of TransformerEngine, against one process.

TE_VERSION=2.14.1 python -m tests.compat.te_ranks RANK FILE
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin.context_parallel import pad_lengths, shard
from tests.compat import te_host

SIZE, H, D_QK, D_V = 2, 4, 24, 16


def main(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=SIZE)
    te = te_host.import_transformer_engine(os.environ["TE_VERSION"])
    mla_plugin.register("transformer_engine")
    os.environ |= {"MLA_PLUGIN_TE": "fill", "NVTE_FUSED_ATTN": "0"}
    lengths = torch.tensor([0, 5, 6, 17], dtype=torch.int32)
    starts = pad_lengths(lengths, SIZE)
    packed = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": lengths}
    packed |= {"cu_seqlens_q_padded": starts, "max_seqlen_q": 12, "max_seqlen_kv": 12}
    both = {"cu_seqlens_kv": lengths, "cu_seqlens_kv_padded": starts}
    tokens = int(starts[-1])
    for kv_heads, comm_type, shape, options in (
        (2, "p2p", (2, 12), {"qkv_format": "bshd", "attn_mask_type": "causal"}),
        (4, "a2a", (2, 12), {"qkv_format": "bshd", "attn_mask_type": "no_mask"}),
        (4, "p2p", (tokens,), packed),
    ):
        torch.manual_seed(0)
        heads = ((H, D_QK), (kv_heads, D_QK), (kv_heads, D_V))
        whole = [torch.randn(*shape, *x, dtype=torch.float32).requires_grad_() for x in heads]
        exact = mla_plugin.attention(*whole, **options).flatten(-2)
        cut = {"dim": 0, "cu_seqlens_padded": starts} if len(shape) == 1 else {"dim": 1}
        own = [shard(x.detach(), SIZE, rank, **cut).requires_grad_() for x in whole]
        torch.cuda.is_available, real = (lambda: True), torch.cuda.is_available
        with te_host.CudaIsCpu():
            module = te.DotProductAttention(H, (D_QK, D_V), num_gqa_groups=kv_heads, attention_dropout=0.0)
        torch.cuda.is_available = real
        module.set_context_parallel_group(dist.group.WORLD, [0, 1], None, comm_type)
        found = module(*own, **options, **(both if len(shape) == 1 else {}))
        torch.testing.assert_close(found, shard(exact.detach(), SIZE, rank, **cut))
        dout = torch.randn_like(exact)
        wanted = torch.autograd.grad(exact, whole, dout)
        for x, y in zip(torch.autograd.grad(found, own, shard(dout, SIZE, rank, **cut)), wanted, strict=True):
            torch.testing.assert_close(x, shard(y, SIZE, rank, **cut))
    print("filled", flush=True)
    # gloo's thread may drop a finished message, and with it a Python object, while Python shuts down, which aborts
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
