"""The schema of a PyTorch operator, derived from the type hints of a function or a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import torch

_AS_DECLARED = {tuple[int, int] | None: Sequence[int] | None}
"""Types that PyTorch's schemas lack, and their replacements."""


def schema_of(fields: Mapping[str, Any]) -> str:
    """The arguments of an operator's schema, such as ``(Tensor q, float softmax_scale)``.

    Args:
        fields: argument name to type: torch.Tensor, bool, int, float, str, a pair of ints, or one of them or None.

    Raises:
        ValueError: PyTorch's schemas do not support the type.
    """

    def declared(*arguments: object) -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, kind, annotation=_AS_DECLARED.get(hint, hint)) for name, hint in fields.items()
    ]
    declared.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    return torch.library.infer_schema(declared, mutates_args=()).partition(" -> ")[0]


def schema_of_function(function: Callable[..., Any]) -> str:
    """``schema_of`` a function's arguments."""
    return schema_of({name: hint for name, hint in get_type_hints(function).items() if name != "return"})
