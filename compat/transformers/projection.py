"""What ``kv_b_proj`` multiplies latents by, where that is known: the W_UK and W_UV of absorbed attention.

Known are a plain ``nn.Linear``, the same under PEFT's plain LoRA (W + sum of s B A, arXiv 2106.09685; B A is never
formed), and transformers' ``FP8Linear``, whose weight is dequantised at each call: a kept copy would take twice its
memory and could go stale. Anything else is run as it is, on expanded K and V.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.utils._device import DeviceContext

from mla_plugin.arguments.autocast import autocast_dtype
from mla_plugin.compat.transformers.steps import Reason

_modules = torch.nn.modules.module
_LORA = "peft.tuners.lora.layer.Linear"
_FORWARD = torch.nn.Linear.forward
_FP8 = "transformers.integrations.finegrained_fp8.FP8Linear"


class LowRank(NamedTuple):
    """An update ``scaling * up @ down`` of a weight: down [r, R], up [H (D_nope + D_v), r]."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


class Projection(NamedTuple):
    """A weight [H (D_nope + D_v), R] in the dtype that attention computes in, cut by its use, and what is added to it.

    Few operations: over short contexts a step takes the time that the host needs to call them.
    """

    w_uk: torch.Tensor  # [H, D_nope, R]
    w_uv: torch.Tensor  # [H, D_v, R]
    updates: tuple[LowRank, ...]

    def absorbed(self, q_nope: torch.Tensor) -> torch.Tensor:
        """q_nope [B, H, S_q, D_nope] times W_UK: [B, S_q, H, R]."""
        batch_size, num_heads, s_q, dim_nope = q_nope.shape
        is_one = batch_size * s_q == 1
        by_head = q_nope.view(num_heads, 1, dim_nope) if is_one else q_nope.transpose(0, 1).flatten(1, 2)
        out = torch.bmm(by_head, self.w_uk)
        if self.updates:
            dtype = out.dtype
            for down, up, scaling in self.updates:
                up_k, _ = _by_use(up, num_heads, dim_nope)
                out = out + (torch.bmm(by_head.to(up.dtype), up_k) @ down) * scaling
            out = out.to(dtype)
        return _by_row(out, batch_size, s_q)

    def values(self, out: torch.Tensor, batch_size: int, s_q: int) -> torch.Tensor:
        """Latents [.., .., H, R] that attention returned, B S_q rows of them, times W_UV: [B, S_q, H, D_v]."""
        num_heads, rank = out.shape[2:]
        by_head = out.view(num_heads, 1, rank) if batch_size * s_q == 1 else out.flatten(0, 1).transpose(0, 1)
        values = torch.bmm(by_head, self.w_uv.transpose(1, 2))
        if self.updates:
            dtype, dim_nope = values.dtype, self.w_uk.shape[1]
            for down, up, scaling in self.updates:
                _, up_v = _by_use(up, num_heads, dim_nope)
                low = by_head.to(down.dtype) @ down.T
                values = values + torch.bmm(low, up_v.transpose(1, 2)) * scaling
            values = values.to(dtype)
        return _by_row(values, batch_size, s_q).contiguous()


