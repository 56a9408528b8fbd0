"""What tests/interpreter.py makes quick gives what Triton's own interpreter gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def _half(x):
    return tl.where(x > 2, x / 2, tl.math.exp2(x))


@triton.jit
def _halves_kernel(X, Out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(Out + offsets, _half(tl.load(X + offsets)) + tl.max(offsets))


def test_a_kernel_with_device_functions() -> None:
    x, out = torch.arange(8.0), torch.empty(8)
    _halves_kernel[(1,)](x, out, 8)
    torch.testing.assert_close(out, torch.where(x > 2, x / 2, x.exp2()) + 7)


def test_the_language_is_itself_again_after_a_kernel() -> None:
    packages = (tl, tl.tensor, tl.math)
    before = [dict(vars(package)) for package in packages]
    _halves_kernel[(1,)](torch.arange(8.0), torch.empty(8), 8)
    for package, members in zip(packages, before, strict=True):
        assert vars(package).keys() == members.keys()
        assert [name for name, member in members.items() if vars(package)[name] is not member] == []
    assert all(map(tl.core.is_builtin, (tl.load, tl.tensor.__add__, tl.math.exp2)))


def test_dtypes() -> None:
    from triton.runtime.interpreter import _get_np_dtype

    assert _get_np_dtype.__module__ == interpreter.__name__
    for given, wanted in (
        (tl.float16, np.float16),
        (tl.bfloat16, np.uint16),
        (tl.int1, np.bool_),
        (tl.int64, np.int64),
    ):
        for _ in range(2):
            assert _get_np_dtype(given) == wanted
            assert _get_np_dtype(tl.block_type(given, [4])) == wanted
            assert _get_np_dtype(tl.pointer_type(given)) == np.uint64
            assert _get_np_dtype(tl.block_type(tl.pointer_type(given), [4])) == np.uint64
