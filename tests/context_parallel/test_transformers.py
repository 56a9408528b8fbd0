"""A DeepSeek-V3 of transformers over two ranks: loss, logits and every gradient of one process, and what is refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mla_plugin.context_parallel import shard
from tests.context_parallel import pool as workers

SIZE, TOKENS, VOCABULARY = 2, 24, 61
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@functools.cache
def tiny() -> Any:
    """In float64, with the same weights in each process."""
    import transformers

    import mla_plugin.compat.transformers  # noqa: F401 - registers the implementation

    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**CONFIG)).double()
    model.set_attn_implementation("mla_plugin")
    model.set_experts_implementation("eager")  # the grouped product has no float64
    return model


def whole_batch() -> dict[str, torch.Tensor]:
    """Labels are missing here and there, and not as often on both ranks."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :7] = labels[1, 20:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def trains_as_one_process(way: str, use_cache: bool, is_recomputed: bool) -> None:
    group = workers.groups[SIZE]
    if dist.get_rank(group) < 0:
        return
    from mla_plugin.compat.transformers import context_parallel, shard_batch

    model, ours = tiny(), copy.deepcopy(tiny()).train()
    expected = model(**whole_batch())
    wanted = torch.autograd.grad(expected.loss, list(model.parameters()))
    if is_recomputed:
        ours.gradient_checkpointing_enable()
    with context_parallel(group, cp_comm_type=way):
        found = ours(**shard_batch(whole_batch(), group), use_cache=use_cache)
        found.loss.backward()
    torch.testing.assert_close(found.logits, shard(expected.logits, SIZE, group.rank()), rtol=1e-9, atol=1e-10)
    gradients = [parameter.grad for parameter in ours.parameters()]
    loss = found.loss.detach()
    for x in (loss, *gradients):
        dist.all_reduce(x, group=group)
    torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-6, atol=0)  # transformers' loss is float32
    for (name, _), gradient, of_whole in zip(model.named_parameters(), gradients, wanted, strict=True):
        error = (gradient - of_whole).norm() / of_whole.norm()
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize(
    ("way", "use_cache", "is_recomputed"),
    [
        ("p2p", False, False),
        ("p2p", True, False),
        ("p2p", False, True),
        ("all_gather", False, True),
        ("a2a", True, False),
    ],
)
def test_a_model_trains_as_in_one_process(pool, way, use_cache, is_recomputed):
    pool.run(trains_as_one_process, way=way, use_cache=use_cache, is_recomputed=is_recomputed)


def evaluates_after_decoding() -> None:
    """The layers pass latents on by then."""
    group = workers.groups[SIZE]
    if dist.get_rank(group) < 0:
        return
    from mla_plugin.compat.transformers import context_parallel, shard_batch

    model, ids = copy.deepcopy(tiny()).eval(), whole_batch()["input_ids"]
    with torch.no_grad():
        model(ids)
        expected = model(ids).logits
        with context_parallel(group):
            found = model(**shard_batch({"input_ids": ids}, group)).logits
        again = model(ids).logits
    torch.testing.assert_close(found, shard(expected, SIZE, group.rank()), rtol=1e-9, atol=1e-10)
    assert torch.equal(again, expected)


def test_a_model_that_decodes_over_latents(pool):
    pool.run(evaluates_after_decoding)


def sinks() -> None:
    group = workers.groups[SIZE]
    if dist.get_rank(group) < 0:
        return
    from mla_plugin.compat.transformers import attention_forward, context_parallel, shard_batch

    generator = torch.Generator().manual_seed(3)
    q, k, v, s_aux = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 4, 8, 24), (2, 4, 8, 24), (2, 4, 8, 16), (4,))
    )
    module = torch.nn.Module()
    expected, _ = attention_forward(module, q, k, v, None, s_aux=s_aux)
    ours = [shard(x, SIZE, group.rank(), dim=2) for x in (q, k, v)]
    with context_parallel(group):
        positions = shard_batch({"input_ids": torch.zeros(2, 8, dtype=torch.long)}, group)["position_ids"]
        found, _ = attention_forward(module, *ours, None, s_aux=s_aux, position_ids=positions)
    torch.testing.assert_close(found, shard(expected, SIZE, group.rank()), rtol=1e-10, atol=1e-11)


def test_attention_sinks(pool):
    pool.run(sinks)


