"""Shapes, strides and sizes of every layout, as the kernels' launchers see them."""

import dataclasses
import itertools

import pytest
import torch

import mla_plugin
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.arguments.mask import Band
from mla_plugin.kernels import tiles
from mla_plugin.kernels.prefill import launch_backward as prefill_backward
from mla_plugin.kernels.prefill import launch_forward as prefill
from mla_plugin.kernels.prefill import packing
from mla_plugin.kernels.prefill.packing import WIDE_STRIDE, Kind, Packing
from tests.kernels.prefill_oracle import Call

B, S, H, D = 2, 5, 3, 8
SHAPES = {"bshd": (B, S, H, D), "sbhd": (S, B, H, D), "bhsd": (B, H, S, D), "thd": (7, H, D)}
CU = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
CU_PADDED = torch.tensor([0, 3, 4, 7], dtype=torch.int32)


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("bshd", (S * H * D, D, H * D)),
        ("sbhd", (H * D, D, B * H * D)),
        ("bhsd", (H * S * D, S * D, D)),
        ("thd", (0, D, H * D)),
    ],
)
def test_strides_are_those_of_sequence_head_and_token(layout: str, strides: tuple[int, int, int]) -> None:
    x = torch.empty(SHAPES[layout])
    assert LAYOUTS[layout].pick(x.stride()) == strides
    assert LAYOUTS[layout].contiguous_strides(x.shape) == strides


def test_strides_of_a_slice_are_its_own() -> None:
    x = torch.empty(B, 2 * S, H, 2 * D)[:, ::2, :, :D]
    assert LAYOUTS["bshd"].pick(x.stride()) == (x.stride(0), x.stride(2), x.stride(1))
    assert LAYOUTS["bshd"].contiguous_strides(x.shape) == (S * H * D, D, H * D)


def kind(q: torch.Tensor, k: torch.Tensor, how: Packing) -> Kind:
    return Kind.of(q, k, k, 0.5, how)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_a_dense_batch_is_covered_whole_however_long_its_sequences_are(layout: str) -> None:
    q = torch.empty(SHAPES[layout])
    for longest in (S, 2):
        found = kind(q, q, Packing(layout, longest, longest, CU, CU))
        assert (found.num_sequences, found.num_heads, found.num_kv_heads) == (B, H, H)
        assert (found.seqlen_q, found.seqlen_kv) == (S, S)


def test_sizes_of_packed_sequences_come_from_the_lengths() -> None:
    q, k = torch.empty(7, 6, D), torch.empty(9, 2, D)
    found = kind(q, k, Packing("thd", 3, 4, cu_seqlens_q=CU, cu_seqlens_kv=CU))
    assert (found.num_sequences, found.num_heads, found.num_kv_heads) == (3, 6, 2)
    assert (found.seqlen_q, found.seqlen_kv) == (3, 4)


def test_sequences_start_at_the_true_lengths_unless_padded_offsets_say_otherwise() -> None:
    plain = Packing("thd", 3, 3, cu_seqlens_q=CU, cu_seqlens_kv=CU + 1)
    assert plain.offsets() == (plain.cu_seqlens_q, plain.cu_seqlens_kv, plain.cu_seqlens_q, plain.cu_seqlens_kv)
    padded = Packing("thd", 3, 3, CU, CU + 1, cu_seqlens_q_padded=CU_PADDED)
    assert padded.offsets() == (CU, padded.cu_seqlens_kv, CU_PADDED, padded.cu_seqlens_kv)
    assert Packing("bshd", 3, 3).offsets() == (None,) * 4


def test_what_a_launch_is_cached_on_holds_every_mask_argument() -> None:
    q, k = torch.empty(SHAPES["thd"]), torch.empty(SHAPES["thd"])
    changes = ({}, {"max_seqlen_q": 5}, {"max_seqlen_kv": 4}, {"mask": Band(2, -1, False)})
    plain = Packing("thd", 4, 5, CU, CU)
    masks = ({"mask": Band(-1, 2, False)}, {"mask": Band(-1, -1, True)})
    kinds = {kind(q, k, dataclasses.replace(plain, **change)) for change in (*changes, *masks)}
    assert len(kinds) == 6


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (3, 4), (4, 3), (5, 2), (2, 5)])
def test_whether_every_query_sees_a_key_is_known_from_the_shapes(
    seqlen_q: int, seqlen_kv: int, bottom_right: bool
) -> None:
    q, k = torch.empty(1, seqlen_q, 1, 8), torch.empty(1, seqlen_kv, 1, 8)
    for left in range(-1, 6):
        for right in range(-1, 6):
            how = Packing("bshd", seqlen_q, seqlen_kv, mask=Band(left, right, bottom_right))
            call = Call("bshd", (0,), (0,), (seqlen_q,), (seqlen_kv,), left, right, bottom_right, 0.5)
            assert kind(q, k, how).shapes_show_every_query_a_key == bool(call.seen(0).any(1).all())
    lengths = torch.tensor([0, 1], dtype=torch.int32)
    assert not kind(q, k, Packing("bshd", seqlen_q, seqlen_kv, lengths, lengths)).shapes_show_every_query_a_key


