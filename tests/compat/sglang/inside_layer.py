"""Steps of one layer, as SGLang calls it, against float64; in a process where SGLang is one release."""

from __future__ import annotations

import importlib.util
import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

import mla_plugin
from mla_plugin.compat import sglang as adapter
from mla_plugin.compat.sglang import dispatch
from mla_plugin.compat.sglang.backend import MLAPluginAttnBackend
from tests.compat.float64 import attend, close
from tests.compat.sglang.parts import HAS, HEADS, RANK, ROPE, SCALE, UNREAD, Layer, Pool, sglang_of, shared_by

DTYPES = [torch.bfloat16, torch.float16]
CACHES = [None, torch.float8_e4m3fn]
"""None: the cache's dtype is the model's."""
EXPANDED = 8
"""Roundings where keys and values, and absorbed queries, are in the dtype too."""


@pytest.fixture(autouse=True)
def one_rank():
    with shared_by(1, 0):
        yield


def test_signatures():
    """Ours take what SGLang's interface gives, by the same names."""
    for name in vars(MLAPluginAttnBackend):
        theirs = getattr(AttentionBackend, name, None)
        if inspect.isfunction(theirs) and name != "__init__":
            ours = inspect.signature(getattr(MLAPluginAttnBackend, name)).parameters
            wanted = [x for x in inspect.signature(theirs).parameters.values() if x.kind is not x.VAR_KEYWORD]
            assert [x.name for x in wanted] == list(ours)[: len(wanted)], name
            assert [x.default for x in wanted] == [x.default for x in list(ours.values())[: len(wanted)]], name
    write = MLATokenToKVPool.set_mla_kv_buffer
    for function in (write, Pool.set_mla_kv_buffer):
        inspect.signature(function).bind("pool", "layer", "loc", "cache_k_nope", "cache_k_rope")


def test_the_table_says_what_the_release_has():
    from sglang.srt import server_args

    assert HAS.batch_hook == hasattr(AttentionBackend, "init_forward_metadata_out_graph")
    assert HAS.batch_hook != hasattr(AttentionBackend, "init_forward_metadata_replay_cuda_graph")
    assert HAS.chunk_names == hasattr(server_args, "add_chunked_prefix_cache_attention_backend")
    context = importlib.util.find_spec("sglang.srt.runtime_context")
    assert HAS.shared_cache == bool(context and "attn_dcp_size" in Path(context.origin).read_text())


@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 64])
def test_decode(page_size, dtype, kept):
    layer = Layer(dtype, page_size, kv_cache_dtype=kept)
    step = layer.batch(ForwardMode.DECODE, [1, 130, 64, 47], [1, 1, 1, 1])
    with sglang_of(layer):
        layer.backend.init_forward_metadata(step.forward_batch)
        assert dispatch.method_of(layer, step.forward_batch) is AttnForwardMethod.MLA
        close(step.absorbed(), step.wanted(), dtype, EXPANDED)


@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("page_size", [1, 64])
def test_verification_of_a_chain(page_size, kept):
    layer = Layer(page_size=page_size, kv_cache_dtype=kept)
    step = layer.batch(ForwardMode.TARGET_VERIFY, [5, 132, 66], [4, 4, 4], drafts=4)
    with sglang_of(layer):
        layer.backend.init_forward_metadata(step.forward_batch)
        assert dispatch.method_of(layer, step.forward_batch) is AttnForwardMethod.MLA
        close(step.absorbed(), step.wanted(), torch.bfloat16, EXPANDED)


