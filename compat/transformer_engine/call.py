"""One call of TransformerEngine's ``DotProductAttention.forward``, read by name into this library's words.

Positions moved in 2.12 (``bottom_right_diagonal``) and 2.20 (``softcap``), so arguments are matched to the names of the
installed version. ``KEPT`` lists what stays with TransformerEngine whatever the variables say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from mla_plugin.hooks.attention import (
    AttentionRequest,
)

Arguments: TypeAlias = Mapping[str, Any]
"""The arguments of one call by name, those that were left out at their defaults."""

_MASKS = ("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right")
_NO_WINDOW = (None, (-1, -1), (-1, 0))
"""What TransformerEngine turns into (-1, 0) under a causal mask and into (-1, -1) under any other."""

_TOKENS = {"bshd": 1, "sbhd": 0, "thd": 0}
_BATCH = {"bshd": 0, "sbhd": 1}


@dataclass(frozen=True)
class Call:
    """A call that our kernels could take.

    Attributes:
        q, k, v: as given; [B, S, H, D] (bshd), [S, B, H, D] (sbhd) or [T, H, D] (thd).
        softmax_scale: that of the module.
        request: the call without its tensors.
        lengths: the cu_seqlens arguments of ``mla_plugin.attention``; empty but for thd.
        is_self_attention: queries and keys have the same lengths.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    request: AttentionRequest
    lengths: Mapping[str, torch.Tensor | None]
    is_self_attention: bool


class Signature:
    """Matches arguments to the parameter names of one version's forward.

    Attributes:
        is_readable: every parameter has a name; a wrapper of someone else's without ``functools.wraps`` hides them.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        self.is_readable = all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        self._names = tuple(parameter.name for parameter in parameters)
        self._defaults = {p.name: None if p.default is p.empty else p.default for p in parameters}

    def bind(self, args: tuple[Any, ...], kwargs: Arguments) -> Arguments | None:
        """The arguments by name; None where they cannot be told, or TransformerEngine rejects them with a TypeError."""
        if not self.is_readable:
            return None
        given = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names) or kwargs.keys() & given.keys() or kwargs.keys() - self._defaults.keys():
            return None
        return {**self._defaults, **given, **kwargs}


def _mask(module: Any, arguments: Arguments) -> str:
    mask = str(arguments["attn_mask_type"] or module.attn_mask_type).replace(",", "_")
    return "padding_causal" if mask == "causal_padding" else mask


def _is_windowed(module: Any, arguments: Arguments) -> bool:
    window = module.window_size if arguments["window_size"] is None else arguments["window_size"]
    return (None if window is None else tuple(window)) not in _NO_WINDOW


def _has_bias(module: Any, arguments: Arguments) -> bool:
    is_given = arguments["core_attention_bias"] is not None or arguments["alibi_slopes"] is not None
    return is_given or arguments["core_attention_bias_type"] != "no_bias"


def _is_fp8(module: Any, arguments: Arguments) -> bool:
    """Any FP8 context, also one in which attention itself would run in bfloat16: the module keeps state in it."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    is_quantized = any(
        type(arguments[name]).__module__.partition(".")[0] == "transformer_engine"
        for name in ("query_layer", "key_layer", "value_layer")
    )
    return is_quantized or FP8GlobalStateManager.is_fp8_enabled() or FP8GlobalStateManager.is_fp8_calibration()


def _is_context_parallel(module: Any, arguments: Arguments) -> bool:
    """A group of one process is none, as in TransformerEngine."""
    if module.cp_group is None:
        return False
    groups = module.cp_group if isinstance(module.cp_group, list) else [module.cp_group]
    return any(torch.distributed.get_world_size(group) > 1 for group in groups)


def _is_exported(module: Any, arguments: Arguments) -> bool:
    from transformer_engine.pytorch.export import is_in_onnx_export_mode

    return bool(is_in_onnx_export_mode())


def _has_softcap(module: Any, arguments: Arguments) -> bool:
    given = arguments.get("softcap")
    return (getattr(module, "softcap", 0.0) if given is None else given) != 0.0


def _is_given(*names: str) -> Callable[[Any, Arguments], bool]:
    return lambda module, arguments: any(arguments.get(name) is not None for name in names)


KEPT: tuple[tuple[str, Callable[[Any, Arguments], bool]], ...] = (
    ("packed qkv or kv", _is_given("qkv_layer", "kv_layer")),
    ("a KV cache (inference_params)", _is_given("inference_params")),
    ("a bias or ALiBi", _has_bias),
    ("score_mod", _is_given("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors")),
    ("softcap", _has_softcap),
    ("THD policies", _is_given("thd_attention_policies")),
    ("num_splits other than 1", lambda module, arguments: arguments["num_splits"] != 1),
    ("attention sinks", lambda module, arguments: module.softmax_type != "vanilla"),
    ("return_max_logit", lambda module, arguments: bool(module.return_max_logit)),
    ("dropout", lambda module, arguments: module.attention_dropout != 0.0),
    ("an attention mask tensor", lambda module, arguments: _mask(module, arguments) not in _MASKS),
    ("a sliding window", _is_windowed),
    ("context parallelism", _is_context_parallel),
    ("FP8", _is_fp8),
    ("ONNX export", _is_exported),
)
"""What TransformerEngine keeps: a name, and how to see it in the module and the arguments."""


