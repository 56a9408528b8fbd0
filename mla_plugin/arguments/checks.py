"""Checks that both operations share; errors say what was given, what is accepted, what to do."""

from __future__ import annotations

import math
import numbers
import sys

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, x: object, shape: str = "") -> None:
    """A dense tensor in one device's memory.

    Args:
        name: of the argument.
        x: what was given.
        shape: what the tensor should look like, in words such as ``"[B, S_q, H, R]"``.

    Raises:
        TypeError: it is something else; the message says what to do.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; a torch.Tensor{shape and ' '}{shape} is needed")
    if x.is_nested or x.layout != torch.strided:
        kind = "a nested tensor" if x.is_nested else f"of the memory layout {x.layout}"
        raise TypeError(
            f"{name} is {kind}; a dense tensor (torch.strided) is needed: .to_dense(), and for sequences of different "
            "lengths one padded or packed tensor beside their lengths (qkv_format='thd' with cu_seqlens_q, seqlens_kv)"
        )
    distributed = sys.modules.get("torch.distributed.tensor")  # if there is a DTensor, somebody imported it
    if distributed is not None and isinstance(x, distributed.DTensor):
        raise TypeError(
            f"{name} is a DTensor, of which each device holds a part; attention computes on one device: call it inside "
            "torch.distributed.tensor.experimental.local_map with batch or heads sharded, or pass "
            f"{name}.to_local()"
        )


def check_softmax_scale(softmax_scale: object) -> None:
    """A positive, finite number that is no tensor."""
    if isinstance(softmax_scale, torch.Tensor):
        raise TypeError(
            "softmax_scale is a torch.Tensor; a float is needed, because no gradient goes to it and reading it would "
            "wait for the device: multiply q by a learnable scale, or pass float(softmax_scale)"
        )
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(
            f"softmax_scale={softmax_scale!r} is {type(softmax_scale).__name__}; a positive number is needed, such as "
            "(qk_nope_head_dim + qk_rope_head_dim) ** -0.5"
        )
    if not 0.0 < softmax_scale < math.inf:  # type: ignore[operator]
        raise ValueError(
            f"softmax_scale={softmax_scale}; a positive, finite number is needed, such as "
            "(qk_nope_head_dim + qk_rope_head_dim) ** -0.5"
        )
