"""The tensors of a latent attention call and their checks; the latents are expanded to K and V later."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from mla_plugin.arguments.attention import LENGTHS
from mla_plugin.arguments.checks import DTYPES, check_choice, records_gradients
from mla_plugin.arguments.layout import LAYOUTS, Layout

_TOKENS = {"bshd": "B, S", "sbhd": "S, B", "bhsd": "B, S", "thd": "T"}
"""The leading dimensions of c_kv and k_rope, which have no heads."""
DIFFERENTIABLE = ("q", "c_kv", "k_rope", "w_uk", "w_uv")


@dataclass(frozen=True)
class LatentTensors:
    """The tensors of one call.

    Attributes:
        q: [..., H, qk_nope_head_dim + qk_rope_head_dim], leading dimensions by the call's ``qkv_format``.
        c_kv: [B, S_kv, R], sbhd [S_kv, B, R], thd [T_kv, R].
        k_rope: as c_kv, with qk_rope_head_dim.
        w_uk: [H, qk_nope_head_dim, R].
        w_uv: [H, head_dim_v, R].
        softmax_scale: multiplies the scores.
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded: as in ``AttentionTensors``.
    """

    q: torch.Tensor
    c_kv: torch.Tensor
    k_rope: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    softmax_scale: float
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None

    @property
    def differentiable(self) -> tuple[torch.Tensor, ...]:
        """The differentiable tensors, in the order of ``DIFFERENTIABLE``."""
        return self.q, self.c_kv, self.k_rope, self.w_uk, self.w_uv

    @property
    def lengths(self) -> dict[str, torch.Tensor | None]:
        """The four tensors of offsets by their names."""
        return {name: getattr(self, name) for name in LENGTHS}

    @property
    def needs_gradient(self) -> bool:
        """A backward will follow."""
        return records_gradients() and any(x.requires_grad for x in self.differentiable)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Class, shape, dtype and device of each tensor, and the scale."""
        tensors = (getattr(self, field.name) for field in fields(self) if field.name != "softmax_scale")
        described = (None if x is None else (type(x), x.shape, x.dtype, x.device) for x in tensors)
        return (*described, self.softmax_scale)


class LatentSizes(NamedTuple):
    """The sizes of a checked call."""

    layout: Layout
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    head_dim_v: int
    kv_lora_rank: int

    @classmethod
    def of(cls, tensors: LatentTensors, qkv_format: str) -> LatentSizes:
        """From the shapes of a call that ``check_latent_tensors`` has passed."""
        heads, nope, rank = tensors.w_uk.shape
        return cls(LAYOUTS[qkv_format], heads, nope, tensors.k_rope.shape[-1], tensors.w_uv.shape[1], rank)

    @property
    def head_dim_qk(self) -> int:
        """The width of a head of q and of K."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def tokens_axis(self) -> int:
        """The axis of tokens of c_kv and k_rope."""
        return 1 if self.layout.batch == 0 else 0

    @property
    def numbers_per_head(self) -> int:
        """Elements of K and V per token and head."""
        return self.head_dim_qk + self.head_dim_v


def check_latent_tensors(tensors: LatentTensors, qkv_format: object, attn_mask_type: object) -> None:
    """Check that the tensors are dense and that their dtypes, devices and shapes match each other and the layout.

    Lengths and the mask are checked with K and V, as in ``attention``.

    Raises:
        ValueError, TypeError: they do not match; the message says what was given and what is expected.
    """
    check_choice("qkv_format", qkv_format, LAYOUTS)
    if attn_mask_type == "arbitrary":
        raise ValueError(
            "attn_mask_type='arbitrary'; latent_attention takes no attention_mask: use attention on K and V"
        )
    named = {name: getattr(tensors, name) for name in DIFFERENTIABLE}
    if tensors.q.dtype not in DTYPES or len({x.dtype for x in named.values()}) > 1:
        given = ", ".join(f"{name} {x.dtype}" for name, x in named.items())
        raise TypeError(f"dtypes are {given}; expected one dtype of {', '.join(map(str, DTYPES))}")
    if len({x.device for x in named.values()}) > 1:
        given = ", ".join(f"{name} {x.device}" for name, x in named.items())
        raise ValueError(f"devices are {given}; move them to one device")
    _check_latents(tensors, LAYOUTS[str(qkv_format)])
    _check_weights(tensors, LAYOUTS[str(qkv_format)])


def _check_latents(tensors: LatentTensors, layout: Layout) -> None:
    q, tokens = tensors.q, _TOKENS[layout.name]
    if q.dim() != layout.num_dims:
        raise ValueError(f"q has shape {tuple(q.shape)}; {layout.name} is {layout.axes}, {layout.num_dims} dimensions")
    for name, x, width in (("c_kv", tensors.c_kv, "kv_lora_rank"), ("k_rope", tensors.k_rope, "qk_rope_head_dim")):
        if x.dim() != layout.num_dims - 1:
            hint = "; it has no head axis: .squeeze() the one of size 1" if x.dim() == layout.num_dims else ""
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {layout.name} needs [{tokens}, {width}]{hint}")
    c_kv, k_rope = tensors.c_kv, tensors.k_rope
    if c_kv.shape[:-1] != k_rope.shape[:-1]:
        raise ValueError(
            f"c_kv has shape {tuple(c_kv.shape)} and k_rope {tuple(k_rope.shape)}; [{tokens}] must be equal"
        )
    batch = layout.pick(q.shape)[0]
    if layout.batch is not None and c_kv.shape[layout.batch] != batch:
        raise ValueError(
            f"batch size: q has {batch} and c_kv {c_kv.shape[layout.batch]}; with {layout.name} q is {layout.axes} and "
            f"c_kv [{tokens}, R]"
        )


def _check_weights(tensors: LatentTensors, layout: Layout) -> None:
    heads, head_dim_qk = layout.pick(tensors.q.shape)[1], tensors.q.shape[-1]
    rank, rope = tensors.c_kv.shape[-1], tensors.k_rope.shape[-1]
    nope = head_dim_qk - rope
    if nope < 1 or rank < 1 or heads < 1:
        raise ValueError(
            f"q has {heads} heads of width {head_dim_qk}, k_rope {rope} and c_kv {rank} columns; q's width is "
            "qk_nope_head_dim + qk_rope_head_dim, and heads, qk_nope_head_dim and kv_lora_rank are at least 1"
        )
    for name, x, width, size in (
        ("w_uk", tensors.w_uk, "qk_nope_head_dim", nope),
        ("w_uv", tensors.w_uv, "head_dim_v", None),
    ):
        has_size = x.dim() == 3 and (x.shape[1] == size if size else x.shape[1] > 0)
        if not has_size or x.shape[0] != heads or x.shape[2] != rank:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected [H, {width}, R] = ({heads}, {size or width}, {rank})"
                + _weight_hint(name, x, heads, rank)
            )


def _weight_hint(name: str, x: torch.Tensor, heads: int, rank: int) -> str:
    if x.dim() == 3 and x.shape[:2] == (heads, rank):
        return f": it looks transposed, pass {name}.transpose(1, 2)"
    if x.dim() == 2:
        return ": kv_b_proj.weight.unflatten(0, (H, -1)).split((qk_nope_head_dim, head_dim_v), dim=1) gives both"
    return ""
