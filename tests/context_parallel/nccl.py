"""What only GPUs can show, over NCCL; run on each host with two or more:

    torchrun --nproc-per-node 2 -m tests.context_parallel.nccl [NAME ...]

Every way against float64 on each backend that takes it, ranks that fail or differ, CUDA graphs with other lengths at
replay, torch.compile with inductor, several groups. It prints one line for each check and ends with an error if one
failed. Without a GPU it runs over gloo, to try the checks themselves; name those that need none.
"""

from __future__ import annotations

import datetime
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin.context_parallel import ContextParallelError, shard
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import NoBackendError
from tests.context_parallel import pool
from tests.context_parallel.case import Case, Whole, offsets, run
from tests.context_parallel.test_failures import Fails

WAYS = ("p2p", "all_gather", "a2a")
WIDE: dict[str, Any] = {"head_dim_qk": 192, "head_dim_v": 128, "heads": 8, "kv_heads": 8, "dtype": torch.bfloat16}
BACKENDS = (None, "triton", "fa3", "fa2", "fa4", "cudnn", "sdpa")


def cases(size: int) -> list[Case]:
    """In bfloat16, several tiles a chunk."""
    chunk, found = 2 * size, []
    lengths = {"lengths_q": (37 * chunk - 3, 1, 0, 100 * chunk), "slots_q": (37 * chunk, chunk, chunk, 100 * chunk)}
    for way in WAYS:
        for layout, mask in itertools.product(("bshd", "sbhd", "bhsd"), ("causal", "no_mask")):
            found.append(Case(way, size, layout, mask, (150 * chunk,) * 2, **WIDE, with_dlse=layout == "bhsd"))
        found.append(Case(way, size, "thd", "padding_causal", **lengths, **WIDE, tail=size))
        found.append(Case(way, size, "thd", "padding", **lengths, **WIDE))
        found.append(Case(way, size, "thd", "padding_causal", (37 * chunk, chunk, 0, 100 * chunk), **WIDE))
        found.append(
            Case(way, size, "bshd", "padding_causal", lengths["lengths_q"], slots_q=(100 * chunk,) * 4, **WIDE)
        )
        grouped = {**WIDE, "heads": 64, "kv_heads": 4}
        found.append(Case(way, size, "bshd", "causal", (64 * chunk,), **grouped, has_strides=True))
    found.append(Case("all_gather", size, "bshd", "causal", (150 * chunk,), **WIDE, window=(77, 0)))
    return found


def accuracy() -> None:
    """Each case on the backend that is chosen and on every other that takes it."""
    size, failed = dist.get_world_size(), []
    for case, backend in itertools.product(cases(size), BACKENDS):
        named = replace(case, backend=backend)
        try:
            found = run(named) or {}
        except AssertionError as error:  # after the last message, so the ranks stay in step
            failed.append(f"{named}: {error}")
        except (NoBackendError, ContextParallelError, ValueError) as error:
            if backend is None:
                raise
            say(f"  {named}: {type(error).__name__}")
        else:
            errors = {name: f"{x:.1e}" for name, x in found.items()}
            say(f"  {named}: {errors}")
    assert not failed, "\n".join(failed)


