"""Converts a call of TransformerEngine's ``DotProductAttention.forward`` to this library's tensors and request.

Positions moved in 2.12 (``bottom_right_diagonal``) and 2.20 (``softcap``), so arguments are matched to the names of the
installed version. ``KEPT`` lists what stays with TransformerEngine whatever the variables say. The rest becomes tensors
and one request; a call that ``AttentionRequest.of`` rejects is left to TransformerEngine.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from mla_plugin.arguments.attention import LENGTHS, AttentionTensors
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.arguments.mask import ATTN_MASK_TYPES
from mla_plugin.hooks.attention import AttentionRequest

Arguments: TypeAlias = Mapping[str, Any]
"""The arguments of one call by name, with defaults filled in."""

_FORMATS = ("bshd", "sbhd", "thd")
_SIDES = ("q", "kv")
_COMM_TYPES = ("p2p", "all_gather", "a2a")
_CONTEXT_PARALLEL = "context parallelism"
_NO_WINDOW = (None, (-1, -1), (-1, 0))
"""What TransformerEngine turns into (-1, 0) under a causal mask and into (-1, -1) under any other."""

_WITHOUT_EFFECT = ("checkpoint_core_attention", "fast_zero_fill")
_READ = {
    *("query_layer", "key_layer", "value_layer", "qkv_format", "pad_between_seqs", "max_seqlen_q", "max_seqlen_kv"),
    *LENGTHS,
    *("attn_mask_type", "attention_mask", "window_size", "bottom_right_diagonal"),
    *("core_attention_bias_type", "core_attention_bias", "alibi_slopes", "inference_params", "num_splits", "softcap"),
    *("score_mod", "score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors", "qkv_layer", "kv_layer"),
    "thd_attention_policies",
}
"""Parameters that this module reads."""


class Ranks(NamedTuple):
    """The ranks that share a call's sequences.

    Attributes:
        group: more than one rank.
        size: of the group.
        comm_type: ``p2p``, ``all_gather`` or ``a2a``.
    """

    group: torch.distributed.ProcessGroup
    size: int
    comm_type: str


@dataclass(frozen=True)
class Call:
    """A call that our kernels could take.

    Attributes:
        tensors: as given; q, k and v are [B, S, H, D] (bshd), [S, B, H, D] (sbhd) or [T, H, D] (thd).
        request: made of them.
        is_self_attention: the module says so, and the longest sequences of queries and keys are equal.
        ranks: None for one process. Over several, q, k and v are this rank's tokens, offsets those of whole sequences.
    """

    tensors: AttentionTensors
    request: AttentionRequest
    is_self_attention: bool
    ranks: Ranks | None = None


class Signature:
    """Matches arguments to the parameter names of one version's forward.

    Attributes:
        is_readable: every parameter has a name; another wrapper without ``functools.wraps`` hides them.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        self.is_readable = all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        self._names = tuple(parameter.name for parameter in parameters)
        self._defaults = {p.name: None if p.default is p.empty else p.default for p in parameters}
        self._unknown = tuple(name for name in self._names if name not in (*_READ, *_WITHOUT_EFFECT))

    def bind(self, args: tuple[Any, ...], kwargs: Arguments) -> Arguments | None:
        """The arguments by name; None if they cannot be matched, or TransformerEngine rejects them with a TypeError.

        Also None if a parameter unknown to this module is used: a newer release may give it any meaning.
        """
        if not self.is_readable:
            return None
        given = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names) or kwargs.keys() & given.keys() or kwargs.keys() - self._defaults.keys():
            return None
        arguments = {**self._defaults, **given, **kwargs}
        if any(not _is_same(arguments[name], self._defaults[name]) for name in self._unknown):
            return None
        return arguments


def _is_same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and value == default)


def format_of(module: Any, arguments: Arguments) -> Any:
    """The call's qkv_format, as given or the module's."""
    return module.qkv_format if arguments["qkv_format"] is None else arguments["qkv_format"]


def _mask(module: Any, arguments: Arguments) -> Any:
    """The mask's type; spellings that TransformerEngine treats alike give the same one."""
    given = arguments["attn_mask_type"]
    if given is None:
        return module.attn_mask_type
    mask = given.replace(",", "_") if isinstance(given, str) else given
    return "padding_causal" if mask == "causal_padding" else mask


def _is_masked(module: Any, arguments: Arguments) -> bool:
    """A mask tensor: TransformerEngine's unfused attention applies it with every mask but no_mask, others with some."""
    mask = _mask(module, arguments)
    return arguments["attention_mask"] is not None or mask == "arbitrary" or mask not in ATTN_MASK_TYPES


def _is_windowed(module: Any, arguments: Arguments) -> bool:
    """TransformerEngine compares with tuples, so that it takes a list for a window, or rejects it."""
    window = module.window_size if arguments["window_size"] is None else arguments["window_size"]
    return not (window is None or isinstance(window, tuple)) or window not in _NO_WINDOW


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
    """A group of one process does not count, as in TransformerEngine."""
    if module.cp_group is None:
        return False
    groups = module.cp_group if isinstance(module.cp_group, list) else [module.cp_group]
    return any(torch.distributed.get_world_size(group) > 1 for group in groups)


def _is_exported(module: Any, arguments: Arguments) -> bool:
    from transformer_engine.pytorch.export import is_in_onnx_export_mode

    return bool(is_in_onnx_export_mode())