def _by_use(weight: torch.Tensor, num_heads: int, dim_nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts [H, D_nope, columns] and [H, D_v, columns] of a weight [H (D_nope + D_v), columns]."""
    of_heads = weight.view(num_heads, -1, weight.shape[1])
    w_uk, w_uv = of_heads.split_with_sizes((dim_nope, of_heads.shape[1] - dim_nope), 1)  # half the time of split
    return w_uk, w_uv


def _by_row(x: torch.Tensor, batch_size: int, s_q: int) -> torch.Tensor:
    """[H, B S_q, N] as [B, S_q, H, N]."""
    num_heads, _, width = x.shape
    if batch_size * s_q != 1:
        x = x.transpose(0, 1)
    return x.view(batch_size, s_q, num_heads, width)


def dtype_of(query: torch.Tensor) -> torch.dtype:
    """What attention computes in."""
    return autocast_dtype(query.device.type) or query.dtype


def projection_of(module: Any, num_heads: int, dtype: torch.dtype) -> Projection:
    """Of a layer without an ``obstacle``, in the dtype that attention computes in."""
    kv_b_proj = _child(module, "kv_b_proj")
    updates: tuple[LowRank, ...] = ()
    if type(kv_b_proj) is torch.nn.Linear:
        weight = _weight_of(kv_b_proj)
    elif _qualified(kv_b_proj) == _FP8 and kv_b_proj.weight.element_size() == 1:
        weight = _dequantised(kv_b_proj, dtype)
    else:
        base, adapters = _parts(kv_b_proj)
        weight = base.weight
        updates = tuple(
            LowRank(kv_b_proj.lora_A[name].weight, kv_b_proj.lora_B[name].weight, kv_b_proj.scaling[name])
            for name in adapters
        )
    if weight.dtype != dtype:
        weight = weight.to(dtype)
    return Projection(*_by_use(weight, num_heads, module.qk_nope_head_dim), updates)


def plain_weight_of(module: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight of a layer without an ``obstacle``, if it is a plain ``nn.Linear`` of this dtype."""
    kv_b_proj = _child(module, "kv_b_proj")
    if type(kv_b_proj) is not torch.nn.Linear:
        return None
    weight = _weight_of(kv_b_proj)
    return weight if weight.dtype == dtype else None


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


def obstacle(
    module: Any, dtype: torch.dtype, query: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor
) -> Reason | None:
    """Why ``kv_b_proj`` cannot be absorbed in a call on these tensors, which computes in ``dtype``; None where it can.

    Asked at every call, because a hook or an adapter may come at any time.
    """
    projection = base = _child(module, "kv_b_proj")
    if (found := _of_all_modules()) is not None:
        return found
    if type(projection) is not torch.nn.Linear and _qualified(projection) == _LORA:
        if (found := _of_lora(projection)) is not None:
            return found
        base = projection.base_layer
    if (found := _of_linear("kv_b_proj", base, may_be_fp8=base is projection)) is not None:
        return found
    weight = _weight_of(base)
    if weight.device != query.device:
        return Reason(
            f"kv_b_proj.weight is on {weight.device}, the queries are on {query.device}", "keep it where its layer is"
        )
    expected = (query.shape[1] * (module.qk_nope_head_dim + module.v_head_dim), c_kv.shape[3])
    if weight.shape != expected:
        return Reason(
            f"kv_b_proj.weight is {list(weight.shape)}, {query.shape[1]} heads make it {list(expected)}",
            "run without tensor parallelism of this layer",
        )
    if dtype == query.dtype == c_kv.dtype == k_rope.dtype == weight.dtype:
        return None
    return _of_dtypes(query, c_kv, k_rope, weight)


def _of_all_modules() -> Reason | None:
    """What changes the linear layers of a process without a trace in any of them."""
    if _modules._global_forward_pre_hooks or _modules._global_forward_hooks:
        return Reason(
            "all modules have a forward hook (register_module_forward_hook), which absorbing would pass by",
            "remove it while decoding",
        )
    if torch.compiler.is_compiling():
        return None
    if torch.nn.Linear.forward is not _FORWARD or torch.nn.functional.linear is not torch._C._nn.linear:
        return Reason(
            "torch.nn.Linear.forward or torch.nn.functional.linear was replaced, which absorbing would pass by",
            "put PyTorch's own back while decoding",
        )
    if not torch._C._is_torch_function_mode_enabled():
        return None
    for mode in torch.overrides._get_current_function_mode_stack():
        if not isinstance(mode, DeviceContext):  # of torch.device and set_default_device
            return Reason(
                f"the TorchFunctionMode {_qualified(mode)} may change what kv_b_proj gives",
                "leave it while decoding",
            )
    return None


def _of_dtypes(query: torch.Tensor, *others: torch.Tensor) -> Reason | None:
    """Without autocast the model itself multiplies equal dtypes only; under it all but float64 become its dtype."""
    dtypes = {x.dtype for x in (query, *others) if x.element_size() > 1}
    autocast = autocast_dtype(query.device.type)
    if torch.float64 in dtypes if autocast is not None else len(dtypes) > 1:
        return Reason(
            f"queries, cache and kv_b_proj are {', '.join(sorted(map(str, dtypes)))}, autocast is {autocast or 'off'}",
            "load the model in one dtype, or run it under autocast and not in float64",
        )
    return None


def _of_linear(name: str, linear: Any, may_be_fp8: bool = False) -> Reason | None:
    is_plain = type(linear) is torch.nn.Linear
    if not is_plain and not (may_be_fp8 and _qualified(linear) == _FP8):
        return Reason(
            f"{name} is a {_qualified(linear)}, only nn.Linear, PEFT's plain LoRA of one and FP8Linear can be absorbed",
            "merge an adapter, and keep kv_b_proj out of quantisation (modules_to_not_convert)",
        )
    weight = _weight_of(linear)
    if not is_plain and not weight.is_floating_point():
        return Reason(f"{name}.weight is {weight.dtype}, two FP4 numbers in each", "keep kv_b_proj in FP8 or bf16")
    if type(weight) not in (torch.nn.Parameter, torch.Tensor):
        return Reason(
            f"{name}.weight is a {_qualified(weight)}, only a plain tensor can be absorbed",
            "keep kv_b_proj out of quantisation and sharding",
        )
    if linear.bias is not None:
        return Reason(f"{name} has a bias", "none, the model has it so")
    if _has_hooks(linear) or _is_wrapped(linear, type(linear).forward):
        return Reason(
            f"{name} has forward hooks (offloading, tensor parallelism), which absorbing would pass by",
            "remove them while decoding, or keep this layer from being offloaded",
        )
    return None


def _of_lora(projection: Any) -> Reason | None:
    if projection.merged and projection.disable_adapters:
        return Reason(
            "kv_b_proj has adapters that are merged and disabled", "unmerge_adapter() before disable_adapter()"
        )
    if _has_hooks(projection) or "forward" in vars(projection):
        return Reason("kv_b_proj has forward hooks (adapter_names for each row)", "set one adapter for all rows")
    for name in _parts(projection)[1]:
        if name in getattr(projection, "lora_variant", ()) or getattr(projection, "use_dora", {}).get(name, False):
            return Reason(f"adapter {name!r} of kv_b_proj is a variant of LoRA, such as DoRA", "merge_adapter()")
        dropout = projection.lora_dropout[name]
        if not (isinstance(dropout, torch.nn.Identity) or not dropout.training or dropout.p == 0):
            return Reason(f"adapter {name!r} of kv_b_proj drops inputs", "model.eval()")
        for part in ("lora_A", "lora_B"):
            if (found := _of_linear(f"kv_b_proj.{part}", getattr(projection, part)[name])) is not None:
                return found
    return None


def _child(module: Any, name: str) -> Any:
    """A submodule; ``getattr`` takes 1.4 us, as ``nn.Module`` searches its parameters first."""
    found = module._modules.get(name)
    return getattr(module, name) if found is None else found


def _weight_of(linear: Any) -> torch.Tensor:
    found: torch.Tensor | None = linear._parameters.get("weight")
    return linear.weight if found is None else found


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