@pytest.mark.parametrize("mask", [Band(*mask) for mask in itertools.product((-1, 0, 2), (-1, 0, 2), (False, True))])
def test_rows_are_masked_where_lengths_allow_that_one_sees_no_key(mask: Band) -> None:
    """Of a sequence without keys nothing is read at all."""
    q = torch.empty(SHAPES["thd"])
    lengths = range(1, 6)
    unequal = Packing("thd", 5, 5, CU, CU, mask=mask)
    some_miss = any(not mask.shows_every_query_a_key(m, n) for m in lengths for n in lengths)
    assert kind(q, q, unequal).some_query_may_see_no_key == some_miss
    equal = dataclasses.replace(unequal, same_lengths=True)
    assert all(mask.shows_every_query_a_key(n, n) for n in lengths)
    assert not kind(q, q, equal).some_query_may_see_no_key
    padded = dataclasses.replace(equal, qkv_format="bshd")
    assert kind(torch.empty(SHAPES["bshd"]), torch.empty(SHAPES["bshd"]), padded).some_query_may_see_no_key


def test_a_window_beyond_every_token_is_none() -> None:
    """The kernels add windows to positions in int32, where 2**31 - 1 would come out negative."""
    for furthest in (9, 2**31 - 1, 2**40):
        assert Packing("bshd", 4, 5, mask=Band(furthest, furthest, True)).band == (-1, -1, True)
    assert Packing("bshd", 4, 5, mask=Band(8, 8, False)).band == (8, 8, False)


def test_room_for_the_results_of_a_dense_batch() -> None:
    dense = Packing("bshd", S, S)
    q = torch.empty(SHAPES["bshd"], dtype=torch.float16)
    lse = packing.lse_like(q, dense.layout)
    assert lse.shape == (B, H, S)
    assert lse.dtype == torch.float32
    assert kind(q, q, dense).lse_strides == lse.stride()[:2]
    out = packing.output_like(q, 4, dense.layout)
    assert out.shape == (B, S, H, 4)
    assert out.dtype == torch.float16


def test_results_of_tokens_outside_of_all_packed_sequences_are_there_from_the_start() -> None:
    thd = Packing("thd", 3, 3, CU, CU)
    q = torch.full((7, H, D), torch.nan)
    lse = packing.lse_like(q, thd.layout)
    assert torch.equal(lse, torch.full((H, 7), -torch.inf))
    assert kind(q, q, thd).lse_strides == (0, lse.stride(0))
    assert torch.equal(packing.output_like(q, 4, thd.layout), torch.zeros(7, H, 4))


def test_a_token_stride_that_int32_offsets_do_not_reach_is_wide() -> None:
    narrow, wide = (2**40, 2**40, WIDE_STRIDE - 1), (0, 8, WIDE_STRIDE)
    assert not packing.is_wide(narrow)
    assert packing.is_wide(narrow, wide)


def test_the_widest_tile_of_an_unwide_stride_stays_within_int32() -> None:
    rows = max(max(tile[:2]) for table in tiles.TABLES.values() for found in table.values() for _, tile in found)
    assert rows * WIDE_STRIDE <= 2**31


def test_only_float32_products_are_exact() -> None:
    assert packing.dot_precision(torch.float32) == "ieee"
    assert packing.dot_precision(torch.bfloat16) == packing.dot_precision(torch.float16) == "tf32"


def test_options_of_a_launch_name_the_registers_only_when_they_are_limited() -> None:
    assert packing.launch_options(tiles.Tile(64, 32, 4, 2)) == {"num_warps": 4, "num_stages": 2}
    assert packing.launch_options(tiles.Tile(64, 32, 8, 3, 255)) == {"num_warps": 8, "num_stages": 3, "maxnreg": 255}