def one_rank() -> None:
    group = workers.groups[1]
    if dist.get_rank(group) < 0:
        return
    import mla_plugin.compat.transformers as adapter

    ids = whole_batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = tiny()(ids, attention_mask=mask).logits
    with adapter.context_parallel(group):
        assert torch.equal(tiny()(ids, attention_mask=mask).logits, expected)


def test_a_group_of_one_rank_changes_nothing(pool):
    pool.run(one_rank)


def refused_forwards() -> None:
    group = workers.groups[SIZE]
    if dist.get_rank(group) < 0:
        return
    from mla_plugin.compat.transformers import context_parallel, shard_batch

    model = copy.deepcopy(tiny()).eval()
    cut = shard_batch({"input_ids": whole_batch()["input_ids"]}, group)
    ids, positions = cut["input_ids"], cut["position_ids"]
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    square = torch.ones(2, 1, TOKENS // 2, TOKENS // 2, dtype=torch.bool)
    with context_parallel(group):
        for given, message in (
            ({}, "position_ids of rank . of 2 with 12 tokens must be"),
            ({"position_ids": torch.zeros_like(positions)}, "position_ids of rank"),
            ({"position_ids": positions, "attention_mask": padded}, "attention_mask holds padding"),
            ({"position_ids": positions, "attention_mask": square}, "a layer got attention_mask"),
        ):
            for use_cache in (False, True):
                with pytest.raises(ValueError, match=message):
                    model(ids, **given, use_cache=use_cache)
        with torch.no_grad():
            cache = model(ids, position_ids=positions, use_cache=True).past_key_values
            with pytest.raises(ValueError, match="1 queries and 13 keys on this rank"):
                model(ids[:, :1], position_ids=positions[:, :1], past_key_values=cache)
        model.config.layer_types = ["linear_attention", "full_attention"]
        with pytest.raises(ValueError, match="layers of \\['linear_attention'\\]"):
            model(ids, position_ids=positions, use_cache=False)
    model.train().gradient_checkpointing_enable()
    model.config.layer_types = None
    with context_parallel(group):
        out = model(ids, position_ids=positions).logits
    with pytest.raises(RuntimeError, match="call backward\\(\\) inside"):
        out.sum().backward()
    model(ids).logits.sum().backward()  # as before, outside


def test_what_a_forward_refuses(pool):
    pool.run(refused_forwards)


def refused_masks() -> None:
    group = workers.groups[SIZE]
    if dist.get_rank(group) < 0:
        return
    from types import SimpleNamespace

    from transformers.masking_utils import sliding_window_causal_mask_function

    from mla_plugin.compat.transformers import attention_mask_for, context_parallel

    sizes = {"batch_size": 1, "q_length": 8, "kv_length": 8, "q_offset": 0}
    with context_parallel(group):
        window = {"mask_function": sliding_window_causal_mask_function(15), **sizes}
        with pytest.raises(ValueError, match="more than causal"):
            attention_mask_for(**window, local_size=15)
        assert attention_mask_for(**window, local_size=16) is None
        with pytest.raises(ValueError, match="sparse"):
            attention_mask_for(**sizes, config=SimpleNamespace(index_topk=4))
    with pytest.raises(ValueError, match="cp_comm_type='ring'"), context_parallel(group, cp_comm_type="ring"):
        pass
    with pytest.raises(TypeError, match="cp_group is str"), context_parallel("cp"):
        pass


def test_what_masks_are_refused(pool):
    pool.run(refused_masks)


def refused_batches() -> None:
    group = workers.groups[SIZE]
    if dist.get_rank(group) < 0:
        return
    from mla_plugin.compat.transformers import shard_batch

    ids = whole_batch()["input_ids"]
    padded = torch.ones_like(ids)
    padded[1, 20:] = 0
    for change, message in (
        ({"attention_mask": padded}, "holds padding"),
        ({"position_ids": torch.arange(TOKENS).expand(2, -1) % 12}, "count from 0"),
        ({"token_type_ids": ids}, "shard_batch got \\['input_ids', 'token_type_ids'\\]; expected"),
        ({"inputs_embeds": torch.zeros(2, TOKENS, 32)}, "with one of input_ids and inputs_embeds"),
        ({"input_ids": ids[:, :22]}, "has 22 tokens; context parallelism over 2 ranks needs a multiple of 4"),
        ({"labels": ids[:, :20]}, "labels are \\[2, 20\\]; expected \\[2, 24\\]"),
    ):
        with pytest.raises(ValueError, match=message):
            shard_batch({"input_ids": ids, **change}, group)


def test_what_batches_are_refused(pool):
    pool.run(refused_batches)
