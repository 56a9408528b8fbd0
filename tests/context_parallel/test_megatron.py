"""Megatron-Core's MLA layer over two ranks, with the plugin as its core attention, against the layer in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mla_plugin.context_parallel import pad_lengths, shard
from tests.context_parallel import pool as workers

SIZE = 2
LENGTHS, TOKENS = (5, 8, 0, 3), 24
"""Packed sequences; padded to multiples of 2 SIZE they leave the last four tokens to none of them."""


def in_two(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run it in the two processes of the group alone: importing Megatron takes each of them seconds."""

    @functools.wraps(function)
    def run(**arguments: Any) -> Any:
        return function(**arguments) if dist.get_rank(workers.groups[SIZE]) >= 0 else None

    return run


def groups_of(size: int) -> Any:
    """Megatron's process groups of a layer: no tensor parallelism, context parallelism of 1 or SIZE ranks."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    if "alone" not in workers.groups:
        workers.groups["alone"] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = workers.groups["alone"]
    return ProcessGroupCollection(tp=alone, cp=alone if size == 1 else workers.groups[size])


def core(*, size: int, way: str | None = "p2p", groups: Any = None, **changes: Any) -> Any:
    """A core attention as a layer builds it."""
    from megatron.core.transformer.enums import AttnMaskType

    from mla_plugin.compat.megatron import MLACoreAttention
    from tests.compat.megatron import parts

    return MLACoreAttention(
        config=parts.config(context_parallel_size=size, **changes),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=parts.SCALE,
        v_channels=parts.D_V,
        cp_comm_type=way,
        pg_collection=groups_of(size) if groups is None else groups,
    )


def layer(*, size: int, way: str | None = None) -> Any:
    """An MLA layer with the weights of one seed."""
    from megatron.core.transformer.spec_utils import build_module

    from mla_plugin.compat.megatron import mla_gpt_layer_spec
    from tests.compat.megatron import parts

    spec = mla_gpt_layer_spec().submodules.self_attention
    config = parts.config(context_parallel_size=size, cp_comm_type=way)
    torch.manual_seed(1)
    return build_module(spec, config=config, layer_number=1, cp_comm_type=way, pg_collection=groups_of(size))


def on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """Megatron asks CUDA for its device, and cuts the rotary embedding by an index in pinned memory."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def cut(embedding: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        return shard(embedding, group.size(), group.rank(), dim=dim)

    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", cut)


def packed_batch() -> tuple[Any, torch.Tensor]:
    from tests.compat.megatron import parts

    offsets = parts.cumulative(LENGTHS)
    padded = pad_lengths(offsets, SIZE)
    params, _ = parts.packing(LENGTHS, padded.diff().tolist())
    params.cu_seqlens_kv = params.cu_seqlens_q.clone()  # equal, and another tensor
    params.max_seqlen_q = params.max_seqlen_kv = int(padded.diff().max())
    return params, padded


@in_two
def trains_as_one_process(way: str | None, is_packed: bool) -> None:
    cp_group = workers.groups[SIZE]
    batch, arguments, cut = 2, {}, {}
    if is_packed:
        params, padded = packed_batch()
        batch, arguments, cut = 1, {"packed_seq_params": params}, {"cu_seqlens_padded": padded}
    tokens = int(cut["cu_seqlens_padded"][-1]) if cut else TOKENS
    torch.manual_seed(2)
    x, dout = (torch.randn(tokens, batch, 32, dtype=torch.float64) for _ in range(2))

    def local(whole: torch.Tensor) -> torch.Tensor:
        return shard(whole, SIZE, cp_group.rank(), dim=0, **cut)

    with pytest.MonkeyPatch.context() as patch:
        on_the_cpu(patch)
        whole, ours = layer(size=1), layer(size=SIZE, way=way)
        x_whole, x_ours = x.requires_grad_(), local(x).detach().requires_grad_()
        expected, found = whole(x_whole, None, **arguments)[0], ours(x_ours, None, **arguments)[0]
    torch.testing.assert_close(found, local(expected), rtol=1e-10, atol=1e-11)
    dx, *wanted = torch.autograd.grad(expected, [x_whole, *whole.parameters()], dout)
    dx_ours, *gradients = torch.autograd.grad(found, [x_ours, *ours.parameters()], local(dout))
    torch.testing.assert_close(dx_ours, local(dx), rtol=1e-9, atol=1e-10)
    for gradient, of_whole in zip(gradients, wanted, strict=True):
        dist.all_reduce(gradient, group=cp_group)
        assert of_whole.any()
        torch.testing.assert_close(gradient, of_whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("way", [None, "all_gather", "a2a"])
def test_a_layer_trains_as_in_one_process(pool, way, is_packed):
    pool.run(trains_as_one_process, way=way, is_packed=is_packed)


@in_two
def largest_logits() -> None:
    from tests.compat.megatron import parts

    group = workers.groups[SIZE]
    torch.manual_seed(4)
    whole = parts.tensors(TOKENS)
    module = core(size=SIZE, log_max_attention_logit=True)
    module(*(shard(x.detach(), SIZE, group.rank(), dim=0) for x in whole), None)
    largest = module.current_max_attn_logits
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)  # as clip_qk does
    expected = parts.scores(*whole[:2], parts.causal(TOKENS)).amax((0, 2, 3))
    torch.testing.assert_close(largest, expected, rtol=1e-5, atol=1e-5)


