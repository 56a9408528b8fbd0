"""Triton's interpreter, where a test needs bits that do not depend on NumPy's BLAS."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def products_by_row() -> Iterator[None]:
    """Let the interpreter compute ``tl.dot`` row by row, so that no row depends on its place in the tile.

    The interpreter multiplies by NumPy. What a row's sums round to there depends on the row's place among the others,
    on some CPUs (OpenBLAS for AVX2) and not on others. On a GPU it does not. Nothing changes where no kernel is
    interpreted.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    builder, handle, numpy = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.np
    product = builder.create_dot

    def product_by_row(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        rows = [
            product(self, handle(one, a.dtype), b, handle(sums, d.dtype), *options).data
            for one, sums in zip(*(numpy.split(x.data, x.data.shape[-2], axis=-2) for x in (a, d)), strict=True)
        ]
        return handle(numpy.concatenate(rows, axis=-2), d.dtype.scalar)

    builder.create_dot = product_by_row
    try:
        yield
    finally:
        builder.create_dot = product
