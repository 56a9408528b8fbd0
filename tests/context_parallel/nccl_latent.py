"""What only GPUs can show of latents and of decode over NCCL; run on a host with two or more:

    torchrun --nproc-per-node 2 -m tests.context_parallel.nccl_latent [NAME ...]

Both ways of latents against float64 on each backend, CUDA graphs of both (captured in both orders, replayed with other
numbers and lengths), decode. It prints one line for each check and ends with an error if one failed.
Without a GPU it runs over gloo, to try the checks themselves; name those that need none.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin import DecodeTensors, reference
from mla_plugin.context_parallel import held_positions
from mla_plugin.hooks.types import NoBackendError
from tests.context_parallel import nccl, pool
from tests.context_parallel.case import offsets
from tests.context_parallel.latent_case import LatentCase, run
from tests.context_parallel.nccl import BACKENDS, capture, say
from tests.latent_calls import LatentCall, draw

WAYS = ("all_gather", "a2a")
WIDE: dict[str, Any] = {"dims": (128, 64, 128, 512), "heads": 8, "at_once": 4, "dtype": torch.bfloat16}


def latents() -> None:
    """Each case on the backend that is chosen and on every other that takes it."""
    size = dist.get_world_size()
    chunk = 2 * size
    packed = {"lengths_q": (37 * chunk - 3, 1, 0, 100 * chunk), "slots_q": (37 * chunk, chunk, chunk, 100 * chunk)}
    cases = []
    for way in WAYS:
        for layout, mask in itertools.product(("bshd", "sbhd", "bhsd"), ("causal", "no_mask")):
            cases.append(LatentCase(way, size, layout, mask, (150 * chunk,) * 2, **WIDE, with_dlse=layout == "bhsd"))
        for mask in ("padding_causal", "padding"):
            cases.append(LatentCase(way, size, "thd", mask, **packed, **WIDE, tail=size))
    cases.append(LatentCase("all_gather", size, window=(77, 0), lengths_q=(150 * chunk,), **WIDE))
    for case, backend in itertools.product(cases, BACKENDS):
        try:
            found = run(case, backend=backend)
        except (NoBackendError, ValueError) as error:
            if backend is None:
                raise
            say(f"  {backend} {case}: {type(error).__name__}")
        else:
            say(f"  {backend} {case}: { ({name: f'{x:.1e}' for name, x in (found or {}).items()}) }")


def graphs() -> None:
    """Forward and backward of both ways in one process, captured in both orders and replayed with other numbers."""
    size = dist.get_world_size()
    slots = (256 * size, 128 * size)
    for ways, layout in itertools.product((WAYS, WAYS[::-1]), ("bshd", "thd")):
        for way in ways:
            call = draw(layout, batch=1, heads=8, lengths=(384, 384), dims=WIDE["dims"], dtype=torch.bfloat16)
            given = LatentCall({n: x.detach().to(pool.device).requires_grad_() for n, x in call.tensors.items()}, {})
            options: dict[str, Any] = {"qkv_format": layout, "cp_group": dist.group.WORLD, "cp_comm_type": way}
            if layout == "thd":
                options |= {"cu_seqlens_q": offsets((200 * size, 77)).to(pool.device), "max_seqlen_q": max(slots)}
                options |= {"cu_seqlens_q_padded": offsets(slots).to(pool.device), "max_seqlen_kv": max(slots)}
            _capture(given, options, layout, size)
            say(f"  {way} {layout}: captured and replayed")


def _capture(given: LatentCall, options: dict[str, Any], layout: str, size: int) -> None:
    given.arguments = {"qkv_format": layout}
    leaves = list(given.tensors.values())
    dout = torch.randn_like(mla_plugin.latent_attention(**given.inputs(), **options))

    def step() -> list[torch.Tensor]:
        out = mla_plugin.latent_attention(**given.inputs(), **options)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    graph, captured = capture(step)
    with torch.no_grad():
        for x in (*leaves, dout):
            x.normal_()
    if layout == "thd":
        options["cu_seqlens_q"].copy_(offsets((31, 128 * size - 5)))
    graph.replay()
    for found, exact in zip(captured, step(), strict=True):
        torch.testing.assert_close(found, exact)
    torch.cuda.synchronize()


def decode() -> None:
    """DeepSeek-V3's latent, one and several queries, against float64 on one process; every rank has the same bits."""
    size, rank = dist.get_world_size(), dist.get_rank()
    lengths = torch.tensor([1000, 3, 517, 0], dtype=torch.int32)
    for queries, interleave in itertools.product((1, 3), (1, 64)):
        torch.manual_seed(1)
        q_nope_abs, q_rope = (torch.randn(4, queries, 16, width).bfloat16() for width in (512, 64))
        cache = torch.randn(4, 1024, 576).bfloat16()
        c_kv, k_rope = (x.double() for x in cache.split((512, 64), -1))
        given = DecodeTensors(q_nope_abs.double(), q_rope.double(), c_kv, k_rope, 192**-0.5, True, seqlens_kv=lengths)
        exact = reference.decode(given).out
        own = cache[:, held_positions(1024, size, rank, interleave=interleave)]
        tensors = [x.to(pool.device) for x in (q_nope_abs, q_rope, own)]
        options = {"cp_group": dist.group.WORLD, "cp_interleave": interleave, "softmax_scale": 192**-0.5}
        out = mla_plugin.decode(*tensors, seqlens_kv=lengths.to(pool.device), **options)
        error = float((out.cpu().double() - exact).norm() / exact.norm())
        say(f"  {queries} queries, interleave {interleave}: {error:.1e}")
        assert error < 1e-2
        others = [torch.empty_like(out) for _ in range(size)]
        dist.all_gather(others, out)
        assert all(torch.equal(other, out) for other in others)


CHECKS: tuple[Callable[[], None], ...] = (latents, decode, graphs)


if __name__ == "__main__":
    nccl.CHECKS = CHECKS
    nccl.main(sys.argv[1:])