def test_queries_and_rows_side_by_side():
    """As models that do not ask for two parts pass them."""
    layer = Layer()
    step = layer.batch(ForwardMode.DECODE, [3, 90], [1, 1])
    q = torch.randn(2, HEADS, RANK + ROPE).to(torch.bfloat16)
    new = torch.stack([rows[-1] for rows in step.rows])[:, None]
    layer.backend.init_forward_metadata(step.forward_batch)
    out = layer.backend.forward(q, new, new[..., :RANK], layer.attn_mqa, step.forward_batch)
    wanted = [
        attend(x[None], rows[:, None].expand(-1, HEADS, -1), rows[:, None, :RANK].expand(-1, HEADS, -1), SCALE)[0]
        for x, rows in zip(q, step.rows, strict=True)
    ]
    close(out, torch.cat(wanted).flatten(1), torch.bfloat16)


def test_the_new_rows_are_written_unless_they_are_there():
    layer = Layer()
    step = layer.batch(ForwardMode.DECODE, [3], [1])
    q, new = torch.randn(1, HEADS, RANK + ROPE).to(torch.bfloat16), step.rows[0][-1:, None]
    layer.backend.init_forward_metadata(step.forward_batch)
    for save, expected in ((False, torch.full_like(new[0, 0], UNREAD)), (True, new[0, 0])):
        layer.backend.forward(q, new, new[..., :RANK], layer.attn_mqa, step.forward_batch, save_kv_cache=save)
        stored = layer.runner.token_to_kv_pool.get_key_buffer(0)[step.forward_batch.out_cache_loc]
        assert torch.equal(stored[0, 0], expected)


def graph_metadata(backend, forward_batch, in_capture):
    """As SGLang's graph runner of this release asks for them."""
    asked = [forward_batch.req_pool_indices, forward_batch.seq_lens]
    if HAS.batch_hook:
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        backend.init_forward_metadata_in_graph(forward_batch)
    elif in_capture:
        of_step = (None, forward_batch.forward_mode, forward_batch.spec_info)
        backend.init_forward_metadata_capture_cuda_graph(len(asked[0]), len(forward_batch.input_ids), *asked, *of_step)
    else:
        of_step = (forward_batch.seq_lens_sum, None, forward_batch.forward_mode, forward_batch.spec_info)
        on_host = {"seq_lens_cpu": forward_batch.seq_lens_cpu}
        backend.init_forward_metadata_replay_cuda_graph(len(asked[0]), *asked, *of_step, **on_host)


def addresses_of(steps):
    return steps.page_table.data_ptr(), steps.lengths.seqlens_kv.data_ptr()


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_the_layers_of_a_step_share_their_lengths(mode, monkeypatch):
    """So that the first one plans for all."""
    seen, compute = [], mla_plugin.decode

    def decode_and_look(*tensors, **options):
        seen.append(options["seqlens_kv"])
        return compute(*tensors, **options)

    monkeypatch.setattr(mla_plugin, "decode", decode_and_look)
    layer = Layer()
    for _ in range(2):
        step = layer.batch(mode, [9, 80], [1, 1] if mode.is_decode() else [3, 2])
        layer.backend.init_forward_metadata(step.forward_batch)
        with sglang_of(layer):
            for _layer in range(2):
                step.absorbed()
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert seen[0] is not seen[2]
    assert all(isinstance(lengths, mla_plugin.DecodeLengths) and lengths.host is None for lengths in seen)


