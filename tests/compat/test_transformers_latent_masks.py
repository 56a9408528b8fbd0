"""The mask of a forward that decodes over latents: what it says, and what making it reads from the device."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from mla_plugin.compat import transformers as adapter
from mla_plugin.compat.transformers.latent import is_decode
from tests.compat.test_transformers_masks import dense, random_case, rows_of_tokens

DIMS = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 12}
CONFIG = SimpleNamespace(**DIMS)


def arguments(q_length: int, kv_length: int, q_offset: int | torch.Tensor, device: str = "cpu", **more) -> dict:
    return {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "config": CONFIG,
        "dtype": torch.float32,
        "use_vmap": False,
        "device": torch.device(device),
        "attention_mask": None,
        **more,
    }


def meaning(mask: torch.Tensor | None, q_length: int, kv_length: int) -> torch.Tensor:
    """bool [2, q_length, kv_length], True = attend, of every form that a decode may get."""
    if mask is not None and mask.ndim == 4 and mask.dtype == torch.bool:
        return mask[:, 0]
    if mask is not None and mask.ndim == 2:
        num_keys = mask.shape[1]
        causal = torch.ones(q_length, num_keys, dtype=torch.bool).tril(num_keys - q_length)
        return torch.nn.functional.pad(causal & mask[:, None], (0, kv_length - num_keys))
    first, end = torch.zeros(2, dtype=torch.int32), torch.full((2,), kv_length, dtype=torch.int32)
    if mask is not None:
        assert mask.dtype == torch.int32
        assert mask.shape in ((1, 1, 1, 2), (1, 1, 2, 2))
        assert mask.stride(2) % 4 == 0  # rows begin at multiples of 16 bytes
        end, *padding = mask[0, 0]
        first = padding[0] if padding else first
    key = torch.arange(kv_length)
    last = (end[:, None] - q_length + torch.arange(q_length))[..., None]  # [2, q_length, 1]
    return (key >= first[:, None, None]) & (key <= last)


def padded_on_the_left(seed: int) -> tuple[dict, int, int, int]:
    """A random case whose tokens are the last ones of their rows."""
    given, q_length, kv_length, q_offset = random_case(seed)
    rng = random.Random(seed)
    end = q_offset + q_length
    if given["attention_mask"] is not None:
        first = torch.tensor([[rng.choice([0, 0, rng.randint(0, end)])] for _ in range(2)])
        given["attention_mask"] = torch.arange(given["attention_mask"].shape[1]) >= first
    return given, q_length, kv_length, q_offset


@pytest.mark.parametrize("make", [random_case, padded_on_the_left])
def test_it_says_what_the_dense_mask_says(make):
    forms = set()
    for seed in range(200):
        given, q_length, kv_length, q_offset = make(seed)
        given["config"] = CONFIG
        mask = adapter.attention_mask_for(**given)
        rows = rows_of_tokens(given["attention_mask"], q_length, q_offset)
        expected = dense(given).expand(2, 1, q_length, kv_length)[:, 0]
        assert torch.equal(meaning(mask, q_length, kv_length)[rows], expected[rows])
        if is_decode(q_length, kv_length, *DIMS.values()):
            forms.add(None if mask is None else (mask.dtype, mask.shape[-2] if mask.ndim == 4 else 0))
    assert {None, (torch.int32, 1)} < forms
    assert ((torch.bool, 0) if make is random_case else (torch.int32, 2)) in forms
    assert ((torch.bool, 0) in forms) == (make is random_case)


def test_ranges_by_hand():
    tokens = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])
    growing = adapter.attention_mask_for(**arguments(1, 7, 6, attention_mask=tokens))
    assert growing.tolist() == [[[[7, 7], [2, 0]]]]
    static = adapter.attention_mask_for(**arguments(1, 9, torch.tensor(6), attention_mask=tokens))
    assert static.tolist() == growing.tolist()
    static = adapter.attention_mask_for(**arguments(1, 9, torch.tensor(6), attention_mask=tokens[1:].expand(2, 7)))
    assert static.tolist() == [[[[7, 7]]]]
    assert adapter.attention_mask_for(**arguments(1, 7, 6, attention_mask=tokens[1:].expand(2, 7))) is None
    assert adapter.attention_mask_for(**arguments(1, 7, 6)) is None


def test_a_prompt_gets_the_forms_of_every_model():
    tokens = torch.tensor([[False, False, True], [True] * 3])
    assert torch.equal(adapter.attention_mask_for(**arguments(3, 3, 0, attention_mask=tokens)), tokens)


@pytest.mark.parametrize("kv_length", [7, 9])
def test_without_an_attention_mask_nothing_is_read(kv_length):
    """A tensor on the meta device has no values: to read one raises."""
    position = torch.tensor(6, device="meta")
    mask = adapter.attention_mask_for(**arguments(1, kv_length, position, device="meta"))
    assert (mask.shape, mask.dtype, mask.device.type) == ((1, 1, 1, 2), torch.int32, "meta")


@pytest.mark.parametrize("end", [2, torch.tensor(2)], ids=["growing", "static"])
@pytest.mark.parametrize(("padding", "expected"), [(0, ["__bool__"]), (1, ["__bool__", "tolist"])])
def test_an_attention_mask_is_read_once_and_for_padding_again(monkeypatch, padding, expected, end):
    reads = []
    for name in ("__bool__", "__int__", "item", "tolist", "cpu", "__index__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda x, *a, name=name, method=method: reads.append(name) or method(x, *a)
        )
    mask = torch.tensor([[not padding, True, True], [True, True, True]])
    adapter.attention_mask_for(**arguments(1, 5, end, attention_mask=mask))
    assert reads == expected


@pytest.mark.parametrize("end", [6, torch.tensor(6)], ids=["int", "tensor"])
@pytest.mark.parametrize("length", [5, 7, 9])
def test_a_mask_of_ones_that_ends_before_the_query_or_after_it(length, end):
    """Of seven keys: a shorter mask hides the rest of them."""
    ones = torch.ones(2, length, dtype=torch.bool)
    found = adapter.attention_mask_for(**arguments(1, 9, end, attention_mask=ones))
    if length >= 7:
        assert found.tolist() == [[[[7, 7]]]]
    else:
        assert found.ndim != 4 or found.dtype != torch.int32


def test_a_traced_model_reads_nothing(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    tokens = torch.tensor([[False, True, True, True, True], [True] * 5])
    given = arguments(1, 5, 4, attention_mask=tokens)
    assert torch.equal(adapter.attention_mask_for(**given), tokens)
    assert adapter.attention_mask_for(**arguments(1, 5, 4)) is None
    ranges = adapter.attention_mask_for(**arguments(1, 5, torch.tensor(2)))
    assert ranges.tolist() == [[[[3, 3]]]]


def test_other_patterns_and_other_models_keep_their_masks():
    other = arguments(1, 7, 3, config=SimpleNamespace(kv_lora_rank=None))
    assert adapter.attention_mask_for(**other).shape == (2, 4)
    hides_a_key = arguments(1, 7, 3, mask_function=lambda batch, head, query, key: (key <= query) & (key != 1))
    assert torch.equal(adapter.attention_mask_for(**hides_a_key, allow_is_causal_skip=False), dense(hides_a_key))
