"""The mask function of the transformers adapter says the same as transformers' own dense mask; registration."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import mla_plugin
from mla_plugin.compat import transformers as adapter

BEFORE_5 = Version(transformers.__version__) < Version("5")


def arguments(q_length: int, kv_length: int, q_offset: int, tensor_offset: bool = False, **more) -> dict:
    """What the installed version of transformers passes to a mask function."""
    common = {"batch_size": 2, "kv_length": kv_length, "dtype": torch.float32, "config": SimpleNamespace(), **more}
    if BEFORE_5:
        return {**common, "cache_position": torch.arange(q_offset, q_offset + q_length)}
    offset = torch.tensor(q_offset) if tensor_offset else q_offset
    return {**common, "q_length": q_length, "q_offset": offset, "use_vmap": False, "device": torch.device("cpu")}


def dense(given: dict) -> torch.Tensor:
    return sdpa_mask(**{**given, "allow_is_causal_skip": False})


def meaning(mask: torch.Tensor | None, q_length: int, kv_length: int) -> torch.Tensor:
    """What ``attention_forward`` makes of a mask: bool [2, 1, q_length, kv_length], True = attend."""
    if mask is not None and mask.ndim == 4:
        return mask
    num_keys = kv_length if mask is None else mask.shape[1]
    tokens = torch.ones(2, num_keys, dtype=torch.bool) if mask is None else mask
    causal = torch.ones(q_length, num_keys, dtype=torch.bool).tril(num_keys - q_length)
    return torch.nn.functional.pad(causal & tokens[:, None, None, :], (0, kv_length - num_keys))


def rows_of_tokens(attention_mask: torch.Tensor | None, q_length: int, q_offset: int) -> torch.Tensor:
    """Which queries are tokens, [2, q_length]; the others are padding whose results are not read."""
    if attention_mask is None:
        return torch.ones(2, q_length, dtype=torch.bool)
    padded = torch.nn.functional.pad(attention_mask, (0, max(0, q_offset + q_length - attention_mask.shape[1])))
    return padded[:, q_offset : q_offset + q_length]


def random_case(seed: int) -> tuple[dict, int, int, int]:
    """Any cache: growing, static with unused slots, or starting at a later position."""
    rng = random.Random(seed)
    q_length, past, unused = rng.randint(1, 6), rng.choice([0, 0, 3, 8]), rng.choice([0, 0, 4])
    kv_offset = rng.choice([0, 0, 2])
    q_offset, kv_length = kv_offset + past, past + q_length + unused
    attention_mask = None
    if rng.random() < 0.8:
        length = kv_offset + past + q_length + rng.choice([0, unused])
        share = rng.choice([0.5, 1.0])
        attention_mask = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) < share
    given = arguments(
        q_length, kv_length, q_offset, rng.random() < 0.5, kv_offset=kv_offset, attention_mask=attention_mask
    )
    return given, q_length, kv_length, q_offset


@pytest.mark.parametrize("seed", range(150))
def test_a_compact_mask_means_what_the_dense_mask_says(seed):
    given, q_length, kv_length, q_offset = random_case(seed)
    mask = adapter.attention_mask_for(mask_function=causal_mask_function, **given)
    assert mask is None or mask.ndim == 2
    rows = rows_of_tokens(given["attention_mask"], q_length, q_offset)
    found, expected = meaning(mask, q_length, kv_length), dense({**given, "mask_function": causal_mask_function})
    assert torch.equal(found[:, 0][rows], expected.expand(2, 1, q_length, kv_length)[:, 0][rows])


def test_random_cases_reach_every_form():
    forms = set()
    for seed in range(150):
        given, q_length, kv_length, _ = random_case(seed)
        mask = adapter.attention_mask_for(**given)
        forms.add(
            None if mask is None else ("short" if mask.shape[1] < kv_length else "whole", q_length < mask.shape[1])
        )
    assert forms == {None, ("short", False), ("short", True), ("whole", False), ("whole", True)}


@pytest.mark.parametrize(("q_offset", "kv_offset"), [(0, 2), (6, 0)])
def test_queries_that_are_not_among_the_keys_get_a_dense_mask(q_offset, kv_offset):
    given = arguments(3, 5, q_offset, kv_offset=kv_offset, attention_mask=None)
    assert torch.equal(adapter.attention_mask_for(**given), dense(given))


@pytest.mark.parametrize("window", [3, 4, 5, 6])
@pytest.mark.parametrize("padded", [False, True])
def test_a_window_wider_than_the_keys_is_plain_causal(window, padded):
    attention_mask = torch.tensor([[False, True, True, True, True], [True] * 5]) if padded else None
    given = arguments(5, 5, 0, attention_mask=attention_mask, local_size=window)
    function = sliding_window_causal_mask_function(window)
    mask = adapter.attention_mask_for(mask_function=function, **given)
    assert (None if mask is None else mask.ndim) == ((2 if padded else None) if window >= 5 else 4)
    rows = rows_of_tokens(attention_mask, 5, 0)
    expected = dense({**given, "mask_function": function}).expand(2, 1, 5, 5)
    assert torch.equal(meaning(mask, 5, 5)[:, 0][rows], expected[:, 0][rows])


def test_a_model_that_reads_its_mask_gets_a_dense_one():
    given = arguments(5, 5, 0, attention_mask=None, allow_is_causal_skip=False)
    assert torch.equal(adapter.attention_mask_for(**given), dense(given))


@pytest.mark.parametrize("is_given", [True, False])
def test_a_traced_model_gets_a_compact_one_and_no_value_is_read(is_given, monkeypatch):
    tokens = torch.ones(2, 5, dtype=torch.bool, device="cpu" if BEFORE_5 else "meta") if is_given else None
    given = arguments(3, 5, 2, attention_mask=tokens)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    mask = adapter.attention_mask_for(**given)
    if BEFORE_5:
        assert torch.equal(mask, dense(given))  # the sizes are values of a tensor there
    else:
        assert (mask.device.type, mask.shape) == ("meta", (2, 5)) if is_given else mask is None


@pytest.mark.parametrize(
    "given",
    [
        arguments(2, 6, 2, attention_mask=torch.ones(2, 6, dtype=torch.bool)),
        arguments(2, 4, 2, tensor_offset=True, attention_mask=None),
        arguments(4, 4, 0, attention_mask=torch.ones(2, 3, dtype=torch.bool)),
        arguments(4, 4, 0, attention_mask=None, allow_is_causal_skip=False),
    ],
    ids=["unused slots", "static cache", "short mask", "the model reads it"],
)
def test_other_traced_models_get_a_dense_one(given, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(adapter.attention_mask_for(**given), dense(given))


def test_a_sparse_model_gets_an_additive_one():
    given = arguments(5, 5, 0, attention_mask=None, config=SimpleNamespace(index_topk=4))
    expected = torch.zeros(2, 1, 5, 5).masked_fill(~dense(given), torch.finfo(torch.float32).min)
    assert torch.equal(adapter.attention_mask_for(**given), expected)


def test_unknown_patterns_stay_dense():
    function = and_masks(causal_mask_function, lambda batch, head, query, key: key != 1)
    given = arguments(5, 5, 0, attention_mask=None, allow_is_causal_skip=False)
    mask = adapter.attention_mask_for(mask_function=function, **given)
    assert torch.equal(mask, dense({**given, "mask_function": function}))
    assert not hasattr(mask, "packing")


def packed_pattern(position_ids: torch.Tensor):
    """The pattern that the installed version composes for packed position_ids."""
    ids = (position_ids.diff(prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(causal_mask_function, position_ids, ids)
    return and_masks(causal_mask_function, packed_sequence_mask_function(ids))


def test_packed_sequences_carry_their_lengths():
    position_ids = torch.tensor([[0, 1, 0, 1, 2], [0, 0, 1, 2, 0]])
    given = arguments(5, 5, 0, attention_mask=None, allow_is_causal_skip=False)
    function = packed_pattern(position_ids)
    mask = adapter.attention_mask_for(mask_function=function, **given)
    assert torch.equal(mask, dense({**given, "mask_function": function}))
    assert mask.packing["cu_seqlens_q"].tolist() == [0, 2, 5, 6, 9, 10]
    assert mask.packing["cu_seqlens_q"].dtype == torch.int32
    assert mask.packing["cu_seqlens_kv"] is mask.packing["cu_seqlens_q"]
    assert (mask.packing["max_seqlen_q"], mask.packing["max_seqlen_kv"]) == (3, 3)


def test_one_sequence_in_each_row_is_plain_causal():
    given = arguments(5, 5, 0, attention_mask=None, allow_is_causal_skip=False)
    function = packed_pattern(torch.arange(5).expand(2, 5))
    assert adapter.attention_mask_for(mask_function=function, **given) is None


def not_the_first_key(batch, head, query, key):
    return key != 1


@pytest.mark.parametrize(
    "compose",
    [
        lambda ids: and_masks(packed_sequence_mask_function(ids)),
        lambda ids: and_masks(packed_sequence_mask_function(ids), causal_mask_function, not_the_first_key),
        lambda ids: and_masks(and_masks(packed_sequence_mask_function(ids), causal_mask_function), not_the_first_key),
        lambda ids: and_masks(packed_sequence_mask_function(ids), sliding_window_causal_mask_function(2)),
    ],
    ids=["bidirectional", "one more condition", "one more condition outside", "sliding window"],
)
def test_packed_sequences_with_another_pattern_stay_dense(compose):
    function = compose(torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]]))
    given = arguments(5, 5, 0, attention_mask=None, allow_is_causal_skip=False)
    mask = adapter.attention_mask_for(mask_function=function, **given)
    assert torch.equal(mask, dense({**given, "mask_function": function}))
    assert not hasattr(mask, "packing")


def test_registered_under_one_name():
    for _ in range(2):
        mla_plugin.register("transformers")
    assert AttentionInterface._global_mapping["mla_plugin"] is adapter.attention_forward
    assert AttentionMaskInterface._global_mapping["mla_plugin"] is adapter.attention_mask_for


def test_an_old_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(adapter.transformers, "__version__", "4.56.2")
    with pytest.raises(ImportError, match=r"4\.56\.2 is installed, mla_plugin needs >= 4\.57: pip install --upgrade"):
        adapter.register()
