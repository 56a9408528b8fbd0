"""Masks and lengths of other sizes than the batch: the transformers adapter refuses them, and takes what is legal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import BertConfig, BertModel, DynamicCache, StaticCache

from mla_plugin.compat import transformers as adapter
from mla_plugin.compat.transformers import checks
from tests.compat.test_transformers_attention import BEFORE_5, CAUSAL, B, causal, ids_of, qkv
from tests.compat.test_transformers_models import FAMILIES, SPARSE, for_each, trio

NAMES = ["Llama", "Mistral", "DeepseekV3"]
REFUSING = [] if BEFORE_5 else NAMES
"""Eager attention and sdpa of 4.57 cut masks that are wider than the keys, and so does the adapter there."""
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
WIDE = {"padded": torch.nn.functional.pad(PADDED, (3, 0)), "ones": torch.ones(2, 12, dtype=torch.long)}
TOO_WIDE = r"the attention mask is for 12 keys and this call has 9; expected one column for each key"


@for_each(REFUSING)
@pytest.mark.parametrize("mask", WIDE)
def test_a_mask_wider_than_the_keys_is_refused(name, mask):
    with pytest.raises(RuntimeError, match=r"size of tensor a \(9\) must match the size of tensor b \(12\)"):
        trio(name).eager(IDS, attention_mask=WIDE[mask], use_cache=False)
    with pytest.raises(ValueError, match=TOO_WIDE):
        trio(name).plugin(IDS, attention_mask=WIDE[mask], use_cache=False)


@for_each(NAMES if BEFORE_5 else [])
@pytest.mark.parametrize("mask", WIDE)
def test_a_mask_wider_than_the_keys_is_cut(name, mask):
    wide, cut = (trio(name).plugin(IDS, attention_mask=x, use_cache=False) for x in (WIDE[mask], WIDE[mask][:, :9]))
    assert torch.equal(wide.logits, cut.logits)


@for_each(REFUSING[:1])
def test_a_mask_wider_than_the_keys_of_an_encoder_is_refused(name):
    config = BertConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = BertModel(config).eval()
    model.set_attn_implementation("mla_plugin")
    with pytest.raises(ValueError, match=TOO_WIDE):
        model(IDS, attention_mask=WIDE["padded"])


@for_each(REFUSING)
def test_one_query_with_a_mask_of_a_cache_that_is_not_given_is_refused(name):
    mask = torch.ones(2, 80, dtype=torch.long)
    for first in (0, 1):
        mask[0, :first] = 0
        with torch.no_grad(), pytest.raises(ValueError, match="for 80 keys and this call has 1;"):
            trio(name).plugin(IDS[:, :1], attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("kind", ["bool", "additive", "bidirectional"])
@pytest.mark.parametrize("cuts", [True, False])
def test_a_4d_mask_wider_than_the_keys(kind, cuts, monkeypatch):
    monkeypatch.setattr(checks, "_CUTS_MASKS", cuts)
    mask = torch.rand(B, 1, 9, 12, generator=torch.Generator().manual_seed(2)) < 0.5
    mask = mask.double() if kind == "additive" else mask

    def attend(mask: torch.Tensor) -> torch.Tensor:
        return adapter.attention_forward(CAUSAL, *qkv(9, 9), mask, is_causal=kind != "bidirectional")[0]

    if cuts:
        assert torch.equal(attend(mask), attend(mask[..., :9]))
    else:
        with pytest.raises(ValueError, match=TOO_WIDE):
            attend(mask)


def test_a_mask_that_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"attention_mask is BlockMask; expected a torch\.Tensor"):
        trio("Llama").plugin(IDS, attention_mask=create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 9, 9, device="cpu"))


@pytest.mark.parametrize("kind", ["bool", "additive", "bidirectional"])
def test_a_4d_mask_narrower_than_the_keys_is_refused(kind):
    """As BERT without ``is_decoder`` makes it over the slots of a static cache."""
    mask = torch.ones(B, 1, 1, 7, dtype=torch.bool).expand(B, 1, 9, 7)
    mask = mask.double() if kind == "additive" else mask
    with pytest.raises(ValueError, match="the attention mask is for 7 keys and this call has 9; expected one column"):
        adapter.attention_forward(CAUSAL, *qkv(9, 9), mask, is_causal=kind != "bidirectional")


@pytest.mark.parametrize("mask", WIDE)
@pytest.mark.parametrize("cache", ["dynamic", "static", "shorter static", "longer static"])
@pytest.mark.parametrize("name", NAMES)
def test_with_a_cache_a_wider_mask_is_cut_as_in_transformers(name, cache, mask):
    if BEFORE_5 and (name == "DeepseekV3" and "static" in cache):
        return  # its static caches have one head dimension
    length = {"static": 12, "shorter static": 10, "longer static": 16}.get(cache)
    outputs = []
    for implementation in ("mla_plugin", "sdpa"):
        model = copy.deepcopy(trio(name).plugin)
        model.set_attn_implementation(implementation)
        past = DynamicCache(config=model.config)
        if length is not None:
            past = StaticCache(config=model.config, max_cache_len=length)
        with torch.no_grad():
            prompt = model(IDS[:, :6], attention_mask=WIDE[mask], past_key_values=past).logits
            step = model(IDS[:, 6:7], attention_mask=WIDE[mask], past_key_values=past).logits
        outputs.append(torch.cat((prompt[:, -1:], step), 1))
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mask", [PADDED, torch.ones_like(PADDED)], ids=["padded", "ones"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", [*NAMES, *SPARSE[:1]])
def test_a_mask_of_another_batch_size_is_refused(name, num_rows, mask):
    rows = mask[:1].expand(num_rows, 9)
    with pytest.raises(ValueError, match=f"batch size: the attention mask has {num_rows} and the input has 2;"):
        trio(name).plugin(IDS, attention_mask=rows, use_cache=False)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shape", [(3, 9), (3, 1, 9, 9), (1, 9)])
def test_the_attention_function_refuses_another_batch_size(shape, is_causal):
    mask = torch.ones(shape, dtype=torch.bool)
    if len(shape) == 4:
        mask = mask[:, :, :1].expand(shape)
    with pytest.raises(ValueError, match=f"batch size: the attention mask has {shape[0]} and the input has 2;"):
        adapter.attention_forward(CAUSAL, *qkv(9, 9), mask, is_causal=is_causal)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "decreasing": ({"cu_seq_lens_q": int32(0, 10, 4)}, ValueError, "start at 0 and never decrease"),
    "beyond": ({"cu_seq_lens_q": int32(0, 4, 30)}, ValueError, "ends at 30; the tensor holds 18 tokens"),
    "beyond the keys": ({"cu_seq_lens_k": int32(0, 4, 30)}, ValueError, "cu_seqlens_kv.* ends at 30"),
    "late start": ({"cu_seq_lens_q": int32(3, 4, 18)}, ValueError, "start at 0 and never decrease"),
    "int64": ({"cu_seq_lens_q": int32(0, 4, 18).long()}, TypeError, "has dtype torch.int64; expected torch.int32"),
    "int64 of the keys": ({"cu_seq_lens_k": int32(0, 4, 18).long()}, TypeError, "cu_seqlens_kv has dtype torch.int64"),
    "list": ({"cu_seq_lens_q": [0, 4, 18]}, TypeError, "cu_seqlens_q is list; expected a torch.Tensor"),
    "list for the keys": ({"cu_seq_lens_k": [0, 4, 18]}, TypeError, "cu_seqlens_kv is list; expected a torch.Tensor"),
    "2-D": ({"cu_seq_lens_q": int32(0, 4, 18)[None]}, ValueError, r"has shape \(1, 3\); expected"),
    "other number": ({"cu_seq_lens_k": int32(0, 18)}, ValueError, r"cu_seqlens_kv has shape \(2,\); expected \(3,\)"),
    "short longest": ({"max_length_q": 4}, ValueError, "max_seqlen_q=4 and cu_seqlens_q gives lengths"),
    "longest is text": ({"max_length_q": "a"}, TypeError, "max_length_q='a'; expected an int"),
    "longest is text for the keys": ({"max_length_k": "9"}, TypeError, "max_length_k='9'; expected an int"),
    "longest is a fraction": ({"max_length_q": 14.5}, TypeError, "max_length_q=14.5; expected an int"),
    "negative longest": ({"max_length_q": -1}, ValueError, "max_length_q=-1; expected at least 0"),
}


def lengths(**changed: Any) -> dict[str, Any]:
    cu_seqlens = int32(0, 4, 18)
    return {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 14, "max_length_k": 14, **changed}


def within_sequences(mask: torch.Tensor) -> torch.Tensor:
    """The mask without the pairs of the two sequences of ``lengths``, [B, 1, 9, 9]."""
    ids = ids_of((4, 14), 18).view(B, 1, 9, 1)
    return mask & (ids == ids.transpose(-1, -2))


@pytest.mark.parametrize("kind", ["no mask", "dense", "sparse"])
@pytest.mark.parametrize("case", BAD)
def test_lengths_are_checked_with_and_without_a_dense_mask(case, kind):
    changed, error, message = BAD[case]
    mask = None if kind == "no mask" else within_sequences(causal(9, 9))
    indices = torch.zeros(B, 9, 2, dtype=torch.int32) if kind == "sparse" else None
    adapter.attention_forward(CAUSAL, *qkv(9, 9), mask, indices=indices, **lengths())
    with pytest.raises(error, match=message):
        adapter.attention_forward(CAUSAL, *qkv(9, 9), mask, indices=indices, **lengths(**changed))


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", [*NAMES, *SPARSE[:1]])
def test_models_refuse_wrong_lengths(name, case):
    changed, error, message = BAD[case]
    ones, model = torch.ones_like(IDS), trio(name).plugin
    with pytest.raises(error, match=message):
        model(IDS, attention_mask=ones, use_cache=False, **lengths(**changed))


@pytest.mark.parametrize("longest", [torch.tensor(14), torch.tensor([14], dtype=torch.int32)])
def test_the_longest_may_be_a_tensor(longest):
    given = lengths(max_length_q=longest, max_length_k=longest)
    expected = adapter.attention_forward(CAUSAL, *qkv(9, 9), None, **lengths())[0]
    assert torch.equal(adapter.attention_forward(CAUSAL, *qkv(9, 9), None, **given)[0], expected)


@pytest.mark.parametrize("name", [*NAMES, *SPARSE[:1]])
def test_models_refuse_lengths_beside_padding(name):
    with pytest.raises(ValueError, match="cu_seq_lens_q and padding together: give either the lengths or"):
        trio(name).plugin(IDS, attention_mask=PADDED, use_cache=False, **lengths())


def test_lengths_beside_a_mask_of_ones_narrow_a_window():
    """Mistral's layers get a dense mask for their window."""
    assert FAMILIES["Mistral"].config["sliding_window"] < 9
    ids = IDS.reshape(1, 18)
    found = trio("Mistral").plugin(ids, attention_mask=torch.ones_like(ids), use_cache=False, **lengths()).logits
    # positions go on in the second sequence, and rotary embeddings see only their differences
    expected = torch.cat([trio("Mistral").eager(x, use_cache=False).logits for x in ids.split((4, 14), 1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_on_a_device_no_values_are_read(monkeypatch):
    """A tensor on the meta device has no values: to read one raises."""
    monkeypatch.setenv("MLA_PLUGIN_CHECK", "0")
    cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
    packing = {"attn_mask_type": "padding_causal", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    query = torch.empty(2, 4, 9, 8, device="meta")
    packing |= {"max_seqlen_q": 14, "max_seqlen_kv": 14}
    assert checks.check_packing(packing, query, query) is packing
    mask = torch.empty(2, 1, 9, 9, dtype=torch.bool, device="meta")
    mask.tokens = torch.empty(2, 9, dtype=torch.bool, device="meta")
    checks.check_no_padding(mask)
    assert checks.fitted_mask(mask, 2, 9) is mask


def compiled_layer():
    torch.compiler.reset()

    def layer(q, k, v, mask, cu_q, cu_kv, longest):
        given = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_kv, "max_length_q": longest, "max_length_k": longest}
        return adapter.attention_forward(CAUSAL, q, k, v, mask, **given)[0]

    return torch.compile(layer, fullgraph=True, backend="aot_eager"), layer


def test_a_graph_checks_lengths_when_it_runs():
    compiled, layer = compiled_layer()
    q, k, v = (x.detach() for x in qkv(9, 9))
    cu_seqlens, mask = int32(0, 4, 18), causal(9, 9)
    expected = layer(q, k, v, mask, cu_seqlens, cu_seqlens, 14)
    torch.testing.assert_close(compiled(q, k, v, mask, cu_seqlens, cu_seqlens, 14), expected)
    torch.testing.assert_close(compiled(q, k, v, mask, cu_seqlens, cu_seqlens.clone(), None), expected)
    with pytest.raises(ValueError, match="start at 0 and never decrease"):
        compiled(q, k, v, mask, int32(0, 10, 4), cu_seqlens, 14)
    with pytest.raises(ValueError, match=r"cu_seqlens_kv.* ends at 30; the tensor holds 18 tokens"):
        compiled(q, k, v, mask, cu_seqlens, int32(0, 4, 30), None)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        *([] if BEFORE_5 else [(WIDE["padded"], "the attention mask is for 12 keys and this call has 9")]),
        (torch.ones(3, 9, dtype=torch.long), "batch size: the attention mask has 3 and the input has 2"),
    ],
)
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_compiled_model_refuses_other_masks(name, mask, message):
    torch.compiler.reset()
    compiled = torch.compile(trio(name).plugin, fullgraph=True, backend="aot_eager")
    compiled(IDS, attention_mask=PADDED, use_cache=False)
    with pytest.raises(Exception, match=message):
        compiled(IDS, attention_mask=mask, use_cache=False)