@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("page_size", [1, 64])
def test_a_replayed_graph(page_size, drafts, kept):
    """What the graph has captured reads the buffers that a replay writes; its last rows pad the batch."""
    layer, new = Layer(page_size=page_size, kv_cache_dtype=kept), max(drafts, 1)
    mode = ForwardMode.TARGET_VERIFY if drafts else ForwardMode.DECODE
    backend, table = layer.backend, layer.runner.req_to_token_pool.req_to_token
    backend.init_cuda_graph_state(6, 6 * new)
    captured = layer.batch(mode, [new + 1] * 5, [new] * 5, drafts)
    graph_metadata(backend, captured.forward_batch, True)
    in_graph = backend.forward_metadata
    addresses = addresses_of(in_graph)
    layer.used = 0
    step = layer.batch(mode, [140, new, 65], [new] * 3, drafts, pad=2 * new)
    table[0] = 0
    fill = backend.get_cuda_graph_seq_len_fill_value()
    of = step.forward_batch
    of.batch_size, of.seq_lens = 5, torch.cat([of.seq_lens, torch.tensor([fill, fill])])
    of.req_pool_indices, of.seq_lens_cpu = torch.cat([of.req_pool_indices, torch.zeros(2).long()]), None
    graph_metadata(backend, of, False)
    assert addresses_of(backend.forward_metadata) == addresses
    assert backend.forward_metadata.lengths is not in_graph.lengths  # for which something may be planned already
    asked, of.spec_info = of.spec_info, None  # as a rank without requests has it
    graph_metadata(backend, of, False)
    of.spec_info = asked
    graph_metadata(backend, of, False)
    backend.forward_metadata = in_graph
    with sglang_of(layer):
        out = step.absorbed()
    close(out[: 3 * new], step.wanted(), torch.bfloat16, EXPANDED)
    assert out.isfinite().all()


PREFIXES = [[0, 0, 0], [70, 0, 13], [128, 64, 1]]
NEW = [20, 1, 37]


@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("chunk", "method"), [(128 * 1024, "MHA_ONE_SHOT"), (99, "MHA_CHUNKED_KV")])
def test_prefill(prefix, chunk, method, pad, kept, monkeypatch):
    """Prefix and new tokens together, or the prefix in chunks of 33 tokens a request, merged by SGLang."""

    def attention(q, k, v, **given):
        assert len(q) == given["cu_seqlens_q"][-1]
        assert len(k) == len(v) == given["cu_seqlens_kv"][-1]
        for side in ("q", "kv"):
            assert given[f"max_seqlen_{side}"] == given[f"cu_seqlens_{side}"].diff().max()
        return compute(q, k, v, **given)

    compute = mla_plugin.attention
    monkeypatch.setattr(mla_plugin, "attention", attention)
    layer = Layer(kv_cache_dtype=kept)
    lengths = [a + b for a, b in zip(prefix, NEW, strict=True)]
    step = layer.batch(ForwardMode.EXTEND, lengths, NEW, pad=pad)
    with sglang_of(layer, chunk):
        layer.backend.init_forward_metadata(step.forward_batch)
        found = dispatch.method_of(layer, step.forward_batch)
        assert found is AttnForwardMethod[method if sum(lengths) > 99 else "MHA_ONE_SHOT"]
        out = step.expanded(found)
    tokens = sum(NEW)
    one_shot = found is AttnForwardMethod.MHA_ONE_SHOT and any(prefix)  # which reads the new tokens too
    close(out[:tokens], step.wanted(as_kept=(True, one_shot)), torch.bfloat16, EXPANDED)
    assert not out[tokens:].any()


@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefill_of_absorbed_queries(prefix, page_size, pad, kept):
    """As SGLang asks for it where it captures a prefill, or may not expand a prefix."""
    layer = Layer(page_size=page_size, kv_cache_dtype=kept)
    step = layer.batch(ForwardMode.EXTEND, [a + b for a, b in zip(prefix, NEW, strict=True)], NEW, pad=pad)
    layer.disable_chunked_prefix_cache = True
    with sglang_of(layer):
        layer.backend.init_forward_metadata(step.forward_batch)
        assert any(prefix) == (dispatch.method_of(layer, step.forward_batch) is AttnForwardMethod.MLA)
        out = step.absorbed()
        table = layer.backend.forward_metadata.page_table
        step.absorbed()
    assert layer.backend.forward_metadata.page_table is table  # of all layers
    close(out[: sum(NEW)], step.wanted(), torch.bfloat16, EXPANDED)
    assert not out[sum(NEW) :].any()


