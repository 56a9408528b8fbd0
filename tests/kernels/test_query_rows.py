"""What descriptors of the queries describe: exactly their rows, whatever the strides are."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode.descriptors import strides_of
from mla_plugin.kernels.decode.hopper.query_rows import query_rows
from mla_plugin.kernels.decode.invariant import launch as invariant
from mla_plugin.kernels.decode.wide import launch as wide
from tests.kernels.decode_cases import as_engines_have_it, paged
from tests.kernels.gathered_cases import call_of
from tests.kernels.gluon.hopper import hopper as hopper

BFLOAT16 = torch.bfloat16
CACHE = torch.zeros(1, 1, 576, dtype=BFLOAT16)


def laid_out(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    """Random numbers with these strides, NaN around them."""
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    memory = torch.full((offset + span,), torch.nan, dtype=BFLOAT16)
    x = memory.as_strided(shape, strides, offset)
    return x.copy_(torch.randn(shape)) if 0 not in strides else x.fill_(1.0)


def dense(shape: tuple[int, ...], order: str = "bshd", gap: int = 0) -> torch.Tensor:
    """Dimensions in this order in memory, each but the last with ``gap`` more elements."""
    sizes = dict(zip("bshd", shape, strict=True))
    strides, inner = {}, 1
    for name in reversed(order):
        strides[name] = inner
        inner = inner * sizes[name] + gap
    return laid_out(shape, tuple(strides[name] for name in "bshd"))


def tensors_of(q_nope_abs: torch.Tensor, q_rope: torch.Tensor) -> DecodeTensors:
    return DecodeTensors(q_nope_abs, q_rope, CACHE[..., :512], CACHE[..., 512:], 1.0)


def check(q_nope_abs: torch.Tensor, q_rope: torch.Tensor, *, is_copied: bool) -> tuple[int, ...]:
    """The described rows are the queries'; the block."""
    rows, found = query_rows(tensors_of(q_nope_abs, q_rope))
    assert found == is_copied
    assert 64 % math.prod(rows.block) == 0
    for queries, described in ((q_nope_abs, rows.q_nope_abs), (q_rope, rows.q_rope)):
        strides = strides_of(described)
        assert all(stride > 0 and 2 * stride % 16 == 0 for stride in strides)
        assert described.data_ptr() % 16 == 0
        assert is_copied or described.data_ptr() == queries.data_ptr()
        as_read = described.as_strided(described.shape, (*strides, 1))
        assert torch.equal(as_read.reshape(queries.shape), queries)
    return rows.block


@pytest.mark.parametrize("order", ["bshd", "hbsd", "bhsd", "sbhd", "shbd", "hsbd"])
@pytest.mark.parametrize("gap", [0, 8, 64])
def test_every_order_of_dimensions(order: str, gap: int) -> None:
    """Of the two tensors alike, and of one alone."""
    q_nope_abs, q_rope = dense((3, 2, 16, 512), order, gap), dense((3, 2, 16, 64), order, gap)
    plain = dense((3, 2, 16, 512)), dense((3, 2, 16, 64))
    for given in ((q_nope_abs, q_rope), (plain[0], q_rope), (q_nope_abs, plain[1])):
        check(*given, is_copied=False)


def test_heads_of_a_wider_tensor() -> None:
    """Their rows have one stride, and a larger one from query to query."""
    q_nope_abs, q_rope = dense((2, 3, 40, 512))[:, :, :16], dense((2, 3, 40, 64))[:, :, :16]
    assert check(q_nope_abs, q_rope, is_copied=False) == (4, 16)


