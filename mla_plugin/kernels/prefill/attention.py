"""``mla_attention``: the prefill kernels as one differentiable function that works under torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import triton

from mla_plugin.arguments.checks import check_softmax_scale, check_tensor, is_traced, plain_number, records_gradients
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.arguments.mask import Band
from mla_plugin.arguments.schema import schema_of_function
from mla_plugin.arguments.transforms import is_batched, is_differentiated_by_transform, loop_under_vmap
from mla_plugin.kernels.prefill import launch_backward, launch_forward
from mla_plugin.kernels.prefill.forward import attention_forward_kernel
from mla_plugin.kernels.prefill.packing import Packing

_INTERPRETED = not isinstance(attention_forward_kernel, triton.JITFunction)


@functools.lru_cache(maxsize=1024)
def _packing(seqlen_q: int, seqlen_kv: int, is_causal: bool, qkv_format: str) -> Packing:
    return Packing(qkv_format, seqlen_q, seqlen_kv, mask=Band(-1, 0 if is_causal else -1, bottom_right=is_causal))


@functools.lru_cache(maxsize=1024)
def _kept(*_: object) -> dict[str, Any]:
    """What ``launch_forward.forward`` keeps for calls of one layout."""
    return {}


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, is_causal: bool, qkv_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = LAYOUTS[qkv_format].tokens
    packing = _packing(q.shape[tokens], k.shape[tokens], is_causal, qkv_format)
    # k's shape follows from those of q and v, its dtype and device are theirs
    layout = (q.shape, q.stride(), k.stride(), v.shape, v.stride(), q.dtype, q.device)
    kept = _kept(*layout, softmax_scale, is_causal, qkv_format)
    return launch_forward.forward(q, k, v, softmax_scale, packing, kept=kept)


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    softmax_scale: float,
    is_causal: bool,
    qkv_format: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = LAYOUTS[qkv_format].tokens
    packing = _packing(q.shape[tokens], k.shape[tokens], is_causal, qkv_format)
    return launch_backward.backward(q, k, v, out, lse, dout, None, softmax_scale, packing)


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty(LAYOUTS[options[-1]].lse_shape(q.shape), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def _backward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]


def _autograd(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = torch.ops.mla_plugin_kernels.prefill_backward(*ctx.saved_tensors, dout, *ctx.options)
    return (*gradients, None, None, None)


_library = torch.library.Library("mla_plugin_kernels", "FRAGMENT")
for _name, _kernel, _fake, _results in (
    ("prefill_forward", _forward, _forward_fake, "Tensor out, Tensor lse"),
    ("prefill_backward", _backward, _backward_fake, "Tensor dq, Tensor dk, Tensor dv"),
):
    _library.define(f"{_name}{schema_of_function(_kernel)} -> ({_results})")
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mla_plugin_kernels::{_name}", _fake, lib=_library)
    loop_under_vmap(_library, _name)
torch.library.register_autograd(
    "mla_plugin_kernels::prefill_forward", _autograd, setup_context=_setup_context, lib=_library
)
_operator = torch.ops.mla_plugin_kernels.prefill_forward.default


class _Eager(torch.autograd.Function):
    """Calls the operators without PyTorch's dispatcher, which takes as much CPU time as the launches."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = _forward(*args)
        _setup_context(ctx, args, output)
        ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        arguments = (*ctx.saved_tensors, dout, *ctx.options)
        run = torch.ops.mla_plugin_kernels.prefill_backward.default if is_batched(dout) else _backward
        return (*run(*arguments), None, None, None)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qkv_format: str, softmax_scale: float | None, is_causal: bool
) -> None:
    if not isinstance(qkv_format, str) or qkv_format not in LAYOUTS or LAYOUTS[qkv_format].is_packed:
        raise ValueError(
            f"qkv_format={qkv_format!r}; expected one of bshd, sbhd, bhsd (packed sequences: mla_plugin.attention)"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) is not torch.Tensor or x.is_nested or x.layout != torch.strided:
            check_tensor(name, x)
    if type(is_causal) is not bool:
        raise TypeError(f"is_causal={is_causal!r}; expected True or False")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions; {qkv_format} has 4")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one of bfloat16, float16, float32"
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; move them to one device")
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v have shapes {shapes}; q and k share head_dim_qk, k and v all but the last dimension")
    if q.shape[-1] % 8 or v.shape[-1] % 8 or not (0 < q.shape[-1] <= 576 and 0 < v.shape[-1] <= 512):
        raise ValueError(
            f"head_dim_qk={q.shape[-1]}, head_dim_v={v.shape[-1]}; both must be multiples of 8, the first at most 576 "
            "and the second 512"
        )
    layout = LAYOUTS[qkv_format]
    (batch_q, heads, _), (batch_kv, kv_heads, _) = layout.pick(q.shape), layout.pick(k.shape)
    if batch_q != batch_kv or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"batch {batch_q} and {batch_kv}, {heads} query heads over {kv_heads} "
            "key-value heads; batches must be equal and the query heads a multiple"
        )
    if softmax_scale is not None:
        check_softmax_scale(softmax_scale)
    if q.device.type not in ("cuda", "meta") and not _INTERPRETED:
        raise ValueError(f"q, k, v are on {q.device}; the kernels need a CUDA device: move the tensors there")
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in (q, k, v)):
        strides = ", ".join(str(x.stride(-1)) for x in (q, k, v))
        raise ValueError(
            f"the last dimensions of q, k, v have strides {strides}; they must be contiguous: .contiguous()"
        )


