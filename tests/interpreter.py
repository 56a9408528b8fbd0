"""Triton's interpreter without what it does for nothing: half of the time of the tests that run kernels in it.

At each call of a device function it goes through all names of ``triton.language`` for those that it replaces; for the
NumPy dtype of each tensor it makes a table of all dtypes; and it computes whether each integer operation overflows,
which nothing looks at unless its option ``debug`` is set.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from typing import Any


def make_quick() -> None:
    """Do each once, where something has imported the interpreter."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or interpreter._patch_builtin.__module__ == __name__:
        return
    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def names(package: Any) -> list[str]:
        """Of what the interpreter replaces; first asked for before it does."""
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, *rest: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, *rest)

    dtypes: dict[str, Any] = {}
    dtype_of = interpreter._get_np_dtype

    def np_dtype(given: Any) -> Any:
        name = given.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(given)
        return dtypes[name]

    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = np_dtype
    builder = interpreter.interpreter_builder
    _compare_to_bool(interpreter)
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _compare_to_bool(interpreter: Any) -> None:
    """Scalar comparisons, which Triton 3.9 broadcasts as integers and then does not take as masks."""
    builder = interpreter.InterpreterBuilder
    splat = builder.create_splat

    def create_splat(self: Any, shape: Any, x: Any) -> Any:
        return splat(self, shape, interpreter.TensorHandle(x.data, interpreter.tl.int1) if x.data.dtype == bool else x)

    builder.create_splat = create_splat