def test_the_largest_logits_of_all_ranks_are_those_of_one_process(pool):
    pool.run(largest_logits)


@in_two
def a_batch_chooses_its_ranks() -> None:
    from tests.compat.megatron import parts

    group = workers.groups[SIZE]
    params, padded = packed_batch()
    torch.manual_seed(3)
    q, k, v = (x.detach() for x in parts.tensors(int(padded[-1]), batch=()))
    expected = core(size=1)(q, k, v, None, packed_seq_params=params)
    params.local_cp_size = 1
    assert torch.equal(core(size=SIZE)(q, k, v, None, packed_seq_params=params), expected)
    params.local_cp_size, params.cp_group = SIZE, group
    ours = [shard(x, SIZE, group.rank(), dim=0, cu_seqlens_padded=padded) for x in (q, k, v)]
    found = core(size=1)(*ours, None, packed_seq_params=params)
    wanted = shard(expected, SIZE, group.rank(), dim=0, cu_seqlens_padded=padded)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def test_a_packed_batch_may_name_its_ranks(pool):
    pool.run(a_batch_chooses_its_ranks)


@in_two
def explained() -> str:
    import mla_plugin

    with pytest.MonkeyPatch.context() as patch:
        on_the_cpu(patch)
        module = layer(size=SIZE, way="all_gather")
    odd = mla_plugin.explain(module, seqlen=TOKENS + 2)
    assert "seqlen=26 over 2 context-parallel ranks; expected a multiple of 4" in odd
    return mla_plugin.explain(module, batch_size=2, seqlen=TOKENS)


def test_explain_says_what_the_sections_run_on(pool):
    for rank, text in enumerate(filter(None, pool.run(explained))):
        assert f"training, context parallel, all_gather, rank {rank} of {SIZE}" in text
        assert text.count("=> forward: sdpa, backward: sdpa") == 2


@in_two
def refusals() -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from tests.compat.megatron import parts

    for change, message in (
        ({"way": "a2a+p2p"}, "cp_comm_type='a2a\\+p2p', expected 'p2p', 'all_gather', 'a2a'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 with context parallelism"),
    ):
        with pytest.raises(ValueError, match=message):
            core(size=SIZE, **change)
    tp = groups_of(1).tp
    for groups, found in (
        (groups_of(1), "of 1 ranks"),
        (ProcessGroupCollection(tp=tp), "missing"),
        (ProcessGroupCollection(tp=tp, cp=None), "missing"),
    ):
        with pytest.raises(ValueError, match=f"context_parallel_size=2 and the context-parallel group is {found}"):
            core(size=SIZE, groups=groups)
    q, k, v = parts.tensors(4)
    hidden = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    for mask in (AttnMaskType.padding, AttnMaskType.arbitrary):
        with pytest.raises(ValueError, match=f"attn_mask_type={mask.name} with context parallelism"):
            core(size=SIZE)(q, k, v, hidden, attn_mask_type=mask)
    with pytest.raises(ValueError, match="cp_comm_type='p2p' with"):
        core(size=SIZE, window_size=(2, 0))(q, k, v, None)
    with pytest.raises(ValueError, match="post_scale_bias"):
        core(size=SIZE)(q, k, v, None, attention_bias=torch.zeros(1, 1, 4, 4, dtype=torch.float64))


def test_what_cannot_be_right_is_refused(pool):
    pool.run(refusals)
