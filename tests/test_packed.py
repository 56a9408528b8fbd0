"""Calls laid end to end and back, with the real kernel that fills gaps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_plugin.arguments.layout import LAYOUTS, addressable
from mla_plugin.conformance import Case
from mla_plugin.kernels.prefill import padding
from mla_plugin.plugins.shared.packed import Rows


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "_PROGRAMS", 1)


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd"])
def test_a_dense_batch_with_lengths_is_laid_end_to_end(qkv_format: str) -> None:
    case = Case("", qkv_format, torch.float32, (2, 0, 5), (3, 1, 4), (6,) * 3, (4,) * 3, attn_mask_type="padding")
    request, tensors = case.request(), case.tensors()
    rows = Rows.of(request, tensors)
    assert rows.q is not None
    assert rows.kv is not None
    assert rows.q.starts.tolist() == [0, 6, 12, 18]
    assert rows.q.lengths.tolist() == [2, 0, 5]
    assert rows.kv.starts.tolist() == [0, 4, 8, 12]
    assert rows.q.starts.dtype == rows.q.lengths.dtype == torch.int32
    q = rows.of_tensor(tensors.q)
    assert q.shape == (18, 3, 192)
    back = rows.queries(q.clone())
    padded = case.is_padding("q").expand_as(tensors.q)
    assert torch.equal(back[~padded], tensors.q[~padded])
    assert not back[padded].any()

    lse = torch.randn(3, 3, 6)
    of_kernel = rows.of_lse(lse)
    assert of_kernel.shape == (3, 18)
    assert of_kernel.is_contiguous()
    of_kernel[:, 0] = torch.inf
    found = rows.lse(of_kernel)
    visible = ~LAYOUTS[qkv_format].to_bhsd(case.is_padding("q"))[..., 0].expand(3, 3, 6)
    assert found[0, :, 0].isneginf().all()
    assert torch.equal(found[0, :, 1], lse[0, :, 1])
    assert found[~visible].isneginf().all()


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd"])
def test_a_dense_batch_without_lengths_stays_as_it_is(qkv_format: str) -> None:
    case = Case("", qkv_format, torch.float32, (5, 5), (7, 7), attn_mask_type="no_mask")
    request, tensors = case.request(), case.tensors()
    rows = Rows.of(request, tensors)
    assert rows.q is rows.kv is None
    q = rows.of_tensor(tensors.q)
    assert q.shape == (2, 5, 3, 192)
    assert q.data_ptr() == tensors.q.data_ptr()
    assert torch.equal(rows.queries(q), tensors.q)
    laid = Rows.of(request, tensors, takes_dense=False)
    assert laid.q is not None
    assert laid.q.lengths is None
    assert laid.of_tensor(tensors.q).shape == (10, 3, 192)
    assert torch.equal(laid.queries(laid.of_tensor(tensors.q).clone()), tensors.q)


def test_packed_sequences_are_described_twice_only_where_they_have_padding() -> None:
    case = Case("", "thd", torch.float32, (2, 3), (2, 3), (4, 4), (4, 4), attn_mask_type="padding")
    rows = Rows.of(case.request(), case.tensors())
    assert rows.q is not None
    assert (rows.q.starts.tolist(), rows.q.lengths.tolist()) == ([0, 4, 8], [2, 3])
    case = Case("", "thd", torch.float32, (2, 3), (2, 3), tail=2, attn_mask_type="padding")
    rows = Rows.of(case.request(), case.tensors())
    assert rows.kv is not None
    assert (rows.kv.starts.tolist(), rows.kv.lengths) == ([0, 2, 5], None)
    x = rows.keys(torch.ones(7, 3, 8))
    assert (x[:5] == 1).all()
    assert not x[5:].any()


def test_padded_offsets_without_padding_between_sequences_end_with_the_tail() -> None:
    """The last sequence ends before it, also for kernels that know no true lengths."""
    case = Case("", "thd", torch.float32, (2, 3), (2, 3), tail=2, attn_mask_type="padding")
    places = torch.tensor([0, 2, 7], dtype=torch.int32)
    tensors = replace(case.tensors(), cu_seqlens_q_padded=places, cu_seqlens_kv_padded=places)
    rows = Rows.of(case.request(), tensors)
    for side in (rows.q, rows.kv):
        assert side is not None
        assert (side.starts.tolist(), side.lengths) == ([0, 2, 5], None)


@pytest.mark.parametrize(
    ("case", "side", "is_copy"),
    [
        (Case("", "thd", torch.bfloat16, (2, 3), (2, 3), (4, 4), (4, 4), attn_mask_type="padding"), "kv", True),
        (Case("", "thd", torch.bfloat16, (2, 3), (2, 3), tail=2, attn_mask_type="padding"), "q", True),
        (Case("", "bshd", torch.bfloat16, (2, 3), (5, 3), (6, 6), (6, 6), attn_mask_type="padding"), "kv", True),
        (Case("", "sbhd", torch.bfloat16, (2, 3), (5, 3), (6, 6), (6, 6), attn_mask_type="padding"), "q", True),
        (Case("", "bshd", torch.bfloat16, (5, 5), (7, 7), attn_mask_type="causal"), "kv", False),
    ],
)
def test_clean_rows_are_copies_only_where_there_may_be_gaps(case: Case, side: str, is_copy: bool) -> None:
    """NaN outside the sequences becomes 0 in the copy and stays where it is in the caller's tensor."""
    request, tensors = case.request(), case.tensors(padding_poison=torch.nan)
    given = tensors.q if side == "q" else tensors.k
    before = given.clone()
    rows = Rows.of(request, tensors)
    clean = rows.clean_queries(given) if side == "q" else rows.clean_keys(given)
    assert torch.equal(given.nan_to_num(9.0), before.nan_to_num(9.0))
    assert (clean.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()) == is_copy
    assert torch.equal(clean, rows.of_tensor(given).nan_to_num(0.0))
    if is_copy:
        assert given.isnan().any()
    assert addressable(clean) is clean


