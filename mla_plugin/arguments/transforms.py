"""Our operators under PyTorch's transforms: one call after another under vmap, an error where a derivative is wanted.

Without these PyTorch would refuse vmap or warn of its own fallback, and would drop derivatives silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mla_plugin.arguments.checks import records_gradients


def wants_derivative(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors requires grad while gradients are recorded, or has a forward-mode tangent."""
    is_recorded = records_gradients()
    # is_compiling comes first: otherwise dynamo guards on the level and recompiles inside of dual_level()
    is_forward_mode = not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0
    if not (is_recorded or is_forward_mode):
        return False
    for x in tensors:
        if is_recorded and x.requires_grad:
            return True
        if is_forward_mode and _has_tangent(x):
            return True
    return False


def _has_tangent(x: torch.Tensor) -> bool:
    """False for what vmap has batched, which tells no tangent: the operator asks for the tangents of each part."""
    return not is_batched(x) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def is_batched_by_autograd(*gradients: torch.Tensor | None) -> bool:
    """Whether ``torch.autograd.grad(is_grads_batched=True)`` gives these to a backward: its vmap is another one."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients)


def is_batched(*tensors: torch.Tensor | None) -> bool:
    """Whether one of them is batched by vmap, of either kind."""
    of_vmap = torch._C._functorch.is_batchedtensor
    return is_batched_by_autograd(*tensors) or any(x is not None and of_vmap(x) for x in tensors)


def is_differentiated_by_transform() -> bool:
    """Whether torch.func's grad, vjp or jvp is around."""
    kinds = torch._C._functorch.TransformType
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(transform.key() in (kinds.Grad, kinds.Jvp) for transform in stack)


def refuse_derivatives(library: torch.library.Library, name: str, message: str) -> None:
    """Make an operator of the library without a derivative raise NotImplementedError where one is wanted.

    It is a kernel of the autograd key, which torch.func's grad, vjp and jvp reach too, whatever else is around them.

    Args:
        library: which defines the operator.
        name: of the operator, without its namespace.
        message: of the error.
    """
    operator = _operator(library, name)

    def run(*arguments: Any) -> Any:
        if wants_derivative(x for x in arguments if isinstance(x, torch.Tensor)):
            raise NotImplementedError(message)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    library.impl(name, run, "Autograd")


def loop_under_vmap(library: torch.library.Library, name: str) -> None:
    """Let an operator of the library run once for each index of a dimension that torch.vmap maps over.

    Args:
        library: which defines the operator.
        name: of the operator, without its namespace.
    """
    operator = _operator(library, name)
    declared = operator._schema.arguments
    written = {index: x.name for index, x in enumerate(declared) if x.alias_info is not None and x.alias_info.is_write}

    def run(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        if not info.batch_size:
            raise ValueError(f"{operator} under vmap over a dimension of size 0; expected at least 1")
        for index, argument in written.items():
            if in_dims[index] is None:
                raise NotImplementedError(
                    f"{operator} under vmap writes to {argument}, which all calls share; map over it too, or make one "
                    "call without vmap"
                )

        def at(index: int) -> Any:
            return pytree.tree_map(
                lambda x, dim: x if dim is None else x.select(dim, index), list(arguments), list(in_dims)
            )

        found = [pytree.tree_flatten(operator(*at(index))) for index in range(info.batch_size)]
        if not operator._schema.returns:
            return None, None
        structure = found[0][1]
        stacked = [torch.stack(same) for same in zip(*(leaves for leaves, _ in found), strict=True)]
        return pytree.tree_unflatten(stacked, structure), pytree.tree_unflatten([0] * len(stacked), structure)

    torch.library.register_vmap(f"{library.ns}::{name}", run, lib=library)


def _operator(library: torch.library.Library, name: str) -> Any:
    return getattr(getattr(torch.ops, library.ns), name).default
