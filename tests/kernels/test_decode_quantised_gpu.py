"""Decode over quantised caches at real sizes, compiled, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mla_plugin
from mla_plugin import cache
from mla_plugin.arguments import decode_layout
from mla_plugin.kernels.decode.transposed import rule as transposed_rule
from mla_plugin.kernels.decode.wide import rule as wide_rule
from tests.kernels.decode_cases import (
    Inputs,
    as_engines_have_it,
    assert_as_good_as_pytorch,
    assert_out_as_good_as_pytorch,
    paged,
)

pytestmark = pytest.mark.gpu

FORMATS = ("fp8", "fp8_ds_mla")
SCALE = 0.0123


def quantised(inputs: Inputs, kv_format: str) -> tuple[dict[str, object], Inputs]:
    """The call over the cache that ``append`` writes, and with the numbers that it then holds."""
    given: dict[str, object] = {"kv_cache_format": kv_format}
    if kv_format == "fp8":
        given["kv_scale"] = torch.tensor(SCALE, device="cuda")
    batch, seqlen_kv, _ = inputs.tokens.shape
    pages, page_size = inputs.c_kv.shape[:2]
    width = 576 if kv_format == "fp8" else 656
    kept = torch.full((pages, page_size, width), 0x7F, dtype=torch.uint8, device="cuda")
    assert inputs.page_table is not None
    assert inputs.seqlens_kv is not None
    positions = torch.arange(seqlen_kv, device="cuda").expand(batch, -1)
    found = inputs.page_table.clamp(0, pages - 1).long().gather(1, positions // page_size)
    slots = (found * page_size + positions % page_size).masked_fill(positions >= inputs.seqlens_kv[:, None], -1)
    cache.append(kept, inputs.tokens[..., :512], inputs.tokens[..., 512:], slots, **given)
    found = kept[found, positions % page_size]
    if kv_format == "fp8":
        tokens = found.view(torch.float8_e4m3fn).double() * float(torch.tensor(SCALE))
    else:  # its numbers are rounded to bfloat16, as those of gather are
        rows = cache.gather(kept, inputs.page_table, inputs.seqlens_kv, max_seqlen_kv=seqlen_kv, **given)
        tokens = torch.cat(rows, -1)
    return {"kv_cache": kept, **given}, replace(inputs, tokens=tokens)


def run(call: dict[str, object], inputs: Inputs, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q = {"q_nope_abs": inputs.q_nope_abs, "q_rope": inputs.q_rope}
    return mla_plugin.decode(**q, **call, **inputs.options(), causal=is_causal, return_lse=True, backend="triton")


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("heads", "seqlen_q", "page_size"), [(16, 1, 64), (128, 1, 64), (128, 2, 16), (7, 3, 1)])
def test_models(heads: int, seqlen_q: int, page_size: int, kv_format: str) -> None:
    """As good as PyTorch over the same numbers in bfloat16."""
    shape = (4, seqlen_q, heads, 512, 64, 2100)
    call, inputs = quantised(paged(shape, page_size, torch.bfloat16, [2100, 65, 0, 1000]), kv_format)
    out, lse = run(call, inputs, True)
    assert_as_good_as_pytorch(out, lse, inputs, True)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_graph_follows_the_cache_and_its_scale(heads: int, kv_format: str) -> None:
    shape, lengths = (5, 1, heads, 512, 64, 1500), [1500, 700, 64, 0, 9]  # of few rows four sequences: below
    call, inputs = quantised(paged(shape, 64, torch.bfloat16, lengths), kv_format)
    run(call, inputs, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(call, inputs, True)
    other_call, other = quantised(paged(shape, 64, torch.bfloat16, [5, 0, 1499, 1000, 1], seed=1), kv_format)
    assert inputs.page_table is not None
    assert inputs.seqlens_kv is not None
    for name in ("q_nope_abs", "q_rope", "page_table", "seqlens_kv"):
        getattr(inputs, name).copy_(getattr(other, name))
    call["kv_cache"].copy_(other_call["kv_cache"])
    if kv_format == "fp8":
        call["kv_scale"].mul_(0.5)
        other_call["kv_scale"] = call["kv_scale"].clone()
    graph.replay()
    wanted = run(other_call, other, True)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


def contiguous_cache(call: dict[str, object], inputs: Inputs) -> tuple[dict[str, object], Inputs]:
    """The same call over pages that are as long as the sequences, one for each, as a contiguous cache."""
    assert inputs.page_table is not None
    pages = inputs.page_table[:, 0].clamp(0, call["kv_cache"].shape[0] - 1).long()  # of empty sequences: any
    return {**call, "kv_cache": call["kv_cache"][pages]}, replace(inputs, page_table=None)


def few_rows(
    heads: int, seqlen_q: int, page_size: int | None, dtype: torch.dtype, lengths: list[int], seed: int = 0
) -> tuple[dict[str, object], Inputs]:
    """A call over e4m3 with few rows; page_size None: contiguous."""
    shape = (len(lengths), seqlen_q, heads, 512, 64, max(lengths))
    call, inputs = quantised(paged(shape, page_size or max(lengths), dtype, lengths, seed), "fp8")
    return (call, inputs) if page_size else contiguous_cache(call, inputs)


RAGGED = [2100, 65, 0, 1, 1000, 64, 63, 129]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [None, 64, 192, 1, 48])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 32])
def test_few_rows(heads: int, seqlen_q: int, page_size: int | None, dtype: torch.dtype) -> None:
    """On compute capability 9.0 up to 32 (query, head) pairs, in small pages up to 16, are the transposed kernel's."""
    call, inputs = few_rows(heads, seqlen_q, page_size, dtype, RAGGED)
    out, lse = run(call, inputs, True)
    assert_as_good_as_pytorch(out, lse, inputs, True)
    again = run(call, inputs, True)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


