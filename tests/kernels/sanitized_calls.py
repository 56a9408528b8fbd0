"""One call of each way through our kernels, for NVIDIA's compute-sanitizer on a CUDA device:

    compute-sanitizer --tool memcheck python -m tests.kernels.sanitized_calls
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitized_calls

Each call runs twice and has to give the same bits. It is not a test: the sanitizer's summary is the result.
"""

from __future__ import annotations

import torch

import mla_plugin
from mla_plugin.kernels import mla_decode_attention
from mla_plugin.kernels.decode.transposed import rule as transposed_rule
from mla_plugin.kernels.decode.wide import rule as wide_rule
from mla_plugin.kernels.hopper.rule import LATENT

OPTIONS = {"device": "cuda", "dtype": torch.bfloat16}
# B, H, S_kv, page_size, S_q: many splits, splits by descriptors, one split, several queries, fewer keys than a tile
DECODE = (
    (2, 16, 1024, 64, 1),
    (8, 128, 4096, 64, 1),
    (140, 64, 640, 64, 1),
    (4, 64, 8192, 128, 2),
    (3, 128, 100, 16, 1),
)
# H, page_size, S_q, return_lse
OVER_E4M3 = (
    *((16, 64, 1, True), (20, 128, 1, True), (8, 64, 4, True), (16, 48, 1, True)),
    *((20, 128, 1, False), (8, 64, 4, False), (40, 64, 1, False), (128, 128, 1, False), (24, 64, 3, False)),
)


def prefill(is_causal: bool, packed: bool, head_dims: tuple[int, int] = (192, 128)) -> list[torch.Tensor]:
    """Forward and backward of grouped heads; at 576/512 v lies in k."""
    size, (head_dim_qk, head_dim_v) = (200,) if packed else (1, 200), head_dims
    q, k, v = (
        torch.randn(*size, heads, width, requires_grad=True, **OPTIONS)
        for heads, width in ((4, head_dim_qk), (2, head_dim_qk), (2, head_dim_v))
    )
    if head_dims == LATENT:
        v = k[..., :head_dim_v]
    offsets = torch.tensor([0, 63, 63, 200], device="cuda", dtype=torch.int32)
    masks = {
        (False, False): "no_mask",
        (True, False): "causal",
        (False, True): "padding",
        (True, True): "padding_causal",
    }
    arguments = {"attn_mask_type": masks[is_causal, packed], "qkv_format": "bshd", "backend": "triton"}
    if packed:
        lengths = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": 137, "max_seqlen_kv": 137}
        arguments |= {"qkv_format": "thd", **lengths}
    dout = torch.randn(*size, 4, head_dim_v, **OPTIONS)

    def run() -> list[torch.Tensor]:
        out = mla_plugin.attention(q, k, v, **arguments)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return first


def decode(batch: int, heads: int, keys: int, page_size: int, queries: int) -> torch.Tensor:
    """A paged cache in random order, lengths up to 70 keys shorter than the page table."""
    pages = batch * -(-keys // page_size)
    cache = torch.randn(pages, page_size, 576, **OPTIONS).split([512, 64], -1)
    q = torch.randn(batch, queries, heads, 576, **OPTIONS).split([512, 64], -1)
    arguments = {
        "softmax_scale": 192**-0.5,
        "is_causal": queries > 1,
        "page_table": torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1),
        "seqlens_kv": torch.randint(keys - 70, keys + 1, (batch,), device="cuda", dtype=torch.int32),
    }
    first, second = (mla_decode_attention(*q, *cache, **arguments) for _ in range(2))
    assert torch.equal(first, second)
    arguments |= {"causal": arguments.pop("is_causal"), "backend": "triton", "batch_invariant": True}
    invariant, again = (mla_plugin.decode(*q, cache, **arguments) for _ in range(2))
    assert torch.equal(invariant, again)
    return torch.stack([first, invariant])


def over_e4m3(heads: int, page_size: int, queries: int, return_lse: bool) -> torch.Tensor:
    """out; of the last sequence one key."""
    pages = torch.randint(0, 0x70, (24, page_size, 576), device="cuda", dtype=torch.uint8)
    q = torch.randn(3, queries, heads, 576, **OPTIONS).split([512, 64], -1)
    arguments = {
        "softmax_scale": 192**-0.5,
        "causal": queries > 1,
        "page_table": torch.randperm(24, device="cuda", dtype=torch.int32).view(3, 8),
        "seqlens_kv": torch.tensor([8 * page_size, 333, 1], device="cuda", dtype=torch.int32),
        "kv_cache_format": "fp8",
        "kv_scale": torch.tensor(0.01, device="cuda"),
        "backend": "triton",
    }
    first, second = (mla_plugin.decode(*q, pages, **arguments, return_lse=return_lse) for _ in range(2))
    if return_lse:
        (first, _), (second, _) = first, second
    assert torch.equal(first, second)
    return first


def main() -> None:
    """All calls, one after the other."""
    torch.manual_seed(0)
    for is_causal in (False, True):
        for packed in (False, True):
            for head_dims in ((192, 128), LATENT):
                assert all(x.isfinite().all() for x in prefill(is_causal, packed, head_dims))
    for case in DECODE:
        assert decode(*case).isfinite().all()
    for rule in (transposed_rule, wide_rule):
        rule.TILES_OF_A_PART = 0  # so small calls would run by the Hopper kernel
    for case in OVER_E4M3:
        over_e4m3(*case)
    print("all calls are done")


if __name__ == "__main__":
    main()
