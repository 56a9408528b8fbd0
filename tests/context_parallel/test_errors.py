"""Errors in a call are raised on every rank before any message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import mla_plugin
from mla_plugin.context_parallel import transport
from tests.context_parallel import pool as workers

BIAS = {"core_attention_bias": "bias", "core_attention_bias_type": "post_scale_bias"}
THD = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "way": ({"cp_comm_type": "ring"}, ValueError, "cp_comm_type='ring'; expected one of p2p, all_gather, a2a"),
    "no_way": ({"cp_comm_type": None}, ValueError, "cp_comm_type=None; expected one of p2p, all_gather, a2a"),
    "flag": ({"deterministic": 1}, TypeError, "deterministic=1; expected True or False"),
    "longest_no_int": ({"max_seqlen_q": 24.0}, TypeError, "max_seqlen_q=24.0; expected an int or None"),
    "odd": ({"tokens": 5}, ValueError, "5 tokens of q on a rank; sequences are cut into 8 chunks"),
    "batch_invariant": ({"batch_invariant": True}, ValueError, "batch_invariant=True with cp_group"),
    "dropout": ({"dropout_p": 0.1}, ValueError, "dropout_p=0.1; context parallelism takes 0"),
    "bias": (BIAS, ValueError, "post_scale_bias"),
    "arbitrary": ({"attn_mask_type": "arbitrary", "attention_mask": "mask"}, ValueError, "'arbitrary'"),
    "window": (
        {"window_size": (3, 0)},
        ValueError,
        "'p2p' with window_size=(3, 0); cp_comm_type='all_gather' takes it",
    ),
    "both_sides": ({"window_size": (3, 3), "attn_mask_type": "no_mask"}, ValueError, "'a2a' takes it"),
    "both_sides_gathered": (
        {"window_size": (3, 3), "attn_mask_type": "no_mask", "cp_comm_type": "all_gather"},
        ValueError,
        "without a causal mask; cp_comm_type='a2a' takes it",
    ),
    "bottom_right": ({"attn_mask_type": "causal_bottom_right"}, ValueError, "'all_gather' or 'a2a' takes it"),
    "heads": ({"cp_comm_type": "a2a", "kv_heads": 2, "heads": 4}, ValueError, "num_kv_heads=2 over 4 ranks"),
    "lengths": ({"kv_tokens": 8}, ValueError, "6 queries and 8 keys on a rank; cp_comm_type='a2a' takes it"),
    "longest": ({"max_seqlen_q": 7}, ValueError, "max_seqlen_q=7 with 6 tokens on each of 4 ranks; expected 24"),
    "shape": ({"kv_heads": 3}, ValueError, "4 query heads over 3 key-value heads"),
    "packed_multiple": ({**THD, "cu_seqlens_q": [0, 12, 24]}, ValueError, "padded to a multiple of 8"),
    "packed_room": ({**THD, "cu_seqlens_q": [0, 16, 32]}, ValueError, "cu_seqlens_q ends at 32; 24 tokens"),
    "packed_longest": ({**THD, "cu_seqlens_q": [0, 16, 24], "max_seqlen_q": 8}, ValueError, "max_seqlen_q says 8"),
    "packed_falls": ({**THD, "cu_seqlens_q": [0, 16, 8]}, ValueError, "offsets start at 0 and never decrease"),
    "packed_fit": (
        {**THD, "cu_seqlens_q": [0, 9, 12], "cu_seqlens_q_padded": [0, 8, 16]},
        ValueError,
        "lengths [9, 3] do not fit cu_seqlens_q_padded",
    ),
    "packed_gaps": (
        {**THD, "cu_seqlens_q": [0, 9, 12], "cu_seqlens_q_padded": [0, 16, 24], "pad_between_seqs": False},
        ValueError,
        "pad_between_seqs=False with lengths [9, 3] and cu_seqlens_q_padded of [16, 8] tokens",
    ),
    "two_lengths": ({**THD, "cu_seqlens_q": [0, 16, 24], "cu_seqlens_kv": [0, 16, 24]}, ValueError, "pass one as"),
    "row": (
        {"attn_mask_type": "padding", "cu_seqlens_q": [0, 25]},
        ValueError,
        "cu_seqlens_q gives lengths [25]; a row holds 24 tokens on all ranks",
    ),
    "group": ({"cp_group": "cp"}, TypeError, "cp_group is str; expected a torch.distributed ProcessGroup"),
    "mesh": ({"cp_group": "mesh"}, ValueError, "a DeviceMesh of 2 dimensions ('dp', 'cp'); expected one"),
}


def call(name: str) -> None:
    """In a process of the pool: a wrong call of all ranks, with nothing to send by."""
    given, kind, text = ERRORS[name]
    given = dict(given)
    tokens, heads = given.pop("tokens", 6), given.pop("heads", 4)
    kv_tokens, kv_heads = given.pop("kv_tokens", tokens), given.pop("kv_heads", heads)
    shapes = [(1, tokens, heads, 8), (1, kv_tokens, kv_heads, 8), (1, kv_tokens, kv_heads, 4)]
    if given.get("qkv_format") == "thd":
        shapes = [shape[1:] for shape in shapes]
    tensors = {"bias": torch.zeros(1, 1, 6, 6), "mask": torch.zeros(1, 1, 6, 6, dtype=torch.bool)}
    for argument, value in given.items():
        if isinstance(value, list):
            given[argument] = torch.tensor(value, dtype=torch.int32)
        elif isinstance(value, str) and value in tensors:
            given[argument] = tensors[value]
    given.setdefault("cp_group", workers.groups[4])
    if given["cp_group"] == "mesh":
        given["cp_group"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))
    inputs = [torch.zeros(shape) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        for sender in ("batch_isend_irecv", "all_to_all_single", "all_reduce"):
            patch.setattr(dist, sender, None)
        patch.setattr(transport, "_gather_single", None)
        with pytest.raises(kind) as found:
            mla_plugin.attention(*inputs, **given)
    assert text in str(found.value), found.value


@pytest.mark.parametrize("name", ERRORS)
def test_an_error(pool, name):
    pool.run(call, name=name)


def outside() -> None:
    group = workers.groups[2]
    x = torch.zeros(1, 2, 1, 8)
    if dist.get_rank(group) < 0:
        with pytest.raises(ValueError, match="this process is not in cp_group"):
            mla_plugin.attention(x, x, x, cp_group=group)


def test_a_rank_outside_the_group(pool):
    pool.run(outside)
