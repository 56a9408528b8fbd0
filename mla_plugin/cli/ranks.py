"""``--cp-size`` and ``--latent`` of ``mla-plugin explain``: the requests of one rank's call, from shapes only."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.context_parallel.group import Group
from mla_plugin.context_parallel.interleave import held_tokens
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.operations.explain import (
    CallRequests,
    requests_of_attention,
    requests_of_decode,
    requests_of_latent_attention,
)


def add_arguments(group: Any, count: Any) -> None:
    """Add the flags; ``count`` parses a positive number."""
    group.add_argument("--latent", action="store_true", help="latent_attention, sized by --kv-lora-rank and --rope")
    group.add_argument("--cp-size", metavar="N", type=count, default=1, help="ranks that share the sequences")
    group.add_argument("--cp-rank", metavar="N", type=int, default=0, help="the rank to explain; 0 by default")
    group.add_argument(
        "--cp-comm-type",
        metavar="WAY",
        help="p2p (default), all_gather (default with --latent) or a2a",
    )
    group.add_argument(
        "--cp-interleave", metavar="N", type=count, default=1, help="with --decode: consecutive tokens per rank"
    )


_NOT_OF_DECODE = (
    *("head_dim_qk", "head_dim_v", "kv_heads", "format", "window", "dropout", "deterministic", "pad_between_seqs"),
    *("bias", "te_release", "latent", "cp_comm_type"),
)
_OF_DECODE = ("page_size", "contiguous", "no_host_lengths", "leftpad", "kv_cache_format", "cp_interleave")
_OF_LATENTS = ("kv_lora_rank", "rope")
_NOT_OF_LATENTS = ("dropout", "kv_heads", "batch_invariant", "bias")
_THEM = {"does": "it", "do": "them"}


def check_flags(arguments: argparse.Namespace) -> None:
    """Check that every flag given says something of the call; one without effect would explain another call.

    Raises:
        ValueError: a flag does not apply to this kind of call.
    """
    given = [name for name in vars(arguments) if getattr(arguments, name) != arguments.default_of(name)]

    def flags(names: tuple[str, ...]) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in given if name in names]

    def check_none(names: tuple[str, ...], other: str) -> None:
        if wrong := flags(names):
            verb = "does" if len(wrong) == 1 else "do"
            raise ValueError(f"{' and '.join(wrong)} {verb} not apply to {other}: leave {_THEM[verb]} out")

    def check_needed(names: tuple[str, ...], other: str) -> None:
        if wrong := flags(names):
            raise ValueError(f"{' and '.join(wrong)} without {other} would have no effect: add {other}")

    if arguments.decode:
        check_none(_NOT_OF_DECODE, "--decode")
        if arguments.mask not in ("causal", "no_mask"):
            raise ValueError(f"--mask {arguments.mask} with --decode; expected causal or no_mask")
        if arguments.contiguous:
            check_none(("page_size",), "--contiguous")
    else:
        check_needed(_OF_DECODE, "--decode")
        if arguments.latent:
            check_none(_NOT_OF_LATENTS, "--latent")
        else:
            check_needed(_OF_LATENTS, "--decode or --latent")
    if arguments.cp_size == 1:
        check_needed(("cp_comm_type", "cp_interleave"), "--cp-size")


def requests_of_rank(arguments: argparse.Namespace, whole: AttentionRequest | DecodeRequest) -> CallRequests:
    """The requests that the rank makes.

    Args:
        arguments: the flags.
        whole: the request of one process, over the whole sequences.

    Raises:
        ValueError: an argument is invalid, or the communication type does not support the call.
    """
    size, rank = arguments.cp_size, arguments.cp_rank
    if not 0 <= rank < size:
        raise ValueError(f"--cp-rank {rank} with --cp-size {size}; expected 0 to {size - 1}")
    if size == 1 and not arguments.latent:
        return CallRequests(None, (whole,), None)
    options: dict[str, Any] = {"cp_group": None if size == 1 else Group.supposed(size, rank)}
    if isinstance(whole, DecodeRequest):
        asked = _of_decode(whole, options | {"cp_interleave": arguments.cp_interleave}, arguments)
    else:
        if arguments.cp_comm_type:
            options["cp_comm_type"] = arguments.cp_comm_type
        asked = _of_attention(whole, options, arguments)
    device = {"device_type": whole.device_type, "device_index": None}
    return asked._replace(requests=tuple(request.replace(**device) for request in asked.requests))


def _meta(*shape: int, **options: Any) -> torch.Tensor:
    try:
        return torch.empty(shape, **{"dtype": torch.int32, "device": "meta", **options})
    except RuntimeError as error:
        sizes = ", ".join(str(size) for size in shape)
        raise ValueError(f"a tensor of [{sizes}] is more than PyTorch can address; expected smaller sizes") from error


def _of_attention(whole: AttentionRequest, options: dict[str, Any], arguments: argparse.Namespace) -> CallRequests:
    if whole.bias_type != "no_bias":
        raise ValueError(f"--bias {whole.bias_type} with --cp-size; expected no_bias")
    layout, batch, size = whole.layout, whole.batch_size, arguments.cp_size
    tokens = []
    for side, longest in (("q", whole.max_seqlen_q), ("kv", whole.max_seqlen_kv)):
        if longest % (2 * size) and size > 1:
            raise ValueError(f"--seqlen-{side} {longest} over {size} ranks; expected a multiple of {2 * size}")
        tokens.append(longest // size * (batch if layout.is_packed else 1))
        options[f"max_seqlen_{side}"] = longest
        if whole.has_padding:
            options[f"cu_seqlens_{side}"] = _meta(batch + 1)
            if whole.pad_between_seqs:
                options[f"cu_seqlens_{side}_padded"] = _meta(batch + 1)
    if whole.max_seqlen_q == whole.max_seqlen_kv:  # one tensor of lengths, as in self-attention
        options = {name: x for name, x in options.items() if not name.startswith("cu_seqlens_kv")}
    if whole.batch_invariant:
        options["batch_invariant"] = True
    for name in ("attn_mask_type", "qkv_format", "deterministic", "host"):
        options[name] = getattr(whole, name)
    if whole.has_sliding_window:
        options["window_size"] = whole.window_size
    like: dict[str, Any] = {"dtype": whole.dtype, "requires_grad": whole.is_training}
    q = _meta(*layout.shape(batch, whole.num_heads, tokens[0], whole.head_dim_qk), **like)
    if not arguments.latent:
        k, v = (
            _meta(*layout.shape(batch, whole.num_kv_heads, tokens[1], width), **like)
            for width in (whole.head_dim_qk, whole.head_dim_v)
        )
        return requests_of_attention(q, k, v, **options, dropout_p=whole.dropout_p)
    if arguments.rope >= whole.head_dim_qk:
        raise ValueError(f"--rope {arguments.rope} with --head-dim-qk {whole.head_dim_qk}; expected a smaller one")
    nope, rank = whole.head_dim_qk - arguments.rope, arguments.kv_lora_rank
    of_latents = LAYOUTS["bshd"] if layout.name == "bhsd" else layout
    shape = list(of_latents.shape(batch, 1, tokens[1], 1))
    del shape[of_latents.heads]
    latents = (_meta(*shape[:-1], width, **like) for width in (rank, arguments.rope))
    weights = (_meta(whole.num_heads, width, rank, **like) for width in (nope, whole.head_dim_v))
    return requests_of_latent_attention(q, *latents, *weights, **options)


def _of_decode(whole: DecodeRequest, options: dict[str, Any], arguments: argparse.Namespace) -> CallRequests:
    size, rank = arguments.cp_size, arguments.cp_rank
    batch, like = whole.batch_size, {"dtype": whole.dtype}
    held = held_tokens(whole.max_seqlen_kv, size, rank, interleave=arguments.cp_interleave)
    sequences, room = batch, held
    if whole.page_size is not None:
        pages = -(-held // whole.page_size)
        sequences, room = batch * pages, whole.page_size
        options["page_table"] = _meta(batch, pages)
    if whole.has_leftpad_kv:
        options["leftpad_kv"] = _meta(batch)
    cache = _meta(sequences, room, whole.kv_lora_rank + whole.qk_rope_head_dim, **like)
    queries = (
        _meta(batch, whole.seqlen_q, whole.num_heads, width, **like)
        for width in (whole.kv_lora_rank, whole.qk_rope_head_dim)
    )
    options |= {"seqlens_kv": _meta(batch), "causal": whole.causal, "host": whole.host, "softmax_scale": 1.0}
    options["batch_invariant"] = whole.batch_invariant
    asked = requests_of_decode(*queries, cache, **options)
    known = {"has_host_lengths": whole.has_host_lengths, "kv_cache_format": whole.kv_cache_format}
    return asked._replace(requests=tuple(request.replace(**known) for request in asked.requests))
