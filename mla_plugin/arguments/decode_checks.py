"""Checks of a decode call; every error says what was given, what is expected and what to do.

``mla_plugin.decode`` and ``mla_plugin.kernels.mla_decode_attention`` both use them. Plain values are checked at every
call, tensors when their layout is first seen, and tensor values only where reading them does not synchronise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_plugin.arguments import cache_format
from mla_plugin.arguments.checks import DTYPES, check_softmax_scale, check_tensor, may_read
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.arguments.options import HOSTS
from mla_plugin.arguments.transforms import wants_derivative

_LAYOUTS = {
    "q_nope_abs": (4, "[B, S_q, H, R]"),
    "q_rope": (4, "[B, S_q, H, Dr]"),
    "c_kv": (3, "[B, S_kv, R], or [pages, page_size, R] with page_table"),
    "k_rope": (3, "[B, S_kv, Dr], or [pages, page_size, Dr] with page_table"),
    "page_table": (2, "[B, n]"),
    "seqlens_kv": (1, "[B]"),
    "leftpad_kv": (1, "[B]"),
}
"""Dimensions of each tensor of a call, and their meaning."""
_OPTIONAL = ("page_table", "seqlens_kv", "leftpad_kv")
NO_DERIVATIVE = (
    "decode has no derivative, and an argument requires grad or has a tangent: pass .detach(), call it under "
    "torch.no_grad(), or train with attention on expanded keys and values; torch.func's grad, vjp and jvp do not go "
    "through it"
)


def check_options(
    softmax_scale: float, causal: bool, return_lse: bool, causal_name: str = "causal", batch_invariant: bool = False
) -> None:
    """Check that the scale is a positive, finite number and that each flag is a bool, not merely truthy or falsy."""
    are_flags = type(causal) is bool and type(return_lse) is bool and type(batch_invariant) is bool
    if are_flags and type(softmax_scale) is float and 0.0 < softmax_scale < float("inf"):
        return
    check_softmax_scale(softmax_scale)
    for name, value in ((causal_name, causal), ("return_lse", return_lse), ("batch_invariant", batch_invariant)):
        if type(value) is not bool:
            raise TypeError(f"{name}={value!r} is {type(value).__name__}; expected True or False: pass bool({name})")


def check_names(host: str, backend: object) -> None:
    """Check the host and the type of the backend's name; the resolver checks that the backend is registered."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend={backend!r} is {type(backend).__name__}; expected a backend's name or None")
    if host not in HOSTS:
        raise ValueError(f"host={host!r}; expected one of {', '.join(HOSTS)}")


def check_queries(q_nope_abs: torch.Tensor) -> None:
    """Check for a tensor of four dimensions; its last one is needed to split the cache."""
    if not isinstance(q_nope_abs, torch.Tensor) or q_nope_abs.dim() != 4 or q_nope_abs.is_nested:
        check_type("q_nope_abs", q_nope_abs)
        _check_rank("q_nope_abs", q_nope_abs)


def check_no_gradient(tensors: DecodeTensors) -> None:
    """Raise if a gradient is required, or a forward-mode derivative."""
    given, scale = tensors[:4], tensors.kv_scale
    if wants_derivative(given if scale is None else (*given, scale)):
        raise NotImplementedError(NO_DERIVATIVE)