def _check_derivatives(*tensors: torch.Tensor) -> None:
    """Raise for a derivative that PyTorch would drop silently, or fail at in words of its own."""
    has_tangents = torch.autograd.forward_ad._current_level >= 0
    if has_tangents and any(is_batched(x) or fwAD.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("mla_attention has no forward-mode derivative; use reverse mode: torch.autograd.grad")
    if is_differentiated_by_transform() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(
            "mla_attention does not support torch.func's grad, vjp and functions built on them; use "
            "torch.autograd.grad or backward()"
        )


def mla_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    qkv_format: str = "bshd",
) -> torch.Tensor:
    """Attention with head_dim_qk != head_dim_v by our Triton kernels; differentiable, also under torch.compile.

    Algorithm: FlashAttention-2 (Dao, 2023) with two head dimensions. Origin: NVIDIA/TransformerEngine PR 2950.

    Args:
        q: [B, S_q, H, head_dim_qk] for ``bshd``; ``sbhd`` and ``bhsd`` by name. bfloat16, float16 or float32.
        k: same layout with H_kv heads and S_kv tokens; H is a multiple of H_kv.
        v: same layout as k with head_dim_v. head_dim_qk <= 576, head_dim_v <= 512, multiples of 8. The last
            dimension of each is contiguous, other strides may be anything (on Hopper, 2-byte tensors whose strides are
            not multiples of 16 elements, or whose address is not a multiple of 16 bytes, are copied first).
        softmax_scale: positive; default head_dim_qk ** -0.5.
        is_causal: right-aligned: query i sees keys up to S_kv - S_q + i.
        qkv_format: ``bshd``, ``sbhd`` or ``bhsd``.

    Returns:
        out (*q.shape[:-1], head_dim_v), dtype of q; a query that sees no key gives 0. The gradients are bitwise
        deterministic.

    Raises:
        ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
        NotImplementedError: a forward-mode derivative or one of torch.func's is requested.
    """
    _check(q, k, v, qkv_format, softmax_scale, is_causal)
    if not torch.compiler.is_compiling():
        _check_derivatives(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else plain_number(softmax_scale)
    if is_traced(q, k, v):
        run: Callable[..., Any] = _operator
    elif records_gradients() and (q.requires_grad or k.requires_grad or v.requires_grad):
        run = _Eager.apply
    else:
        run = _forward
    out: torch.Tensor = run(q, k, v, scale, is_causal, qkv_format)[0]
    return out
