"""What ``kv_b_proj`` multiplies latents by, where that is known: the W_UK and W_UV of absorbed attention.

Known are a plain ``nn.Linear``, the same under PEFT's plain LoRA (W + sum of s B A, arXiv 2106.09685; B A is never
formed), and transformers' ``FP8Linear``, whose weight is dequantised at each call: a kept copy would take twice its
memory and could go stale. Anything else is run as it is, on expanded K and V.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from mla_plugin.arguments.autocast import autocast_dtype
from mla_plugin.compat.transformers.steps import Reason

_LORA = "peft.tuners.lora.layer.Linear"
_FP8 = "transformers.integrations.finegrained_fp8.FP8Linear"


class LowRank(NamedTuple):
    """An update ``scaling * up @ down`` of a weight: down [r, R], up [H (D_nope + D_v), r]."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


class Projection(NamedTuple):
    """A weight [H (D_nope + D_v), R] in the dtype that attention computes in, and what is added to it."""

    weight: torch.Tensor
    updates: tuple[LowRank, ...]

    def absorbed(self, q_nope: torch.Tensor) -> torch.Tensor:
        """q_nope [B, H, S_q, D_nope] times W_UK: [B, S_q, H, R]."""
        (_, num_heads, _, dim_nope), dtype = q_nope.shape, q_nope.dtype
        q_nope = q_nope.transpose(1, 2)
        out = _times(q_nope, _by_head(self.weight, num_heads, 0, dim_nope))
        for down, up, scaling in self.updates:
            low = _times(q_nope.to(up.dtype), _by_head(up, num_heads, 0, dim_nope))
            out = out + (low @ down) * scaling
        return out.to(dtype)

    def values(self, out: torch.Tensor, dim_nope: int, dim_v: int) -> torch.Tensor:
        """Latents [B, S_q, H, R] that attention returned, times W_UV: [B, S_q, H, D_v]."""
        num_heads, dtype = out.shape[2], out.dtype
        values = _times(out, _by_head(self.weight, num_heads, dim_nope, dim_v).transpose(1, 2))
        for down, up, scaling in self.updates:
            low = out.to(down.dtype) @ down.T
            values = values + _times(low, _by_head(up, num_heads, dim_nope, dim_v).transpose(1, 2)) * scaling
        return values.to(dtype).contiguous()


def _times(x: torch.Tensor, by_head: torch.Tensor) -> torch.Tensor:
    """x [B, S_q, H, D] times a matrix of each head, [H, D, N]; ``einsum`` takes twice the time on the host."""
    batch_size, s_q, num_heads, width = x.shape
    of_heads = x.permute(2, 0, 1, 3).reshape(num_heads, batch_size * s_q, width)
    return torch.bmm(of_heads, by_head).transpose(0, 1).view(batch_size, s_q, num_heads, -1)


def _by_head(weight: torch.Tensor, num_heads: int, first: int, count: int) -> torch.Tensor:
    """Some rows of each head's part of a weight: [H, count, columns]."""
    return weight.view(num_heads, -1, weight.shape[1]).narrow(1, first, count)


def dtype_of(query: torch.Tensor) -> torch.dtype:
    """What attention computes in."""
    return autocast_dtype(query.device.type) or query.dtype


def projection_of(module: Any, query: torch.Tensor) -> Projection:
    """Of a layer without ``obstacles``."""
    kv_b_proj, dtype = module.kv_b_proj, dtype_of(query)
    if _qualified(kv_b_proj) == _FP8 and kv_b_proj.weight.element_size() == 1:
        return Projection(_dequantised(kv_b_proj, dtype), ())
    base, adapters = _parts(kv_b_proj)
    updates = (
        LowRank(kv_b_proj.lora_A[name].weight, kv_b_proj.lora_B[name].weight, kv_b_proj.scaling[name])
        for name in adapters
    )
    return Projection(base.weight.to(dtype), tuple(updates))


