"""The decode kernels against float64: in Triton's interpreter without a GPU, compiled with one."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_plugin import DecodeTensors
from mla_plugin.arguments import decode_layout
from mla_plugin.kernels import mla_decode_attention
from mla_plugin.kernels.decode import descriptors as decode_descriptors
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.descriptors import CacheDescriptors
from tests.kernels.decode_cases import (
    DEVICE,
    DTYPES,
    Inputs,
    assert_as_good_as_pytorch,
    contiguous,
    paged,
    with_leftpad,
)

SHAPES = {
    "few_heads": (2, 1, 4, 64, 16, 200),
    "one_head": (1, 1, 1, 64, 16, 67),
    "odd_heads_speculative": (1, 3, 7, 128, 64, 130),
    "two_column_blocks": (2, 2, 20, 96, 0, 65),
    "padded_columns": (1, 2, 5, 40, 24, 33),
    "many_heads": (1, 2, 40, 64, 16, 129),
    "one_key": (2, 1, 16, 64, 16, 1),
    "fewer_keys_than_queries": (2, 4, 3, 32, 16, 2),
    "deepseek": (1, 1, 16, 512, 64, 70),
    "no_rope": (1, 1, 16, 512, 0, 40),
    "minicpm3": (1, 1, 40, 256, 32, 65),
}


@pytest.fixture(autouse=True)
def _nan_in_new_memory() -> Iterator[None]:
    """Outputs and the memory between the two kernels start as NaN: what is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def run(inputs: Inputs, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return mla_decode_attention(*inputs.tensors(), is_causal=is_causal, return_lse=True, **inputs.options())


def only_launches() -> decode_launch.Launches:
    """Of the one layout that was met."""
    (known,) = decode_layout._known.values()
    return known.kept["triton"]


def check(inputs: Inputs, is_causal: bool = False) -> None:
    assert_as_good_as_pytorch(*run(inputs, is_causal), inputs, is_causal)


@pytest.fixture(params=[1, 2, 5, 13])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: request.param)
    monkeypatch.setattr(decode_layout, "_known", {})
    return request.param


def describe_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptors need a tensor where those of a GPU need an address; all else is as on a GPU."""
    caches: dict[int, torch.Tensor] = {}
    make = CacheDescriptors.of

    def remember(self: CacheDescriptors, tensors: DecodeTensors) -> object:
        caches.update((x.data_ptr(), x) for x in (tensors.c_kv, tensors.k_rope))
        return make(self, tensors)

    def describe(
        address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
    ) -> TensorDescriptor:
        base = caches[address].as_strided(shape, (*strides, 1)).view(dtype)
        return TensorDescriptor(base, list(shape), [*strides, 1], list(block))

    monkeypatch.setattr(CacheDescriptors, "of", remember)
    monkeypatch.setattr(decode_descriptors, "descriptor", describe)


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read full tiles through tensor descriptors wherever the strides allow it."""
    if DEVICE == "cpu":
        describe_for_the_interpreter(monkeypatch)
    device = decode_launch.device_of(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"))
    if device.gpu_class == "Hopper":
        monkeypatch.setattr(decode_launch, "device_of", lambda _: device._replace(has_descriptors=True))
    monkeypatch.setattr(decode_launch, "_TILES_FOR_DESCRIPTORS", 0)
    monkeypatch.setattr(decode_layout, "_known", {})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_contiguous_cache(shape: tuple[int, ...], is_causal: bool, dtype: torch.dtype) -> None:
    check(contiguous(shape, dtype), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 7, 64, 256])
def test_paged_cache(page_size: int, is_causal: bool, parts: int) -> None:
    check(paged((3, 2, 7, 64, 16, 140), page_size, torch.float16, [140, 0, 1]), is_causal)