def draw(way: str, tokens: int = 512) -> tuple[list[torch.Tensor], dict[str, Any]]:
    shapes = [(1, tokens, 8, width) for width in (192, 192, 128)]
    given = [torch.randn(shape, device=pool.device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    return given, {"cp_group": dist.group.WORLD, "cp_comm_type": way}


def failures() -> None:
    """One rank's backend raises: that rank raises at once, the others when they go on; then all is well."""
    guilty = dist.get_world_size() - 1
    for way, hook in itertools.product(WAYS, ("forward", "backward")):
        given, options = draw(way)
        plugin, said = Fails(hook, 0), None
        if dist.get_rank() == guilty:
            get_manager().register(plugin, "fails")
        try:
            out = mla_plugin.attention(*given, **options)
            out.sum().backward()
            mla_plugin.attention(*given, **options)
        except ContextParallelError as error:
            said = str(error)
        if dist.get_rank() == guilty:
            get_manager().unregister("fails")
        assert said, "no error"
        assert f"{hook} failed on rank {guilty}" in said, said
        mla_plugin.attention(*given, **options).sum().backward()


def disagreements() -> None:
    """One rank calls with another scale, as it did before: all raise when they go on; then all is well."""
    for way in WAYS:
        given, options = draw(way)
        for scale in (0.1, 0.2):
            mla_plugin.attention(*given, **options, softmax_scale=scale).sum().backward()
        said, other = None, dist.get_rank() == dist.get_world_size() - 1
        try:
            mla_plugin.attention(*given, **options, softmax_scale=0.2 if other else 0.1)
            mla_plugin.attention(*given, **options, softmax_scale=0.1)
        except ContextParallelError as error:
            said = str(error)
        assert said, "no error"
        assert "different softmax_scale: rank 0 has 0.1" in said, said
        mla_plugin.attention(*given, **options).sum().backward()


def capture(step: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of a step that has run before, and the tensors that it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def graphs() -> None:
    """Forward and backward captured, replayed with other numbers and, packed, with other lengths."""
    size = dist.get_world_size()
    slots = (256 * size, 128 * size)
    for way, is_packed in itertools.product(WAYS, (False, True)):
        given, options = draw(way, sum(slots) // size)
        if is_packed:
            given = [x.detach()[0].requires_grad_() for x in given]
            options |= {"qkv_format": "thd", "attn_mask_type": "padding_causal", "max_seqlen_q": max(slots)}
            options |= {"cu_seqlens_q": offsets((200 * size, 77)).to(pool.device), "max_seqlen_kv": max(slots)}
            options["cu_seqlens_q_padded"] = offsets(slots).to(pool.device)
        dout = torch.randn_like(mla_plugin.attention(*given, **options))

        def step(given: Any = given, options: Any = options, dout: Any = dout) -> list[torch.Tensor]:
            out = mla_plugin.attention(*given, **options)
            return [out, *torch.autograd.grad(out, given, dout)]

        graph, captured = capture(step)
        with torch.no_grad():
            for x in (*given, dout):
                x.normal_()
        if is_packed:
            options["cu_seqlens_q"].copy_(offsets((31, 128 * size - 5)))
        graph.replay()
        for found, exact in zip(captured, step(), strict=True):
            torch.testing.assert_close(found, exact)
        torch.cuda.synchronize()


def compiled() -> None:
    """One graph, through inductor."""
    for way in WAYS:
        given, options = draw(way)

        def layer(q: Any, k: Any, v: Any, options: Any = options) -> Any:
            return mla_plugin.attention(q * 1.5, k, v, **options).float().square().sum()

        torch._dynamo.reset()
        losses = [layer(*given), torch.compile(layer, fullgraph=True)(*given)]
        for one, other in zip(*(torch.autograd.grad(loss, given) for loss in losses), strict=True):
            torch.testing.assert_close(one, other)


def groups() -> None:
    """Calls on two groups of the same ranks in turn, two forwards before their backwards."""
    other = dist.new_group()
    case = Case(size=dist.get_world_size(), lengths_q=(512,), **WIDE)
    whole = Whole(case, 1)
    outs = []
    for group in (dist.group.WORLD, other, dist.group.WORLD):
        given = [
            shard(x, case.size, dist.get_rank()).to(pool.device).requires_grad_() for x in (whole.q, whole.k, whole.v)
        ]
        outs.append((mla_plugin.attention(*given, cp_group=group), given))
    found = [torch.autograd.grad(out.sum(), given) for out, given in reversed(outs)]
    for one in found[1:]:
        assert all(map(torch.equal, one, found[0]))


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


CHECKS: tuple[Callable[[], None], ...] = (accuracy, failures, disagreements, groups, compiled, graphs)


def main(names: list[str]) -> None:
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        pool.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(pool.device)
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=datetime.timedelta(seconds=120))
    pool.groups[dist.get_world_size()] = dist.group.WORLD
    failed = []
    for check in CHECKS:
        if names and check.__name__ not in names:
            continue
        try:
            check()
            say(f"{check.__name__}: passed")
        except Exception:
            print(f"{check.__name__} on rank {dist.get_rank()}: {traceback.format_exc()}", flush=True)
            failed.append(check.__name__)
    if failed:
        raise SystemExit(f"failed: {failed}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