def _dequantised(linear: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of an ``FP8Linear``: blocks of it, or all of it, have one scale each."""
    weight: torch.Tensor = linear.weight
    scale: torch.Tensor = linear.weight_scale_inv.float()
    for dim in range(scale.ndim):
        scale = scale.repeat_interleave(linear.block_size[dim], dim).narrow(dim, 0, weight.shape[dim])
    return (weight.float() * scale).to(dtype)


def _parts(projection: Any) -> tuple[Any, tuple[str, ...]]:
    """The linear layer, and the names of PEFT's adapters that are added to it."""
    if _qualified(projection) != _LORA:
        return projection, ()
    is_alone = projection.disable_adapters or projection.merged
    active = () if is_alone else tuple(name for name in projection.active_adapters if name in projection.lora_A)
    return projection.base_layer, active


def obstacles(module: Any, query: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor) -> Iterator[Reason]:
    """Why ``kv_b_proj`` cannot be absorbed in a call on these tensors; nothing where it can."""
    projection = module.kv_b_proj
    of_all = torch.nn.modules.module
    if of_all._global_forward_pre_hooks or of_all._global_forward_hooks:
        yield Reason(
            "all modules have a forward hook (register_module_forward_hook), which absorbing would pass by",
            "remove it while decoding",
        )
    if _qualified(projection) == _LORA:
        yield from _of_lora(projection)
        base = projection.base_layer
    else:
        base = projection
    found = next(_of_linear("kv_b_proj", base, may_be_fp8=base is projection), None)
    if found is not None:
        yield found
        return
    weight = base.weight
    if weight.device != query.device:
        yield Reason(
            f"kv_b_proj.weight is on {weight.device}, the queries are on {query.device}", "keep it where its layer is"
        )
    expected = (query.shape[1] * (module.qk_nope_head_dim + module.v_head_dim), c_kv.shape[3])
    if weight.shape != expected:
        yield Reason(
            f"kv_b_proj.weight is {list(weight.shape)}, {query.shape[1]} heads make it {list(expected)}",
            "run without tensor parallelism of this layer",
        )
    yield from _of_dtypes(query, c_kv, k_rope, weight)


def _of_dtypes(*tensors: torch.Tensor) -> Iterator[Reason]:
    """Without autocast the model itself multiplies equal dtypes alone; under it all but float64 become its dtype."""
    query = tensors[0]
    dtypes = {x.dtype for x in tensors if x.element_size() > 1}
    autocast = autocast_dtype(query.device.type)
    if torch.float64 in dtypes if autocast is not None else len(dtypes) > 1:
        yield Reason(
            f"queries, cache and kv_b_proj are {', '.join(sorted(map(str, dtypes)))}, autocast is {autocast or 'off'}",
            "load the model in one dtype, or run it under autocast and not in float64",
        )


def _of_linear(name: str, linear: Any, may_be_fp8: bool = False) -> Iterator[Reason]:
    is_fp8 = may_be_fp8 and _qualified(linear) == _FP8
    if type(linear) is not torch.nn.Linear and not is_fp8:
        yield Reason(
            f"{name} is a {_qualified(linear)}, only nn.Linear, PEFT's plain LoRA of one and FP8Linear can be absorbed",
            "merge an adapter, and keep kv_b_proj out of quantisation (modules_to_not_convert)",
        )
        return
    if is_fp8 and not linear.weight.is_floating_point():
        yield Reason(
            f"{name}.weight is {linear.weight.dtype}, two FP4 numbers in each", "keep kv_b_proj in FP8 or bf16"
        )
    if type(linear.weight) not in (torch.nn.Parameter, torch.Tensor):
        yield Reason(
            f"{name}.weight is a {_qualified(linear.weight)}, only a plain tensor can be absorbed",
            "keep kv_b_proj out of quantisation and sharding",
        )
    if linear.bias is not None:
        yield Reason(f"{name} has a bias", "none, the model has it so")
    if _has_hooks(linear) or _is_wrapped(linear, type(linear).forward):
        yield Reason(
            f"{name} has forward hooks (offloading, tensor parallelism), which absorbing would pass by",
            "remove them while decoding, or keep this layer from being offloaded",
        )


def _of_lora(projection: Any) -> Iterator[Reason]:
    if projection.merged and projection.disable_adapters:
        yield Reason(
            "kv_b_proj has adapters that are merged and disabled", "unmerge_adapter() before disable_adapter()"
        )
    if _has_hooks(projection) or "forward" in vars(projection):
        yield Reason("kv_b_proj has forward hooks (adapter_names for each row)", "set one adapter for all rows")
    for name in _parts(projection)[1]:
        if name in getattr(projection, "lora_variant", ()) or getattr(projection, "use_dora", {}).get(name, False):
            yield Reason(f"adapter {name!r} of kv_b_proj is a variant of LoRA, such as DoRA", "merge_adapter()")
        dropout = projection.lora_dropout[name]
        if not (isinstance(dropout, torch.nn.Identity) or not dropout.training or dropout.p == 0):
            yield Reason(f"adapter {name!r} of kv_b_proj drops inputs", "model.eval()")
        for part in ("lora_A", "lora_B"):
            yield from _of_linear(f"kv_b_proj.{part}", getattr(projection, part)[name])


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


def _is_wrapped(projection: torch.nn.Module, own: Any) -> bool:
    """Whether ``forward`` was replaced by one that does something else.

    Not by accelerate's for a model that ``device_map`` spreads over devices: it moves inputs to the weight, and does no
    more unless it offloads that (``accelerate.hooks``, AlignDevicesHook). Where it is removed, it leaves the plain one.
    """
    forward = vars(projection).get("forward")
    if forward is None:
        return False
    hook: Any = vars(projection).get("_hf_hook")
    only_moves = type(hook).__name__ == "AlignDevicesHook" and hook.offload is False
    if only_moves and getattr(getattr(forward, "func", None), "__module__", None) == "accelerate.hooks":
        forward = projection._old_forward
    return getattr(forward, "__func__", None) is not own


def _qualified(given: object) -> str:
    kind: Any = type(given)
    return _name_of(kind)


@functools.cache
def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