@pytest.mark.parametrize("page_size", [3, 64, 128])
def test_paged_cache_with_many_rows(page_size: int) -> None:
    """More (query, head) rows than a tile holds; the last tile is mostly padding."""
    check(paged((2, 4, 20, 64, 16, 150), page_size, torch.float16, [150, 3]), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_of_a_contiguous_cache(is_causal: bool, parts: int) -> None:
    """Rows beyond a length are NaN and have no influence."""
    check(contiguous((4, 3, 5, 64, 16, 140), torch.float32, [140, 0, 2, 65]), is_causal)


def test_two_column_blocks_over_parts(parts: int) -> None:
    check(paged((2, 1, 4, 96, 16, 140), 16, torch.float32, [140, 65]))


@pytest.mark.parametrize("rank", [40, 128, 512])
@pytest.mark.parametrize("batch", [1, 8, 66, 256])
def test_a_thread_of_the_combine_kernel_holds_at_most_128_elements(batch: int, rank: int) -> None:
    """Its programs hold a power of two of rows, pieces and columns, and cover every row and column once."""
    device = decode_launch.Device("Hopper", 132, True, True)
    for rows, parts, key_tiles in itertools.product((1, 16, 64, 512), (2, 66, 264), (1, 16, 512)):
        launch = decode_launch._combine_launch(device, batch, rows, 1, parts, key_tiles, rank, is_mixed=rank == 512)
        block_rows, block_r, pieces, is_mixed = launch.arguments[-5:-1]
        assert block_r >= 32 or not is_mixed
        assert block_rows & (block_rows - 1) == block_r & (block_r - 1) == pieces & (pieces - 1) == 0
        assert block_rows * block_r * pieces <= 128 * 32 * launch.options["num_warps"]
        assert launch.grid[0] == min(batch, parts) * -(-rows // block_rows)
        assert (launch.grid[1] - 1) * block_r < rank <= launch.grid[1] * block_r


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, 16, 264, 1024), (1, 32, 128, 1)),  # one sequence
        ((1, 64, 132, 512), (1, 64, 64, 1)),
        ((32, 16, 132, 512), (1, 128, 32, 1)),  # few rows, and a sequence may have many pieces
        ((1, 16, 132, 16), (8, 128, 16, 4)),  # few rows, but no sequence has more than 16
        ((8, 128, 66, 512), (8, 128, 16, 4)),
        ((32, 16, 132, 16), (8, 128, 16, 4)),
        ((33, 16, 132, 512), (8, 128, 16, 4)),  # more rows
        ((64, 16, 132, 512), (8, 128, 16, 4)),
        ((65, 16, 132, 512), (16, 128, 8, 4)),
        ((32, 128, 66, 512), (16, 128, 8, 4)),
        ((64, 128, 66, 2), (16, 128, 2, 1)),
        ((132, 1, 132, 4), (1, 128, 4, 1)),
    ],
    ids=str,
)
def test_programs_of_the_combine_kernel(given: tuple[int, int, int, int], expected: tuple[int, ...]) -> None:
    """Rows, columns, pieces and warps, as they were measured; given are entries, rows, parts and key tiles."""
    assert decode_launch._combine_shape(*given, 512) == expected


