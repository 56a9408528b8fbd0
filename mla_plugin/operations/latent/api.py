"""``mla_plugin.latent_attention``: builds the tensors and options from the arguments and runs them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mla_plugin.arguments.attention import LENGTHS, AttentionTensors, lengths_of_both
from mla_plugin.arguments.autocast import as_if_cast, autocast
from mla_plugin.arguments.checks import bound_arguments, check_tensor, plain_number
from mla_plugin.arguments.options import CallOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from mla_plugin.arguments.latent import LatentTensors
    from mla_plugin.operations.latent.call import Call


def latent_attention(
    q: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    attn_mask_type: str = "causal",
    qkv_format: str = "bshd",
    window_size: tuple[int, int] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    pad_between_seqs: bool | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
    host: str = "direct",
    cp_group: ProcessGroup | DeviceMesh | None = None,
    cp_comm_type: str = "all_gather",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over latents: K and V are expanded a few heads at a time and not saved for the backward.

    K_h = [c_kv W_UK_h^T, k_rope], V_h = c_kv W_UV_h^T, out = softmax(softmax_scale * q @ K^T + mask) @ V, per head
    (DeepSeek-V2, arXiv 2405.04434, section 2.1). Saved for the backward are q, c_kv, k_rope, out, lse and the weights;
    the backward recomputes K and V. With 128 heads of 192/128 over a latent of 512 + 64 numbers in 16 bits,
    1.1 KB per token is kept for K and V instead of 80 KB. The cost is the expansion: on an H200 2.3 ms for 32k tokens,
    and twice that for its gradients. Each group of heads runs on the backend that ``attention`` would choose for its K
    and V.

    Args:
        q: [..., H, qk_nope_head_dim + qk_rope_head_dim]; leading dimensions by ``qkv_format``: ``bshd`` [B, S_q, H, D],
            ``sbhd`` [S_q, B, H, D], ``bhsd`` [B, H, S_q, D], ``thd`` [T_q, H, D] (packed sequences). float16, bfloat16,
            float32 or float64. All tensors may have any strides.
        c_kv: [B, S_kv, R], for ``sbhd`` [S_kv, B, R], for ``thd`` [T_kv, R]; normalised, without rope. R is
            kv_lora_rank.
        k_rope: as c_kv, with qk_rope_head_dim (0 for a model without rope) in place of R; rope is applied.
        w_uk: [H, qk_nope_head_dim, R].
        w_uv: [H, head_dim_v, R]. Both are views of the up-projection: ``kv_b_proj.weight.unflatten(0, (H, -1))
            .split((qk_nope_head_dim, head_dim_v), dim=1)``.
        softmax_scale: positive; default (qk_nope_head_dim + qk_rope_head_dim) ** -0.5.
        attn_mask_type, window_size: as in ``attention``, except that ``arbitrary`` is not supported.
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded: as in ``attention``; those of keys
            describe the tokens of c_kv.
        max_seqlen_q, max_seqlen_kv, pad_between_seqs, deterministic, backend, return_lse, host: as in ``attention``.
        cp_group: ranks that share the sequences (context parallelism), as in ``attention``. Each rank passes its own
            tokens, as ``mla_plugin.context_parallel.shard`` cuts them, and the whole weights. A group of one rank is
            the same as None.
        cp_comm_type: ``all_gather`` (gathers the latents, each rank expands all heads; also supports causal windows) or
            ``a2a`` (also exchanges q and out, heads for tokens, and each rank expands its share of the heads; any
            mask). Both send 2 (R + Dr) bytes per token and rank for the keys in 16 bits, whatever H is.

    Returns:
        out, (*q.shape[:-1], head_dim_v) in q's dtype; with ``return_lse`` also lse, natural log, float32 (float64 for
        float64), [B, H, S_q] or [H, T_q]. Both are differentiable in q, c_kv, k_rope, w_uk and w_uv; gradients are
        summed over heads and tokens in float32. A query that sees no key gives out 0, lse -inf and zero gradients.
        Padding values are ignored and get zero gradients. With ``cp_group`` the gradients of q, c_kv and k_rope are
        complete for this rank's tokens. Those of w_uk and w_uv are partial sums: all-reduce them over the group, as a
        training loop does for weights over its data- and context-parallel ranks.

    Raises:
        ValueError, TypeError: an argument is invalid; the message says what was given and what is expected.
        NoBackendError: no backend takes the expanded call; the message lists every backend's reasons.
        NotImplementedError: a forward-mode derivative, a second derivative or torch.func's grad is requested.
        ContextParallelError: the ranks of cp_group call with different arguments, or one of them failed.
    """
    if cp_comm_type != "all_gather" and cp_group is None:  # with a group every rank checks it
        _check_way(cp_comm_type)
    q, c_kv, k_rope, w_uk, w_uv = autocast(q, c_kv, k_rope, w_uk, w_uv)
    tensors, options = _tensors_and_options(
        *(q, c_kv, k_rope, w_uk, w_uv, softmax_scale, backend),
        (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
        qkv_format=qkv_format,
        attn_mask_type=attn_mask_type,
        window_size=window_size,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        pad_between_seqs=pad_between_seqs,
        deterministic=deterministic,
        return_lse=return_lse,
        host=host,
    )
    out, lse = _run(tensors, options, backend, cp_group, cp_comm_type)
    return (out, lse) if return_lse else out


def _tensors_and_options(
    q: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    softmax_scale: float | None,
    backend: str | None,
    offsets: tuple[torch.Tensor | None, ...],
    **options: Any,
) -> tuple[LatentTensors, CallOptions]:
    """The call's tensors and completed options; the offsets are in the order of ``LENGTHS``."""
    from mla_plugin.arguments.latent import DIFFERENTIABLE, LatentTensors

    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend={backend!r} is {type(backend).__name__}; expected a backend's name or None")
    if softmax_scale is None:
        has_width = isinstance(q, torch.Tensor) and not q.is_nested and q.dim() > 0 and q.shape[-1] > 0
        softmax_scale = q.shape[-1] ** -0.5 if has_width else 1.0
    lengths = lengths_of_both(*offsets)
    tensors = LatentTensors(q, c_kv, k_rope, w_uk, w_uv, plain_number(softmax_scale), *lengths)
    for name in DIFFERENTIABLE:
        check_tensor(name, getattr(tensors, name))
    return tensors, _completed(tensors, CallOptions(**options))


class DescribedCall(NamedTuple):
    """A call that is not run: the call, the group and ``cp_comm_type``."""

    call: Call
    cp_group: ProcessGroup | DeviceMesh | None
    cp_comm_type: str


def described_call(*tensors: torch.Tensor, **arguments: Any) -> DescribedCall:
    """The call ``latent_attention(*tensors, **arguments)``, without running it; meta tensors work too.

    Raises:
        ValueError, TypeError: as ``latent_attention``.
    """
    from mla_plugin.operations.latent.call import Call

    arguments = bound_arguments(_SIGNATURE, "mla_plugin.latent_attention", tensors, arguments)
    group, way = arguments.pop("cp_group"), arguments.pop("cp_comm_type")
    if group is None:
        _check_way(way)
    q, c_kv, k_rope, w_uk, w_uv = (arguments.pop(name) for name in ("q", "c_kv", "k_rope", "w_uk", "w_uv"))
    q, c_kv, k_rope, w_uk, w_uv = autocast(q, c_kv, k_rope, w_uk, w_uv, cast=as_if_cast)
    scale, backend, offsets = (
        arguments.pop("softmax_scale"),
        arguments.pop("backend"),
        [arguments.pop(name) for name in LENGTHS],
    )
    if getattr(offsets[0], "is_meta", False):  # meta tensors have no addresses, by which tensors are told apart
        arguments["lengths_may_differ"] = offsets[1] is not None and offsets[1] is not offsets[0]
    of_call, options = _tensors_and_options(q, c_kv, k_rope, w_uk, w_uv, scale, backend, tuple(offsets), **arguments)
    return DescribedCall(Call(of_call, options, backend), group, way)


def _run(
    tensors: LatentTensors,
    options: CallOptions,
    backend: str | None,
    cp_group: ProcessGroup | DeviceMesh | None,
    cp_comm_type: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the call. The modules that compute are imported here because importing them takes milliseconds."""
    from mla_plugin.operations.latent.call import Call

    if cp_group is not None:
        from mla_plugin.context_parallel.group import process_group_of

        process_group = process_group_of(cp_group)
        if process_group.size() > 1:
            from mla_plugin.context_parallel.latent import operator as context_parallel

            more = (process_group.group_name, cp_comm_type)
            return context_parallel.latent_attention.run(Call(tensors, options, backend, more))
    from mla_plugin.operations.latent import operator

    return operator.latent_attention.run(Call(tensors, options, backend))


def _check_way(cp_comm_type: object) -> None:
    from mla_plugin.context_parallel.latent.run import check_way

    check_way(cp_comm_type)


def _completed(tensors: LatentTensors, options: CallOptions) -> CallOptions:
    """The options with unset values taken from the tensors; offsets as in ``attention``."""
    of_lengths = AttentionTensors(tensors.q, tensors.c_kv, tensors.k_rope, tensors.softmax_scale, **tensors.lengths)
    return options._replace(is_training=tensors.needs_gradient).completed(of_lengths)


_SIGNATURE = inspect.signature(latent_attention)
