"""Quantised caches: their bytes, what they give back, and decode over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import mla_plugin
from mla_plugin import DecodeLengths, cache
from mla_plugin.arguments.cache_format import byte_columns, split_quantised
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.kernels.decode import e4m3, quantised_cache
from mla_plugin.kernels.decode.e4m3 import from_e4m3, to_e4m3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("fields", "instruction", "pure instruction", "bits") if DEVICE == "cuda" else ("fields",)
DTYPES = {torch.float16: tl.float16, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
FORMATS = ("fp8", "fp8_ds_mla")
INTERPRETED_ROUNDS_DOWN = DEVICE == "cpu"
"""Triton's interpreter cuts a float32 off where a GPU rounds it to bfloat16."""
R, DR = 512, 64
WIDTH = {"fp8": R + DR, "fp8_ds_mla": 656}
SCALE = 0.0371


@triton.jit
def _numbers(X, Y, N: tl.constexpr, DTYPE: tl.constexpr, CONVERSION: tl.constexpr):
    columns = tl.arange(0, N)
    tl.store(Y + columns, from_e4m3(tl.load(X + columns), DTYPE, CONVERSION))


@triton.jit
def _bytes(X, Y, N: tl.constexpr):
    columns = tl.arange(0, N)
    tl.store(Y + columns, to_e4m3(tl.load(X + columns)))


def every_byte() -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32, device=DEVICE).to(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_is_its_number(way: str, dtype: torch.dtype) -> None:
    """Subnormal ones, -0 and NaN too; those of PyTorch are the definition."""
    found = torch.full((1024,), 7.0, dtype=dtype, device=DEVICE)
    given = every_byte().repeat(4)
    _numbers[(1,)](given, found, 1024, DTYPES[dtype], way)
    wanted = given.view(torch.float8_e4m3fn).to(dtype)
    assert int(wanted.isnan().sum()) == 8
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])
    assert torch.equal(found.signbit()[~wanted.isnan()], wanted.signbit()[~wanted.isnan()])


