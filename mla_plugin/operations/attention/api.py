"""``mla_plugin.attention``: builds the tensors and the request from the arguments and runs them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mla_plugin.arguments.attention import LENGTHS, AttentionTensors, lengths_of_both, tensors_of_call
from mla_plugin.arguments.autocast import as_if_cast, autocast
from mla_plugin.arguments.checks import bound_arguments, check_choice, check_number, check_tensor, plain_number
from mla_plugin.arguments.options import COMM_TYPES, CallOptions
from mla_plugin.hooks.attention import AttentionRequest, request_of
from mla_plugin.operations.attention.known import keep, known_of, plain_known_of
from mla_plugin.operations.attention.run import is_observed, run_known, run_observed
from mla_plugin.resolver.asking import check_backend_name

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
    """Attention on the best installed backend; head_dim_qk and head_dim_v may differ.

    out = softmax(softmax_scale * q @ k.T + mask) @ v, per head; query head h uses key-value head h // (H / H_kv).

    Args:
        q: [..., H, head_dim_qk]; leading dimensions by ``qkv_format``: ``bshd`` [B, S_q, H, D], ``sbhd``
            [S_q, B, H, D], ``bhsd`` [B, H, S_q, D], ``thd`` [T_q, H, D] (packed sequences). float16, bfloat16,
            float32 or float64. Any strides; backends prefer a contiguous last dimension.
        k: same layout with H_kv heads and S_kv (T_kv) tokens; H is a multiple of H_kv.
        v: same layout as k with head_dim_v. With absorbed weights pass k[..., :512], not a copy of it: at 576/512 the
            fast kernel for Hopper needs v in k's memory.
        softmax_scale: positive; default head_dim_qk ** -0.5.
        attn_mask_type: ``no_mask``, ``causal`` (aligned top-left), ``causal_bottom_right``, ``padding``,
            ``padding_causal``, ``padding_causal_bottom_right`` or ``arbitrary``, as in TransformerEngine. With
            ``thd`` the names without ``padding`` mean their padding forms.
        window_size: (left, right): tokens that a query sees on each side of the diagonal; -1 is unlimited and (-1, 0)
            is causal.
        bottom_right_diagonal: align the window's diagonal with the last query and the last key; default False for
            ``causal`` and ``padding_causal``, True otherwise. Only for windows without a causal mask.
        attention_mask: bool, broadcastable to [B, H, S_q, S_kv], True = masked out; ``arbitrary`` only.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], cumulative true lengths, on q's device. Padding masks need them;
            in the dense layouts each sequence starts at the first token of its row. cu_seqlens_kv defaults to
            cu_seqlens_q.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [B + 1], where each sequence starts in memory; ``thd`` with
            padding between sequences.
        max_seqlen_q, max_seqlen_kv: longest sequence; default S. Pass them for ``thd``, where the default is T:
            backends size their grids by them. A value that is too small raises on the CPU and gives wrong results on
            a GPU.
        pad_between_seqs: default: True when padded offsets are given that are not the same tensors as cu_seqlens.
        core_attention_bias_type: ``no_bias``, ``post_scale_bias`` (added to the scaled scores) or ``pre_scale_bias``
            (added before scaling).
        core_attention_bias: additive, broadcastable to [B, H, S_q, S_kv], differentiable.
        dropout_p: probability of dropping an attention weight in this call; pass 0 in evaluation.
        deterministic: the backward must be bitwise reproducible; ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`` and
            ``torch.use_deterministic_algorithms`` set it too.
        batch_invariant: the bits of a row of out and lse must not depend on the rest of the batch: other sequences,
            other queries of the call, keys that the row does not see. A chunked prefill, with ``causal_bottom_right``
            over all keys so far, then gives the same bits as one prefill. The backward has no such guarantee.
        backend: use only this backend; never falls back to another.
        return_lse: also return the log-sum-exp.
        host: the framework that calls; selection rules differ between hosts.
        cp_group: ranks that share the sequences (context parallelism): a ProcessGroup or a one-dimensional DeviceMesh.
            Each rank passes its own tokens, as ``mla_plugin.context_parallel.shard`` cuts them, with cu_seqlens and
            max_seqlen of whole sequences. A group of one rank is the same as None. See docs/context_parallel.md.
        cp_comm_type: ``p2p`` (ring exchange of K and V), ``all_gather`` (of K and V; also supports causal windows) or
            ``a2a`` (all-to-all exchange of heads for tokens; any mask).

    Returns:
        out, (*q.shape[:-1], head_dim_v) in q's dtype; with ``return_lse`` also lse, natural log, float32 (float64 for
        float64), [B, H, S_q] or [H, T_q], differentiable. A query that sees no key gives out 0, lse -inf and zero
        gradients; padded positions of ``thd`` are such queries.

    Raises:
        ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
        NoBackendError: no backend takes the request; the message lists every backend's reasons.
        NotImplementedError: a forward-mode derivative, a second derivative or torch.func's grad is requested.
        ContextParallelError: the ranks of cp_group call with different arguments, or one of them failed.
    """
    if type(dropout_p) is not float:
        check_number("dropout_p", dropout_p)
        dropout_p = plain_number(dropout_p)
    if type(backend) is not str and backend is not None:
        check_backend_name(backend)
    is_default = type(cp_comm_type) is str and cp_comm_type == "p2p"
    if not is_default and cp_group is None:  # with a group every rank checks it
        check_choice("cp_comm_type", cp_comm_type, COMM_TYPES)
    options = CallOptions(  # positional: takes half the time of keyword arguments
        qkv_format,
        attn_mask_type,
        window_size,
        bottom_right_diagonal,
        max_seqlen_q,
        max_seqlen_kv,
        pad_between_seqs,
        None,  # lengths_may_differ
        core_attention_bias_type,
        None,  # bias_requires_grad
        dropout_p,
        None,  # is_training
        deterministic,
        return_lse,
        host,
        False,  # partial
        batch_invariant,
    )
    is_operator, bias, is_plain = is_observed(q, k, v), core_attention_bias, False
    if is_operator or torch._C._is_any_autocast_enabled():
        q, k, v, bias = autocast(q, k, v, bias)
    elif cu_seqlens_q is cu_seqlens_kv is cu_seqlens_q_padded is cu_seqlens_kv_padded is attention_mask is bias is None:
        is_plain = window_size is None and cp_group is None and not dropout_p
    key = None
    if is_plain:
        key, known = plain_known_of(q, k, v, softmax_scale, options, backend)
        if known is not None:
            output = run_known(known, tensors_of_call(q, k, v, known.softmax_scale))
            return (output.out, output.lse) if return_lse else output.out
    lengths = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    make = AttentionTensors if is_operator else tensors_of_call
    tensors = _tensors_of(make, q, k, v, bias, softmax_scale, dropout_p, attention_mask, lengths)
    if cp_group is not None:
        from mla_plugin.context_parallel import api as context_parallel

        output = context_parallel.attention(tensors, options, backend, cp_group, cp_comm_type)
    elif is_operator:
        output = run_observed(tensors, options, backend)
    else:
        known = known_of(tensors, options, backend)
        if key is not None and plain_known_of(q, k, v, softmax_scale, options, backend)[0] == key:
            keep(key, known)  # no environment variable has changed since
        output = run_known(known, tensors)
    return (output.out, output.lse) if return_lse else output.out


def _tensors_of(
    make: Callable[..., AttentionTensors],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    softmax_scale: float | None,
    dropout_p: float,
    attention_mask: torch.Tensor | None,
    lengths: Iterable[torch.Tensor | None],
) -> AttentionTensors:
    """The call's tensors with defaults filled in: the lengths of the keys, the scale, a seed for dropout."""
    if softmax_scale is None and isinstance(q, torch.Tensor) and not q.is_nested and q.dim() and (width := q.shape[-1]):
        softmax_scale = width**-0.5
    softmax_scale = 1.0 if softmax_scale is None else plain_number(softmax_scale)
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device="cpu") if dropout_p else None
    return make(q, k, v, softmax_scale, *lengths_of_both(*lengths), attention_mask, bias, seed)


