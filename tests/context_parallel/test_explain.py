"""``explain`` of calls over a group: exactly what a rank then asks backends for, in a real group or a supposed one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin import DecodeLengths
from mla_plugin.context_parallel.group import Group
from mla_plugin.operations import explain
from mla_plugin.operations.attention import known
from mla_plugin.operations.decode import operator as decode_operator
from mla_plugin.operations.latent import expansion
from tests.context_parallel import pool as workers
from tests.latent_calls import draw

OFFSETS = torch.tensor([0, 12, 18], dtype=torch.int32)


def latents(layout: str, way: str) -> tuple[Any, dict[str, Any]]:
    more = {"cu_seqlens_q": OFFSETS, "max_seqlen_q": 12, "max_seqlen_kv": 12} if layout == "thd" else {}
    call = draw(layout, heads=9, lengths=(6, 6), **more)
    return mla_plugin.latent_attention, call.inputs() | call.arguments | {"cp_comm_type": way}


def keys(layout: str, way: str) -> tuple[Any, dict[str, Any]]:
    shape = (6, 3) if layout == "thd" else (2, 6, 3)
    given: dict[str, Any] = {name: torch.randn(*shape, width) for name, width in (("q", 24), ("k", 24), ("v", 16))}
    if layout == "thd":
        given |= {"cu_seqlens_q": OFFSETS, "max_seqlen_q": 12, "max_seqlen_kv": 12}
    return mla_plugin.attention, given | {"qkv_format": layout, "cp_comm_type": way}


def decoding(layout: str, way: str) -> tuple[Any, dict[str, Any]]:
    queries = 3 if way == "several" else 1
    given: dict[str, Any] = {"q_nope_abs": torch.randn(2, queries, 5, 16), "q_rope": torch.randn(2, queries, 5, 8)}
    given |= {"kv_cache": torch.randn(2, 10, 24), "softmax_scale": 0.1, "cp_interleave": 2}
    given["seqlens_kv"] = torch.tensor([12, 3], dtype=torch.int32)
    if layout == "pages":
        given |= {"kv_cache": torch.randn(7, 4, 24), "page_table": torch.tensor([[0, 2, 1], [6, 5, 3]]).int()}
        given["seqlens_kv"] = DecodeLengths([12, 3], device="cpu")
    return mla_plugin.decode, given


CALLS = {
    "keys": (keys, explain.requests_of_attention),
    "latents": (latents, explain.requests_of_latent_attention),
    "decode": (decoding, explain.requests_of_decode),
}


def recorder(resolve: Any, resolved: list[Any]) -> Any:
    def recording(request: Any, **more: Any) -> Any:
        resolved.append(request)
        return resolve(request, **more)

    return recording


def asked(kind: str, layout: str, way: str, size: int) -> tuple[str, str] | None:
    """In a process of the pool: what is explained is what is resolved; the texts of a real and of a supposed group."""
    group = workers.groups[size]
    if (rank := dist.get_rank(group)) < 0:
        return None
    make, describe = CALLS[kind]
    resolved: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expansion, "MAX_EXPANDED_BYTES", 6 * 6 * 2 * 36 * 8)  # latents in several groups of heads
        for module, name in ((known, "resolve"), (decode_operator, "resolve_decode")):
            patch.setattr(module, name, recorder(getattr(module, name), resolved))
        known._known.clear()
        function, arguments = make(layout, way)
        found = describe(**arguments, cp_group=group)
        texts = [
            mla_plugin.explain(function, **arguments, cp_group=given) for given in (group, Group.supposed(size, rank))
        ]
        function(**arguments, cp_group=group)
        known._known.clear()
    assert set(resolved) == set(found.requests)
    assert len(found.requests) == len(set(found.requests))
    return texts[0], texts[1]


@pytest.mark.parametrize(
    ("kind", "layout", "way"),
    [
        *(("keys", layout, way) for layout in ("bshd", "thd") for way in ("p2p", "all_gather", "a2a")),
        *(("latents", layout, way) for layout in ("bshd", "bhsd", "thd") for way in ("all_gather", "a2a")),
        *(("decode", layout, way) for layout in ("rows", "pages") for way in ("one", "several")),
    ],
)
def test_what_is_explained_is_what_runs(pool, kind, layout, way):
    found = [texts for texts in pool.run(asked, kind=kind, layout=layout, way=way, size=3) if texts]
    name = {"keys": way, "latents": f"latent {way}", "decode": "decode of tokens interleaved 2 at a time"}[kind]
    for rank, (real, supposed) in enumerate(found):
        assert real == supposed
        assert real.startswith(f"context parallel, {name}, rank {rank} of 3: ")
        assert real.splitlines()[-1].endswith(": sdpa")