@pytest.mark.parametrize("pieces", [2, 16])
def test_more_pieces_than_a_step_of_the_combine_kernel(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence with keys for all parts, together with one with a single key."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: 37)
    monkeypatch.setattr(decode_launch, "_COMBINE_PIECES_OF_16_ROWS", pieces)
    monkeypatch.setattr(decode_layout, "_known", {})
    check(paged((2, 1, 2, 16, 0, 2500), 64, torch.float16, [2500, 1]))


def test_an_odd_number_of_elements_over_parts(parts: int) -> None:
    """The float32 values after the pieces' results start at a multiple of 4 bytes."""
    check(paged((1, 1, 1, 33, 16, 330), 16, torch.float16, [330]))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("page_size", [0, 7, 64])
def test_keys_at_the_start_that_no_query_sees(page_size: int, is_causal: bool, parts: int) -> None:
    """Up to all of them."""
    shape, lengths = (5, 2, 7, 64, 16, 140), [140, 139, 66, 1, 20]
    inputs = paged(shape, page_size, torch.float16, lengths) if page_size else contiguous(shape, torch.float16, lengths)
    check(with_leftpad(inputs, [1, 64, 65, 1, 30]), is_causal)


def test_leftpad_with_many_rows() -> None:
    check(with_leftpad(contiguous((2, 1, 40, 64, 16, 200), torch.float16), [0, 70]))


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("is_causal", [False, True])
# 130 keys: under a causal mask the first of four queries does not see all of the second tile
@pytest.mark.parametrize("shape", [(2, 1, 40, 64, 16, 200), (1, 4, 15, 96, 0, 130)])
@pytest.mark.parametrize("page_size", [0, 128, 16])
def test_tensor_descriptors(page_size: int, shape: tuple[int, ...], is_causal: bool) -> None:
    """Full tiles by descriptor, the last by pointers; pages smaller than a tile by pointers alone."""
    lengths = [shape[-1], 67][: shape[0]]
    in_pages = paged(shape, page_size or 1, torch.float16, lengths)
    inputs = in_pages if page_size else contiguous(shape, torch.float16, lengths)
    check(inputs, is_causal)
    if decode_launch.device_of(inputs.c_kv.device).gpu_class == "Hopper":
        assert (only_launches().described is not None) == (page_size != 16)


@pytest.mark.parametrize("page_size", [1, 5])
def test_gathered_tiles_of_a_large_batch(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capacity decides, which is that of the page table."""
    monkeypatch.setattr(decode_layout, "_known", {})
    inputs = paged((64, 1, 2, 512, 64, 70), page_size, torch.float16, [1 + 23 * b % 70 for b in range(64)])
    wide = torch.nn.functional.pad(inputs.page_table, (0, 3000), value=2**30)
    check(replace(inputs, page_table=wide))
    if decode_launch.device_of(inputs.c_kv.device) == decode_launch.Device("Hopper", 8, False, False, "fields"):
        attend = only_launches().rounds[0].attend
        constants = dict(zip(attend.kernel.arg_names[len(attend.given) :], attend.arguments, strict=True))
        assert (constants["BLOCK_N"], constants["STAGES"]) == (64, 3)


@pytest.mark.usefixtures("descriptors")
def test_layers_with_caches_of_one_layout() -> None:
    """Descriptors are kept by the addresses of both caches."""
    layers = [contiguous((1, 1, 40, 64, 16, 130), torch.float16, seed=seed) for seed in range(2)]
    c_kv, k_rope = ([getattr(layer, name).contiguous() for layer in layers] for name in ("c_kv", "k_rope"))
    for n, m in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 0)):
        tokens = torch.cat([c_kv[n], k_rope[m]], -1)
        check(replace(layers[0], c_kv=c_kv[n], k_rope=k_rope[m], tokens=tokens))
    if decode_launch.device_of(c_kv[0].device).gpu_class == "Hopper":
        assert len(only_launches().described.made) == 4


@pytest.mark.usefixtures("descriptors")
def test_descriptors_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may reallocate its cache repeatedly."""
    monkeypatch.setattr(decode_descriptors, "MAX_CACHES", 2)
    layers = [contiguous((1, 1, 40, 64, 16, 130), torch.float16, seed=seed) for seed in range(5)]
    for layer in layers:
        check(layer)
        assert len(only_launches().described.made) <= 2


@pytest.mark.usefixtures("descriptors")
def test_tensor_descriptors_over_parts(parts: int) -> None:
    check(paged((2, 1, 40, 64, 16, 200), 64, torch.float16, [200, 64]))


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("rank", [64, 96])
def test_tiles_whose_scores_are_all_minus_infinity(rank: int, parts: int) -> None:
    """Before any other and after one, read by descriptors; such a key weighs nothing."""
    inputs = contiguous((1, 1, 40, rank, 16, 330), torch.float16)
    inputs.q_rope.abs_().clamp_min_(0.1)
    for tile in (0, 2):
        for rope in (inputs.k_rope, inputs.tokens[..., rank:]):
            rope[:, 64 * tile : 64 * tile + 64] = -torch.inf
    check(inputs)


@pytest.mark.usefixtures("descriptors")
def test_strides_that_descriptors_cannot_take() -> None:
    inputs = contiguous((1, 2, 40, 64, 17, 130), torch.float16)
    check(inputs)
    assert only_launches().described is None


def test_a_length_beyond_the_cache_counts_as_all_of_it() -> None:
    """Below the check of values, which looks at nothing on a device that it would have to wait for."""
    inputs = contiguous((2, 1, 4, 64, 16, 70), torch.float32)
    too_long = torch.tensor([70, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    tensors = DecodeTensors(*inputs.tensors(), inputs.softmax_scale, seqlens_kv=too_long)
    out, _ = decode_launch.decode(tensors, decode_layout.known_of(tensors))
    assert torch.equal(out, run(inputs, False)[0])


@pytest.mark.parametrize("page_size", [0, 64])
def test_lengths_and_padding_at_the_ends_of_int32(page_size: int, parts: int) -> None:
    """Such rows see no key, nothing overflows, and no page of theirs is looked up."""
    shape, lengths = (4, 8, 20, 64, 16, 70), [70, 60, 50, 70]  # several row tiles: not all see the last key
    inputs = paged(shape, page_size, torch.float16, lengths) if page_size else contiguous(shape, torch.float16, lengths)
    wanted = run(inputs, True)
    ends = torch.tensor([-(2**31), 60, -1, 70], dtype=torch.int32, device=DEVICE)
    pads = None
    if not page_size:
        pads = torch.tensor([2**31 - 1, 0, 0, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    pages = inputs.page_table
    if pages is not None:
        pages = pages.clone()
        pages[[0, 2]] = 2**30
    tensors = DecodeTensors(*inputs.tensors(), inputs.softmax_scale, True, True, pages, ends, leftpad_kv=pads)
    out, lse = decode_launch.decode(tensors, decode_layout.known_of(tensors))
    assert torch.equal(out[1], wanted[0][1])
    for b in (0, 2) if page_size else (0, 2, 3):
        assert not out[b].any()
        assert lse is not None
        assert lse[b].isneginf().all()


def strided(x: torch.Tensor, *order: int) -> torch.Tensor:
    """The same values, stored in another order of the dimensions."""
    inverse = [order.index(i) for i in range(len(order))]
    return x.permute(order).contiguous().permute(inverse)


@pytest.mark.parametrize("is_causal", [False, True])
def test_any_strides(is_causal: bool) -> None:
    inputs = contiguous((3, 2, 7, 64, 16, 90), torch.float16)
    q_nope_abs, q_rope, c_kv, k_rope = inputs.tensors()
    expected = run(inputs, is_causal)
    tensors = (
        strided(q_nope_abs, 2, 0, 1, 3),
        strided(q_rope, 1, 2, 0, 3),
        strided(c_kv, 1, 0, 2),
        k_rope.contiguous(),
    )
    found = mla_decode_attention(*tensors, is_causal=is_causal, return_lse=True, **inputs.options())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_heads_far_apart() -> None:
    """The last head is 2**31 elements behind the first one or more. Memory that nothing touches takes no space."""
    inputs = contiguous((1, 2, 3, 64, 16, 90), torch.float16)
    expected = mla_decode_attention(*inputs.tensors(), **inputs.options())
    queries = []
    for x in inputs.tensors()[:2]:
        apart = 2**30 + 8
        elements = 2 * apart + x[:, :, 0].numel()
        memory = torch.from_numpy(np.empty(elements, np.float16)).to(DEVICE)  # torch.empty would fill it with NaN here
        far = memory.as_strided(x.shape, (1, x.shape[3], apart, 1))
        queries.append(far.copy_(x))
    found = mla_decode_attention(*queries, *inputs.tensors()[2:], **inputs.options())
    assert torch.equal(found, expected)


def test_one_cache_for_all_sequences_and_a_cut_one() -> None:
    """Stride 0 over the batch; a cache cut from a longer and wider buffer, at an odd address."""
    inputs = contiguous((3, 1, 4, 64, 16, 90), torch.float16)
    buffer = torch.full((4, 100, 95), torch.nan, dtype=torch.float16, device=DEVICE)
    buffer[:3, 3:93, 5:85] = inputs.tokens
    cut = buffer[:3, 3:93, 5:85]
    found = mla_decode_attention(*inputs.tensors()[:2], cut[..., :64], cut[..., 64:], **inputs.options())
    assert torch.equal(found, run(inputs, False)[0])
    shared = inputs.tokens[:1].expand(3, -1, -1)
    found = mla_decode_attention(*inputs.tensors()[:2], shared[..., :64], shared[..., 64:], **inputs.options())
    copied = shared.contiguous()
    expected = mla_decode_attention(*inputs.tensors()[:2], copied[..., :64], copied[..., 64:], **inputs.options())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(0, 1, 4, 64, 16, 8), (2, 0, 4, 64, 16, 8), (2, 1, 0, 64, 16, 8)])
def test_nothing_to_compute(shape: tuple[int, ...]) -> None:
    inputs = contiguous(shape, torch.float16)
    out, lse = run(inputs, True)
    assert out.shape == (*shape[:3], 64)
    assert lse.shape == (shape[0], shape[2], shape[1])


def test_an_empty_cache_gives_zeros() -> None:
    """S_kv 0, and a page table without columns."""
    empty = contiguous((2, 1, 4, 64, 16, 0), torch.float16)
    check(empty)
    no_pages = paged((2, 1, 4, 64, 16, 0), 16, torch.float16, [0, 0])
    out, lse = run(no_pages, False)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_launches_are_reused_with_other_values(parts: int) -> None:
    """Same layout, other queries, cache, table and lengths."""
    for seed, lengths in ((0, [130, 5]), (1, [64, 129]), (2, [0, 1])):
        check(paged((2, 1, 4, 64, 16, 130), 16, torch.float32, lengths, seed))
    assert len(decode_layout._known) == 1


def test_layouts_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contiguous cache grows by a token a step, so its layout is new at every step."""
    monkeypatch.setattr(decode_layout, "_known", {})
    monkeypatch.setattr(decode_layout, "_MAX_LAYOUTS", 2)
    for seqlen_kv in range(1, 6):
        check(contiguous((1, 1, 2, 32, 16, seqlen_kv), torch.float32))
    assert 1 <= len(decode_layout._known) <= 2


def test_nan_in_a_row_that_is_seen_shows() -> None:
    inputs = contiguous((2, 1, 4, 64, 16, 70), torch.float32)
    inputs.c_kv[1, 3] = torch.nan
    out, _ = run(inputs, False)
    assert not out[0].isnan().any()
    assert out[1].isnan().all()


def test_two_runs_agree_bit_for_bit(parts: int) -> None:
    inputs = paged((2, 2, 7, 64, 16, 200), 16, torch.float16, [200, 77])
    first, second = run(inputs, True), run(inputs, True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