@pytest.mark.parametrize(
    ("heads", "block"),
    [
        *((1, (64, 1)), (2, (32, 2)), (4, (16, 4)), (8, (8, 8)), (32, (2, 32)), (64, (1, 64)), (128, (1, 64))),
        *((24, (1, 8)), (48, (1, 16)), (96, (1, 32)), (40, (1, 8)), (3, None), (12, None), (20, None), (33, None)),
    ],
)
def test_blocks_by_heads(heads: int, block: tuple[int, int] | None) -> None:
    """None: they are copied."""
    q_nope_abs, q_rope = dense((3, 5, heads, 512), "hbsd", 8), dense((3, 5, heads, 64), "hbsd", 8)
    if heads == 1:  # always one stride
        block = (64,)
    assert check(q_nope_abs, q_rope, is_copied=block is None) == (block or (64,))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("fault", ["batch", "query", "head", "odd", "start"])
def test_what_descriptors_cannot_read_is_copied(fault: str, which: int) -> None:
    """A stride of 0, one that is no multiple of 16 bytes though it is one of 8, another start."""
    queries = [dense((3, 2, 16, 512)), dense((3, 2, 16, 64))]
    shape = tuple(queries[which].shape)
    strides = list(queries[which].stride())
    if fault in ("odd", "start"):
        strides[2] += 4 if fault == "odd" else 0
        strides[:2] = (2 * 16 * strides[2], 16 * strides[2])
        queries[which] = laid_out(shape, tuple(strides), 4 if fault == "start" else 0)
    else:
        strides[["batch", "query", "head"].index(fault)] = 0
        queries[which] = laid_out(shape, tuple(strides))
    check(*queries, is_copied=True)


@pytest.mark.parametrize("shape", [(1, 2, 16), (3, 1, 16), (3, 5, 1), (1, 1, 16), (1, 5, 1), (3, 1, 1), (1, 1, 1)])
def test_the_stride_of_a_dimension_of_size_1_is_arbitrary(shape: tuple[int, int, int]) -> None:
    """And need not be a multiple of anything."""
    draw = random.Random(0)
    for other in (0, 3, 2**45):
        queries = []
        for columns in (512, 64):
            x = dense((*shape, columns), draw.choice(["bshd", "hbsd"]))
            strides = (other if size == 1 else stride for size, stride in zip(shape, x.stride(), strict=False))
            queries.append(x.as_strided(x.shape, (*strides, 1)))
        check(*queries, is_copied=False)


@pytest.mark.parametrize("shape", [(1, 0, 16), (1, 3, 0), (0, 0, 16), (0, 0, 0), (2, 0, 16), (0, 3, 16)])
def test_no_query(shape: tuple[int, int, int]) -> None:
    """Launches are made of such a layout, too."""
    q_nope_abs, q_rope = torch.zeros(*shape, 512, dtype=BFLOAT16), torch.zeros(*shape, 64, dtype=BFLOAT16)
    _, is_copied = query_rows(tensors_of(q_nope_abs, q_rope))
    assert not is_copied


@pytest.mark.usefixtures("hopper")
def test_kernels_for_other_blocks_are_compiled_apart() -> None:
    """Also of the wide and of the batch-invariant kernel; what is read as it lies is not copied."""
    inputs = paged((2, 4, 16, 512, 64, 200), 64, BFLOAT16, [200, 17])
    found = {}
    for name, given in (("rows", inputs), ("blocks", as_engines_have_it(inputs))):
        options = given.options()
        del options["softmax_scale"]
        tensors = DecodeTensors(*given.tensors(), given.softmax_scale, **options)
        _, quantised = call_of((2, 4, 16, 200), 64, "fp8", BFLOAT16, [193, 70])
        quantised = quantised._replace(q_nope_abs=given.q_nope_abs, q_rope=given.q_rope, return_lse=False)
        found[name] = [
            *(decode_launch.make_launches(tensors), invariant.make_launches(tensors, 256)),
            decode_launch.make_launches(quantised),
        ]
        assert isinstance(found[name][-1].described, wide.Descriptors)
    for rows, blocks in zip(found["rows"], found["blocks"], strict=True):
        assert rows.code != blocks.code
        assert not rows.copies_queries
        assert not blocks.copies_queries
