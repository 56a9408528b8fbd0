"""The torch.library operators: the boundary that torch.compile does not look behind.

``mla_plugin::attention_forward`` and ``mla_plugin::attention_backward`` take tensors and plain values, build the
request (cached), resolve it (cached) and run the plan. The backward resolves anew: it may run on another backend than
the forward, because only out and lse tie the two.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mla_plugin import environment
from mla_plugin.arguments import attention as checks
from mla_plugin.hooks.types import AttentionOutput, AttentionRequest, AttentionTensors, Gradients, Residuals
from mla_plugin.operations.attention import dispatch
from mla_plugin.resolver.attention import resolve

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? cu_seqlens_q_padded, "
    "Tensor? cu_seqlens_kv_padded, Tensor? attention_mask, Tensor? bias, Tensor? dropout_seed"
)
_OPTIONS = (
    "float softmax_scale, str qkv_format, str attn_mask_type, SymInt window_left, SymInt window_right, "
    "bool bottom_right_diagonal, SymInt max_seqlen_q, SymInt max_seqlen_kv, bool pad_between_seqs, str bias_type, "
    "bool bias_requires_grad, float dropout_p, bool is_training, bool deterministic, bool return_lse, str host, "
    "str? backend"
)
_NUM_TENSORS = 10
_BIAS, _QKV_FORMAT, _BIAS_REQUIRES_GRAD = 8, _NUM_TENSORS + 1, _NUM_TENSORS + 10

_library = torch.library.Library("mla_plugin", "DEF")
_library.define(f"attention_forward({_TENSORS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)


def _bias_shape(bias: torch.Tensor | None) -> str | None:
    """The bias's shape in TransformerEngine's letters: ``1`` for a broadcast dimension, else b, h, s, s."""
    if bias is None:
        return None
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    return "".join("1" if size == 1 else letter for size, letter in zip(shape[:3], "bhs", strict=True)) + "s"


@functools.lru_cache(maxsize=4096)
def _request(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    head_dim_v: int,
    num_sequences: int | None,
    dtype: torch.dtype,
    device: torch.device,
    bias_shape: str | None,
    lengths_may_differ: bool,
    deterministic_process: bool,
    options: tuple[Any, ...],
) -> AttentionRequest:
    _, qkv_format, mask, left, right, bottom_right, max_q, max_kv, pad, *rest = options
    bias_type, bias_requires_grad, dropout_p, is_training, deterministic, return_lse, host, _ = rest
    batch = num_sequences if qkv_format == "thd" else q_shape[1 if qkv_format == "sbhd" else 0]
    heads = 1 if qkv_format == "bhsd" else -2
    return AttentionRequest(
        qkv_format=qkv_format,
        dtype=dtype,
        device_type=device.type,
        device_index=device.index,
        batch_size=batch or 0,
        num_heads=q_shape[heads],
        num_kv_heads=k_shape[heads],
        max_seqlen_q=max_q,
        max_seqlen_kv=max_kv,
        head_dim_qk=q_shape[-1],
        head_dim_v=head_dim_v,
        attn_mask_type=mask,
        window_size=(left, right),
        bottom_right_diagonal=bottom_right,
        pad_between_seqs=pad,
        bias_type=bias_type,
        bias_shape=bias_shape,
        bias_requires_grad=bias_requires_grad,
        dropout_p=dropout_p,
        is_training=is_training,
        deterministic=deterministic or deterministic_process,
        return_lse=return_lse,
        host=host,
        lengths_may_differ=lengths_may_differ,
    )


def _may_differ(cu_q: torch.Tensor | None, cu_kv: torch.Tensor | None) -> bool:
    """Queries and keys have offsets of their own; autograd hands a saved tensor back as another object."""
    if cu_q is None or cu_kv is None or cu_q is cu_kv:
        return False
    return cu_q.data_ptr() != cu_kv.data_ptr() or cu_q.stride() != cu_kv.stride()


def _split(args: tuple[Any, ...]) -> tuple[AttentionTensors, AttentionRequest, str | None]:
    """Operator arguments (tensors, then options) as tensors, request and the backend asked for."""
    q, k, v, cu_q, cu_kv, cu_q_padded, cu_kv_padded, mask, bias, seed = args[:_NUM_TENSORS]
    options = args[_NUM_TENSORS:]
    # The contract promises backends a contiguous last dimension: PyTorch's CPU kernel reads garbage without it.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tensors = AttentionTensors(q, k, v, options[0], cu_q, cu_kv, cu_q_padded, cu_kv_padded, mask, bias, seed)
    sequences = None if cu_q is None else cu_q.shape[0] - 1
    deterministic = torch.are_deterministic_algorithms_enabled() or environment.is_deterministic_requested()
    request = _request(
        q.shape,
        k.shape,
        v.shape[-1],
        sequences,
        q.dtype,
        q.device,
        _bias_shape(bias),
        _may_differ(cu_q, cu_kv),
        deterministic,
        options,
    )
    return tensors, request, options[-1]


def _lse_shape(q: torch.Tensor, qkv_format: str) -> tuple[int, ...]:
    if qkv_format == "thd":
        return (q.shape[1], q.shape[0])
    batch, heads, length = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "bhsd": (0, 1, 2)}[qkv_format]
    return (q.shape[batch], q.shape[heads], q.shape[length])


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, and float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _empty_output(tensors: AttentionTensors, request: AttentionRequest) -> AttentionOutput:
    """No query or no key at all: every row sees no key."""
    q = tensors.q
    lse = q.new_full(_lse_shape(q, request.qkv_format), -torch.inf, dtype=lse_dtype(q.dtype))
    return AttentionOutput(q.new_zeros((*q.shape[:-1], request.head_dim_v)), lse)


def _check_output(output: AttentionOutput, q: torch.Tensor, request: AttentionRequest, backend: str) -> None:
    """What compiled code was promised by the fake operator: it would read beyond a smaller tensor."""
    for name, x, shape, dtype in (
        ("out", output.out, (*q.shape[:-1], request.head_dim_v), q.dtype),
        ("lse", output.lse, _lse_shape(q, request.qkv_format), lse_dtype(q.dtype)),
    ):
        if x.shape != shape or x.dtype != dtype:
            raise RuntimeError(
                f"the backend {backend!r} returned {name} as {tuple(x.shape)} {x.dtype}; {shape} {dtype} is the "
                f"contract. MLA_PLUGIN_BLOCK={backend} leaves it out, mla_plugin.conformance tests it"
            )


def _reads_lengths(request: AttentionRequest) -> bool:
    """Values are read where it costs nothing, and where the user accepts that the host waits."""
    return request.has_padding and (request.device_type == "cpu" or environment.is_value_check_requested())


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, request, backend = _split(args)
    if tensors.q.numel() == 0 or tensors.k.numel() == 0:
        output = _empty_output(tensors, request)
    else:
        if _reads_lengths(request):
            checks.check_length_values(tensors, request)
        plan = resolve(request, backend=backend)
        output = dispatch.forward(plan, tensors)
        _check_output(output, tensors.q, request, plan.forward_backend)
    return output.out.contiguous(), output.lse.contiguous()


def _backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    tensors, request, backend = _split(args)
    if tensors.q.numel() == 0 or tensors.k.numel() == 0:
        dbias = None if tensors.bias is None else torch.zeros_like(tensors.bias)
        gradients = Gradients(
            torch.zeros_like(tensors.q), torch.zeros_like(tensors.k), torch.zeros_like(tensors.v), dbias
        )
    else:
        gradients = dispatch.backward(resolve(request, backend=backend), Residuals(tensors, out, lse), dout, dlse)
    dbias = gradients.dbias if request.bias_requires_grad and gradients.dbias is not None else out.new_empty(0)
    return tuple(gradient.contiguous() for gradient in (gradients.dq, gradients.dk, gradients.dv, dbias))


def _forward_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v, qkv_format = args[0], args[2], args[_QKV_FORMAT]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(_lse_shape(q, qkv_format), dtype=lse_dtype(q.dtype))


def _backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    q, k, v, bias = args[0], args[1], args[2], args[_BIAS]
    dbias = bias.new_empty(bias.shape) if args[_BIAS_REQUIRES_GRAD] else out.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


class _Attention(torch.autograd.Function):
    """The gradient of ``attention_forward``.

    It is registered as a kernel of the autograd key and not through ``torch.library.register_autograd``, which walks
    the schema at every call: 28 arguments cost 0.25 ms there, and it lets forward-mode tangents get lost in silence.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return attention_forward(*args)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
        ctx.options = inputs[_NUM_TENSORS:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        unused = (None,) * (_NUM_TENSORS - 3 + len(ctx.options))
        if dout is None and dlse is None:
            return (None, None, None, *unused)
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dbias = torch.ops.mla_plugin.attention_backward(dout, dlse, out, lse, *tensors, *ctx.options)
        gradients: list[torch.Tensor | None] = [dq, dk, dv, *unused]
        if ctx.needs_input_grad[_BIAS]:
            gradients[_BIAS] = dbias
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError(
            "attention has no forward-mode derivative (jvp); use reverse mode: torch.autograd.grad or backward()"
        )


def _autograd_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    has_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[:_NUM_TENSORS])
    if has_gradient or torch.autograd.forward_ad._current_level >= 0:
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "torch.func's grad, vjp, jvp and what is made of them do not go through attention; use "
                "torch.autograd.grad or backward()"
            )
        return _Attention.apply(*args)  # type: ignore[no-any-return, no-untyped-call]
    return _Attention.forward(*args)


def _no_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise NotImplementedError(
        "attention has no second derivative here; for create_graph=True use an attention of plain PyTorch operations"
    )


_library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
_library.impl("attention_forward", _autograd_forward, "Autograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("mla_plugin::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("mla_plugin::attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd("mla_plugin::attention_backward", _no_second_derivative, lib=_library)

attention_forward = torch.ops.mla_plugin.attention_forward.default