def kept_for(module: Any, arguments: Arguments) -> str | None:
    """Why TransformerEngine keeps the call; None when it need not."""
    return next((name for name, applies in KEPT if applies(module, arguments)), None)


def _is_well_formed(module: Any, q: Any, k: Any, v: Any, qkv_format: str) -> bool:
    """Whether TransformerEngine's own assertions about the tensors hold; otherwise the error is its own."""
    ndim = 3 if qkv_format == "thd" else 4
    return (
        all(isinstance(x, torch.Tensor) and x.dim() == ndim for x in (q, k, v))
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and k.shape[:-1] == v.shape[:-1]
        and k.shape[-2:] == (module.num_gqa_groups_per_partition, q.shape[-1])
        and (q.shape[-1], v.shape[-1])
        == (module.hidden_size_per_attention_head_k, module.hidden_size_per_attention_head_v)
        and q.shape[-2] % k.shape[-2] == 0
        and (qkv_format == "thd" or q.shape[_BATCH[qkv_format]] == k.shape[_BATCH[qkv_format]])
    )


def read(module: Any, arguments: Arguments, compares_offsets: bool) -> Call | None:
    """The call in our words; None when TransformerEngine keeps it, or would reject it.

    Args:
        module: the DotProductAttention.
        arguments: of its forward.
        compares_offsets: this version finds padding between sequences by the values of the offsets, not by which
            tensors were given.
    """
    q, k, v = (arguments[name] for name in ("query_layer", "key_layer", "value_layer"))
    qkv_format = arguments["qkv_format"] or module.qkv_format
    if kept_for(module, arguments) or qkv_format not in _TOKENS or not _is_well_formed(module, q, k, v, qkv_format):
        return None
    mask = _mask(module, arguments)
    lengths = {name: arguments[name] for name in _LENGTHS} if qkv_format == "thd" else {}
    if qkv_format == "thd":
        if "padding" not in mask or not _are_lengths(lengths, q):
            return None
    elif "padding" in mask:  # the lengths are in a mask tensor
        return None
    longest = tuple(_longest(side, x, arguments, qkv_format) for side, x in (("q", q), ("kv", k)))
    if qkv_format != "thd" and longest != (q.shape[_TOKENS[qkv_format]], k.shape[_TOKENS[qkv_format]]):
        return None
    request = AttentionRequest(
        qkv_format=qkv_format,
        dtype=q.dtype,
        device_type=q.device.type,
        device_index=q.device.index,
        batch_size=len(lengths["cu_seqlens_q"]) - 1 if lengths else q.shape[_BATCH[qkv_format]],
        num_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        max_seqlen_q=longest[0],
        max_seqlen_kv=longest[1],
        head_dim_qk=q.shape[-1],
        head_dim_v=v.shape[-1],
        attn_mask_type=mask,
        window_size=(-1, 0 if "causal" in mask else -1),
        bottom_right_diagonal=mask not in ("causal", "padding_causal"),
        pad_between_seqs=qkv_format == "thd" and _is_padded(arguments, compares_offsets),
        is_training=torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
        deterministic=module.deterministic,
        host="transformer_engine",
    )
    scale = module.unfused_attention.softmax_scale  # the module itself has it from 2.20 on
    return Call(q, k, v, scale, request, lengths, module.attention_type == "self" and longest[0] == longest[1])


_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def _are_lengths(lengths: Mapping[str, torch.Tensor | None], q: torch.Tensor) -> bool:
    """int32 [B + 1] on q's device; the padded pair both or neither."""
    cu_q, cu_kv, *padded = (lengths[name] for name in _LENGTHS)
    if cu_q is None or cu_kv is None or (padded[0] is None) != (padded[1] is None):
        return False
    given = [x for x in (cu_q, cu_kv, *padded) if x is not None]
    return all(x.dtype == torch.int32 and x.shape == cu_q.shape and x.device == q.device for x in given) and (
        cu_q.dim() == 1 and cu_q.shape[0] > 0
    )


def _longest(side: str, x: torch.Tensor, arguments: Arguments, qkv_format: str) -> int:
    """The longest sequence, as given or as TransformerEngine finds it: for thd from the offsets, waiting for them."""
    given = arguments[f"max_seqlen_{side}"]
    if given is not None:
        return int(given)
    if qkv_format != "thd":
        return x.shape[_TOKENS[qkv_format]]
    padded = arguments[f"cu_seqlens_{side}_padded"]
    offsets = arguments[f"cu_seqlens_{side}"] if padded is None else padded
    return (int(offsets.diff().max()) + 63) // 64 * 64 if offsets.shape[0] > 1 else 0


def _is_padded(arguments: Arguments, compares_offsets: bool) -> bool:
    """TransformerEngine's default of pad_between_seqs; up to 2.17 it compares values, which waits for the device."""
    if arguments["pad_between_seqs"] is not None:
        return bool(arguments["pad_between_seqs"])
    pairs = [(arguments[f"cu_seqlens_{side}_padded"], arguments[f"cu_seqlens_{side}"]) for side in ("q", "kv")]
    if compares_offsets:
        return any(padded is not None and not torch.equal(padded[:-1], cu[:-1]) for padded, cu in pairs)
    return any(padded is not None and padded is not cu for padded, cu in pairs)