def out_of(call: dict[str, object], inputs: Inputs, is_causal: bool) -> torch.Tensor:
    """Without the log-sum-exp: on compute capability 9.0 more than 16 rows are then multiplied in e4m3."""
    q = {"q_nope_abs": inputs.q_nope_abs, "q_rope": inputs.q_rope}
    return mla_plugin.decode(**q, **call, **inputs.options(), causal=is_causal, backend="triton")


@pytest.fixture
def in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels over bytes, also where a call is so small that others are faster."""
    for rule in (transposed_rule, wide_rule):
        monkeypatch.setattr(rule, "TILES_OF_A_PART", 0)
    monkeypatch.setattr(decode_layout, "_known", {})


@pytest.mark.usefixtures("in_any_batch")
@pytest.mark.parametrize("page_size", [None, 64, 192])
@pytest.mark.parametrize(
    ("heads", "seqlen_q"), [(20, 1), (32, 1), (8, 4), (33, 1), (64, 1), (24, 4), (128, 1), (128, 2)]
)
def test_products_over_e4m3(heads: int, seqlen_q: int, page_size: int | None) -> None:
    call, inputs = few_rows(heads, seqlen_q, page_size, torch.bfloat16, RAGGED)
    out = out_of(call, inputs, True)
    assert_out_as_good_as_pytorch(out, inputs, True)
    assert torch.equal(out, out_of(call, inputs, True))
    assert torch.equal(out, out_of(call, as_engines_have_it(inputs), True))


@pytest.mark.usefixtures("in_any_batch")
@pytest.mark.parametrize("heads", [24, 64, 128])
@pytest.mark.parametrize("batch", [1, 3, 300])
def test_products_over_e4m3_in_batches_of_any_size(batch: int, heads: int) -> None:
    """Sequences in many parts, and many sequences in one; no mask of queries."""
    lengths = [(37 * b) % 700 + 3000 // batch for b in range(batch)]
    call, inputs = few_rows(heads, 1, 64, torch.bfloat16, lengths)
    assert_out_as_good_as_pytorch(out_of(call, inputs, False), inputs, False)


@pytest.mark.usefixtures("in_any_batch")
@pytest.mark.parametrize("heads", [32, 64])
def test_products_over_e4m3_of_unlike_sizes(heads: int) -> None:
    """Rows of unlike sizes, one of zeros, and rows with an element far above the others."""
    call, inputs = few_rows(heads, 1, 64, torch.bfloat16, [1000, 65])
    factors = torch.tensor([1e-30, 1e4, 1.0, 0.0], device="cuda").repeat(heads // 4)[:, None]
    q_nope_abs, q_rope = ((x.float() * factors).bfloat16() for x in (inputs.q_nope_abs, inputs.q_rope))
    q_nope_abs[:, :, 2::8, 7] = 300.0
    inputs = replace(inputs, q_nope_abs=q_nope_abs, q_rope=q_rope)
    out = out_of(call, inputs, False)
    for kind in range(4):
        some = replace(inputs, q_nope_abs=q_nope_abs[:, :, kind::4], q_rope=q_rope[:, :, kind::4])
        assert_out_as_good_as_pytorch(out[:, :, kind::4], some, False)


@pytest.mark.usefixtures("in_any_batch")
@pytest.mark.parametrize("heads", [32, 64, 128])
def test_a_captured_graph_of_products_over_e4m3(heads: int) -> None:
    """It follows lengths, the cache and its scale."""
    lengths, later = [1500, 700, 64, 0, 9], [5, 0, 1500, 1000, 64]
    call, inputs = few_rows(heads, 1, 64, torch.bfloat16, lengths)
    other_call, other = few_rows(heads, 1, 64, torch.bfloat16, later, seed=1)
    out_of(call, inputs, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = out_of(call, inputs, True)
    assert inputs.page_table is not None
    assert inputs.seqlens_kv is not None
    for name in ("q_nope_abs", "q_rope", "page_table", "seqlens_kv"):
        getattr(inputs, name).copy_(getattr(other, name))
    call["kv_cache"].copy_(other_call["kv_cache"])
    call["kv_scale"].mul_(0.5)
    other_call["kv_scale"] = call["kv_scale"].clone()
    graph.replay()
    assert torch.equal(out, out_of(other_call, other, True))


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("batch", [1, 3, 300])
def test_few_rows_in_batches_of_any_size(batch: int, heads: int) -> None:
    """Sequences in many parts, and many sequences in one; no mask of queries."""
    lengths = [(37 * b) % 700 + 3000 // batch for b in range(batch)]
    call, inputs = few_rows(heads, 1, 64, torch.bfloat16, lengths)
    out, lse = run(call, inputs, False)
    assert_as_good_as_pytorch(out, lse, inputs, False)


def test_few_rows_of_unlike_sizes() -> None:
    """Each row has its own power of 2; that of zeros gives the mean of its values, at any scale."""
    call, inputs = few_rows(16, 1, 64, torch.bfloat16, [1000, 65])
    factors = torch.tensor([1e-30, 1e4, 1.0, 0.0], device="cuda").repeat(4)[:, None]
    q_nope_abs, q_rope = ((x.float() * factors).bfloat16() for x in (inputs.q_nope_abs, inputs.q_rope))
    inputs = replace(inputs, q_nope_abs=q_nope_abs, q_rope=q_rope)
    out, lse = run(call, inputs, False)
    for kind in range(4):
        some = replace(inputs, q_nope_abs=q_nope_abs[:, :, kind::4], q_rope=q_rope[:, :, kind::4])
        assert_as_good_as_pytorch(out[:, :, kind::4], lse[:, kind::4], some, False)
    call["kv_scale"].fill_(1e-12)
    out, lse = run(call, inputs, False)
    assert out.isfinite().all()
    assert torch.allclose(lse[:, 3::4], torch.tensor([1000.0, 65.0], device="cuda").log()[:, None, None])


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize(("heads", "seqlen_q"), [(1, 1), (8, 4), (20, 1)])
def test_a_captured_graph_of_few_rows(heads: int, seqlen_q: int, page_size: int | None) -> None:
    """It follows lengths, the cache and its scale."""
    lengths, later = [1500, 700, 64, 0], [5, 0, 1500, 1000]
    call, inputs = few_rows(heads, seqlen_q, page_size, torch.bfloat16, lengths)
    run(call, inputs, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(call, inputs, True)
    other_call, other = few_rows(heads, seqlen_q, page_size, torch.bfloat16, later, seed=1)
    for name in ("q_nope_abs", "q_rope", "seqlens_kv") + (("page_table",) if page_size else ()):
        getattr(inputs, name).copy_(getattr(other, name))
    call["kv_cache"].copy_(other_call["kv_cache"])
    call["kv_scale"].mul_(0.5)
    other_call["kv_scale"] = call["kv_scale"].clone()
    graph.replay()
    wanted = run(other_call, other, True)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_left_padding_moves_no_bit_if_batch_invariant(kv_format: str, heads: int) -> None:
    """Gathered tiles that begin at any key; in the last sequence no key is left."""
    lengths, pads = [1500, 1499, 700, 300], [0, 101, 7, 300]
    call, inputs = quantised(paged((4, 2, heads, 512, 64, 1500), 1500, torch.bfloat16, lengths), kv_format)
    assert inputs.page_table is not None
    kept = call.pop("kv_cache")[inputs.page_table[:, 0].long()]  # a page for each sequence: contiguous
    more = {"softmax_scale": inputs.softmax_scale, "batch_invariant": True, "return_lse": True, "backend": "triton"}
    more |= {"causal": True, **call}
    ints = {"dtype": torch.int32, "device": "cuda"}
    out, lse = mla_plugin.decode(
        inputs.q_nope_abs,
        inputs.q_rope,
        kept,
        seqlens_kv=inputs.seqlens_kv,
        leftpad_kv=torch.tensor(pads, **ints),
        **more,
    )
    for b, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
        one = slice(b, b + 1)
        found = mla_plugin.decode(
            inputs.q_nope_abs[one],
            inputs.q_rope[one],
            kept[one, pad:],
            seqlens_kv=torch.tensor([length - pad], **ints),
            **more,
        )
        assert torch.equal(found[0][0], out[b])
        assert torch.equal(found[1][0], lse[b])


@pytest.mark.parametrize("heads", [8, 16, 24, 48, 128])
@pytest.mark.parametrize(("seqlen_q", "page_size"), [(1, 64), (2, 64), (4, 1), (3, 16)])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_batch_has_the_bits_of_its_queries_alone(kv_format: str, seqlen_q: int, page_size: int, heads: int) -> None:
    """The last keys, which are not seen by the first of several queries, begin a tile in half of the sequences."""
    lengths = [1500, 3, 0, 700, 65, 641, 130]
    shape = (len(lengths), seqlen_q, heads, 512, 64, max(lengths))
    call, inputs = quantised(paged(shape, page_size, torch.bfloat16, lengths), kv_format)
    more = {"softmax_scale": inputs.softmax_scale, "batch_invariant": True, "return_lse": True, "backend": "triton"}
    more |= {"causal": True, **call}
    assert inputs.page_table is not None
    assert inputs.seqlens_kv is not None
    out, lse = mla_plugin.decode(
        inputs.q_nope_abs, inputs.q_rope, page_table=inputs.page_table, seqlens_kv=inputs.seqlens_kv, **more
    )
    assert_as_good_as_pytorch(out, lse, inputs, True)
    for b in range(len(lengths)):
        for i in range(seqlen_q):
            one, query = slice(b, b + 1), slice(i, i + 1)
            found = mla_plugin.decode(
                inputs.q_nope_abs[one, query],
                inputs.q_rope[one, query],
                page_table=inputs.page_table[one],
                seqlens_kv=(inputs.seqlens_kv[one] - (seqlen_q - 1 - i)).clamp(min=0),
                **more,
            )
            assert torch.equal(found[0][0, 0], out[b, i])
            assert torch.equal(found[1][0, :, 0], lse[b, :, i])