class DescribedCall(NamedTuple):
    """A call that is not run: tensors, completed options, the named backend, the group and ``cp_comm_type``."""

    tensors: AttentionTensors
    options: CallOptions
    backend: str | None
    cp_group: ProcessGroup | DeviceMesh | None
    cp_comm_type: str


def request_of_call(*tensors: torch.Tensor, **arguments: Any) -> tuple[AttentionRequest, str | None]:
    """The request of ``attention(*tensors, **arguments)`` and the backend it names; raises the same errors."""
    call = described_call(*tensors, **arguments)
    return request_of(call.tensors, call.options), call.backend


def described_call(*tensors: torch.Tensor, **arguments: Any) -> DescribedCall:
    """The call ``attention(*tensors, **arguments)``, without running it.

    Nothing is computed, drawn or copied, so meta tensors work too.

    Raises:
        ValueError, TypeError: as ``attention``.
    """
    arguments = bound_arguments(_SIGNATURE, "mla_plugin.attention", tensors, arguments)
    backend, bias_type, scale = (
        arguments.pop(name) for name in ("backend", "core_attention_bias_type", "softmax_scale")
    )
    group, way = arguments.pop("cp_group"), arguments.pop("cp_comm_type")
    check_number("dropout_p", arguments["dropout_p"])
    q, k, v, bias = (arguments.pop(name) for name in ("q", "k", "v", "core_attention_bias"))
    mask, *lengths = (arguments.pop(name) for name in ("attention_mask", *LENGTHS))
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    if group is None:
        check_choice("cp_comm_type", way, COMM_TYPES)
    q, k, v, bias = autocast(q, k, v, bias, cast=as_if_cast)
    call = _tensors_of(AttentionTensors, q, k, v, bias, scale, 0.0, mask, lengths)
    options = CallOptions(bias_type=bias_type, **arguments)
    if getattr(call.cu_seqlens_q, "is_meta", False):  # meta tensors have no addresses, by which tensors are told apart
        options = options._replace(lengths_may_differ=call.cu_seqlens_kv is not call.cu_seqlens_q)
    return DescribedCall(call, options.completed(call), backend, group, way)


_SIGNATURE = inspect.signature(attention)
