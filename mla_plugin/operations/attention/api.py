"""The direct entry: from arguments to tensors and a request, and through the door."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mla_plugin.arguments.attention import LENGTHS, AttentionTensors, lengths_of_both
from mla_plugin.arguments.autocast import as_if_cast, autocast
from mla_plugin.arguments.checks import check_number, plain_number
from mla_plugin.arguments.options import CallOptions
from mla_plugin.hooks.attention import AttentionRequest, request_of
from mla_plugin.operations.attention.run import run_said

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    attn_mask_type: str = "causal",
    qkv_format: str = "bshd",
    window_size: tuple[int, int] | None = None,
    bottom_right_diagonal: bool | None = None,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    pad_between_seqs: bool | None = None,
    core_attention_bias_type: str = "no_bias",
    core_attention_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
    host: str = "direct",
    cp_group: ProcessGroup | DeviceMesh | None = None,
    cp_comm_type: str = "p2p",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with head_dim_qk and head_dim_v free to differ, on the best installed backend.

    out = softmax(softmax_scale * q @ k.T + mask) @ v, per head; query heads h share key-value head h // (H / H_kv).

    Args:
        q: [..., H, head_dim_qk]; leading dimensions by ``qkv_format``: ``bshd`` [B, S_q, H, D], ``sbhd``
            [S_q, B, H, D], ``bhsd`` [B, H, S_q, D], ``thd`` [T_q, H, D] (packed sequences). float16, bfloat16,
            float32 or float64. Any strides; backends prefer a contiguous last dimension.
        k: same layout with H_kv heads and S_kv (T_kv) tokens; H is a multiple of H_kv.
        v: same layout as k with head_dim_v.
        softmax_scale: positive; default head_dim_qk ** -0.5.
        attn_mask_type: ``no_mask``, ``causal`` (aligned top-left), ``causal_bottom_right``, ``padding``,
            ``padding_causal``, ``padding_causal_bottom_right`` or ``arbitrary``, as in TransformerEngine. With
            ``thd`` the names without ``padding`` mean their padding forms.
        window_size: (left, right): a query sees that many tokens around its diagonal; -1 is unlimited and (-1, 0)
            is causal.
        bottom_right_diagonal: where the window's diagonal ends; default False for ``causal`` and ``padding_causal``,
            True otherwise. Only for windows without a causal mask.
        attention_mask: bool, broadcastable to [B, H, S_q, S_kv], True = masked out; ``arbitrary`` only.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], cumulative true lengths, on q's device. Padding masks need them;
            in the dense layouts each sequence starts at the first token of its row. cu_seqlens_kv defaults to
            cu_seqlens_q.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [B + 1], where each sequence starts in memory; ``thd`` with
            padding between sequences.
        max_seqlen_q, max_seqlen_kv: longest sequence; default S. Pass them for ``thd``, where the default is T:
            backends size their grids by them, and one that is too small gives wrong results. On the CPU it raises.
        pad_between_seqs: default: True when padded offsets were given that are not the same objects as the others.
        core_attention_bias_type: ``no_bias``, ``post_scale_bias`` (added to the scaled scores) or ``pre_scale_bias``
            (added before scaling).
        core_attention_bias: additive, broadcastable to [B, H, S_q, S_kv], differentiable.
        dropout_p: probability of dropping an attention weight in this call; pass 0 in evaluation.
        deterministic: the backward must be bitwise reproducible; also asked for by
            ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`` and ``torch.use_deterministic_algorithms``.
        batch_invariant: the bits of a row of out and lse must not depend on what is beside it: the other sequences, the
            queries that came with it, keys that it does not see. So chunks of a prefill, with ``causal_bottom_right``
            over all keys so far, give the bits of one prefill. The backward promises nothing of the kind.
        backend: use this backend and no other; it never falls back.
        return_lse: also return the log-sum-exp.
        host: the framework that calls; selection rules differ between hosts.
        cp_group: ranks that share the sequences (context parallelism): a ProcessGroup or a one-dimensional DeviceMesh;
            each passes its own tokens as ``mla_plugin.context_parallel.shard`` cuts them, with cu_seqlens and
            max_seqlen of whole sequences. A group of one rank is as None. docs/context_parallel.md has the rest.
        cp_comm_type: ``p2p`` (keys and values travel around a ring), ``all_gather`` (they are gathered; causal windows
            too) or ``a2a`` (heads are exchanged for tokens; any mask).

    Returns:
        out, (*q.shape[:-1], head_dim_v) in q's dtype; with ``return_lse`` also lse, natural log, float32 (float64 for
        float64), [B, H, S_q] or [H, T_q], differentiable. A query that sees no key gives out 0, lse -inf and zero
        gradients; padded positions of ``thd`` are such queries.

    Raises:
        ValueError, TypeError: an argument is off; the message says what was given and what is accepted.
        NoBackendError: no backend takes the request; the message lists every backend's reasons.
        NotImplementedError: a forward-mode or a second derivative, or torch.func's grad, is asked for.
        ContextParallelError: the ranks of cp_group call with different arguments, or one of them failed.
    """
    if type(dropout_p) is not float:
        check_number("dropout_p", dropout_p)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend={backend!r} is {type(backend).__name__}; a backend's name or None is needed")
    q, k, v, bias = autocast(q, k, v, core_attention_bias)
    tensors = _tensors_of(
        q,
        k,
        v,
        bias,
        softmax_scale,
        dropout_p,
        attention_mask=attention_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_kv_padded=cu_seqlens_kv_padded,
    )
    options = CallOptions(
        qkv_format=qkv_format,
        attn_mask_type=attn_mask_type,
        window_size=window_size,
        bottom_right_diagonal=bottom_right_diagonal,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        pad_between_seqs=pad_between_seqs,
        bias_type=core_attention_bias_type,
        dropout_p=dropout_p,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
        host=host,
    )
    if cp_group is not None:
        from mla_plugin.context_parallel import api as context_parallel

        output = context_parallel.attention(tensors, options, backend, cp_group, cp_comm_type)
    else:
        output = run_said(tensors, options, backend)
    return (output.out, output.lse) if return_lse else output.out


