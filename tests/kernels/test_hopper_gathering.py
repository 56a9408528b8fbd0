"""The gathering warpgroup of the Hopper decode kernel in the interpreter of ``gluon``, against float64."""

from __future__ import annotations

import random

import pytest
import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, PLAIN
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.hopper import gathering
from mla_plugin.kernels.decode.hopper.kernel import hopper_decode_kernel
from mla_plugin.kernels.launch import Launch
from mla_plugin.plugins.triton import decode
from tests.kernels.decode_cases import as_engines_have_it
from tests.kernels.gathered_cases import call_of, check, is_taken, with_queries
from tests.kernels.gluon.hopper import hopper as hopper
from tests.kernels.gluon.translate import Program
from tests.kernels.gluon.values import as_value
from tests.requests import H100

pytestmark = pytest.mark.usefixtures("hopper", "few_programs_of_the_sum")
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
KINDS = [(FP8, BFLOAT16), (FP8, FLOAT16), (FP8_DS_MLA, BFLOAT16), (PLAIN, BFLOAT16), (PLAIN, FLOAT16)]
PAGES = (1, 2, 16, 32, 48)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 192, 193, 500])
@pytest.mark.parametrize(("kv_format", "dtype"), KINDS)
def test_lengths_around_a_tile(kv_format: str, dtype: torch.dtype, length: int) -> None:
    page_size = PAGES[length % len(PAGES)]
    check(*call_of((1, 1, 20, 500), page_size, kv_format, dtype, [length]))


@pytest.mark.parametrize("parts", [1, 2, 13])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kv_format", [FP8, FP8_DS_MLA, PLAIN])
def test_factors_in_combination(kv_format: str, seed: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sequences among others, more or fewer of them than parts, rows of several queries in one tile."""
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: parts)
    draw = random.Random(f"{kv_format} {100 * parts + seed}")
    batch, seqlen_q, heads = draw.choice([1, 2, 3, 7]), draw.choice([1, 2, 3, 4]), draw.choice([24, 48, 128])
    lengths = [draw.choice([0, 1, 63, 64, 65, draw.randrange(300)]) for _ in range(batch)]
    page_size = draw.choice([None, 64, *PAGES] if kv_format == FP8 else PAGES)
    if page_size in (None, 64):
        heads = max(heads, 40)  # the transposed kernel takes fewer rows
    dtype = draw.choice([dtype for name, dtype in KINDS if name == kv_format])
    check(*call_of((batch, seqlen_q, heads, 300), page_size, kv_format, dtype, lengths, seed, draw.random() < 0.7))


@pytest.mark.parametrize(("kv_format", "dtype"), [(FP8, BFLOAT16), (PLAIN, FLOAT16)])
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_c_kv_and_k_rope_of_unlike_strides(kv_format: str, dtype: torch.dtype, page_size: int) -> None:
    inputs, tensors = call_of((2, 1, 20, 300), page_size, kv_format, dtype, [193, 300])
    gap = torch.cat([tensors.k_rope, tensors.k_rope], -1)[..., :64]
    check(inputs, tensors._replace(c_kv=tensors.c_kv.contiguous(), k_rope=gap))


@pytest.mark.parametrize(("kv_format", "dtype"), KINDS)
def test_queries_of_several_tokens_as_engines_have_them(kv_format: str, dtype: torch.dtype) -> None:
    for heads, seqlen_q in ((16, 4), (24, 3), (96, 2)):
        inputs, tensors = call_of((2, seqlen_q, heads, 200), 16, kv_format, dtype, [193, 70], is_causal=True)
        queries = as_engines_have_it(inputs)
        check(*with_queries(inputs, tensors, queries.q_nope_abs, queries.q_rope))


@pytest.mark.parametrize(("kv_format", "dtype"), [(FP8, FLOAT16), (FP8_DS_MLA, BFLOAT16), (PLAIN, FLOAT16)])
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_no_entry_behind_the_last_page_is_read(kv_format: str, dtype: torch.dtype, page_size: int) -> None:
    """The table ends with it."""
    inputs, tensors = call_of((1, 1, 20, 192), page_size, kv_format, dtype, [192])
    assert tensors.page_table is not None
    check(inputs, tensors._replace(page_table=tensors.page_table[:, : 192 // page_size].clone()))


def test_tiles_behind_the_longest_sequence_do_not_exist() -> None:
    """The next tile of one of 2^31 - 1 keys begins beyond int32."""
    exist = Program((1,), (0,), 0).translated(gathering.keys_before)
    last = as_value(2**31 - 64)
    assert exist(last, as_value(2**31 - 1), None).data.sum() == 63
    for start in (last + 64, last + 128):
        assert not exist(start, as_value(2**31 - 1), None).data.any()


@pytest.mark.parametrize(
    ("kv_format", "page_size", "is_expected"),
    [
        *((FP8, 64, True), (FP8, None, True), (FP8_DS_MLA, 1, True), (PLAIN, 16, True), (PLAIN, 64, True)),
        *((FP8_DS_MLA, 64, False), (FP8_DS_MLA, None, False)),
    ],
)
def test_the_backend_launches_what_it_says(
    kv_format: str, page_size: int | None, is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tensors = call_of((2, 1, 40, 300), page_size, kv_format, BFLOAT16, [300, 17])
    launched: list[object] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *_: launched.append(self.kernel))
    decode.forward(tensors, batch_invariant=False)
    accepted = decode.select(DecodeRequest.of(tensors).replace(device_type="cuda"), H100)
    assert isinstance(accepted, Accepted)
    assert (hopper_decode_kernel in launched) == is_expected
    assert (accepted.notes[0] == "by the Hopper kernel") == is_expected


@pytest.mark.parametrize("kv_format", [FP8, FP8_DS_MLA, PLAIN])
def test_rows_off_16_bytes_are_not_gathered(kv_format: str) -> None:
    """Nor is a cache without room."""
    _, tensors = call_of((2, 1, 20, 300), 16, kv_format, BFLOAT16, [300, 17])
    pages, page_size, _ = tensors.c_kv.shape
    gap = tensors.c_kv.new_zeros(pages, page_size, 1024)
    shifted = gap[..., 8 // gap.element_size() :][..., : tensors.c_kv.shape[-1]]
    narrow = gap.view(-1)[: pages * page_size * 1020].view(pages, page_size, 1020)[..., : tensors.c_kv.shape[-1]]
    assert is_taken(tensors)
    assert is_taken(tensors._replace(c_kv=gap[..., : tensors.c_kv.shape[-1]]))
    assert not is_taken(tensors._replace(c_kv=shifted))
    assert not is_taken(tensors._replace(c_kv=narrow))
    assert not is_taken(tensors._replace(c_kv=gap[:0, :, : tensors.c_kv.shape[-1]]))