def split_cache(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], rank: int, whose: str = "of q_nope_abs"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(c_kv, k_rope) of a pair, or as views of one tensor [..., R + Dr].

    Args:
        kv_cache: the pair or the tensor.
        rank: R.
        whose: where R was taken from, for the error.
    """
    if isinstance(kv_cache, torch.Tensor):
        if kv_cache.is_nested or kv_cache.layout != torch.strided:
            check_type("kv_cache", kv_cache)
        if kv_cache.dim() != 3 or kv_cache.shape[-1] < rank:
            raise ValueError(
                f"kv_cache has shape {list(kv_cache.shape)}; one tensor is [pages, page_size, R + Dr] or [B, S_kv, "
                f"R + Dr], with R={rank} {whose}. Remove a head dimension of 1 with squeeze; a pair (c_kv, "
                "k_rope) is accepted too"
            )
        # half the time of two slices
        c_kv, k_rope = kv_cache.split_with_sizes((rank, kv_cache.shape[-1] - rank), -1)
        return c_kv, k_rope
    try:
        c_kv, k_rope = kv_cache
    except (TypeError, ValueError):
        raise TypeError(f"kv_cache is {type(kv_cache).__name__}; expected a tensor or a pair (c_kv, k_rope)") from None
    if not (isinstance(c_kv, torch.Tensor) and isinstance(k_rope, torch.Tensor)):
        raise TypeError(
            f"kv_cache is a pair of {type(c_kv).__name__} and {type(k_rope).__name__}; two tensors are needed"
        )
    return c_kv, k_rope


def check_tensors(tensors: DecodeTensors, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Check types, ranks, shapes, dtypes, strides and devices; the queries may have any strides.

    Args:
        tensors: the call.
        dtypes: the accepted ones.
    """
    named = {name: x for name in _LAYOUTS if (x := getattr(tensors, name)) is not None or name not in _OPTIONAL}
    for name, x in named.items():
        check_type(name, x)
        _check_rank(name, x)
    _check_shapes(tensors)
    _check_dtypes(tensors, dtypes)
    for name in ("c_kv", "k_rope"):
        _check_last_stride(name, named[name])
    _check_blocks(tensors)
    for name in _OPTIONAL:
        if name in named:
            _check_indices(name, named[name], tensors.q_nope_abs.shape[0])
    device = tensors.q_nope_abs.device
    if any(x.device != device for x in named.values()):
        given = ", ".join(f"{name} on {x.device}" for name, x in named.items())
        raise ValueError(f"{given}; all must be on one device: move them with .to({str(device)!r})")


def check_type(name: str, x: object) -> None:
    """Check that x is a dense tensor on one device."""
    check_tensor(name, x, _LAYOUTS[name][1] if name in _LAYOUTS else "")


def _check_rank(name: str, x: torch.Tensor) -> None:
    rank, layout = _LAYOUTS[name]
    if x.dim() != rank:
        raise ValueError(f"{name} has shape {list(x.shape)}, {x.dim()} dimensions; it must be {layout}")


def _check_shapes(tensors: DecodeTensors) -> None:
    q_nope_abs, q_rope, c_kv, k_rope = tensors[:4]
    if q_rope.shape[:-1] != q_nope_abs.shape[:-1]:
        raise ValueError(
            f"q_nope_abs {list(q_nope_abs.shape)} and q_rope {list(q_rope.shape)} differ in [B, S_q, H]; both come "
            "from the same queries"
        )
    if k_rope.shape[:-1] != c_kv.shape[:-1]:
        raise ValueError(
            f"c_kv {list(c_kv.shape)} and k_rope {list(k_rope.shape)} differ before the last dimension; both hold one "
            "row per token"
        )
    if c_kv.shape[-1] != q_nope_abs.shape[-1] or c_kv.shape[-1] == 0:
        raise ValueError(
            f"q_nope_abs has R={q_nope_abs.shape[-1]}, c_kv has R={c_kv.shape[-1]}; both must be kv_lora_rank, at "
            "least 1: multiply q_nope by W_UK first"
        )
    if q_rope.shape[-1] != k_rope.shape[-1]:
        raise ValueError(
            f"q_rope has Dr={q_rope.shape[-1]}, k_rope has Dr={k_rope.shape[-1]}; both must be qk_rope_head_dim (0 for "
            "a model without rope)"
        )


def _check_dtypes(tensors: DecodeTensors, dtypes: Sequence[torch.dtype]) -> None:
    dtype = tensors.q_nope_abs.dtype
    if tensors.kv_cache_format != cache_format.PLAIN:
        _check_quantised(tensors, dtypes)
        return
    cache_format.check_no_scale(cache_format.PLAIN, tensors.kv_scale)
    if dtype not in dtypes or any(x.dtype != dtype for x in tensors[1:4]):
        given = ", ".join(f"{name} {x.dtype}" for name, x in zip(tensors._fields, tensors[:4], strict=False))
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{given}; expected one of {accepted}, the same for all four: cast them")