def _tensors_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    softmax_scale: float | None,
    dropout_p: float,
    *,
    attention_mask: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_kv: torch.Tensor | None,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
) -> AttentionTensors:
    """The call's tensors with what defaults to another one: the keys' lengths, the scale, a seed for dropout."""
    if softmax_scale is None and isinstance(q, torch.Tensor) and not q.is_nested and q.dim() and (width := q.shape[-1]):
        softmax_scale = width**-0.5
    return AttentionTensors(
        q,
        k,
        v,
        1.0 if softmax_scale is None else plain_number(softmax_scale),
        *lengths_of_both(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
        attention_mask,
        bias,
        torch.randint(0, 2**62, (1,), dtype=torch.int64, device="cpu") if dropout_p else None,
    )


class DescribedCall(NamedTuple):
    """A call that is not made: tensors and completed options, the backend that it names, the group and the way."""

    tensors: AttentionTensors
    options: CallOptions
    backend: str | None
    cp_group: ProcessGroup | DeviceMesh | None
    cp_comm_type: str


def request_of_call(*tensors: torch.Tensor, **arguments: Any) -> tuple[AttentionRequest, str | None]:
    """The request that ``attention(*tensors, **arguments)`` makes, and the backend that it names; errors alike."""
    call = described_call(*tensors, **arguments)
    return request_of(call.tensors, call.options), call.backend


def described_call(*tensors: torch.Tensor, **arguments: Any) -> DescribedCall:
    """The call ``attention(*tensors, **arguments)``, not made.

    Nothing is computed, drawn or copied, so tensors of the meta device serve as well.

    Raises:
        ValueError, TypeError: as ``attention``.
    """
    try:
        given = _SIGNATURE.bind(*tensors, **arguments)
    except TypeError as error:
        raise TypeError(f"{error}; accepted are the arguments of mla_plugin.attention") from None
    given.apply_defaults()
    said = given.arguments
    backend, bias_type, scale = (said.pop(name) for name in ("backend", "core_attention_bias_type", "softmax_scale"))
    group, way = said.pop("cp_group"), said.pop("cp_comm_type")
    check_number("dropout_p", said["dropout_p"])
    q, k, v, bias = (said.pop(name) for name in ("q", "k", "v", "core_attention_bias"))
    of_lengths = {name: said.pop(name) for name in ("attention_mask", *LENGTHS)}
    q, k, v, bias = autocast(q, k, v, bias, cast=as_if_cast)
    call = _tensors_of(q, k, v, bias, scale, 0.0, **of_lengths)
    options = CallOptions(bias_type=bias_type, **said)
    if getattr(call.cu_seqlens_q, "is_meta", False):  # no memory, by which tensors are told apart
        options = options._replace(lengths_may_differ=call.cu_seqlens_kv is not call.cu_seqlens_q)
    return DescribedCall(call, options.completed(call), backend, group, way)


_SIGNATURE = inspect.signature(attention)