def test_dense_rows_laid_end_to_end_have_no_gaps() -> None:
    """For a kernel that takes packed sequences only: nothing is copied."""
    case = Case("", "bshd", torch.bfloat16, (5, 5), (7, 7), attn_mask_type="causal")
    request, tensors = case.request(), case.tensors()
    rows = Rows.of(request, tensors, takes_dense=False)
    assert rows.kv is not None
    assert rows.clean_keys(tensors.v).data_ptr() == tensors.v.data_ptr()
    assert rows.clean_queries(tensors.q).data_ptr() == tensors.q.data_ptr()


def test_rows_that_are_a_copy_already_are_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("", "thd", torch.bfloat16, (2, 3), (2, 3), tail=2, attn_mask_type="padding", storage="expanded_heads")
    request, tensors = case.request(), case.tensors(padding_poison=torch.nan)
    rows = Rows.of(request, tensors)
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_, **__: pytest.fail("contiguous() has copied it"))
    assert not rows.clean_keys(tensors.v).isnan().any()


def test_addressable_copies_only_what_hardware_cannot_read() -> None:
    x = torch.zeros(4, 6, 64, dtype=torch.bfloat16)
    assert addressable(x) is x
    assert addressable(x.transpose(0, 1)).data_ptr() == x.data_ptr()
    for bad in (x[..., 4:], x[..., :1].expand(4, 6, 64), x[:, :1].expand(4, 6, 64), x[..., ::2]):
        copy = addressable(bad)
        assert copy.is_contiguous()
        assert torch.equal(copy, bad)


def test_addressable_copies_memory_that_another_library_starts_off_a_boundary() -> None:
    memory = bytearray(4 * 64 * 2 + 32)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for offset in (0, 2, 8):
        x = torch.frombuffer(memory, dtype=torch.bfloat16, offset=-start % 16 + offset, count=4 * 64).view(4, 64)
        assert x.storage_offset() == 0
        assert (addressable(x) is x) == (offset == 0)
        assert addressable(x).data_ptr() % 16 == 0