def _check_quantised(tensors: DecodeTensors, dtypes: Sequence[torch.dtype]) -> None:
    """Dtypes of the queries; the cache and its scales are what ``split_quantised`` made of them."""
    q_nope_abs, q_rope, c_kv, k_rope = tensors[:4]
    kv_format, kv_scale = tensors.kv_cache_format, tensors.kv_scale
    cache_format.check_format(kv_format)
    taken = [dtype for dtype in dtypes if kv_format == cache_format.FP8 or dtype != torch.float16]
    if q_nope_abs.dtype not in taken or q_rope.dtype != q_nope_abs.dtype:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in taken)
        raise TypeError(
            f"q_nope_abs {q_nope_abs.dtype}, q_rope {q_rope.dtype}; expected one dtype for both, with "
            f"kv_cache_format={kv_format!r} one of {accepted}"
        )
    rope_dtype = torch.uint8 if kv_format == cache_format.FP8 else torch.bfloat16
    if c_kv.dtype != torch.uint8 or k_rope.dtype != rope_dtype:
        raise TypeError(
            f"c_kv {c_kv.dtype}, k_rope {k_rope.dtype}; with kv_cache_format={kv_format!r} they are torch.uint8 and "
            f"{rope_dtype}"
        )
    shape = torch.Size(()) if kv_format == cache_format.FP8 else (*c_kv.shape[:2], cache_format.SCALES)
    if kv_scale is None or kv_scale.dtype != torch.float32 or kv_scale.shape != shape:
        given = "None" if kv_scale is None else f"{kv_scale.dtype} {list(kv_scale.shape)}"
        raise ValueError(f"kv_scale is {given}; expected float32 {list(shape)} with {kv_format!r}")
    if kv_format == cache_format.FP8_DS_MLA and k_rope.shape[-1] != cache_format.ROPE:
        raise ValueError(f"k_rope has Dr={k_rope.shape[-1]}; expected {cache_format.ROPE} with {kv_format!r}")
    if kv_scale.device != q_nope_abs.device:
        raise ValueError(f"kv_scale on {kv_scale.device}, q_nope_abs on {q_nope_abs.device}; expected one device")


def _check_blocks(tensors: DecodeTensors) -> None:
    """Check the cache's first dimension: sequences, or pages with a table and lengths."""
    q_nope_abs, c_kv, batch = tensors.q_nope_abs, tensors.c_kv, tensors.q_nope_abs.shape[0]
    if tensors.page_table is None:
        if c_kv.shape[0] != batch:
            raise ValueError(
                f"c_kv {list(c_kv.shape)} has {c_kv.shape[0]} sequences, q_nope_abs {list(q_nope_abs.shape)} has "
                f"{batch}; a cache without page_table is [B, S_kv, R]; a paged one needs page_table and seqlens_kv"
            )
        return
    if tensors.seqlens_kv is None:
        raise ValueError("page_table without seqlens_kv; a paged cache needs the lengths: int32 [B]")
    if c_kv.shape[1] == 0:
        raise ValueError(f"c_kv has shape {list(c_kv.shape)}, page_size 0; a paged cache is [pages, page_size, R]")


def _check_indices(name: str, x: torch.Tensor, batch: int) -> None:
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int32: pass {name}.to(torch.int32)")
    if x.shape[0] != batch:
        raise ValueError(f"{name} has shape {list(x.shape)}; its first dimension must be B={batch}")
    _check_last_stride(name, x)


def _check_last_stride(name: str, x: torch.Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {name} has stride {x.stride(-1)}; it must be contiguous (other strides may be "
            f"anything): pass {name}.contiguous()"
        )


def check_query_strides(tensors: DecodeTensors) -> None:
    """For a backend that gets the queries unchanged: check that their last dimension is contiguous too."""
    _check_last_stride("q_nope_abs", tensors.q_nope_abs)
    _check_last_stride("q_rope", tensors.q_rope)


def check_values(tensors: DecodeTensors) -> None:
    """Check that lengths and pages fit the cache, padding and scale are not negative, if the host may read them."""
    c_kv, seqlens_kv, page_table = tensors.c_kv, tensors.seqlens_kv, tensors.page_table
    if tensors.kv_cache_format == cache_format.FP8 and tensors.kv_scale is not None and may_read(tensors.kv_scale):
        cache_format.check_scale_value(tensors.kv_scale)
    leftpad_kv = tensors.leftpad_kv
    if leftpad_kv is not None and leftpad_kv.numel() and may_read(leftpad_kv) and int(leftpad_kv.min()) < 0:
        raise ValueError(f"leftpad_kv={leftpad_kv.tolist()}; expected at least 0: the first key that is seen")
    if seqlens_kv is None or not may_read(seqlens_kv):
        return
    capacity = tensors.capacity
    lengths = seqlens_kv.tolist()
    if any(not 0 <= length <= capacity for length in lengths):
        raise ValueError(f"seqlens_kv={lengths}; the cache has room for 0 to {capacity} keys per sequence")
    if page_table is None:
        return
    pages, page_size = c_kv.shape[:2]
    for b, length in enumerate(lengths):
        used = page_table[b, : -(-length // page_size)]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < pages:
            raise ValueError(f"page_table[{b}] begins with {used.tolist()}; the cache has pages 0 to {pages - 1}")
