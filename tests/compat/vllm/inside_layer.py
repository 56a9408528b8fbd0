"""Decode and prefill of one layer, as vLLM calls them, against float64; in a process where vLLM is one release."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import mla_plugin
from mla_plugin.compat.vllm import decode
from tests.compat.float64 import attend, close
from tests.compat.vllm.parts import NOPE, RANK, ROPE, Layer, V, compiled_operators


def expected_mqa(layer: Layer, q: torch.Tensor, rows: list[torch.Tensor], seqlen_q: int, causal: bool = True):
    """out [T, H, R] and lse [T, H] of absorbed queries over each request's rows."""
    parts = []
    for x, row in zip(q.split(seqlen_q), rows, strict=True):
        kv = row[:, None].expand(-1, layer.heads, -1)
        parts.append(attend(x, kv, kv[..., :RANK], layer.scale, causal))
    return (torch.cat(x) for x in zip(*parts, strict=True))


@pytest.mark.parametrize("is_pair", [True, False])
@pytest.mark.parametrize(
    ("seqlen_q", "dtype"), [(1, torch.bfloat16), (2, torch.float16), (5, torch.bfloat16), (8, torch.float16)]
)
def test_decode(seqlen_q, dtype, is_pair):
    """A uniform batch as a full CUDA graph has it: its last requests are padding, of length 0."""
    layer = Layer(3, dtype, 24, speculative=seqlen_q - 1)
    lengths = [seqlen_q, 47, 130, 0, 0]
    table, rows = layer.fill(lengths)
    metadata = layer.metadata(table, lengths, [seqlen_q] * 5)
    assert (metadata.num_decodes, metadata.num_prefills) == (5, 0)
    wide = torch.randn(seqlen_q * 5, layer.heads, RANK + ROPE + 3).to(dtype)
    q = wide[..., : RANK + ROPE]
    layer.impl.need_to_return_lse_for_decode = True
    given = (q[..., :RANK].transpose(0, 1).contiguous().transpose(0, 1), q[..., RANK:]) if is_pair else q
    out, lse = layer.impl.forward_mqa(given, layer.cache, metadata, None)
    wanted, wanted_lse = expected_mqa(layer, q, rows, seqlen_q)
    close(out, wanted, dtype)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=1e-4)
    assert not out[3 * seqlen_q :].any()
    assert lse[3 * seqlen_q :].isneginf().all()
    layer.impl.need_to_return_lse_for_decode = False
    again, nothing = layer.impl.forward_mqa(given, layer.cache, metadata, None)
    assert nothing is None
    assert torch.equal(again, out)


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("name", sorted(decode.CACHE_FORMATS))
def test_decode_over_a_quantised_cache(name, seqlen_q):
    """As vLLM hands it over: fp8 as float8_e4m3fn, fp8_ds_mla, which has DeepSeek's widths alone, in bytes."""
    layer = Layer(3, torch.bfloat16, 24, speculative=seqlen_q - 1)
    lengths, heads, scale = [47, 130, 0], layer.heads, torch.tensor(0.02)
    table, _ = layer.fill(lengths)
    kv_format = decode.CACHE_FORMATS[name]
    rank, width = (512, 656) if kv_format == "fp8_ds_mla" else (RANK, RANK + ROPE)
    quantised = {"kv_cache_format": kv_format, "kv_scale": scale if kv_format == "fp8" else None}
    kept = torch.full((24, 16, width), 0x7F, dtype=torch.uint8)
    rows = [torch.randn(length, 576).to(torch.bfloat16) for length in lengths]
    for b, kv in enumerate(rows):
        positions = torch.arange(len(kv))
        slots = table[b, positions // 16].long() * 16 + positions % 16
        mla_plugin.cache.append(kept, kv[:, :rank], kv[:, rank:], slots, **quantised)
    impl = layer.impl
    assert not impl.supports_quant_query_input
    impl.kv_cache_dtype, impl.need_to_return_lse_for_decode = name, True
    impl.kv_lora_rank, impl.qk_rope_head_dim = rank, 576 - rank
    q = torch.randn(seqlen_q * 3, heads, 576).to(torch.bfloat16)
    given = kept.view(torch.float8_e4m3fn) if kv_format == "fp8" else kept
    metadata = layer.metadata(table, lengths, [seqlen_q] * 3)
    out, lse = impl.forward_mqa(q, given, metadata, SimpleNamespace(_k_scale=scale))
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    held = mla_plugin.cache.gather(kept, table, seq_lens, kv_lora_rank=rank, **quantised)
    wanted, wanted_lse = [], []
    for b, (x, kv) in enumerate(zip(q.split(seqlen_q), rows, strict=True)):
        found = torch.cat([part[b, : lengths[b]] for part in held], -1)
        assert ((found - kv).abs() <= kv.abs() / 14 + scale / 256).all()  # half a step of e4m3, and bfloat16
        keys = found[:, None].expand(-1, heads, -1)
        for each, part in zip((wanted, wanted_lse), attend(x, keys, keys[..., :rank], layer.scale), strict=True):
            each.append(part)
    # scaled numbers are rounded to bfloat16, so scores of 10 and more are off by up to 0.03, and so are weights
    close(out, torch.cat(wanted), torch.bfloat16, roundings=10)
    torch.testing.assert_close(lse.double(), torch.cat(wanted_lse), atol=6e-2, rtol=1e-3)


@pytest.mark.skipif(not decode.HAS.causal, reason="before vLLM 0.27 every step is causal")
def test_a_draft_whose_tokens_see_each_other():
    layer = Layer(2, torch.bfloat16, 12, speculative=3)
    layer.builder.non_causal_multi_token_decode = True
    lengths = [40, 19]
    table, rows = layer.fill(lengths)
    metadata = layer.metadata(table, lengths, [4, 4], causal=False)
    q = torch.randn(8, 2, RANK + ROPE).to(torch.bfloat16)
    out, _ = layer.impl.forward_mqa(q, layer.cache, metadata, None)
    wanted, _ = expected_mqa(layer, q, rows, 4, causal=False)
    close(out, wanted, torch.bfloat16)


def lengths_seen(monkeypatch):
    """The lengths that ``mla_plugin.decode`` is called with, in order."""
    seen, compute = [], mla_plugin.decode

    def decode_and_look(*tensors, **options):
        seen.append(options["seqlens_kv"])
        return compute(*tensors, **options)

    monkeypatch.setattr(mla_plugin, "decode", decode_and_look)
    return seen


def test_the_layers_of_a_pass_share_their_lengths(monkeypatch):
    """So that the first one plans for all; the next pass over the same metadata may have other lengths."""
    seen, first, second = lengths_seen(monkeypatch), *(Layer(2, torch.bfloat16, 12, speculative=1) for _ in range(2))
    table, _ = first.fill([40, 19])
    second.cache = first.cache
    metadata = first.metadata(table, [40, 19], [1, 1])
    q = torch.randn(2, 2, RANK + ROPE).to(torch.bfloat16)

    def run(layer):
        layer.impl.forward_mqa(q, layer.cache, metadata, None)
        assert seen[-1].seqlens_kv is metadata.decode.seq_lens
        assert seen[-1].host is None
        return seen[-1]

    of_pass = run(first)
    assert run(second) is of_pass
    of_next = run(first)
    assert of_next is not of_pass
    assert run(second) is of_next
    metadata.decode.seq_lens -= 1
    first.builder.update_draft_decode_metadata(metadata)
    of_draft = run(second)
    assert of_draft is not of_next
    assert run(first) is of_draft
    metadata.decode.seq_lens = metadata.decode.seq_lens.clone()
    assert run(Layer(2, torch.bfloat16, 12)) is not of_draft


def test_a_draft_without_a_request_of_decode():
    """Its step may be a prefill alone."""
    builder = Layer(2, torch.bfloat16, 4, speculative=1).builder
    builder.update_draft_decode_metadata(SimpleNamespace(decode=None))


def test_decode_over_two_ranks_is_merged_by_lse():
    """Each rank holds every second token; vLLM sums exp(lse - lse of all) out. One rank has none of the third's."""
    dtype, lengths = torch.bfloat16, [33, 7, 1]
    whole = Layer(4, dtype, 8)
    _, rows = whole.fill(lengths)
    q = torch.randn(3, 4, RANK + ROPE).to(dtype)
    parts = []
    for rank in range(2):
        layer = Layer(4, dtype, 8)
        own = [kv[rank::2] for kv in rows]
        table, _ = layer.fill([len(kv) for kv in own])
        for b, kv in enumerate(own):
            for t in range(len(kv)):
                layer.cache[table[b, t // 16], t % 16] = kv[t]
        layer.impl.dcp_world_size, layer.impl.need_to_return_lse_for_decode = 2, True
        step = SimpleNamespace(
            decode=SimpleNamespace(
                block_table=table, seq_lens=torch.tensor([len(kv) for kv in own], dtype=torch.int32)
            ),
            causal=True,
        )
        parts.append(layer.impl.forward_mqa(q, layer.cache, step, None))
    lse = torch.stack([part[1] for part in parts]).double()
    weights = (lse - lse.logsumexp(0)).exp()
    merged = sum(weight[..., None] * part[0].double() for weight, part in zip(weights, parts, strict=True))
    wanted, wanted_lse = expected_mqa(whole, q, rows, 1)
    close(merged.to(dtype), wanted, dtype)
    torch.testing.assert_close(lse.logsumexp(0), wanted_lse, atol=1e-4, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="2 query tokens of a request with decode context parallelism over 2"):
        layer.impl.forward_mqa(torch.cat([q, q]), layer.cache, step, None)


def test_query_tokens_that_are_not_those_of_all_requests():
    layer = Layer(2, torch.bfloat16, 4)
    table, _ = layer.fill([5, 6])
    metadata = layer.metadata(table, [5, 6], [1, 1])
    with pytest.raises(ValueError, match="3 query tokens of 2 requests; equally many"):
        layer.impl.forward_mqa(torch.randn(3, 2, RANK + ROPE).to(torch.bfloat16), layer.cache, metadata, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_of_decode_and_prefill(dtype):
    """vLLM's own forward_mha, with context of none, one and several chunks, together with requests that decode."""
    layer = Layer(3, dtype, 40)
    lengths, queries = [20, 64, 150, 29, 11, 16], [1, 1, 13, 9, 10, 16]  # vLLM's order: those without context last
    table, rows = layer.fill(lengths)
    metadata = layer.metadata(table, lengths, queries)
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 4)
    q = torch.randn(sum(queries), 3, NOPE + ROPE).to(dtype)
    new = torch.cat([kv[-count:] for kv, count in zip(rows[2:], queries[2:], strict=True)])
    output = torch.full((sum(queries) - 2, 3 * V), torch.nan, dtype=dtype)
    with compiled_operators():
        layer.impl.forward_mha(
            q[2:], new[:, :RANK].contiguous(), new[:, None, RANK:], layer.cache, metadata, torch.ones(()), output
        )
    decoded, _ = layer.impl.forward_mqa((layer.absorbed(q[:2, :, :NOPE]), q[:2, :, NOPE:]), layer.cache, metadata, None)
    w_uv = layer.projection.weight.view(3, NOPE + V, RANK)[:, NOPE:]
    decoded = torch.einsum("thr,hvr->thv", decoded, w_uv)
    found = torch.cat([decoded, output.view(-1, 3, V)])
    wanted = torch.cat(
        [attend(x, *layer.expanded(kv), layer.scale)[0] for x, kv in zip(q.split(queries), rows, strict=True)]
    )
    close(found, wanted, dtype, roundings=8)  # of expanded keys and values in the dtype, too


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alibi_slopes", [0.5]),
        ("sliding_window", 64),
        ("logits_soft_cap", 30.0),
        ("attn_type", "encoder"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("kv_cache_dtype", "nvfp4_ds_mla"),
    ],
)
def test_a_layer_that_cannot_be_computed(name, value):
    given = {"num_heads": 2, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "alibi_slopes": None}
    given |= {"sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder"}
    with pytest.raises(NotImplementedError, match=f"{name}=.*, expected"):
        decode.MLAPluginImpl(**{**given, "kv_sharing_target_layer_name": None, name: value})


def test_batch_invariance_is_passed_on(monkeypatch):
    """On a CPU no backend promises it, and the call says so."""
    assert Layer(2, torch.bfloat16, 4).config.cache_config.enable_prefix_caching
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer = Layer(2, torch.bfloat16, 4)
    assert not layer.config.cache_config.enable_prefix_caching  # as vLLM does for its own Triton backend
    table, _ = layer.fill([5])
    metadata = layer.metadata(table, [5], [1])
    with pytest.raises(RuntimeError, match="batch_invariant"):
        layer.impl.forward_mqa(torch.randn(1, 2, RANK + ROPE).to(torch.bfloat16), layer.cache, metadata, None)
    metadata = layer.metadata(table, [5], [5])
    q = torch.randn(5, 2, NOPE + ROPE).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="batch_invariant"):
        metadata.prefill.prefill_backend.run_prefill_new_tokens(q, q, q[..., :V], False)


def test_speculation_is_decode_and_goes_into_full_graphs():
    builder = Layer(2, torch.bfloat16, 4, speculative=7).builder
    assert builder.reorder_batch_threshold == 8
    assert type(builder)._cudagraph_support.name == "UNIFORM_BATCH"
    assert builder.supports_draft_decode_metadata_update