def _is_transformed(module: Any, arguments: Arguments) -> bool:
    """Our kernels have neither a forward-mode derivative nor rules for torch.func; plain PyTorch operations do."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


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
    ("an attention mask tensor", _is_masked),
    ("a sliding window", _is_windowed),
    (_CONTEXT_PARALLEL, _is_context_parallel),
    ("FP8", _is_fp8),
    ("ONNX export", _is_exported),
    ("torch.func and forward-mode derivatives", _is_transformed),
)
"""Calls that stay with TransformerEngine: a name, and a test on the module and the arguments."""


def kept_for(module: Any, arguments: Arguments, but: str | None = None) -> str | None:
    """Why TransformerEngine keeps the call, ignoring the reason ``but``; None if it does not."""
    return next((name for name, applies in KEPT if name != but and applies(module, arguments)), None)


def _ranks(module: Any) -> Ranks | None:
    """The module's ranks; None for one process, and where TransformerEngine has two levels of groups."""
    group, comm_type = module.cp_group, module.cp_comm_type
    if not isinstance(group, torch.distributed.ProcessGroup) or comm_type not in _COMM_TYPES:
        return None
    size = torch.distributed.get_world_size(group)
    return Ranks(group, size, comm_type) if size > 1 else None


def read(module: Any, arguments: Arguments, compares_offsets: bool, over_ranks: bool = False) -> Call | None:
    """The call as tensors and a request; None if TransformerEngine keeps it or would reject it.

    Args:
        module: the DotProductAttention.
        arguments: of its forward.
        compares_offsets: this version finds padding between sequences by the values of the offsets, not by which
            tensors were given.
        over_ranks: read calls over several ranks too.
    """
    qkv_format, mask = format_of(module, arguments), _mask(module, arguments)
    ranks = _ranks(module) if over_ranks else None
    if kept_for(module, arguments, None if ranks is None else _CONTEXT_PARALLEL) or qkv_format not in _FORMATS:
        return None
    is_packed = LAYOUTS[qkv_format].is_packed
    if is_packed != ("padding" in mask):  # thd needs lengths; in the other formats they are in a mask tensor
        return None
    tensors = AttentionTensors(
        arguments["query_layer"],
        arguments["key_layer"],
        arguments["value_layer"],
        module.unfused_attention.softmax_scale,  # the module itself has it from 2.20 on
        **({name: arguments[name] for name in LENGTHS} if is_packed else {}),
    )
    try:
        request = AttentionRequest.of(
            tensors,
            qkv_format=qkv_format,
            attn_mask_type=mask,
            bottom_right_diagonal=None if "causal" in mask else _bottom_right(module, arguments),
            max_seqlen_q=_integer(arguments["max_seqlen_q"]),
            max_seqlen_kv=_integer(arguments["max_seqlen_kv"]),
            pad_between_seqs=arguments["pad_between_seqs"] if is_packed else None,
            deterministic=module.deterministic,
            host="transformer_engine",
        )
    except (TypeError, ValueError):
        return None
    if not _fits(module, request, tensors) or _has_rows_without_keys(request):
        return None
    if is_packed:
        request, tensors = _as_found(request, tensors, arguments, compares_offsets)
    is_self = module.attention_type == "self" and request.max_seqlen_q == request.max_seqlen_kv
    return Call(tensors, request, is_self, ranks)


def _bottom_right(module: Any, arguments: Arguments) -> bool | None:
    given = arguments.get("bottom_right_diagonal")  # from 2.12 on
    return getattr(module, "bottom_right_diagonal", None) if given is None else given


def _integer(given: Any) -> int | None:
    """A length may come as a tensor of one element, as in NeMo."""
    return None if given is None else operator.index(given)


def _fits(module: Any, request: AttentionRequest, tensors: AttentionTensors) -> bool:
    """Whether TransformerEngine's assertions hold that the request does not check.

    One of them is that offsets agree with ``pad_between_seqs=False``; if not, the result depends on TransformerEngine's
    backend.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    return (
        request.num_kv_heads == module.num_gqa_groups_per_partition
        and request.head_dim_qk == module.hidden_size_per_attention_head_k
        and request.head_dim_v == module.hidden_size_per_attention_head_v
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and (request.pad_between_seqs or not tensors.pads_between_sequences)
        and request.batch_size > 0
    )


def _has_rows_without_keys(request: AttentionRequest) -> bool:
    """TransformerEngine's backends disagree about them: 0 in one, the mean of all values in another.

    In packed sequences they are 0 in all, and the lengths are not known here.
    """
    len_q, len_kv = request.max_seqlen_q, request.max_seqlen_kv
    seen = request.band.keys(slice(0, 1), request.band.offset(len_q, len_kv), len_kv)
    return not request.layout.is_packed and seen.stop <= seen.start


def _as_found(
    request: AttentionRequest, tensors: AttentionTensors, arguments: Arguments, compares_offsets: bool
) -> tuple[AttentionRequest, AttentionTensors]:
    """What TransformerEngine derives from the values of the offsets; synchronises with the device as it does."""
    pairs = [(getattr(tensors, f"cu_seqlens_{side}_padded"), getattr(tensors, f"cu_seqlens_{side}")) for side in _SIDES]
    longest = {}
    for side, (padded, offsets) in zip(_SIDES, pairs, strict=True):
        if arguments[f"max_seqlen_{side}"] is None:
            room = int((offsets if padded is None else padded).diff().max())
            longest[f"max_seqlen_{side}"] = max(0, (room + 63) // 64 * 64)
    if longest:
        request = request.replace(**longest)
    is_to_be_found = compares_offsets and arguments["pad_between_seqs"] is None and request.pad_between_seqs
    if is_to_be_found and all(torch.equal(padded[:-1], offsets[:-1]) for padded, offsets in pairs):
        request = request.replace(pad_between_seqs=False)
        tensors = replace(tensors, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None)
    return request, tensors
