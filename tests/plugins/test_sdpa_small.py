"""Small CPU calls of unequal head dims, which plain products compute: what is taken, and both passes beside float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.plugins.sdpa import small
from tests.plugins.calls import both_passes, request, tensors

LARGE: dict[str, Any] = {  # computed sequence by sequence; of 2 bytes an element, some heads at a time
    "batch_size": 2,
    "num_heads": 5,
    "num_kv_heads": 5,
    "head_dim_qk": 192,
    "head_dim_v": 128,
    "max_seqlen_q": 200,
    "max_seqlen_kv": 200,
}
TAKEN: tuple[dict[str, Any], ...] = (
    {},
    {"batch_size": 2, "num_heads": 3, "num_kv_heads": 3},
    {"max_seqlen_q": 100, "max_seqlen_kv": 100, "batch_size": 2},
    {"max_seqlen_q": 70, "max_seqlen_kv": 131, "attn_mask_type": "causal_bottom_right", "bottom_right_diagonal": True},
    {"max_seqlen_q": 65, "max_seqlen_kv": 3, "attn_mask_type": "no_mask"},
    {"head_dim_qk": 16, "head_dim_v": 24},
    {"qkv_format": "bhsd", "batch_size": 2},
    {"qkv_format": "sbhd", "batch_size": 2},
    {"max_seqlen_q": 1, "max_seqlen_kv": 128, "attn_mask_type": "no_mask"},
    {"max_seqlen_q": 1, "max_seqlen_kv": 7, "attn_mask_type": "no_mask", "batch_size": 3},
    {"max_seqlen_q": 1, "max_seqlen_kv": 7, "attn_mask_type": "no_mask", "qkv_format": "sbhd", "batch_size": 2},
    {**LARGE},
    {**LARGE, "qkv_format": "sbhd"},
    {**LARGE, "max_seqlen_q": 90, "attn_mask_type": "causal_bottom_right", "bottom_right_diagonal": True},
    {"max_seqlen_q": 5, "max_seqlen_kv": 2001, "attn_mask_type": "causal_bottom_right", "bottom_right_diagonal": True},
)
REFUSED: tuple[dict[str, Any], ...] = (
    {"head_dim_v": 24},
    {"num_kv_heads": 1},
    {"max_seqlen_q": 63, "max_seqlen_kv": 63},
    {"max_seqlen_q": 63, "max_seqlen_kv": 127, "attn_mask_type": "no_mask"},
    {"max_seqlen_q": 1, "max_seqlen_kv": 50_000, "attn_mask_type": "no_mask", "dtype": torch.bfloat16},
    {"max_seqlen_q": 513, "max_seqlen_kv": 513},
    {"max_seqlen_q": 65},
    {"max_seqlen_kv": 65},
    {"max_seqlen_q": 65, "attn_mask_type": "causal_bottom_right", "bottom_right_diagonal": True},
)


def call_of(**changes: Any) -> AttentionRequest:
    return request(**({"num_heads": 2, "num_kv_heads": 2} | changes))


def given_of(call: AttentionRequest) -> AttentionTensors:
    torch.manual_seed(0)
    given = tensors(call)
    places = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}[call.qkv_format]
    for name in "qkv":
        vars(given)[name] = getattr(given, name).permute(places)
    return given


def exact(call: AttentionRequest, given: AttentionTensors, dout: torch.Tensor, dlse: torch.Tensor | None) -> Iterator:
    """out, lse, dq, dk and dv as plain PyTorch computes them in the tensors' dtype."""
    leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    q, k, v = (call.layout.to_bhsd(x) for x in leaves)
    scores = q @ k.transpose(-1, -2) * given.softmax_scale
    if "causal" in call.attn_mask_type:
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1), -torch.inf)
    out, lse = call.layout.from_bhsd(scores.softmax(-1) @ v), scores.logsumexp(-1)
    loss = (out * dout.to(out.dtype)).sum() + (0 if dlse is None else (lse * dlse).sum())
    yield from (out, lse, *torch.autograd.grad(loss, leaves))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passes of this route."""
    passes: list[str] = []
    for name in ("forward", "forward_of_one", "backward"):
        route = getattr(small, name)

        def counted(*arguments: Any, name: str = name, route: Any = route) -> Any:
            passes.append(name)
            return route(*arguments)

        monkeypatch.setattr(small, name, counted)
    return passes


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("changes", TAKEN, ids=str)
def test_both_passes(changes: dict[str, Any], dtype: torch.dtype, with_dlse: bool, taken: list[str]) -> None:
    call = call_of(dtype=dtype, **changes)
    given = given_of(call)
    dlse = torch.randn(call.batch_size, call.num_heads, call.max_seqlen_q).to(torch.promote_types(dtype, torch.float32))
    dlse = dlse if with_dlse else None
    torch.manual_seed(1)
    output, gradients = both_passes(call, given, dlse=dlse)
    forward = "forward_of_one" if call.max_seqlen_q == 1 else "forward"
    is_large = call.head_dim_qk == LARGE["head_dim_qk"]
    num_parts = 1 if not is_large else 2 if call.dtype.itemsize >= 4 or call.max_seqlen_q < 200 else 4
    assert taken == [forward] * num_parts + ["backward"] * num_parts
    torch.manual_seed(1)
    dout = torch.randn_like(output.out)
    wide = AttentionTensors(given.q.double(), given.k.double(), given.v.double(), given.softmax_scale)
    right = list(exact(call, wide, dout.double(), dlse))
    plain = list(exact(call, given, dout, dlse))
    found = (output.out, output.lse, gradients.dq, gradients.dk, gradients.dv)
    for x, expected, other in zip(found, right, plain, strict=True):
        assert x.shape == expected.shape
        assert x.is_contiguous()
        expected, other = expected.detach(), other.detach()
        roundings = (64 if dtype == torch.float64 else 4) * torch.finfo(dtype).eps  # nothing is more exact than float64
        budget = 2 * float((other.double() - expected).abs().max()) + roundings
        assert float((x.double() - expected).abs().max()) <= budget


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_what_it_leaves_to_the_kernel(changes: dict[str, Any], taken: list[str]) -> None:
    call = call_of(**changes)
    both_passes(call, given_of(call))
    assert taken == []


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_rows_with_scores_that_are_not_finite_are_nan(poison: float) -> None:
    call = call_of()
    given = given_of(call)
    given.q[:] = given.q.abs()
    given.k[0, 0, 0] = poison  # the first key of the first head: its first row sees nothing else
    output, _ = both_passes(call, given)
    hurt = output.out[0, :, 0].isnan().all(-1)
    assert hurt.tolist() == output.lse[0, 0].isnan().tolist()
    assert hurt.tolist() == [True] + [poison != -torch.inf] * 63
    assert output.out[0, :, 1].isfinite().all()
    assert output.lse[0, 1].isfinite().all()


def test_the_mask_is_kept_on_the_cpu() -> None:
    call = call_of()
    given = given_of(call)
    expected, _ = both_passes(call, given)
    small._above_diagonal.cache_clear()
    with torch.device("meta"):
        found, _ = both_passes(call, given)
    assert torch.equal(found.out, expected.out)
