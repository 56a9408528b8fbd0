"""Random latent attention calls and what they must give, in float64 by plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mla_plugin import AttentionRequest, AttentionTensors, reference
from mla_plugin.arguments.attention import LENGTHS

NAMES = ("q", "c_kv", "k_rope", "w_uk", "w_uv")


@dataclass
class LatentCall:
    """Arguments of one call.

    Attributes:
        tensors: q, c_kv, k_rope and the weight that w_uk and w_uv are views of.
        arguments: those by name.
    """

    tensors: dict[str, torch.Tensor]
    arguments: dict[str, Any] = field(default_factory=dict)

    def inputs(self, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
        """The five tensors."""
        given = self.tensors | changes
        w_uk, w_uv = views(given.pop("weight"), given["q"], given["k_rope"], self.heads)
        return {name: (given | {"w_uk": w_uk, "w_uv": w_uv})[name] for name in NAMES}

    @property
    def heads(self) -> int:
        return self.tensors["q"].shape[1 if self.arguments.get("qkv_format", "bshd") in ("bhsd", "thd") else 2]

    @property
    def head_dim_v(self) -> int:
        nope = self.tensors["q"].shape[-1] - self.tensors["k_rope"].shape[-1]
        return self.tensors["weight"].shape[0] // self.heads - nope


def views(weight: torch.Tensor, q: torch.Tensor, k_rope: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """W_UK and W_UV of kv_b_proj.weight, as a model takes them."""
    nope = q.shape[-1] - k_rope.shape[-1]
    return weight.unflatten(0, (heads, -1)).split((nope, weight.shape[0] // heads - nope), dim=1)


def draw(
    layout: str = "bshd",
    *,
    batch: int = 2,
    heads: int = 5,
    lengths: tuple[int, int] = (9, 9),
    dims: tuple[int, int, int, int] = (16, 8, 12, 20),
    dtype: torch.dtype = torch.float64,
    **arguments: Any,
) -> LatentCall:
    """A call with every tensor a view: of one another's projection, or with gaps.

    Args:
        layout: qkv_format; for thd the lengths are those of all sequences.
        batch, heads, lengths: sizes; queries and keys.
        dims: qk_nope_head_dim, qk_rope_head_dim, head_dim_v, kv_lora_rank.
        dtype: of all tensors.
        arguments: of the call.
    """
    nope, rope, dim_v, rank = dims
    s_q, s_kv = lengths
    lead = {"bshd": (batch, s_q, heads), "sbhd": (s_q, batch, heads), "bhsd": (batch, heads, s_q), "thd": (s_q, heads)}
    tokens = {"sbhd": (s_kv, batch), "thd": (s_kv,)}.get(layout, (batch, s_kv))
    latent = torch.randn(*tokens, rank + rope + 3, dtype=dtype)
    weight = torch.randn(rank, heads * (nope + dim_v), dtype=dtype).t() * rank**-0.5
    tensors = {
        "q": torch.randn(*lead[layout], 2 * (nope + rope), dtype=dtype)[..., ::2],
        "c_kv": latent[..., :rank],
        "k_rope": latent[..., rank : rank + rope],
        "weight": weight,
    }
    return LatentCall({name: x.requires_grad_() for name, x in tensors.items()}, {"qkv_format": layout, **arguments})


def expected(call: LatentCall, dout: torch.Tensor, dlse: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """out, lse and the gradient of each tensor, in float64: K and V by einsum, attention by ``reference``, autograd."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in call.tensors.items()}
    given = dict(call.arguments)
    layout = given.pop("qkv_format", "bshd")
    given = {name: value for name, value in given.items() if name not in ("return_lse", "backend")}
    inputs = call.inputs(**leaves)
    lengths = {name: x for name in LENGTHS if (x := given.pop(name, None)) is not None}
    if "cu_seqlens_q" in lengths:
        lengths.setdefault("cu_seqlens_kv", lengths["cu_seqlens_q"])
        if "cu_seqlens_q_padded" in lengths:
            lengths.setdefault("cu_seqlens_kv_padded", lengths["cu_seqlens_q_padded"])
    scale = given.pop("softmax_scale", inputs["q"].shape[-1] ** -0.5)
    k_nope = torch.einsum("...r,hdr->...hd", inputs["c_kv"], inputs["w_uk"])
    rope = inputs["k_rope"].unsqueeze(-2).expand(*k_nope.shape[:-1], -1)
    k, v = torch.cat([k_nope, rope], -1), torch.einsum("...r,hdr->...hd", inputs["c_kv"], inputs["w_uv"])
    if layout == "bhsd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    tensors = AttentionTensors(inputs["q"], k, v, scale, **lengths)
    given = {"attn_mask_type": "causal", **given}
    out = reference.attention(AttentionRequest.of(tensors, qkv_format=layout, **given), tensors)
    outputs = [out.out, out.lse] if dlse is not None else [out.out]
    weights = [dout.double(), dlse.double()] if dlse is not None else [dout.double()]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights)
    return {"out": out.out.detach(), "lse": out.lse.detach(), **dict(zip(leaves, gradients, strict=True))}
