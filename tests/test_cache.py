"""The cache helpers against a plain loop; their kernels on a GPU, elsewhere in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mla_plugin import DecodeLengths, cache
from mla_plugin.kernels.decode import cache as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES = 11
RANK, ROPE = 24, 8
Pair = tuple[torch.Tensor, torch.Tensor]


def pages_of(page_size: int, dtype: torch.dtype = torch.float32, rope: int = ROPE) -> torch.Tensor:
    return torch.randn(PAGES, page_size, RANK + rope).to(DEVICE, dtype)


def tokens_of(*size: int, dtype: torch.dtype = torch.float32, rope: int = ROPE) -> Pair:
    x = torch.randn(*size, RANK + rope).to(DEVICE, dtype)
    return x[..., :RANK], x[..., RANK:]


def by_kernel(kv_cache: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor, slots: torch.Tensor) -> None:
    pair = kv_cache[..., :RANK], kv_cache[..., RANK:]
    kernels.append(*pair, c_kv, k_rope, slots)


@pytest.mark.parametrize("append", [cache.append, by_kernel])
@pytest.mark.parametrize("page_size", [1, 3, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rope", [0, ROPE])
def test_append(append: Callable[..., None], page_size: int, dtype: torch.dtype, rope: int) -> None:
    kv_cache = pages_of(page_size, dtype, rope)
    expected = kv_cache.clone()
    tokens = min(9, PAGES * page_size)
    c_kv, k_rope = tokens_of(tokens, dtype=dtype, rope=rope)
    slots = torch.randperm(PAGES * page_size)[:tokens].to(DEVICE)
    slots[tokens // 2] = -1
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // page_size, slot % page_size] = torch.cat([c_kv[token], k_rope[token]])
    append(kv_cache, c_kv, k_rope, slots)
    assert torch.equal(kv_cache, expected)


def test_append_to_a_pair_of_caches_and_from_a_batch() -> None:
    pair = (torch.zeros(PAGES, 4, RANK, device=DEVICE), torch.zeros(PAGES, 4, ROPE, device=DEVICE))
    c_kv, k_rope = tokens_of(2, 3)
    slots = torch.tensor([[5, 6, 7], [43, 0, 20]], device=DEVICE)
    cache.append(pair, c_kv, k_rope, slots)
    for b in range(2):
        for i in range(3):
            page, row = divmod(int(slots[b, i]), 4)
            assert torch.equal(pair[0][page, row], c_kv[b, i])
            assert torch.equal(pair[1][page, row], k_rope[b, i])
    assert int((pair[0].abs().sum(-1) > 0).sum()) == 6


def test_the_kernel_leaves_slots_that_do_not_exist_alone() -> None:
    kv_cache = pages_of(4)
    before = kv_cache.clone()
    wrong = torch.tensor([PAGES * 4, 2**40, -(2**40)], device=DEVICE)
    by_kernel(kv_cache, *tokens_of(3), wrong)
    assert torch.equal(kv_cache, before)


def test_slots_in_a_column_of_a_table() -> None:
    table = torch.tensor([[5, 0], [9, 1], [2, 3]], device=DEVICE)
    kv_cache, tokens = pages_of(4), tokens_of(3)
    expected = kv_cache.clone()
    by_kernel(expected, *tokens, table[:, 0].contiguous())
    cache.append(kv_cache, *tokens, table[:, 0])
    assert torch.equal(kv_cache, expected)


def test_append_gives_the_kernel_slots_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    monkeypatch.setattr(kernels, "append", lambda *arguments: found.append(arguments[-1]))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cache.append(pages_of(4), *tokens_of(3), torch.tensor([[5, 0], [9, 1], [2, 3]], device=DEVICE)[:, 0])
    (slots,) = found
    assert slots.stride() == (1,)
    assert slots.tolist() == [5, 9, 2]


def test_append_nothing() -> None:
    kv_cache = pages_of(4)
    before = kv_cache.clone()
    cache.append(kv_cache, *tokens_of(0), torch.empty(0, dtype=torch.int64, device=DEVICE))
    by_kernel(kv_cache, *tokens_of(0), torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(kv_cache, before)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 44, 1], r"slot_mapping has \[44\]; the cache has slots 0 to 43"),
        ([7, 3, 7], r"has \[7\] more than once"),
    ],
)
def test_a_wrong_slot_is_an_error(slots: list[int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLUGIN_CHECK", "1")
    kv_cache = pages_of(4)
    before = kv_cache.clone()
    with pytest.raises(IndexError, match=message):
        cache.append(kv_cache, *tokens_of(3), torch.tensor(slots, device=DEVICE))
    assert torch.equal(kv_cache, before)


def test_append_says_what_does_not_fit() -> None:
    kv_cache, slots = pages_of(4), torch.arange(3, device=DEVICE)
    c_kv, k_rope = tokens_of(3)
    with pytest.raises(TypeError, match=r"slot_mapping is torch\.int32 .*int64 on"):
        cache.append(kv_cache, c_kv, k_rope, slots.int())
    with pytest.raises(ValueError, match=r"c_kv has shape \[2, 24\]; expected \[3, 24\]: one row per slot"):
        cache.append(kv_cache, c_kv[:2], k_rope, slots)
    with pytest.raises(ValueError, match=r"k_rope has shape \[3, 4\]; expected \[3, 8\]: .* as the cache, 24 \+ 8"):
        cache.append(kv_cache, c_kv, k_rope[:, :4], slots)
    with pytest.raises(TypeError, match=r"c_kv is torch\.float16 .*cast or move it"):
        cache.append(kv_cache, c_kv.half(), k_rope, slots)
    with pytest.raises(
        ValueError, match=r"c_kv has shape .* expected \[pages, page_size, columns\] with a contiguous last dimension"
    ):
        cache.append(kv_cache.transpose(0, 2).contiguous().transpose(0, 2), c_kv, k_rope, slots)


@pytest.mark.parametrize("place", ["c_kv", "k_rope", "cached c_kv", "cached k_rope"])
def test_append_keeps_no_gradient_and_says_so_before_it_writes(place: str) -> None:
    """A row of latents with the rope part of another token is worse than an error."""
    names = ("cached c_kv", "cached k_rope", "c_kv", "k_rope")
    caches = (torch.zeros(PAGES, 4, RANK, device=DEVICE), torch.zeros(PAGES, 4, ROPE, device=DEVICE))
    given = dict(zip(names, (*caches, *tokens_of(3)), strict=True))
    given[place] = given[place].clone().requires_grad_()
    pair = (given["cached c_kv"], given["cached k_rope"])
    slots = torch.tensor([5, 0, 9], device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"requires grad.*\.detach\(\).*torch\.no_grad\(\)"):
        cache.append(pair, given["c_kv"], given["k_rope"], slots)
    assert not any(x.detach().any() for x in pair)
    with torch.no_grad():
        cache.append(pair, given["c_kv"], given["k_rope"], slots)
    for x, rows in zip(pair, (given["c_kv"], given["k_rope"]), strict=True):
        assert torch.equal(x.detach().flatten(0, 1)[slots], rows.detach())


@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_cache_that_cannot_be_written_is_refused_before_the_other_is(spoilt: int) -> None:
    caches = [torch.zeros(PAGES, 4, RANK, device=DEVICE), torch.zeros(PAGES, 4, ROPE, device=DEVICE)]
    caches[spoilt] = caches[spoilt][:1].expand(PAGES, -1, -1)
    with pytest.raises(ValueError, match=r"strides \(0, \d+, 1\): its rows share memory"):
        cache.append((caches[0], caches[1]), *tokens_of(3), torch.tensor([5, 0, 9], device=DEVICE))
    assert not any(x.any() for x in caches)


@pytest.mark.skipif(DEVICE != "cpu", reason="a kernel writes to it all the same")
@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_cache_of_inference_mode_is_written_there_alone(spoilt: int) -> None:
    caches = [torch.zeros(PAGES, 4, RANK), torch.zeros(PAGES, 4, ROPE)]
    with torch.inference_mode():
        caches[spoilt] = caches[spoilt].clone()
    tokens, slots = tokens_of(3), torch.tensor([5, 0, 9])
    with pytest.raises(RuntimeError, match=r"created in torch\.inference_mode\(\).*call append in inference mode too"):
        cache.append((caches[0], caches[1]), *tokens, slots)
    assert not any(x.any() for x in caches)
    with torch.inference_mode():
        cache.append((caches[0], caches[1]), *tokens, slots)
    assert torch.equal(caches[0].flatten(0, 1)[slots], tokens[0])


def test_the_stride_of_a_single_page_means_nothing() -> None:
    kv_cache = torch.zeros(4, RANK + ROPE, device=DEVICE).as_strided((1, 4, RANK + ROPE), (0, RANK + ROPE, 1))
    tokens, slots = tokens_of(3), torch.tensor([3, 0, 2], device=DEVICE)
    cache.append(kv_cache, *tokens, slots)
    assert torch.equal(kv_cache[0, slots], torch.cat(tokens, -1))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_append_takes_tensors(place: int) -> None:
    given = [*tokens_of(3), torch.arange(3, device=DEVICE)]
    given[place] = given[place].tolist()
    name = ("c_kv", "k_rope", "slot_mapping")[place]
    with pytest.raises(TypeError, match=rf"{name} is list; expected a torch\.Tensor"):
        cache.append(pages_of(4), *given)


def test_slot_mapping() -> None:
    page_table = torch.tensor([[4, 2], [0, 9], [7, 7]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([4, 1, 6], dtype=torch.int32, device=DEVICE)
    slots = cache.slot_mapping(page_table, lengths, 3, seqlen_q=2)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [[4 * 3 + 2, 2 * 3 + 0], [-1, 0], [7 * 3 + 1, 7 * 3 + 2]]
    assert cache.slot_mapping(page_table, lengths, 3).tolist() == [[6], [0], [23]]


def test_sizes_beyond_int32_are_an_error() -> None:
    page_table, lengths = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in ((1, 2), (1,)))
    for size in (2**31, 2**62, 2**64):
        with pytest.raises(ValueError, match=f"page_size={size}; expected at most 2147483647"):
            cache.slot_mapping(page_table, lengths, size)
        with pytest.raises(ValueError, match=f"max_seqlen_kv={size}; expected at most 2147483647"):
            cache.gather(pages_of(4), page_table, lengths, kv_lora_rank=RANK, max_seqlen_kv=size)


def test_full_pages_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLUGIN_CHECK", "1")
    page_table = torch.tensor([[4, 2]], dtype=torch.int32, device=DEVICE)
    with pytest.raises(IndexError, match=r"seqlens_kv=\[7\]; page_table has 2 pages of 3 .* they are full"):
        cache.slot_mapping(page_table, torch.tensor([7], dtype=torch.int32, device=DEVICE), 3)


def test_a_negative_page_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    page_table = torch.tensor([[4, -1], [2, -1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([4, 3], dtype=torch.int32, device=DEVICE)
    monkeypatch.setenv("MLA_PLUGIN_CHECK", "1")
    with pytest.raises(IndexError, match=r"page_table=\[\[4, -1\], \[2, -1\]\] has a negative page"):
        cache.slot_mapping(page_table, lengths, 3)
    monkeypatch.setattr(cache, "may_read", lambda x: False)
    assert cache.slot_mapping(page_table, lengths, 3, seqlen_q=2).tolist() == [[14, -1], [7, 8]]


def gathered_by_kernel(
    kv_cache: torch.Tensor, page_table: torch.Tensor, seqlens_kv: torch.Tensor, max_seqlen_kv: int
) -> Pair:
    out = torch.full((len(seqlens_kv), max_seqlen_kv, kv_cache.shape[-1]), torch.nan).to(kv_cache)
    found = out[..., :RANK], out[..., RANK:]
    kernels.gather(kv_cache[..., :RANK], kv_cache[..., RANK:], page_table, seqlens_kv, *found)
    return found


@pytest.mark.parametrize("page_size", [1, 3, 64, 256])
@pytest.mark.parametrize("by", ["function", "kernel"])
def test_gather(page_size: int, by: str) -> None:
    kv_cache = pages_of(page_size)
    lengths = torch.tensor([2 * page_size, 1, 0, page_size + page_size // 2], dtype=torch.int32, device=DEVICE)
    page_table = torch.full((4, 3), 2**30, dtype=torch.int32, device=DEVICE)
    page_table[:, :2] = torch.randperm(PAGES)[:8].view(4, 2)
    page_table[2] = -7
    expected = torch.zeros(4, 3 * page_size, RANK + ROPE, device=DEVICE)
    for b, length in enumerate(lengths.tolist()):
        for key in range(length):
            expected[b, key] = kv_cache[int(page_table[b, key // page_size]), key % page_size]
    if by == "kernel":
        c_kv, k_rope = gathered_by_kernel(kv_cache, page_table, lengths, 3 * page_size)
    else:
        c_kv, k_rope = cache.gather(kv_cache, page_table, lengths, kv_lora_rank=RANK)
    assert torch.equal(torch.cat([c_kv, k_rope], -1), expected)
    shorter, _ = cache.gather((kv_cache[..., :RANK], kv_cache[..., RANK:]), page_table, lengths, max_seqlen_kv=2)
    assert torch.equal(shorter, expected[:, :2, :RANK])


def test_the_kernels_follow_each_tensors_strides() -> None:
    """A pair of caches that are wider than their rows, a table of more columns, results that are columns too."""
    c_kv, k_rope = torch.zeros(PAGES, 4, RANK + 5, device=DEVICE), torch.zeros(PAGES, 6, ROPE + 3, device=DEVICE)
    pair = c_kv[..., :RANK], k_rope[:, :4, :ROPE]
    new = tokens_of(8)
    page_table = torch.tensor([[3, 1, 0], [7, 5, 2]], dtype=torch.int32, device=DEVICE)[:, :1]
    slots = torch.cat([torch.arange(4) + 4 * page for page in (3, 7)]).to(DEVICE)
    kernels.append(*pair, *new, slots)
    lengths = torch.tensor([4, 3], dtype=torch.int32, device=DEVICE)
    found = [torch.ones(2, 5, width + 7, device=DEVICE)[:, :4, :width] for width in (RANK, ROPE)]
    kernels.gather(*pair, page_table, lengths, *found)
    for x, expected in zip(found, new, strict=True):
        assert torch.equal(x[0], expected[:4])
        assert torch.equal(x[1, :3], expected[4:7])
        assert not x[1, 3].any()
    assert not c_kv[..., RANK:].any()
    assert not k_rope[:, 4:].any()
    assert not k_rope[..., ROPE:].any()


def test_gather_more_rows_than_the_pages_hold() -> None:
    kv_cache = pages_of(3)
    page_table = torch.tensor([[4]], dtype=torch.int32, device=DEVICE)
    c_kv, _ = cache.gather(
        kv_cache, page_table, torch.tensor([3], dtype=torch.int32, device=DEVICE), kv_lora_rank=RANK, max_seqlen_kv=5
    )
    assert torch.equal(c_kv[0, :3], kv_cache[4, :, :RANK])
    assert not c_kv[0, 3:].any()


def test_a_wrong_page_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLUGIN_CHECK", "1")
    page_table = torch.tensor([[4, PAGES]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    kv_cache = pages_of(2)
    with pytest.raises(IndexError, match=r"page_table\[0\] has \[11\]; the cache has pages 0 to 10"):
        cache.gather(kv_cache, page_table, lengths, kv_lora_rank=RANK)
    with pytest.raises(IndexError, match=r"seqlens_kv\[0\]=5; page_table has 2 pages of 2"):
        cache.gather(kv_cache, page_table, lengths + 2, kv_lora_rank=RANK)
    with pytest.raises(ValueError, match="kv_lora_rank=None; a cache that is one tensor needs it"):
        cache.gather(kv_cache, page_table, lengths)
    with pytest.raises(ValueError, match="max_seqlen_kv=-1; expected at least 0"):
        cache.gather(kv_cache, page_table, lengths, kv_lora_rank=RANK, max_seqlen_kv=-1)


TABLE, LENGTHS = torch.tensor([[4, 2]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"page_table": [[4, 2]]}, TypeError, r"page_table is list; expected a torch\.Tensor"),
        ({"seqlens_kv": None}, TypeError, r"seqlens_kv is NoneType; expected a torch\.Tensor"),
        ({"seqlens_kv": DecodeLengths([3], device="cpu")}, TypeError, "DecodeLengths; .* pass its seqlens_kv"),
        ({"page_size": 3.0}, TypeError, r"page_size=3\.0; expected an int"),
        ({"page_size": 0}, ValueError, "page_size=0; expected at least 1"),
        ({"seqlen_q": "1"}, TypeError, "seqlen_q='1'; expected an int"),
        ({"seqlen_q": -1}, ValueError, "seqlen_q=-1; expected at least 0"),
        ({"seqlens_kv": torch.tensor([-3], dtype=torch.int32)}, IndexError, r"seqlens_kv=\[-3\]; expected lengths"),
    ],
)
def test_slot_mapping_says_what_is_wrong(changes: dict, error: type[Exception], message: str) -> None:
    given: dict = {"page_table": TABLE, "seqlens_kv": LENGTHS, "page_size": 3}
    with pytest.raises(error, match=message):
        cache.slot_mapping(**given | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"page_table": None}, TypeError, r"page_table is NoneType; expected a torch\.Tensor"),
        ({"seqlens_kv": [3]}, TypeError, r"seqlens_kv is list; expected a torch\.Tensor"),
        ({"kv_lora_rank": "24"}, TypeError, "kv_lora_rank='24'; expected an int"),
        ({"kv_lora_rank": -1}, ValueError, "kv_lora_rank=-1; expected at least 1"),
        ({"kv_lora_rank": RANK + ROPE + 1}, ValueError, "R=33 of kv_lora_rank"),
        ({"max_seqlen_kv": 3.5}, TypeError, r"max_seqlen_kv=3\.5; expected an int"),
        ({"kv_cache": None, "kv_lora_rank": None}, TypeError, "kv_cache is NoneType; expected a tensor or a pair"),
        ({"kv_cache": (), "kv_lora_rank": None}, TypeError, "kv_cache is tuple; expected a tensor or a pair"),
        ({"kv_cache": (1, 2), "kv_lora_rank": None}, TypeError, "kv_cache is a pair of int and int"),
        (
            {"kv_cache": (torch.zeros(PAGES, 3, 16), torch.zeros(PAGES, 3, 16))},
            ValueError,
            "kv_lora_rank=24; c_kv of the pair has 16 columns",
        ),
        (
            {"kv_cache": torch.zeros(PAGES, 3, RANK + ROPE, requires_grad=True)},
            NotImplementedError,
            r"the cache requires grad or has a tangent; gather has no derivative: pass \.detach\(\)",
        ),
    ],
)
def test_gather_says_what_is_wrong(changes: dict, error: type[Exception], message: str) -> None:
    given: dict = {"kv_cache": torch.zeros(PAGES, 3, RANK + ROPE), "page_table": TABLE, "seqlens_kv": LENGTHS}
    with pytest.raises(error, match=message):
        cache.gather(**given | {"kv_lora_rank": RANK} | changes)


def test_append_is_traced_whole() -> None:
    def step(kv_cache: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor, slots: torch.Tensor) -> None:
        cache.append(kv_cache, c_kv, k_rope, slots)

    kv_cache, slots = pages_of(4), torch.tensor([5, 1, -1], device=DEVICE)
    c_kv, k_rope = tokens_of(3)
    expected = kv_cache.clone()
    cache.append(expected, c_kv, k_rope, slots)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    compiled(kv_cache, c_kv, k_rope, slots)
    assert torch.equal(kv_cache, expected)
    if DEVICE == "cpu":
        with pytest.raises(IndexError, match=r"slot_mapping has \[99\]; the cache has slots 0 to 43"):
            compiled(kv_cache, c_kv, k_rope, torch.tensor([5, 1, 99]))
        assert torch.equal(kv_cache, expected)


@pytest.mark.gpu
def test_a_captured_append_follows_slots_and_tokens() -> None:
    kv_cache, slots = pages_of(4), torch.tensor([5, 1, -1], device=DEVICE)
    c_kv, k_rope = (x.contiguous() for x in tokens_of(3))
    cache.append(kv_cache, c_kv, k_rope, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(kv_cache, c_kv, k_rope, slots)
    expected = kv_cache.clone()
    slots.copy_(torch.tensor([-1, 40, 2]))
    c_kv.normal_()
    cache.append(expected, c_kv, k_rope, slots)
    graph.replay()
    assert torch.equal(kv_cache, expected)


@pytest.mark.gpu
@pytest.mark.large_memory(8)
def test_slots_beyond_2_31_elements() -> None:
    pages = 2**31 // (64 * (RANK + ROPE)) + 10
    kv_cache = torch.zeros(pages, 64, RANK + ROPE, dtype=torch.float16, device=DEVICE)
    c_kv, k_rope = tokens_of(2, dtype=torch.float16)
    cache.append(kv_cache, c_kv, k_rope, torch.tensor([pages * 64 - 1, 3], device=DEVICE))
    page_table = torch.tensor([[pages - 1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    found, _ = cache.gather(kv_cache, page_table, lengths, kv_lora_rank=RANK)
    assert torch.equal(found[0, -1], c_kv[0])
    assert torch.equal(kv_cache[0, 3, RANK:], k_rope[1])


@pytest.mark.gpu
@pytest.mark.large_memory(90)
def test_gather_rows_that_are_far_apart() -> None:
    """A sequence-first cache, whose rows are more than 2**31 elements from the first."""
    sequences, rows, width = 2**17, 600, RANK + ROPE
    memory = torch.zeros(rows, sequences, width, dtype=torch.float16, device=DEVICE)
    memory[-1, 0] = 1.0
    page_table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([rows], dtype=torch.int32, device=DEVICE)
    found, _ = cache.gather(memory.transpose(0, 1), page_table, lengths, kv_lora_rank=RANK)
    assert (rows - 1) * sequences * width > 2**31
    assert bool((found[0, -1] == 1.0).all())
    assert not found[0, :-1].any()
