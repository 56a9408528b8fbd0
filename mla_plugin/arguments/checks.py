"""Checks shared by both operations; errors say what was given, what is expected and what to do."""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Iterable
from typing import Any

import torch

from mla_plugin import environment

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_LENGTH = 2**31 - 1
"""Of a sequence, in tokens: lengths are int32."""


def bound_arguments(
    signature: inspect.Signature, function: str, tensors: tuple[Any, ...], arguments: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, with defaults filled in.

    Args:
        signature: of the function.
        function: its name, for the error.
        tensors: positional arguments.
        arguments: keyword arguments.

    Raises:
        TypeError: the function does not take these arguments.
    """
    try:
        bound = signature.bind(*tensors, **arguments)
    except TypeError as error:
        raise TypeError(f"{error}; expected the arguments of {function}") from None
    bound.apply_defaults()
    return bound.arguments


def check_tensor(name: str, x: object, shape: str = "") -> None:
    """Check that x is a dense tensor on one device.

    Args:
        name: of the argument.
        x: the value given.
        shape: the expected shape as text, such as ``"[B, S_q, H, R]"``.

    Raises:
        TypeError: it is not; the message says what to do.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; expected a torch.Tensor{shape and ' '}{shape}")
    if x.is_nested or x.layout != torch.strided:
        if not x.is_nested:
            raise TypeError(f"{name} has the memory layout {x.layout}; expected torch.strided: pass {name}.to_dense()")
        raise TypeError(
            f"{name} is a nested tensor; expected a dense one, padded or packed, with the sequences' lengths: "
            "qkv_format='thd' with cu_seqlens_q, in decode seqlens_kv"
        )
    distributed = sys.modules.get("torch.distributed.tensor")  # if there is a DTensor, somebody imported it
    if distributed is not None and isinstance(x, distributed.DTensor):
        raise TypeError(
            f"{name} is a DTensor, and attention computes on one device's tensors: call it inside "
            "torch.distributed.tensor.experimental.local_map with batch or heads sharded, or pass "
            f"{name}.to_local()"
        )


def check_softmax_scale(softmax_scale: object) -> None:
    """Check that the scale is a positive, finite number and not a tensor."""
    if isinstance(softmax_scale, torch.Tensor):
        raise TypeError(
            "softmax_scale is a torch.Tensor; expected a float, because it gets no gradient and reading it would "
            "synchronise with the device: multiply q by a learnable scale, or pass float(softmax_scale)"
        )
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(
            f"softmax_scale={softmax_scale!r} is {type(softmax_scale).__name__}; expected a positive number, such as "
            "(qk_nope_head_dim + qk_rope_head_dim) ** -0.5"
        )
    if not 0.0 < plain_number(softmax_scale) < math.inf:
        raise ValueError(
            f"softmax_scale={softmax_scale}; expected a positive, finite number, such as "
            "(qk_nope_head_dim + qk_rope_head_dim) ** -0.5"
        )


def check_number(name: str, value: object) -> None:
    """Check that the value is a real number, neither a bool nor a tensor."""
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}={value!r}; expected a number")


def records_gradients() -> bool:
    """Whether a backward may follow. In inference mode autograd records nothing, ``torch.enable_grad`` or not."""
    if not torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or not torch.is_inference_mode_enabled()  # which dynamo does not trace


def check_device_type(device_type: object) -> None:
    """Check that a request's device type is a string."""
    if not isinstance(device_type, str):
        raise TypeError(f"device_type={device_type!r}; expected a string, such as 'cuda'")


def check_count(name: str, value: object, least: int = 0, most: int | None = None) -> None:
    """Check that the value is an integer, not a bool, at least ``least`` and at most ``most``."""
    if most is not None and isinstance(value, numbers.Integral) and int(value) > most:
        raise ValueError(f"{name}={value}; expected at most {most}")
    if type(value) is int and value >= least:  # a growing cache makes a request at each step: isinstance is slow here
        return
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name}={value!r}; expected an int")
    if value < least:
        raise ValueError(f"{name}={value}; expected at least {least}")


def plain_number(value: Any) -> Any:
    """Convert a number of another type (numpy, fractions) to float, inf on overflow; return anything else unchanged."""
    if type(value) is float or isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_choice(name: str, value: object, accepted: Iterable[str]) -> None:
    """Check that the value is one of the accepted strings."""
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(accepted)}")


def may_read(x: torch.Tensor) -> bool:
    """Whether the host may read x's values: on the CPU, and on a device with MLA_PLUGIN_CHECK=1, which synchronises.

    Not where they are traced: the operator reads them when it runs.
    """
    if torch.compiler.is_compiling():  # dynamo must not trace the read of os.environ
        return False
    if not (x.is_cpu or environment.is_value_check_requested()):  # before is_traced, because calls on a GPU end here
        return False
    return not (is_traced(x) or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


def is_traced(*tensors: torch.Tensor) -> bool:
    """The call is traced or transformed, or a tensor's memory does not hold its values: only the operator can take it.

    A subclass may have no memory of its own; that of a negated view (``x.conj().imag``) holds -x.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    for x in tensors:  # a generator in any() takes 1 us more
        if type(x) is not torch.Tensor or x.is_meta or x.is_neg():
            return True
    return torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active()