class TestAlignedRows:
    """As on Hopper, simulated on the CPU."""

    @pytest.fixture(autouse=True)
    def _on_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packing, "gpu_class_of", lambda device: "Hopper")

    @pytest.mark.parametrize("shape", [(B, S, 2, 24), (B, S, 2, 16), (9, 2, 8), (0, 2, 24)])
    @pytest.mark.parametrize(("offset", "gap"), [(0, 0), (0, 8), (1, 3), (1, 16), (8, 16)])
    def test_a_copy_has_them(self, shape: tuple[int, ...], offset: int, gap: int) -> None:
        *rows, width = shape
        buffer = torch.randn(offset + torch.Size(rows).numel() * (width + gap), dtype=torch.bfloat16)
        x = buffer[offset:].view(*rows, width + gap)[..., :width]
        found = packing.with_aligned_rows(x)
        assert torch.equal(found, x)
        assert found.data_ptr() % 16 == 0
        assert all(stride % 16 == 0 for stride in found.stride()[:-1])
        assert found.stride(-1) == 1

    @pytest.mark.parametrize("layout", ["contiguous", "sliced", "transposed", "expanded"])
    def test_what_has_them_is_not_copied(self, layout: str) -> None:
        x = torch.randn(B, S, 4, 48, dtype=torch.float16)
        views = {"contiguous": x, "sliced": x[..., 16:40], "transposed": x.transpose(1, 2), "expanded": x[:, :, :1]}
        view = views[layout].expand(B, S, 4, 48) if layout == "expanded" else views[layout]
        assert packing.with_aligned_rows(view) is view

    def test_float32_is_not_copied(self) -> None:
        x = torch.randn(B, S, 3, 24)
        assert packing.with_aligned_rows(x) is x

    def test_no_other_gpu_class_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packing, "gpu_class_of", lambda device: "163 KiB")
        x = torch.randn(B, S, 3, 24, dtype=torch.bfloat16)
        assert packing.with_aligned_rows(x) is x

    def test_both_passes_read_the_copies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernels see rows in steps of 16 elements, and the results are those of the originals."""
        seen = []
        original = packing._are_aligned
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = (torch.randn(1, 9, 3, width, generator=generator).half() for width in (24, 24, 40, 40))
        how = Packing("bshd", 9, 9, mask=Band(-1, 0, False))

        def run() -> list[torch.Tensor]:
            out, lse = prefill.forward(q, k, v, 0.2, how)
            return [out, lse, *prefill_backward.backward(q, k, v, out, lse, dout, None, 0.2, how)]

        for module, name in ((prefill, "_forward_launch"), (prefill_backward, "_delta_launch")):
            function = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, function=function: seen.append(a[0]) or function(*a))
        found = run()
        of_forward, of_backward = seen
        strides = [three for kind in (of_forward, of_backward.call) for three in kind[6:9]] + [of_backward.dout_strides]
        assert len(strides) == 7
        assert all(original(three[:-1]) for three in strides)
        monkeypatch.setattr(packing, "gpu_class_of", lambda device: tiles.INTERPRETED)
        for x, expected in zip(found, run(), strict=True):
            assert torch.equal(x, expected)


def test_a_call_that_is_like_an_earlier_one_finds_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds of calls are worked out once; other strides, or memory that is not aligned, are other calls."""
    worked_out = []
    kind_of = Kind.of
    monkeypatch.setattr(Kind, "of", lambda *arguments: worked_out.append(1) or kind_of(*arguments))
    memory = torch.randn(4 * 2 * 24 + 2)
    q, aligned, shifted = torch.randn(1, 4, 2, 24), memory[:-2].view(1, 4, 2, 24), memory[1:-1].view(1, 4, 2, 24)
    strided = torch.randn(1, 4, 4, 24)[:, :, ::2]
    v = torch.randn(1, 4, 2, 16)
    for k, times in ((q, 1), (aligned, 1), (q, 1), (shifted, 2), (strided, 3), (strided, 3)):
        out = mla_plugin.attention(q, k, v, backend="triton")
        torch.testing.assert_close(out, mla_plugin.attention(q, k, v, backend="sdpa"), rtol=1e-4, atol=1e-5)
        assert len(worked_out) == times