def bits_by_hand(text: str, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the assembly of ``bits`` makes of words of four bytes, instruction by instruction."""
    registers: dict[str, Any] = {"$2": given.view(torch.int32).long() & 0xFFFFFFFF}

    def value(name: str) -> Any:
        return registers[name] if name in registers else int(name, 0)

    def permuted(a: Any, b: Any, selector: int) -> Any:
        found = torch.zeros_like(registers["$2"])
        for place in range(4):
            nibble = selector >> 4 * place & 15
            byte = (a if nibble & 4 == 0 else b + 0 * a) >> 8 * (nibble & 3) & 0xFF
            found |= ((byte >> 7) * 0xFF if nibble & 8 else byte) << 8 * place
        return found

    def products(a: Any, b: Any, c: Any) -> Any:
        halves = [torch.stack([x & 0xFFFF, x >> 16], -1).to(torch.int32) for x in (a, *(c_ + 0 * a for c_ in (b, c)))]
        x, y, z = (half.to(torch.uint16).view(dtype).double() for half in halves)
        return (x * y + z).to(dtype)

    operations = {
        "mov.b32": lambda a: a + 0 * registers["$2"],
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "add.u32": lambda a, b: a + b & 0xFFFFFFFF,
        "shr.u32": lambda a, b: a >> b,
        "prmt.b32": permuted,
        "lop3.b32": lambda a, b, c, table: a & b | c if table == 0xEA else None,
        "fma.rn.f16x2": products,
        "fma.rn.bf16x2": products,
    }
    for line in text.splitlines():
        name, _, operands = line.strip(" ;{}").partition(" ")
        if name and name != ".reg":
            target, *sources = operands.split(", ")
            registers[target] = operations[name](*map(value, sources))
    return torch.stack([registers["$0"], registers["$1"]], -2).flatten()


@pytest.mark.parametrize(
    ("text", "dtype"), [(e4m3._FLOAT16_BY_BITS, torch.float16), (e4m3._BFLOAT16_BY_BITS, torch.bfloat16)]
)
def test_the_assembly_of_cards_before_8_9_by_hand(text: Any, dtype: torch.dtype) -> None:
    given = every_byte().cpu()
    wanted = given.view(torch.float8_e4m3fn).to(dtype)
    found = bits_by_hand(text.value, given, dtype)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])
    assert torch.equal(found.signbit()[~wanted.isnan()], wanted.signbit()[~wanted.isnan()])


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """By looking at all numbers: the nearest one, of two the one with an even last bit; uint8."""
    positive = torch.arange(127, dtype=torch.uint8)
    numbers = positive.view(torch.float8_e4m3fn).double()
    distance = (x.double().abs().clamp(max=448.0)[:, None] - numbers).abs()
    is_nearest = distance == distance.amin(1, keepdim=True)
    code = torch.where(is_nearest, positive.int() + 1000 * (positive.int() % 2), 5000).argmin(1).to(torch.uint8)
    return torch.where(x.isnan(), 0x7F, torch.where(x.signbit(), code + 128, code)).to(torch.uint8)


def edges() -> torch.Tensor:
    """Every number, what lies between two, its neighbours in float32; beyond all; random ones."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    near = [torch.nextafter(between, torch.tensor(to)) for to in (1e9, -1e9)]
    special = torch.tensor([464.0, 464.1, 480.0, 1e30, torch.inf, 0.0, 2.0**-10, 2.0**-30, 1e-40])
    drawn = torch.cat([torch.randn(300), torch.randn(300) * 0.01, torch.randn(300) * 300])
    found = torch.cat([numbers, between, *near, special, drawn])
    return torch.cat([found, -found, torch.tensor([torch.nan])])


def test_the_nearest_number_is_written() -> None:
    x = edges()
    padded = torch.zeros(triton.next_power_of_2(len(x)))
    padded[: len(x)] = x
    found = torch.zeros(len(padded), dtype=torch.uint8, device=DEVICE)
    _bytes[(1,)](padded.to(DEVICE), found, len(padded))
    assert torch.equal(found.cpu()[: len(x)], nearest_e4m3(x))


def rows_of(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """New rows with zeros, NaN, infinity, and tiny and large numbers."""
    rows = torch.randn(tokens, R + DR) * torch.exp2(torch.randint(-12, 6, (tokens, 1)))
    rows[0, :128], rows[0, 128] = 0.0, -0.0
    rows[1, 5], rows[1, 130], rows[1, 300] = torch.nan, torch.inf, -torch.inf
    rows[2] *= 1e-38
    rows[3] *= 2000.0
    rows = rows.to(DEVICE, dtype)
    return rows[:, :R], rows[:, R:]


def written(
    kv_format: str, c_kv: torch.Tensor, k_rope: torch.Tensor, scale: float, power_of_2_scales: bool = False
) -> torch.Tensor:
    """The bytes of some rows, one tile after the other."""
    c, k = (x.float().cpu() for x in (c_kv, k_rope))
    if kv_format == "fp8":
        return nearest_e4m3((torch.cat([c, k], -1) / torch.tensor(scale)).flatten()).view(len(c), -1)
    found = []
    for row, rope in zip(c, k_rope.cpu(), strict=True):
        values, scales = [], []
        for tile in row.view(4, 128):
            largest = tile[~tile.isnan()].abs().max()
            tile_scale = (largest / 448.0).clamp(min=torch.finfo(torch.float32).tiny)
            if power_of_2_scales:
                tile_scale = torch.pow(2, torch.clamp_min(largest / 448.0, 1e-4).log2().ceil())
            values.append(nearest_e4m3(tile / tile_scale))
            scales.append(tile_scale)
        parts = (torch.stack(scales).view(torch.uint8), rope.to(torch.bfloat16).view(torch.uint8))
        found.append(torch.cat([*values, *parts]))
    return torch.stack(found)


def by_kernel(
    kv_cache: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_cache_format: str,
    kv_scale: torch.Tensor | None = None,
    power_of_2_scales: bool = False,
) -> None:
    columns = byte_columns(kv_cache, R, kv_cache_format)
    quantised_cache.append(*columns, c_kv.contiguous(), k_rope.contiguous(), slots, kv_scale, power_of_2_scales)


CALLS = [("fp8", False), ("fp8_ds_mla", False), ("fp8_ds_mla", True)]
WRITTEN = [(*call, dtype) for call in CALLS[:2] for dtype in (torch.bfloat16, torch.float32)]
WRITTEN += [(*CALLS[2], torch.bfloat16)]
"""FlashMLA's logarithm in float32 is not exact near a power of two; its rows have 16 bits."""


def scale_for(kv_format: str) -> dict[str, Any]:
    scale = {"kv_scale": torch.tensor(SCALE, device=DEVICE)} if kv_format == "fp8" else {}
    return {"kv_cache_format": kv_format, **scale}


@pytest.mark.parametrize("append", [cache.append, by_kernel])
@pytest.mark.parametrize(("kv_format", "power_of_2", "dtype"), WRITTEN)
def test_append_writes_the_bytes(append: Any, kv_format: str, power_of_2: bool, dtype: torch.dtype) -> None:
    """Of every row those that the formats' own writers make; nothing else is touched."""
    kv_cache = torch.randint(0, 256, (5, 3, WIDTH[kv_format]), dtype=torch.uint8).to(DEVICE)
    expected = kv_cache.clone()
    c_kv, k_rope = rows_of(7, dtype)
    if INTERPRETED_ROUNDS_DOWN and append is by_kernel:
        k_rope = k_rope.to(torch.bfloat16).to(dtype)
    slots = torch.tensor([4, 0, -1, 14, 9, 1, 2**40 if append is by_kernel else -7], device=DEVICE)
    wanted = written(kv_format, c_kv, k_rope, SCALE, power_of_2).to(DEVICE)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < 15:
            expected[slot // 3, slot % 3] = wanted[token]
    more = {"power_of_2_scales": True} if power_of_2 else {}
    append(kv_cache, c_kv, k_rope, slots, **scale_for(kv_format), **more)
    assert torch.equal(kv_cache, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_append_to_a_pair_in_slices_of_float8(dtype: torch.dtype) -> None:
    memory = torch.zeros(6, 4, 60, dtype=torch.uint8, device=DEVICE)
    c_pages, k_pages = (memory[::2, :, :40], memory[1::2, :, 3:19])
    c_kv, k_rope = (torch.randn(2, width, device=DEVICE).half() for width in (40, 16))
    pair = (c_pages.view(dtype), k_pages.view(dtype))
    cache.append(pair, c_kv, k_rope, torch.tensor([11, 2], device=DEVICE), **scale_for("fp8"))
    for token, (page, row) in enumerate(((2, 3), (0, 2))):
        for pages, new in ((c_pages, c_kv), (k_pages, k_rope)):
            wanted = nearest_e4m3(new[token].float().cpu() / torch.tensor(SCALE))
            assert torch.equal(pages[page, row].cpu(), wanted)
    assert int(memory.any(-1).sum()) == 4


def drawn_cache(kv_format: str, pages: int, page_size: int) -> torch.Tensor:
    """Bytes of numbers, and NaN in pages that no test uses."""
    kv_cache = torch.randint(0, 256, (pages, page_size, WIDTH[kv_format]), dtype=torch.uint8)
    kv_cache[(kv_cache & 0x7F) == 0x7F] = 0x35
    if kv_format == "fp8_ds_mla":
        kv_cache[..., 512:528].view(torch.float32).uniform_(0.001, 0.02)
        kv_cache[..., 528:].view(torch.bfloat16).normal_()
    return kv_cache.to(DEVICE)


def numbers_in(kv_cache: torch.Tensor, kv_format: str) -> torch.Tensor:
    """[.., .., R + Dr] in float64."""
    if kv_format == "fp8":
        return kv_cache.view(torch.float8_e4m3fn).double() * float(torch.tensor(SCALE))
    values = kv_cache[..., :512].view(torch.float8_e4m3fn).double().unflatten(-1, (4, 128))
    scales = kv_cache[..., 512:528].view(torch.float32).double()
    rope = kv_cache[..., 528:].view(torch.bfloat16).double()
    return torch.cat([(values * scales[..., None]).flatten(-2), rope], -1)


@pytest.mark.parametrize("way", ["cache", "kernel"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_gather_gives_rounded_products(kv_format: str, way: str) -> None:
    """In bfloat16, exactly: the product of number and scale is rounded once to float32 and once more."""
    kv_cache = drawn_cache(kv_format, 7, 4)
    page_table = torch.tensor([[2, 6, 1], [2**30, -5, 0], [3, 0, 2**30]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([9, 0, 5], dtype=torch.int32, device=DEVICE)
    if way == "cache":
        c_kv, k_rope = cache.gather(kv_cache, page_table, lengths, kv_lora_rank=R, **scale_for(kv_format))
    else:
        out = torch.full((3, 12, R + DR), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        c_kv, k_rope = out[..., :R], out[..., R:]
        columns = byte_columns(kv_cache, R, kv_format)
        quantised_cache.gather(*columns, page_table, lengths, scale_for(kv_format).get("kv_scale"), c_kv, k_rope)
    numbers = numbers_in(kv_cache, kv_format).float().to(torch.bfloat16)
    wanted = torch.zeros(3, 12, R + DR, dtype=torch.bfloat16, device=DEVICE)
    for b, pages, length in ((0, [2, 6, 1], 9), (2, [3, 0], 5)):
        wanted[b, :length] = numbers[pages].flatten(0, 1)[:length]
    found = torch.cat([c_kv, k_rope], -1)
    if INTERPRETED_ROUNDS_DOWN and way == "kernel":
        assert ((found.float() - wanted.float()).abs() <= 2.0**-7 * wanted.float().abs()).all()
    else:
        assert torch.equal(found, wanted)


LENGTHS = [37, 0, 20, 1]


def paged(kv_format: str, page_size: int, seqlen_q: int, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """A call over shuffled pages; what no sequence uses is NaN."""
    each = -(-max(LENGTHS) // page_size)
    kv_cache = drawn_cache(kv_format, len(LENGTHS) * each + 1, page_size)
    page_table = torch.randperm(len(kv_cache))[: len(LENGTHS) * each].view(len(LENGTHS), each).int().to(DEVICE)
    for b, length in enumerate(LENGTHS):
        rows = kv_cache[page_table[b].long()].flatten(0, 1)
        rows[length:] = 0x7F
        kv_cache[page_table[b].long()] = rows.unflatten(0, (each, page_size))
    q = (4.0 * torch.randn(len(LENGTHS), seqlen_q, heads, R + DR)).to(DEVICE, dtype)
    return {
        "q_nope_abs": q[..., :R],
        "q_rope": q[..., R:],
        "kv_cache": kv_cache,
        "softmax_scale": 0.02,
        "page_table": page_table,
        "seqlens_kv": torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE),
        "return_lse": True,
        **scale_for(kv_format),
    }


def check(arguments: dict[str, Any], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse against float64 over the numbers of the cache, with an error as that of rounding in the dtype."""
    out, lse = mla_plugin.decode(**arguments, **more)
    numbers = numbers_in(arguments["kv_cache"], arguments["kv_cache_format"])
    leftpads = more.get("leftpad_kv")
    step = torch.finfo(out.dtype).eps
    for b, length in enumerate(arguments["seqlens_kv"].tolist()):
        rows = (
            numbers[b] if arguments["page_table"] is None else numbers[arguments["page_table"][b].long()].flatten(0, 1)
        )
        for i in range(out.shape[1]):
            start = 0 if leftpads is None else int(leftpads[b])
            keys = rows[start : max(length - out.shape[1] + 1 + i, start)]
            if not len(keys):
                assert not out[b, i].any()
                assert lse[b, :, i].isneginf().all()
                continue
            q = torch.cat([arguments["q_nope_abs"][b, i], arguments["q_rope"][b, i]], -1).double()
            scores = q @ keys.T * arguments["softmax_scale"]
            wanted = scores.softmax(-1) @ keys[:, :R]
            rounding = max(step, torch.finfo(torch.float32).eps * float(scores.abs().max()))
            assert (out[b, i].double() - wanted).norm() <= 2 * rounding * wanted.norm()
            assert (lse[b, :, i].double() - scores.logsumexp(-1)).abs().max() <= 8 * rounding * (1 + scores.abs().max())
    return out, lse


BACKENDS = [("sdpa", torch.bfloat16), ("sdpa", torch.float64), ("triton", torch.float32)]
BACKENDS += [("triton", torch.bfloat16)] if DEVICE == "cuda" else []


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("page_size", "seqlen_q", "heads"), [(64, 1, 9), (16, 2, 3), (1, 1, 1)])
def test_decode(kv_format: str, page_size: int, seqlen_q: int, heads: int, backend: str, dtype: torch.dtype) -> None:
    check(paged(kv_format, page_size, seqlen_q, heads, dtype), backend=backend)


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_decode_of_a_left_padded_contiguous_cache(kv_format: str, backend: str) -> None:
    arguments = paged(kv_format, 40, 2, 3, torch.float32)
    arguments["kv_cache"] = arguments["kv_cache"][arguments["page_table"][:, 0].long()].clone()
    arguments |= {"page_table": None}
    leftpads = torch.tensor([5, 0, 20, 0], dtype=torch.int32, device=DEVICE)
    for b, leftpad in enumerate(leftpads.tolist()):
        arguments["kv_cache"][b, :leftpad] = 0xFF
    check(arguments, backend=backend, leftpad_kv=leftpads)


def test_decode_of_float16_queries() -> None:
    check(paged("fp8", 16, 1, 20, torch.float16), backend="triton")


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_batch_has_the_bits_of_its_queries_alone(kv_format: str) -> None:
    arguments = paged(kv_format, 16, 2, 3, torch.float32)
    out, lse = check(arguments, backend="triton", batch_invariant=True)
    for b, length in ((0, 37), (2, 20)):
        alone = {name: arguments[name][b : b + 1] for name in ("q_nope_abs", "q_rope", "page_table", "seqlens_kv")}
        alone |= {"q_nope_abs": alone["q_nope_abs"][:, 1:], "q_rope": alone["q_rope"][:, 1:]}
        found = mla_plugin.decode(**(arguments | alone), backend="triton", batch_invariant=True)
        assert torch.equal(found[0][0, 0], out[b, 1])
        assert torch.equal(found[1][0, :, 0], lse[b, :, 1])
        assert length == LENGTHS[b]


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_the_next_step_has_other_lengths_and_another_scale_in_the_same_memory(backend: str) -> None:
    arguments = paged("fp8", 16, 1, 3, torch.float32)
    lengths = DecodeLengths(LENGTHS, seqlens_kv=arguments["seqlens_kv"])
    before, _ = mla_plugin.decode(**(arguments | {"seqlens_kv": lengths}), backend=backend)
    lengths.update([30, 0, 20, 1])
    arguments["kv_scale"].mul_(0.5)
    arguments["q_nope_abs"].mul_(2.0)  # the same scores
    arguments["q_rope"].mul_(2.0)
    after, _ = mla_plugin.decode(**(arguments | {"seqlens_kv": lengths}), backend=backend)
    assert torch.allclose(after[2:], 0.5 * before[2:], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(after[0], 0.5 * before[0], rtol=1e-2)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_nan_in_the_cache_shows(kv_format: str) -> None:
    for backend in ("sdpa", "triton"):
        arguments = paged(kv_format, 16, 1, 2, torch.float32)
        arguments["kv_cache"][arguments["page_table"][0, 0].long(), 3, 70] = 0x7F
        out, _ = mla_plugin.decode(**arguments, backend=backend)
        assert out[0, 0, :, 70].isnan().all()
        assert not out[2:].isnan().any()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_torch_compile_keeps_all_in_one_graph(kv_format: str) -> None:
    arguments = paged(kv_format, 16, 1, 2, torch.float32)
    c_kv, k_rope = rows_of(4)
    slots = torch.tensor([3, 9, -1, 40], device=DEVICE)

    def step(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cache.append(kv_cache, c_kv, k_rope, slots, **scale_for(kv_format))
        rows, _ = cache.gather(
            kv_cache, arguments["page_table"], lengths, max_seqlen_kv=3, kv_lora_rank=R, **scale_for(kv_format)
        )
        out, _ = mla_plugin.decode(**(arguments | {"kv_cache": kv_cache}), backend="sdpa")
        return rows, out, kv_cache

    lengths = arguments["seqlens_kv"]
    caches = [arguments["kv_cache"].clone() for _ in range(2)]
    wanted = step(caches[0])
    decode = torch.compile(
        lambda kv_cache: mla_plugin.decode(**(arguments | {"kv_cache": kv_cache}), backend="sdpa")[0],
        fullgraph=True,
        backend="eager",
    )
    assert torch.equal(decode(caches[0]).nan_to_num(), wanted[1].nan_to_num())
    if DEVICE == "cuda":  # on the CPU append and gather look at values
        found = torch.compile(step, fullgraph=True)(caches[1])
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, wanted, strict=True))


def test_other_backends_refuse_and_say_so() -> None:
    request = DecodeRequest(
        torch.bfloat16, "cuda", 2, 1, 16, 512, 64, 1024, 64, has_host_lengths=True, kv_cache_format="fp8"
    )
    platform = mla_plugin.Platform("cuda", (9, 0), packages=(("triton", "3.7.1"), ("flash-mla", "1.0.0")))
    text = mla_plugin.explain(request, platform=platform, environ={})
    for name in ("flashmla", "fa3", "flashinfer"):
        line = next(line for line in text.splitlines() if line.split()[:1] == [name] or f" {name} " in line)
        assert "kv_cache_format='fp8', expected 'plain'" in line or "not installed" in line
    assert "=> decode: triton" in text
    assert "kv_cache_format fp8" in text


class Plain:
    """Written before there were formats."""

    @mla_plugin.hookimpl
    def select_backend(self, request: Any, platform: Any) -> mla_plugin.Accepted:
        return mla_plugin.Accepted(priority=9)

    @mla_plugin.hookimpl
    def forward(self, plan: Any, tensors: Any) -> Any:
        raise AssertionError("it was given a quantised cache")


def test_a_backend_that_knows_no_formats_is_given_none() -> None:
    from mla_plugin.hooks.manager import get_manager

    get_manager().register(Plain(), "unaware")
    try:
        with pytest.raises(mla_plugin.NoBackendError, match=r"kv_cache_format='fp8', expected 'plain'.*not read such"):
            mla_plugin.decode(**paged("fp8", 16, 1, 2, torch.float32), backend="unaware")
        check(paged("fp8", 16, 1, 2, torch.float32))
    finally:
        get_manager().unregister("unaware")


def wrong(**changes: Any) -> dict[str, Any]:
    return changes


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown format": (
        "fp8",
        wrong(kv_cache_format="fp8_e5m2"),
        r"kv_cache_format='fp8_e5m2'; expected one of 'plain'",
    ),
    "format of another type": ("fp8", wrong(kv_cache_format=None), r"kv_cache_format=None; expected one of"),
    "formats": ("fp8", wrong(kv_cache_format=np.array(["fp8", "plain"])), r"kv_cache_format=array.*; expected one of"),
    "no scale": ("fp8", wrong(kv_scale=None), r"kv_scale is missing.*a float32 tensor of one element"),
    "scale of a number": ("fp8", wrong(kv_scale=0.1), r"kv_scale"),
    "scale of float64": ("fp8", wrong(kv_scale=torch.ones(1, dtype=torch.float64)), r"kv_scale is torch.float64 \[1\]"),
    "scales of heads": ("fp8", wrong(kv_scale=torch.ones(3)), r"kv_scale is torch.float32 \[3\]"),
    "scale elsewhere": ("fp8", wrong(kv_scale=torch.ones(1, device="meta")), r"on meta; one float32 on"),
    "scale of a plain cache": (
        "fp8",
        wrong(kv_cache_format="plain"),
        r"kv_scale is given with kv_cache_format='plain'",
    ),
    "scale beside scales": ("fp8_ds_mla", wrong(kv_scale=torch.ones(1)), r"its scales are in the cache"),
    "a plain cache": (
        "fp8",
        wrong(kv_cache=torch.zeros(40, 16, 576)),
        r"kv_cache is torch.float32; .*'fp8' needs uint8",
    ),
    "too few columns": ("fp8", wrong(kv_cache=torch.zeros(40, 16, 99, dtype=torch.uint8)), r"R \+ Dr\] with R=512"),
    "another rope": (
        "fp8",
        wrong(kv_cache=torch.zeros(40, 16, 600, dtype=torch.uint8)),
        r"q_rope has Dr=64, k_rope has Dr=88",
    ),
    "a token of 576 bytes": (
        "fp8_ds_mla",
        wrong(kv_cache=torch.zeros(40, 16, 576, dtype=torch.uint8)),
        r"a token of kv_cache_format='fp8_ds_mla' has 656 bytes",
    ),
    "a pair": (
        "fp8_ds_mla",
        wrong(kv_cache=(torch.zeros(1), torch.zeros(1))),
        r"kv_cache is tuple; .* \[.., .., 656\]",
    ),
    "four dimensions": (
        "fp8_ds_mla",
        wrong(kv_cache=torch.zeros(40, 16, 1, 656, dtype=torch.uint8)),
        r"three dimensions",
    ),
    "odd strides": (
        "fp8_ds_mla",
        wrong(kv_cache=torch.zeros(40, 16, 657, dtype=torch.uint8)[..., :656]),
        r"must be multiples of 4",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_error(name: str) -> None:
    kv_format, changes, message = WRONG[name]
    arguments = paged(kv_format, 16, 1, 2, torch.float32) | changes
    with pytest.raises((ValueError, TypeError), match=message):
        mla_plugin.decode(**arguments)
    with pytest.raises((ValueError, TypeError), match=message):
        mla_plugin.explain(
            mla_plugin.decode, *(arguments.pop(n) for n in ("q_nope_abs", "q_rope", "kv_cache")), **arguments
        )


@pytest.mark.parametrize("value", [-0.5, torch.nan, torch.inf])
def test_a_scale_that_is_negative_or_not_finite_is_an_error(value: float) -> None:
    """Read where the host may; on Hopper a negative one gives NaN."""
    arguments = paged("fp8", 16, 1, 2, torch.float32) | {"kv_scale": torch.tensor(value)}
    message = rf"kv_scale={value}; expected a finite number that is not negative"
    with pytest.raises(ValueError, match=message):
        mla_plugin.decode(**arguments)
    scale = {"kv_cache_format": "fp8", "kv_scale": torch.tensor(value)}
    cache, slots = torch.zeros(3, 16, 576, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        mla_plugin.cache.append(cache, torch.ones(1, 512), torch.ones(1, 64), slots, **scale)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        mla_plugin.cache.gather(cache, table, lengths, kv_lora_rank=512, **scale)


def test_a_scale_that_requires_grad_is_an_error() -> None:
    arguments = paged("fp8", 16, 1, 2, torch.float32)
    arguments["kv_scale"] = torch.nn.Parameter(arguments["kv_scale"])
    with pytest.raises(NotImplementedError, match="an argument requires grad"):
        mla_plugin.decode(**arguments)
    with torch.no_grad():
        assert not mla_plugin.decode(**arguments)[0].requires_grad


def test_float16_queries_over_a_bfloat16_rope_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"q_nope_abs torch.float16.*'fp8_ds_mla' one of bfloat16, float32, float64"):
        mla_plugin.decode(**paged("fp8_ds_mla", 16, 1, 2, torch.float16))


@pytest.mark.parametrize(
    ("kv_format", "changes", "message"),
    [
        ("fp8_ds_mla", {"dtype": torch.float16}, r"c_kv is torch.float16.*one of bfloat16, float32"),
        ("fp8", {"dtype": torch.float64}, r"c_kv is torch.float64.*one of bfloat16, float16, float32"),
        ("fp8", {"power_of_2_scales": True}, r"power_of_2_scales=True with kv_cache_format='fp8'"),
        ("fp8_ds_mla", {"power_of_2_scales": "no"}, "power_of_2_scales='no'; expected True or False"),
        ("fp8", {"kv_scale": None}, r"kv_scale is missing"),
        ("fp8_ds_mla", {"rope": 32}, r"k_rope has shape \[3, 32\].*\[3, 64\]"),
        ("fp8_ds_mla", {"rank": 256}, r"R=256; a token of .* 656 bytes and R=512"),
    ],
)
def test_append_refuses_and_writes_nothing(kv_format: str, changes: dict[str, Any], message: str) -> None:
    kv_cache = drawn_cache(kv_format, 2, 4)
    before, given = kv_cache.clone(), scale_for(kv_format) | changes
    dtype, rank, rope = given.pop("dtype", torch.bfloat16), given.pop("rank", R), given.pop("rope", DR)
    new = (torch.ones(3, width, dtype=dtype, device=DEVICE) for width in (rank, rope))
    with pytest.raises((ValueError, TypeError), match=message):
        cache.append(kv_cache, *new, torch.arange(3, device=DEVICE), **given)
    assert torch.equal(kv_cache, before)


def test_tensors_of_another_format_are_an_error() -> None:
    """For those who build ``DecodeTensors`` themselves."""
    from mla_plugin.arguments.decode import DecodeTensors
    from mla_plugin.arguments.decode_checks import check_tensors

    arguments = paged("fp8", 16, 1, 2, torch.float32)
    c_kv, k_rope, scale = split_quantised(arguments["kv_cache"], R, "fp8", arguments["kv_scale"])
    given = DecodeTensors(
        *(arguments["q_nope_abs"], arguments["q_rope"], c_kv, k_rope, 0.1),
        page_table=arguments["page_table"],
        seqlens_kv=arguments["seqlens_kv"],
        kv_scale=scale,
        kv_cache_format="fp8",
    )
    check_tensors(given)
    for changes, message in (
        ({"kv_cache_format": "fp8_ds_mla"}, r"c_kv torch.uint8, k_rope torch.uint8; .* torch.bfloat16"),
        ({"kv_scale": scale[None]}, r"kv_scale is torch.float32 \[1\]; expected float32 \[\]"),
        ({"kv_scale": None}, r"kv_scale is None"),
        ({"kv_cache_format": "fp4"}, r"kv_cache_format='fp4'"),
        ({"kv_cache_format": "plain"}, r"kv_scale is given with kv_cache_format='plain'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            check_tensors(given._replace(**changes))