@pytest.mark.skipif(not HAS.shared_cache, reason="before SGLang 0.5.16 ranks do not share a cache")
@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_decode_over_ranks_is_merged_by_lse(page_size, kept):
    """Three ranks hold every third token; a slot is page * page_size * 3 + place, of which each keeps its third."""
    ranks, lengths, rows = 3, [50, 2, 64], []
    table = torch.zeros(4, 192, dtype=torch.int32)
    layers = [Layer(page_size=page_size, ranks=ranks, rank=rank, kv_cache_dtype=kept) for rank in range(ranks)]
    pages = torch.randperm(40) + 1
    for index, length in enumerate(lengths):
        rows.append(torch.randn(length, RANK + ROPE).to(torch.bfloat16).to(layers[0].kept))
        span = page_size * ranks
        own, pages = pages.split([-(-length // span), len(pages) + -length // span])
        slots = (own[:, None] * span + torch.arange(span)).flatten()[:length]
        table[index, :length] = slots.int()
        for rank, layer in enumerate(layers):
            pool = layer.runner.token_to_kv_pool
            pool.kv_buffer[0][slots[rank::ranks] // ranks, 0] = rows[-1][rank::ranks].view(pool.store_dtype)
    q = torch.randn(3, HEADS, RANK + ROPE).to(torch.bfloat16)
    step = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=3, spec_info=None, seq_lens_cpu=None)
    step.seq_lens, step.req_pool_indices = torch.tensor(lengths), torch.arange(3)
    parts = []
    for layer in layers:
        layer.runner.req_to_token_pool.req_to_token[:4] = table
        layer.backend.init_forward_metadata(step)
        two = {"q_rope": q[..., RANK:], "k_rope": None}
        out, lse = layer.backend.forward(q[..., :RANK].contiguous(), None, None, layer.attn_mqa, step, **two)
        assert out.shape == (3, HEADS * RANK)
        assert lse.shape == (3, HEADS)
        assert lse.dtype == torch.float32
        parts.append((out.view(3, HEADS, RANK), lse.double()))
    lse = torch.stack([part[1] for part in parts]) * math.log(2)
    weights = (lse - lse.logsumexp(0)).exp()
    merged = sum(weight[..., None] * part[0].double() for weight, part in zip(weights, parts, strict=True))
    keys = [row[:, None].float().expand(-1, HEADS, -1) for row in rows]
    wanted = [attend(x[None], k, k[..., :RANK], SCALE) for x, k in zip(q, keys, strict=True)]
    close(merged.to(torch.bfloat16), torch.cat([x[0] for x in wanted]), torch.bfloat16)
    torch.testing.assert_close(lse.logsumexp(0), torch.cat([x[1] for x in wanted]), atol=1e-4, rtol=1e-4)
    extend = layers[0].batch(ForwardMode.EXTEND, [5], [5]).forward_batch
    layers[0].backend.init_forward_metadata(extend)
    with pytest.raises(NotImplementedError, match="absorbed prefill over a cache that 3 ranks share"):
        layers[0].backend.forward(q, None, None, layers[0].attn_mqa, extend)


def test_an_idle_rank():
    layer = Layer()
    idle = SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0)
    layer.backend.init_forward_metadata(idle)
    out = layer.backend.forward(torch.empty(0, HEADS, RANK), None, None, layer.attn_mqa, idle)
    assert out.shape == (0, HEADS * RANK)


def test_a_tree_of_drafts():
    """Of however many SGLang itself decides on."""
    layer = Layer()
    step = layer.batch(ForwardMode.TARGET_VERIFY, [9], [4], drafts=4).forward_batch
    step.spec_info.topk = 2
    with pytest.raises(NotImplementedError, match="2 drafts for a token, expected 1"):
        layer.backend.init_forward_metadata(step)


def test_a_prefill_that_is_shared_or_captured_whole():
    layer = Layer()
    step = layer.batch(ForwardMode.EXTEND, [4], [4]).forward_batch
    with pytest.raises(NotImplementedError, match="cannot capture a whole prefill"):
        layer.backend.init_forward_metadata_out_graph(step, in_capture=True)
    layer.backend.init_forward_metadata(step)
    step.attn_cp_metadata = SimpleNamespace()
    q = torch.zeros(4, HEADS, RANK + ROPE, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="no context parallelism of the prefill"):
        layer.backend.forward(q, None, None, layer.attn_mqa, step)


def test_drafts_are_another_backends():
    drafts = [mode for mode in ForwardMode if mode.name.startswith("DRAFT")]
    for mode in drafts:
        with pytest.raises(NotImplementedError, match=f"a step of {mode.name}; drafts are computed by"):
            Layer().backend.init_forward_metadata(SimpleNamespace(forward_mode=mode, batch_size=1))
    assert drafts


@pytest.mark.parametrize(
    ("changed", "others", "reason"),
    [
        ({"logit_cap": 30.0}, {}, "logit_cap=30.0"),
        ({"sliding_window_size": 128}, {}, "sliding_window_size=128"),
        ({"is_cross_attention": True}, {}, "is_cross_attention=True"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "attn_type=<AttentionType.ENCODER_ONLY: .*>"),
        ({}, {"topk_indices": torch.zeros(1)}, "topk_indices"),
        ({}, {"sinks": torch.zeros(1)}, "sinks"),
    ],
)
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_a_layer_that_is_not_plain_attention(changed, others, reason, mode):
    layer = Layer()
    step = layer.batch(mode, [4], [1])
    layer.backend.init_forward_metadata(step.forward_batch)
    for name, value in changed.items():
        setattr(layer.attn_mqa, name, value)
    with pytest.raises(NotImplementedError, match=f"cannot compute layer 0, which asks for {reason}; expected plain"):
        layer.backend.forward(
            torch.zeros(1, HEADS, RANK + ROPE), None, None, layer.attn_mqa, step.forward_batch, **others
        )


def test_a_scale_of_a_checkpoint():
    """SGLang's layers write numbers without it, and so do we; triton divides them."""
    layer = Layer(kv_cache_dtype=torch.float8_e4m3fn)
    step = layer.batch(ForwardMode.DECODE, [5, 70], [1, 1])
    layer.attn_mqa.k_scale, layer.attn_mqa.k_scale_float = torch.tensor(0.25), 0.25
    with sglang_of(layer):
        layer.backend.init_forward_metadata(step.forward_batch)
        close(step.absorbed(), step.wanted(), torch.bfloat16, EXPANDED)
        layer.runner.server_args.prefill_attention_backend = "triton"
        layer.backend = adapter.create(layer.runner)
        layer.backend.init_forward_metadata(step.forward_batch)
        q = torch.zeros(2, HEADS, RANK + ROPE, dtype=torch.bfloat16)
        with pytest.raises(NotImplementedError, match=r"layer 0 has k_scale=0\.25, and prefill and decode have diff"):
            layer.backend.forward(q, None, None, layer.attn_mqa, step.forward_batch)
        for scale in (None, 1.0):
            layer.attn_mqa.k_scale_float = scale
            layer.backend.forward(q, None, None, layer.attn_mqa, step.forward_batch)


def test_queries_that_are_not_those_of_all_requests():
    layer = Layer()
    step = layer.batch(ForwardMode.DECODE, [4, 9], [1, 1])
    layer.backend.init_forward_metadata(step.forward_batch)
    q = torch.zeros(3, HEADS, RANK + ROPE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="3 query tokens of 2 requests; equally many"):
        layer.backend.forward(q, None, None, layer.attn_mqa, step.forward_batch)


def test_expanded_keys_are_not_written():
    layer = Layer()
    step = layer.batch(ForwardMode.EXTEND, [4], [4])
    q = torch.zeros(4, HEADS, layer.qk_head_dim, dtype=torch.bfloat16)
    layer.backend.init_forward_metadata(step.forward_batch)
    with pytest.raises(NotImplementedError, match="expanded keys to save; the cache holds compressed ones"):
        layer.backend.forward(q, q, q[..., : layer.v_head_dim], layer.attn_mha, step.forward_batch)
