"""Random attention calls: any mask, window, layout, lengths, strides, bias and dtype, small enough for ``plain``."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest
from tests.plugins import plain

Call = tuple[AttentionRequest, AttentionTensors]
PADDED = ("padding", "padding_causal", "padding_causal_bottom_right")
ALL_DIMS = ((24, 16), (16, 24), (8, 8), (13, 7), (1, 1), (40, 8), (16, 17))
DENSE = ("no_mask", "causal", "causal_bottom_right", "arbitrary")


def _strided(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers; contiguous, or a view with gaps, swapped axes or broadcast heads."""
    kind = draw.choice(("contiguous", "gaps", "swapped", "offset", "broadcast"))
    if kind == "gaps":
        return torch.randn(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., : shape[-1]]
    if kind == "swapped":
        return torch.randn(shape[1], shape[0], *shape[2:], dtype=dtype).transpose(0, 1)
    if kind == "offset":
        return torch.randn(shape[0] + 1, *shape[1:], dtype=dtype)[1:]
    if kind == "broadcast":
        return torch.randn(*shape[:-2], 1, shape[-1], dtype=dtype).expand(shape)
    return torch.randn(shape, dtype=dtype)


def _offsets(lengths: list[int], start: int = 0) -> torch.Tensor:
    values = [start]
    for length in lengths:
        values.append(values[-1] + length)
    return torch.tensor(values, dtype=torch.int32)


def _of_padding(
    draw: random.Random, layout: str, lengths: list[int], *, has_room: bool
) -> tuple[int, torch.Tensor, torch.Tensor | None]:
    """(tokens of a row or in all, offsets, padded offsets)."""
    if layout != "thd":
        return max(lengths) + draw.choice((0, 3)), _offsets(lengths), None
    if not has_room:
        return sum(lengths) + draw.choice((0, 4)), _offsets(lengths), None
    room = [length + draw.choice((0, 0, 2, 5)) for length in lengths]
    start = draw.choice((0, 3))
    return start + sum(room) + draw.choice((0, 4)), _offsets(lengths), _offsets(room, start)


def random_call(
    seed: int, dtypes: tuple[torch.dtype, ...], largest: int = 23, dims: tuple[tuple[int, int], ...] = ALL_DIMS
) -> Call:
    """One call on the CPU, reproducible."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layout = draw.choice(("bshd", "sbhd", "bhsd", "thd"))
    mask = draw.choice(PADDED if layout == "thd" else PADDED + DENSE)
    batch = draw.randint(1, 4)
    heads_kv = draw.choice((1, 2))
    heads = heads_kv * draw.choice((1, 2, 3))
    dim_qk, dim_v = draw.choice(dims)
    dtype = draw.choice(dtypes)
    lengths = {side: [draw.randint(0, largest) for _ in range(batch)] for side in ("q", "kv")}
    if draw.random() < 0.4:
        lengths["kv"] = list(lengths["q"])
    if mask in DENSE:
        lengths = {side: [max(1, values[0])] * batch for side, values in lengths.items()}
    window = draw.choice(((-1, -1), (-1, 0), (-1, -1), (3, 2), (0, 0), (5, -1), (-1, 4), (30, 0), (2, 0)))
    if "causal" in mask:
        window = (window[0], draw.choice((-1, 0)))
    sides, offsets, starts = {}, {}, {}
    has_room = draw.random() < 0.5
    for side, values in lengths.items():
        if mask in DENSE:
            sides[side], offsets[side], starts[side] = values[0], None, None
        else:
            sides[side], offsets[side], starts[side] = _of_padding(draw, layout, values, has_room=has_room)
    is_padded = starts["q"] is not None
    bias_type = (
        draw.choice(("no_bias", "no_bias", "pre_scale_bias", "post_scale_bias")) if layout != "thd" else "no_bias"
    )
    request = AttentionRequest(
        qkv_format=layout,
        dtype=dtype,
        device_type="cpu",
        batch_size=batch,
        num_heads=heads,
        num_kv_heads=heads_kv,
        max_seqlen_q=max(lengths["q"]) if layout == "thd" else sides["q"],
        max_seqlen_kv=max(lengths["kv"]) if layout == "thd" else sides["kv"],
        head_dim_qk=dim_qk,
        head_dim_v=dim_v,
        attn_mask_type=mask,
        window_size=window,
        bottom_right_diagonal=mask.endswith("bottom_right") if "causal" in mask else draw.random() < 0.5,
        pad_between_seqs=is_padded,
        bias_type=bias_type,
        bias_requires_grad=bias_type != "no_bias" and draw.random() < 0.7,
        is_training=True,
        lengths_may_differ=mask in PADDED,
    )

    def tensor(side: str, count: int, dim: int) -> torch.Tensor:
        tokens = sides[side]
        shape = {
            "thd": (tokens, count, dim),
            "bshd": (batch, tokens, count, dim),
            "sbhd": (tokens, batch, count, dim),
            "bhsd": (batch, count, tokens, dim),
        }[layout]
        return _strided(draw, shape, dtype)

    def of_scores(make: Any) -> torch.Tensor:
        full = (batch, heads, sides["q"], sides["kv"])
        shape = tuple(size if draw.random() < 0.6 else 1 for size in full[:3]) + full[3:]
        return make(shape[draw.choice((0, 1, 2)) if shape[0] == shape[1] == 1 else 0 :])

    given = AttentionTensors(
        tensor("q", heads, dim_qk),
        tensor("kv", heads_kv, dim_qk),
        tensor("kv", heads_kv, dim_v),
        draw.choice((dim_qk**-0.5, 0.3, 1.0)),
        offsets["q"],
        offsets["kv"],
        starts["q"],
        starts["kv"],
        of_scores(lambda shape: torch.rand(shape) < 0.4) if mask == "arbitrary" else None,
        of_scores(lambda shape: torch.randn(shape).to(dtype)) if bias_type != "no_bias" else None,
    )
    return request, given


def poison_padding(call: Call, value: float, names: tuple[str, ...] = ("q", "k", "v")) -> AttentionTensors:
    """The call's tensors, contiguous, with ``value`` in every row of no sequence."""
    request, given = call
    changed = {}
    for name in names:
        x = getattr(given, name).clone(memory_format=torch.contiguous_format)
        rows = plain._rows(x, request.qkv_format)
        outside = torch.ones(rows.shape[:2], dtype=torch.bool)
        for n, queries, keys in plain.places(request, given):
            outside[n, queries if name == "q" else keys] = False
        rows[outside] = value
        changed[name] = x
    return replace(given, **changed)
